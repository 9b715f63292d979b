"""Python values on their way between processes: pickled, big ones in shared memory.

The memory of what was shipped can be kept, and of a value that is shipped again only those
frames are copied, the memory of its tensors and arrays, that differ from what lies there.  So
the receiver gets the value as it is now, all of it, whatever it has done with the last one.
"""

from __future__ import annotations

import builtins
import ctypes
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from nbdist.errors import UsageError
from nbdist.values.pickling import pickle
from nbdist.values.shared_memory import Buffer, Segment, Steps, open_segment, to_end
from nbdist.values.shared_memory import SegmentRef as SegmentRef

Value = TypeVar("Value")

INLINE_LIMIT = 64 * 1024
"""From this many bytes on a payload goes into shared memory."""


@dataclass(frozen=True, slots=True)
class Payload:
    """Frames of one pickle (the first) and its out-of-band buffers (the others).

    Small ones travel in the message; big ones stay in a segment that the sender owns.  With an
    `order` some are in `others`, where they were before: by frame the number of the memory,
    0 for the payload's own, and the place in it.

    `within` is for payloads that were pickled with what is in the frames: by the path that
    their segments have in there, where these are for the reader.
    """

    frames: tuple[bytes, ...] = ()
    segment: SegmentRef | None = None
    others: tuple[SegmentRef, ...] = ()
    order: tuple[tuple[int, int], ...] = ()
    within: tuple[tuple[str, SegmentRef], ...] = ()


Packed = tuple[Payload, Segment | None]
"""A payload, and the segment to keep open until it has been opened."""


def pack_frames(frames: Sequence[Buffer]) -> Packed:
    """Make a payload of these frames, at once."""
    return to_end(packing(frames))


def packing(
    frames: Sequence[Buffer], inline_limit: int = INLINE_LIMIT
) -> Generator[int, None, Packed]:
    """Make a payload of these frames; yields how many bytes have been copied so far.

    Close the generator where it is not wanted any more: nothing is left behind.
    """
    if size_of(frames) < inline_limit:
        return Payload(frames=tuple(bytes(memoryview(frame)) for frame in frames)), None
    segment = yield from Segment.filling(frames)
    return Payload(segment=segment.ref), segment


def size_of(frames: Iterable[Buffer]) -> int:
    """Count the bytes of all frames."""
    return sum(memoryview(frame).nbytes for frame in frames)


def pack_names(
    names: Mapping[str, Any] | None, namespace: dict[str, Any]
) -> tuple[Payload | None, Segment | None]:
    """Pickle and pack a mapping so; UsageError where a function in it needs another name."""
    if not names:
        return None, None
    pickled = pickle(dict(names), namespace)
    if missing := pickled.needs - names.keys() - vars(builtins).keys():
        listed = ", ".join(sorted(missing))
        raise UsageError(f"The functions among `names` use {listed}: pass these too.")
    return pack_frames(pickled.frames)


def open_payload(payload: Payload) -> list[Buffer]:
    """Return the frames of a payload: a segment's are writable, and copied when written to.

    Raises `nbdist.values.shared_memory.SegmentGone`.
    """
    own: list[Buffer] = [*payload.frames]
    if payload.segment is not None:
        own = [*open_segment(payload.segment)]
    if not payload.order:
        return own
    memory: list[Sequence[Buffer]] = [own, *map(open_segment, payload.others)]
    return [memory[number][place] for number, place in payload.order]


# --- where segments are ----------------------------------------------------------------------

Places = Mapping[str, SegmentRef]
"""By a segment's path where it can be opened: on another machine it has been filled anew."""


def refs_in(value: object) -> tuple[SegmentRef, ...]:
    """Find the segments that the payloads of a value lie in, each once.

    In mappings, lists, tuples and dataclasses: what the notebook and the ops put payloads in.
    """
    refs: list[SegmentRef] = []
    for payload in _payloads_in(value):
        own = [payload.segment] if payload.segment is not None else []
        refs += [*own, *payload.others, *(ref for _, ref in payload.within)]
    return tuple(dict.fromkeys(refs))


def _payloads_in(value: object) -> Iterator[Payload]:
    match value:
        case Payload():
            yield value
        case Mapping():
            yield from (found for each in value.values() for found in _payloads_in(each))
        case list() | tuple():
            yield from (found for each in value for found in _payloads_in(each))
        case _ if is_dataclass(value):
            for each in fields(value):
                yield from _payloads_in(getattr(value, each.name))


def moved(value: Value, places: Places) -> Value:
    """Return the value with its payloads' segments where they are now; itself without any."""
    if not any(ref.path in places for ref in refs_in(value)):
        return value
    found: Any = value
    match found:
        case Payload(frames, segment, others, order, within):
            there = segment and places.get(segment.path, segment)
            others = tuple(places.get(ref.path, ref) for ref in others)
            within = tuple((path, places.get(ref.path, ref)) for path, ref in within)
            found = Payload(frames, there, others, order, within)
        case Mapping():
            found = {key: moved(each, places) for key, each in found.items()}
        case list():
            found = [moved(each, places) for each in found]
        case tuple():
            found = tuple(moved(each, places) for each in found)
        case _:
            now = {each.name: moved(getattr(found, each.name), places) for each in fields(found)}
            found = replace(found, **now)
    return found  # type: ignore[no-any-return]


def as_read(value: Value, payload: Payload) -> Value:
    """Return what was pickled in this payload with its own payloads' segments where they are."""
    return moved(value, {path: ref for path, ref in payload.within if path != ref.path})


# --- memory that is used again ----------------------------------------------------------------

KEPT_FROM = 16 << 20
"""Bytes of a shipment whose memory is kept: less is copied in some milliseconds."""

SMALLEST = 1 << 12
"""Bytes of a frame that is worth a look."""

MOST_SEGMENTS = 16

COMPARED_AT_ONCE = 1 << 20
"""Bytes: they are in a processor's cache when they are compared."""

_memcmp = ctypes.CDLL(None).memcmp

Place = tuple[Segment, int]
"""A segment, and which of its frames."""


@dataclass(frozen=True, eq=False)
class Kept:
    """Frames that were shipped, by place; their memory is theirs for as long as this is there."""

    places: tuple[Place, ...]


@dataclass(frozen=True)
class Shipped:
    """A payload, the segment to keep open until it has been opened, and what may be kept of it.

    `copied` are the bytes that were, of `size` in all.
    """

    packed: Packed
    kept: Kept | None
    copied: int
    size: int


def packing_changed(
    frames: Sequence[Buffer], known: Sequence[Kept]
) -> Generator[int, None, Shipped]:
    """Make a payload of these frames, with those that are known to lie there where they are.

    Yields how many bytes have been copied so far.
    """
    finder = _Finder(known)
    places = {at: place for at, frame in enumerate(frames) if (place := finder.find(frame))}
    for segment in _not_worth_it(places.values()):
        places = {at: place for at, place in places.items() if place[0] is not segment}
    rest = [at for at in range(len(frames)) if at not in places]
    with closing(Steps(packing([frames[at] for at in rest]))) as steps:
        yield from steps
    payload, new = steps.made
    copied, size = size_of(frames[at] for at in rest), size_of(frames)
    everywhere = places
    if new is not None:
        everywhere = {**places, **{at: (new, number) for number, at in enumerate(rest)}}
    if places:
        payload = _with_others(payload, rest, places, len(frames))
    big = sum(memoryview(frame).nbytes >= SMALLEST for frame in frames[1:])
    is_worth_it = size >= KEPT_FROM and big > 1
    kept = Kept(tuple(everywhere[at] for at in sorted(everywhere))) if is_worth_it else None
    return Shipped((payload, new), kept, copied, size)


def _with_others(
    payload: Payload, rest: Sequence[int], places: dict[int, Place], number: int
) -> Payload:
    """Say of each frame in which memory it is, and where there."""
    others = [*dict.fromkeys(segment for segment, _ in places.values())]
    own = {at: (0, index) for index, at in enumerate(rest)}
    there = {at: (others.index(segment) + 1, index) for at, (segment, index) in places.items()}
    order = tuple({**own, **there}[at] for at in range(number))
    refs = tuple(segment.ref for segment in others)
    return Payload(payload.frames, payload.segment, refs, order)


def _not_worth_it(places: Iterable[Place]) -> Iterator[Segment]:
    """Find segments of which less than half is in use, and those that are too many.

    They would stay for a small part of them.
    """
    used: Counter[Segment] = Counter()
    for segment, index in places:
        used[segment] += segment.ref.sizes[index]
    ranked = [segment for segment, _ in used.most_common()]
    for number, segment in enumerate(ranked):
        if number >= MOST_SEGMENTS or 2 * used[segment] < sum(segment.ref.sizes):
            yield segment


class _Finder:
    """Finds frames in what is kept, each place once."""

    def __init__(self, known: Iterable[Kept]) -> None:
        self._by_size: dict[int, list[Place]] = {}
        for place in dict.fromkeys(place for kept in known for place in kept.places):
            self._by_size.setdefault(place[0].ref.sizes[place[1]], []).append(place)

    def find(self, frame: Buffer) -> Place | None:
        """Return where this frame lies."""
        view = memoryview(frame).cast("B")
        places = self._by_size.get(view.nbytes, []) if view.nbytes >= SMALLEST else []
        # In the order in which they were: as a rule the first one is it.
        for place in places:
            if _is_equal(view, place):
                places.remove(place)
                return place
        return None


def _is_equal(view: memoryview, place: Place) -> bool:
    """Compare them to the last byte, some at a time: Stop comes between two pieces."""
    segment, number = place
    at = 0
    for piece in segment.pieces(number, COMPARED_AT_ONCE):
        if not _is_same(view[at : at + piece.nbytes], piece):
            return False
        at += piece.nbytes
    return True


def _is_same(one: memoryview, other: memoryview) -> bool:
    if one.readonly:  # whose address ctypes does not tell
        return bytes(one) == bytes(other)
    # Python compares two views a byte at a time, 0.2 GB/s.
    memory = [(ctypes.c_char * view.nbytes).from_buffer(view) for view in (one, other)]
    return not _memcmp(*map(ctypes.byref, memory), ctypes.c_size_t(one.nbytes))


# --- what a name is bound to ------------------------------------------------------------------


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
