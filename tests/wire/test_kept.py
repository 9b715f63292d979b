"""Tests of `nbdist.wire.kept`: what has not changed is not copied again, and what has is."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.wire import kept as module
from nbdist.wire.kept import Kept, Shipped, packing_changed
from nbdist.wire.payload import INLINE_LIMIT, open_payload
from nbdist.wire.shared_memory import Buffer, to_end


def frame(seed: int, size: int = INLINE_LIMIT) -> bytes:
    return bytes([seed]) * size


def ship(frames: list[Buffer], *known: Kept) -> Shipped:
    return to_end(packing_changed(frames, known))


def opened(shipped: Shipped) -> list[bytes]:
    return [bytes(memoryview(each)) for each in open_payload(shipped.packed[0])]


def close(*all_shipped: Shipped) -> None:
    for _, segment in (each.packed for each in all_shipped):
        if segment is not None:
            segment.close()


@pytest.fixture(autouse=True)
def from_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "KEPT_FROM", 0)
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before, "memory that nobody uses is still there"


def test_one_frame_has_changed():
    """It alone is copied; the receiver finds all, in order."""
    frames = [b"pickle", frame(1), frame(2), frame(3)]
    first = ship(frames)
    assert first.kept is not None
    changed = [b"pickled", frame(1), frame(9), frame(3)]
    again = ship(changed, first.kept)
    assert opened(again) == changed
    assert (again.copied, again.size) == (7 + INLINE_LIMIT, 7 + 3 * INLINE_LIMIT)
    assert again.kept is not None
    third = ship([*changed, frame(3)], again.kept)
    assert opened(third) == [*changed, frame(3)]
    assert third.copied == 7 + INLINE_LIMIT, "a frame lies there once"
    close(first, again, third)


def test_nothing_has_changed_but_the_pickle():
    """It goes in the message."""
    first = ship([b"a", frame(1), frame(2)])
    assert first.kept is not None
    again = ship([b"b", frame(2), frame(1)], first.kept)
    assert opened(again) == [b"b", frame(2), frame(1)]
    assert again.packed[0].segment is None
    close(first)


def test_memory_stays_as_long_as_it_is_kept():
    """Its owner is whoever has the record of it."""
    first = ship([b"", frame(1), frame(2)])
    kept, payload = first.kept, first.packed[0]
    del first
    assert open_payload(payload)
    del kept
    with pytest.raises(OSError, match="shared memory"):
        open_payload(payload)


def test_what_is_not_worth_it():
    """Neither one frame alone, nor a small part of much memory."""
    assert ship([b"", frame(1)]).kept is None
    first = ship([b"", *map(frame, range(5))])
    assert first.kept is not None
    assert ship([b"", frame(0), frame(1), frame(7)], first.kept).copied == 3 * INLINE_LIMIT
    close(first)


def test_not_from_too_many_places(monkeypatch: pytest.MonkeyPatch):
    """Each is an open file here, and a mapping in each worker."""
    monkeypatch.setattr(module, "MOST_SEGMENTS", 2)
    parts = [ship([b"", frame(2 * n), frame(2 * n + 1)]) for n in range(3)]
    whole = [b"", *map(frame, range(6))]
    again = ship(whole, *[each.kept for each in parts if each.kept])
    assert opened(again) == whole
    assert len(again.packed[0].others) == 2
    close(*parts, again)


def test_a_change_anywhere_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Frames are compared to the last byte, a piece at a time."""
    monkeypatch.setattr(module, "COMPARED_AT_ONCE", 1 << 18)
    first = ship([b"", frame(1, 300_000), frame(2, 600_000)])
    assert first.kept is not None
    for place in (0, 262_143, 262_144, 299_999):
        data = bytearray(frame(1, 300_000))
        data[place] += 1
        again = ship([b"", data, frame(2, 600_000)], first.kept)
        assert again.copied == 300_000
        close(again)
    close(first)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=6))
def test_any_changes_in_a_row(rounds: list[list[int]]):
    """What arrives is what was sent, whatever was before."""
    known: list[Kept] = []
    for seeds in rounds:
        frames: list[Buffer] = [bytes(seeds), *(frame(seed, 5000 + 9000 * seed) for seed in seeds)]
        shipped = ship(frames, *known)
        assert opened(shipped) == frames
        known = [shipped.kept] if shipped.kept else []
        if not known:
            close(shipped)
