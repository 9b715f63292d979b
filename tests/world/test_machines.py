"""Tests of `nbdist.world.ranks`: which rank is where, in words."""

from __future__ import annotations

from nbdist.seats import Position
from nbdist.wire.start import WorldSpec
from nbdist.world.ranks import Machines

THREE = Machines({0: ("a", 0), 1: ("a", 1), 2: ("b", 0), 3: ("c", 0), 4: ("a", 2)})


def test_one_machine_is_not_said_again() -> None:
    """Each rank is a number of it."""
    machines = Machines.one("here", 3)
    assert machines.by_rank == {0: ("here", 0), 1: ("here", 1), 2: ("here", 2)}
    assert machines.who([2, 0, 1]) == "ranks 0-2"
    assert machines.who([1]) == "rank 1"
    assert str(machines) == "here"


def test_several_are_named() -> None:
    """In the order of their ranks; a rank that is not known has none."""
    assert THREE.who(range(5)) == "ranks 0-1,4 on a, 2 on b, 3 on c"
    assert THREE.who([2]) == "rank 2 on b"
    assert THREE.names == ("a", "b", "c")
    assert str(THREE) == "a, b and c"
    assert (THREE.name(3), THREE.name(9)) == ("c", "")


def test_many_are_counted() -> None:
    """A line has room for some."""
    many = Machines({rank: (f"n{rank}", 0) for rank in range(9)})
    assert str(many) == "n0 and 8 other machines"
    assert str(Machines()) == ""


def test_numbers_are_the_seats() -> None:
    """Of a rank that was moved too."""
    seats = (Position(0, 0), Position(2, 1))
    spec = WorldSpec(2, None, {}, "/", (), 1, "python", seats=seats)
    machines = Machines.of({0: "a", 1: "c"}, spec)
    assert machines.by_rank == {0: ("a", 0), 1: ("c", 1)}
