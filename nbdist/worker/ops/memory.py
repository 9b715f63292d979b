"""Measures the memory that a rank's variables hold, and releases memory that no variable holds.

Runs in each worker: `memory` and `clean` are the ops of `%dist_memory`, and `account` explains the
exception of a cell that ran out of memory.
"""

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
from nbdist.wire.ops import Cleaned, GpuMemory, Memory, NameMemory, Peak
from nbdist.words import size_text
from nbdist.worker.compat import accelerator
from nbdist.worker.compat.models import parts_of
from nbdist.worker.namespace import Context

MAX_SHOWN = 12  # the most entries in each list of a report (`Memory.held`, `Memory.kept`)


class Peaks:
    """Measures the peak of memory since the last cell began, on the CPU and on the GPU.

    Linux and torch count the peak of the whole process. nbdist does not reset these counters when a
    cell begins, as user code may read them. So a cell's own peak is known only if it is higher than
    all peaks before; otherwise the counter is only an upper bound (`is_bound`).
    """

    def __init__(self) -> None:
        self._rss = self._on_gpu = 0

    def begin(self) -> None:
        """Record the counters of peak memory; called before user code runs."""
        self._rss, self._on_gpu = _peak_rss(), accelerator.peak_allocated()

    def memory(self, pss: int) -> Peak:
        """Return the peak of this process's memory (PSS), given its present PSS in bytes.

        Linux records only the peak of RSS, in which shared memory counts in full. So the peak is
        estimated: memory that was in use at the peak, and is not in use now, counts as not shared.
        """
        peak = _peak_rss()
        return Peak(
            pss + max(0, peak - psutil.Process().memory_info().rss), is_bound=peak <= self._rss
        )

    def on_gpu(self) -> Peak:
        """Return the peak of tensors on the rank's GPU; the GPU must be in use."""
        peak = accelerator.peak_allocated()
        return Peak(peak, is_bound=peak <= self._on_gpu)


PEAKS = Peaks()  # a single object, because a process runs one cell at a time


# --- measuring --------------------------------------------------------------------------

# Seconds of processor time after which a search ends. The report has what was found by then.
SEARCH_SECONDS = 2.0


def memory(context: Context) -> Memory:
    """Measure this rank's memory, its peak, and the memory that variables and tracebacks hold."""
    return measure(context.shell, SEARCH_SECONDS)


def measure(shell: Any, seconds: float, raised: BaseException | None = None) -> Memory:
    """Measure the memory that this process uses, and search for up to `seconds` what holds it.

    The search goes through variables, then through the local variables in tracebacks, among them
    the traceback of the exception `raised`, and then through values that cells have shown.
    """
    search, hidden, kept = Search(seconds), shell.user_ns_hidden, list[NameMemory]()
    # Leave out IPython's own names. The names of shown values come last, as `Out[n]`.
    names = {
        name: value
        for name, value in [*shell.user_ns.items()]
        if hidden.get(name) is not value and not LAST_VALUE.fullmatch(name)
    }
    shown = {f"Out[{n}]": value for n, value in [*shell.user_ns.get("_oh", {}).items()]}
    with without_cycles():  # collecting garbage among millions of objects would take long
        variables = search.find_new(names)
        for error in last_errors(shell, raised):
            for where, local in locals_of(error):
                kept += search.find_new(local, where)
        kept += search.find_new(shown)
    pss, gpu, limits = pss_now(), None, [*memory_limits()]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        limits.append(MemoryLimit("ulimit -v", limit, limit - psutil.Process().memory_info().vms))
    if accelerator.is_in_use():
        (free, total), used = accelerator.room(), accelerator.allocated()
        gpu = GpuMemory(str(accelerator.index()), total - free, total, used, PEAKS.on_gpu())
    return Memory(
        pss=pss,
        peak=PEAKS.memory(pss),
        limit=min(limits, key=lambda each: each.free, default=None),
        gpu=gpu,
        held=_largest(variables),
        tensors=sum(each.size for each in variables),
        kept=_largest(kept),
        kept_size=sum(each.size for each in kept),
        is_whole=search.is_whole,
    )


def pss_now() -> int:
    """Return this process's PSS in bytes, from smaps_rollup; see proc(5)."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))


def _largest(entries: list[NameMemory]) -> tuple[NameMemory, ...]:
    return tuple(sorted(entries, key=lambda each: -each.size)[:MAX_SHOWN])


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- errors because memory is full ----------------------------------------------------------------

ACCOUNT_SECONDS = 0.2  # limit of the search, because the cell's end is reported only afterwards
MAX_NAMED_HOLDERS = 5
LEAST_LISTED = 1 << 20  # bytes: deleting a smaller tensor would not help

# Matches the message of a RuntimeError that torch raises if an allocation has failed.
ALLOCATION_FAILED = re.compile(
    r"out of memory|not enough memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.I
)

ADDRESS_RESERVE = 16 << 20
"""Bytes of address space that are kept in reserve, and released while a MemoryError is explained.

They use no memory. If no address is free, CPython 3.11 never finds the `except` block of a
MemoryError, and searches for ever (exception_unwind in ceval.c).
"""
_reserved: list[mmap.mmap] = []


def reserve_addresses() -> None:
    """Reserve `ADDRESS_RESERVE` bytes of address space, which `account` releases if needed.

    Do nothing if fewer bytes are free.
    """
    with suppress(OSError, MemoryError):
        _reserved.append(mmap.mmap(-1, ADDRESS_RESERVE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an exception, or one of its causes, says that an allocation has failed.

    The allocation may have been on the CPU or on a GPU.
    """
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and ALLOCATION_FAILED.search(str(error)):
            return True
        error = error.__cause__
    return False


def account(shell: Any, rank: int, error: BaseException) -> list[str]:
    """If memory was full when `error` was raised, return lines for the user on what uses it.

    Return [] for any other error, or if too little memory is free to measure anything.
    """
    if not is_out_of_memory(error):
        return []
    while _reserved:
        _reserved.pop().close()
    try:
        return account_lines(rank, measure(shell, ACCOUNT_SECONDS, error))
    except (MemoryError, OSError, RuntimeError):
        return []  # measuring has itself failed for lack of memory
    finally:
        reserve_addresses()


def account_lines(rank: int, memory: Memory) -> list[str]:
    """Return lines for the user: how much memory is used, and what holds it."""
    lines = [f"rank {rank}: {', '.join(_figure_texts(memory))}"]
    lines += _entry_lines(memory.held)
    if not memory.is_whole:
        lines.append("  … not everything was searched in time: `%dist_memory`")
    if memory.kept_size >= LEAST_LISTED:
        size = size_text(memory.kept_size)
        lines.append(
            f"Only this traceback, or `Out`, holds {size} (`%dist_memory --free` frees it):"
        )
        lines += _entry_lines(memory.kept)
    return lines


def _figure_texts(memory: Memory) -> Iterable[str]:
    if gpu := memory.gpu:
        yield f"GPU {gpu.device} has {size_text(gpu.used)} of {size_text(gpu.total)} in use"
        yield f"{size_text(gpu.tensors)} of it by this rank's tensors"
    if limit := memory.limit:
        used, total = size_text(max(0, limit.limit - limit.free)), size_text(limit.limit)
        yield f"{limit.where} has {used} of {total} in use"
    yield f"this rank {size_text(memory.pss)}"


def _entry_lines(entries: Sequence[NameMemory]) -> list[str]:
    large = [each for each in entries if each.size >= LEAST_LISTED]
    shown = [
        (size_text(each.size), f"{each.name} {each.kind}") for each in large[:MAX_NAMED_HOLDERS]
    ]
    width = max((len(size) for size, _ in shown), default=0)
    more = ["  …"] if len(large) > len(shown) else []
    return [*(f"  {size.rjust(width)}  {what}" for size, what in shown), *more]


# --- search: tensors, arrays and other large values that names lead to, each storage once ---------

# The search reads attributes of the user's objects. It calls only methods of torch, numpy, pandas
# and Python's containers, though a class of the user may have overridden these methods.

LAST_VALUE = re.compile(r"_+|_\d+")  # names under which IPython keeps the values of cells
MAX_SEARCHED_OBJECTS = 100_000  # objects that a search reads at most
MAX_ENTRIES = 10_000  # entries of a container that are searched; fewer if time is short
SEVERAL = 8  # if a container has more tensors, they are shown as one entry
MAX_LISTED_DEPTH = 8  # attributes and indices in a shown name, such as `model.layers[0]`
LEAST_INSIDE = 1 << 10
"""An array inside of an object is shown if it has at least this many bytes.

Objects of libraries have many smaller arrays.
"""

LARGE_BYTES = 1 << 20  # the least size of a `bytes` or `bytearray` that is shown


class _Several(list[Any]):
    """The tensors of a container or an optimizer, which are shown as one entry."""


NOT_LOOKED_INTO = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, str, int),
    _Several,
)


class Search:
    """Searches variables for tensors, arrays and other large values, each piece of memory once.

    The search ends after `seconds` of processor time, or after `MAX_SEARCHED_OBJECTS` objects.
    `results` has what was found so far. `is_whole` is False if a limit has ended the search, or
    if an object could not be read.
    """

    def __init__(self, seconds: float) -> None:
        self.results: list[NameMemory] = []
        self.is_whole = True
        self._deadline = time.thread_time() + seconds
        self._searched = 0
        self._container_limit = int(MAX_ENTRIES * min(1.0, max(seconds, 0.1)))
        self._storages: set[tuple[str, int]] = set()
        self._seen: set[int] = set()

    def find_new(self, names: Mapping[str, Any], where: str = "") -> list[NameMemory]:
        """Search variables, and return the memory in them that earlier calls have not found.

        The values of the variables come first, then the objects in them, and so on. `where`, such
        as " in f(), line 3", is put after the variable's name in the result.
        """
        count_before = len(self.results)
        queue = deque((name, value, 0) for name, value in dict(names).items())
        while queue and self._has_time():
            name, value, depth = queue.popleft()
            self._searched += 1
            try:
                self._record(f"{name}{where}", value, depth)
                if depth < MAX_LISTED_DEPTH and id(value) not in self._seen:
                    queue.extend((f"{name}{more}", x, depth + 1) for more, x in self._parts(value))
            except Exception:  # noqa: BLE001 (a class of the user's can raise anything)
                self.is_whole = False
        self.is_whole = self.is_whole and not queue
        return self.results[count_before:]

    def _has_time(self) -> bool:
        if self._searched % 64 == 63 and time.thread_time() > self._deadline:
            return False
        return self._searched < MAX_SEARCHED_OBJECTS

    def _record(self, name: str, value: Any, depth: int) -> None:
        """Add an entry to `results` for the memory of a value, if this memory was not found before.

        `depth` is 0 for the value of a variable, and greater for objects inside of it. Small
        objects inside get no entry, except for tensors. The entry counts only the value's own
        memory, and not that of objects inside. A `_Several`, a list of tensors, gets one entry.
        """
        if isinstance(value, _Several):
            self._record_several(name, value)
        elif (entry := self._measure_new(name, value)) is not None:
            is_known = not depth or isinstance(value, torch.Tensor)
            if is_known or entry.size >= LEAST_INSIDE:
                self.results.append(entry)

    def _record_several(self, name: str, tensors: _Several) -> None:
        """Record a single entry for all of these tensors that were not found before."""
        entries: list[NameMemory] = []
        for each in tensors:
            self._searched += 1
            if not self._has_time():
                self.is_whole = False
                break
            if (entry := self._measure_new(name, each)) is not None:
                entries.append(entry)
        if len(entries) > 1:
            shapes, dtypes = {entry.shape for entry in entries}, {entry.dtype for entry in entries}
            shape = shapes.pop() if len(shapes) == 1 else ()
            dtype = dtypes.pop() if len(dtypes) == 1 else ""
            size = sum(entry.size for entry in entries)
            self.results.append(
                NameMemory(name, size, shape, dtype, entries[0].device, len(entries))
            )
        else:
            self.results += entries

    def _measure_new(self, name: str, value: Any) -> NameMemory | None:
        """Return the memory of a value; None if it has none, or if it was found before."""
        entry, address = _measure_value(name, value) or (None, 0)
        if entry is None or not entry.size or (entry.device, address) in self._storages:
            return None
        self._storages.add((entry.device, address))
        return entry

    def _parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the objects in a value, each with the end of its name, such as `.grad` or `[0]`."""
        if isinstance(value, NOT_LOOKED_INTO):
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.is_leaf and value.grad is not None:
                yield ".grad", value.grad
        elif isinstance(value, torch.optim.Optimizer):
            yield ".state", _Several(_tensors_in(value.state, 3))
        elif isinstance(value, torch.nn.Module):
            attributes = own_attributes(value)
            named = {name: each for name, each in attributes.items() if not name.startswith("_")}
            for name, each in (parts_of(attributes) | named).items():
                yield f".{name}", each
        elif isinstance(value, list | tuple | set | frozenset | deque | dict):
            tensors = _Several(_tensors_in(value))
            has_several = len(tensors) > SEVERAL
            if has_several:
                # Yield all tensors as a single entry: a million tensors in the queue would delay
                # the search of all other objects.
                yield "", tensors
            if isinstance(value, set | frozenset):
                return
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in islice([*entries], self._container_limit):
                if not (has_several and isinstance(each, torch.Tensor)):
                    is_short = isinstance(key, str | int)
                    yield f"[{key!r}]" if is_short else f"[<{type(key).__name__}>]", each
        else:
            for name, each in own_attributes(value).items():
                yield f".{name}", each


def _tensors_in(value: Any, depth: int = 1) -> Iterator[Any]:
    """Yield the tensors in a container, and in containers inside of it down to `depth`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | set | frozenset | deque | dict):
        # Iterate over a copy, as another thread may change the container meanwhile.
        for each in [*(value.values() if isinstance(value, dict) else value)]:
            yield from _tensors_in(each, depth - 1)


def own_attributes(value: Any) -> dict[str, Any]:
    """Return a copy of an instance's `__dict__`, without calling code of its class.

    Return {} if it has no `__dict__`.
    """
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return {**attributes} if isinstance(attributes, dict | types.MappingProxyType) else {}


def _measure_value(name: str, value: Any) -> tuple[NameMemory, int] | None:
    """Return (memory, address) of a tensor, array, bytes object or pandas object.

    Return None for an object of another type.
    """
    if isinstance(value, torch.Tensor):
        return _measure_tensor(name, value)
    if isinstance(value, bytes | bytearray):
        return NameMemory(name, len(value) if len(value) >= LARGE_BYTES else 0, dtype="bytes"), id(
            value
        )
    if isinstance(value, np.ndarray):
        whole: Any = value  # the value may be a view
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        size = 0 if isinstance(whole, np.memmap) else whole.nbytes  # a memmap's data is in a file
        address = whole.__array_interface__["data"][0]
        return NameMemory(name, size, value.shape, str(value.dtype)), address
    pandas: Any = sys.modules.get("pandas")
    if pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series)):
        used = value.memory_usage(index=True)
        size = int(used if isinstance(value, pandas.Series) else used.sum())
        return NameMemory(name, size, value.shape, type(value).__name__), id(value)
    return None


def _measure_tensor(name: str, tensor: torch.Tensor) -> tuple[NameMemory, int]:
    """Return (memory, address) of a tensor's storage; a DTensor counts as only this rank's part.

    A tensor that is sparse or on the device "meta" counts as 0 bytes.
    """
    part: Any = tensor
    if hasattr(type(part), "to_local"):
        with torch.no_grad():
            part = part.to_local()
    if part.layout is not torch.strided or part.device.type == "meta":
        return NameMemory(name, 0), 0
    shape, dtype = tuple(part.shape), str(part.dtype).removeprefix("torch.")
    storage = part.untyped_storage()
    return NameMemory(name, storage.nbytes(), shape, dtype, str(part.device)), storage.data_ptr()


# --- releasing: tracebacks, shown values and caches -------------------------------------


def last_errors(shell: Any, raised: BaseException | None = None) -> Iterator[BaseException]:
    """Yield `raised`, and the last exceptions that IPython and Python keep, each once.

    Their causes, contexts and the exceptions in exception groups are yielded, too.
    """
    result = shell.last_execution_result
    # Yield the exceptions of the last cell before those in `sys`. `sys` has the last exception that
    # was shown, which may be of an earlier cell: a BdbQuit is not shown.
    of_cell = [] if result is None else [result.error_in_exec, result.error_before_exec]
    shown = [getattr(sys, name, None) for name in ("last_exc", "last_value")]
    waiting, seen_ids = [raised, *of_cell, *shown], set()
    while waiting:
        error = waiting.pop(0)
        if error is not None and id(error) not in seen_ids:
            seen_ids.add(id(error))
            yield error
            waiting += [error.__context__, error.__cause__]
            if isinstance(error, BaseExceptionGroup):
                waiting += error.exceptions


def locals_of(error: BaseException) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (text, local variables) of each function call in a traceback, outermost first.

    The text names the place: " in f(), line 3".
    """
    for frame, line in traceback.walk_tb(error.__traceback__):
        # Take only functions: the variables of a cell's own statements are in the namespace.
        if frame.f_code.co_flags & 0x1:
            yield f" in {frame.f_code.co_name}(), line {line}", {**frame.f_locals}


def clean(context: Context) -> Cleaned:
    """Release memory that no variable holds; return the memory before and afterwards.

    Tracebacks, IPython's `Out` and `_`, the kept last values of cells and reference cycles are
    dropped. Then free memory is returned to Linux, and GPU memory in torch's cache to the driver.
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
    shown.pop_value()
    names.update({"_": "", "__": "", "___": ""})
    gc.collect()
    accelerator.release_cached()
    trim_memory()
    return Cleaned(*zip(before, _memory(), strict=True))


def forget_errors(shell: Any, raised: BaseException | None = None) -> None:
    """Drop the last exception wherever Python and IPython keep it.

    Also clear the local variables of the calls in its traceback, and in the traceback of `raised`,
    if these calls have ended. So the memory of these variables is released even if something still
    refers to the exception or to a frame.
    """
    for error in [*last_errors(shell, raised)]:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            with suppress(RuntimeError):  # the call of this frame still runs
                frame.clear()
                # Up to Python 3.12, a frame whose `f_locals` was read before has a copy of its
                # variables. Reading `f_locals` again empties the copy.
                _ = frame.f_locals
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    shell.last_execution_result = None
    for shower in (shell.InteractiveTB, shell.SyntaxTB):
        shower.tb = shower.pdb = None
    shell.SyntaxTB.last_syntax_error = None


def _memory() -> tuple[int, int, int]:
    """Return PSS, and the allocated and the reserved GPU memory, in the order of `Cleaned`."""
    return pss_now(), accelerator.allocated(), accelerator.reserved()
