"""What is to be done about a task while its ranks run it.

No I/O: `Workers` feeds it with what comes up, and the loop of `nbdist.world.following` asks it
for the next steps, and takes them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum

from nbdist.errors import AgentLost
from nbdist.output.events import Died, Display, Done, Failure, InputRequest, Output, Update
from nbdist.wire.views import Place
from nbdist.world.hangs import UNCHANGED, differing, in_one_line, never_meet, why_aborted, why_died
from nbdist.world.sent import News, SentTask

GPU_UNCHANGED = 1.5
"""Seconds without a change after which ranks are taken to wait on their GPUs for one that has
failed; what a GPU does cannot be seen, and nccl2 looks once a second what has ended."""


class Step(Enum):
    """What is to be done about a task that runs."""

    LOCATE = "ask all ranks where they are"
    ABORT = "abort collectives that can never end"
    ABORT_FOR_DEAD = "abort what may wait for a dead rank"
    TIME_OUT = "stop it, as it takes longer than it may"
    END_SURVIVORS = "end the ranks that live, as the policy for deaths says"
    END_UNWAKEABLE = "end ranks that wait in what has been aborted, and that nothing wakes"


class RunningTask(SentTask):
    """A task as `SentTask` knows it, and the next steps, until all of its ranks have ended it."""

    def __repr__(self) -> str:
        return f"<RunningTask {self.task.id[:8]} unfinished {self.unfinished}>"

    # --- what is to be done ---------------------------------------------------------------

    # Ranks that wait in collectives are located again and again.  They wait in vain where the
    # others have finished, or where all wait and do not meet: then collectives are aborted, on
    # all ranks.  A death needs no proof: the survivors are released from it at once, or ended.

    def next_steps(self, now: float) -> Iterator[Step]:
        """Yield what is to be done now, while it runs."""
        unfinished = self.unfinished
        if not unfinished:
            return
        if self._seconds_left(now) <= 0:
            yield Step.TIME_OUT
        # Survivors may wait for one another without a connection to the dead.
        if self.died and not self._has_met_death:
            self._has_met_death = True
            if not self.crew.heals:
                yield Step.END_SURVIVORS
            elif self.crew.has_group:
                yield Step.ABORT_FOR_DEAD
        # Whoever waits for a rank that somebody debugs does not wait in vain.
        if not self.crew.has_group or self.prompts.ranks:
            return
        # Ranks that do not run the task will not join either.
        if len(unfinished) < self.crew.size:
            self._watch.hurry(now)
        # Stop aborts collectives too, which their agent sees to.
        aborts = self.patience.aborts and not self.is_stopping
        if aborts and self._can_never_go_on(unfinished, now):
            yield Step.END_UNWAKEABLE if self.unwakeable else Step.ABORT
        elif self._watch.wait(now) == 0:
            self._watch.asked(now)
            yield Step.LOCATE

    @property
    def unwakeable(self) -> tuple[int, ...]:
        """The ranks that wait in what has been aborted, and that nothing wakes."""
        # With nccl the rank's own agent sees to that.
        return () if self.crew.runs_ahead else self._watch.aborted_in_vain(self.unfinished)

    def seconds_to_look(self, now: float) -> float:
        """Say how long there is nothing to ask the ranks for, and nothing to do about them."""
        return max(0.0, min(self._watch.wait(now), self._seconds_left(now)))

    def _seconds_left(self, now: float) -> float:
        """Say how long it may still run by itself."""
        if self.patience.timeout is None or self.is_stopping:
            return float("inf")
        # What somebody types takes as long as it takes.
        return self._started + self.patience.timeout + self.prompts.seconds(now) - now

    def _can_never_go_on(self, unfinished: tuple[int, ...], now: float) -> bool:
        if len(unfinished) == self.crew.size:
            # With gloo ranks whose sizes differ meet, and get what is wrong.
            runs_ahead = self.crew.runs_ahead
            is_known = never_meet(self.places) or (runs_ahead and bool(differing(self.places)))
            return self._watch.is_dead_end(
                unfinished, now, is_known=is_known, runs_ahead=runs_ahead
            )
        has_failed = bool(self.transcript.errors)
        # The sooner the better where the task has failed anyway.
        unchanged = GPU_UNCHANGED if has_failed and self.crew.runs_ahead else UNCHANGED
        if not self._watch.never(unfinished, now, unchanged):
            return False
        finished = (place for rank, place in self.places.items() if rank not in unfinished)
        # Their GPUs may still do what is waited for; or wait too, where a rank has failed.
        return has_failed or not any(place.operation for place in finished)

    # --- what happens ---------------------------------------------------------------------

    @contextmanager
    def counting_stops(self) -> Iterator[None]:
        """Count a Stop (KeyboardInterrupt) that comes inside; the loop acts on it.

        For what a consumer does with each news: `Session.follow` itself counts the others.
        """
        try:
            yield
        except KeyboardInterrupt:
            self.stops += 1

    @contextmanager
    def raising_stops(self) -> Iterator[None]:
        """Have one that comes inside end what is done there; inside `counting_stops`."""
        self.raises_stops = True
        try:
            yield
        finally:
            self.raises_stops = False

    def stop(self, now: float) -> None:
        """Note that its ranks are being interrupted, and when control is wanted back."""
        wait = self.patience.control_timeout
        self.is_stopping = True
        self.was_stalled = any(place.stalled for place in self.places.values())
        self.interrupts, self.spared = self.interrupts + 1, frozenset()
        for rank in self.prompts.ranks:  # nobody is to answer them now
            self.prompts.drop(rank, now)
        self.give_up_at = float("inf") if wait is None else now + wait
        self._watch.hurry(now)

    @property
    def ends_after_stop(self) -> bool:
        """Say whether somebody who has pressed Stop waits for what is done at its end."""
        return self.raises_stops and self.stops > 0 and self.patience.control_timeout is not None

    def wants_control(self, before: int) -> bool:
        """Say whether Stop came a second time, to somebody who waits; `before` were met then."""
        return self.patience.control_timeout is not None and self.stops > before + 1

    def time_out(self) -> None:
        """Note that it takes too long, and where its ranks are."""
        self.timed_out = self.doing

    def take_places(self, places: Mapping[int, Place], now: float) -> None:
        """Take in where ranks are."""
        self.places = dict(places)
        known = {rank: place for rank, place in places.items() if rank in self.unfinished}
        self._watch.take(known, now, sum(place.in_flight for place in places.values()))

    def take_aborted(self, places: Mapping[int, Place], now: float) -> None:
        """Note that the collectives are being aborted in which these ranks wait."""
        self.aborted.update(places)
        self._watch.start_over(now)

    def abort(self, now: float) -> None:
        """Note that its ranks can never go on, and that their collectives are being aborted."""
        unfinished = self.unfinished
        self.take_aborted({rank: self._watch.places[rank] for rank in unfinished}, now)
        ran, failed = self.task.ranks, {*self.transcript.errors, *unfinished}
        self.differing = differing(self.places)
        self._why_aborted = why_aborted(self.aborted, self.places, ran, failed, self.crew.size)

    def explains_death(self, places: Mapping[int, Place]) -> str:
        """Say why gloo has ended a rank, by where the others were; "" for other deaths."""
        said = (why_died(rank, died, places) for rank, died in sorted(self.deaths.items()))
        return next(filter(None, said), "")

    def take_loss(self, lost: AgentLost) -> None:
        """Note that the agent has ended, and so have the ranks."""
        self.lost = lost
        for rank in self.unfinished:
            self.receive(rank, Died(-signal.SIGKILL, time.time_ns()))

    def receive(self, rank: int, output: Output) -> None:
        """Take in an output of the task."""
        if isinstance(output, Failure) and self._is_of_abort(rank, output):
            output = in_one_line(output, self.aborted.get(rank), self.task.script)
        now = time.monotonic()
        if isinstance(output, Done | Died):
            now = self._ended.pop(rank, now)
        match output:
            case Done():
                self._watch.finished()
                self.prompts.drop(rank, now)
            case Died():
                self.prompts.drop(rank, now)
            case InputRequest():
                self.prompts.receive(rank, output, now)
            case Display(is_result=True):
                self.shows_value = True
        self.transcript.receive(rank, output, now)
        self._news.append((rank, output))

    def take_news(self) -> News:
        """Return what ranks have shown since this was last asked."""
        news, self._news = self._news, []
        return news

    def waits_after(self, rank: int) -> bool:
        """Say whether this rank is done with the task, and others are not."""
        return bool(self.unfinished) and rank in set(self.task.ranks) - set(self.unfinished)

    def is_of_another(self, rank: int, output: Output) -> bool:
        """Say whether it changes what an earlier task has shown."""
        has = self.transcript[rank].has_display
        return isinstance(output, Update) and not has(output.display_id)

    def breaks_group(self, output: Output) -> bool:
        """Say whether gloo's connections have ended, by us, with a dead rank, or by gloo itself."""
        return isinstance(output, Failure) and bool(output.connections) and self.crew.has_group

    def _is_of_abort(self, rank: int, failure: Failure) -> bool:
        """Say whether an abort led to it: gloo raises, with nccl the worker interrupts itself."""
        is_interrupt = failure.name == "KeyboardInterrupt" and not self.is_stopping
        return failure.connections == "ended" or (is_interrupt and rank in self.aborted)
