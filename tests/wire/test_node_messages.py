"""Tests of `nbdist.wire.node_messages`: what the head, its agents and parts say to one another."""

from __future__ import annotations

import pytest

from nbdist.topology import Position
from nbdist.values.shared_memory import SegmentRef
from nbdist.wire.frames import pack
from nbdist.wire.node_messages import (
    CallOff,
    NodeAnswer,
    NodeAsk,
    NodeFacts,
    NodeHello,
    StoreAnswer,
    StoreAsk,
    node_frames,
    node_message_from,
    processes,
)
from nbdist.wire.store import Add
from nbdist.wire.transfer import Piece

FACTS = NodeFacts("a", 0, "10.0.0.1", 4000, 2, ("0",), "/python", {})


@pytest.mark.parametrize(
    "message", [NodeHello("0.1.0", 7, FACTS), NodeAnswer(1, "no room"), StoreAsk(2, Add("k", 1))]
)
def test_what_goes_up(message: NodeHello | NodeAnswer | StoreAsk) -> None:
    """It arrives as it was."""
    assert node_message_from(pack(message)) == message


@pytest.mark.parametrize("message", [NodeAsk(1, CallOff(3)), StoreAnswer(2, 5)])
def test_what_goes_down(message: NodeAsk | StoreAnswer) -> None:
    """So does this."""
    assert node_message_from(pack(message)) == message


def test_bytes_of_a_big_value() -> None:
    """They have a frame of their own, and arrive with what they are of."""
    piece = Piece(SegmentRef("/proc/1/fd/2#3", (9,)), 4, b"bytes")
    frame, data = node_frames(piece)
    assert data is piece.data
    assert node_message_from(bytes(frame), memoryview(data)) == piece
    assert node_frames(NodeAnswer(1, "x")) == [pack(NodeAnswer(1, "x"))]


def test_processes_by_rank() -> None:
    """With the node of each; without seats all are on one."""
    assert processes({0: 17, 1: 17}, (Position(0, 0), Position(1, 0))) == {0: (0, 17), 1: (1, 17)}
    assert processes({3: 17}, ()) == {3: (0, 17)}
