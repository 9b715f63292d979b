"""Tests of `nbdist.cluster.node`: what is asked of a machine, and its loss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from nbdist.cluster.node import Node, NodeLost
from nbdist.topology import Position
from nbdist.wire.messages import Ask, GetStatus, StartFailure
from nbdist.wire.node_messages import (
    CallOff,
    EndRanks,
    Form,
    Formed,
    GetClock,
    GetHeld,
    Held,
    LocateRanks,
    NodeAsk,
    NodeDown,
    NodeFacts,
    NodeHello,
    Prepare,
    StartPart,
)
from nbdist.wire.spec import WorldSpec

FACTS = NodeFacts("b", 1, "10.0.0.2", 4000, 2, (), "/python", {})
SPEC = WorldSpec(1, "gloo", {}, "/", (), 1, "", seats=(Position(1, 0),))
HOUR = 3600 * 10**9


def node(number: int, send: Callable[[NodeDown], None]) -> Node:
    """One that is not there; it sends so."""
    return Node(number, "b", NodeHello("0.1.0", 7, FACTS), send)


async def test_answers_by_their_numbers() -> None:
    """What a notebook asks and what only a head asks have numbers of their own."""
    sent: list[NodeDown] = []
    there = node(1, sent.append)
    both = asyncio.gather(there.ask(GetStatus(), 5), there.ask(CallOff(1), 5))
    await asyncio.sleep(0)
    assert [type(each) for each in sent] == [Ask, NodeAsk]
    there.answered(2, None)
    there.answered(1, ())
    there.answered(9, "of nobody")
    assert await both == [(), None]
    with pytest.raises(NodeLost, match="b did not answer within 0 s"):
        await there.ask(GetStatus(), 0.01)


async def test_a_clock_that_is_wrong() -> None:
    """How far it is ahead is known to some milliseconds."""
    sent: list[NodeDown] = []
    there = node(1, sent.append)
    reading = asyncio.create_task(there.set_clock())
    while not reading.done():
        await asyncio.sleep(0)
        while sent:
            message = sent.pop()
            assert isinstance(message, NodeAsk)
            assert message.request == GetClock()
            there.answered(message.id, time.time_ns() + HOUR)
    assert abs(there.offset_ns - HOUR) < 10**9


async def test_one_that_is_lost() -> None:
    """What waits for it ends, and as a part of the world it has a problem, and no ranks."""
    sent: list[NodeDown] = []
    there = node(1, sent.append)
    waiting = asyncio.create_task(there.do(StartPart(SPEC, (0,), 1)))
    await asyncio.sleep(0)
    there.lose("the connection to b was lost")
    there.lose("again")
    failed = await waiting
    assert isinstance(failed, StartFailure)
    assert (failed.host, failed.reason) == ("b", "the connection to b was lost")
    before = len(sent)
    assert await there.do(GetHeld()) == Held({})
    assert await there.do(Form(SPEC, (0,), 1, 2, 1, (), {})) == Formed({}, {}, (), there.lost)
    assert await there.do(LocateRanks((0,))) == {}
    assert await there.do(Prepare(SPEC, (0,))) == there.lost
    await there.do(CallOff(2))
    await there.do(EndRanks((0,), 0.0))
    assert len(sent) == before
    assert repr(there) == "<Node 1 b lost: the connection to b was lost>"
