"""What a value is made of, leaf by leaf: tensors, arrays, plain values, and where they are in it.

Of modules parameters and buffers, of optimizers and whatever else has a `state_dict` that, of
containers their items, of other objects their attributes.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

MOST_LEAVES = 100_000
DEEPEST = 60

LONG = 32
"""From this many numbers on a list is compared as one array."""

ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, enum.Enum)
WHOLE = (torch.dtype, torch.device, torch.Size, np.dtype, np.generic, type, types.ModuleType)
CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


class TooManyLeaves(Exception):
    """More than anybody would compare one by one."""


def leaves(value: Any) -> dict[str, Any]:
    """Find all leaves by their paths, such as "layer1.weight" or "['lr']"; "" for the value itself.

    Raises TooManyLeaves, and what users' classes raise.
    """
    found: dict[str, Any] = {}
    for path, leaf in _walk(value, "", ()):
        found[path] = leaf
        if len(found) > MOST_LEAVES:
            raise TooManyLeaves
    return found


class Again:
    """Stands for a container that holds itself: what it leads to is being looked at already."""


def is_leaf(value: Any) -> bool:
    """Say whether it is compared as it is."""
    plain = (*ATOMS, *WHOLE, *CALLABLE, frozenset, set)
    return isinstance(value, (torch.Tensor, np.ndarray, *plain))


def _walk(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if id(value) in above or len(above) > DEEPEST:
        yield path, Again()
        return
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    if (numbers := _as_numbers(value)) is not None:
        value = numbers
    steps = None if is_leaf(value) else _steps(value)
    if steps is None:
        yield path, value
        return
    above = *above, id(value)
    for step, part in steps:
        # `.weight` of what is at the top is `weight`.
        yield from _walk(part, path + step if path else step.removeprefix("."), above)


def _steps(value: Any) -> list[tuple[str, Any]] | None:
    """List what is in a value, with what leads there; None where nothing is known to be."""
    match value:
        case torch.nn.Module():
            named = [*value.named_parameters(), *value.named_buffers()]
            return [(f".{name}", part) for name, part in named]
        case Mapping():
            return [(_key(key), part) for key, part in value.items()]
        case tuple() if fields := getattr(value, "_fields", None):
            return [(f".{name}", part) for name, part in zip(fields, value, strict=True)]
        case list() | tuple() | deque():
            return [(f"[{number}]", part) for number, part in enumerate(value)]
    if _is_of_pandas(value):
        return _columns(value)
    if callable(getattr(value, "state_dict", None)):
        return [("." + str(key), part) for key, part in value.state_dict().items()]
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        return [(f".{name}", getattr(value, name, None)) for name in names]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and attributes:
        return [(f".{name}", part) for name, part in attributes.items()]
    return None


def _key(key: Any) -> str:
    text = repr(key) if isinstance(key, (*ATOMS, tuple)) else f"{type(key).__qualname__} {key}"
    return f"[{text if len(text) <= 60 else text[:57] + '...'}]"


def _as_numbers(value: Any) -> np.ndarray[Any, Any] | None:
    """Make an array of a long list of numbers of one type."""
    if type(value) not in (list, tuple) or len(value) < LONG:
        return None
    kinds = {*map(type, value)}
    if len(kinds) != 1 or not kinds <= {bool, int, float, complex}:
        return None
    try:
        found = np.array(value)
    except OverflowError:
        return None
    return None if found.dtype == object else found


def _is_of_pandas(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    kinds = (getattr(pandas, name, None) for name in ("DataFrame", "Series", "Index"))
    return pandas is not None and isinstance(value, tuple(kind for kind in kinds if kind))


def _columns(value: Any) -> list[tuple[str, Any]]:
    if hasattr(value, "columns"):
        columns = [(_key(name), value.iloc[:, at]) for at, name in enumerate(value.columns)]
        return [*((step, column.to_numpy()) for step, column in columns), (".index", value.index)]
    if hasattr(value, "index"):
        return [("", value.to_numpy()), (".index", value.index)]
    return [("", value.to_numpy())]
