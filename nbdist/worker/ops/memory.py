"""What a rank's memory is used for, by name, how much there is, and what can be released."""

from __future__ import annotations

import gc
import mmap
import re
import resource
import sys
import time
import traceback
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import psutil
import torch

from nbdist.system.limits import MemoryLimit, memory_limits
from nbdist.system.processes import trim_memory
from nbdist.values.pickling import without_cycles
from nbdist.wire.ops import Cleaned, GpuMemory, Held, Memory, Peak
from nbdist.words import size_text
from nbdist.worker.compat import accelerator
from nbdist.worker.compat.models import parts_of
from nbdist.worker.namespace import Context

MOST_SHOWN = 12


class Peaks:
    """Remembers how high the counters of most memory were when the last cell began.

    They are not reset, as user code may read them; so a cell's peak is known if it is the highest.
    """

    def __init__(self) -> None:
        self._rss = self._on_gpu = 0

    def begin(self) -> None:
        """Note them: a cell begins."""
        self._rss, self._on_gpu = _most_rss(), accelerator.most_allocated()

    def memory(self, pss: int) -> Peak:
        """Return the peak of memory, which is `pss` now; what comes and goes is not shared."""
        most = _most_rss()
        return Peak(
            pss + max(0, most - psutil.Process().memory_info().rss), is_bound=most <= self._rss
        )

    def on_gpu(self) -> Peak:
        """Return the peak of tensors on the rank's GPU, which is in use."""
        most = accelerator.most_allocated()
        return Peak(most, is_bound=most <= self._on_gpu)


PEAKS = Peaks()  # the worker's


# --- measuring --------------------------------------------------------------------------

SEARCH_SECONDS = 2.0  # for names: of a list of a million tensors what was found until then


def memory(context: Context) -> Memory:
    """Measure memory, its peak since the last cell began, and what names and tracebacks hold."""
    return measure(context.shell, SEARCH_SECONDS)


def measure(shell: Any, seconds: float, raised: BaseException | None = None) -> Memory:
    """Measure memory, and search what holds it for at most `seconds`; also in what was `raised`."""
    search, hidden, kept = Search(seconds), shell.user_ns_hidden, list[Held]()
    # Without IPython's own names and what it has shown, which comes later.
    names = {
        name: value
        for name, value in [*shell.user_ns.items()]
        if hidden.get(name) is not value and not LAST_VALUE.fullmatch(name)
    }
    shown = {f"Out[{n}]": value for n, value in [*shell.user_ns.get("_oh", {}).items()]}
    with without_cycles():  # there may be millions of objects
        held = search.take(names)
        for error in last_errors(shell, raised):
            for where, local in locals_of(error):
                kept += search.take(local, where)
        kept += search.take(shown)
    pss, gpu, limits = pss_now(), None, [*memory_limits()]
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        limits.append(MemoryLimit("ulimit -v", most, most - psutil.Process().memory_info().vms))
    if accelerator.is_in_use():
        (free, total), used = accelerator.room(), accelerator.allocated()
        gpu = GpuMemory(str(accelerator.index()), total - free, total, used, PEAKS.on_gpu())
    return Memory(
        pss=pss,
        peak=PEAKS.memory(pss),
        limit=min(limits, key=lambda each: each.free, default=None),
        gpu=gpu,
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


def _largest(held: list[Held]) -> tuple[Held, ...]:
    return tuple(sorted(held, key=lambda each: -each.size)[:MOST_SHOWN])


def _most_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- what is said of errors that say that memory is full --------------------------------------

ACCOUNT_SECONDS = 0.2  # to search names, while a cell waits for its end
MOST_NAMED = 5
LEAST_LISTED = 1 << 20  # bytes: to delete a smaller tensor does not help

# What a RuntimeError of torch's says then.
ALLOCATION_FAILED = re.compile(
    r"out of memory|not enough memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.I
)

RESERVE = 16 << 20
"""Bytes of addresses, not of memory, that are given up while a MemoryError is accounted for.

With no room CPython 3.11 searches for ever for what handles it (exception_unwind of ceval.c).
"""
_reserved: list[mmap.mmap] = []


def reserve_addresses() -> None:
    """Set them aside, if there is room for that."""
    with suppress(OSError, MemoryError):
        _reserved.append(mmap.mmap(-1, RESERVE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an allocation failed, on the CPU or a GPU, or it came from such an error."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and ALLOCATION_FAILED.search(str(error)):
            return True
        error = error.__cause__
    return False


def account(shell: Any, rank: int, error: BaseException) -> list[str]:
    """Return lines on what uses the memory that was not enough; none for other errors."""
    if not is_out_of_memory(error):
        return []
    while _reserved:
        _reserved.pop().close()
    try:
        return account_lines(rank, measure(shell, ACCOUNT_SECONDS, error))
    except (MemoryError, OSError, RuntimeError):
        return []  # there is no room for that either
    finally:
        reserve_addresses()


def account_lines(rank: int, memory: Memory) -> list[str]:
    """Write how much is used, by what, and what could be released."""
    lines = [f"rank {rank}: {', '.join(_figures(memory))}"]
    lines += _listed(memory.held)
    if not memory.is_whole:
        lines.append("  … not everything was searched in time: `%dist_memory`")
    if memory.kept_size >= LEAST_LISTED:
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
    large = [each for each in held if each.size >= LEAST_LISTED]
    shown = [(size_text(each.size), f"{each.name} {each.kind}") for each in large[:MOST_NAMED]]
    width = max((len(size) for size, _ in shown), default=0)
    more = ["  …"] if len(large) > len(shown) else []
    return [*(f"  {size.rjust(width)}  {what}" for size, what in shown), *more]


# --- what names lead to: tensors, arrays and other large things, each storage once ------------

# Calls no code of the user's but what classes of tensors and modules override.

LAST_VALUE = re.compile(r"_+|_\d+")  # names under which IPython keeps what cells have shown
MOST_LOOKED_AT = 100_000  # values, so that a list of a million numbers ends the search soon
MOST_OF_A_CONTAINER = 10_000  # in a second; to begin with these takes time that others need
SEVERAL = 8  # a container of more tensors than that is shown as one
DEEPEST = 8
LEAST_INSIDE = 1 << 10
"""Bytes of an array inside of an object that is named: libraries have many of their own."""

LARGE_BYTES = 1 << 20  # of plain bytes, which need not be named below that


class _Several(list[Any]):
    """Tensors of one container, or an optimizer's, to be shown as one."""


NOT_LOOKED_INTO = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, str, int),
    _Several,
)


class Search:
    """Searches what holds memory, for some seconds of a processor; `held` is what was found."""

    def __init__(self, seconds: float) -> None:
        self.held: list[Held] = []
        self.is_whole = True
        self._end = time.thread_time() + seconds
        self._looked_at = 0
        self._most_of_each = int(MOST_OF_A_CONTAINER * min(1.0, max(seconds, 0.1)))
        self._storages: set[tuple[str, int]] = set()
        self._seen: set[int] = set()

    def take(self, names: Mapping[str, Any], where: str = "") -> list[Held]:
        """Look at what names lead to, nearest first; return what is new, named with `where`."""
        known = len(self.held)
        waiting = deque((name, value, 0) for name, value in dict(names).items())
        while waiting and self._has_time():
            name, value, depth = waiting.popleft()
            self._looked_at += 1
            try:
                self._look(f"{name}{where}", value, depth)
                if depth < DEEPEST and id(value) not in self._seen:
                    waiting.extend((f"{name}{more}", x, depth + 1) for more, x in self._in(value))
            except Exception:  # noqa: BLE001 (a class of the user's can raise anything)
                self.is_whole = False
        self.is_whole = self.is_whole and not waiting
        return self.held[known:]

    def _has_time(self) -> bool:
        if self._looked_at % 64 == 63 and time.thread_time() > self._end:
            return False
        return self._looked_at < MOST_LOOKED_AT

    def _look(self, name: str, value: Any, depth: int) -> None:
        """Note what it holds itself, or several tensors as one."""
        if isinstance(value, _Several):
            self._note_several(name, value)
        elif (found := self._new(name, value)) is not None:
            is_known = not depth or isinstance(value, torch.Tensor)
            if is_known or found.size >= LEAST_INSIDE:
                self.held.append(found)

    def _note_several(self, name: str, tensors: _Several) -> None:
        """Note tensors as one, as many as there is time for, unless none of them is new."""
        found: list[Held] = []
        for each in tensors:
            self._looked_at += 1
            if not self._has_time():
                self.is_whole = False
                break
            if (held := self._new(name, each)) is not None:
                found.append(held)
        if len(found) > 1:
            shapes, dtypes = {held.shape for held in found}, {held.dtype for held in found}
            shape = shapes.pop() if len(shapes) == 1 else ()
            dtype = dtypes.pop() if len(dtypes) == 1 else ""
            size = sum(held.size for held in found)
            self.held.append(Held(name, size, shape, dtype, found[0].device, len(found)))
        else:
            self.held += found

    def _new(self, name: str, value: Any) -> Held | None:
        """Return what it holds; None if that is nothing, or known already."""
        found, place = _measured(name, value) or (None, 0)
        if found is None or not found.size or (found.device, place) in self._storages:
            return None
        self._storages.add((found.device, place))
        return found

    def _in(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield what can be reached from it, with what is written to get there."""
        if isinstance(value, NOT_LOOKED_INTO):
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.is_leaf and value.grad is not None:
                yield ".grad", value.grad
        elif isinstance(value, torch.optim.Optimizer):
            yield ".state", _Several(_tensors_in(value.state, 3))
        elif isinstance(value, torch.nn.Module):
            held = own_attributes(value)
            named = {name: each for name, each in held.items() if not name.startswith("_")}
            for name, each in (parts_of(held) | named).items():
                yield f".{name}", each
        elif isinstance(value, list | tuple | set | frozenset | deque | dict):
            tensors = _Several(_tensors_in(value))
            has_several = len(tensors) > SEVERAL
            if has_several:
                # After what is as near as this: there may be a million of them.
                yield "", tensors
            if isinstance(value, set | frozenset):
                return
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in islice([*entries], self._most_of_each):
                if not (has_several and isinstance(each, torch.Tensor)):
                    is_short = isinstance(key, str | int)
                    yield f"[{key!r}]" if is_short else f"[<{type(key).__name__}>]", each
        else:
            for name, each in own_attributes(value).items():
                yield f".{name}", each


def _tensors_in(value: Any, depth: int = 1) -> Iterator[Any]:
    """Yield the tensors of a container, and of those in it down to this depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | set | frozenset | deque | dict):
        # A copy: a thread may change it meanwhile.
        for each in [*(value.values() if isinstance(value, dict) else value)]:
            yield from _tensors_in(each, depth - 1)


def own_attributes(value: Any) -> dict[str, Any]:
    """Return an instance's attributes without calling anything of its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return {**found} if isinstance(found, dict | types.MappingProxyType) else {}


def _measured(name: str, value: Any) -> tuple[Held, int] | None:
    """Return what it holds itself, and the address of that; None for what holds no memory."""
    if isinstance(value, torch.Tensor):
        return _tensor(name, value)
    if isinstance(value, bytes | bytearray):
        return Held(name, len(value) if len(value) >= LARGE_BYTES else 0, dtype="bytes"), id(value)
    if isinstance(value, np.ndarray):
        whole: Any = value  # it may be a view
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        size = 0 if isinstance(whole, np.memmap) else whole.nbytes  # which is a file's
        address = whole.__array_interface__["data"][0]
        return Held(name, size, value.shape, str(value.dtype)), address
    pandas: Any = sys.modules.get("pandas")
    if pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series)):
        used = value.memory_usage(index=True)
        size = int(used if isinstance(value, pandas.Series) else used.sum())
        return Held(name, size, value.shape, type(value).__name__), id(value)
    return None


def _tensor(name: str, tensor: torch.Tensor) -> tuple[Held, int]:
    """Measure a tensor's storage; a sharded one's part that is here."""
    part: Any = tensor
    if hasattr(type(part), "to_local"):
        with torch.no_grad():
            part = part.to_local()
    if part.layout is not torch.strided or part.device.type == "meta":
        return Held(name, 0), 0
    shape, dtype = tuple(part.shape), str(part.dtype).removeprefix("torch.")
    storage = part.untyped_storage()
    return Held(name, storage.nbytes(), shape, dtype, str(part.device)), storage.data_ptr()


# --- what is held unseen, and its release -----------------------------------------------


def last_errors(shell: Any, raised: BaseException | None = None) -> Iterator[BaseException]:
    """Yield `raised`, the exceptions that IPython and Python keep, and those they came from."""
    result = shell.last_execution_result
    # What ended the last cell; then what IPython has shown: it shows nothing of BdbQuit.
    of_cell = [] if result is None else [result.error_in_exec, result.error_before_exec]
    shown = [getattr(sys, name, None) for name in ("last_exc", "last_value")]
    waiting, seen = [raised, *of_cell, *shown], set()
    while waiting:
        found = waiting.pop(0)
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            yield found
            waiting += [found.__context__, found.__cause__]
            if isinstance(found, BaseExceptionGroup):
                waiting += found.exceptions


def locals_of(error: BaseException) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where each call in its traceback is, the outermost first, and its variables."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_flags & 0x1:  # a function's; a cell's are the namespace
            yield f" in {frame.f_code.co_name}(), line {line}", {**frame.f_locals}


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
    """Drop the last exception wherever Python and IPython keep it, and what its calls hold.

    That of `raised` too, also where a variable or another thread keeps the exception or a frame.
    """
    for error in [*last_errors(shell, raised)]:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            with suppress(RuntimeError):  # it still runs
                frame.clear()
                # A copy of them that a reader has asked for is renewed by asking again.
                _ = frame.f_locals
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
