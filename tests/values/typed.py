"""Calls of the Python API whose types `mypy` checks with the package; the calls never run."""

from __future__ import annotations

from typing import assert_type

import nbdist
from nbdist.world.result import CellResult


def f(x: int, name: str = "") -> list[float]:
    return [float(x)]


@nbdist.distributed(n=2)
def g(x: int) -> str:
    return str(x)


@nbdist.distributed
def h(x: int) -> bytes:
    return bytes(x)


def functions_types_reach_their_results(world: nbdist.World) -> None:
    assert_type(world.run(f, 3).rank(0), list[float])
    assert_type(nbdist.run(f, 3, name="a").index("localhost", local_rank=0), list[float])
    assert_type(g(1).rank(0), str)
    assert_type(list(h(1)), list[bytes])
    assert_type(world.run(f, 1), CellResult[list[float]])
    assert_type(world.run(f, 1, ranks="::2"), CellResult[list[float]])
    assert_type(world.run(f, 1, ranks=[0, 1]).rank(0), list[float])
    assert_type(world.run(f, 1, rank=-1).rank(0), list[float])


def their_arguments_are_checked(world: nbdist.World) -> None:
    # mypy would report a comment here that hides no error.
    world.run(f, "a")  # type: ignore[call-overload]
    nbdist.run(f)  # type: ignore[call-arg]
    g("a")  # type: ignore[arg-type]
    h(y=1)  # type: ignore[call-arg]
