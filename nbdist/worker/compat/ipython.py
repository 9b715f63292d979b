"""Private names of IPython and ipykernel, each as a function in our words; runs in the workers.

Tried with IPython 7.34 to 9.18 and ipykernel 6.17 to 7.4; `check` says what a version lacks.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ipykernel import kernelapp
from ipykernel.iostream import IOPubThread
from ipykernel.ipkernel import IPythonKernel
from ipykernel.zmqshell import ZMQInteractiveShell

from nbdist.system.folders import whole_file
from nbdist.values.definitions import function_name

SHOW = "_showtraceback"
"""IPython's method that is given a finished traceback; ipykernel's publishes it."""

# How IPython 7 begins a frame, the file and the call in colours, and its mark at the line.
COLOURS = r"((?:\x1b\[[\d;]*m)*)"
FRAME = re.compile(rf"{COLOURS}([^\x1b\n]+?){COLOURS} in ([^\n]*)")
FRAME_LINE = re.compile(r"-> (\d+)")
END_CHILDREN = "_progressively_terminate_all_children"


def check() -> tuple[str, ...]:
    """Return what this IPython and ipykernel lack, a sentence each with what is lost by it."""
    said = []
    if not hasattr(ZMQInteractiveShell, SHOW):
        said.append(
            f"IPython {version('ipython')} has no {SHOW}: a traceback of a script or an exception "
            "group is text, and `except` here does not know the class of what a rank raised."
        )
    if not hasattr(IPythonKernel, END_CHILDREN):
        said.append(
            f"ipykernel {version('ipykernel')} has no {END_CHILDREN}: "
            "workers whose cells left processes behind may end late."
        )
    if not hasattr(kernelapp, "IOPubThread"):
        said.append(
            f"ipykernel {version('ipykernel')} makes its iopub thread elsewhere: "
            "each worker listens on a port of the loopback interface."
        )
    return tuple(said)


def without_debugger() -> None:
    """Import ipykernel without its debugger, which takes 70 ms and 7 MB a worker.

    No front end attaches to a worker.  `import debugpy` in a cell works as ever.
    """
    wanted = sys.modules.get("debugpy.server", sys)
    sys.modules["debugpy.server"] = None  # type: ignore[assignment]
    import_module("ipykernel.debugger")
    if wanted is sys:
        del sys.modules["debugpy.server"]
    else:
        sys.modules["debugpy.server"] = wanted


class _IOPubThread(IOPubThread):
    def __init__(self, socket: Any, *, pipe: bool = False, **session: Any) -> None:
        super().__init__(socket, pipe=False, **session)  # before 7 there is no session


def publish_without_port() -> None:
    """Do without the TCP port by which children of a kernel would reach its OutStream.

    Called before the application makes its iopub thread.
    """
    if hasattr(kernelapp, "IOPubThread"):
        kernelapp.IOPubThread = _IOPubThread


class LeavesChildren(IPythonKernel):
    """A kernel that leaves its children to the agent, which ends the whole process group.

    ipykernel (6.10 and later) would wait for multiprocessing's resource tracker, which ignores
    signals and ends after us, until the agent kills all; named semaphores would be left behind.
    """

    async def _progressively_terminate_all_children(self) -> None:
        """Leave them alone; called by ipykernel when the kernel shuts down."""


def reloads_modules(shell: Any) -> bool:
    """Return True if `%autoreload` is on; for IPython 7 to 9."""
    magics = shell.magics_manager.registry.get("AutoreloadMagics")
    return bool(getattr(getattr(magics, "_reloader", None), "enabled", False))


class AnnouncesErrors(ZMQInteractiveShell):
    """A shell that enters a context around each traceback that it shows, for IPython 7 to 9."""

    def announcing(
        self, kind: type[BaseException], error: BaseException
    ) -> AbstractContextManager[None]:
        """Make that context."""
        raise NotImplementedError

    def _showtraceback(self, etype: type[BaseException], evalue: Any, stb: Any) -> None:
        with self.announcing(etype, evalue):
            super()._showtraceback(etype, evalue, stb)

    def publish_error(self, kind: Any, error: Any, lines: list[str]) -> None:
        """Show a finished traceback as that of an exception."""
        if hasattr(ZMQInteractiveShell, SHOW):
            self._showtraceback(kind, error, lines)
        else:
            sys.stderr.write("\n".join([*lines, ""]))


def number_cells(shell: Any) -> None:
    """Make IPython 7 keep the numbers of cells and show them, as IPython 8 and later do."""
    compiler, shower = shell.compile, shell.InteractiveTB
    if hasattr(compiler, "_filename_map"):
        return
    numbers: dict[str, int] = {}
    compiler._filename_map = numbers
    cache, whole = compiler.cache, shower.structured_traceback

    def cache_with_number(source: str, number: int = 0, raw_code: str | None = None) -> str:
        name: str = cache(source, number, raw_code)
        numbers[name] = number
        return name

    def structured_traceback(*args: Any, **options: Any) -> list[str]:
        return [_with_number(part, numbers) for part in whole(*args, **options)]

    compiler.cache, shower.structured_traceback = cache_with_number, structured_traceback


def _with_number(part: str, numbers: Mapping[str, int]) -> str:
    """Return a part of IPython 7's traceback, its first line as IPython 8 and later have it."""
    begins, line = FRAME.match(part), FRAME_LINE.search(part)
    if begins is None or line is None:
        return part
    colour, file, plain, call = begins.groups()
    number = numbers.get(os.path.expanduser(file))
    place = f"File {colour}{file}:{line[1]}{plain}"
    if number is not None:
        place = f"Cell {colour}In[{number}], line {line[1]}{plain}"
    name = function_name(re.sub(COLOURS, "", call))
    called = "" if name == "<module>" else f", in {call}"
    return f"{place}{called}{part[begins.end() :]}"


# --- jedi, with which IPython completes, as it has to be in a process that may be killed ------


def import_jedi() -> None:
    """Import it, if it is there, and have it write files whole."""
    # It raises the limit of recursion; users' code keeps the one it has.
    limit = sys.getrecursionlimit()
    with suppress(ImportError):
        import_module("jedi")
        write_whole(import_module("parso.cache"))
    if sys.getrecursionlimit() != limit:
        sys.setrecursionlimit(limit)


def write_whole(cache: Any) -> None:
    """Make files of parso's cache appear under their names only when they are whole."""
    if not hasattr(cache, "_save_to_file_system") or not hasattr(cache, "_get_hashed_path"):
        return

    def save(hashed_grammar: str, path: object, item: object, cache_path: object = None) -> None:
        name = cache._get_hashed_path(hashed_grammar, path, cache_path=cache_path)
        # What a killed process leaves there, parso removes with what nobody has read for 30 days.
        with whole_file(Path(name)) as file:
            pickle.dump(item, file, pickle.HIGHEST_PROTOCOL)

    cache._save_to_file_system = save
