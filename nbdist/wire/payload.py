"""Python values on their way between processes: pickled, big ones in shared memory."""

from __future__ import annotations

import builtins
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from nbdist.errors import UsageError
from nbdist.wire.pickling import pickle
from nbdist.wire.shared_memory import Buffer, Segment, open_segment, to_end
from nbdist.wire.shared_memory import SegmentRef as SegmentRef

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

    Raises `nbdist.wire.shared_memory.SegmentGone`.
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
    return tuple(dict.fromkeys(_refs_in(value)))


def _refs_in(value: object) -> Iterator[SegmentRef]:
    for payload in _payloads_in(value):
        if payload.segment is not None:
            yield payload.segment
        yield from payload.others
        yield from (ref for _, ref in payload.within)


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
