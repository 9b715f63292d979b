"""Bytes from where users' code runs: cut into frames, and made objects without trusting them."""

from __future__ import annotations

import io
import pickle
import struct
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_LENGTH = struct.Struct("!Q")
_MISSING = object()


class BadFrame(Exception):
    """Bytes that are not what they should be; the message says in what."""


# --- objects ----------------------------------------------------------------------------


def object_from(frame: bytes, kind: Any, *parts: type) -> Any:
    """Return what was pickled, if it is of this kind: a dataclass, or a union; raises BadFrame.

    Nothing runs, and no class but those in the annotations of `kind`, and `parts`, is made;
    every field has the type that its annotation says.
    """
    try:
        found = _Unpickler(frame, _classes_in(kind).union(*map(_classes_in, parts))).load()
    except Exception as error:  # garbage can make unpickling raise anything
        raise BadFrame(f"{type(error).__name__}: {error}"[:200]) from error
    if not fits(found, kind):
        raise BadFrame(f"it is no {getattr(kind, '__name__', kind)}"[:200])
    return found


class _Unpickler(pickle.Unpickler):
    """Makes objects of some classes, and runs nothing else."""

    def __init__(self, frame: bytes, classes: Collection[type]) -> None:
        super().__init__(io.BytesIO(frame))
        self._classes = {(each.__module__, each.__qualname__): each for each in classes}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._classes:
            raise pickle.UnpicklingError(f"{module}.{name} has no place there")
        return self._classes[module, name]


_hints = cache(get_type_hints)


@cache
def _classes_in(kind: Any) -> frozenset[type]:
    """Return the dataclasses that a value of this kind can be made of."""
    found: set[type] = set()
    waiting = [kind]
    while waiting:
        each = waiting.pop()
        if isinstance(each, type) and is_dataclass(each) and each not in found:
            found.add(each)
            waiting += _hints(each).values()
        waiting += get_args(each)
    return frozenset(found)


def fits(value: object, kind: Any) -> bool:
    """Say whether a value is what an annotation says, all the way down."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if kind is Any:
        return True
    if kind is None:
        return value is None
    if kind is float:
        return isinstance(value, float | int)
    if origin is None:
        return isinstance(value, kind) and (not is_dataclass(kind) or _fields_fit(value, kind))
    return isinstance(value, origin) and _parts_fit(value, inner)


def _fields_fit(value: object, kind: Any) -> bool:
    hints = _hints(kind)
    return all(fits(getattr(value, each.name, _MISSING), hints[each.name]) for each in fields(kind))


def _parts_fit(value: Any, inner: tuple[Any, ...]) -> bool:
    """Say so of the parts of a mapping, a tuple, or a collection of equal things."""
    if isinstance(value, Mapping):
        keys, values = inner
        return all(fits(key, keys) and fits(each, values) for key, each in value.items())
    if isinstance(value, tuple) and inner[-1] is not ...:
        pairs = zip(value, inner, strict=False)
        return len(value) == len(inner) and all(fits(each, kind) for each, kind in pairs)
    return all(fits(each, inner[0]) for each in value)


# --- frames of a stream ------------------------------------------------------------------


def framed(data: bytes) -> bytes:
    """Return the bytes with their length before them."""
    return _LENGTH.pack(len(data)) + data


class FrameCutter:
    """Cuts what is read from a stream into the frames that were written.

    One of more than `most` bytes raises BadFrame.
    """

    def __init__(self, most: int | None = None) -> None:
        self._data = bytearray()
        self._most = most

    def __repr__(self) -> str:
        return f"<FrameCutter {len(self._data)} bytes of the next>"

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that are complete by now."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if self._most is not None and length > self._most:
                raise BadFrame(f"a frame of {length:,} bytes")
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            frame = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield frame
