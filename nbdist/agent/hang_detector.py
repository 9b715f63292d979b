"""Finds out whether ranks that wait in collectives can ever go on.

`nbdist.agent.supervisor` uses this module in the process that serves the notebook.  This module
does no I/O.

There are two kinds of deadlock.  In the first, some ranks have finished the task or do not run it,
all others wait in collectives, and no data moves between them.  In the second, all ranks wait and
no data moves, mostly because their collectives do not match.  While an unfinished rank computes,
there is no deadlock, because that rank may still join a collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter

from nbdist.wire.places import LOCATED_TIMEOUT, RankPosition

FIRST_LOCATE_DELAY = LOCATE_INTERVAL = 1.0  # usual seconds before a request for ranks' places
SOON, FAST_SECONDS = 0.1, 2.0  # seconds between fast requests, and for how long they stay fast
UNCHANGED = 3.0  # seconds at one place until a rank counts as stuck, even if gloo's threads run
ALL_UNCHANGED = 1.0  # seconds without a change until all ranks count as stuck, if all of them wait

UNWAKEABLE_ABORTS = 3
"""A rank that still waits in a collective after this many aborts counts as impossible to wake.

Gloo can lose an abort.  If the other end has closed a connection, and gloo's own thread has not
noticed that yet, Pair::signalException skips the messages that could not be written (torch 2.13).
"""


class HangDetector:
    """Decides whether the ranks that have not finished a task hang, by their last two places.

    A rank's place (`RankPosition`) is its line of code, the collective in which it waits, and facts
    that show whether the collective makes progress.  The caller requests the places from the ranks;
    the detector says when the next request is due.  The first request is due `FIRST_LOCATE_DELAY`
    or `hang_timeout` seconds after `started`, whichever is less.  Times are monotonic seconds.
    """

    def __init__(self, started: float, hang_timeout: float) -> None:
        self.places: dict[int, RankPosition] = {}
        self._before: dict[int, RankPosition] = {}
        self._since: dict[int, float] = {}
        self._polls = 0
        self._in_flight = 0
        self._was_soon = False
        self._aborts: dict[int, tuple[RankPosition, int]] = {}
        self._next = started + min(hang_timeout, FIRST_LOCATE_DELAY)
        self._fast_since: float | None = None

    def poll_fast(self, now: float) -> None:
        """Make requests for places due every `SOON` seconds for the next `FAST_SECONDS`.

        Only the first call has an effect, so a task has only one period of fast requests.
        """
        if self._fast_since is None:
            self._fast_since = now
            self._next = min(self._next, now + SOON)

    def restart(self) -> None:
        """Begin again to measure for how long the ranks' places have not changed.

        The caller does this when a rank has finished, because other ranks may then go on.
        """
        self._polls = 0
        self._since.clear()

    def seconds_to_poll(self, now: float) -> float:
        """Return the seconds until the next request for places is due."""
        return max(0.0, self._next - now)

    def record_request(self, now: float) -> None:
        """Record that places were requested; the next request is due after `LOCATED_TIMEOUT`."""
        self._next = now + LOCATED_TIMEOUT

    def record_places(
        self, places: Mapping[int, RankPosition], now: float, in_flight: int = 0
    ) -> None:
        """Store the places of the unfinished ranks, and choose when the next request is due.

        `in_flight` is the number of TCP packets that gloo has sent, on any rank of the world, and
        that the receiver has not acknowledged.
        """
        self._before, self.places = self.places, dict(places)
        self._in_flight = in_flight
        self._polls += 1
        for rank, place in places.items():
            if rank not in self._since or not _is_same(place, self._before.get(rank)):
                self._since[rank] = now
        is_fast = self._fast_since is not None and now - self._fast_since < FAST_SECONDS
        # If all ranks wait, and a place has changed a moment ago, request the places again soon.
        # If they are then the same, this can already show that the ranks are deadlocked.
        all_wait = bool(places) and all(place.operation for place in places.values())
        is_new = all_wait and now - max(self._since.values()) < FAST_SECONDS
        self._was_soon = is_fast or (is_new and not self._was_soon)
        self._next = now + (SOON if self._was_soon else LOCATE_INTERVAL)

    def is_deadlocked(
        self, unfinished: Iterable[int], now: float, unchanged: float = UNCHANGED
    ) -> bool:
        """Return True if all `unfinished` ranks wait in collectives in which no data moves.

        A rank's last two places must be the same, also in the number of collectives and of bytes
        moved.  Besides, gloo's threads must have been idle in one of these places, or the place
        must not have changed for `unchanged` seconds.  The result is False while TCP packets of
        gloo are in flight.
        """
        ranks = tuple(unfinished)
        are_idle = self._polls >= 2 and all(self._is_idle(rank, now, unchanged) for rank in ranks)
        # A packet in flight may let a rank go on, even after minutes: TCP sends a lost packet again
        # and again.  If TCP gives up, gloo raises an error in the rank.
        return are_idle and not self._in_flight

    def is_dead_end(
        self, ranks: Iterable[int], now: float, *, is_known: bool, runs_ahead: bool = False
    ) -> bool:
        """Return True if all ranks of the world wait in collectives that can never complete.

        `ranks` are all ranks of the world.  If `is_known`, the caller knows that the ranks have
        called collectives that do not match.  `runs_ahead` is True with nccl.  The result is True
        only if no data moves in the collectives (`is_deadlocked`), and if these conditions are met:

        - If `is_known` is False, the places must have stayed the same for `ALL_UNCHANGED` seconds,
          and no rank may have a thread or GPU that could end the rank's wait.
        - With nccl `is_known` must be True, and the places must have stayed the same for
          `ALL_UNCHANGED` seconds, because places do not show what the threads of nccl do.
        """
        ranks = tuple(ranks)
        # With nccl a place never says that threads are idle (`is_calm`), so only the time without a
        # change can show that no data moves.
        unchanged = ALL_UNCHANGED if is_known and runs_ahead else math.inf
        if not self.is_deadlocked(ranks, now, unchanged):
            return False
        has_help = any(self.places[rank].has_help for rank in ranks)
        since = max(self._since[rank] for rank in ranks)
        return is_known or (not has_help and now - since >= ALL_UNCHANGED)

    def _is_idle(self, rank: int, now: float, unchanged: float) -> bool:
        place, before = self.places.get(rank), self._before.get(rank)
        if place is None or not place.operation or not _is_same(place, before):
            return False
        assert before is not None
        # One of the last two places with idle gloo threads (`is_calm`) is enough, because gloo's
        # threads wake up at times without a reason.
        is_calm = place.is_calm or before.is_calm
        return is_calm or now - self._since[rank] >= unchanged

    def unwakeable_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return those of `ranks` that are at the same place after `UNWAKEABLE_ABORTS` aborts.

        A rank in which a thread of gloo is running is left out, because the thread may still wake
        the rank.
        """

        def is_one(rank: int) -> bool:
            place, (before, times) = self.places.get(rank), self._aborts.get(rank, (None, 0))
            return bool(
                times >= UNWAKEABLE_ABORTS and place and place.is_calm and _is_same(place, before)
            )

        return tuple(filter(is_one, ranks))

    def record_abort(self, now: float) -> None:
        """Record that collectives are being aborted; the next request for places is due soon.

        Counts the abort for each rank whose place is known.  The count of a rank begins again at 1
        when the rank's place has changed since the last abort.
        """
        before, self._aborts = self._aborts, {}
        for rank, place in self.places.items():
            aborted_place, times = before.get(rank, (place, 0))
            self._aborts[rank] = (place, times + 1 if _is_same(place, aborted_place) else 1)
        self.places, self._before = {}, {}
        self._next = now + 5 * SOON


def _is_same(place: RankPosition, before: RankPosition | None) -> bool:
    facts = attrgetter("operation", "line", "counts", "moved")
    return before is not None and facts(place) == facts(before)
