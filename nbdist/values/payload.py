"""Pickled values that are sent between processes, in messages or in shared memory.

Notebook, agents and workers use this file.  A segment is memory that one process fills once, and
that other processes of the same user on the machine map.  A segment has no name in a file system:
other processes open its owner's file descriptor through `/proc/<pid>/fd`.  So Linux frees the
memory when no process uses it any more, even if the owner is killed.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, Self, TypeVar

from nbdist.errors import UsageError
from nbdist.system.limits import require_memory
from nbdist.values.memory import reduce_to_file
from nbdist.values.pickling import Buffer, pickle

T = TypeVar("T")
V = TypeVar("V")

# --- segments --------------------------------------------------------------------------------

# Each frame begins at a multiple of this number of bytes, to which torch's allocator for the CPU
# aligns memory, too.
ALIGNMENT = 64

COPY_PIECE = 32 << 20
"""The most bytes that a generator copies before it yields: so Stop takes effect within 50 ms."""

# From linux/fcntl.h; the fcntl module has names for the numbers only in some builds.
_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4  # no further seals, no shrinking, no growing
_SEAL_WRITE = 0x8  # no writing


class SegmentGone(OSError):
    """A segment cannot be opened: it was closed, its owner is gone, or a permission is missing."""


class SegmentRef(NamedTuple):
    """The path by which processes of the same user on the machine can open a segment.

    `path` ends in `#` and the inode.  By the inode, a process notices that the segment was closed
    and that the owner has opened another file with the same descriptor number.  `sizes` has the
    number of bytes of each frame.
    """

    path: str
    sizes: tuple[int, ...]


class _Open:
    """A file descriptor that is closed by `close`, or once nothing refers to this object."""

    _fd: int

    def close(self) -> None:
        """Close the descriptor; Linux frees the memory once no process has it open or mapped."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Without this the memory of a segment that nobody has closed would stay until the process
        # exits.
        if not sys.is_finalizing():
            self.close()


class Segment(_Open):
    """Frames in shared memory, which other processes can open until this object is closed.

    A process that has mapped the frames can use them for longer.
    """

    def __init__(self, fd: int, sizes: tuple[int, ...]) -> None:
        """Take over this descriptor, and close it later.  To make a new segment, use `filling`."""
        self._fd = fd
        self.ref = SegmentRef(f"/proc/{os.getpid()}/fd/{fd}#{os.fstat(fd).st_ino}", sizes)

    @classmethod
    def filling(cls, frames: Sequence[Buffer]) -> Generator[int, None, Segment]:
        """Make a new segment with a copy of the frames; the generator returns the segment.

        Yields the number of bytes copied so far, at least every `COPY_PIECE` bytes.  Raises
        NotEnoughMemory before copying, or OSError if memory runs out later.  If the generator
        raises, or is closed before its end, nothing is left behind.
        """
        views = [memoryview(frame).cast("B") for frame in frames]
        with Blank([view.nbytes for view in views]) as blank:
            copied = 0
            for view, offset in zip(views, blank.offsets, strict=True):
                for done in blank.writing(view, offset):
                    yield copied + done
                copied += view.nbytes
            return blank.sealed()

    @classmethod
    def of_another(cls, ref: SegmentRef) -> Segment:
        """Open another process's segment, to keep the segment when its owner closes it.

        Raises SegmentGone if the segment cannot be opened.
        """
        return cls(open_file(ref), ref.sizes)


class Blank(_Open):
    """A new segment for frames of given sizes, which the caller fills by `writing`.

    `total` is the segment's size in bytes.  `filled` is how many of its first bytes are written.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._fd = -1
        self.sizes = tuple(sizes)
        self.offsets, self.total = _layout(self.sizes)
        self.filled = 0
        require_memory(self.total)
        self._fd = os.memfd_create("nbdist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, self.total)

    def writing(self, view: memoryview, offset: int) -> Iterator[int]:
        """Write bytes at an offset in pieces; after each piece yield how many bytes are written."""
        # Write to the file, and do not copy into a mapping: this takes 0.33 s instead of 3.0 s for
        # 1 GiB.  In a new mapping, Linux handles a page fault and clears the page for every 4 KiB.
        done = 0
        while done < view.nbytes:
            # Write in pieces: a signal does not end a write to memory, so Stop would have to wait
            # for the end of a single big write.
            done += os.pwrite(self._fd, view[done : done + COPY_PIECE], offset + done)
            self.filled = offset + done
            yield done

    def sealed(self) -> Segment:
        """Return the filled segment; its size is fixed, and Linux mostly forbids writing to it."""
        # Seal the memory, so that no process can change or truncate what other processes have
        # mapped.  If it were truncated, reading the memory would kill them with SIGBUS.
        try:
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _SEALS | _SEAL_WRITE)
        except OSError as error:
            # Linux forbids writing only once nobody uses the pages.  On a busy machine, its own
            # memory management can use pages for longer than the call waits (0.15 s).
            if error.errno != errno.EBUSY:
                raise
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _SEALS)
        fd, self._fd = self._fd, -1
        return Segment(fd, self.sizes)


def open_segment(ref: SegmentRef) -> list[memoryview]:
    """Map the frames of another process's segment, as writable private views.

    Pages are shared until they are written to.  The mapping lives as long as any of
    the views, and does not need the owner any more.  Raises `SegmentGone`.
    """
    offsets, total = _layout(ref.sizes)
    fd = open_file(ref)
    try:
        mapping = mmap.mmap(fd, total, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    whole = memoryview(mapping)
    return [whole[offset : offset + size] for offset, size in zip(offsets, ref.sizes, strict=True)]


def open_file(ref: SegmentRef) -> int:
    """Open a segment, and return its file descriptor; raises `SegmentGone` if this is impossible.

    The file has `length_of(ref)` bytes.
    """
    path, _, inode = ref.path.partition("#")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SegmentGone(f"shared memory {ref.path} cannot be opened: {error}") from error
    status = os.fstat(fd)
    # The path may lead to another file by now: Linux reuses descriptor numbers and process ids.
    if str(status.st_ino) != inode or status.st_size != length_of(ref):
        os.close(fd)
        raise SegmentGone(f"shared memory {ref.path} is gone: its owner has closed it")
    return fd


def is_open(ref: SegmentRef) -> bool:
    """Return True if the owner of a segment has not closed the segment yet."""
    path, _, inode = ref.path.partition("#")
    with suppress(OSError):
        return str(os.stat(path).st_ino) == inode
    return False


def length_of(ref: SegmentRef) -> int:
    """Return the number of bytes of a segment, with the gaps between its frames."""
    return _layout(ref.sizes)[1]


class StepwiseValue(Generic[T]):
    """A value that a generator makes in steps.

    Iterate to the end, then read `made`; or call `close` to stop before the end.
    """

    made: T

    def __init__(self, steps: Generator[int, None, T]) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[int]:
        """Yield the number of bytes done so far; set `made` at the end."""
        self.made = yield from self._steps

    def close(self) -> None:
        """Stop making the value."""
        self._steps.close()


def run_to_end(steps: Generator[int, None, T]) -> T:
    """Run all steps, and return the value that they make."""
    whole = StepwiseValue(steps)
    for _ in whole:
        pass
    return whole.made


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of each frame, and the size of the whole segment, in bytes."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, max(end, ALIGNMENT)  # not 0, since an empty file cannot be mapped


# --- payloads --------------------------------------------------------------------------------

INLINE_LIMIT = 64 * 1024
"""By default, a payload of this many bytes or more is put into shared memory, not into messages."""


class Payload(NamedTuple):
    """A pickled value as frames: the first is the pickle, the others are its out-of-band buffers.

    The frames of a small value are in `frames`, as a part of the message.  The frames of a big
    value are in the shared memory `segment`, and `frames` is empty.

    The pickled value can itself contain payloads, whose segments are listed in `within`.  Each item
    has the path that is in the pickled value, and a reference that the reader can open.  On another
    machine, this is a reference to a copy of the segment (`relocate`).
    """

    frames: tuple[bytes, ...] = ()
    segment: SegmentRef | None = None
    within: tuple[tuple[str, SegmentRef], ...] = ()


PackedPayload = tuple[Payload, Segment | None]
"""A payload, and its segment or None; the segment must stay open until the receiver has opened it.
"""


def pack_frames(frames: Sequence[Buffer]) -> PackedPayload:
    """Return a payload of frames, and its segment or None; `packing` makes them in steps."""
    return run_to_end(packing(frames))


def packing(
    frames: Sequence[Buffer], inline_limit: int = INLINE_LIMIT
) -> Generator[int, None, PackedPayload]:
    """Make a payload of frames in steps; the generator returns the payload and its segment or None.

    Frames with `inline_limit` bytes or more in total are copied to shared memory.  Meanwhile the
    generator yields the number of bytes copied so far; it can be closed before its end.
    """
    if size_of(frames) < inline_limit:
        return pack_inline(frames), None
    segment = yield from Segment.filling(frames)
    return Payload(segment=segment.ref), segment


def pack_inline(frames: Sequence[Buffer]) -> Payload:
    """Make a payload whose frames are part of the message, whatever their size."""
    return Payload(frames=tuple(bytes(memoryview(frame)) for frame in frames))


def size_of(frames: Iterable[Buffer]) -> int:
    """Return the number of bytes of all frames together."""
    return sum(memoryview(frame).nbytes for frame in frames)


def pack_names(
    names: Mapping[str, Any] | None, namespace: dict[str, Any]
) -> tuple[Payload | None, Segment | None]:
    """Pickle variables by name; return their payload, and its segment or None.

    Returns (None, None) if there are no names.

    Raises UsageError if a function in `names` uses a global name that is neither in `names` nor a
    built-in.
    """
    if not names:
        return None, None
    check_needs(names, namespace)
    return pack_frames(pickle(dict(names), namespace, reduce=reduce_to_file).frames)


def check_needs(names: Mapping[str, Any], namespace: dict[str, Any]) -> None:
    """Raise UsageError if a function in `names` uses a global name that `names` lacks.

    Names of built-ins are allowed.
    """
    pickled = pickle(dict(names), namespace, sketch=True, reduce=reduce_to_file)
    if missing := pickled.needs - names.keys() - vars(builtins).keys():
        listed = ", ".join(sorted(missing))
        raise UsageError(f"The functions among `names` use {listed}: pass these too.")


def open_payload(payload: Payload) -> list[Buffer]:
    """Return a payload's frames; raises `SegmentGone` if its segment cannot be opened.

    If this process writes to frames in a segment, no other process sees the change.
    """
    return [*(payload.frames if payload.segment is None else open_segment(payload.segment))]


# --- where segments are ----------------------------------------------------------------------

Places = Mapping[str, SegmentRef]
"""By the path of a segment: the copy of the segment on the machine of the process that reads it."""


def refs_in(value: object) -> tuple[SegmentRef, ...]:
    """Return the segments of all payloads in a value, each once.

    The payloads may be in mappings, lists and tuples.
    """
    refs: list[SegmentRef] = []

    def collect(payload: Payload) -> Payload:
        within = [ref for _, ref in payload.within]
        refs.extend(filter(None, [payload.segment, *within]))
        return payload

    _with_payloads(value, collect)
    return tuple(dict.fromkeys(refs))


def relocate(value: V, places: Places) -> V:
    """Return the value with segments in its payloads replaced by their copies in `places`.

    A segment that `places` lacks stays.
    """

    def now(ref: SegmentRef) -> SegmentRef:
        return places.get(ref.path, ref)

    def move(payload: Payload) -> Payload:
        within = tuple((path, now(ref)) for path, ref in payload.within)
        return payload._replace(segment=payload.segment and now(payload.segment), within=within)

    # Without copies do not search the value: it may be the user's, and very big.
    return _with_payloads(value, move) if places else value


def _with_payloads(value: Any, change: Callable[[Payload], Payload]) -> Any:
    match value:
        case Payload():
            return change(value)
        case Mapping():
            return {key: _with_payloads(each, change) for key, each in value.items()}
        case list():
            return [_with_payloads(each, change) for each in value]
        case tuple():
            parts = [_with_payloads(each, change) for each in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def localize(value: V, payload: Payload) -> V:
    """Return a value that was unpickled from `payload`, with segments that this process can open.

    If the message has come from another machine, the segments of inner payloads are replaced by the
    copies that `payload.within` names.
    """
    return relocate(value, {path: ref for path, ref in payload.within if path != ref.path})


# --- the value of a variable ------------------------------------------------------------------

_SMALL, _FEW = 4096, 16
_ATOMIC = (int, float, complex, bool, str, bytes, type(None), type(...))


def is_atomic(value: Any) -> bool:
    """Return True if a value is None, `...`, a bool, or a short number, text or `bytes` object."""
    if type(value) not in _ATOMIC:
        return False
    if isinstance(value, str | bytes):
        return len(value) <= _SMALL
    # A longer int does not count as atomic: Python refuses to convert very long numbers to text.
    return not isinstance(value, int) or value.bit_length() <= _SMALL


def is_light(value: Any) -> bool:
    """Return True for an atomic value, and for a list, tuple or dict of a few atomic values."""
    if type(value) not in (list, tuple, dict) or len(value) > _FEW:
        return is_atomic(value)
    # Check copies, since another thread may change the container meanwhile.
    return all(map(is_atomic, [*value, *value.values()] if type(value) is dict else [*value]))


class Identity:
    """Recognizes an object, to find out if a variable is still bound to the same object.

    The id alone is not enough, since a new object can get the id of a deleted object.  So an
    `Identity` has a weak reference to the object, or a light object itself (`is_light`).  Of any
    other object without weak references, such as a big list or text, it has only the id and the
    type: a new object of this type at the same address counts as the same object.
    """

    def __init__(self, value: Any) -> None:
        self._value = value if is_light(value) else None
        self._weak: weakref.ref[Any] | None = None
        self._id: tuple[int, type] | None = None
        if is_atomic(value):
            return
        try:
            self._weak = weakref.ref(value)
        except TypeError:
            self._id = id(value), type(value)

    def is_still(self, value: Any) -> bool:
        """Return True if `value` counts as the object from which this `Identity` was made."""
        if self._weak is not None:
            return self._weak() is value
        if self._id is not None:
            return self._id == (id(value), type(value))
        return self._value is value


def least_size(value: Any) -> int:
    """Estimate how many bytes a value has, without reading its items.

    The estimate is `nbytes` if the value has this attribute, as a tensor or an array.  It is 8 for
    each item of a list, tuple, dict or set, or letter of a text.  It is 0 for other values.
    """
    try:
        size = value.nbytes
    except Exception:  # noqa: BLE001 (most values have none, and a user's property can raise anything)
        size = None
    if type(size) is int:
        return size
    return 8 * len(value) if isinstance(value, str | bytes | list | tuple | dict | set) else 0


SHARDED, MODULE, OPTIMIZER, TENSOR, OTHER = range(5)
"""Kinds of values, the most interesting kind first; SHARDED is a module after `fully_shard`."""

_KIND_CLASSES = (
    ("torch.distributed.fsdp", "FSDPModule"),
    ("torch.nn.modules.module", "Module"),
    ("torch.optim.optimizer", "Optimizer"),
    ("torch", "Tensor"),
)
"""For each kind but OTHER, in order: a package of torch, and the name of a class in the package."""


def kind_of(value: Any) -> int:
    """Return the kind of a value, one of SHARDED to OTHER, without importing torch."""
    for kind, (package, name) in enumerate(_KIND_CLASSES):
        classes = (each for each in type(value).__mro__ if each.__qualname__ == name)
        if any(f"{each.__module__}.".startswith(f"{package}.") for each in classes):
            return kind
    return OTHER
