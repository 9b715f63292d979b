"""Has a worker release memory that is not needed, and what keeps tensors alive unseen."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from nbdist.wire.ops import Cleaned

if TYPE_CHECKING:
    from nbdist.worker.op import Context

LAST_VALUE = re.compile(r"_+|_\d+")
"""Names under which IPython keeps what cells have shown."""


def clean(context: Context) -> Cleaned:
    """Drop tracebacks, IPython's `Out` and `_`, cycles, torch's cached GPU memory.

    And give what is free then back to the machine, pinned memory too.  For the main thread,
    while no cell runs.
    """
    before, shell = _memory(), context.shell
    forget_errors(shell)
    _forget_shown(shell)
    gc.collect()
    if _uses_gpu():
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        # What tensors were gathered through.  Newer than some versions of torch.
        if hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()
    with suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
    return Cleaned(*zip(before, _memory(), strict=True))


def forget_errors(shell: Any, raised: BaseException | None = None) -> None:
    """Drop the last exception wherever Python and IPython keep it, and what its frames hold.

    What was `raised` need not have come that far: it may not have been shown.
    """
    known = [raised, getattr(sys, "last_value", None), getattr(sys, "last_exc", None)]
    if (result := shell.last_execution_result) is not None:
        known += [result.error_in_exec, result.error_before_exec]
    for error in {id(each): each for each in known}.values():
        for each in _with_causes(error):
            _clear_frames(each.__traceback__)
            each.with_traceback(None)  # a class can refuse to have attributes set
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    shell.last_execution_result = None
    for shower in (shell.InteractiveTB, shell.SyntaxTB):
        shower.tb = None
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


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the exception, and those that it came from or was raised among."""
    waiting, seen = [error], set()
    while waiting:
        found = waiting.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            yield found
            waiting += [found.__context__, found.__cause__]
            if isinstance(found, BaseExceptionGroup):
                waiting += found.exceptions


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
    gpu = _uses_gpu()
    on_gpu = torch.cuda.memory_allocated() if gpu else 0
    return _pss(), on_gpu, torch.cuda.memory_reserved() if gpu else 0


def _uses_gpu() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]


def _pss() -> int:
    """Read PSS in bytes from proc(5), smaps_rollup."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))
