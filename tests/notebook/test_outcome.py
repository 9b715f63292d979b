"""Tests of `nbdist.notebook.outcome`: the last failure, last values, and routine snapshots."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from pathlib import Path

from nbdist.config import Patience
from nbdist.errors import WorkerDied
from nbdist.notebook.outcome import Elsewhere, LastValues, Routine, death_of, failure_of, idle_end
from nbdist.output.events import IGNORES_STOP, Died, Text
from nbdist.wire.ops import Written
from nbdist.wire.work import CellCode, Task
from nbdist.world.snapshot_store import Snapshot
from nbdist.world.states import Machines
from nbdist.world.task_error import error_of
from nbdist.world.task_run import Members, TaskRun


def test_the_end_of_an_idle_rank_is_described() -> None:
    """The text says how a rank ended and why, if known, or that the rank had ignored a Stop."""
    assert idle_end(Died(-9, 1)) == "was killed by SIGKILL while no cell was running"
    text = "exited with code 3 while no cell was running: it left"
    assert idle_end(Died(3, 1, why="it left")) == text
    assert idle_end(Died(-9, 1, why=IGNORES_STOP)) == "ignored Stop and was killed"


def test_a_rank_of_a_lost_machine_has_its_last_shown_lines() -> None:
    """`%dist_why` has the last lines that were shown, because the agent could send none."""
    members = Members(1, "gloo", Machines.one("node1", 1), {0: 4711}, {}, True)  # noqa: FBT003
    running = TaskRun(Task("id", (0,), CellCode("print(1)")), Patience(), members)
    running.receive(0, Text("stdout", "loading shards\nepoch 7\n"))
    running.receive(0, Died(None, time.time_ns(), why="its machine counts as lost"))
    error = error_of(running)
    assert isinstance(error, WorkerDied)
    why = failure_of(running, error, {})
    assert why.body == "its last lines:\nloading shards\nepoch 7"


def test_the_failure_of_a_dead_rank_has_its_last_lines() -> None:
    """The failure names rank, host, pid and signal, and has the last lines that were printed."""
    why = death_of(2, "node1", Died(-11, 1, 4711, ("Fatal error", "stack")), "2.log")
    assert "rank 2 on node1 (pid 4711)" in why.title
    assert why.title.endswith("the process was killed by SIGSEGV while no cell was running")
    assert why.shown.text.split("\n")[1:] == [
        "its last lines:",
        "Fatal error",
        "stack",
        "all of its lines: 2.log",
    ]
    assert death_of(2, "node1", Died(1, 1), "").body == "it had printed nothing"


def test_last_values_are_fetched_on_access():
    """`repr` fetches no value; each missing value is fetched once, several of them together."""
    fetched: list[tuple[int, ...]] = []

    def fetch(ranks: tuple[int, ...]) -> Mapping[int, int]:
        fetched.append(ranks)
        return {rank: 10 * rank for rank in ranks}

    values = LastValues({**dict.fromkeys((1, 3, 4), Elsewhere("<80 KiB>")), 0: None}, fetch)
    assert repr(values) == "{0: None, 1: <80 KiB>, 3: <80 KiB>, 4: <80 KiB>}"
    assert (values[3], values[3], values[0]) == (30, 30, None)
    assert (len(values), [*values]) == (4, [0, 1, 3, 4])
    assert fetched == [(3,)]
    assert repr(values) == "{0: None, 1: <80 KiB>, 3: 30, 4: <80 KiB>}"
    assert [*values.values()] == [None, 10, 30, 40]
    assert fetched == [(3,), (1, 4)]
    assert pickle.loads(pickle.dumps(values)) == {0: None, 1: 10, 3: 30, 4: 40}


def test_a_routine_is_due_at_every_third_cell(tmp_path: Path):
    """With `every=3` each third cell is due; the hint is empty if the snapshot's folder is gone."""
    assert [Routine().is_due() for _ in range(3)] == [False] * 3
    routine = Routine(every=3)
    assert [routine.is_due() for _ in range(7)] == [False, False, True, False, False, True, False]
    routine, part = Routine(), Written("", ("model", "x"), size=10)
    assert routine.hint == ""
    routine.newest = Snapshot("epoch-3", "20200101-120000", tmp_path, 0.0, {0: part})
    assert routine.hint.startswith("`%dist_restore --name epoch-3` restores model and x of 19")
    routine.newest = Snapshot("epoch-3", "20200101-120000", tmp_path / "gone", 0.0, {0: part})
    assert routine.hint == ""
