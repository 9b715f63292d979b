"""What names lead to: tensors, arrays and other large things, each storage once.

Looks, and calls nothing of the user's but what his tensors' and modules' classes override.
"""

from __future__ import annotations

import re
import sys
import time
import traceback
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from nbdist.wire.ops import Held

LAST_VALUE = re.compile(r"_+|_\d+")
"""Names under which IPython keeps what cells have shown."""

MOST_LOOKED_AT = 100_000
"""Values, so that a list of a million numbers ends the search soon."""

MOST_OF_A_CONTAINER = 10_000
"""In a second; to begin with these takes time that others need."""

SEVERAL = 8
"""A container of more tensors than that is shown as one."""

DEEPEST = 8
LEAST_INSIDE = 1 << 10
"""Bytes of an array inside of an object that is named: libraries have many of their own."""

LARGE_BYTES = 1 << 20
"""Of plain bytes, which need not be named below that."""

NOT_LOOKED_INTO = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, str, int)

_Path = tuple[str, Any, int]


@dataclass(frozen=True)
class _Several:
    """Tensors of one container, to be shown as one."""

    tensors: list[Any]


class Search:
    """Looks for what holds memory, for some seconds at most; `held` has what was found so far."""

    def __init__(self, seconds: float) -> None:
        self.held: list[Held] = []
        self.is_whole = True
        self._end = time.monotonic() + seconds
        self._looked_at = 0
        self._most_of_each = int(MOST_OF_A_CONTAINER * min(1.0, max(seconds, 0.1)))
        self._storages: set[tuple[str, int]] = set()
        self._seen: set[int] = set()
        self._have_several: set[int] = set()
        self._later: list[_Path] = []

    def __repr__(self) -> str:
        return f"<Search {len(self.held)} held, {self._looked_at} values>"

    def take(self, names: Mapping[str, Any], where: str = "") -> list[Held]:
        """Look at what these names lead to, those nearest first; return what is new of it.

        `where` is added to their names.
        """
        known = len(self.held)
        waiting: deque[_Path] = deque((name, value, 0) for name, value in dict(names).items())
        while waiting and self._has_time():
            name, value, depth = waiting.popleft()
            self._looked_at += 1
            try:
                self._look(f"{name}{where}", value, depth)
                waiting.extend(self._later)
                self._later.clear()
                if depth < DEEPEST and id(value) not in self._seen:
                    waiting.extend((f"{name}{more}", x, depth + 1) for more, x in self._in(value))
            except Exception:  # noqa: BLE001 (a class of the user's can raise anything)
                self.is_whole = False
        self.is_whole = self.is_whole and not waiting
        return self.held[known:]

    def _has_time(self) -> bool:
        if self._looked_at % 64 == 63 and time.monotonic() > self._end:
            return False
        return self._looked_at < MOST_LOOKED_AT

    # --- what has a size ------------------------------------------------------------------

    def _look(self, name: str, value: Any, depth: int) -> None:
        """Note what it holds itself, or as a container of many."""
        if isinstance(value, torch.optim.Optimizer):
            self._note_several(f"{name}.state", self._tensors_in(value.state, 3))
        elif isinstance(value, list | tuple | set | frozenset | deque | dict):
            tensors = [each for each in _members(value) if isinstance(each, torch.Tensor)]
            if len(tensors) > SEVERAL:
                # After what is as near as this: there may be a million of them.
                self._later.append((name, _Several(tensors), DEEPEST))
                (self._seen if len(tensors) == len(value) else self._have_several).add(id(value))
        elif isinstance(value, _Several):
            self._note_several(name, value.tensors)
        elif (found := self._new(name, value)) is not None:
            is_known = not depth or isinstance(value, torch.Tensor)
            if is_known or found.size >= LEAST_INSIDE:
                self.held.append(found)

    def _note_several(self, name: str, tensors: Iterable[Any]) -> None:
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
        """Return what it holds; None where that is nothing, or known already."""
        measured = _measured(name, value)
        if measured is None:
            return None
        found, place = measured
        key = found.device, place
        if not found.size or key in self._storages:
            return None
        self._storages.add(key)
        return found

    # --- where to go on ------------------------------------------------------------------

    def _in(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield what can be reached from it, with what is written to get there."""
        if isinstance(value, NOT_LOOKED_INTO):
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.is_leaf and value.grad is not None:
                yield ".grad", value.grad
        elif isinstance(value, torch.nn.Module):
            yield from _in_module(value)
        elif isinstance(value, dict | list | tuple | deque):
            is_known = id(value) in self._have_several
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in islice([*entries], self._most_of_each):
                if not (is_known and isinstance(each, torch.Tensor)):
                    yield f"[{_key_text(key)}]", each
        elif not isinstance(value, torch.optim.Optimizer):
            for name, each in _attributes(value).items():
                yield f".{name}", each

    def _tensors_in(self, value: Any, depth: int) -> Iterator[Any]:
        """Yield the tensors of nested dicts and lists."""
        if isinstance(value, torch.Tensor):
            yield value
        elif depth and isinstance(value, dict | list | tuple):
            for each in _members(value):
                yield from self._tensors_in(each, depth - 1)


def _members(value: Any) -> list[Any]:
    return [*(value.values() if isinstance(value, dict) else value)]


def _in_module(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for found in (
        module.named_parameters(recurse=False),
        module.named_buffers(recurse=False),
        module.named_children(),
        [(name, each) for name, each in _attributes(module).items() if not name.startswith("_")],
    ):
        for name, each in found:
            yield f".{name}", each


def _attributes(value: Any) -> dict[str, Any]:
    """Give what stands in an instance, without a call of anything of its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return dict(found) if isinstance(found, dict) else {}


def _key_text(key: object) -> str:
    return repr(key) if isinstance(key, str | int | bool) else f"<{type(key).__name__}>"


# --- sizes ------------------------------------------------------------------------------


def _measured(name: str, value: Any) -> tuple[Held, int] | None:
    """Measure what holds memory itself, and say where that lies; None for all else."""
    if isinstance(value, torch.Tensor):
        return _tensor(name, value)
    if isinstance(value, bytes | bytearray):
        return Held(name, len(value) if len(value) >= LARGE_BYTES else 0, dtype="bytes"), id(value)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _array(name, value, numpy)
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


def _array(name: str, array: Any, numpy: Any) -> tuple[Held, int]:
    """Measure what an array is a view of; nothing of what is a file's."""
    whole = array
    while isinstance(whole.base, numpy.ndarray):
        whole = whole.base
    size = 0 if isinstance(whole, numpy.memmap) else whole.nbytes
    return Held(name, size, array.shape, str(array.dtype)), whole.__array_interface__["data"][0]


# --- what is held unseen ----------------------------------------------------------------


def last_errors(shell: Any, raised: BaseException | None = None) -> Iterator[BaseException]:
    """Yield exceptions that Python and IPython keep, with those that they came from.

    What was `raised` need not have come that far: it may not have been shown.
    """
    known = [raised, getattr(sys, "last_value", None), getattr(sys, "last_exc", None)]
    if (result := shell.last_execution_result) is not None:
        known += [result.error_in_exec, result.error_before_exec]
    waiting, seen = known, set()
    while waiting:
        found = waiting.pop(0)
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            yield found
            waiting += [found.__context__, found.__cause__]
            if isinstance(found, BaseExceptionGroup):
                waiting += found.exceptions


def locals_of(error: BaseException) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the variables of each call in its traceback, the outermost first, and where it is."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_flags & 0x1:  # a function's; a cell's are the namespace
            yield f" in {frame.f_code.co_name}(), line {line}", {**frame.f_locals}
