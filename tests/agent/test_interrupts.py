"""Tests of `nbdist.agent.interrupts`: which ranks Stop kills, and how long Stop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FrameType

import pytest

from nbdist.agent.interrupts import (
    C_GRACE,
    IGNORES_GRACE,
    MAX_FUTILE_ABORTS,
    STORE_GRACE,
    InterruptedRank,
    Interrupter,
    has_missed_stop,
    is_stuck,
    may_wait_in_store,
)
from nbdist.output.events import IGNORES_STOP, Text
from nbdist.wire.control import ControlReply, ControlRequest, EndStoreWait
from nbdist.wire.places import RankPosition
from tests.agent.sources import Source
from tests.agent.test_worker import Watched
from tests.waiting import until

LONG = 60.0
IN_PYTHON = RankPosition(line=3)
IN_C = RankPosition(line=3, holds_gil=True)
WAITS = RankPosition(line=3, operation="all_reduce")


WAITED_FOR = [
    InterruptedRank(RankPosition(), LONG),
    InterruptedRank(RankPosition(), LONG, again=True),
    InterruptedRank(IN_PYTHON, LONG),
    InterruptedRank(RankPosition(line=3, is_cleaning_up=True), LONG, is_asleep=True),
    InterruptedRank(RankPosition(line=3, has_taken_sigint=True), LONG, is_asleep=True),
    InterruptedRank(IN_PYTHON, C_GRACE - 0.1, is_asleep=True),
    InterruptedRank(IN_C, C_GRACE - 0.1),
    InterruptedRank(WAITS, LONG),
    InterruptedRank(WAITS, LONG, aborts=MAX_FUTILE_ABORTS - 1, aborted_for=LONG),
    InterruptedRank(WAITS, LONG, aborts=MAX_FUTILE_ABORTS, aborted_for=IGNORES_GRACE - 0.1),
    InterruptedRank(IN_PYTHON, IGNORES_GRACE - 0.1, ignores=True),
    InterruptedRank(IN_PYTHON, IGNORES_GRACE - 0.1, again=True),
    InterruptedRank(IN_C, LONG, is_spared=True),
    InterruptedRank(IN_PYTHON, LONG, ignores=True, is_spared=True),
]
"""Ranks that get more time: they compute, clean up, wait, have caught Stop, or are spared."""

KILLED = [
    InterruptedRank(IN_C, C_GRACE),
    InterruptedRank(RankPosition(is_stopped=True, holds_gil=True), C_GRACE),
    InterruptedRank(IN_PYTHON, C_GRACE, is_asleep=True),
    InterruptedRank(RankPosition(file="train.py"), C_GRACE, is_asleep=True),
    InterruptedRank(IN_PYTHON, IGNORES_GRACE, ignores=True),
    InterruptedRank(IN_PYTHON, IGNORES_GRACE, again=True),
    InterruptedRank(RankPosition(line=3, is_cleaning_up=True), IGNORES_GRACE, again=True),
    InterruptedRank(
        RankPosition(line=3, has_taken_sigint=True), IGNORES_GRACE, is_asleep=True, again=True
    ),
    InterruptedRank(WAITS, LONG, aborts=MAX_FUTILE_ABORTS, aborted_for=IGNORES_GRACE),
]
"""Ranks in C code or asleep, ranks that ignore Stop or aborts, and ranks after a second Stop."""


@pytest.mark.parametrize("sight", [*WAITED_FOR, *KILLED], ids=repr)
def test_only_stuck_ranks_are_killed(sight: InterruptedRank) -> None:
    """A rank is stuck in each case of `KILLED`, and in no case of `WAITED_FOR`."""
    assert is_stuck(sight) == (sight in KILLED)


def test_a_rank_in_no_collective_may_wait_in_store() -> None:
    """A rank in no collective that has not handled SIGINT for a while may wait in a store."""
    assert may_wait_in_store(InterruptedRank(IN_PYTHON, STORE_GRACE))
    assert not may_wait_in_store(InterruptedRank(IN_PYTHON, STORE_GRACE - 0.1))
    places = (RankPosition(), IN_C, WAITS, RankPosition(line=3, has_taken_sigint=True),
              RankPosition(line=3, is_cleaning_up=True))  # fmt: skip
    assert not any(may_wait_in_store(InterruptedRank(place, LONG)) for place in places)


def test_only_a_sleeping_rank_that_answers_has_missed_stop() -> None:
    """A rank that cleans up, waits in a collective, or does not answer gets no second SIGINT."""
    asleep = InterruptedRank(IN_PYTHON, LONG, asleep_for=C_GRACE / 2)
    assert has_missed_stop(asleep)
    assert not has_missed_stop(replace(asleep, asleep_for=C_GRACE / 2 - 0.1))
    stopped, cleans_up = replace(IN_C, is_stopped=True), replace(IN_PYTHON, is_cleaning_up=True)
    for place in (RankPosition(), IN_C, stopped, cleans_up, WAITS):
        assert not has_missed_stop(replace(asleep, place=place))


@pytest.fixture
def runner(bench: Source) -> asyncio.Runner:
    """The runner whose event loop owns the fork server."""
    return bench.runner


@pytest.fixture
def watched(bench: Source, runner: asyncio.Runner) -> Iterator[Watched]:
    """A rank that is ready for tasks."""

    async def start() -> Watched:
        # A thread of the pool reads the memory of a rank that does not answer in time.
        asyncio.get_running_loop().set_default_executor(pool)
        watched = Watched(bench, 0)
        await watched.worker.start()
        return watched

    with ThreadPoolExecutor() as pool:
        watched = runner.run(start())
        yield watched
        runner.run(watched.worker.stop(0.0))


SLEEPS = "import time; time.sleep(600)"


async def abort_nothing(task_ids: object) -> bool:
    """Answer like ranks that have no collective to abort."""
    return True


@pytest.mark.world
async def test_only_one_loop_aborts_collectives(watched: Watched) -> None:
    """Stop, pressed again just after ranks have left their tasks, starts no second loop."""
    stopping = Interrupter(abort_nothing, lambda places: None)
    running = set[asyncio.Task[None]]()
    aborts: list[asyncio.Task[None]] = []
    for name in "abcd":
        watched.begin(SLEEPS, name)
        follow, *others = map(asyncio.ensure_future, stopping.interrupt([watched.worker]))
        running |= {follow, *others}
        assert len(others) == all(each.done() for each in aborts)
        aborts += others
        await follow
    await asyncio.gather(*running)
    assert not stopping.is_stopping([watched.worker])


@pytest.mark.world
async def test_stop_ends_though_its_rank_is_renumbered(watched: Watched) -> None:
    """A Stop ends with its task, also if the rank has got another number in the meantime."""
    stopping = Interrupter(abort_nothing, lambda places: None)
    watched.begin(SLEEPS)
    running = [*map(asyncio.ensure_future, stopping.interrupt([watched.worker]))]
    watched.worker.renumber(1, None)
    assert stopping.is_stopping([watched.worker])
    await asyncio.gather(*running)
    assert not stopping.is_stopping([watched.worker])


STUCK = """
import ctypes
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
print("begun", flush=True)
lock(mutex), lock(mutex)
"""
"""Waits for ever, in C code, for a mutex that the rank has locked itself."""


@pytest.mark.world
async def test_a_spared_rank_is_not_killed_by_an_earlier_stop(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If `spare` is called while a stuck rank is asked, only another Stop kills the rank."""
    stopping = Interrupter(abort_nothing, lambda places: None)
    watched.begin(STUCK)
    await until(lambda: any(isinstance(output, Text) for _, output in watched.shown))
    watch, abort = stopping.interrupt([watched.worker])
    frame: FrameType = watch.cr_frame  # type: ignore[attr-defined]
    real_ask, asked = watched.worker.ask, list[EndStoreWait]()  # the questions since `spare`

    async def ask(request: ControlRequest, timeout: float) -> ControlReply | None:
        """Ask the rank; spare it just before a question after which the agent would kill it."""
        if isinstance(request, EndStoreWait) and (asked or is_stuck(frame.f_locals["sight"])):
            if not asked:
                stopping.spare([watched.worker])
            asked.append(request)
        return await real_ask(request, timeout)

    monkeypatch.setattr(watched.worker, "ask", ask)
    running = [*map(asyncio.ensure_future, (watch, abort))]
    # A rank that was killed after the first question would have ended by the second.
    await until(lambda: running[0].done() or len(asked) > 1)
    assert stopping.is_stopping([watched.worker])
    assert not [*stopping.interrupt([watched.worker])]
    await asyncio.gather(*running)
    assert (await watched.dies()).why == IGNORES_STOP
