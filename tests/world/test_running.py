"""Tests of `nbdist.world.running`: what is known of a task, and what is to be done next."""

from __future__ import annotations

import time

import pytest

from nbdist.config import Patience
from nbdist.errors import AgentLost, WorkerDied, WorldStuck
from nbdist.output.events import Died, Done, Text
from nbdist.wire.places import Place
from nbdist.wire.task import Source, Task
from nbdist.world.running import Crew, RunningTask, Step

WAITS = Place(line=1, operation="barrier", is_calm=True)
DEATH = Died(-9, time.time_ns())


def running(*, ranks: int = 2, backend: str = "gloo", heals: bool = True) -> RunningTask:
    """A task on all ranks of a world, with nothing shown so far."""
    crew = Crew(ranks, backend, "here", {rank: 100 + rank for rank in range(ranks)}, {}, heals)
    return RunningTask(Task("id", tuple(range(ranks)), Source("dist.barrier()")), Patience(), crew)


def test_it_is_over_when_all_ranks_are_done() -> None:
    """Each thing that they show is news once."""
    task = running()
    task.receive(0, Text("stdout", "hello\n"))
    task.receive(0, Done("ok", 0.1))
    assert task.unfinished == (1,)
    assert task.waits_after(0)
    assert [rank for rank, _ in task.take_news()] == [0, 0]
    assert task.take_news() == []
    task.receive(1, Done("ok", 0.1))
    assert (task.unfinished, task.error()) == ((), None)
    assert [*task.next_steps(time.monotonic())] == []


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
    task, now = running(backend=backend, heals=heals), time.monotonic()
    task.receive(1, DEATH)
    assert [*task.next_steps(now)] == step
    assert [*task.next_steps(now)] == []
    assert isinstance(task.error(), WorldStuck)  # rank 0 still runs
    task.receive(0, Done("ok", 0.1))
    task.fate = "It was replaced."
    error = task.error()
    assert isinstance(error, WorkerDied)
    assert str(error).endswith("It was replaced.")


def test_a_rank_that_finished_is_waited_for() -> None:
    """Two looks that show the same are enough to free who waits for it."""
    task, now = running(), time.monotonic()
    task.receive(1, Done("ok", 0.1))
    steps: list[Step] = []
    for _ in range(3):
        now += 1.5
        steps += task.next_steps(now)
        task.take_places({0: WAITS, 1: Place()}, now)
    assert steps == [Step.LOCATE, Step.LOCATE, Step.ABORT]
    task.abort(now)
    assert task.aborted == {0: WAITS}


def test_stop_leaves_the_freeing_to_the_agent() -> None:
    """What waits is only looked at from then on."""
    task, now = running(), time.monotonic()
    task.receive(1, Done("ok", 0.1))
    task.stop(now)
    steps: list[Step] = []
    for _ in range(3):
        now += 1.5
        steps += task.next_steps(now)
        task.take_places({0: WAITS, 1: Place()}, now)
    assert steps == [Step.LOCATE] * 3


def test_a_stop_is_counted() -> None:
    """Other errors of a consumer are its own."""
    task = running()
    with task.counting_stops():
        raise KeyboardInterrupt
    assert task.stops == 1
    with pytest.raises(ValueError, match="drawn"), task.counting_stops():
        raise ValueError("drawn")
    assert task.stops == 1


def test_the_agent_is_lost() -> None:
    """All ranks have ended with it, and that is the error."""
    task, lost = running(), AgentLost("here", -9)
    task.take_loss(lost)
    assert task.unfinished == ()
    assert task.error() is lost
