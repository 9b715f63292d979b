"""What was shipped stays in shared memory, and what of it has not changed is not copied again.

A big value is pickled as a whole whenever a part of it has changed; but of its frames, the
memory of its tensors and arrays, only those are copied that differ from what lies there.  So
the receiver gets the value as it is now, all of it, whatever it has done with the last one.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from nbdist.wire.payload import Packed, Payload, packing, size_of
from nbdist.wire.shared_memory import Buffer, Segment, Steps

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


class Kept:
    """Frames that were shipped, by place; their memory is theirs for as long as this is there."""

    def __init__(self, places: Iterable[Place]) -> None:
        self.places = [*places]

    def __repr__(self) -> str:
        return f"<Kept {len(self.places)} frames in {len(self._segments)} segments>"

    @property
    def _segments(self) -> set[Segment]:
        return {segment for segment, _ in self.places}


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
    kept = Kept(everywhere[at] for at in sorted(everywhere)) if is_worth_it else None
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
