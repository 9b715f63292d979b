"""Turns messages into bytes and back: pickles, frames with their length, and JSON.

Every process of nbdist uses this file.  Users' code runs in workers, so a worker's messages are not
trusted: they are read with `object_from`, which makes objects of expected classes only.
"""

from __future__ import annotations

import io
import pickle
import struct
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_LENGTH = struct.Struct("!Q")
_MISSING = object()

NO_VALUES: Mapping[str, Any] = {}
"""An empty mapping, the default of some fields; no code may add to this object."""


class BadFrame(Exception):
    """The bytes are no valid message; the error's text says why."""


def pack(message: object) -> bytes:
    """Return a message as a pickle, for `unpack` or `object_from`."""
    return pickle.dumps(message, protocol=5)


def unpack(frame: bytes | memoryview) -> Any:
    """Unpickle a message that `pack` has pickled.

    The sender must be trusted, because unpickling can run any code.
    """
    return pickle.loads(frame)


def object_from(frame: bytes, kind: Any, *parts: type) -> Any:
    """Unpickle an object of the type `kind` from a sender that is not trusted.

    `kind` is a class or a union.  The frame may have plain Python objects, and those dataclasses
    and named tuples that occur in `kind`, in `parts`, or in annotations of their fields.  So
    unpickling cannot run code of any other class.  The object and its fields must fit their
    annotations; a field with the annotation Any may have any value.  Raises BadFrame for any other
    frame.
    """
    try:
        value = _FrameUnpickler(frame, _classes_by_name(kind, *parts)).load()
    except Exception as error:  # garbage can make unpickling raise anything
        raise BadFrame(f"{type(error).__name__}: {error}"[:200]) from error
    if not fits(value, kind):
        raise BadFrame(f"it is no {getattr(kind, '__name__', kind)}"[:200])
    return value


class _FrameUnpickler(pickle.Unpickler):
    def __init__(self, frame: bytes, classes: Mapping[tuple[str, str], type]) -> None:
        super().__init__(io.BytesIO(frame))
        self._classes = classes

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._classes:
            raise pickle.UnpicklingError(f"{module}.{name} has no place there")
        return self._classes[module, name]


def _is_record(kind: Any) -> bool:
    """Return True if the type is a dataclass or a named tuple."""
    return isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))


@cache
def _parts_of(kind: Any) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Return `get_origin` and `get_args` of a type, and the annotations of its fields by name.

    Only dataclasses and named tuples have fields.
    """
    hints: dict[str, Any] = {}
    if _is_record(kind):
        all_hints = get_type_hints(kind)
        names = (each.name for each in fields(kind)) if is_dataclass(kind) else kind._fields
        hints = {name: all_hints[name] for name in names}
    return get_origin(kind), get_args(kind), hints


@cache
def _classes_by_name(*kinds: Any) -> Mapping[tuple[str, str], type]:
    classes: set[type] = set()
    waiting = [*kinds]
    while waiting:
        each = waiting.pop()
        if each in classes:
            continue
        if _is_record(each):
            classes.add(each)
        _, inner, hints = _parts_of(each)
        waiting += [*inner, *hints.values()]
    return {(each.__module__, each.__qualname__): each for each in classes}


def fits(value: Any, kind: Any) -> bool:
    """Return True if a value fits the type annotation `kind`, with all its parts and fields.

    An int fits `float`, too.
    """
    return _check_for(kind)(value)


@cache
def _check_for(kind: Any) -> Callable[[Any], bool]:
    """Return the function that tells whether a value fits an annotation.

    An agent checks each message of a worker, so the annotation is taken apart only once.
    """
    origin, inner, _ = _parts_of(kind)
    if kind is Any:
        return lambda value: True
    if kind is float:
        return lambda value: isinstance(value, float | int)
    if origin is Literal:
        return lambda value: any(type(value) is type(each) and value == each for each in inner)
    if origin in (Union, types.UnionType):
        return _check_for_union([*map(_check_for, inner)])
    if origin is None:
        return _check_for_class(kind)
    if issubclass(origin, Mapping):
        fits_key, fits_value = map(_check_for, inner)
        return lambda value: (
            isinstance(value, origin)
            and all(fits_key(k) and fits_value(each) for k, each in value.items())
        )
    parts = [*map(_check_for, inner)]
    if origin is tuple and inner[-1] is not ...:
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(parts)
            and all(check(each) for check, each in zip(parts, value, strict=True))
        )
    return lambda value: isinstance(value, origin) and all(map(parts[0], value))


def _check_for_union(checks: list[Callable[[Any], bool]]) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        for each in checks:  # noqa: SIM110 (`any` would take longer)
            if each(value):
                return True
        return False

    return check


def _check_for_class(kind: Any) -> Callable[[Any], bool]:
    if not _is_record(kind):
        return lambda value: isinstance(value, kind)
    fields_to_check: list[tuple[str, Callable[[Any], bool]]] | None = None

    def check(value: Any) -> bool:
        nonlocal fields_to_check
        if not isinstance(value, kind):
            return False
        # Make the list only at the first call, because a record may have a field of its own type.
        if fields_to_check is None:
            fields_to_check = [
                (name, _check_for(each)) for name, each in _parts_of(kind)[2].items()
            ]
        for name, fits_field in fields_to_check:
            if not fits_field(getattr(value, name, _MISSING)):
                return False
        return True

    return check


def to_plain(value: Any) -> Any:
    """Return a value in a form for JSON: dataclasses and named tuples as dicts, tuples as lists."""
    kind: Any = type(value)
    if _is_record(kind):
        return {name: to_plain(getattr(value, name)) for name in _parts_of(kind)[2]}
    return [*map(to_plain, value)] if isinstance(value, tuple) else value


def from_plain(value: Any, kind: Any) -> Any:
    """Return a value of the type `kind` from the result of `to_plain`.

    Fields that `kind` lacks are dropped, because another version of nbdist may send more fields.
    Raises TypeError if a field without a default is missing; but if `kind` is a union, such a
    `value` is returned as it is.  Types of fields are not checked: callers call `fits` on the
    result.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # try the types in turn, until one raises no TypeError
        for each in inner:
            with suppress(TypeError):
                return from_plain(value, each)
    if isinstance(value, dict) and _is_record(kind):
        given = {name: each for name, each in _parts_of(kind)[2].items() if name in value}
        return kind(**{name: from_plain(value[name], each) for name, each in given.items()})
    if isinstance(value, list) and origin is tuple:
        return tuple(from_plain(each, inner[0]) for each in value)
    return value


def framed(data: bytes) -> bytes:
    """Return a frame for `FrameCutter`: the number of bytes as 8 bytes, and then the bytes."""
    return _LENGTH.pack(len(data)) + data


class FrameCutter:
    """Cuts a stream of bytes into frames; a frame longer than `max_bytes` raises BadFrame."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._data = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes of the stream, and yield the contents of the frames that are now complete."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if self._max_bytes is not None and length > self._max_bytes:
                raise BadFrame(f"a frame of {length:,} bytes")
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            frame = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield frame
