"""What a worker's memory is used for, by name, and the release of what is not needed."""

from __future__ import annotations

import gc
import sys
import traceback
from contextlib import suppress
from typing import Any

from nbdist.system.processes import trim_memory
from nbdist.wire.ops import Cleaned, Memory
from nbdist.worker.compat import accelerator
from nbdist.worker.memory import LAST_VALUE, last_errors, measure, pss_now
from nbdist.worker.namespace import Context

SEARCH_SECONDS = 2.0  # for names: of a list of a million tensors what was found until then


def memory(context: Context) -> Memory:
    """Measure memory, its peak since the last cell began, and what names and tracebacks hold."""
    return measure(context.shell, SEARCH_SECONDS)


def clean(context: Context) -> Cleaned:
    """Drop tracebacks, IPython's `Out` and `_`, last values, cycles, torch's cached GPU memory.

    And give what is free then back to the machine, pinned memory too.
    """
    before, shell = _memory(), context.shell
    context.namespace.last_values.clean()
    forget_errors(shell)
    names, shown = shell.user_ns, shell.displayhook
    names.get("_oh", {}).clear()
    for name in [name for name in [*names] if LAST_VALUE.fullmatch(name)]:
        del names[name]
        shell.user_ns_hidden.pop(name, None)
    shown._ = shown.__ = shown.___ = ""
    shown.take()
    names.update({"_": "", "__": "", "___": ""})
    gc.collect()
    accelerator.release_cached()
    trim_memory()
    return Cleaned(*zip(before, _memory(), strict=True))


def forget_errors(shell: Any, raised: BaseException | None = None) -> None:
    """Drop the last exception wherever Python and IPython keep it, `raised`, and their frames."""
    for error in [*last_errors(shell, raised)]:
        # Locals of calls that have ended, whose frames another thread that looks at them may keep.
        for frame, _ in traceback.walk_tb(error.__traceback__):
            with suppress(RuntimeError):  # it still runs
                frame.clear()
                # The copy of them that was made for one who has asked for it is renewed by asking.
                _ = frame.f_locals
        error.with_traceback(None)  # a class can refuse to have attributes set
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    shell.last_execution_result = None
    for shower in (shell.InteractiveTB, shell.SyntaxTB):
        shower.tb = shower.pdb = None
    shell.SyntaxTB.last_syntax_error = None


def _memory() -> tuple[int, int, int]:
    """Return the fields of `Cleaned`."""
    return pss_now(), accelerator.allocated(), accelerator.reserved()
