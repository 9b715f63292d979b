"""Tests of `nbdist.wire.tasks`: frames come out of a stream as they were put in."""

from __future__ import annotations

import pytest

from nbdist.wire.tasks import FrameCutter, framed

FRAMES = [b"", b"a", b"\x00" * 9, b"x" * 100_000, b"last"]


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 20])
def test_frames_come_out_whole(size: int) -> None:
    """However the stream is cut into pieces."""
    stream = b"".join(map(framed, FRAMES))
    cutter = FrameCutter()
    pieces = (stream[start : start + size] for start in range(0, len(stream), size))
    assert [frame for piece in pieces for frame in cutter.feed(piece)] == FRAMES


def test_half_a_frame_waits_for_the_rest() -> None:
    """Nothing comes out before all of it is there; what is left belongs to the next one."""
    cutter, data = FrameCutter(), framed(b"whole") + framed(b"next")
    assert list(cutter.feed(data[:12])) == []
    assert list(cutter.feed(data[12:14])) == [b"whole"]
    assert list(cutter.feed(data[14:])) == [b"next"]
