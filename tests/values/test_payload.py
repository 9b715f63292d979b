"""Tests of `nbdist.values.payload`: frames inline or shared, memory used again, and identity."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.values import payload as module
from nbdist.values.payload import (
    INLINE_LIMIT,
    Identity,
    Kept,
    Payload,
    Shipped,
    as_read,
    is_atomic,
    moved,
    open_payload,
    pack_frames,
    packing_changed,
    refs_in,
)
from nbdist.values.shared_memory import Buffer, SegmentRef, to_end
from nbdist.wire.ops import Brought


def test_where_frames_travel() -> None:
    """Below the limit in the message, from it on all frames of a payload in one segment."""
    frames = [b"p", bytearray(INLINE_LIMIT - 1)]
    payload, segment = pack_frames(frames)
    assert segment is not None
    with segment:
        assert payload == Payload(segment=segment.ref)
        assert open_payload(payload) == frames
    payload, segment = pack_frames([b"pickle", memoryview(b"buffer")])
    assert segment is None
    assert payload == Payload(frames=(b"pickle", b"buffer"))
    assert open_payload(payload) == [b"pickle", b"buffer"]


def test_segments_wherever_payloads_are() -> None:
    """In mappings, sequences, dataclasses, what was pickled with the frames, and was read."""
    refs = [SegmentRef(f"/proc/1/fd/{number}#{number}", (number,)) for number in range(5)]
    here = {ref.path: SegmentRef(f"/here/{ref.path}", ref.sizes) for ref in refs[1:]}
    one = Payload(segment=refs[0], others=(refs[1], refs[2]), order=((1, 0),))
    two = Payload(frames=(b"x",), within=((refs[3].path, refs[3]),))
    value = {"a": one, "b": [two, 7, "text"], "c": (Brought(packed=Payload(segment=refs[4])),)}
    assert refs_in(value) == (*refs,)
    found = moved(value, here)
    assert refs_in(found) == (refs[0], *here.values())
    assert found["a"] == one._replace(others=(here[refs[1].path], here[refs[2].path]))
    assert found["b"][1:] == [7, "text"]
    assert found["b"][0].within == ((refs[3].path, here[refs[3].path]),)
    assert moved(value, {}) is value
    assert moved(two, {}) is two
    brought = Brought(packed=Payload(segment=refs[3]))
    assert as_read(brought, two) is brought
    assert as_read(brought, moved(two, here)).packed == Payload(segment=here[refs[3].path])


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
    """It alone is copied, where that is worth it; the receiver finds all, in order."""
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
    frames = [b"b", frame(3), frame(9), frame(1)]
    only_its_pickle = ship(frames, again.kept)  # goes in the message
    assert opened(only_its_pickle) == frames
    assert only_its_pickle.packed[0].segment is None
    assert ship([b"", frame(1)]).kept is None
    many = ship([b"", *map(frame, range(5))])
    assert many.kept is not None
    assert ship([b"", frame(0), frame(1), frame(7)], many.kept).copied == 3 * INLINE_LIMIT
    close(first, again, third, many)


def test_memory_stays_as_long_as_it_is_kept():
    """Its owner is whoever has the record of it."""
    first = ship([b"", frame(1), frame(2)])
    kept, payload = first.kept, first.packed[0]
    del first
    assert open_payload(payload)
    del kept
    with pytest.raises(OSError, match="shared memory"):
        open_payload(payload)


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


@settings(max_examples=60)
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


def test_small_plain_values_are_atomic() -> None:
    """Their text stands for them; not long ones, nor what has parts, or may have attributes."""
    assert all(map(is_atomic, (1, 1.5, 1j, True, "x", b"x", None, ..., 2**4095)))
    subclass = type("Subclass", (int,), {})
    others = ("x" * 4097, b"x" * 4097, 2**4096, subclass(1), [1], (1,), {}, object())
    assert not any(map(is_atomic, others))


def test_identity_of_an_object() -> None:
    """The very same one, also after a change, which is seen; not one in its place."""

    class Model:
        pass

    model = Model()
    identity = Identity(model)
    assert identity.is_still(model)
    assert identity.is_unchanged(model)
    assert not identity.is_still(Model())
    del model
    gc.collect()
    assert not identity.is_still(Model())
    for values in ([1, 2], [object(), 2]):
        identity = Identity(values)
        assert identity.is_unchanged(values)
        values.append(3)
        assert identity.is_still(values)
        assert not identity.is_unchanged(values)
    assert values not in gc.get_referents(identity)


def test_what_comes_to_the_place_of_another() -> None:
    """It is not taken for that, which is kept where it is light."""
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


def test_nothing_is_asked_of_an_object() -> None:
    """Its class may be a user's, and raise anything."""
    for value in (Odd(), OddList([1]), bytearray(5), range(9), (1,), {1: 2}):
        assert Identity(value).is_still(value)
        assert Identity(value).is_unchanged(value)
        assert not Identity(value).is_still(Odd())
