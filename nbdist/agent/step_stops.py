"""Stop during training: all ranks are interrupted at the beginning of the same optimizer step.

DDP and similar wrappers average only gradients.  If ranks were interrupted wherever they are, some
could have made a step more than others, and their replicas would differ from then on.  So after
Stop each rank that trains is held at the beginning of its next step, and reports how many steps it
has begun.  All ranks then go on to the step after the largest of these numbers, and raise
KeyboardInterrupt at its beginning.  Until then no rank is missing in a collective.  A rank that
does not get there in time is interrupted where it is.

Runs in each agent.  With ranks on several machines the head collects their counts and decides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from nbdist.wire.control import (
    MAX_STEPS_APART,
    HoldSteps,
    ReleaseSteps,
    StepCount,
    StopAtStep,
)

if TYPE_CHECKING:
    from nbdist.agent.interrupts import Interrupter
    from nbdist.agent.worker import Worker

K = TypeVar("K")

STEP_TIMEOUT = 2.0
"""Seconds after Stop in which ranks must reach the common step, or else they are interrupted.

A rank counts as training only if its next step is due within this time, or is overdue by less."""

STEP_ANSWER_TIMEOUT = 0.6  # seconds for a rank to answer how many steps it has begun
NODE_TIMEOUT = 1.0  # seconds for the head to get the counts of all machines

POLL_INTERVAL = 0.02  # seconds between checks whether ranks have left the task


def find_stop_step(counts: Iterable[StepCount | None]) -> int:
    """Return the step at whose beginning all ranks can stop, or 0 if there is none; pure.

    There is none if a rank did not answer, does not train, is more than MAX_STEPS_APART ahead of
    another rank, or will probably begin its next step too late.  Ranks whose task has ended without
    an error and without a step are ignored.
    """
    all_counts = [*counts]
    begun = [count.begun for count in all_counts if count is not None and count.begun]
    if not begun or not all(map(can_wait, all_counts)) or max(begun) - min(begun) > MAX_STEPS_APART:
        return 0
    return max(begun) + 1


def can_wait(count: StepCount | None) -> bool:
    """Return True if a rank with this count allows a common step of all ranks; pure.

    That is so if the rank's task has ended without an error, or if the rank will probably begin a
    step soon, judged by the time between its last two steps (`STEP_TIMEOUT`).  A rank that did not
    answer has the count None, for which the result is False.
    """
    if count is None or count.has_succeeded:
        return count is not None
    due_in = count.interval - count.since
    return count.begun > 0 and -STEP_TIMEOUT < due_in < STEP_TIMEOUT


async def collect_counts(
    requests: Mapping[K, Coroutine[Any, Any, StepCount | None]],
) -> dict[K, StepCount | None]:
    """Await `requests`, one for each rank, and return their results by the same keys.

    If a result shows that there can be no common step (`can_wait`), all requests that are not yet
    answered are cancelled, and their results are None.
    """
    tasks = {key: asyncio.ensure_future(each) for key, each in requests.items()}
    waiting = {*tasks.values()}
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not all(can_wait(each.result()) for each in done):
                break
    finally:
        for each in waiting:
            each.cancel()
    return {key: each.result() if each not in waiting else None for key, each in tasks.items()}


class StepStops:
    """Stops the tasks of this machine's ranks, at a common optimizer step or at once.

    `all_ranks` returns the workers of this machine; `spawn` runs a coroutine in the background.
    """

    def __init__(
        self,
        stopping: Interrupter,
        all_ranks: Callable[[], Iterable[Worker]],
        spawn: Callable[[Coroutine[Any, Any, object]], None],
    ) -> None:
        self._stopping = stopping
        self._all_ranks = all_ranks
        self._spawn = spawn
        self._pending: dict[Worker, str] = {}  # tasks that are to stop at a step, by rank
        self._spared: set[Worker] = set()  # pending ranks that must not be killed when interrupted

    def stop(self, ranks: Collection[Worker]) -> None:
        """Stop ranks at a common optimizer step.

        If there is no such step, or if Stop was pressed before in the same task, interrupt the
        ranks at once.
        """
        busy = {rank: rank.task.id for rank in ranks if rank.task.id}
        if not busy or self._was_stopped(busy):
            self.interrupt(ranks)
            return
        self._add_pending(busy)
        self._spawn(self._stop_at_common_step(busy))

    def interrupt(self, ranks: Iterable[Worker]) -> None:
        """Interrupt `ranks` now, at any place in their code."""
        ranks = [*ranks]
        for rank in ranks:
            self._pending.pop(rank, None)
            self._spared.discard(rank)
        for work in self._stopping.interrupt(ranks):
            self._spawn(work)

    def spare(self, ranks: Iterable[Worker]) -> None:
        """Kill none of `ranks`, even if they are stuck, unless Stop is pressed again.

        The ranks may be interrupted already, or be on their way to a common step.
        """
        ranks = [*ranks]
        self._spared |= self._pending.keys() & ranks
        self._stopping.spare(ranks)

    def stop_at(self, ranks: Iterable[Worker], step: int, seconds: float) -> None:
        """Let ranks go on that `hold` has held, and stop them at the beginning of step `step`.

        A rank that has not reached the step after `seconds` is interrupted where it is.
        """
        busy = {rank: rank.task.id for rank in ranks if rank.task.id}
        self._add_pending(busy)
        self._spawn(self._run_to_step(busy, step, time.monotonic() + seconds))

    async def hold(self, ranks: Iterable[Worker]) -> dict[int, StepCount | None]:
        """Hold ranks at the beginning of their next optimizer step; return their step counts.

        The result, by rank, also has the ranks of this machine that have already finished the same
        task.  A count is None if the rank did not answer, has died, waits for input or stands at a
        breakpoint, or if its task has failed.
        """
        ranks = [*ranks]
        busy = {rank: rank.task.id for rank in ranks if rank.task.id}
        tasks = {rank.task.id or rank.task.finished[0] for rank in ranks} - {""}
        counts = await collect_counts({each.rank: _hold(each, busy[each]) for each in busy})
        for rank in self._all_ranks():
            task_id, count = rank.task.finished
            if task_id in tasks:
                counts.setdefault(rank.rank, count)
        return counts | {rank.rank: None for rank in ranks if rank.state == "dead"}

    def _was_stopped(self, busy: Mapping[Worker, str]) -> bool:
        is_pending = any(self._pending.get(rank) == task_id for rank, task_id in busy.items())
        return is_pending or self._stopping.is_stopping(busy)

    async def _stop_at_common_step(self, busy: Mapping[Worker, str]) -> None:
        deadline = time.monotonic() + STEP_TIMEOUT
        counts = await self.hold(busy)
        if step := find_stop_step(counts.values()):
            await self._run_to_step(busy, step, deadline)
        else:
            self._interrupt_pending(busy)

    async def _run_to_step(self, busy: Mapping[Worker, str], step: int, deadline: float) -> None:
        """Let ranks go on that are held at a step, and stop them at the beginning of step `step`.

        `busy` has the task of each rank.  At the deadline, or as soon as a rank dies, ranks that
        have not reached the step are interrupted.
        """
        await _ask_all({rank: StopAtStep(task_id, step) for rank, task_id in busy.items()})
        while (remaining := self._remaining(busy)) and time.monotonic() < deadline:
            if any(rank.state == "dead" for rank in busy):  # other ranks may wait for it
                break
            await asyncio.sleep(POLL_INTERVAL)
        answers = await _ask_all({rank: ReleaseSteps(busy[rank]) for rank in remaining})
        have_stopped = {rank for rank, answer in answers.items() if answer and answer.has_stopped}
        self._interrupt_pending(busy, have_stopped)

    def _add_pending(self, busy: Mapping[Worker, str]) -> None:
        self._pending |= busy
        self._spared.difference_update(busy)

    def _interrupt_pending(
        self, busy: Mapping[Worker, str], have_stopped: Collection[Worker] = ()
    ) -> None:
        """Interrupt the ranks that still run the task which was to stop at a common step.

        Ranks in `have_stopped` get no SIGINT (`Interrupter.interrupt`).
        """
        remaining = self._remaining(busy)
        pending = {rank for rank, task_id in busy.items() if self._pending.get(rank) == task_id}
        spared = self._spared.intersection(remaining)
        for rank in pending:
            del self._pending[rank]
        self._spared -= pending
        for work in self._stopping.interrupt(remaining, have_stopped):
            self._spawn(work)
        self._stopping.spare(spared)

    def _remaining(self, busy: Mapping[Worker, str]) -> list[Worker]:
        """Return the ranks in `busy` that still run their task and were not interrupted yet."""
        return [
            rank
            for rank, task_id in busy.items()
            if rank.task.id == task_id == self._pending.get(rank) and rank.state == "busy"
        ]


async def _hold(rank: Worker, task_id: str) -> StepCount | None:
    if rank.input.waits_for_line or rank.is_debugged:  # a person may take long
        return None
    answer = await rank.ask(HoldSteps(task_id), STEP_ANSWER_TIMEOUT)
    return answer if isinstance(answer, StepCount) else None


async def _ask_all(
    requests: Mapping[Worker, StopAtStep | ReleaseSteps],
) -> dict[Worker, StepCount | None]:
    replies = (rank.ask(request, STEP_ANSWER_TIMEOUT) for rank, request in requests.items())
    answers: Iterable[Any] = await asyncio.gather(*replies)
    counts = (answer if isinstance(answer, StepCount) else None for answer in answers)
    return dict(zip(requests, counts, strict=True))
