"""Tests of `nbdist.world.world_state`: what is known of workers, before any of them is there."""

from __future__ import annotations

import pytest

from nbdist.config import WorldConfig
from nbdist.errors import WorldNotStarted
from nbdist.seats import Position
from nbdist.wire.messages import Healed
from nbdist.world.states import State
from nbdist.world.world_state import Standing


def test_before_the_start() -> None:
    """How many there will be, in what layout and group; nothing can be sent."""
    there = Standing(WorldConfig(layout="2x2", log_dir=""))
    assert (there.state, there.size, there.layout) == (State.STOPPED, 4, "2x2")
    assert (there.everyone, there.has_group, there.is_idle) == ((0, 1, 2, 3), True, True)
    assert there.resolve("3") == 3
    assert there.wanted is None
    with pytest.raises(WorldNotStarted):
        _ = there.link
    assert not Standing(WorldConfig(1, backend="none", log_dir="")).has_group


def test_on_other_machines_they_decide() -> None:
    """What is wanted of them is known, and how many there will be only then."""
    there = Standing(WorldConfig(hosts="a:1,b:1", log_dir=""))
    assert there.wanted is not None
    assert [host.address for host in there.wanted.hosts] == ["a", "b"]


def test_ranks_that_have_other_numbers_now() -> None:
    """By node and process it is known who became whom, once for whoever asks."""
    there = Standing(WorldConfig(layout="2x1", log_dir=""))
    there.pids = {0: 100, 1: 101}
    there.take_healed(Healed({0: 101}, {0: ""}, (Position(1, 0),)))
    assert (there.size, there.pids) == (1, {0: 101})
    assert there.take_moved() == {1: 0}
    assert there.take_moved() == {}
    assert Standing(there.config).size == 1  # after a restart, too
