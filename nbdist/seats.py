"""Where each rank sits: on which node, and as which of those there; pure.

It is worked out in notebook, head and agents alike.  On one machine the nodes of `-j 2x4` are
simulated: each rank finds in its environment what torchrun would put there on that node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple


class Position(NamedTuple):
    """On which node a rank sits, and as which of those that it has room for."""

    node: int
    local_rank: int


Seats = tuple[Position, ...]
"""Of each rank; () for one node that has them all."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank is: torchrun's LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE."""

    local_rank: int
    local_world_size: int
    node: int
    nodes: int


def fill(room: Sequence[int], size: int | None = None) -> Seats:
    """Seat as many ranks, or as many as there is room for, on one node after the other.

    `room` is for how many each node has it.  Raises ValueError where that is too little.
    """
    seats = tuple(
        Position(node, local_rank)
        for node, number in enumerate(room)
        for local_rank in range(number)
    )
    if size is not None and size > len(seats):
        raise ValueError(f"{len(seats)} of {size} ranks have room")
    return seats[:size]


def seat_more(seats: Seats, room: Sequence[int], size: int) -> Seats:
    """Seat as many ranks: the first keep their seats, more get the first ones that are free.

    `room` is for how many each node has it; () for one node, which has no limit.
    """
    kept = seats[:size]
    if not (room or kept):
        return ()
    rows = enumerate(room or (size + len(kept),))
    all_there = (Position(node, number) for node, most in rows for number in range(most))
    free = (position for position in all_there if position not in kept)
    return (*kept, *islice(free, size - len(kept)))


def seat_of(rank: int, world_size: int, seats: Seats) -> Seat:
    """Say what a rank is told of its seat.

    Nodes are counted as torchrun does: those that have ranks, from 0 on without a gap.
    """
    if not seats:
        return Seat(rank, world_size, 0, 1)
    node, local_rank = seats[rank]
    nodes = sorted({each.node for each in seats})
    return Seat(local_rank, len(ranks_on(node, world_size, seats)), nodes.index(node), len(nodes))


def ranks_on(node: int, world_size: int, seats: Seats) -> tuple[int, ...]:
    """List the ranks that sit on this node."""
    if not seats:
        return tuple(range(world_size)) if node == 0 else ()
    return tuple(rank for rank, position in enumerate(seats) if position.node == node)


def gpus_of(rank: int, seats: Seats, gpus: Sequence[str]) -> tuple[str, ...]:
    """Choose what CUDA shows a rank of one machine's GPUs; its own is LOCAL_RANK modulo them.

    One node has all.  Simulated ones have a slice each, as CUDA_VISIBLE_DEVICES, so that
    LOCAL_RANK is a valid index on each; where there are too few GPUs, slices overlap.
    """
    if not gpus or len({position.node for position in seats}) < 2:
        return tuple(gpus)
    node = seats[rank].node
    first = sum(position.node < node for position in seats)
    here = sum(position.node == node for position in seats)
    return tuple(gpus[(first + each) % len(gpus)] for each in range(min(here, len(gpus))))


def reseat(seats: Seats, lost: Collection[int], room: Mapping[int, int]) -> Seats | None:
    """Seat the ranks of lost nodes on others that have room; None where that is too little.

    `room` is for how many ranks each node has it, those that sit there included.  All others
    keep their seats.
    """
    taken = {position for position in seats if position.node not in lost}
    free = (
        position
        for node, number in sorted(room.items())
        if node not in lost
        for position in (Position(node, local_rank) for local_rank in range(number))
        if position not in taken
    )
    missing = len(seats) - len(taken)
    found = list(islice(free, missing))
    if len(found) < missing:
        return None
    new = iter(found)
    return tuple(next(new) if position.node in lost else position for position in seats)


def shrink(seats: Seats, lost: Collection[int]) -> tuple[tuple[int, ...], Seats]:
    """Leave out the ranks of lost nodes: those that stay, by their new ranks, and their seats.

    They stay in order, where they sit, and up to the first that is lost keep their ranks.
    """
    kept = tuple(rank for rank, position in enumerate(seats) if position.node not in lost)
    return kept, tuple(seats[rank] for rank in kept)
