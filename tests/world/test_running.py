"""Tests of `nbdist.world.running`: what is to be done next about a task, what became of it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from nbdist.config import CONTROL_TIMEOUT, Patience
from nbdist.errors import AgentLost, CellTimeout, RanksNotStopped, RanksReleased, WorkerDied
from nbdist.output.events import Died, Done, Failure, InputRequest, Moved, Text
from nbdist.wire.messages import Located, Silent
from nbdist.wire.views import Place
from nbdist.wire.work import Source, Task
from nbdist.world.running import Crew, RunningTask, Step
from nbdist.world.states import Machines

WAITS = Place(line=1, operation="barrier", is_calm=True)
STOPPED = Failure("KeyboardInterrupt", "", (), 2)


def running(
    *, ranks: int = 2, backend: str = "gloo", heals: bool = True, patience: Patience | None = None
) -> RunningTask:
    """A task on all ranks of a world, with nothing shown so far."""
    pids = {rank: 100 + rank for rank in range(ranks)}
    crew = Crew(ranks, backend, Machines.one("here", ranks), pids, {}, heals)
    task = Task("id", tuple(range(ranks)), Source("dist.barrier()"))
    return RunningTask(task, patience or Patience(), crew)


def looks(task: RunningTask, now: float) -> list[Step]:
    """What is to be done at three looks, at which rank 0 waits and the other does nothing."""
    steps: list[Step] = []
    for number in range(3):
        steps += task.next_steps(now + 1.5 * (number + 1))
        task.take(Located({0: WAITS, 1: Place()}), now + 1.5 * (number + 1))
    return steps


def test_it_is_over_when_all_ranks_are_done() -> None:
    """What they show is news once; with their agent all have ended."""
    task = running()
    task.receive(0, Text("stdout", "hello\n"))
    task.moved = {0: Moved(1, 10), 1: Moved(2, 20)}
    task.receive(0, Done("ok", 0.1, bound=frozenset({"x"})))
    assert (task.unfinished, task.waits_after(0), task.bytes_moved) == ((1,), True, (3, 30))
    assert [[rank for rank, _ in task.take_news()] for _ in range(2)] == [[0, 0], []]
    assert (task.made, task.result().by_rank) == ({"x"}, {0: None})
    assert isinstance(task.error(), RanksNotStopped)
    task.receive(1, Done("ok", 0.1))
    assert (task.unfinished, task.error()) == ((), None)
    assert [*task.next_steps(time.monotonic())] == []
    task, lost = running(), AgentLost("here", -9)
    task.take_loss(lost)
    assert (task.unfinished, task.error()) == ((), lost)


@pytest.mark.parametrize(
    ("backend", "heals", "step"),
    [
        ("gloo", True, [Step.ABORT_FOR_DEAD]),
        ("gloo", False, [Step.END_SURVIVORS]),
        ("none", True, []),
        ("none", False, [Step.END_SURVIVORS]),
    ],
)
def test_a_death(backend: str, *, heals: bool, step: list[Step]) -> None:
    """The others are freed, or ended as the policy says; once."""
    now, task = time.monotonic(), running(backend=backend, heals=heals)
    task.receive(1, Died(-9, time.time_ns()))
    assert [*task.next_steps(now)] == step
    assert [*task.next_steps(now)] == []
    assert isinstance(task.error(), RanksNotStopped)  # rank 0 still runs
    task.receive(0, Done("ok", 0.1))
    task.fate = "It was replaced."
    error = task.error()
    assert isinstance(error, WorkerDied)
    assert str(error).endswith("It was replaced.")


def test_a_rank_that_finished_is_waited_for() -> None:
    """Two looks that show the same are enough to free who waits; after Stop its agent does."""
    task, stopped, now = running(), running(), time.monotonic()
    for each in (task, stopped):
        each.receive(1, Done("ok", 0.1))
    assert looks(task, now) == [Step.LOCATE, Step.LOCATE, Step.ABORT]
    task.abort(now + 5)
    assert task.aborted == {0: WAITS}
    stopped.stop(now)
    assert looks(stopped, now) == [Step.LOCATE] * 3
    task.receive(0, Failure("RuntimeError", "Connection closed", (), 1, connections="ended"))
    task.receive(0, Done("error", 0.1))
    error = task.error()
    assert isinstance(error, RanksReleased)
    assert error.rank == 0


def test_a_gpu_has_just_ended_a_collective() -> None:
    """nccl2 notices within a second; until then a rank that goes on to compute seems to wait."""
    task, now = running(backend="nccl"), time.monotonic()
    task.receive(1, Failure("ValueError", "bad", ("bad",), 1))
    task.receive(1, Done("error", 0.1))
    seems = Place(line=2, operation="all_reduce")
    for tenths in range(13):
        task.take(Located({0: seems, 1: Place()}), now + tenths / 10)
        assert Step.ABORT not in task.next_steps(now + tenths / 10)
    task.take(Located({0: seems, 1: Place()}), now + 2)
    assert [*task.next_steps(now + 2)] == [Step.ABORT]


def test_nobody_waits_in_vain_for_one_that_is_debugged() -> None:
    """As long as somebody has to type there, the others are not even looked at."""
    task, now = running(), time.monotonic()
    task.receive(1, InputRequest(1, "(Pdb) "))
    assert [*task.next_steps(now + 60)] == []
    task.prompts.answered(1, now + 60)
    assert [*task.next_steps(now + 60)] == [Step.LOCATE]


@pytest.mark.parametrize("backend", ["gloo", "none"])
def test_it_takes_too_long(backend: str) -> None:
    """It is stopped once, and where its ranks were is the error; time to type does not count."""
    assert running(patience=Patience(timeout=0.5)).seconds_to_look(time.monotonic()) <= 0.5
    task = running(backend=backend, patience=Patience(hang_timeout=1000.0, timeout=500.0))
    now = time.monotonic()
    assert Step.TIME_OUT not in task.next_steps(now + 490)
    task.prompts.receive(0, InputRequest(1, "name? "), now)
    assert Step.TIME_OUT not in task.next_steps(now + 600)
    task.prompts.drop(0, now + 600)
    assert Step.TIME_OUT in task.next_steps(now + 1101)
    task.take(Located({0: WAITS, 1: Place(line=1)}), now)
    task.timed_out = task.doing
    task.stop(now + 1101)
    assert Step.TIME_OUT not in task.next_steps(now + 1200)
    failed = running(backend=backend, patience=Patience(timeout=500.0))
    failed.timed_out = task.timed_out
    for each, first in ((task, STOPPED), (failed, Failure("ValueError", "bad shard", (), 1))):
        for rank, failure in enumerate((first, STOPPED)):
            each.receive(rank, failure)
            each.receive(rank, Done("error", 0.1))
    assert isinstance(task.error(), CellTimeout)
    assert "by `--timeout 500`: rank 0 waits in barrier" in str(task.error())
    assert "ValueError: bad shard" in str(failed.error())


def test_a_stop_is_counted() -> None:
    """Other errors of a consumer are its own; without a bound Stop goes on until all have ended."""
    task = running(patience=Patience(control_timeout=None))
    with task.counting_stops():
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="drawn"), task.counting_stops():
        raise ValueError("drawn")
    assert task.stops == 1
    other = running()
    for each in (task, other):
        each.stops = 2
        each.stop(10.0)
    assert (task.give_up_at, task.wants_control(0)) == (float("inf"), False)
    assert (other.give_up_at, other.wants_control(0)) == (10.0 + CONTROL_TIMEOUT, True)


@pytest.mark.parametrize(("backend", "ended"), [("gloo", (0,)), ("cpu:gloo,cuda:nccl", ())])
def test_what_nothing_wakes_is_ended(backend: str, ended: tuple[int, ...]) -> None:
    """A rank that waits on, calm, in what was aborted three times; not one that has gone on."""
    task, now = running(ranks=3, backend=backend), time.monotonic()
    task.receive(2, Done("ok", 0.1))
    steps: list[Step] = []
    while len(steps) < 4:
        now += 1.0
        goes_on = replace(WAITS, moved=len(steps))
        task.take(Located({0: WAITS, 1: goes_on, 2: Place()}), now)
        for step in set(task.next_steps(now)) - {Step.LOCATE}:
            steps.append(step)
            assert task.unwakeable == (ended if len(steps) == 4 else ())
            task.abort(now)
    assert steps == [Step.ABORT] * 3 + [Step.END_UNWAKEABLE if ended else Step.ABORT]


def test_who_waits_where() -> None:
    """It is said once it may be in vain; machines and networks that are silent come first."""
    task = running(patience=Patience(hang_timeout=0.0))
    task.take(Located({0: WAITS, 1: Place(line=2)}), 1.0)
    assert task.doing == task.waits == "rank 0 waits in barrier, line 1 · rank 1 is in line 2"
    task.receive(1, Done("ok", 0.1))
    assert task.waits.endswith("· rank 1 finished")
    task = running()
    task.silent = Silent(("hosta",), 10.0)
    assert task.waits == "hosta does not respond and counts as lost after 10 s"
    task.silent = Silent(("hosta", "hostb"), 2.5)
    assert task.waits == "hosta and hostb do not respond and count as lost after 2.5 s"
    task.silent = Silent((), 2.5)
    task.take(Located({0: replace(WAITS, stalled=(("10.0.0.1", "10.0.0.2"),))}), 1.0)
    assert task.waits == "the network between 10.0.0.2 and here is stalled"
