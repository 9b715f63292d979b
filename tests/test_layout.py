"""Tests of `nbdist.topology`: the text of `-j`, seats, and who sees which GPU."""

from __future__ import annotations

import pytest

from nbdist.errors import BadTopology
from nbdist.topology import Layout, Seat, gpus_of, parse_layout, seat_of


@pytest.mark.parametrize(
    ("text", "layout", "said"),
    [
        ("4", Layout(1, 4), "1x4"),
        ("2", Layout(1, 2), "1x2"),
        ("1x4", Layout(1, 4), "1x4"),
        ("2x4", Layout(2, 4), "2x4"),
        (" 2 x 4 ", Layout(2, 4), "2x4"),
    ],
)
def test_layouts_are_read(text: str, layout: Layout, said: str) -> None:
    """`NODESxN` and a bare number of workers on one node."""
    assert parse_layout(text) == layout
    assert str(layout) == said
    assert layout.world_size == layout.nodes * layout.per_node


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0x0", "it takes at least one node and one worker"),
        ("2x0", "it takes at least one node and one worker"),
        ("0", "it takes at least one node and one worker"),
        ("x", "that is not nodes and workers"),
        ("2x4x1", "that is not nodes and workers"),
        ("1:4", "that is not nodes and workers"),
        ("1:2x4", "that is not nodes and workers"),
        ("2:x4", "that is not nodes and workers"),
        ("-1x2", "that is not nodes and workers"),
        ("", "that is not nodes and workers"),
        ("9" * 5000, "that is not nodes and workers"),
    ],
)
def test_bad_layouts_are_told_in_one_line(text: str, why: str) -> None:
    """The reason, and the forms that there are."""
    with pytest.raises(BadTopology) as found:
        parse_layout(text)
    forms = "Use `-j 4` or `-j 2x4` (2 nodes with 4 workers each)."
    assert str(found.value) == f"`-j {text}`: {why}. {forms}"


@pytest.mark.parametrize(
    ("size", "per_node", "seats"),
    [
        (3, 0, [Seat(0, 3, 0, 1), Seat(1, 3, 0, 1), Seat(2, 3, 0, 1)]),
        (4, 2, [Seat(0, 2, 0, 2), Seat(1, 2, 0, 2), Seat(0, 2, 1, 2), Seat(1, 2, 1, 2)]),
        (3, 2, [Seat(0, 2, 0, 2), Seat(1, 2, 0, 2), Seat(0, 1, 1, 2)]),
        (1, 4, [Seat(0, 1, 0, 1)]),
    ],
)
def test_seats(size: int, per_node: int, seats: list[Seat]) -> None:
    """Nodes are filled one after the other; the last has what is left."""
    assert [seat_of(rank, size, per_node) for rank in range(size)] == seats


@pytest.mark.parametrize(
    ("size", "per_node", "gpus", "seen"),
    [
        (2, 0, "4567", ["4567", "4567"]),
        (4, 2, "4567", ["45", "45", "67", "67"]),
        (4, 2, "456", ["45", "45", "64", "64"]),
        (4, 2, "45", ["45"] * 4),
        (4, 2, "4", ["4"] * 4),
        (4, 2, "", [""] * 4),
    ],
)
def test_gpus_of_simulated_nodes(size: int, per_node: int, gpus: str, seen: list[str]) -> None:
    """Each node has a slice, so that ranks of two nodes share no GPU where there are enough."""
    seats = [seat_of(rank, size, per_node) for rank in range(size)]
    assert ["".join(gpus_of(seat, gpus, per_node)) for seat in seats] == seen
