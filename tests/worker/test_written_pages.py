"""Tests of `nbdist.worker.written_pages`: what the kernel knows of a mapping's pages."""

from __future__ import annotations

import mmap

import numpy as np

from nbdist.values.shared_memory import Segment, open_segment, to_end
from nbdist.worker.written_pages import are_own, edges

PAGE = mmap.PAGESIZE


def test_what_has_been_written_to() -> None:
    """The pages of a segment are this process's own once written to, not when read."""
    with to_end(Segment.filling([bytes(100), bytes(20 * PAGE), bytes(100)])) as segment:
        _, frame, _ = open_segment(segment.ref)
        array = np.frombuffer(frame, np.uint8)
        address = array.ctypes.data
        assert not are_own(address, array.nbytes)
        assert not array.any()
        assert not are_own(address, array.nbytes), "they have been read"
        array[10 * PAGE] = 1
        assert are_own(address, array.nbytes)
        assert not are_own(address, 9 * PAGE)
        own = np.ones(10 * PAGE, np.uint8)
        assert are_own(own.ctypes.data, own.nbytes)


def test_what_lies_in_no_whole_page() -> None:
    """Is for others to look at; small memory is all of that."""
    memory = memoryview(bytes(range(256)) * (3 * PAGE // 256))
    first, last = edges(memory, PAGE + 100)
    assert (first, last) == (memory[: PAGE - 100], memory[-100:])
    assert edges(memory[: 2 * PAGE], PAGE) == (b"", b"")
    first, last = edges(memory[:50], PAGE + 100)
    assert bytes(first) + bytes(last) == memory[:50]
    assert not are_own(PAGE + 100, 50)
