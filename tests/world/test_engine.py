"""Tests of `nbdist.world.engine` and its tables: facts before and after the start of workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.config import WorldConfig
from nbdist.errors import WorldNotStarted
from nbdist.output.events import Died, Done
from nbdist.topology import Position
from nbdist.wire.messages import Healed
from nbdist.wire.world_facts import Renumbering, WorldFacts
from nbdist.world.connection import handover_state
from nbdist.world.engine import Engine
from nbdist.world.sent_objects import NOTHING_SENT
from nbdist.world.states import WorldState


def test_replaced_ranks_are_returned_once() -> None:
    """The deaths of replaced ranks are returned once; the ranks lack names that tasks had bound."""
    engine = Engine(WorldConfig(n=2, log_dir=""))
    table = engine.rank_table
    engine.names.record_finished(1, Done("ok", 0.0, frozenset("x")), NOTHING_SENT)
    table.dead = {1: Died(-9, 0)}
    facts = WorldFacts(table.spec, {0: 1, 1: 2}, {0: "", 1: ""})
    engine.apply_healed(Healed(facts, Renumbering.none(2), {1: Died(-9, 0)}))
    assert engine.settle_changes({"late"}, {}) == (1,)
    assert (table.dead, engine.names.lacking_text([1])) == ({}, "late and x")
    assert [table.pop_replaced(), table.pop_replaced()] == [{1: Died(-9, 0)}, {}]


def test_changes_are_combined_until_the_group_is_whole() -> None:
    """The changes of all attempts to form the group are combined, also those of a failed attempt.

    The deaths of replaced ranks follow the ranks' new numbers.
    """
    engine = Engine(WorldConfig(n=4, log_dir=""))
    table = engine.rank_table
    died = {1: Died(-9, 0), 3: Died(-9, 0)}
    spec = replace(table.spec, world_size=4)
    engine.apply_healed(Healed(WorldFacts(spec, {0: 1}), Renumbering.none(4), died))
    two = WorldFacts(replace(spec, world_size=2), is_whole=False, problem="no", dead=died)
    shrunk = Healed(two, Renumbering(4, 2, {0: 0, 3: 1}))
    for _ in range(2):  # after Stop, a message that was applied can be applied once more
        engine.apply_healed(shrunk)
    assert (engine.size, table.problem, table.dead) == (2, "no", died)
    three = WorldFacts(replace(spec, world_size=3), joined=("node3",))
    engine.apply_healed(Healed(three, Renumbering(2, 3, {0: 0, 1: 1})))
    assert (table.problem, table.dead, [*table.joined]) == ("", {}, ["node3"])
    assert table.renumbering == Renumbering(4, 3, {0: 0, 3: 1})
    assert (engine.settle_changes((), {}), table.pop_replaced()) == ((1,), {1: died[3]})
    engine.apply_healed(Healed(three, Renumbering.none(3)))
    assert (table.renumbering, engine.settle_changes((), {})) == (Renumbering.none(3), ())


def test_facts_are_known_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of workers, layout, backend and launcher are known before the start."""
    engine = Engine(WorldConfig(layout="2x2", log_dir=""))
    table = engine.rank_table
    assert (engine.state, engine.size, table.layout) == (WorldState.STOPPED, 4, "2x2")
    assert (table.everyone, table.backend) == ((0, 1, 2, 3), "gloo")
    assert engine.task_table.is_idle
    assert engine.resolve("3") == 3
    with pytest.raises(WorldNotStarted):
        _ = engine.connection.link
    assert Engine(WorldConfig(1, backend="none", log_dir="")).rank_table.backend == "none"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    engine = Engine(WorldConfig(2, log_dir=""))
    state = handover_state(engine.config, engine.config.patience, {})
    monkeypatch.delenv("SLURM_JOB_ID")
    assert state.config.launcher_name == "slurm"


def test_the_repr_says_what_a_world_is_doing() -> None:
    """The reprs of an engine, its tables and its connection say size, state, pids and deaths."""
    engine = Engine(WorldConfig(n=2, log_dir=""))
    assert repr(engine) == "<Engine 2 ranks, stopped>"
    engine.rank_table.pids, engine.rank_table.dead = {0: 7, 1: 8}, {1: Died(-9, 0)}
    assert repr(engine.rank_table) == "<RankTable 2 ranks, pids {0: 7, 1: 8}, dead [1]>"
    assert repr(engine.task_table) == "<TaskTable []>"
    assert repr(engine.connection) == "<AgentConnection without a link>"


def test_a_renumbering_is_returned_once() -> None:
    """The new numbers of ranks are returned once, and a restart keeps the new size."""
    engine = Engine(WorldConfig(layout="2x1", log_dir=""))
    table = engine.rank_table
    table.pids = {0: 100, 1: 101}
    spec = replace(table.spec, world_size=1, slots=(Position(1, 0),))
    facts = WorldFacts(spec, {0: 101}, {0: ""})
    engine.apply_healed(Healed(facts, Renumbering(2, 1, {1: 0})))
    assert (engine.size, table.pids) == (1, {0: 101})
    assert [table.pop_renumbering(), table.pop_renumbering()] == [{1: 0}, {}]
    assert Engine(engine.config).size == 1  # a restart uses this config
