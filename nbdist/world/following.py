"""The one loop over a task that runs: Stop, hangs, until all of its ranks have finished.

On IPython's own thread, or that of the script which has made the world.  What is to be done is
decided in `RunningTask.next_steps`; here it is done.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TypeAlias

from nbdist.wire.messages import Kill
from nbdist.wire.views import Place
from nbdist.words import name_ranks
from nbdist.world.hangs import ANSWER_TIMEOUT, differing
from nbdist.world.running import News, RunningTask, Step
from nbdist.world.states import Event, State
from nbdist.world.workers import Workers

TICK = 0.25
"""Seconds between two yields when nothing is said: enough for a clock that people read."""

EAGER_SECONDS, EAGER_TICK = 0.2, 0.05
"""The same for the first moments, so that the first drawing comes when it is due."""

LEAVE_SECONDS = 0.3
"""In which a Stop turns out to be the begin of a restart of the kernel: Jupyter sends both."""

SPARE_SECONDS = 0.6
"""In which it turns out, before control is given back, which ranks are not ended any more."""

LEFTOVERS_GRACE = 1.5
"""Seconds for GPUs to end collectives that all have joined, and for nccl2 to notice that."""

Following: TypeAlias = Generator[News, float | None, None]
"""What is sent to it is how long it may take to come round again, in seconds; None for `TICK`."""


def follow(workers: Workers, running: RunningTask) -> Following:
    """Yield what ranks have shown since the last time, until all of them have finished.

    Comes round every `TICK` seconds at least, with nothing if need be, so that a clock can
    move on; with `send(0.0)` at once, for whom has more to do.  The first Stop interrupts the
    ranks and goes on for `Patience.control_timeout` seconds at most; the second ends it at once,
    with ranks unfinished.  So does the end of this process, where the workers outlive it: that
    is not to stop them.
    """
    before, longest = running.stops_met, TICK
    while running.unfinished:
        with running.counting_stops():
            # Stop first: it may have come as the task was sent, or to the consumer.
            is_stopped = running.stops > running.stops_met
            is_first = is_stopped and not running.is_stopping
            if workers.is_left(LEAVE_SECONDS if is_first else 0.0):
                return
            if is_stopped:
                running.stops_met = running.stops
                _meet_stop(workers, running, running.stops - before)
            if time.monotonic() >= running.give_up_at - SPARE_SECONDS:
                _spare(workers, running)
                if running.unfinished:
                    workers.advance(Event.GAVE_UP)
                    return
            # Then what comes up, for as long as there is nothing to ask the ranks for.
            now = time.monotonic()
            tick = min(longest, TICK if running.age > EAGER_SECONDS else EAGER_TICK)
            left = running.give_up_at - SPARE_SECONDS - now
            wait = min(tick, left, running.seconds_to_look(now))
            workers.receive(max(0.0, wait))
            # Then what these facts make necessary.
            for step in running.next_steps(time.monotonic()):
                _take(workers, running, step)
        sent = yield running.take_news()
        longest = TICK if sent is None else sent


def interrupt(workers: Workers, running: RunningTask) -> None:
    """Have the ranks that still run it leave it; again, with less patience.

    Of a task that holds Stop, the first time, only wait for them.
    """
    if not running.unfinished:
        return
    waits = running.patience.holds_stop and not running.is_stopping
    workers.advance(Event.INTERRUPT)
    running.stop(time.monotonic())
    if not waits:
        workers.link.interrupt(running.unfinished)


def finish(workers: Workers, running: RunningTask) -> None:
    """See to what a task leaves behind on its ranks once all have finished it."""
    _abort_leftovers(workers, running)
    if running.crew.heals and running.explains_death({}):
        # The survivors are asked what they were in as long as they know.
        running.why_died = running.explains_death(_locate(workers, running))


def _meet_stop(workers: Workers, running: RunningTask, number: int) -> None:
    """Interrupt the ranks; at the second Stop give control back, though they still run.

    Where nobody waits for control, the second interrupts them again.
    """
    is_waited_for = running.patience.control_timeout is not None
    if number == 1 or not (running.is_stopping and is_waited_for):
        interrupt(workers, running)
    if number > 1 and is_waited_for:
        running.give_up_at = 0.0


def _spare(workers: Workers, running: RunningTask) -> None:
    """Have those that have not stopped be ended only if Stop is pressed again, and not now.

    A rank that answers the question after that is still alive: its agent takes both in this order.
    """
    if running.interrupts > 1:
        return
    workers.link.spare(running.unfinished)
    running.spared = frozenset(_locate(workers, running))


def _take(workers: Workers, running: RunningTask, step: Step) -> None:
    """Do what is to be done.

    Collectives are aborted on all ranks: a connection is ended by the one that accepted it,
    wherever it is, and a rank that is busy now must not wait later for one of these.
    """
    match step:
        case Step.LOCATE:
            # All: with nccl a rank can have finished the task before its collectives have
            # ended, with gloo what it began shows whether the others can meet.
            workers.link.locate(workers.everyone)
        case Step.ABORT:
            workers.advance(Event.ABORTED)
            running.abort(time.monotonic())
            workers.link.abort(workers.everyone)
        case Step.ABORT_FOR_DEAD:
            workers.link.abort(workers.everyone)
        case Step.TIME_OUT:
            _locate(workers, running)
            if running.unfinished:
                running.timed_out = running.doing
                interrupt(workers, running)
        case Step.END_SURVIVORS:
            workers.link.call(Kill(running.unfinished))
        case Step.END_UNWAKEABLE:
            ranks = running.unwakeable
            why = f"gloo did not wake {name_ranks(ranks)} from a collective that had ended"
            workers.link.call(Kill(ranks, why))


def _abort_leftovers(workers: Workers, running: RunningTask) -> None:
    """End collectives that a failed task began and that no rank will complete.

    The next task's would meet them, and give wrong results.
    """
    if not running.transcript.errors or workers.state is not State.READY or not workers.has_group:
        return
    runs_ahead = running.crew.runs_ahead
    enough = time.monotonic() + (LEFTOVERS_GRACE if runs_ahead else 0.0)
    looks = 0
    while looks < 2 or time.monotonic() < enough:
        places = _locate(workers, running)
        running.differing = differing(places)
        if not any(place.unfinished for place in places.values()):
            return
        looks += 1
        if runs_ahead:
            workers.receive(EAGER_TICK)
    workers.advance(Event.ABORTED)
    workers.link.abort(workers.everyone)


def _locate(workers: Workers, running: RunningTask) -> dict[int, Place]:
    """Return where all ranks of the world are."""
    running.places = {}
    workers.link.locate(workers.everyone)
    deadline = time.monotonic() + ANSWER_TIMEOUT
    while not (running.places or running.lost) and (left := deadline - time.monotonic()) > 0:
        workers.receive(left)
    return running.places
