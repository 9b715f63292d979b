"""Releases ranks that wait for ever, and stops tasks that take too long.

Runs in the process that serves the notebook: the agent, or the head if the world has several
machines.  So tasks are supervised even while the notebook is busy, or while none is attached.  A
`Supervisor` decides about one task and does no I/O.  `Supervision` passes facts to the supervisors
of all tasks, and carries out their decisions by messages like a notebook's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from nbdist.agent.hang_detector import UNCHANGED, HangDetector
from nbdist.output.events import Died, Done, Failure, InputRequest, Output
from nbdist.wire.messages import (
    OWN_REQUEST,
    Aborted,
    AbortRanks,
    AgentRequest,
    Decided,
    Decision,
    Down,
    FromDebugger,
    Interrupt,
    Kill,
    Located,
    RequestLocations,
    Rules,
    RunTask,
    SendInput,
    Up,
)
from nbdist.wire.places import (
    LOCATED_TIMEOUT,
    RankPosition,
    is_call_mismatch,
    is_tensor_mismatch,
)
from nbdist.words import name_ranks

GPU_UNCHANGED = 1.5
"""With nccl, seconds without a change until ranks count as stuck after another rank has failed.

It is more than a second, because the agent does not see what GPUs do, and torch's backend nccl2
checks only once a second which collectives have completed.
"""

LOCATE = "locate"
"""The step of a supervisor that asks all ranks where in their code they are."""


class Supervisor:
    """Collects the facts about a task in progress, and decides what must be done about it.

    `next_steps` says what the caller must do: locate the ranks of the world (ask where in their
    code they are), abort collectives that cannot complete, end ranks, or stop a task that takes too
    long.  `ranks` are the ranks of the task.  Times are monotonic seconds.
    """

    def __init__(self, ranks: Collection[int], rules: Rules, now: float) -> None:
        self.unfinished = {*ranks}
        self.failed: set[int] = set()  # ranks that have failed or died
        self.places: Mapping[int, RankPosition] = {}  # where ranks were when last located
        self._rules = rules
        self._started = now
        self._has_death = self._has_handled_death = False
        self.has_timed_out = self.is_stopping = False
        self._asking: set[int] = set()  # ranks that wait for input
        self._debugged: set[int] = set()  # ranks that stand at a breakpoint
        self._asking_since = now
        self._input_seconds = 0.0
        # The latest time to stop a task that has timed out; None before the timeout.  Before the
        # stop the ranks are located, so that the error can say where they were.
        self._stop_at: float | None = None
        self._ended: set[int] = set()  # ranks that no abort wakes, and that are being ended
        self._detector = HangDetector(now, rules.hang_timeout)

    def __repr__(self) -> str:
        return f"<Supervisor of {sorted(self.unfinished)}, failed {sorted(self.failed)}>"

    @property
    def holds_stop(self) -> bool:
        """Whether the ranks of the task go on in spite of the first Stop, and of a timeout.

        Some tasks must be completed on all ranks or on none.
        """
        return self._rules.holds_stop

    @property
    def waiting(self) -> Mapping[int, RankPosition]:
        """By rank: where in their code the ranks are that have not finished the task.

        Ranks that have not been located, or not since the last abort, may be missing.
        """
        places = self._detector.places
        return {rank: place for rank, place in places.items() if rank in self.unfinished}

    @property
    def unwakeable(self) -> tuple[int, ...]:
        """The ranks that still wait in a collective after several aborts; empty with nccl."""
        # With nccl a rank that cannot abort says so in its answer, and the rank's agent kills the
        # rank (`ask_or_kill`).
        if self._rules.runs_ahead:
            return ()
        return self._detector.unwakeable_ranks(sorted(self.unfinished))

    # --- facts ----------------------------------------------------------------------------

    def receive(self, rank: int, output: Output, now: float) -> None:
        """Record an output that says that a rank asks for input, has failed, or has finished."""
        match output:
            case InputRequest():
                self._count_input(now)
                self._asking.add(rank)
            case Failure():
                self.failed.add(rank)
            case Died():
                self.failed.add(rank)
                self._has_death = True
                self._finish(rank, now)
            case Done():
                self._finish(rank, now)
                self._detector.restart()

    def _finish(self, rank: int, now: float) -> None:
        self.unfinished.discard(rank)
        self.record_debugger(rank, now, is_stopped=False)
        self.record_input(rank, now)

    def record_input(self, rank: int, now: float) -> None:
        """Record that a rank no longer waits for input, for example because it has got a line."""
        self._count_input(now)
        self._asking.discard(rank)

    def record_debugger(self, rank: int, now: float, *, is_stopped: bool) -> None:
        """Record whether a rank stands at a breakpoint of the debugger.

        While a rank stands there, `next_steps` does not look for ranks that wait for ever, because
        other ranks may rightly wait for this rank.
        """
        self._count_input(now)
        (self._debugged.add if is_stopped else self._debugged.discard)(rank)

    @property
    def _waits_for_user(self) -> bool:
        return bool(self._asking or self._debugged)

    def _count_input(self, now: float) -> None:
        if self._waits_for_user:
            self._input_seconds += now - self._asking_since
        self._asking_since = now

    def record_stop(self, now: float) -> None:
        """Record that the ranks of the task are being interrupted, because Stop was pressed.

        From now on each agent's `Interrupter` aborts collectives in which ranks wait, so
        `next_steps` no longer looks for collectives that cannot complete.
        """
        self.is_stopping = True
        self._count_input(now)
        self._asking.clear()  # ranks get no input after Stop
        self._debugged.clear()
        self._detector.poll_fast(now)

    def record_places(self, places: Mapping[int, RankPosition], now: float) -> None:
        """Record where in their code ranks are: the ranks of this task and the idle ranks."""
        self.places = places
        waiting = {rank: place for rank, place in places.items() if rank in self.unfinished}
        in_flight = sum(place.in_flight for place in places.values())
        self._detector.record_places(waiting, now, in_flight)
        if self._stop_at is not None:
            self._stop_at = now

    def record_abort(self, now: float) -> None:
        """Record that the collectives of the task are being aborted now."""
        self._detector.record_abort(now)

    # --- steps ----------------------------------------------------------------------------

    def next_steps(self, now: float) -> Iterator[Decision | str]:
        """Yield what the caller must do now: carry out a decision, or locate the ranks (LOCATE).

        Yields nothing once all ranks have finished.  When the caller carries out `Decision.ABORT`,
        it must call `record_abort`; otherwise the next call may yield the same decision again.
        """
        if not self.unfinished:
            return
        if self._seconds_left(now) <= 0:
            if self._stop_at is None:
                self._stop_at = now + LOCATED_TIMEOUT
                self._detector.record_request(now)
                yield LOCATE
            elif now >= self._stop_at:
                self.has_timed_out = self.is_stopping = True
                self._detector.poll_fast(now)
                yield Decision.TIME_OUT
        # Act at once: survivors without a connection to the dead rank do not notice its death.
        if self._has_death and not self._has_handled_death:
            self._has_handled_death = True
            if not self._rules.heals:
                yield Decision.END_SURVIVORS
            elif self._rules.has_group:
                yield Decision.ABORT_FOR_DEAD
        if not self._is_watched:
            return
        # Locate ranks often for a while if some ranks of the world have finished the task or do not
        # run it.  Such a rank will probably join no collective, so others may wait for it in vain.
        if len(self.unfinished) < self._rules.size:
            self._detector.poll_fast(now)
        aborts = self._rules.aborts and not self.is_stopping
        # The process of a rank that is being ended may take long to exit.  Until then look
        # for no further hang.
        is_ending = not self._ended.isdisjoint(self.unfinished)
        if aborts and not is_ending and self._can_never_go_on(now):
            self._ended.update(self.unwakeable)
            yield Decision.END_UNWAKEABLE if self.unwakeable else Decision.ABORT
        elif self._detector.seconds_to_poll(now) == 0:
            self._detector.record_request(now)
            yield LOCATE

    def seconds_to_step(self, now: float) -> float:
        """Return in how many seconds the caller must call `next_steps` if no new fact comes."""
        until_poll = self._detector.seconds_to_poll(now) if self._is_watched else float("inf")
        left = self._seconds_left(now)
        if left <= 0 and self._stop_at is not None:
            left = self._stop_at - now
        return max(0.0, min(until_poll, left))

    @property
    def _is_watched(self) -> bool:
        """Whether `next_steps` looks for ranks that wait for ever.

        False if the world has no process group.  Also False while a rank waits for input or stands
        at a breakpoint, because other ranks may rightly wait for that rank.
        """
        return self._rules.has_group and not self._waits_for_user

    def _seconds_left(self, now: float) -> float:
        if self._rules.timeout is None or self.is_stopping:
            return float("inf")
        # The timeout does not include the time in which a rank waits for the user.
        waited = self._input_seconds + (now - self._asking_since if self._waits_for_user else 0.0)
        return self._started + self._rules.timeout + waited - now

    def _can_never_go_on(self, now: float) -> bool:
        ahead = self._rules.runs_ahead
        if len(self.unfinished) == self._rules.size:
            # With gloo, collectives of different sizes do not hang: the result is wrong, or gloo
            # ends a rank.
            differ = ahead and is_tensor_mismatch(self.places)
            is_known = differ or is_call_mismatch(self.places)
            return self._detector.is_dead_end(
                self.unfinished, now, is_known=is_known, runs_ahead=ahead
            )
        # With nccl a shorter wait is enough if a rank has failed, because the task fails anyway.
        unchanged = GPU_UNCHANGED if self.failed and ahead else UNCHANGED
        if not self._detector.is_deadlocked(self.unfinished, now, unchanged):
            return False
        finished = (place for rank, place in self.places.items() if rank not in self.unfinished)
        # A GPU of a finished rank may still run the collective and so end the wait of other ranks.
        # This does not matter if a rank has failed, because the task fails anyway.
        return bool(self.failed) or not any(place.operation for place in finished)


def fact_of(output: Output) -> Output | None:
    """Return a small copy of an output, by which a `Supervisor` in the head can decide.

    The copy lacks the large fields.  An agent sends it to the head at once, in an `Observed`.
    Returns None if the output does not matter to a `Supervisor`.
    """
    match output:
        case Done():
            return Done(output.status, output.seconds)
        case Failure():
            return Failure(output.name, "", (), output.time_ns)
        case Died():
            return output._replace(last_lines=())
        case InputRequest():
            return InputRequest(output.number, "")
    return None


class Supervision:
    """Passes facts to the `Supervisor` of each task in progress, and carries out the decisions.

    `deliver` carries out a message as if the notebook had sent it.  `send` sends a message to the
    notebook.  The object belongs to the `NotebookLink`.
    """

    def __init__(self, deliver: Callable[[Down], None], send: Callable[[Up], None]) -> None:
        # The decisions about tasks in progress, and about tasks that ended after the last task
        # began, by task and kind.  Decisions of the same kind are merged into one, because a task
        # can need any number of aborts.
        self._decided: dict[tuple[str, Decision], Decided] = {}
        self._deliver, self._send = deliver, send
        # The supervisor of each task in progress, by the id of the task.  Tasks of different ranks
        # run side by side.
        self._supervisors: dict[str, Supervisor] = {}
        self._ranks: Sequence[int] = ()  # all ranks of the world
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Supervision {self._supervisors}>"

    @property
    def decided(self) -> tuple[Decided, ...]:
        """The decisions so far about the latest tasks; a notebook that attaches gets them."""
        return (*self._decided.values(),)

    def close(self) -> None:
        """Stop supervising all tasks; called for example before all workers are ended."""
        self._supervisors.clear()
        self._set_timer(float("inf"))

    # --- facts ----------------------------------------------------------------------------

    def observe(self, rank: int, task_id: str, output: Output) -> None:
        """Pass an output to its task's supervisor, before the output is queued for the notebook."""
        supervisor = self._supervisors.get(task_id)
        if supervisor is None or not isinstance(output, Done | Died | Failure | InputRequest):
            return
        supervisor.receive(rank, output, time.monotonic())
        if not supervisor.unfinished:
            del self._supervisors[task_id]
        self._step_soon()

    def receive(self, message: Down) -> None:
        """Start or update supervisors from a message that the notebook has sent.

        A `RunTask` starts the supervisor of its task.  `Interrupt` and `SendInput` update the
        supervisors of the tasks on these ranks.
        """
        now = time.monotonic()
        match message:
            case RunTask() as run:
                kept = self._supervisors.keys()
                self._decided = {k: each for k, each in self._decided.items() if k[0] in kept}
                self._supervisors[run.id] = Supervisor(run.ranks, run.rules, now)
                self._ranks = range(run.rules.size)
                self._step_soon()
            case Interrupt(ranks):
                for each in self._supervisors_of(ranks):
                    each.record_stop(now)
                self._step_soon()
            case SendInput(rank):
                for each in self._supervisors_of([rank]):
                    each.record_input(rank, now)
                self._step_soon()

    def is_repeated(self, message: Interrupt) -> bool:
        """Return True if `message` is the first Stop of a task that a timeout has interrupted.

        The notebook sent the message before it knew of the timeout.  The caller must ignore the
        message.  Otherwise it would count as a second Stop, after which ranks that still clean up
        are killed.
        """
        stopped = self._supervisors_of(message.ranks)
        return message.number == 1 and any(each.has_timed_out for each in stopped)

    def _supervisors_of(self, ranks: Collection[int]) -> list[Supervisor]:
        """Return the supervisors of the tasks that any of these ranks has not finished."""
        supervisors = self._supervisors.values()
        return [each for each in supervisors if not each.unfinished.isdisjoint(ranks)]

    def _ranks_of_others(self, supervisor: Supervisor) -> set[int]:
        """Return the ranks that run the task of another supervisor."""
        others = (each for each in self._supervisors.values() if each is not supervisor)
        return set[int]().union(*(each.unfinished for each in others))

    def report(self, message: Up) -> None:
        """Update the supervisors from a message that is sent to the notebook.

        The messages that matter say where ranks are, that collectives are aborted after Stop, or
        whether a rank stands at a breakpoint.
        """
        now = time.monotonic()
        match message:
            case Located(places):
                for each in self._supervisors.values():
                    elsewhere = self._ranks_of_others(each)
                    each.record_places(
                        {r: place for r, place in places.items() if r not in elsewhere}, now
                    )
                self._step_soon()
            case Aborted():  # `Interrupter` aborts collectives after Stop
                for each in self._supervisors.values():
                    if each.is_stopping:
                        each.record_abort(now)
            case FromDebugger(rank, is_stopped=is_stopped):
                for each in self._supervisors_of([rank]):
                    each.record_debugger(rank, now, is_stopped=is_stopped)
                self._step_soon()

    # --- steps ----------------------------------------------------------------------------

    def _step_soon(self) -> None:
        self._set_timer(0.0 if self._supervisors else float("inf"))

    def _set_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds < float("inf"):
            self._timer = asyncio.get_running_loop().call_later(seconds, self._step)

    def _step(self) -> None:
        self._timer = None
        for task_id, supervisor in [*self._supervisors.items()]:
            for step in supervisor.next_steps(time.monotonic()):
                if isinstance(step, Decision):
                    self._carry_out(task_id, supervisor, step)
                else:
                    # Locate the ranks that have finished, too.  With nccl their collectives may
                    # still be running.  With gloo the collectives that they have called show
                    # whether the collectives of other ranks can complete.
                    self._deliver(RequestLocations((*self._ranks,), time.monotonic()))
        now = time.monotonic()
        delays = [each.seconds_to_step(now) for each in self._supervisors.values()]
        self._set_timer(min(delays, default=float("inf")))

    def _carry_out(self, task_id: str, supervisor: Supervisor, decision: Decision) -> None:
        """Send a decision on a task to the notebook, and do what the decision says.

        Depending on the decision, collectives are aborted, or ranks are interrupted or killed.  If
        a task with `holds_stop` has timed out, the decision is only sent.
        """
        unfinished, waiting = (*sorted(supervisor.unfinished),), dict(supervisor.waiting)
        if decision is Decision.END_UNWAKEABLE:
            ranks = supervisor.unwakeable
            waiting = {rank: waiting.get(rank, RankPosition()) for rank in ranks}
        decided = Decided(
            task_id, decision, waiting, dict(supervisor.places), frozenset(supervisor.failed)
        )
        earlier = self._decided.get((task_id, decision), decided)
        self._decided[task_id, decision] = replace(decided, waiting={**earlier.waiting, **waiting})
        self._send(decided)
        # An abort is for all ranks except those that run another task.  It would not be enough to
        # abort on the waiting ranks: only the rank that accepted a connection can close it, and
        # that rank may not be waiting.  Besides, a rank that still computes must not wait later for
        # a rank that was released.
        elsewhere = self._ranks_of_others(supervisor)
        aborted = tuple(rank for rank in self._ranks if rank not in elsewhere)
        match decision:
            case Decision.ABORT:
                supervisor.record_abort(time.monotonic())
                self._deliver(AbortRanks(aborted))
            case Decision.ABORT_FOR_DEAD:
                self._deliver(AbortRanks(aborted))
            case Decision.TIME_OUT if not supervisor.holds_stop:
                self._deliver(Interrupt(unfinished))
            case Decision.END_SURVIVORS:
                self._deliver(AgentRequest(OWN_REQUEST, Kill(unfinished)))
            case Decision.END_UNWAKEABLE:
                why = f"gloo did not wake {name_ranks(waiting)} from a collective that had ended"
                self._deliver(AgentRequest(OWN_REQUEST, Kill((*waiting,), why)))
