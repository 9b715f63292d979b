"""Tests of `nbdist.world.workers`: facts about workers before and after their start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.config import WorldConfig
from nbdist.errors import WorldNotStarted
from nbdist.output.events import Died, Done
from nbdist.topology import Position
from nbdist.wire.messages import Healed
from nbdist.world.sent_objects import NOTHING_SENT
from nbdist.world.states import WorldState
from nbdist.world.workers import Workers


def test_replaced_ranks_are_returned_once() -> None:
    """Replaced ranks are returned with their deaths, without ranks that the world lacks now."""
    workers = Workers(WorldConfig(n=2, log_dir=""))
    workers.names.record_finished(1, Done("ok", 0.0, frozenset("x")), NOTHING_SENT)
    workers.dead = {1: Died(-9, 0), 2: Died(-9, 0)}
    workers.apply_healed(Healed({0: 1, 1: 2}, {0: "", 1: ""}, workers.spec))
    assert workers.replace_dead({"late"}, {}) == (1,)
    assert (workers.dead, workers.names.lacking_text([1])) == ({}, "late and x")
    assert [workers.pop_replaced(), workers.pop_replaced()] == [{1: Died(-9, 0)}, {}]


def test_facts_are_known_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of workers, layout, group and launcher are known before the start."""
    there = Workers(WorldConfig(layout="2x2", log_dir=""))
    assert (there.state, there.size, there.layout) == (WorldState.STOPPED, 4, "2x2")
    assert (there.everyone, there.backend, there.is_idle) == ((0, 1, 2, 3), "gloo", True)
    assert there.resolve("3") == 3
    with pytest.raises(WorldNotStarted):
        _ = there.link
    assert Workers(WorldConfig(1, backend="none", log_dir="")).backend == "none"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    there = Workers(WorldConfig(2, log_dir=""))
    memory = there.memory(there.config.patience)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert memory.config.launcher_name == "slurm"


def test_a_renumbering_is_returned_once() -> None:
    """Ranks are recognized by node and process, and their new numbers are returned once."""
    there = Workers(WorldConfig(layout="2x1", log_dir=""))
    there.pids = {0: 100, 1: 101}
    spec = replace(there.spec, world_size=1, slots=(Position(1, 0),))
    there.apply_healed(Healed({0: 101}, {0: ""}, spec))
    assert (there.size, there.pids) == (1, {0: 101})
    assert [there.pop_renumbering(), there.pop_renumbering()] == [{1: 0}, {}]
    assert Workers(there.config).size == 1  # after a restart, too
