"""Shared memory: frames that one process fills and others map."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from nbdist.values import shared_memory
from nbdist.values.shared_memory import (
    ALIGNMENT,
    Blank,
    Segment,
    SegmentGone,
    Steps,
    is_there,
    length_of,
    open_file,
    open_segment,
    to_end,
)
from tests.waiting import SOON

FRAMES = [b"first", b"", bytearray(b"x" * 5000), memoryview(b"last")]


def test_a_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how much has been copied; the same segment comes of it."""
    monkeypatch.setattr(shared_memory, "PIECE", 2000)
    steps = Steps(Segment.filling(FRAMES))
    assert [*steps] == [5, 2005, 4005, 5005, 5009]
    assert [bytes(view) for view in open_segment(steps.made.ref)] == [bytes(f) for f in FRAMES]
    steps.made.close()


def test_a_frame_in_pieces() -> None:
    """Its owner reads it without a mapping of it."""
    with to_end(Segment.filling(FRAMES)) as segment:
        pieces = [bytes(piece) for piece in segment.pieces(2, 2000)]
        assert [len(piece) for piece in pieces] == [2000, 2000, 1000]
        assert b"".join(pieces) == FRAMES[2]
        assert [*segment.pieces(1, 10)] == []
    # What was begun is gone at once.
    before = {*os.listdir("/proc/self/fd")}
    steps = Segment.filling(FRAMES)
    next(steps)
    assert len({*os.listdir("/proc/self/fd")} - before) == 1
    steps.close()
    assert {*os.listdir("/proc/self/fd")} == before
    with to_end(Segment.filling(FRAMES)) as segment:
        assert len(segment.ref.sizes) == len(FRAMES)


def test_frames_are_aligned() -> None:
    """Every frame begins where vector instructions like it."""
    import ctypes

    with to_end(Segment.filling([b"a" * 3, b"b" * 65, b"c"])) as segment:
        views = open_segment(segment.ref)
        assert [
            ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT for view in views
        ] == [0, 0, 0]


@pytest.mark.world
def test_another_process_reads_it() -> None:
    """Any process of the same user opens a segment by its reference alone."""
    with to_end(Segment.filling([b"hello " * 20_000])) as segment:
        source = (
            "from nbdist.values.shared_memory import *\n"
            f"view, = open_segment({segment.ref!r})\n"
            "view[:5] = b'HELLO'\n"
            "print(bytes(view[:11]).decode(), view.nbytes)"
        )
        shown = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=SOON
        )
        assert shown.stdout == "HELLO hello 120000\n"
        assert bytes(open_segment(segment.ref)[0][:5]) == b"hello", "it wrote to its own copy"


def test_nobody_can_cut_or_change_what_others_have_mapped() -> None:
    """The memory is sealed: a shorter file would kill its readers with SIGBUS."""
    with to_end(Segment.filling([b"abc"])) as segment:
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
    segment = to_end(Segment.filling([b"abc"]))
    segment.close()
    with pytest.raises(SegmentGone, match=f"{segment.ref.path}.*(gone|cannot be opened)"):
        open_segment(segment.ref)
    # The second close does nothing, though the number may be somebody else's by then.
    segment = to_end(Segment.filling([b"abc"]))
    segment.close()
    with to_end(Segment.filling([b"def"])) as other:
        segment.close()
        assert bytes(open_segment(other.ref)[0]) == b"def"


def test_a_later_segment_is_not_taken_for_an_earlier_one() -> None:
    """The descriptor is given out again; the reference does not follow it."""
    first = to_end(Segment.filling([b"old"]))
    first.close()
    with to_end(Segment.filling([b"new"])) as second:
        with pytest.raises(SegmentGone):  # nor is anything mapped that is not as long as it says
            open_segment(second.ref._replace(sizes=(10_000,)))
        assert second.ref.path.partition("#")[0] == first.ref.path.partition("#")[0]
        with pytest.raises(SegmentGone, match="its owner has closed it"):
            open_segment(first.ref)


def test_one_that_is_held_on_to_outlives_its_owner() -> None:
    """By a reference of its own; one that is gone already is not to be had."""
    first = to_end(Segment.filling(FRAMES))
    with Segment.of_another(first.ref) as other:
        first.close()
        assert other.ref.path != first.ref.path
        assert [bytes(view) for view in open_segment(other.ref)] == [*map(bytes, FRAMES)]
        with pytest.raises(SegmentGone):
            Segment.of_another(first.ref)
    # For as long as its owner has it open, and not for another one in its place.
    with to_end(Segment.filling(FRAMES)) as segment:
        ref = segment.ref
        assert is_there(ref)
        assert not is_there(ref._replace(path=f"{ref.path}1"))
        fd = open_file(ref)
        assert os.fstat(fd).st_size == length_of(ref)
        os.close(fd)
    assert not is_there(ref)


@pytest.mark.world
def test_the_memory_of_a_dead_owner_is_gone() -> None:
    """Nothing of a killed process stays in memory, and its reference says what happened."""
    source = (
        "import os, signal\nfrom nbdist.values.shared_memory import *\n"
        "s = to_end(Segment.filling([b'abc']))\nprint(s.ref.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=SOON
    )
    from nbdist.values.shared_memory import SegmentRef

    with pytest.raises(SegmentGone, match="cannot be opened"):
        open_segment(SegmentRef(shown.stdout.strip(), (3,)))


def test_a_forgotten_segment_closes_itself(traces_left: Callable[[], list[str]]) -> None:
    """A segment that nobody refers to gives its descriptor back."""
    to_end(Segment.filling([b"abc"]))
    gc.collect()
    assert traces_left() == []


def test_it_is_filled_from_outside() -> None:
    """In whatever order; left half-filled it is gone with its owner's descriptor."""
    before = {*os.listdir("/proc/self/fd")}
    with Blank([3, 100]) as blank:
        assert (blank.offsets, blank.total) == ([0, ALIGNMENT], 3 * ALIGNMENT)
        assert [*blank.writing(memoryview(b"b" * 100), ALIGNMENT)] == [100]
        assert [*blank.writing(memoryview(b"abc"), 0)] == [3]
        with blank.sealed() as segment:
            assert [bytes(view) for view in open_segment(segment.ref)] == [b"abc", b"b" * 100]
    with Blank([3]) as blank:
        assert {*os.listdir("/proc/self/fd")} != before
    assert {*os.listdir("/proc/self/fd")} == before
