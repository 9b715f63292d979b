"""Tests of `nbdist.agent.step_stops`: at which step ranks stop together, or whether at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from nbdist.agent.interrupts import Interrupter
from nbdist.agent.step_stops import STEP_TIMEOUT, StepStops, collect_counts, find_stop_step
from nbdist.wire.control import MAX_STEPS_APART, StepCount
from tests.agent.sources import Source
from tests.agent.test_worker import Watched

NOW, SLOW = StepCount(7, 0.1, 0.2), STEP_TIMEOUT + 1.0
DONE = StepCount(has_succeeded=True)


@pytest.mark.parametrize(
    ("counts", "step"),
    [
        ([NOW], 8),
        ([NOW, StepCount(8, 0.1), StepCount(7, 0.1)], 9),
        ([NOW, StepCount(7 + MAX_STEPS_APART)], 8 + MAX_STEPS_APART),
        ([StepCount(7, SLOW - 0.5, SLOW)], 8),  # the next step is due
        ([NOW, StepCount(8, has_succeeded=True)], 9),
        ([NOW, DONE], 8),  # a rank that has ended without a step is not awaited
        ([DONE], 0),
        ([], 0),
        ([NOW, None], 0),  # a rank did not answer
        ([NOW, StepCount()], 0),  # a rank does not train
        ([NOW, StepCount(7, SLOW, 0.1)], 0),  # a rank has stopped training
        ([NOW, StepCount(7, 0.1, SLOW)], 0),  # a rank would take too long
        ([NOW, StepCount(8 + MAX_STEPS_APART)], 0),  # each rank trains a model of its own
    ],
)
def test_ranks_stop_after_the_largest_count(counts: list[StepCount | None], step: int) -> None:
    """Ranks stop at the step after the largest count; 0 means that ranks stop at once."""
    assert find_stop_step(counts) == step


async def test_counts_are_not_waited_for_in_vain() -> None:
    """Once a rank does not train, or cannot answer, no other answer is awaited."""

    async def answer(count: StepCount | None) -> StepCount | None:
        return count

    async def never() -> StepCount | None:
        await asyncio.Event().wait()
        return None

    for count in (NOW, DONE):
        assert await collect_counts({0: answer(NOW), 1: answer(count)}) == {0: NOW, 1: count}
    for count in (None, StepCount()):
        assert await collect_counts({0: never(), 1: answer(count)}) == {0: None, 1: count}


TRAINS = """
import torch
weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
optimizer = torch.optim.SGD([weight], lr=0.1)
"""

STEPS = (
    "while True: optimizer.step()",
    "for _ in range(3): optimizer.step()",
    "",
    "optimizer.step(); 1 / 0",
    "optimizer.step(); import os; os._exit(1)",
)
"""The code of each rank of a task, of which only the first does not end."""


@pytest.fixture
def runner(bench: Source) -> asyncio.Runner:
    """The runner whose event loop owns the fork server."""
    return bench.runner


@pytest.fixture
def ranks(bench: Source, runner: asyncio.Runner) -> Iterator[list[Watched]]:
    """A rank for each of `STEPS`, and one more that has run no task."""

    async def start() -> list[Watched]:
        ranks = [Watched(bench, rank) for rank in range(len(STEPS) + 1)]
        await asyncio.gather(*(each.worker.start() for each in ranks))
        return ranks

    async def stop() -> None:
        await asyncio.gather(*(each.worker.stop(0.0) for each in ranks))

    ranks = runner.run(start())
    yield ranks
    runner.run(stop())


@pytest.mark.world
async def test_ranks_that_have_ended_report_their_steps(ranks: list[Watched]) -> None:
    """The steps of ranks that have ended count, and the busy rank is asked all the same."""
    for each, steps in zip(ranks, STEPS, strict=False):
        each.begin(TRAINS + steps)
    await asyncio.gather(*(each.ends() for each in ranks[1 : len(STEPS)]))
    workers = [each.worker for each in ranks]

    async def abort_nothing(task_ids: object) -> bool:
        return True

    stopping = Interrupter(abort_nothing, lambda places: None)
    stops = StepStops(stopping, lambda: workers, lambda work: None)
    ended = {1: StepCount(3, has_succeeded=True), 2: DONE, 3: None, 4: None}
    busy = None
    while busy is None or not busy.begun:  # the busy rank may get no processor for a while
        counts = await stops.hold(workers)
        busy = counts.pop(0)
        assert counts == ended
    assert await stops.hold(workers[1:3]) == ended
