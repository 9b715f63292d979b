"""Tests of `nbdist.wire.membership`: what the parts of a world are asked for, and say."""

from __future__ import annotations

import pickle

import pytest

from nbdist.seats import Position
from nbdist.wire.control import HeldGroups
from nbdist.wire.membership import Formed, Held, Plan, processes
from nbdist.wire.spec import WorldSpec

SPEC = WorldSpec(4, "gloo", {}, "/", (), 1, "/venv/bin/python")


@pytest.mark.parametrize(
    "message",
    [
        Held({0: HeldGroups(0, 4, {"pair": (0, 1)}), 1: None}),
        Plan(SPEC, 1, 3, 2, missing=(2,), groups=None),
        Formed({0: 17}, {0: "/logs/0"}, (0,), "rank 1 could not start"),
    ],
)
def test_they_can_travel(message: Held | Plan | Formed) -> None:
    """Between machines they do."""
    assert pickle.loads(pickle.dumps(message)) == message


def test_processes_by_rank() -> None:
    """With the node of each; without seats all are on one."""
    assert processes({0: 17, 1: 17}, (Position(0, 0), Position(1, 0))) == {0: (0, 17), 1: (1, 17)}
    assert processes({3: 17}, ()) == {3: (0, 17)}
