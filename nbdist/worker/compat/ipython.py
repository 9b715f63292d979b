"""Private names of IPython, ipykernel and pdb, each as a function in our words; in the workers.

Tried with IPython 7.34 to 9.18 and ipykernel 6.17 to 7.4; `check` says what a version lacks.  The
prompt of the debugger goes to the notebook as `input()` does, since pdb reads by `input`.
"""

from __future__ import annotations

import bdb
import cmd
import inspect
import os
import pdb
import pickle
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed
from ipykernel import kernelapp
from ipykernel.iostream import IOPubThread
from ipykernel.ipkernel import IPythonKernel
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core import debugger
from IPython.core.debugger import InterruptiblePdb

from nbdist.system.folders import whole_file
from nbdist.values.definitions import cell_numbers, function_name

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


def prepare_jedi(completer: Any) -> None:
    """Have IPython's completer use jedi once that has read what it needs, which takes seconds."""
    # It raises the limit of recursion; users' code keeps the one it has.
    limit = sys.getrecursionlimit()
    jedi = import_module("jedi")
    write_whole(import_module("parso.cache"))
    sys.setrecursionlimit(limit)
    jedi.Interpreter("m", [{}]).complete()
    completer.use_jedi = True


def write_whole(cache: Any) -> None:
    """Make files of parso's cache appear under their names only when they are whole."""
    if not hasattr(cache, "_save_to_file_system") or not hasattr(cache, "_get_hashed_path"):
        return

    def save(hashed_grammar: str, path: object, item: object, cache_path: object = None) -> None:
        name = cache._get_hashed_path(hashed_grammar, path, cache_path=cache_path)
        # What a killed process leaves there, parso removes with what was not read for 30 days.
        with whole_file(Path(name)) as file:
            pickle.dump(item, file, pickle.HIGHEST_PROTOCOL)

    cache._save_to_file_system = save


# --- the debugger --------------------------------------------------------------------------

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
# Packages whose calls come before those of a cell or script, and after its end.
AROUND = ("IPython", "ipykernel", "tornado", "asyncio", "traitlets", "zmq", "jupyter_client")
IN_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in AROUND)
RUNPY = f"{os.sep}runpy.py"

# Methods of IPython 8 that keep up to 1,024 calls with all that these hold.
CACHES = ("_cachable_skip", "_cached_one_parent_frame_debuggerskip")
LAST = "_last_pdb_instance"  # which Python 3.14 keeps, with the calls that it has shown
Stack = list[tuple[FrameType, int]]


def is_around(frame: FrameType) -> bool:
    """Return True if a call is not the user's, but nbdist's own or IPython's."""
    file = frame.f_code.co_filename
    if file.startswith((PACKAGE, "<frozen ")) or file.endswith(RUNPY):
        return True
    return any(part in file for part in IN_PACKAGES)


def is_called_by_us(frame: FrameType) -> bool:
    """Return True if nbdist or IPython has made this call."""
    before = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
    return before.startswith(PACKAGE) or IN_PACKAGES[0] in before


def is_statement(frame: FrameType) -> bool:
    """Return True if it is a statement of a cell, which IPython runs by itself, or a script."""
    return function_name(frame.f_code.co_name) == "<module>" and is_called_by_us(frame)


class Debugger(InterruptiblePdb):
    """IPython's, which shows and steps through the user's calls alone, and lets Stop through."""

    was_used = False

    def __init__(self, *args: Any, **options: Any) -> None:
        # After `continue` pdb would have Stop come back into the debugger.
        super().__init__(*args, **{"nosigint": True, **options})
        Debugger.was_used = True
        self._stopped: KeyboardInterrupt | None = None
        self._is_between = False
        self._entered: FrameType | None = None

    def set_trace(self, frame: FrameType | None = None, **options: Any) -> None:
        """Follow what runs from this call, or the caller's, on."""
        caller = inspect.currentframe()
        self._entered = frame or (caller and caller.f_back)
        super().set_trace(self._entered, **options)

    def interaction(self, *args: Any, **options: Any) -> None:
        """Talk to the user, until he goes on; KeyboardInterrupt where Stop was pressed."""
        super().interaction(*args, **options)
        stopped, self._stopped = self._stopped, None
        if stopped is not None:
            sys.settrace(None)
            raise KeyboardInterrupt

    def cmdloop(self, intro: Any = None) -> None:
        """Read and do commands; IPython's own would go on with the program after Stop."""
        try:
            super(InterruptiblePdb, self).cmdloop(intro)
        except KeyboardInterrupt as stop:
            self._stopped = stop.with_traceback(None)

    def user_return(self, frame: FrameType, value: Any) -> None:
        """Stop at the end of a call; after a statement of a cell, at the cell's next statement."""
        if is_statement(frame):
            self._is_between = True
            self.set_step()
        else:
            super().user_return(frame, value)
            forget_in(frame)

    def user_call(self, frame: FrameType, arguments: Any) -> None:
        """Stop at the beginning of a call, but not at that of a statement of a cell."""
        if not is_statement(frame):
            super().user_call(frame, arguments)

    def user_exception(self, frame: FrameType, info: Any) -> None:
        """Stop where one is raised, but for Stop's, and for the end of a statement that awaits."""
        if is_around(frame):
            self._is_between = True
            self.set_step()
        elif not issubclass(info[0], KeyboardInterrupt):
            super().user_exception(frame, info)
            forget_in(frame)

    def stop_here(self, frame: FrameType) -> bool:
        """Return True if stepping ends in this call."""
        if self._is_between or (is_called_by_us(frame) and frame is not self._entered):
            # What IPython calls for a cell, also between its statements, may be anybody's.
            if not is_statement(frame):
                return False
            self._is_between = False
        return not is_around(frame) and bool(super().stop_here(frame))

    def get_stack(self, *args: Any, **options: Any) -> tuple[Stack, int]:
        """Return the user's calls, the innermost last, and which of them is looked at."""
        stack, index = super().get_stack(*args, **options)
        # All but what is around them at both ends; else all.
        users = [n for n, (frame, _) in enumerate(stack) if not is_around(frame)]
        first, last = (users[0], users[-1]) if users else (0, len(stack) - 1)
        return stack[first : last + 1], max(0, min(index, last) - first)

    def format_stack_entry(self, *args: Any, **options: Any) -> str:
        """Write where a call is: `Cell In[5](3)` for a cell, whose file people do not know."""
        frame: FrameType = args[0][0]
        text: str = super().format_stack_entry(*args, **options)
        file = frame.f_code.co_filename
        if (number := cell_numbers().get(file)) is None:
            return text
        return text.replace(self.canonic(file), f"Cell In[{number}]")


def forget_in(frame: FrameType) -> None:
    """Remove from a cell's names what pdb has bound there to show it."""
    if frame.f_locals is frame.f_globals:
        for name in ("__return__", "__exception__"):
            frame.f_globals.pop(name, None)


def leave_debugger() -> None:
    """Let the next task run without the debugger of this one, which then keeps nothing alive."""
    if not Debugger.was_used:
        return
    Debugger.was_used = False
    for name in CACHES:
        if hasattr(getattr(Debugger, name, None), "cache_clear"):
            getattr(Debugger, name).cache_clear()
    if hasattr(Debugger, LAST):
        setattr(Debugger, LAST, None)
    if isinstance(getattr(sys.gettrace(), "__self__", None), bdb.Bdb):
        sys.settrace(None)
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(getattr(frame.f_trace, "__self__", None), bdb.Bdb):
            frame.f_trace = None
        frame = frame.f_back


def post_mortem(error: BaseException) -> None:
    """Debug where an exception came from; pdb's `exceptions`, if it has that, those before it."""
    found = Debugger()
    found.reset()
    # IPython's own (8.15 and later) until Python 3.13 has it.
    knows_chains = getattr(debugger, "CHAIN_EXCEPTIONS", False) or sys.version_info >= (3, 13)
    found.interaction(None, error if knows_chains else error.__traceback__)


# --- `breakpoint()` and all other ways into a debugger, on a rank -----------------------------

LEFT = "`q` left the debugger and ended the cell on this rank"  # BdbQuit has no words of its own


def use_debugger() -> None:
    """Make every way into a debugger lead to this one, after IPython has put its own there."""
    for module in (pdb, debugger):
        vars(module)["Pdb"] = Debugger
    pdb.set_trace = debugger.set_trace
    # `torch.distributed.breakpoint`'s own would read a terminal; torch before 2.10 makes it early.
    if hasattr(torch.distributed, "_DistributedPdb"):
        torch.distributed._DistributedPdb = Debugger
    # In an ipykernel `breakpoint()` does nothing once debugpy has been imported.
    sys.breakpointhook = stop_at_breakpoint


def stop_at_breakpoint(*args: Any, **options: Any) -> Any:
    """Do what PYTHONBREAKPOINT says, by default debug."""
    if os.environ.get("PYTHONBREAKPOINT"):
        return sys.__breakpointhook__(*args, **options)
    frame = inspect.currentframe()
    found = Debugger()
    if header := options.get("header"):
        found.message(header)
    found.set_trace(frame and frame.f_back)
    return None


def is_debugger(frame: FrameType | None) -> bool:
    """Return True if a call that reads a line is a debugger's."""
    if frame is None or frame.f_code is not cmd.Cmd.cmdloop.__code__:
        return False
    return isinstance(frame.f_locals.get("self"), bdb.Bdb)
