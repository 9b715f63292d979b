"""How a value looked when it was last shipped, to find later whether it has changed.

`nbdist.notebook.shipping.ledger` keeps these; nothing here keeps a big value alive.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nbdist.wire.pickling import Pickled
from nbdist.wire.shared_memory import Buffer

DIGEST_LIMIT = 64 * 1024 * 1024
"""Up to this many bytes a value is compared by its contents."""

_SMALL = 4096
_SAMPLES = 64
_ATOMIC = (int, float, complex, bool, str, bytes, type(None), type(...))


def is_atomic(value: Any) -> bool:
    """Say whether a value is so small and plain that its text stands for it."""
    if isinstance(value, str | bytes):
        return type(value) in _ATOMIC and len(value) <= _SMALL
    if isinstance(value, int):
        # Python refuses to write out longer ones.
        return type(value) in _ATOMIC and value.bit_length() <= _SMALL
    return type(value) in _ATOMIC


def atomic_version(value: Any) -> tuple[str, str]:
    """Return what differs whenever the value of an atomic object does."""
    return type(value).__name__, repr(value)


def content_version(pickled: Pickled) -> bytes:
    """Return what differs when the value does: the digest of its pickle, and of its buffers.

    Buffers of more than `DIGEST_LIMIT` in all are looked at here and there only; the
    count of changes that every tensor keeps makes up for it.
    """
    first, *buffers = (memoryview(frame) for frame in pickled.frames)
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, first)
    in_full = size_of(pickled.frames) <= DIGEST_LIMIT
    for buffer in buffers:
        if in_full:
            _add(digest, buffer)
        else:
            _add_samples(digest, buffer)
    if pickled.is_sketch or not in_full:
        digest.update(repr(pickled.versions).encode())
    return digest.digest()


def size_of(frames: list[Buffer]) -> int:
    """Count the bytes of all frames."""
    return sum(memoryview(frame).nbytes for frame in frames)


def _add(digest: hashlib.blake2b, view: memoryview) -> None:
    if view.nbytes <= 16 * _SMALL:
        digest.update(view)
    else:
        # Four times as fast as any hash in hashlib (4 GB/s); no value is forged here.
        digest.update(f"{view.nbytes} {zlib.crc32(view)}".encode())


def _add_samples(digest: hashlib.blake2b, view: memoryview) -> None:
    digest.update(str(view.nbytes).encode())
    for start in range(0, view.nbytes, max(_SMALL, view.nbytes // _SAMPLES)):
        digest.update(view[start : start + _SMALL])


@dataclass(frozen=True, slots=True)
class _Outline:
    """An object that takes no weak references: enough of it to notice another in its place."""

    id: int
    kind: type
    length: int
    first: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> _Outline:
        length = len(value) if hasattr(type(value), "__len__") else 0
        first: Iterator[Any] = iter(value) if isinstance(value, list | tuple | dict) else iter(())
        return cls(
            id(value), type(value), length, tuple(id(v) for v in itertools.islice(first, 16))
        )


class Identity:
    """Says whether a name is still bound to the very same object.

    Another object can get the id of one that is gone, so where possible this is a weak
    reference, and the object itself if it is small.
    """

    def __init__(self, value: Any) -> None:
        self._value = value if is_atomic(value) else None
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
