"""What a rank's memory is used for, and how much there is."""

from __future__ import annotations

import mmap
import os
import re
import resource
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from nbdist.system.limits import MemoryLimit, memory_limits
from nbdist.values.pickling import without_cycles
from nbdist.wire.ops import GpuMemory, Held, Memory, Peak
from nbdist.words import size_text
from nbdist.worker.compat import accelerator
from nbdist.worker.holdings import LAST_VALUE, Search, last_errors, locals_of

MOST_SHOWN = 12


class Peaks:
    """Remembers how high the counters of most memory stood when the last cell began.

    They are not set back, as user code may read them: so what is known is whether the cell
    has used more than ever before.
    """

    def __init__(self) -> None:
        self._rss = self._on_gpu = 0

    def __repr__(self) -> str:
        return f"<Peaks {size_text(self._rss)}, GPU {size_text(self._on_gpu)}>"

    def begin(self) -> None:
        """Have a cell begin now."""
        self._rss = _most_rss()
        self._on_gpu = accelerator.most_allocated()

    def memory(self, pss: int) -> Peak:
        """Return that of memory, where it is `pss` now; what comes and goes is not shared."""
        most = _most_rss()
        return Peak(pss + max(0, most - _rss()), is_bound=most <= self._rss)

    def on_gpu(self) -> Peak:
        """Return that of tensors on the rank's GPU, which is in use."""
        most = accelerator.most_allocated()
        return Peak(most, is_bound=most <= self._on_gpu)


# --- measuring --------------------------------------------------------------------------


def measure(
    shell: Any, peaks: Peaks, seconds: float, raised: BaseException | None = None
) -> Memory:
    """Measure, and look for what holds memory for so many seconds at most.

    With the traceback of what was `raised` just now.
    """
    search, unseen = Search(seconds), _unseen(shell, raised)
    with without_cycles():  # there may be millions of objects
        held = search.take(_names_of(shell))
        kept = [each for where, names in unseen for each in search.take(names, where)]
    pss = pss_now()
    return Memory(
        pss=pss,
        peak=peaks.memory(pss),
        limit=_tightest_limit(),
        gpu=_gpu(peaks),
        held=_largest(held),
        tensors=sum(each.size for each in held),
        kept=_largest(kept),
        kept_size=sum(each.size for each in kept),
        is_whole=search.is_whole,
    )


def pss_now() -> int:
    """Read PSS in bytes from proc(5), smaps_rollup."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))


def _names_of(shell: Any) -> dict[str, Any]:
    """Give the namespace without IPython's own names and what it has shown."""
    hidden = shell.user_ns_hidden
    names = [*shell.user_ns.items()]
    return {
        name: value
        for name, value in names
        if hidden.get(name) is not value and not LAST_VALUE.fullmatch(name)
    }


def _unseen(shell: Any, raised: BaseException | None) -> Iterable[tuple[str, dict[str, Any]]]:
    for error in last_errors(shell, raised):
        yield from locals_of(error)
    shown = shell.user_ns.get("_oh", {})
    yield "", {f"Out[{number}]": value for number, value in [*shown.items()]}


def _largest(held: list[Held]) -> tuple[Held, ...]:
    return tuple(sorted(held, key=lambda each: -each.size)[:MOST_SHOWN])


def _tightest_limit() -> MemoryLimit | None:
    limits = [*memory_limits()]
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        limits.append(MemoryLimit("ulimit -v", most, most - _statm(0)))
    return min(limits, key=lambda each: each.free, default=None)


def _gpu(peaks: Peaks) -> GpuMemory | None:
    if not accelerator.is_in_use():
        return None
    free, total = accelerator.room()
    used = accelerator.allocated()
    return GpuMemory(str(accelerator.index()), total - free, total, used, peaks.on_gpu())


def _rss() -> int:
    return _statm(1)


def _statm(field: int) -> int:
    """Read a size in bytes from proc(5), statm: 0 is the address space, 1 what is in memory."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[field]) * os.sysconf("SC_PAGE_SIZE")


def _most_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- what an error that says that memory is full says of what it is full of -------------------


SEARCH_SECONDS = 0.2
"""For names, while a cell waits for its end."""

MOST_NAMED = 5

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
    shown = [(size_text(each.size), f"{each.name} {each.kind}") for each in held[:MOST_NAMED]]
    width = max((len(size) for size, _ in shown), default=0)
    more = ["  …"] if len(held) > len(shown) else []
    return [*(f"  {size.rjust(width)}  {what}" for size, what in shown), *more]
