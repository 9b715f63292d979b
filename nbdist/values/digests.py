"""Digests of memory, which tell the notebook and workers whether contents have changed.

They are fast, and no protection against forgery.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xxhash

PIECE_BYTES = 16 << 20
"""Bytes that are read between two checks for Stop, and that one thread reads at a time."""

_SAMPLE_BYTES, _SAMPLES = 4096, 64


def digest_bytes(data: Any) -> str:
    """Return the digest of bytes, the same in every process: their number and XXH3-128.

    XXH3 reads some 7 GB/s on one core, CRC-32 of zlib 2 GB/s.  Pieces of big memory are read by
    several threads.
    """
    view = memoryview(data).cast("B")
    if view.nbytes <= PIECE_BYTES:
        return f"{view.nbytes:x}-{xxhash.xxh3_128_hexdigest(view)}"
    pieces = [view[at : at + PIECE_BYTES] for at in range(0, view.nbytes, PIECE_BYTES)]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1), "nbdist-digest") as pool:
        digests = b"".join(pool.map(xxhash.xxh3_128_digest, pieces))
    return f"{view.nbytes:x}-{xxhash.xxh3_128_hexdigest(digests)}"


def digest_pieces(pieces: Iterable[Any]) -> str:
    """Return the XXH3-128 of bytes that come in pieces; only the calling thread reads them."""
    digest = xxhash.xxh3_128()
    for each in pieces:
        digest.update(each)
    return digest.hexdigest()


def sample_of(data: Any) -> str:
    """Return the digest of some pages of the bytes: if it differs, the bytes have changed."""
    view = memoryview(data).cast("B")
    digest = xxhash.xxh3_128(str(view.nbytes).encode())
    for start in range(0, view.nbytes, max(_SAMPLE_BYTES, view.nbytes // _SAMPLES)):
        digest.update(view[start : start + _SAMPLE_BYTES])
    return digest.hexdigest()
