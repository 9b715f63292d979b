"""What is asked of all nodes at once, and answered as one agent would."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from nbdist.cluster.node import Node, NodeLost
from nbdist.wire.messages import Consult, GetLogs, GetStacks, GetStatus, Locate, Located, Request
from nbdist.wire.places import Place

LOOK_TIMEOUT = 10.0
"""Seconds for nodes to say how their ranks are; longer than an agent takes."""

Parts = Mapping[Node, tuple[int, ...]]
"""Nodes, and ranks of each."""


async def ask(node: Node, request: Request) -> Any:
    """Return what a node answers, None where it is lost."""
    try:
        return await node.ask(request, LOOK_TIMEOUT)
    except NodeLost:
        return None


async def rows_of(
    nodes: Iterable[Node], request: GetStatus | GetStacks | GetLogs
) -> tuple[Any, ...]:
    """Return the rows of all ranks, in their order; those of lost nodes are missing."""
    found = await asyncio.gather(*(ask(node, request) for node in nodes))
    rows = (row for rows in found for row in rows or ())
    return tuple(sorted(rows, key=lambda row: int(row.rank)))


async def first_answer(parts: Parts, consult: Consult) -> Any:
    """Ask all nodes that have one of the ranks; return what one of them knows, None for nothing."""
    asked = [ask(node, replace(consult, ranks=ranks)) for node, ranks in parts.items()]
    answer = None
    for each in asyncio.as_completed(asked):
        answer = answer or await each
    return answer


class Round:
    """One question where ranks are, and the answers of all nodes to it so far."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._waited_for: set[int] = set()

    def __repr__(self) -> str:
        return f"<Round {len(self._places)} places, nodes {sorted(self._waited_for)} missing>"

    def begin(self, parts: Parts) -> None:
        """Ask these; what has not been answered of the round before is not waited for."""
        self._places.clear()
        self._waited_for = {node.number for node in parts if not node.lost}
        for node, ranks in parts.items():
            node.send(Locate(ranks))

    def take(self, node: Node, places: Mapping[int, Place]) -> Located | None:
        """Take in an answer; return all of them once there are all."""
        self._places.update(places)
        return self.drop(node)

    def drop(self, node: Node) -> Located | None:
        """Wait no longer for this one; return all answers where it was the last."""
        if node.number not in self._waited_for:
            return None
        self._waited_for.discard(node.number)
        return None if self._waited_for else Located(dict(self._places))
