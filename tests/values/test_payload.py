"""Tests of `nbdist.values.payload`: frames inline or shared, and identity."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from nbdist.values.payload import (
    INLINE_LIMIT,
    Identity,
    Payload,
    as_read,
    is_atomic,
    moved,
    open_payload,
    pack_frames,
    refs_in,
)
from nbdist.values.shared_memory import SegmentRef
from nbdist.wire.ops import Brought


def test_where_frames_travel() -> None:
    """Below the limit in the message, from it on all frames of a payload in one segment."""
    frames = [b"p", bytearray(INLINE_LIMIT - 1)]
    payload, segment = pack_frames(frames)
    with segment:
        assert payload == Payload(segment=segment.ref)
        assert open_payload(payload) == frames
    payload, segment = pack_frames([b"pickle", memoryview(b"buffer")])
    assert segment is None
    assert payload == Payload(frames=(b"pickle", b"buffer"))
    assert open_payload(payload) == [b"pickle", b"buffer"]


def test_segments_wherever_payloads_are() -> None:
    """In mappings and sequences, what was pickled with the frames, and was read."""
    refs = [SegmentRef(f"/proc/1/fd/{number}#{number}", (number,)) for number in range(3)]
    here = {ref.path: SegmentRef(f"/here/{ref.path}", ref.sizes) for ref in refs[1:]}
    one = Payload(segment=refs[0])
    two = Payload(frames=(b"x",), within=((refs[1].path, refs[1]),))
    value = {"a": one, "b": [two, 7, "text"], "c": (Brought(packed=Payload(segment=refs[2])),)}
    assert refs_in(value) == (*refs,)
    found = moved(value, here)
    assert refs_in(found) == (refs[0], *here.values())
    assert found["a"] == one
    assert found["b"][1:] == [7, "text"]
    assert found["b"][0].within == ((refs[1].path, here[refs[1].path]),)
    assert moved(value, {}) is value
    brought = Brought(packed=Payload(segment=refs[1]))
    assert as_read(brought, two) is brought
    assert as_read(brought, moved(two, here)).packed == Payload(segment=here[refs[1].path])
    assert as_read(odd := OddList(), one) is odd, "a user's value is not looked into"


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
    # What is light is kept, so that nothing comes to its place.
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
