"""Payloads: small frames in the message, big ones in shared memory."""

from __future__ import annotations

import pickle
from dataclasses import replace

from nbdist.wire.ops import Brought
from nbdist.wire.payload import (
    INLINE_LIMIT,
    Payload,
    as_read,
    moved,
    open_payload,
    pack_frames,
    refs_in,
)
from nbdist.wire.shared_memory import SegmentRef


def test_small_frames_travel_in_the_message() -> None:
    """Below the limit no memory is shared."""
    payload, segment = pack_frames([b"pickle", memoryview(b"buffer")])
    assert segment is None
    assert payload == Payload(frames=(b"pickle", b"buffer"))
    assert open_payload(payload) == [b"pickle", b"buffer"]


def test_big_frames_travel_in_one_segment() -> None:
    """From the limit on, all frames of a payload are in one segment."""
    frames = [b"p", bytearray(INLINE_LIMIT - 1)]
    payload, segment = pack_frames(frames)
    assert segment is not None
    with segment:
        assert payload.frames == ()
        assert payload.segment == segment.ref
        assert open_payload(payload) == frames


def test_a_payload_is_small_whatever_it_holds() -> None:
    """Only the reference is in the message."""
    payload, segment = pack_frames([bytes(10_000_000)])
    assert segment is not None
    with segment:
        assert len(pickle.dumps(payload)) < 500


def test_frames_of_a_segment_can_be_written_to() -> None:
    """What is rebuilt on them belongs to the receiver."""
    payload, segment = pack_frames([bytes(INLINE_LIMIT)])
    assert segment is not None
    with segment:
        (frame,) = open_payload(payload)
        view = memoryview(frame)
        view[0] = 7
        assert view[0] == 7


def test_segments_wherever_payloads_are() -> None:
    """In mappings, sequences and dataclasses; and in what was pickled with the frames."""
    refs = [SegmentRef(f"/proc/1/fd/{number}#{number}", (number,)) for number in range(5)]
    here = {ref.path: SegmentRef(f"/here/{ref.path}", ref.sizes) for ref in refs[1:]}
    one = Payload(segment=refs[0], others=(refs[1], refs[2]), order=((1, 0),))
    two = Payload(frames=(b"x",), within=((refs[3].path, refs[3]),))
    value = {"a": one, "b": [two, 7, "text"], "c": (Brought(packed=Payload(segment=refs[4])),)}
    assert refs_in(value) == (*refs,)
    found = moved(value, here)
    assert refs_in(found) == (refs[0], *here.values())
    assert found["a"] == replace(one, others=(here[refs[1].path], here[refs[2].path]))
    assert found["b"][1:] == [7, "text"]
    assert found["b"][0].within == ((refs[3].path, here[refs[3].path]),)
    assert moved(value, {}) is value
    assert moved(two, {}) is two


def test_payloads_in_what_was_read() -> None:
    """They are moved as the payload was that they came in."""
    inner = SegmentRef("/proc/1/fd/1#1", (8,))
    here = SegmentRef("/proc/2/fd/2#2", (8,))
    brought = Brought(packed=Payload(segment=inner))
    outer = Payload(within=((inner.path, inner),))
    assert as_read(brought, outer) is brought
    assert as_read(brought, moved(outer, {inner.path: here})).packed == Payload(segment=here)
