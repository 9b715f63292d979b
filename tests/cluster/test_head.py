"""Tests of `nbdist.cluster.head`: questions to all nodes at once."""

from __future__ import annotations

import asyncio

from nbdist.cluster.head import first_answer, rows_of
from nbdist.cluster.node import Node
from nbdist.wire.control import Candidate, Complete, Completions
from nbdist.wire.messages import Ask, Consult, GetStatus
from nbdist.wire.node_messages import NodeDown, NodeFacts, NodeHello
from nbdist.wire.views import WorkerStatus


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
