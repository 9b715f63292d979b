"""Describes the parts of values, which values are one object, and which arrays share memory.

The notebook, the ranks, and the plain kernel with which both are compared import this module.
"""

from __future__ import annotations

import types
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device),
    *(types.ModuleType, types.BuiltinFunctionType, np.generic),
)
Part = tuple[str, Any]


def is_atom(value: object) -> bool:
    """Return True for a value that nobody can tell from an equal copy."""
    if isinstance(value, ATOMS):
        return True
    return (
        isinstance(value, (type, types.FunctionType)) and value.__module__ != "__main__"
    )  # imported from a module


def parts(value: Any) -> list[Part]:
    """Return the parts of a value, each with a label, in a fixed order."""
    return [*_parts(value)]


def _parts(value: Any) -> Iterator[Part]:
    if isinstance(value, (list, tuple, deque)):
        yield from _named(value)
    elif isinstance(value, (set, frozenset)):
        yield from _named(sorted(value, key=_order))
    elif isinstance(value, dict):
        for number, (key, each) in enumerate(value.items()):
            yield (f"key{number}", key)
            yield (f"at{number}", each)
    elif isinstance(value, torch.Tensor):
        yield ("grad", value.grad if value.is_leaf else None)
        yield from _sorted(value.__dict__)
    elif isinstance(value, np.ndarray):
        if value.dtype == object:
            yield from _named(value.ravel().tolist())
    elif isinstance(value, torch.nn.Module):
        yield ("type", type(value))
        for table in (value._parameters, value._buffers, value._modules):
            yield from table.items()
    elif isinstance(value, torch.optim.Optimizer):
        yield ("groups", value.param_groups)
        yield ("state", value.state)
    elif isinstance(value, type):
        yield from _named(value.__bases__)
        yield from _sorted(vars(value))
    elif isinstance(value, types.FunctionType):
        yield ("defaults", value.__defaults__)
        yield from _named(value.__closure__ or ())
        yield from _sorted(vars(value))
    elif isinstance(value, types.CellType):
        yield ("contents", value.cell_contents)
    elif isinstance(value, types.MethodType):
        yield ("self", value.__self__)
    else:
        yield ("type", type(value))
        yield from _sorted(getattr(value, "__dict__", {}))
        for name in getattr(type(value), "__slots__", ()):
            if hasattr(value, name):
                yield (name, getattr(value, name))
    if isinstance(value, defaultdict):
        yield ("factory", value.default_factory)


def _named(values: Iterable[Any]) -> Iterator[Part]:
    yield from ((str(number), each) for number, each in enumerate(values))


def _sorted(table: Any) -> Iterator[Part]:
    for name in sorted(table):
        each = table[name]
        is_own = not isinstance(each, (types.MemberDescriptorType, types.GetSetDescriptorType))
        if is_own and not (name.startswith("__") and name.endswith("__")):
            yield (name, each)


def _order(value: Any) -> tuple[int, str, str]:
    if is_atom(value):
        return 0, repr(value), ""
    # Objects of a program that have the same tag differ in their `x`.
    held = getattr(value, "x", None)
    return 1, repr(value.tag), repr(held) if is_atom(held) else type(held).__name__


def walk(tops: Iterable[Any]) -> dict[int, Any]:
    """Return all objects that can be reached from `tops`, by their ids."""
    found: dict[int, Any] = {}
    waiting = [*tops]
    while waiting:
        value = waiting.pop()
        if id(value) not in found and not is_atom(value):
            found[id(value)] = value
            waiting += [each for _, each in _parts(value)]
    return found


def span(value: Any) -> tuple[int, int] | None:
    """Return the addresses between which an array has its elements."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or not value.numel():
            return None
        extent = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
        return value.data_ptr(), value.data_ptr() + extent * value.element_size()
    if isinstance(value, np.ndarray) and value.size:
        low, high = np.lib.array_utils.byte_bounds(value)
        return int(low), int(high)
    return None


class Telling:
    """Numbers objects in the order in which they are met, and writes a line for each."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._spans: list[tuple[int, int, int]] = []
        self._alive: list[Any] = []
        self.lines: list[str] = []

    def name(self, value: Any) -> str:
        """Return the text of an atom or a tuple, or the number of an object."""
        if is_atom(value):
            is_named = isinstance(value, (type, types.FunctionType, types.ModuleType))
            return str(value.__name__) if is_named else f"{value!r}"
        if isinstance(value, tuple) and type(value) is tuple:
            return "(" + ", ".join(map(self.name, value)) + ")"
        if id(value) not in self._numbers:
            self._tell(value)
        return f"#{self._numbers[id(value)]}"

    def _tell(self, value: Any) -> None:
        number = self._numbers[id(value)] = len(self.lines)
        self.lines.append("")
        self._alive.append(value)
        text = f"#{number} {type(value).__name__} {self._head(value, number)}"
        for label, part in _parts(value):
            text += f" {label}={self.name(part)}"
        self.lines[number] = text

    def _head(self, value: Any, number: int) -> str:
        if isinstance(value, torch.Tensor):
            text = f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.requires_grad}"
            return f"{text} {value.tolist()} {self._memory(value, number)}"
        if isinstance(value, np.ndarray):
            strides = (
                value.strides if value.size else ()
            )  # an empty array has no memory to step over
            text = f"{value.dtype} {value.shape} {strides} {value.flags.writeable}"
            return f"{text} {value.tolist()} {self._memory(value, number)}"
        if isinstance(value, torch.nn.Module):
            return f"training={value.training}"
        if isinstance(value, (type, types.FunctionType)):
            return value.__name__
        if isinstance(value, deque):
            return f"maxlen={value.maxlen}"
        return bytes(value).hex() if isinstance(value, bytearray) else ""

    def _memory(self, value: Any, number: int) -> str:
        """Name earlier arrays whose memory overlaps with the array's own, with the offsets."""
        if (found := span(value)) is None:
            return "[]"
        start, end = found
        overlaps = [f"#{n}+{start - a}" for n, a, b in self._spans if a < end and start < b]
        self._spans.append((number, start, end))
        return f"[{' '.join(overlaps)}]"


def describe(**names: Any) -> str:
    """Return a text that is the same for variables with equal values and equal identities."""
    telling = Telling()
    heads = [f"{name} = {telling.name(value)}" for name, value in names.items()]
    return "\n".join([*heads, *telling.lines])


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return all objects that a training step changes."""
    changed: list[Any] = [optimizer, optimizer.state]
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        changed += [parameter, parameter.grad, state, *state.values()]
    return changed
