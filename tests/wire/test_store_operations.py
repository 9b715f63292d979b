"""Tests of `nbdist.wire.store_operations`: what crosses is read as what it is, or not at all."""

from __future__ import annotations

import pickle
import struct

import pytest

from nbdist.wire.frames import BadFrame, FrameCutter
from nbdist.wire.store_operations import (
    LONGEST_WAIT,
    Add,
    Answer,
    Append,
    CompareSet,
    Count,
    Delete,
    Get,
    Operation,
    Refused,
    Set,
    Wait,
    answer_from,
    operation_from,
    to_frame,
)

OPERATIONS = [
    Set({"key": b"value", "": b""}),
    Get(("one", "two"), 1.5),
    Wait(("one",), 0),
    Add("count", -(10**30)),
    CompareSet("key", b"", b"\x00"),
    Append("key", b"more"),
    Delete("key"),
    Count(),
]

ANSWERS = [None, True, 7, b"value", (b"one", b""), Refused("it is so.")]


def frame_in(packed: bytes) -> bytes:
    (frame,) = FrameCutter().feed(packed)
    return frame


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: type(each).__name__)
def test_an_operation_arrives(operation: Operation) -> None:
    """As what was sent, in one frame."""
    assert operation_from(frame_in(to_frame(operation))) == operation


@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
def test_an_answer_arrives(answer: Answer) -> None:
    """As what was sent, in one frame."""
    assert answer_from(frame_in(to_frame(answer))) == answer


@pytest.mark.parametrize(
    "said",
    [
        Set({"key": "text"}),  # type: ignore[dict-item]
        Set({b"key": b""}),  # type: ignore[dict-item]
        Get(["key"], 1.0),  # type: ignore[arg-type]
        Get((1,), 1.0),  # type: ignore[arg-type]
        Wait((), -1.0),
        Wait((), LONGEST_WAIT + 1),
        Wait((), float("nan")),
        Add("key", 1.5),  # type: ignore[arg-type]
        Refused("no"),
        "Count()",
        print,
    ],
    ids=repr,
)
def test_what_is_no_operation(said: object) -> None:
    """It is refused, whatever a rank sends."""
    with pytest.raises(BadFrame):
        operation_from(pickle.dumps(said))


@pytest.mark.parametrize("frame", [b"", b"garbage", struct.pack("!Q", 1 << 60)])
def test_garbage(frame: bytes) -> None:
    """Neither end takes it for anything."""
    with pytest.raises(BadFrame):
        operation_from(frame)
    with pytest.raises(BadFrame):
        answer_from(frame)
