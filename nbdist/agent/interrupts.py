"""Interrupts ranks, as after Stop or a timeout: by SIGINT, by aborts of collectives, or by a kill.

Only a rank that is stuck is killed.  Runs in the agent, where `StepStops` decides when a rank is
interrupted.  *Own seconds* of a rank do not include seconds in which the rank waited for a
processor (`OwnTime`), so that a slow rank on a busy machine does not count as stuck.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nbdist.agent.inspect import SAMPLE_TIMEOUT, locate, place_from_outside
from nbdist.output.events import IGNORES_STOP
from nbdist.system.processes import OwnTime, Schedule, ignores_signal, schedule
from nbdist.wire.control import EndStoreWait
from nbdist.wire.places import RankPosition

if TYPE_CHECKING:
    from nbdist.agent.worker import Worker

LOCATE_EVERY = 0.1  # seconds between checks where interrupted ranks are
STORE_RELEASE_TIMEOUT = 0.5  # seconds for a rank to answer that it has ended a wait in a store
ABORT_EVERY = 0.4  # seconds for ranks to leave their collectives after an abort

# Seconds after Stop, without waits for a processor, until a wait in a store that user code made is
# ended.
STORE_GRACE = 0.2

IGNORES_GRACE = 2.0
"""Own seconds after which a rank counts as stuck in one of three cases.

The rank ignores SIGINT, or no abort ends its wait in a collective, or it still runs its code after
Stop was pressed a second time."""

C_GRACE = 2.5
"""Own seconds after Stop until a rank counts as stuck if C code holds its GIL, or if it sleeps.

Nearly all C code returns to Python sooner.  The time is short enough for the notebook to get back
control within 5 s after Stop."""

MAX_FUTILE_ABORTS = 3  # aborts (answered by all ranks) after which a rank that waits may be stuck
ASLEEP, WAKES = 0.05, 20
"""A thread counts as asleep if it has run for fewer seconds, and has been woken fewer times.

Code that only waits stays below both limits during `C_GRACE`."""


@dataclass(frozen=True, slots=True)
class InterruptedRank:
    """What the agent knows about an interrupted rank, to decide whether the rank is stuck."""

    place: RankPosition
    own_seconds: float  # seconds since the last Stop, without waits for a processor
    ignores: bool = False  # the process ignores SIGINT
    again: bool = False  # Stop was pressed again
    is_asleep: bool = False  # the main thread has hardly run since the interrupt
    asleep_for: float = 0.0  # how many `own_seconds`, up to now, the main thread has hardly run
    aborts: int = 0  # how often the rank's present collective was aborted in vain
    aborted_for: float = 0.0  # the `own_seconds` since the first abort in vain, or a later Stop
    is_spared: bool = False  # the notebook has asked not to kill the rank


def is_stuck(sight: InterruptedRank) -> bool:
    """Return True if the rank seems unable to leave its code, so that only a kill helps; pure.

    A rank that has left its code, or that the notebook has asked not to kill, is not stuck.  For
    any other rank, the first case that applies decides.  Seconds count from the last Stop, without
    the seconds in which the rank waited for a processor (own seconds):

    - A signal has stopped the process, or C code holds the GIL: stuck after `C_GRACE` seconds.
    - The rank waits in a collective: stuck once `MAX_FUTILE_ABORTS` aborts have not ended the wait,
      and `IGNORES_GRACE` seconds have passed since the first of these aborts, or since the last
      Stop if it came later.
    - The process ignores SIGINT, or Stop was pressed again: stuck after `IGNORES_GRACE` seconds.
    - The main thread sleeps and has not reacted to SIGINT: stuck after `C_GRACE` seconds.
    - Any other case, as when the rank computes or cleans up after KeyboardInterrupt: not stuck.
    """
    place = sight.place
    if sight.is_spared or not place.is_in_code:
        return False
    if place.is_stopped or place.holds_gil:
        return sight.own_seconds >= C_GRACE
    if place.operation:
        return sight.aborts >= MAX_FUTILE_ABORTS and sight.aborted_for >= IGNORES_GRACE
    if sight.ignores or sight.again:
        return sight.own_seconds >= IGNORES_GRACE
    has_reacted = place.has_taken_sigint or place.is_cleaning_up
    return sight.own_seconds >= C_GRACE and sight.is_asleep and not has_reacted


def has_missed_stop(sight: InterruptedRank) -> bool:
    """Return True if a rank still sleeps in its code, as if it had got no SIGINT; pure.

    Python may have dropped the KeyboardInterrupt, as it drops every exception of a finalizer or
    callback.  Returns False for a rank that waits in a collective, because aborts end such a wait,
    and for a rank that does not answer, because it may be cleaning up.
    """
    place = sight.place
    is_unknown = place.holds_gil or place.is_stopped
    waits = place.is_in_code and not (place.operation or place.is_cleaning_up or is_unknown)
    return waits and sight.asleep_for >= C_GRACE / 2


def may_wait_in_store(sight: InterruptedRank) -> bool:
    """Return True if a rank may wait in a torch store that user code has made; pure.

    Such a wait is C code without a collective, during which Python does not handle SIGINT.
    """
    place = sight.place
    is_known = place.operation or place.holds_gil or place.is_stopped
    has_reacted = place.has_taken_sigint or place.is_cleaning_up
    return place.is_in_code and not (is_known or has_reacted) and sight.own_seconds >= STORE_GRACE


def _has_hardly_run(before: Schedule, now: Schedule) -> bool:
    return now.ran - before.ran < ASLEEP and now.wakes - before.wakes < WAKES


class _Stopped:
    """A rank that was interrupted in a task, and what has been seen of it since then."""

    def __init__(self, rank: Worker, task_id: str) -> None:
        self.rank = rank
        self.task_id = task_id
        self._again = self.is_spared = self._is_reminded = False
        self._drops = 0  # how many dropped KeyboardInterrupts the rank has reported so far
        self._aborts = 0
        self._place = RankPosition()
        self._is_asleep = False
        self._restart_clock()

    def interrupt_again(self) -> None:
        self._again, self.is_spared = True, False
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._own_time = OwnTime(self.rank.pid)
        self._aborted_at = 0.0
        self._schedule_before = self._asleep_schedule = schedule(self.rank.pid, self.rank.pid)
        self._asleep_since = 0.0  # in seconds of `_own_time`; since then the thread has hardly run

    @property
    def is_over(self) -> bool:
        """Whether the rank no longer runs the task, or has exited."""
        return self.rank.state != "busy" or self.rank.task.id != self.task_id

    @property
    def waiting_place(self) -> RankPosition | None:
        """Where the rank waits in a collective; None if it does not wait in one."""
        return self._place if self._place.operation and not self.is_over else None

    @property
    def may_be_waiting(self) -> bool:
        """Whether the rank does not answer, and has hardly run since it was interrupted.

        On a very busy machine such a rank may wait in a collective.  It may also sleep in C code
        that holds the GIL, while other ranks wait for it in a collective.
        """
        return self._place.holds_gil and self._is_asleep and not self.is_over

    def record_place(self, place: RankPosition) -> InterruptedRank:
        """Record where in its code the rank is now, and return the state of the rank."""
        before, self._place = self._place, place
        seconds = self._own_time.seconds()
        if (place.operation, place.counts) != (before.operation, before.counts):
            self._aborts = 0
        now = schedule(self.rank.pid, self.rank.pid)
        self._is_asleep = _has_hardly_run(self._schedule_before, now)
        if not _has_hardly_run(self._asleep_schedule, now):
            self._asleep_schedule, self._asleep_since = now, seconds
        return InterruptedRank(
            place,
            seconds,
            ignores=ignores_signal(self.rank.pid, signal.SIGINT),
            again=self._again,
            is_asleep=self._is_asleep,
            asleep_for=seconds - self._asleep_since,
            aborts=self._aborts,
            aborted_for=seconds - self._aborted_at,
            is_spared=self.is_spared,
        )

    def must_remind(self, sight: InterruptedRank) -> bool:
        """Return True if the caller must send the rank another SIGINT.

        A rank gets another SIGINT each time the rank reports a further KeyboardInterrupt that
        Python has dropped.  A rank that reports none, but seems to have missed Stop
        (`has_missed_stop`), gets another SIGINT only once.
        """
        place = sight.place
        is_running = place.is_in_code and not place.is_cleaning_up
        has_dropped = is_running and place.dropped_interrupts > self._drops
        has_missed = not (has_dropped or self._is_reminded) and has_missed_stop(sight)
        self._drops = max(self._drops, place.dropped_interrupts)
        self._is_reminded |= has_missed
        return has_dropped or has_missed

    def count_abort(self) -> None:
        self._aborts += 1
        if self._aborts == 1:
            self._aborted_at = self._own_time.seconds()


class Interrupter:
    """Interrupts ranks, and watches each rank until the rank has left its task or has exited.

    `abort` is called with the ids of the interrupted tasks.  It must abort the collectives of all
    ranks but those that run other tasks, and return whether all ranks have answered.  Before each
    abort, `report` is called with the place of each rank that is known to wait in a collective.
    """

    def __init__(
        self,
        abort: Callable[[Collection[str]], Awaitable[bool]],
        report: Callable[[Mapping[int, RankPosition]], None],
    ) -> None:
        self._abort = abort
        self._report = report
        # The keys are workers, because a worker may get another rank when the world is scaled.
        self._stopped: dict[Worker, _Stopped] = {}
        self._is_aborting = False  # whether `_abort_repeatedly` runs, or will run soon

    def is_stopping(self, ranks: Iterable[Worker]) -> bool:
        """Return True if any rank has been interrupted in the task that it is still running."""
        interrupted = map(self._stopped.get, ranks)
        return any(stopped and not stopped.is_over for stopped in interrupted)

    def interrupt(
        self, ranks: Iterable[Worker], have_stopped: Collection[Worker] = ()
    ) -> Iterator[Coroutine[Any, Any, None]]:
        """Send SIGINT to `ranks`; yield coroutines that the caller must run concurrently.

        The coroutines abort collectives in which an interrupted rank waits, and kill a rank that is
        stuck.  The caller must exhaust the generator, because the signals are sent during the
        iteration.  Ranks in `have_stopped` get no SIGINT, because they have already raised
        KeyboardInterrupt at the common step.  But their tasks, too, get no more input.
        """
        for rank in ranks:
            if rank in have_stopped:
                rank.input.refuse()
            else:
                rank.interrupt()
            earlier = self._stopped.get(rank)
            if earlier is not None and not earlier.is_over:
                earlier.interrupt_again()
            elif rank.task.id:
                stopped = self._stopped[rank] = _Stopped(rank, rank.task.id)
                yield self._watch_rank(stopped)
        # If `_abort_repeatedly` still runs because of an earlier Stop, it aborts the collectives of
        # these ranks, too.
        if self._stopped and not self._is_aborting:
            self._is_aborting = True
            yield self._abort_repeatedly()

    def spare(self, ranks: Iterable[Worker]) -> None:
        """Kill none of `ranks`, even if they are stuck, unless Stop is pressed again.

        Ignores ranks that are not interrupted at present.
        """
        for rank in ranks:
            if rank in self._stopped:
                self._stopped[rank].is_spared = True

    async def _watch_rank(self, stopped: _Stopped) -> None:
        """Wait until an interrupted rank has left its task, and kill the rank if it is stuck.

        A rank that seems not to have noticed SIGINT gets another one.
        """
        rank = stopped.rank
        while not stopped.is_over:
            await asyncio.sleep(LOCATE_EVERY)
            place = await _place_of(rank)
            if stopped.is_over:
                break
            sight = stopped.record_place(place)
            if may_wait_in_store(sight):
                await rank.ask(EndStoreWait(), STORE_RELEASE_TIMEOUT)
            if stopped.is_over:
                break
            if is_stuck(sight) and not stopped.is_spared:  # `spare` may have been called meanwhile
                rank.kill(IGNORES_STOP)
            elif stopped.must_remind(sight):
                rank.interrupt()
        if self._stopped.get(rank) is stopped:
            del self._stopped[rank]

    async def _abort_repeatedly(self) -> None:
        """Abort collectives repeatedly while an interrupted rank may wait in a collective."""
        try:
            while self._stopped:
                await asyncio.sleep(LOCATE_EVERY)
                places = {stopped: stopped.waiting_place for stopped in self._stopped.values()}
                waits = {stopped: place for stopped, place in places.items() if place is not None}
                if not (waits or any(stopped.may_be_waiting for stopped in places)):
                    continue
                self._report({stopped.rank.rank: place for stopped, place in waits.items()})
                if await self._abort({stopped.task_id for stopped in self._stopped.values()}):
                    for stopped in waits:
                        stopped.count_abort()
                await asyncio.sleep(ABORT_EVERY)
        finally:
            self._is_aborting = False


async def _place_of(rank: Worker) -> RankPosition:
    """Return where in its code the rank is; read its memory if the rank does not answer."""
    place = await locate(rank)
    if not place.holds_gil or place.is_stopped:
        return place
    place_read, frames = await place_from_outside(rank, SAMPLE_TIMEOUT)
    # If there are frames but none of the user's code, the rank has left that code and is not stuck.
    # Without frames nothing is known, and C code counts as holding the GIL.
    is_outside = frames and not (place_read.line or place_read.file)
    return replace(place_read, holds_gil=False) if is_outside else place_read
