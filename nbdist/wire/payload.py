"""Python values on their way between processes: pickled, big ones in shared memory."""

from __future__ import annotations

import builtins
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbdist.errors import UsageError
from nbdist.wire.pickling import pickle
from nbdist.wire.shared_memory import Buffer, Segment, open_segment, to_end
from nbdist.wire.shared_memory import SegmentRef as SegmentRef

INLINE_LIMIT = 64 * 1024
"""From this many bytes on a payload goes into shared memory."""


@dataclass(frozen=True, slots=True)
class Payload:
    """Frames of one pickle (the first) and its out-of-band buffers (the others).

    Small ones travel in the message; big ones stay in a segment that the sender owns.  With an
    `order` some are in `others`, where they were before: by frame the number of the memory,
    0 for the payload's own, and the place in it.
    """

    frames: tuple[bytes, ...] = ()
    segment: SegmentRef | None = None
    others: tuple[SegmentRef, ...] = ()
    order: tuple[tuple[int, int], ...] = ()


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

    Raises `nbdist.wire.shared_memory.SegmentGone`.
    """
    own: list[Buffer] = [*payload.frames]
    if payload.segment is not None:
        own = [*open_segment(payload.segment)]
    if not payload.order:
        return own
    memory: list[Sequence[Buffer]] = [own, *map(open_segment, payload.others)]
    return [memory[number][place] for number, place in payload.order]
