"""Tests of `nbdist.cluster.head`: questions to all nodes at once."""

from __future__ import annotations

import asyncio

from nbdist.cluster.head import Round, first_answer, rows_of
from nbdist.cluster.node import Node
from nbdist.wire.control import Candidate, Complete, Completions
from nbdist.wire.messages import Ask, Consult, GetStatus, Locate, Located
from nbdist.wire.node_messages import NodeDown, NodeFacts, NodeHello
from nbdist.wire.views import Place, WorkerStatus


def row(rank: int) -> WorkerStatus:
    """What a node says of one of its ranks."""
    return WorkerStatus(rank, 7, "a", "idle", 0.0, 0, "cpu")


async def until_sent(sent: list[tuple[int, NodeDown]], number: int) -> None:
    """Give what is under way the time to ask."""
    async with asyncio.timeout(20):
        while len(sent) < number:  # noqa: ASYNC110 (a list has no event)
            await asyncio.sleep(0)


def nodes() -> tuple[list[Node], list[tuple[int, NodeDown]]]:
    """Two nodes, and what is sent to each."""
    sent: list[tuple[int, NodeDown]] = []

    def node(number: int) -> Node:
        facts = NodeFacts(f"n{number}", number, "10.0.0.1", 1, 2, (), "", {})
        hello = NodeHello("0.1.0", 7, facts)
        return Node(number, f"n{number}", hello, lambda message: sent.append((number, message)))

    return [node(0), node(1)], sent


def test_a_round_ends_with_the_last_node() -> None:
    """Also where that is lost, or has an answer left to give from the round before."""
    (first, second), sent = nodes()
    asked, here = Round(), Place()
    asked.begin({first: (0,), second: (1, 2)})
    assert sent == [(0, Locate((0,))), (1, Locate((1, 2)))]
    assert asked.take(first, {0: here}) is None
    assert asked.take(second, {1: here, 2: here}) == Located({0: here, 1: here, 2: here})
    assert asked.take(second, {1: here}) is None
    asked.begin({first: (0,), second: (1,)})
    assert asked.take(first, {0: here}) is None
    assert asked.drop(second) == Located({0: here})
    assert asked.drop(second) is None


async def test_rows_and_answers() -> None:
    """Rows come in the ranks' order, those of lost nodes are missing; one answer is enough."""
    (first, second), sent = nodes()
    rows = asyncio.create_task(rows_of([first, second], GetStatus()))
    await until_sent(sent, 2)
    for number, message in sent:
        assert isinstance(message, Ask)
        node, rank = (first, 5) if number == 0 else (second, 2)
        node.answered(message.id, (row(rank),))
    assert await rows == (row(2), row(5))
    second.lose("gone")
    known = Completions((Candidate("x"),), 0, 0)
    question = Consult((0, 1), Complete("x", 1))
    answer = asyncio.create_task(first_answer({first: (0,), second: (1,)}, question))
    await until_sent(sent, 3)
    message = sent[-1][1]
    assert isinstance(message, Ask)
    first.answered(message.id, known)
    assert await answer == known
