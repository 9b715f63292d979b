"""`breakpoint()` and all other ways into a debugger, on a rank."""

from __future__ import annotations

import bdb
import cmd
import inspect
import os
import sys
from types import FrameType
from typing import Any

from nbdist.worker.compat import debugger

LEFT = "`q` left the debugger and ended the cell on this rank"
"""What is said of BdbQuit, which has no words of its own."""


def use_debugger() -> None:
    """Have every way in lead to the notebook's input box.

    In an ipykernel `breakpoint()` does nothing once debugpy has been imported.
    """
    debugger.install()
    sys.breakpointhook = stop_at_breakpoint


def stop_at_breakpoint(*args: Any, **options: Any) -> Any:
    """Do what `breakpoint()` does: PYTHONBREAKPOINT says what that is, by default the debugger."""
    if os.environ.get("PYTHONBREAKPOINT"):
        return sys.__breakpointhook__(*args, **options)
    frame = inspect.currentframe()
    found = debugger.Debugger()
    if header := options.get("header"):
        found.message(header)
    found.set_trace(frame and frame.f_back)
    return None


def leave_debugger() -> None:
    """Have the next task run without the debugger of this one, which keeps nothing alive."""
    if debugger.Debugger.was_used:
        debugger.stop_tracing(inspect.currentframe())


def is_debugger(frame: FrameType | None) -> bool:
    """Say whether a call that reads a line is a debugger's."""
    if frame is None or frame.f_code is not cmd.Cmd.cmdloop.__code__:
        return False
    return isinstance(frame.f_locals.get("self"), bdb.Bdb)
