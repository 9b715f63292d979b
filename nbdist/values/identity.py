"""What a name is bound to: still the same object, asked without keeping it alive, and its kind."""

from __future__ import annotations

import itertools
import sys
import weakref
from dataclasses import dataclass
from typing import Any

_SMALL, _FEW = 4096, 16
_ATOMIC = (int, float, complex, bool, str, bytes, type(None), type(...))


def is_atomic(value: Any) -> bool:
    """Say whether a value is so small and plain that its text stands for it."""
    if isinstance(value, str | bytes):
        return type(value) in _ATOMIC and len(value) <= _SMALL
    if isinstance(value, int):
        # Python refuses to write out longer ones.
        return type(value) in _ATOMIC and value.bit_length() <= _SMALL
    return type(value) in _ATOMIC


def _is_light(value: Any) -> bool:
    """Say whether it may be kept: it is atomic, or holds a few values that are."""
    if type(value) not in (list, tuple, dict) or len(value) > _FEW:
        return is_atomic(value)
    # Copies: another thread may change it meanwhile.
    parts = [*value, *value.values()] if type(value) is dict else [*value]
    return all(map(is_atomic, parts))


@dataclass(frozen=True, slots=True)
class _Outline:
    """An object that takes no weak references: enough of it to notice another in its place."""

    id: int
    kind: type
    length: int
    first: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> _Outline:
        # Python's own: what a user's class says of itself can raise anything.
        sized = type(value) in (list, tuple, dict, bytearray, bytes, str)
        first = itertools.islice(value, _FEW) if type(value) in (list, tuple, dict) else ()
        length = len(value) if sized else 0
        return cls(id(value), type(value), length, tuple(map(id, first)))


class Identity:
    """Says whether a name is still bound to the very same object.

    Another object can get the id of one that is gone, so where possible this is a weak
    reference, and the object itself if it is light.
    """

    def __init__(self, value: Any) -> None:
        self._value = value if _is_light(value) else None
        self._weak: weakref.ref[Any] | None = None
        self._outline: _Outline | None = None
        if is_atomic(value):
            return
        try:
            self._weak = weakref.ref(value)
        except TypeError:
            self._outline = _Outline.of(value)

    def is_still(self, value: Any) -> bool:
        """Say whether `value` is what this was made from."""
        if self._weak is not None:
            return self._weak() is value
        if self._outline is not None:
            # Its own length may have changed; it is the same object all the same.
            return self._outline.id == id(value) and self._outline.kind is type(value)
        return self._value is value

    def is_unchanged(self, value: Any) -> bool:
        """Say whether it is that, and as far as a glance can show with the same contents."""
        same = self._outline is None or self._outline == _Outline.of(value)
        return same and self.is_still(value)


MODULE, OPTIMIZER, TENSOR, OTHER = range(4)
"""In the order in which people want to hear of them."""


def kind_of(value: Any) -> int:
    """Say which of these it is, without importing torch."""
    torch = sys.modules.get("torch")
    for kind, path in enumerate(("nn.Module", "optim.Optimizer", "Tensor")):
        found: Any = torch
        for step in path.split("."):
            found = getattr(found, step, None)
        if isinstance(found, type) and isinstance(value, found):
            return kind
    return OTHER
