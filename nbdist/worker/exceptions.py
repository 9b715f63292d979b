"""What led to an exception, and its arguments and attributes, for the notebook."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

from nbdist.errors import bare
from nbdist.values.payload import Payload, pack_frames, size_of
from nbdist.values.pickling import pickle

MOST_BYTES = 1 << 14
"""Of one argument or attribute; what is larger is no message but data, and stays here."""

NOT_SENT = frozenset({"__dict__", "__weakref__", "__notes__", "obj"})
"""Attributes that are not its own, or, with AttributeError, the whole object that lacks one."""


def contents_of(error: BaseException, namespace: dict[str, Any]) -> Payload:
    """Pack the arguments and attributes of an exception, as far as each can be sent.

    In place of an argument that cannot there is its text.  One of a class that is not written in
    Python comes whole too.
    """
    args = [_packed(arg, namespace) or _packed(_text(arg), namespace) for arg in error.args]
    state = {name: _packed(value, namespace) for name, value in _attributes(error)}
    whole = None
    try:
        bare(type(error))
    except Exception:  # noqa: BLE001 (a class in C or Rust raises what it likes)
        whole = _packed(error, namespace)
    frames = pickle((args, {k: v for k, v in state.items() if v}, whole), namespace).frames
    return pack_frames(frames)[0]


def led_to(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _packed(value: object, namespace: dict[str, Any]) -> list[bytes] | None:
    try:
        pickled = pickle(value, namespace, sketch=True)
    except Exception:  # noqa: BLE001 (a class's own `__reduce__` can raise anything)
        return None
    if pickled.is_sketch or size_of(pickled.frames) > MOST_BYTES:
        return None
    return [bytes(memoryview(frame)) for frame in pickled.frames]


def _text(value: object) -> str:
    try:
        return repr(value)[:1000]
    except Exception as error:  # noqa: BLE001 (the class is the user's)
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"


def _attributes(error: BaseException) -> Iterator[tuple[str, object]]:
    """Yield those that it has itself, and those that its builtin class or slots keep."""
    own = {**object.__getattribute__(error, "__dict__")}
    for name, kept in _kept_by_classes(type(error)):
        with suppress(AttributeError):  # it has none
            own.setdefault(name, kept.__get__(error))
    yield from ((name, each) for name, each in own.items() if name not in NOT_SENT)


def _kept_by_classes(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that builtin classes and slots keep; calls nothing of the user's."""
    for base in kind.__mro__:
        if base not in (BaseException, object):
            for name, each in vars(base).items():
                if isinstance(each, MemberDescriptorType | GetSetDescriptorType):
                    yield name, each
