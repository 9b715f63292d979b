"""Tests of `nbdist.wire.frames`: frames and objects arrive as they were sent."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pytest

from nbdist.wire.frames import BadFrame, FrameCutter, framed, object_from

FRAMES = [b"", b"a", b"\x00" * 9, b"x" * 100_000, b"last"]


def test_frames_come_out_whole() -> None:
    """Frames come out whole, however the stream is cut into pieces."""
    stream = b"".join(map(framed, FRAMES))
    for size in (1, 7, 4096, 1 << 20):
        cutter = FrameCutter()
        pieces = (stream[start : start + size] for start in range(0, len(stream), size))
        assert [frame for piece in pieces for frame in cutter.feed(piece)] == FRAMES


def test_a_frame_that_is_too_long_is_refused() -> None:
    """A frame that is too long is refused as soon as its length has arrived."""
    cutter = FrameCutter(max_bytes=9)
    assert list(cutter.feed(framed(b"x" * 9))) == [b"x" * 9]
    with pytest.raises(BadFrame, match="a frame of 10 bytes"):
        list(cutter.feed(framed(b"x" * 10)[:8]))


class Part(NamedTuple):
    number: int


@dataclass(frozen=True, slots=True)
class Whole:
    name: str
    kind: Literal["a", "b"] = "a"
    seconds: float = 0
    parts: tuple[Part, ...] = ()
    pair: tuple[int, str] = (0, "")
    counts: Mapping[str, int] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    other: Part | None = None


def test_an_object_comes_out_equal() -> None:
    """An object comes out equal, with fields of every supported type."""
    parts = (Part(1), Part(2))
    whole = Whole("x", "b", 1.5, parts, (1, "y"), {"n": 1}, frozenset("ab"), Part(3))
    for each in (Whole("x"), whole):
        assert object_from(pickle.dumps(each), Whole) == each


WRONG: dict[str, list[object]] = {
    "name": [1],
    "kind": ["c"],
    "seconds": ["1"],
    "parts": [(1,), Part(1)],
    "pair": [(1, "y", 2), ("y", 1)],
    "counts": [{1: "n"}, [("n", 1)]],
    "names": [frozenset([1])],
    "other": [Whole("y"), Part("1")],  # type: ignore[arg-type]
}


def test_a_field_of_another_type_is_refused() -> None:
    """A field of another type is refused, also inside tuples, mappings and other objects."""
    for field_name, values in WRONG.items():
        for value in values:
            fields: dict[str, Any] = {"name": "x", field_name: value}
            with pytest.raises(BadFrame):
                object_from(pickle.dumps(Whole(**fields)), Whole)
