"""At which step ranks stop together, and when they are interrupted at once."""

from __future__ import annotations

import asyncio

import pytest

from nbdist.agent.step_stops import STEP_TIMEOUT, collect_counts, find_stop_step
from nbdist.wire.control import MAX_STEPS_APART, StepCount

NOW, SLOW = StepCount(7, 0.1, 0.2), STEP_TIMEOUT + 1.0


@pytest.mark.parametrize(
    ("counts", "step"),
    [
        ([NOW], 8),
        ([NOW, StepCount(8, 0.1), StepCount(7, 0.1)], 9),
        ([NOW, StepCount(7 + MAX_STEPS_APART)], 8 + MAX_STEPS_APART),
        ([StepCount(7, SLOW - 0.5, SLOW)], 8),  # its next step is due
        ([], 0),
        ([NOW, None], 0),  # one did not answer
        ([NOW, StepCount()], 0),  # one does not train
        ([NOW, StepCount(7, SLOW, 0.1)], 0),  # one trains no more
        ([NOW, StepCount(7, 0.1, SLOW)], 0),  # one would take too long
        ([NOW, StepCount(8 + MAX_STEPS_APART)], 0),  # each trains a model of its own
    ],
)
def test_where_ranks_stop(counts: list[StepCount | None], step: int) -> None:
    """At the step after the largest count; 0 stands for at once."""
    assert find_stop_step(counts) == step


async def test_counts_are_not_waited_for_in_vain() -> None:
    """Once a rank does not train, the others need not answer."""

    async def answer(count: StepCount | None) -> StepCount | None:
        return count

    async def never() -> StepCount | None:
        await asyncio.Event().wait()
        return None

    assert await collect_counts({0: answer(NOW), 1: answer(NOW)}) == {0: NOW, 1: NOW}
    for count in (None, StepCount()):
        assert await collect_counts({0: never(), 1: answer(count)}) == {0: None, 1: count}
