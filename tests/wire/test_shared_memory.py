"""Shared memory: frames that one process fills and others map."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from nbdist.wire import shared_memory
from nbdist.wire.shared_memory import (
    ALIGNMENT,
    Segment,
    SegmentGone,
    Steps,
    open_segment,
    to_end,
)

FRAMES = [b"first", b"", bytearray(b"x" * 5000), memoryview(b"last")]


def test_frames_come_back_as_they_were_in_order() -> None:
    """What is put into a segment is what comes out of it, empty frames included."""
    with Segment.holding(FRAMES) as segment:
        assert [bytes(view) for view in open_segment(segment.ref)] == [bytes(f) for f in FRAMES]


def test_a_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how much has been copied; the same segment comes of it."""
    monkeypatch.setattr(shared_memory, "PIECE", 2000)
    steps = Steps(Segment.filling(FRAMES))
    assert [*steps] == [5, 2005, 4005, 5005, 5009]
    assert [bytes(view) for view in open_segment(steps.made.ref)] == [bytes(f) for f in FRAMES]
    steps.made.close()


def test_a_frame_in_pieces() -> None:
    """Its owner reads it without a mapping of it."""
    with Segment.holding(FRAMES) as segment:
        pieces = [bytes(piece) for piece in segment.pieces(2, 2000)]
        assert [len(piece) for piece in pieces] == [2000, 2000, 1000]
        assert b"".join(pieces) == FRAMES[2]
        assert [*segment.pieces(1, 10)] == []


def test_the_rest_is_not_wanted() -> None:
    """What was begun is gone at once."""
    before = {*os.listdir("/proc/self/fd")}
    steps = Segment.filling(FRAMES)
    next(steps)
    assert len({*os.listdir("/proc/self/fd")} - before) == 1
    steps.close()
    assert {*os.listdir("/proc/self/fd")} == before
    with to_end(Segment.filling(FRAMES)) as segment:
        assert len(segment.ref.sizes) == len(FRAMES)


def test_a_segment_without_frames_can_be_opened() -> None:
    """No frames at all are no error."""
    with Segment.holding([]) as segment:
        assert open_segment(segment.ref) == []


def test_frames_are_aligned() -> None:
    """Every frame begins where vector instructions like it."""
    import ctypes

    with Segment.holding([b"a" * 3, b"b" * 65, b"c"]) as segment:
        views = open_segment(segment.ref)
        assert [
            ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT for view in views
        ] == [0, 0, 0]


def test_another_process_reads_it() -> None:
    """Any process of the same user opens a segment by its reference alone."""
    with Segment.holding([b"hello " * 20_000]) as segment:
        source = (
            "from nbdist.wire.shared_memory import *\n"
            f"view, = open_segment({segment.ref!r})\n"
            "view[:5] = b'HELLO'\n"
            "print(bytes(view[:11]).decode(), view.nbytes)"
        )
        shown = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=30
        )
        assert shown.stdout == "HELLO hello 120000\n"
        assert bytes(open_segment(segment.ref)[0][:5]) == b"hello", "it wrote to its own copy"


def test_who_maps_it_writes_to_a_copy_of_its_own() -> None:
    """Views are writable, and nobody else sees what is written."""
    with Segment.holding([b"abc"]) as segment:
        (mine,), (other,) = open_segment(segment.ref), open_segment(segment.ref)
        mine[0:1] = b"X"
        assert (bytes(mine), bytes(other)) == (b"Xbc", b"abc")


def test_views_outlive_the_segment() -> None:
    """Closing a segment takes nothing from those who have mapped it."""
    segment = Segment.holding([b"a" * 100_000])
    (view,) = open_segment(segment.ref)
    segment.close()
    gc.collect()
    assert bytes(view) == b"a" * 100_000


def test_nobody_can_cut_or_change_what_others_have_mapped() -> None:
    """The memory is sealed: a shorter file would kill its readers with SIGBUS."""
    with Segment.holding([b"abc"]) as segment:
        path = segment.ref.path.partition("#")[0]
        fd = os.open(path, os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 1)
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"X", 0)
        finally:
            os.close(fd)


def test_a_closed_segment_cannot_be_opened() -> None:
    """A reference that comes too late is an error that says so."""
    segment = Segment.holding([b"abc"])
    segment.close()
    with pytest.raises(SegmentGone, match=f"{segment.ref.path}.*(gone|cannot be opened)"):
        open_segment(segment.ref)
    assert "closed" in repr(segment)


def test_a_later_segment_is_not_taken_for_an_earlier_one() -> None:
    """The descriptor is given out again; the reference does not follow it."""
    first = Segment.holding([b"old"])
    first.close()
    with Segment.holding([b"new"]) as second:
        assert second.ref.path.partition("#")[0] == first.ref.path.partition("#")[0]
        with pytest.raises(SegmentGone, match="its owner has closed it"):
            open_segment(first.ref)


def test_a_reference_of_another_size_is_refused() -> None:
    """Nothing is mapped that is not as long as it says."""
    with (
        Segment.holding([b"abc"]) as segment,
        pytest.raises(SegmentGone),
    ):
        open_segment(replace(segment.ref, sizes=(10_000,)))


def test_the_memory_of_a_dead_owner_is_gone() -> None:
    """Nothing of a killed process stays in memory, and its reference says what happened."""
    source = (
        "import os, signal\nfrom nbdist.wire.shared_memory import *\n"
        "s = Segment.holding([b'abc'])\nprint(s.ref.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=30
    )
    from nbdist.wire.shared_memory import SegmentRef

    with pytest.raises(SegmentGone, match="cannot be opened"):
        open_segment(SegmentRef(shown.stdout.strip(), (3,)))


def test_a_forgotten_segment_closes_itself(traces_left: Callable[[], list[str]]) -> None:
    """A segment that nobody refers to gives its descriptor back."""
    Segment.holding([b"abc"])
    gc.collect()
    assert traces_left() == []


def test_closing_twice_closes_nobody_elses_descriptor() -> None:
    """The second close does nothing, though the number may be somebody else's by then."""
    segment = Segment.holding([b"abc"])
    segment.close()
    with Segment.holding([b"def"]) as other:
        segment.close()
        assert bytes(open_segment(other.ref)[0]) == b"def"
