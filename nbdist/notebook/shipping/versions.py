"""How a value looked when it was last shipped, to find later whether it has changed.

`nbdist.world.names` keeps these; nothing here keeps a big value alive.
"""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from typing import Any

from nbdist.wire.payload import size_of
from nbdist.wire.pickling import Pickled
from nbdist.wire.shared_memory import Buffer

DIGEST_LIMIT = 64 * 1024 * 1024
"""Up to this many bytes a value is compared by its contents."""

_SMALL = 4096
_SAMPLES = 64


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


def is_of_array(frame: Buffer) -> bool:
    """Say whether it is the memory of an array, and big enough to be looked at in samples only."""
    view = memoryview(frame)
    # A tensor's is a piece of memory that the pickle has been told the address of.
    return view.nbytes > _SAMPLES * _SMALL and not isinstance(view.obj, ctypes.Array)


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
