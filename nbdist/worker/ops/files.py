"""Frames of a pickle in a file of their own, with a digest; written and read by one rank."""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from nbdist import folders
from nbdist.values.shared_memory import ALIGNMENT, Buffer

MAGIC = b"nbdist frames 1\n"
HEAD = len(MAGIC) + 8
CHUNK = 1 << 24
SMALL = 1 << 16
"""Frames below this many bytes share one piece of memory when they are read."""


class Damaged(Exception):
    """A file that is not as it was written; the message says what is wrong with it."""


def write_frames(path: Path, frames: Sequence[Buffer]) -> tuple[int, str]:
    """Write a new file, on the disk when this returns; its size and digest.  Raises OSError.

    Only this user can read it.
    """
    views = [memoryview(frame).cast("B") for frame in frames]
    head = json.dumps([view.nbytes for view in views]).encode()
    digest, size = hashlib.sha256(), 0
    with open(path, "xb", buffering=0, opener=folders.open_private) as file:
        for view in (memoryview(MAGIC + len(head).to_bytes(8, "little") + head), *views):
            size += _write(file.fileno(), view, digest.update)
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _write(fd: int, view: memoryview, take: Callable[[memoryview], None]) -> int:
    done = 0
    while done < view.nbytes:
        part = view[done : done + CHUNK]
        done_now = os.write(fd, part)
        take(part[:done_now])
        done += done_now
    return done


def read_frames(path: Path, size: int, digest: str) -> list[memoryview]:
    """Return the frames of a file, in private memory that can be written to.

    Raises Damaged where the file is not the one that was written, Untrusted where another
    user could have written it, and OSError.
    """
    found = hashlib.sha256()
    with _opened(path, size) as file:
        head = bytearray(HEAD)
        _read(file.fileno(), memoryview(head), found.update)
        listed = bytearray(_length(path, head, size))
        _read(file.fileno(), memoryview(listed), found.update)
        frames = _memory(_sizes(path, listed, size))
        for frame in frames:
            _read(file.fileno(), frame, found.update)
    _compare(path, found.hexdigest(), digest)
    return frames


def map_frames(path: Path, size: int, digest: str) -> list[memoryview]:
    """Return the same in the file's own pages, of which all readers share one copy; not aligned."""
    with _opened(path, size) as file:
        whole = memoryview(mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE))
    found = hashlib.sha256()
    for start in range(0, size, CHUNK):
        found.update(whole[start : start + CHUNK])
    _compare(path, found.hexdigest(), digest)
    end = HEAD + _length(path, whole[:HEAD], size)
    frames = []
    for each in _sizes(path, whole[HEAD:end], size):
        frames.append(whole[end : end + each])
        end += each
    return frames


def _opened(path: Path, size: int) -> io.FileIO:
    with folders.trusted_folder(path.parent) as at:
        opened = folders.open_trusted(path, at)
    file = os.fdopen(opened, "rb", buffering=0)
    if (there := os.fstat(opened).st_size) != size:
        file.close()
        raise Damaged(f"{path.name} has {there:,} of {size:,} bytes")
    return file


def _length(path: Path, head: Buffer, size: int) -> int:
    """Return that of the list of sizes, which comes after the head."""
    length = int.from_bytes(bytes(head)[len(MAGIC) :], "little")
    if not bytes(head).startswith(MAGIC) or length > size:
        raise _changed(path)
    return length


def _sizes(path: Path, listed: Buffer, size: int) -> list[int]:
    """Return those of the frames, which take the rest of the file."""
    sizes = _sizes_from(bytes(listed))
    if sum(sizes) != size - HEAD - memoryview(listed).nbytes:
        raise _changed(path)
    return sizes


def _sizes_from(listed: bytes) -> list[int]:
    """Return the sizes of the frames; none where that is not what it says."""
    try:
        sizes = json.loads(listed)
    except ValueError:
        return []
    is_list = type(sizes) is list and all(type(size) is int and size >= 0 for size in sizes)
    return sizes if is_list else []


def _compare(path: Path, found: str, digest: str) -> None:
    if found != digest:
        raise _changed(path)


def _changed(path: Path) -> Damaged:
    return Damaged(f"{path.name} has other contents than were written")


def _memory(sizes: Sequence[int]) -> list[memoryview]:
    """Return memory for frames of these sizes, aligned as torch's own.

    Some of torch's sums depend on the alignment: training would go on with other last bits.
    Big frames are freed one by one, small ones together.
    """
    small = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes if size < SMALL]
    shared, offset, frames = _mapping(sum(small)), 0, []
    for size in sizes:
        if size < SMALL:
            frames.append(shared[offset : offset + size])
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        else:
            frames.append(_mapping(size)[:size])
    return frames


def _mapping(size: int) -> memoryview:
    """Return pages of this process's own: what a forked child writes there is the child's."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return memoryview(mmap.mmap(-1, max(size, ALIGNMENT), flags=flags))


def _read(fd: int, view: memoryview, take: Callable[[memoryview], None]) -> None:
    done = 0
    while done < view.nbytes:
        part = view[done : done + CHUNK]
        count = os.readv(fd, [part])
        if not count:
            raise Damaged("a file ended while it was read")
        take(part[:count])
        done += count
