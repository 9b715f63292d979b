"""IPython's debugger, as it is used in a rank: private names of pdb and IPython 7.34 to 9.18.

Its prompt goes to the notebook as `input()` does, since pdb reads by `input`.
"""

from __future__ import annotations

import bdb
import cmd
import inspect
import os
import pdb
import sys
from types import FrameType
from typing import Any

import torch.distributed
from IPython.core import debugger
from IPython.core.debugger import InterruptiblePdb

from nbdist.values.definitions import cell_numbers, function_name

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
# Packages whose calls come before those of a cell or script, and after its end.
AROUND = ("IPython", "ipykernel", "tornado", "asyncio", "traitlets", "zmq", "jupyter_client")
IN_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in AROUND)
RUNPY = f"{os.sep}runpy.py"

# Methods of IPython 8 that keep up to 1,024 calls with all that these hold.
CACHES = ("_cachable_skip", "_cached_one_parent_frame_debuggerskip")
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
        super().set_trace(self._entered, **options)  # type: ignore[no-untyped-call]

    def interaction(self, *args: Any, **options: Any) -> None:
        """Talk to the user, until he goes on; KeyboardInterrupt where Stop was pressed."""
        super().interaction(*args, **options)  # type: ignore[no-untyped-call]
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
        return not is_around(frame) and bool(super().stop_here(frame))  # type: ignore[no-untyped-call]

    def get_stack(self, *args: Any, **options: Any) -> tuple[Stack, int]:
        """Return the user's calls, the innermost last, and which of them is looked at."""
        stack, index = super().get_stack(*args, **options)  # type: ignore[no-untyped-call]
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
