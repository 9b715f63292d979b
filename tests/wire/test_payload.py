"""Payloads: small frames in the message, big ones in shared memory."""

from __future__ import annotations

import pickle

from nbdist.wire.payload import INLINE_LIMIT, Payload, open_payload, pack_frames


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
