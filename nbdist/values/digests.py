"""Digests of memory, by which the notebook and workers notice that contents have changed.

The digests are fast to compute.  They are no protection against contents that were forged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xxhash

PIECE_BYTES = 16 << 20
"""Memory of more than this many bytes is digested in pieces of this size, by up to four threads."""

_SAMPLE_BYTES, _SAMPLES = 4096, 64


def digest_bytes(data: Any) -> str:
    """Return a digest that is the same in every process: the number of bytes and an XXH3-128.

    XXH3 reads some 7 GB/s on one core.  Memory of more than PIECE_BYTES is read in pieces by up to
    four threads, and its digest is computed from the digests of the pieces.
    """
    view = memoryview(data).cast("B")
    if view.nbytes <= PIECE_BYTES:
        return f"{view.nbytes:x}-{xxhash.xxh3_128_hexdigest(view)}"
    pieces = [view[at : at + PIECE_BYTES] for at in range(0, view.nbytes, PIECE_BYTES)]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1), "nbdist-digest") as pool:
        digests = b"".join(pool.map(xxhash.xxh3_128_digest, pieces))
    return f"{view.nbytes:x}-{xxhash.xxh3_128_hexdigest(digests)}"


def digest_pieces(pieces: Iterable[Any]) -> str:
    """Return the XXH3-128 digest of the bytes of all pieces in order, without using threads."""
    digest = xxhash.xxh3_128()
    for each in pieces:
        digest.update(each)
    return digest.hexdigest()


def sample_of(data: Any) -> str:
    """Return a digest of the number of bytes and of up to 65 pages, spread evenly over the bytes.

    If two digests differ, the bytes differ.  If they are equal, the bytes may still differ.
    """
    view = memoryview(data).cast("B")
    digest = xxhash.xxh3_128(str(view.nbytes).encode())
    for start in range(0, view.nbytes, max(_SAMPLE_BYTES, view.nbytes // _SAMPLES)):
        digest.update(view[start : start + _SAMPLE_BYTES])
    return digest.hexdigest()
