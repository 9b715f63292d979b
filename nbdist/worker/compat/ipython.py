"""Functions and classes that use private names of IPython, ipykernel and pdb.

The files of `nbdist.worker` call them. They were tried with IPython 7.34 to 9.18 and ipykernel 6.17
to 7.4. pdb reads commands by `input()`, so the debugger's prompt is shown in the notebook like the
prompt of any `input()`.
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
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed
from ipykernel import kernelapp
from ipykernel.compiler import XCachingCompiler
from ipykernel.iostream import IOPubThread
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core import debugger
from IPython.core.debugger import InterruptiblePdb

from nbdist.system.folders import whole_file
from nbdist.values.definitions import cell_numbers, function_name
from nbdist.wire.work import CellCode

SHOW = "_showtraceback"
"""IPython's method that shows a formatted traceback; ipykernel's shell publishes the traceback."""

# Parts of a frame in a traceback of IPython 7: its first line, with the file and the call in
# colours, and the mark at the line that was running.
COLOURS = r"((?:\x1b\[[\d;]*m)*)"
TRACEBACK_FRAME = re.compile(rf"{COLOURS}([^\x1b\n]+?){COLOURS} in ([^\n]*)")
FRAME_LINE = re.compile(r"-> (\d+)")


def check() -> tuple[str, ...]:
    """Return sentences for the user, one for each private name that nbdist needs and does not find.

    Each sentence says what does not work with this version of IPython or ipykernel.
    """
    sentences = []
    if not hasattr(ZMQInteractiveShell, SHOW):
        sentences.append(
            f"IPython {version('ipython')} has no {SHOW}: a traceback of a script or an exception "
            "group is text, and `except` here does not know the class of what a rank raised."
        )
    if not hasattr(kernelapp, "IOPubThread"):
        sentences.append(
            f"ipykernel {version('ipykernel')} makes its iopub thread elsewhere: "
            "each worker listens on a port of the loopback interface."
        )
    return tuple(sentences)


def import_without_debugpy() -> None:
    """Import `ipykernel.debugger` without debugpy, which would take 70 ms and 7 MB in each worker.

    A worker imports debugpy once a front end debugs it (`nbdist.worker.debugging`).  `import
    debugpy` in a cell works as usual.
    """
    server = sys.modules.get("debugpy.server", sys)
    sys.modules["debugpy.server"] = None  # type: ignore[assignment]
    import_module("ipykernel.debugger")
    if server is sys:
        del sys.modules["debugpy.server"]
    else:
        sys.modules["debugpy.server"] = server


class _IOPubThread(IOPubThread):
    def __init__(self, socket: Any, *, pipe: bool = False, **session: Any) -> None:
        super().__init__(socket, pipe=False, **session)  # ipykernel before 7 passes no session


def publish_without_port() -> None:
    """Keep ipykernel from opening the TCP port to which child processes would send their output.

    In a worker, output goes through the agent's pipe instead. Called before ipykernel's application
    makes the iopub thread.
    """
    if hasattr(kernelapp, "IOPubThread"):
        kernelapp.IOPubThread = _IOPubThread


def reloads_modules(shell: Any) -> bool:
    """Return True if the user has turned `%autoreload` on; works with IPython 7 to 9."""
    magics = shell.magics_manager.registry.get("AutoreloadMagics")
    return bool(getattr(getattr(magics, "_reloader", None), "enabled", False))


class AnnouncesErrors(ZMQInteractiveShell):
    """IPython's shell, which publishes each traceback within the context manager `announcing`.

    A subclass defines `announcing`, for example to add fields to the message with the traceback.
    Works with IPython 7 to 9.
    """

    def announcing(
        self, kind: type[BaseException], error: BaseException
    ) -> AbstractContextManager[None]:
        """Return the context manager to enter while the traceback of `error` is shown."""
        raise NotImplementedError

    def _showtraceback(self, etype: type[BaseException], evalue: Any, stb: Any) -> None:
        with self.announcing(etype, evalue):
            super()._showtraceback(etype, evalue, stb)

    def publish_error(self, kind: Any, error: Any, lines: list[str]) -> None:
        """Publish `lines` as the exception's traceback; print them if IPython lacks `SHOW`."""
        if hasattr(ZMQInteractiveShell, SHOW):
            self._showtraceback(kind, error, lines)
        else:
            sys.stderr.write("\n".join([*lines, ""]))


class CellCompiler(XCachingCompiler):
    """Compiles the cell of a task under the file name that the notebook has chosen for it."""

    cell = CellCode()

    def get_code_name(self, raw_code: str, code: str, number: int) -> str:
        """Return the file name under which code is compiled.

        If `raw_code` is the text of the task's cell, the name is the cell's `file`. Otherwise
        ipykernel chooses the name.
        """
        if self.cell.file and raw_code == self.cell.text:
            return self.cell.file
        name: str = super().get_code_name(raw_code, code, number)
        return name


def number_cells(shell: Any) -> None:
    """Make IPython 7 keep and show the numbers of cells, as IPython 8 and later do."""
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
    """Return a frame of a traceback of IPython 7 with the first line that IPython 8 would show.

    For example, this line has `Cell In[5], line 3` in place of a file name. `part` is a part of the
    traceback; if it is no frame, it is returned unchanged. `numbers` has the number of each cell,
    by the name of the cell's file.
    """
    begins, line = TRACEBACK_FRAME.match(part), FRAME_LINE.search(part)
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


# --- jedi, by which IPython completes ---------------------------------------------------------


def prepare_jedi(completer: Any) -> None:
    """Import jedi and its modules, which takes seconds, then let IPython's completer use jedi."""
    # Older versions of jedi raise Python's limit of recursion on import: undo this for user code.
    limit = sys.getrecursionlimit()
    jedi = import_module("jedi")
    write_cache_whole(import_module("parso.cache"))
    sys.setrecursionlimit(limit)
    jedi.Interpreter("m", [{}]).complete()
    completer.use_jedi = True


def write_cache_whole(cache: Any) -> None:
    """Make parso, the parser of jedi, write each of its cache files to a temporary file first.

    The temporary file is renamed once it is complete. parso itself writes into the cache file: if
    several ranks do so at once, or if a rank is killed, the file can be damaged.
    """
    if not hasattr(cache, "_save_to_file_system") or not hasattr(cache, "_get_hashed_path"):
        return

    def save(hashed_grammar: str, path: object, item: object, cache_path: object = None) -> None:
        name = cache._get_hashed_path(hashed_grammar, path, cache_path=cache_path)
        # If the process is killed meanwhile, the temporary file stays until parso removes all
        # files that were not read for 30 days.
        with whole_file(Path(name)) as file:
            pickle.dump(item, file, pickle.HIGHEST_PROTOCOL)

    cache._save_to_file_system = save


# --- the debugger --------------------------------------------------------------------------

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
# Packages whose functions call the code of a cell or script, directly or not.
OUTER_PACKAGES = (
    "IPython",
    "ipykernel",
    "tornado",
    "asyncio",
    "traitlets",
    "zmq",
    "jupyter_client",
)
IN_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in OUTER_PACKAGES)
RUNPY = f"{os.sep}runpy.py"

# Methods by which older versions of IPython, such as 8, cache up to 1,024 frames, and so keep the
# frames' variables alive.
CACHES = ("_cachable_skip", "_cached_one_parent_frame_debuggerskip")
# The attribute in which Python 3.14 keeps the last debugger, with the frames that it has shown.
LAST = "_last_pdb_instance"
FrameStack = list[tuple[FrameType, int]]


def is_around(frame: FrameType) -> bool:
    """Return True for a frame in which the debugger never stops, as its code is not the user's.

    The code is in nbdist, a frozen module, `runpy`, or one of `OUTER_PACKAGES`.
    """
    file = frame.f_code.co_filename
    if file.startswith((PACKAGE, "<frozen ")) or file.endswith(RUNPY):
        return True
    return any(part in file for part in IN_PACKAGES)


def is_called_by_us(frame: FrameType) -> bool:
    """Return True if the function of this frame was called by nbdist or IPython."""
    before = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
    return before.startswith(PACKAGE) or IN_PACKAGES[0] in before


def is_statement(frame: FrameType) -> bool:
    """Return True for the frame of a script, or of a statement of a cell.

    IPython runs each statement of a cell separately, in a frame of its own.
    """
    return function_name(frame.f_code.co_name) == "<module>" and is_called_by_us(frame)


class Debugger(InterruptiblePdb):
    """IPython's debugger, changed for workers.

    The debugger does not stop in calls of nbdist and IPython (`is_around`). In the stack it leaves
    out such calls before and after the user's calls. Stop ends debugging and the cell.
    """

    was_used = False

    def __init__(self, *args: Any, **options: Any) -> None:
        # With `nosigint` SIGINT ends the cell. By default pdb would handle a SIGINT that comes
        # after `continue`, and return to its prompt.
        super().__init__(*args, **{"nosigint": True, **options})
        Debugger.was_used = True
        self._stopped: KeyboardInterrupt | None = None
        self._is_between = False
        self._entered: FrameType | None = None

    def set_trace(self, frame: FrameType | None = None, **options: Any) -> None:
        """Begin to debug in this frame, by default the caller's."""
        caller = inspect.currentframe()
        self._entered = frame or (caller and caller.f_back)
        super().set_trace(self._entered, **options)

    def interaction(self, *args: Any, **options: Any) -> None:
        """Prompt the user for commands until the program goes on.

        Raises KeyboardInterrupt if the user presses Stop.
        """
        super().interaction(*args, **options)
        stopped, self._stopped = self._stopped, None
        if stopped is not None:
            sys.settrace(None)
            raise KeyboardInterrupt

    def cmdloop(self, intro: Any = None) -> None:
        """Read and run the user's commands until one of them lets the program go on.

        Stop ends the loop and is recorded, so that `interaction` raises KeyboardInterrupt. With
        IPython's own method, Stop would only end the loop.
        """
        try:
            super(InterruptiblePdb, self).cmdloop(intro)
        except KeyboardInterrupt as stop:
            self._stopped = stop.with_traceback(None)

    def user_return(self, frame: FrameType, value: Any) -> None:
        """Pause where a call returns; after a statement of a cell, step to the next statement."""
        if is_statement(frame):
            self._is_between = True
            self.set_step()
        else:
            super().user_return(frame, value)
            remove_pdb_names(frame)

    def user_call(self, frame: FrameType, arguments: Any) -> None:
        """Pause at the beginning of a call, unless the call is a statement of a cell."""
        if not is_statement(frame):
            super().user_call(frame, arguments)

    def user_exception(self, frame: FrameType, info: Any) -> None:
        """Pause where an exception is raised; do not pause for a KeyboardInterrupt.

        When a statement with `await` has ended, pdb reports this as an exception in a call around
        the user's code (`is_around`). In this case step to the next statement.
        """
        if is_around(frame):
            self._is_between = True
            self.set_step()
        elif not issubclass(info[0], KeyboardInterrupt):
            super().user_exception(frame, info)
            remove_pdb_names(frame)

    def stop_here(self, frame: FrameType) -> bool:
        """Return True if a step of the debugger ends in this frame."""
        if self._is_between or (is_called_by_us(frame) and frame is not self._entered):
            # Between two statements IPython calls other code, such as callbacks of libraries. So
            # pause only at the next statement.
            if not is_statement(frame):
                return False
            self._is_between = False
        return not is_around(frame) and bool(super().stop_here(frame))

    def get_stack(self, *args: Any, **options: Any) -> tuple[FrameStack, int]:
        """Return the stack from the user's outermost to the user's innermost frame, and an index.

        The stack has (frame, line) of each call. The index is that of the frame that is shown.
        """
        stack, index = super().get_stack(*args, **options)
        # Cut off the frames before the first and after the last of the user's frames. If none is
        # the user's, keep all.
        users = [n for n, (frame, _) in enumerate(stack) if not is_around(frame)]
        first, last = (users[0], users[-1]) if users else (0, len(stack) - 1)
        return stack[first : last + 1], max(0, min(index, last) - first)

    def format_stack_entry(self, *args: Any, **options: Any) -> str:
        """Return the text for a call in a stack; a cell's file becomes `Cell In[5]`."""
        frame: FrameType = args[0][0]
        text: str = super().format_stack_entry(*args, **options)
        file = frame.f_code.co_filename
        if (number := cell_numbers().get(file)) is None:
            return text
        return text.replace(self.canonic(file), f"Cell In[{number}]")


def remove_pdb_names(frame: FrameType) -> None:
    """Remove the names `__return__` and `__exception__` that pdb has bound in a cell's frame.

    In a cell these names would become variables of the user. The frames of functions keep them.
    """
    if frame.f_locals is frame.f_globals:
        for name in ("__return__", "__exception__"):
            frame.f_globals.pop(name, None)


def leave_debugger() -> None:
    """Turn debugging off after a task, and drop frames that debuggers would keep alive."""
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
    """Start the debugger in the call that has raised `error`; return once the user has left it."""
    session = Debugger()
    session.reset()
    # A debugger that gets the exception can also show its causes, by the command `exceptions`.
    # IPython's debugger has this command from 8.15 on, and pdb from Python 3.13 on.
    knows_chains = getattr(debugger, "CHAIN_EXCEPTIONS", False) or sys.version_info >= (3, 13)
    session.interaction(None, error if knows_chains else error.__traceback__)


# --- `breakpoint()` and all other ways into a debugger, on a rank -----------------------------

DEBUGGER_LEFT = "`q` left the debugger and ended the cell on this rank"  # BdbQuit has no message


def use_debugger(stop_at: Callable[[FrameType | None], bool]) -> None:
    """Make the functions of Python, IPython and torch that start a debugger use `Debugger`.

    `breakpoint()` first calls `stop_at` with its caller's frame.  If a front end such as JupyterLab
    debugs this process, `stop_at` pauses in this frame for the front end, and returns True.  If
    `stop_at` returns False, `Debugger` is used.  Called after IPython has set its own class of
    debugger.
    """
    for module in (pdb, debugger):
        vars(module)["Pdb"] = Debugger
    pdb.set_trace = debugger.set_trace
    # torch's debugger would read from a terminal. Its class is replaced here if the class exists.
    # From torch 2.10 on, the class is made only when it is used, as a subclass of `pdb.Pdb`, which
    # is `Debugger` by then.
    if hasattr(torch.distributed, "_DistributedPdb"):
        torch.distributed._DistributedPdb = Debugger
    # `breakpoint()` calls this hook. Python's own hook would not call `stop_at`.
    sys.breakpointhook = partial(stop_at_breakpoint, stop_at)


def stop_at_breakpoint(
    stop_at: Callable[[FrameType | None], bool], *args: Any, **options: Any
) -> Any:
    """Do what `breakpoint()` does in a worker: start a debugger in the frame of its caller.

    `stop_at` gets this frame. If a front end debugs this process, `stop_at` pauses there for the
    front end, and returns True. Otherwise `Debugger` starts. If PYTHONBREAKPOINT is set, the
    function that it names is called instead, as Python does.
    """
    if os.environ.get("PYTHONBREAKPOINT"):
        return sys.__breakpointhook__(*args, **options)
    frame = inspect.currentframe()
    caller = frame and frame.f_back
    if stop_at(caller):
        return None
    session = Debugger()
    if header := options.get("header"):
        session.message(header)
    session.set_trace(caller)
    return None


def is_debugger(frame: FrameType | None) -> bool:
    """Return True if the frame that asks for a line of input is a debugger's command loop."""
    if frame is None or frame.f_code is not cmd.Cmd.cmdloop.__code__:
        return False
    return isinstance(frame.f_locals.get("self"), bdb.Bdb)
