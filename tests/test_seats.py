"""Tests of `nbdist.seats`: who sits where, and sees which GPU."""

from __future__ import annotations

import pytest

from nbdist.seats import (
    Position,
    Seat,
    fill,
    gpus_of,
    ranks_on,
    reseat,
    seat_more,
    seat_of,
    shrink,
)


@pytest.mark.parametrize(
    ("room", "size", "seats"),
    [
        ((), 3, [Seat(0, 3, 0, 1), Seat(1, 3, 0, 1), Seat(2, 3, 0, 1)]),
        ((2, 2), 4, [Seat(0, 2, 0, 2), Seat(1, 2, 0, 2), Seat(0, 2, 1, 2), Seat(1, 2, 1, 2)]),
        ((2, 2), 3, [Seat(0, 2, 0, 2), Seat(1, 2, 0, 2), Seat(0, 1, 1, 2)]),
        ((4, 4), 1, [Seat(0, 1, 0, 1)]),
        ((1, 0, 2), 3, [Seat(0, 1, 0, 2), Seat(0, 2, 1, 2), Seat(1, 2, 1, 2)]),
    ],
)
def test_seats(room: tuple[int, ...], size: int, seats: list[Seat]) -> None:
    """Nodes are filled one after the other; the last has what is left, and empty ones no number."""
    filled = fill(room, size) if room else ()
    assert [seat_of(rank, size, filled) for rank in range(size)] == seats


def test_ranks_of_a_node() -> None:
    """They need not follow one another; without seats one node has all."""
    seats = (Position(0, 0), Position(1, 0), Position(0, 1))
    assert [ranks_on(node, 3, seats) for node in (0, 1, 2)] == [(0, 2), (1,), ()]
    assert [ranks_on(node, 3, ()) for node in (0, 1)] == [(0, 1, 2), ()]
    assert fill((2, 1)) == (*fill((2, 1), 2), (1, 0))
    with pytest.raises(ValueError, match="3 of 4 ranks have room"):
        fill((2, 1), 4)


@pytest.mark.parametrize(
    ("room", "size", "gpus", "seen"),
    [
        ((), 2, "4567", ["4567", "4567"]),
        ((2, 2), 4, "4567", ["45", "45", "67", "67"]),
        ((2, 2), 4, "456", ["45", "45", "64", "64"]),
        ((2, 2), 4, "45", ["45"] * 4),
        ((2, 2), 4, "4", ["4"] * 4),
        ((2, 2), 4, "", [""] * 4),
        ((2, 2), 2, "4567", ["4567"] * 2),
    ],
)
def test_gpus_of_simulated_nodes(
    room: tuple[int, ...], size: int, gpus: str, seen: list[str]
) -> None:
    """Each node has a slice, so that ranks of two nodes share no GPU where there are enough."""
    seats = fill(room, size) if room else ()
    assert ["".join(gpus_of(rank, seats, gpus)) for rank in range(size)] == seen


@pytest.mark.parametrize(
    ("counts", "lost", "room", "seats"),
    [
        # Ranks 2 and 3 sat on node 1.
        ((2, 2), {1}, {0: 4, 1: 2}, [(0, 0), (0, 1), (0, 2), (0, 3)]),
        ((2, 2), {1}, {0: 3, 2: 1}, [(0, 0), (0, 1), (0, 2), (2, 0)]),
        ((2, 2), {1}, {0: 2, 2: 8}, [(0, 0), (0, 1), (2, 0), (2, 1)]),
        ((2, 2), {1}, {0: 3, 1: 2}, None),
        ((2, 2), {1}, {}, None),
        ((1, 1, 1), {0, 2}, {1: 3}, [(1, 1), (1, 0), (1, 2)]),
        ((2, 1), {5}, {}, [(0, 0), (0, 1), (1, 0)]),
    ],
)
def test_ranks_of_lost_nodes_get_seats_on_others(
    counts: tuple[int, ...],
    lost: set[int],
    room: dict[int, int],
    seats: list[tuple[int, int]] | None,
) -> None:
    """The lowest that is free on the first node with room; all others keep theirs."""
    found = reseat(fill(counts), lost, room)
    assert (None if found is None else [*found]) == seats


def test_seats_that_were_left_are_taken_first() -> None:
    """Local rank 0 of node 0 is free: its rank has moved away."""
    seats = (Position(1, 0), Position(0, 1), Position(2, 0))
    assert reseat(seats, {2}, {0: 2, 1: 1}) == ((1, 0), (0, 1), (0, 0))


@pytest.mark.parametrize(
    ("lost", "kept", "seats"),
    [
        ({1}, (0, 3, 4), [(0, 0), (2, 0), (2, 1)]),
        ({0, 2}, (1, 2), [(1, 0), (1, 1)]),
        ({2}, (0, 1, 2), [(0, 0), (1, 0), (1, 1)]),
        ({0, 1, 2}, (), []),
    ],
)
def test_a_world_without_the_ranks_of_lost_nodes(
    lost: set[int], kept: tuple[int, ...], seats: list[tuple[int, int]]
) -> None:
    """Who stays keeps its seat and its place among the others, so that ranks have no gap."""
    assert shrink(fill((1, 2, 2)), lost) == (kept, tuple(seats))


@pytest.mark.parametrize(
    ("seats", "room", "size", "seated"),
    [
        ((), (), 4, ()),
        ((), (2, 2), 3, ((0, 0), (0, 1), (1, 0))),
        (((0, 0), (0, 1), (1, 0)), (2, 2), 2, ((0, 0), (0, 1))),
        # After ranks have left; a rank with a GPU keeps that, on one node too.
        (((0, 1), (1, 1)), (2, 2), 4, ((0, 1), (1, 1), (0, 0), (1, 0))),
        (((0, 0), (0, 3)), (), 4, ((0, 0), (0, 3), (0, 1), (0, 2))),
    ],
)
def test_more_are_seated(seats, room, size, seated):
    """Those that sit stay there, the others get the first free seats."""
    assert seat_more(seats, room, size) == seated
