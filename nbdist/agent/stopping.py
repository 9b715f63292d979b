"""Stop: ranks get SIGINT and their collectives are aborted; a rank that is stuck is killed.

Runs in the agent; `StepStops` decides when a rank is interrupted.  The seconds of a rank are its
own time (`OwnTime`): a rank that is slow because the machine is busy does not count as stuck.
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

from nbdist.agent.inspect import SAMPLE_TIMEOUT, place_from_outside
from nbdist.output.events import IGNORES_STOP
from nbdist.system.processes import OwnTime, ignores, schedule
from nbdist.wire.control import EndStoreWait
from nbdist.wire.places import Place

if TYPE_CHECKING:
    from nbdist.agent.worker import Worker

LOCATE_EVERY = 0.1  # seconds between checks where interrupted ranks are
ANSWER_TIMEOUT = 0.5  # seconds for a rank to end a wait in a store
ABORT_EVERY = 0.4  # seconds between aborts of all collectives

STORE_GRACE = 0.2  # own seconds until a wait in a store of user code is ended

IGNORES_GRACE = 2.0
"""Own seconds until a rank is stuck that ignores SIGINT, or whose collective no abort ends.

Also for a rank that still runs its code when Stop was pressed a second time."""

C_GRACE = 2.5
"""Own seconds for C code to return to Python.

Nearly always C code needs less.  The notebook has control after 5 s, whatever happens."""

ABORTS = 3  # successful aborts on all ranks after which a rank that waits on is stuck
ASLEEP, WAKES = 0.05, 20
"""A thread sleeps if it has run for fewer seconds, and begun to run fewer times.

Code that only waits uses less than that within `C_GRACE`."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What is known about a rank that has been interrupted."""

    place: Place
    own: float  # the rank's own seconds since it was interrupted last
    ignores: bool = False  # the process ignores SIGINT
    again: bool = False  # Stop was pressed again
    is_asleep: bool = False  # the main thread has hardly run since
    aborts: int = 0  # how often the rank's present collective was aborted in vain
    aborted_for: float = 0.0  # own seconds since the first of these aborts
    is_spared: bool = False  # the notebook has asked not to kill the rank


def is_stuck(sight: Sight) -> bool:
    """Return True if the rank will provably not leave what it runs; pure.

    A rank is stuck if, for its grace, it was stopped by a signal or held the GIL in C code, waited
    in a collective that no abort ended, ignored SIGINT, or slept without reacting to SIGINT.  Any
    other rank in its code, such as one that cleans up after KeyboardInterrupt, has caught it or
    computes, is stuck only once Stop was pressed again.
    """
    place = sight.place
    if sight.is_spared or not place.is_in_code:
        return False
    if place.is_stopped or place.holds_gil:
        return sight.own >= C_GRACE
    if place.operation:
        return sight.aborts >= ABORTS and sight.aborted_for >= IGNORES_GRACE
    if sight.ignores or sight.again:
        return sight.own >= IGNORES_GRACE
    has_reacted = place.has_taken_sigint or place.is_cleaning_up
    return sight.own >= C_GRACE and sight.is_asleep and not has_reacted


def has_missed_it(sight: Sight) -> bool:
    """Return True if a rank still sleeps in Python code, as if Stop had not reached it; pure.

    Python prints and drops exceptions of finalizers and callbacks, KeyboardInterrupt too.
    """
    place = sight.place
    waits = place.is_in_code and sight.is_asleep and not (place.operation or place.is_cleaning_up)
    return waits and sight.own >= C_GRACE / 2


def may_wait_in_store(sight: Sight) -> bool:
    """Return True if a rank may wait in a store of user code; pure.

    Such a rank is in C code, so Python has not handled the SIGINT.
    """
    place = sight.place
    is_known = place.operation or place.holds_gil or place.is_stopped
    has_reacted = place.has_taken_sigint or place.is_cleaning_up
    return place.is_in_code and not (is_known or has_reacted) and sight.own >= STORE_GRACE


class _Stopped:
    """The state of a rank that has been interrupted in a task."""

    def __init__(self, rank: Worker, task_id: str) -> None:
        self.rank = rank
        self._task_id = task_id
        self._again = self.is_spared = self.is_reminded = False
        self._aborts = 0
        self._aborted_at = 0.0
        self._place = Place()
        self._is_asleep = False
        self._restart_clock()

    def interrupt_again(self) -> None:
        self._again, self.is_spared = True, False
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._own = OwnTime(self.rank.pid)
        self._before = schedule(self.rank.pid, self.rank.pid)

    @property
    def is_over(self) -> bool:
        """Whether the rank no longer runs the task, or has exited."""
        return self.rank.state != "busy" or self.rank.task_id != self._task_id

    @property
    def waits(self) -> Place | None:
        """The rank's place if it waits in a collective, else None."""
        return self._place if self._place.operation and not self.is_over else None

    @property
    def may_wait(self) -> bool:
        """Whether the rank does not answer and has hardly run since it was interrupted.

        Such a rank may wait in a collective on a very busy machine.  Or it sleeps in C code that
        holds its GIL, and other ranks wait for it.
        """
        return self._place.holds_gil and self._is_asleep and not self.is_over

    def see(self, place: Place) -> Sight:
        """Record where the rank is now, and return what is known about it."""
        before, self._place = self._place, place
        own = self._own.seconds()
        if (place.operation, place.counts) != (before.operation, before.counts):
            self._aborts = 0
        now = schedule(self.rank.pid, self.rank.pid)
        ran, wakes = now.ran - self._before.ran, now.wakes - self._before.wakes
        self._is_asleep = ran < ASLEEP and wakes < WAKES
        return Sight(
            place,
            own,
            ignores=ignores(self.rank.pid, signal.SIGINT),
            again=self._again,
            is_asleep=self._is_asleep,
            aborts=self._aborts,
            aborted_for=own - self._aborted_at,
            is_spared=self.is_spared,
        )

    def count_abort(self) -> None:
        self._aborts += 1
        if self._aborts == 1:
            self._aborted_at = self._own.seconds()


class Stopping:
    """Interrupts ranks, and follows each until it has left its task or is killed.

    `abort_all` aborts the collectives of all ranks, and returns whether all have answered.
    `report` is called before each abort, with the places of the ranks that are known to wait in a
    collective.
    """

    def __init__(
        self,
        abort_all: Callable[[], Awaitable[bool]],
        report: Callable[[Mapping[int, Place]], None],
    ) -> None:
        self._abort_all = abort_all
        self._report = report
        # By worker, because a rank gets another number when the world is scaled.
        self._stopped: dict[Worker, _Stopped] = {}
        self._is_aborting = False  # whether `_abort` runs, or will run soon

    def is_stopping(self, ranks: Iterable[Worker]) -> bool:
        """Return True if any of these ranks has been interrupted in the task that it still runs."""
        found = map(self._stopped.get, ranks)
        return any(stopped and not stopped.is_over for stopped in found)

    def begin(
        self, ranks: Iterable[Worker], have_stopped: Collection[Worker] = ()
    ) -> Iterator[Coroutine[Any, Any, None]]:
        """Send SIGINT to these ranks; yield coroutines that the caller must run concurrently.

        The caller must exhaust the generator, because it sends the signals while it is iterated.
        Ranks that `have_stopped` get no SIGINT: they have raised KeyboardInterrupt at their step.
        """
        for rank in ranks:
            if rank in have_stopped:
                rank.refuse_input()
            else:
                rank.interrupt()
            before = self._stopped.get(rank)
            if before is not None and not before.is_over:
                before.interrupt_again()
            elif rank.task_id:
                stopped = self._stopped[rank] = _Stopped(rank, rank.task_id)
                yield self._follow(stopped)
        # After an earlier Stop `_abort` may still sleep; then it also serves these ranks.
        if self._stopped and not self._is_aborting:
            self._is_aborting = True
            yield self._abort()

    def spare(self, ranks: Iterable[int]) -> None:
        """Do not kill these ranks unless they are interrupted again."""
        spared = {*ranks}
        for rank, stopped in self._stopped.items():
            stopped.is_spared |= rank.rank in spared

    async def _follow(self, stopped: _Stopped) -> None:
        """Wait until the rank has left its task; kill it if it is stuck.

        A rank that seems not to have noticed its SIGINT gets one more.
        """
        rank = stopped.rank
        while not stopped.is_over:
            await asyncio.sleep(LOCATE_EVERY)
            place = await _place_of(rank)
            if stopped.is_over:
                break
            sight = stopped.see(place)
            if may_wait_in_store(sight):
                await rank.ask(EndStoreWait(), ANSWER_TIMEOUT)
            if stopped.is_over:
                break
            if is_stuck(sight):
                rank.kill(IGNORES_STOP)
            elif not stopped.is_reminded and has_missed_it(sight):
                stopped.is_reminded = True
                rank.interrupt()
        if self._stopped.get(rank) is stopped:
            del self._stopped[rank]

    async def _abort(self) -> None:
        """Abort all collectives again and again while an interrupted rank waits in one, or may."""
        try:
            while self._stopped:
                await asyncio.sleep(LOCATE_EVERY)
                found = {stopped: stopped.waits for stopped in self._stopped.values()}
                waits = {stopped: place for stopped, place in found.items() if place is not None}
                if not (waits or any(stopped.may_wait for stopped in found)):
                    continue
                self._report({stopped.rank.rank: place for stopped, place in waits.items()})
                if await self._abort_all():
                    for stopped in waits:
                        stopped.count_abort()
                await asyncio.sleep(ABORT_EVERY)
        finally:
            self._is_aborting = False


async def _place_of(rank: Worker) -> Place:
    """Return where the rank is; read that from its memory if it does not answer."""
    place = await rank.locate()
    if not place.holds_gil or place.is_stopped:
        return place
    found, frames = await place_from_outside(rank, SAMPLE_TIMEOUT)
    # Frames without the rank's code show that it has left it, so nothing is stuck.  No frames show
    # nothing: then the rank counts as holding the GIL, and its own time decides.
    is_outside = frames and not (found.line or found.file)
    return replace(found, holds_gil=False) if is_outside else found
