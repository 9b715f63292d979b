"""Tests of `nbdist.values.payload`: frames in messages and in shared memory, and identity."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from nbdist.values import payload
from nbdist.values.payload import (
    ALIGNMENT,
    INLINE_LIMIT,
    Blank,
    Identity,
    Payload,
    Segment,
    SegmentGone,
    SegmentRef,
    StepwiseValue,
    is_atomic,
    is_open,
    length_of,
    localize,
    open_file,
    open_payload,
    open_segment,
    pack_frames,
    refs_in,
    relocate,
    run_to_end,
)
from nbdist.wire.ops import Brought
from tests.waiting import SOON

FRAMES = [b"first", b"", bytearray(b"x" * 5000), memoryview(b"last")]

Descriptors = Callable[[], set[str]]


@pytest.fixture
def descriptors() -> Descriptors:
    """A function that lists the file descriptors which this process has open."""
    return lambda: {*os.listdir("/proc/self/fd")}


def test_segments_fill_in_steps(monkeypatch: pytest.MonkeyPatch, descriptors: Descriptors) -> None:
    """A segment is filled in steps, each of which yields the number of bytes copied so far.

    Frames are aligned, and a segment is closed if its filling is given up.
    """
    monkeypatch.setattr(payload, "COPY_PIECE", 2000)
    before = descriptors()
    steps = Segment.filling(FRAMES)
    next(steps)
    assert len(descriptors() - before) == 1
    steps.close()
    assert descriptors() == before
    counted = StepwiseValue(Segment.filling(FRAMES))
    assert [*counted] == [5, 2005, 4005, 5005, 5009]
    with counted.made as segment:
        views = open_segment(segment.ref)
        assert [bytes(view) for view in views] == [bytes(f) for f in FRAMES]
        for view in filter(len, views):
            assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT == 0
    del views, view
    run_to_end(Segment.filling([b"nobody refers to it"]))
    gc.collect()
    assert descriptors() == before


@pytest.mark.world
def test_another_process_reads_a_segment_by_reference() -> None:
    """A reader changes only its own copy, and the segment of a killed process is gone."""
    ours = run_to_end(Segment.filling([b"hello " * 20_000]))
    source = (
        "import os, signal\nfrom nbdist.values.payload import *\n"
        f"view, = open_segment({ours.ref!r})\n"
        "view[:5] = b'HELLO'\nprint(bytes(view[:11]).decode(), view.nbytes)\n"
        "s = run_to_end(Segment.filling([b'abc']))\nprint(s.ref.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", source]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SOON, check=False)
    said, path = ended.stdout.splitlines()
    assert said == "HELLO hello 120000"
    assert bytes(open_segment(ours.ref)[0][:5]) == b"hello", "it wrote to its own copy"
    ours.close()
    with pytest.raises(SegmentGone, match="cannot be opened"):
        open_segment(SegmentRef(path, (3,)))


def test_nobody_can_cut_or_change_what_others_have_mapped() -> None:
    """A segment is sealed, because SIGBUS would kill its readers if it became shorter."""
    with run_to_end(Segment.filling([b"abc"])) as segment:
        path = segment.ref.path.partition("#")[0]
        fd = os.open(path, os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 1)
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"X", 0)
        finally:
            os.close(fd)
    # While Linux uses the pages, as a writable mapping does, it refuses to forbid writing.
    with Blank([3]) as blank:
        assert [*blank.writing(memoryview(b"abc"), 0)] == [3]
        with mmap.mmap(blank._fd, 3), blank.sealed() as segment:
            fd = os.open(segment.ref.path.partition("#")[0], os.O_RDWR)
            with os.fdopen(fd), pytest.raises(PermissionError):
                os.ftruncate(fd, 1)
            assert bytes(open_segment(segment.ref)[0]) == b"abc"
    # A closed segment cannot be opened, even if a later segment has its descriptor.
    first = run_to_end(Segment.filling([b"old"]))
    first.close()
    with pytest.raises(SegmentGone, match=f"{first.ref.path}.*(gone|cannot be opened)"):
        open_segment(first.ref)
    with run_to_end(Segment.filling([b"new"])) as second:
        first.close()
        assert bytes(open_segment(second.ref)[0]) == b"new"
        with pytest.raises(SegmentGone):  # the reference has a wrong length
            open_segment(second.ref._replace(sizes=(10_000,)))
        assert second.ref.path.partition("#")[0] == first.ref.path.partition("#")[0]
        with pytest.raises(SegmentGone, match="its owner has closed it"):
            open_segment(first.ref)


def test_a_segment_that_was_opened_outlives_its_owner() -> None:
    """An opened segment has a new reference; a segment that is gone cannot be opened."""
    first = run_to_end(Segment.filling(FRAMES))
    with Segment.of_another(first.ref) as other:
        first.close()
        assert other.ref.path != first.ref.path
        assert [bytes(view) for view in open_segment(other.ref)] == [*map(bytes, FRAMES)]
        with pytest.raises(SegmentGone):
            Segment.of_another(first.ref)
    # `is_open` is true until the owner closes the segment, and false for another path.
    with run_to_end(Segment.filling(FRAMES)) as segment:
        ref = segment.ref
        assert is_open(ref)
        assert not is_open(ref._replace(path=f"{ref.path}1"))
        fd = open_file(ref)
        assert os.fstat(fd).st_size == length_of(ref)
        os.close(fd)
    assert not is_open(ref)


def test_a_blank_segment_is_filled_in_any_order(descriptors: Descriptors) -> None:
    """A segment that was filled in any order and sealed has all frames; unsealed it is closed."""
    before = descriptors()
    with Blank([3, 100]) as blank:
        assert (blank.offsets, blank.total) == ([0, ALIGNMENT], 3 * ALIGNMENT)
        assert [*blank.writing(memoryview(b"b" * 100), ALIGNMENT)] == [100]
        assert [*blank.writing(memoryview(b"abc"), 0)] == [3]
        with blank.sealed() as segment:
            assert [bytes(view) for view in open_segment(segment.ref)] == [b"abc", b"b" * 100]
    with Blank([3]) as blank:
        assert descriptors() != before
    assert descriptors() == before


# --- payloads, and identity --------------------------------------------------------------------


def test_big_payloads_are_sent_in_one_segment() -> None:
    """Frames are in the message below the limit; from the limit on all are in one segment."""
    frames = [b"p", bytearray(INLINE_LIMIT - 1)]
    packed, segment = pack_frames(frames)
    with segment:
        assert packed == Payload(segment=segment.ref)
        assert open_payload(packed) == frames
    packed, segment = pack_frames([b"pickle", memoryview(b"buffer")])
    assert segment is None
    assert packed == Payload(frames=(b"pickle", b"buffer"))
    assert open_payload(packed) == [b"pickle", b"buffer"]


def test_segments_are_found_and_moved_inside_of_values() -> None:
    """Segments are replaced in mappings, sequences, inner payloads, and values that were read."""
    refs = [SegmentRef(f"/proc/1/fd/{number}#{number}", (number,)) for number in range(3)]
    here = {ref.path: SegmentRef(f"/here/{ref.path}", ref.sizes) for ref in refs[1:]}
    one = Payload(segment=refs[0])
    two = Payload(frames=(b"x",), within=((refs[1].path, refs[1]),))
    value = {"a": one, "b": [two, 7, "text"], "c": (Brought(packed=Payload(segment=refs[2])),)}
    assert refs_in(value) == (*refs,)
    found = relocate(value, here)
    assert refs_in(found) == (refs[0], *here.values())
    assert found["a"] == one
    assert found["b"][1:] == [7, "text"]
    assert found["b"][0].within == ((refs[1].path, here[refs[1].path]),)
    assert relocate(value, {}) is value
    brought = Brought(packed=Payload(segment=refs[1]))
    assert localize(brought, two) is brought
    assert localize(brought, relocate(two, here)).packed == Payload(segment=here[refs[1].path])
    assert localize(odd := OddList(), one) is odd, "a user's value is not looked into"


def test_small_plain_values_are_atomic() -> None:
    """Long numbers and texts, containers, and instances of subclasses are not atomic."""
    assert all(map(is_atomic, (1, 1.5, 1j, True, "x", b"x", None, ..., 2**4095)))
    subclass = type("Subclass", (int,), {})
    others = ("x" * 4097, b"x" * 4097, 2**4096, subclass(1), [1], (1,), {}, object())
    assert not any(map(is_atomic, others))


def test_an_identity_recognizes_only_its_object() -> None:
    """An identity fits its object also after a change, and never a new object in its place."""

    class Model:
        pass

    model = Model()
    identity = Identity(model)
    assert identity.is_still(model)
    assert not identity.is_still(Model())
    del model
    gc.collect()
    assert not identity.is_still(Model())
    for values in ([1, 2], [object(), 2]):
        identity = Identity(values)
        values.append(3)
        assert identity.is_still(values)
    assert values not in gc.get_referents(identity)
    # An identity keeps a small value, so that no other value gets its address.
    makes: list[Callable[[], object]] = [lambda: float("0.1"), lambda: [1], lambda: [], dict]
    for make in makes:
        value = make()
        identity = Identity(value)
        for _ in range(10):
            del value
            value = make()
            assert not identity.is_still(value)


class Odd:
    __slots__ = ()

    def __len__(self) -> int:
        raise LookupError

    __iter__ = __eq__ = __hash__ = __len__  # type: ignore[assignment]


class OddList(list[Any]):
    __slots__ = ()
    __len__ = __iter__ = Odd.__len__  # type: ignore[assignment]


def test_an_identity_calls_no_methods_of_its_object() -> None:
    """An identity works for a user's class whose methods raise errors."""
    for value in (Odd(), OddList([1]), bytearray(5), range(9), (1,), {1: 2}):
        assert Identity(value).is_still(value)
        assert not Identity(value).is_still(Odd())
