"""What a worker's memory is used for, by name, and the release of what is not needed."""

from __future__ import annotations

import gc
import sys
import traceback
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nbdist.system.processes import trim_memory
from nbdist.wire.ops import Cleaned
from nbdist.worker.compat import accelerator
from nbdist.worker.memory import LAST_VALUE, last_errors, measure, pss_now

if TYPE_CHECKING:
    from nbdist.wire.ops import Memory
    from nbdist.worker.namespace import Context


SEARCH_SECONDS = 2.0
"""For names: of a list of a million tensors what was found until then."""


def memory(context: Context) -> Memory:
    """Measure memory, its peak since the last cell began, and what names and tracebacks hold."""
    return measure(context.shell, context.peaks, SEARCH_SECONDS)


def clean(context: Context) -> Cleaned:
    """Drop tracebacks, IPython's `Out` and `_`, last values, cycles, torch's cached GPU memory.

    And give what is free then back to the machine, pinned memory too.  For the main thread,
    while no cell runs.
    """
    before, shell = _memory(), context.shell
    context.namespace.last_values.clean()
    forget_errors(shell)
    _forget_shown(shell)
    gc.collect()
    accelerator.release_cached()
    trim_memory()
    return Cleaned(*zip(before, _memory(), strict=True))


def forget_errors(shell: Any, raised: BaseException | None = None) -> None:
    """Drop the last exception wherever Python and IPython keep it, and what its frames hold.

    What was `raised` need not have come that far: it may not have been shown.
    """
    for error in [*last_errors(shell, raised)]:
        _clear_frames(error.__traceback__)
        error.with_traceback(None)  # a class can refuse to have attributes set
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    shell.last_execution_result = None
    for shower in (shell.InteractiveTB, shell.SyntaxTB):
        shower.tb = shower.pdb = None
    shell.SyntaxTB.last_syntax_error = None


def _clear_frames(tb: TracebackType | None) -> None:
    """Drop the locals of calls that have ended, whatever else holds their frames.

    Another thread that looks at them is enough to keep them, and what IPython has made of
    them, from being collected.
    """
    for frame, _ in traceback.walk_tb(tb):
        with suppress(RuntimeError):  # it still runs
            frame.clear()
            # The copy of them that was made for one who has asked for it is renewed by asking.
            _ = frame.f_locals


def _forget_shown(shell: Any) -> None:
    """Empty `Out`, and let go of the values that cells have ended in."""
    names, shown = shell.user_ns, shell.displayhook
    names.get("_oh", {}).clear()
    for name in [name for name in [*names] if LAST_VALUE.fullmatch(name)]:
        del names[name]
        shell.user_ns_hidden.pop(name, None)
    shown._ = shown.__ = shown.___ = ""
    names.update({"_": "", "__": "", "___": ""})


def _memory() -> tuple[int, int, int]:
    """Measure the fields of `Cleaned`."""
    return pss_now(), accelerator.allocated(), accelerator.reserved()
