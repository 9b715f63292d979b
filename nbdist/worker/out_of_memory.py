"""What an error that says that memory is full says of what it is full of."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from nbdist.wire.ops import Held, Memory
from nbdist.words import size_text
from nbdist.worker.memory_use import Peaks, measure

SEARCH_SECONDS = 0.2
"""For names, while a cell waits for its end."""

MOST_SHOWN = 5

ALLOCATION_FAILED = re.compile(
    r"out of memory|not enough memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.I
)
"""What a RuntimeError of torch's says then."""


RESERVE = 16 << 20
"""Bytes of addresses, and none of memory, since nothing is written there.

They are given up while a MemoryError is accounted for: with no room at all CPython 3.11 looks for
ever for what handles it (exception_unwind of its ceval.c), which nothing interrupts.
"""

_reserved: list[mmap.mmap] = []


def reserve_addresses() -> None:
    """Set them aside, unless there is no room for that."""
    with suppress(OSError, MemoryError):
        _reserved.append(mmap.mmap(-1, RESERVE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Say whether an allocation failed, on the CPU or a GPU, or it came from such an error."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and ALLOCATION_FAILED.search(str(error)):
            return True
        error = error.__cause__
    return False


def account(shell: Any, rank: int, error: BaseException) -> list[str]:
    """Say in some lines what the memory is used for that was not enough; none for other errors."""
    if not is_out_of_memory(error):
        return []
    while _reserved:
        _reserved.pop().close()
    try:
        return account_lines(rank, measure(shell, Peaks(), SEARCH_SECONDS, error))
    except (MemoryError, OSError, RuntimeError):
        return []  # there is no room for that either
    finally:
        reserve_addresses()


def account_lines(rank: int, memory: Memory) -> list[str]:
    """Write what an error says of it: how much is used, by what, and what could be let go."""
    lines = [f"rank {rank}: {', '.join(_figures(memory))}"]
    lines += _listed(memory.held)
    if not memory.is_whole:
        lines.append("  … not everything was searched in time: `%dist_memory`")
    if memory.kept:
        size = size_text(memory.kept_size)
        lines.append(
            f"Only this traceback, or `Out`, holds {size} (`%dist_memory --free` frees it):"
        )
        lines += _listed(memory.kept)
    return lines


def _figures(memory: Memory) -> Iterable[str]:
    if gpu := memory.gpu:
        yield f"GPU {gpu.device} has {size_text(gpu.used)} of {size_text(gpu.total)} in use"
        yield f"{size_text(gpu.tensors)} of it by this rank's tensors"
    if limit := memory.limit:
        used, total = size_text(max(0, limit.limit - limit.free)), size_text(limit.limit)
        yield f"{limit.where} has {used} of {total} in use"
    yield f"this rank {size_text(memory.pss)}"


def _listed(held: Sequence[Held]) -> list[str]:
    shown = [(size_text(each.size), f"{each.name} {each.kind}") for each in held[:MOST_SHOWN]]
    width = max((len(size) for size, _ in shown), default=0)
    more = ["  …"] if len(held) > len(shown) else []
    return [*(f"  {size.rjust(width)}  {what}" for size, what in shown), *more]
