"""The state of a task in progress: its output, where its ranks are, how it ended, the result.

Runs in the notebook's process and does no I/O.  The agent supervises the task
(`nbdist.agent.supervisor`), and `nbdist.world.inbox` passes the agent's messages to this module.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from nbdist import errors
from nbdist.config import CONTROL_TIMEOUT, Patience
from nbdist.errors import NO_VARIABLES_LOST, NbdistError
from nbdist.output import events
from nbdist.output.events import Died, Done, Failure, Output
from nbdist.output.transcript import Transcript, is_consequence
from nbdist.values.payload import Payload, localize, open_payload
from nbdist.values.pickling import unpickle
from nbdist.wire.messages import (
    Aborted,
    Attached,
    AttachedTask,
    Decided,
    Decision,
    Located,
    Rules,
    UnresponsiveHosts,
    UsageReport,
)
from nbdist.wire.places import RankPosition, is_call_mismatch
from nbdist.wire.status import Usage
from nbdist.wire.work import InputReply, Task, task_from
from nbdist.words import name_ranks
from nbdist.world import hangs
from nbdist.world.name_table import Sent
from nbdist.world.result import CellResult, Contents, as_raised
from nbdist.world.sent_objects import NOTHING_SENT, Parcel
from nbdist.world.states import Machines, Prompts
from nbdist.world.stop import StopEvent, StopState

RankOutputs = list[tuple[int, Output]]
"""New outputs with their ranks, in the order of their arrival."""


@dataclass(frozen=True, slots=True)
class Members:
    """Facts about the workers at the time when a task was sent.

    `namespace` is the `__main__` of the notebook.  If `heals` is True, workers that die are
    replaced when the task ends.
    """

    size: int
    backend: str
    machines: Machines
    pids: Mapping[int, int]
    namespace: dict[str, Any]
    heals: bool

    def rules(self, patience: Patience) -> Rules:
        """Return the rules by which the agent supervises a task."""
        return Rules(
            self.size,
            self.backend,
            self.heals,
            patience.hang_timeout,
            patience.aborts,
            patience.timeout,
            patience.holds_stop,
        )


class TaskRun:
    """A task that was sent to its ranks: their output, where they are, and how the task ended.

    `shipped` has by rank the names and objects that the task brings.  `is_over` is True once all
    ranks have finished and the work after that, such as healing, is done.  Then `recovered_ranks`
    has the ranks that died or were restarted, and `recovery_text` says what was done about them.
    `restart_text` says why the task is run again, "" if it is not.  `why_died`, `differing`,
    `lacking_text`, `replicas_text` and `incomplete_text` are texts for the user or "".
    """

    def __init__(
        self,
        task: Task,
        patience: Patience,
        members: Members,
        shipped: Mapping[int, Parcel] | None = None,
        started: tuple[float, int] | None = None,
        ended: Mapping[int, float] | None = None,
    ) -> None:
        """Start the clock of a task that is being sent.

        If another notebook has sent the task, `started` is the time of sending, in monotonic
        seconds and in nanoseconds since 1970, and `ended` has by rank the monotonic seconds when
        the rank finished.
        """
        self.task = task
        self.shipped: Mapping[int, Parcel] = shipped or {}
        self.sent_at: int | None = None  # see `NameTable.record_sent`
        self.patience = patience
        self.transcript = Transcript(task.ranks)
        self.prompts = Prompts()
        # Records the outcomes of a rank's items, and returns the rank's next items.  None if the
        # task is no `World.map`, or if another notebook has called `World.map`.
        self.answer_items: Callable[[int, events.ItemsWanted, float], InputReply] | None = None
        self.item_text = ""  # which item of `World.map` has failed, for the error
        self.members = members
        self.rules = members.rules(patience)
        self.aborted: dict[int, RankPosition] = {}
        self.places: dict[int, RankPosition] = {}
        self.unwoken: dict[int, RankPosition] = {}  # of ranks killed because no abort woke them
        self.requested_at = 0.0  # monotonic seconds; answers to earlier requests are ignored
        self.moved: dict[int, events.TransferProgress] = {}
        self.usage: Mapping[int, Usage] = {}
        self.silent = UnresponsiveHosts((), 0.0)
        self.stop = StopState(patience)
        self.is_over = False
        self.shows_value = False  # whether a rank has displayed the value of the last line
        self.lost: errors.AgentLost | None = None
        self.recovery_text = self.restart_text = self.why_died = self.differing = (
            self.lacking_text
        ) = ""
        self.replicas_text = ""  # which ranks of a training ended at other steps, and the remedy
        self.incomplete_text = ""  # which variables may hold a part of a collective's result
        self.recovered_ranks: tuple[int, ...] = ()
        self.timed_out: str | None = None  # where the ranks were when the timeout expired
        self._why_aborted = ""
        # By rank, torch's own errors about connections that another rank has closed.
        self._released: dict[int, Failure] = {}
        self._outputs: RankOutputs = []
        self._started, self._started_ns = started or (time.monotonic(), time.time_ns())
        self._ended = dict(ended or {})
        self._waiting_places: Mapping[int, RankPosition] = {}  # of unfinished ranks
        self.transcript.start(self._started)

    def __repr__(self) -> str:
        return f"<TaskRun {self.task.id[:8]} unfinished {self.unfinished}>"

    @classmethod
    def from_attached(cls, attached: Attached, sent: AttachedTask, members: Members) -> Self:
        """Return the run of a task that another notebook has sent, with the time of its sending."""
        rules = sent.run.rules
        patience = replace(
            attached.memory.patience,
            hang_timeout=rules.hang_timeout,
            aborts=rules.aborts,
            timeout=rules.timeout,
            holds_stop=rules.holds_stop,
        )
        if patience.control_timeout is None:  # a job until now; from now on a cell waits
            patience = replace(patience, control_timeout=CONTROL_TIMEOUT)
        started = sent.started, sent.started_ns
        return cls(task_from(sent.run.task), patience, members, started=started, ended=sent.ended)

    # --- state ----------------------------------------------------------------------------

    @property
    def is_job(self) -> bool:
        """Whether the task runs in the background, so that no cell waits for it after Stop."""
        return self.stop.is_of_job

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The ranks that still run the task."""
        return tuple(track.rank for track in self.transcript if track.finished is None)

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """The bytes of values that all ranks have packed so far, and the total to be packed."""
        moved = self.moved.values()
        return sum(each.done for each in moved), sum(each.total for each in moved)

    @property
    def next_to_ask(self) -> int | None:
        """The rank whose prompt the user should answer now, None for none (`Prompts.next`)."""
        return self.prompts.next(time.monotonic(), self.unfinished)

    @property
    def age(self) -> float:
        """Seconds since the task was sent, without the time in which a rank waited for input."""
        now = time.monotonic()
        return now - self._started - self.prompts.seconds(now)

    def seconds_until(self, time_ns: int) -> float:
        """Return the seconds from sending the task to a time; `time_ns` counts from 1970."""
        return max(0.0, (time_ns - self._started_ns) / 1e9)

    @property
    def deaths(self) -> dict[int, Died]:
        """The deaths of ranks during the task, by rank."""
        return {each.rank: each.died for each in self.transcript if each.died is not None}

    @property
    def killed_by_stop(self) -> tuple[int, ...]:
        """The ranks that were killed because they ignored Stop.

        The tuple is empty if any rank died for another reason.
        """
        deaths = self.deaths
        return tuple(deaths) if all(died.by_stop for died in deaths.values()) else ()

    @property
    def waits(self) -> str:
        """A text about machines that do not respond, stalled networks and waiting ranks, or ""."""
        stalled = hangs.stalled_text(self.places, self.members.machines)
        return " · ".join(filter(None, [hangs.silent_text(self.silent), stalled, self._waiting]))

    @property
    def _waiting(self) -> str:
        """A text that says which ranks wait in which collective, and where other ranks are; or "".

        The text is "" if no rank waits in a collective, or if a rank waits for input.  If the task
        runs on all ranks, the text is also "" in the first `Patience.hang_timeout` seconds.
        """
        if self.prompts.ranks:  # the other ranks may wait for the rank that waits for input
            return ""
        unfinished = self.unfinished
        places = {rank: self._waiting_places.get(rank, RankPosition()) for rank in unfinished}
        waiting = any(place.operation for place in places.values())
        others = set(range(self.members.size)) - set(self.task.ranks)
        # In a cell for some ranks, a rank may wait for ranks that do not run the cell.
        if not waiting or (self.age < self.patience.hang_timeout and not others):
            return ""
        text = hangs.waits_text(places, self.task.source)
        if done := set(self.task.ranks) - set(unfinished):
            text += f" · {name_ranks(done)} finished"
        if others:
            text += f" · not in this cell: {name_ranks(others)}"
        if is_call_mismatch(places):
            text += " · these calls do not match and would wait forever"
        return text

    @property
    def doing(self) -> str:
        """A text that says where the unfinished ranks are, as far as that is known."""
        places, unfinished = self._waiting_places, self.unfinished
        known_places = {rank: places[rank] for rank in unfinished if rank in places}
        return hangs.waits_text(known_places, self.task.source)

    @property
    def not_stopped(self) -> errors.RanksNotStopped:
        """The error which says that ranks still run the task, and whether they may be killed."""
        return errors.RanksNotStopped(self.unfinished, self.doing, is_safe=self._is_safe)

    @property
    def _is_safe(self) -> bool:
        return self.stop.spared.issuperset(self.unfinished)

    # --- events ---------------------------------------------------------------------------

    def record_interrupt(self, now: float) -> None:
        """Record that the ranks are interrupted: store whether a network is stalled, drop prompts.

        An interrupted rank gets no input for its prompt.
        """
        self.stop.was_stalled = any(place.stalled for place in self.places.values())
        for rank in self.prompts.ranks:
            self.prompts.drop(rank, now)

    def handle_message(
        self, message: Located | Aborted | Decided | UnresponsiveHosts | UsageReport, now: float
    ) -> None:
        """Update this task from a message of the agent; ignore what is about other tasks."""
        match message:
            case Located(places, requested_at) if requested_at >= self.requested_at:
                self.places, unfinished = dict(places), self.unfinished
                self._waiting_places = {r: place for r, place in places.items() if r in unfinished}
            case Aborted(places):
                self.aborted.update({r: each for r, each in places.items() if r in self.task.ranks})
                self._waiting_places = {}
            case Decided(task_id) if task_id == self.task.id:
                self._handle_decision(message, now)
            case UnresponsiveHosts():
                self.silent = message
            case UsageReport(usage):  # a message covers the ranks of one machine
                own = {rank: each for rank, each in usage.items() if rank in self.task.ranks}
                self.usage = {**self.usage, **own}

    def _handle_decision(self, decided: Decided, now: float) -> None:
        """Record a decision of the agent: to abort collectives, stop the task, or kill ranks."""
        match decided.decision:
            case Decision.ABORT:
                self.aborted.update(decided.waiting)
                self._waiting_places = {}
                failed = {*self.transcript.errors, *decided.failed, *decided.waiting}
                facts = self.aborted, decided.places, self.task.ranks, failed, self.members.size
                self.differing = hangs.differing(decided.places)
                self._why_aborted = hangs.why_aborted(*facts)
            case Decision.TIME_OUT if not self.stop.is_stopping:  # Stop may have come first
                self.timed_out = hangs.waits_text(decided.waiting, self.task.source)
                self.stop.handle(StopEvent.TIMED_OUT, now)
                self.record_interrupt(now)
            case Decision.END_UNWAKEABLE:
                self.unwoken = dict(decided.waiting)

    def explain_death(self, places: Mapping[int, RankPosition]) -> str:
        """Return why gloo ended the process of a rank; "" if it ended none.

        `places` says where the other ranks are in their code.
        """
        texts = (hangs.why_died(rank, died, places) for rank, died in sorted(self.deaths.items()))
        return next(filter(None, texts), "")

    def handle_agent_loss(self, lost: errors.AgentLost) -> None:
        """Record that the agent has ended, and all unfinished ranks with it."""
        self.lost = lost
        for rank in self.unfinished:
            self.receive(rank, Died(-signal.SIGKILL, time.time_ns()))

    def receive(self, rank: int, output: Output) -> None:
        """Add a rank's output to the transcript and to `pop_outputs`, and update the state."""
        # After an abort of collectives gloo raises its own error, and with nccl the worker
        # interrupts itself.  The user gets a short error in place of both.
        was_interrupted = rank in self.aborted and not self.stop.is_stopping
        leads = {"KeyboardInterrupt"} if was_interrupted else ()
        if isinstance(output, Failure) and (output.connections == "ended" or output.name in leads):
            if rank not in self.aborted:
                self._released[rank] = output
            output = self._shortened(rank, output)
        now = time.monotonic()
        if isinstance(output, Done | Died):
            now = self._ended.pop(rank, now)
            self.prompts.drop(rank, now)
        match output:
            case events.InputRequest():
                self.prompts.receive(rank, output, now)
            case events.Display(is_result=True):
                self.shows_value = True
        self.transcript.receive(rank, output, now)
        if self._released and isinstance(output, Failure | Died):
            self._explain_released()
        self._outputs.append((rank, output))

    def _shortened(self, rank: int, failure: Failure) -> Failure:
        aborted, errors = self.aborted.get(rank), self.transcript.errors.values()
        return hangs.shorten_error(failure, aborted, self.task.script, errors)

    def _explain_released(self) -> None:
        """Update the errors of released ranks, once more is known about why other ranks failed."""
        for rank, failure in self._released.items():
            track, explained = self.transcript[rank], self._shortened(rank, failure)
            if track.failure is not None and track.failure.message != explained.message:
                track.failure, track.version = explained, track.version + 1

    def pop_outputs(self) -> RankOutputs:
        """Return the outputs that have arrived since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def return_outputs(self, outputs: Iterable[tuple[int, Output]]) -> None:
        """Give back outputs of `pop_outputs`, so that its next call returns them again."""
        self._outputs = [*outputs, *self._outputs]

    def waits_after(self, rank: int) -> bool:
        """Return True if this rank has finished the task and others have not."""
        return bool(self.unfinished) and rank in set(self.task.ranks) - set(self.unfinished)

    def is_of_earlier_task(self, rank: int, output: Output) -> bool:
        """Return True if the output is an update of a display that an earlier task has made."""
        has = self.transcript[rank].has_display
        return isinstance(output, events.DisplayUpdate) and not has(output.display_id)

    @property
    def damage(self) -> str:
        """Sentences about variables that the task has left incomplete or different; "" for none."""
        return " ".join(filter(None, (self.incomplete_text, self.replicas_text)))

    # --- result ---------------------------------------------------------------------------

    def received_parcel(self, rank: int) -> Parcel:
        """Return the rank's parcel; `NOTHING_SENT` if none was sent or the rank has refused it."""
        error = self.transcript[rank].error
        was_refused = isinstance(error, Failure) and error.name == events.NAME_PROBLEM
        return NOTHING_SENT if was_refused else self.shipped.get(rank, NOTHING_SENT)

    def shipped_names(self) -> dict[str, Sent]:
        """Return by name the records of the variables that were sent to any rank with the task."""
        return {n: record for each in self.shipped.values() for n, record in each.names.items()}

    def gained(self, rank: int) -> tuple[int, ...]:
        """Return the keys of objects that a rank has got from another worker or from a file."""
        done = self.done().get(rank)
        return () if done is None else done.gained

    @property
    def made(self) -> frozenset[str]:
        """The names that the task has bound on any rank, without the names that it imported."""
        return frozenset().union(*(done.made for done in self.done().values()))

    def result(self) -> CellResult[Any]:
        """Return the result so far, with the values of the ranks that have succeeded.

        If the task has `keeps`, each value in the result is None; call `value` to get the values.
        """
        done = {rank: each for rank, each in self.done().items() if each.status == "ok"}
        if self.task.brings_small:
            values = dict[int, Any]()
            for rank, each in done.items():
                # The user has not asked for the last value: failing to read it is no error.
                with suppress(Exception):
                    values |= {rank: self.value(each)} if each.kept is None else {}
        else:
            values = {r: None if self.task.keeps else self.value(each) for r, each in done.items()}
        transcript, hosts = self.transcript, self.members.machines.by_rank
        seconds = transcript.elapsed(time.monotonic())
        return CellResult(self.task, transcript, seconds, transcript.errors, values, hosts)

    def error(self) -> NbdistError | None:
        """Return the error that a failed or unfinished task raises; None if all ranks succeeded."""
        if self.lost is not None:
            return self.lost
        cause = self.transcript.root_cause()
        is_of_stop = (
            cause is None or is_consequence(cause[1]) or getattr(cause[1], "by_stop", False)
        )
        if self.timed_out is not None and is_of_stop:
            unfinished, timeout = self.unfinished, self.patience.timeout or 0.0
            is_safe = self._is_safe and not (self.killed_by_stop or self.damage)
            stopped = errors.CellTimeout(timeout, self.timed_out, unfinished, is_safe=is_safe)
            if self.damage:
                stopped.add(self.damage)
            return stopped
        if self.unfinished:
            return self.not_stopped
        if cause is None:
            return None
        rank, first = cause
        failed = self.transcript.errors
        own_errors = {rank: error for rank, error in failed.items() if not is_consequence(error)}
        # Without Stop, a KeyboardInterrupt is no consequence: the cell has raised it by itself.
        if not own_errors and not self.stop.is_stopping:
            own_errors = {
                rank: error
                for rank, error in failed.items()
                if isinstance(error, Failure) and error.connections != "ended"
            }
            rank, first = min(own_errors.items(), key=lambda item: item[1].time_ns, default=cause)
        host, pid = self.members.machines.name(rank), self.members.pids.get(rank, 0)
        blame = errors.Blame(rank, host, pid, failed)
        seconds, deaths = self.seconds_until(first.time_ns), self.deaths.values()
        why_ended = next((f"{each.why}." for each in deaths if each.why and not each.by_stop), "")
        if isinstance(first, Died):
            died = errors.WorkerDied(blame, seconds, first.exit_code, first.end)
            for fact in filter(
                None, (why_ended, self.why_died, self.recovery_text, self.damage, self.item_text)
            ):
                died.add(fact)
            return died
        if not own_errors and self.aborted and not self.stop.is_stopping:
            facts = " ".join(filter(None, (self.recovery_text, self.damage)))
            return errors.RanksReleased(blame, self._why_aborted, facts)
        blame = errors.Blame(rank, host, pid, own_errors or failed)
        who, description = self.members.machines.who([rank]), (first.name, first.message)
        error = errors.WorkerError(blame, len(self.task.ranks), seconds, description, who)
        kept, differing = (
            "" if self.recovery_text or self.damage else NO_VARIABLES_LOST,
            self.differing,
        )
        released = f"{hangs.released_text(self.aborted)}{kept}." if self.aborted else ""
        differing = f"Before that: {differing}." if differing else ""
        cures = (self.recovery_text, differing, self.lacking_text, self.damage, self.item_text)
        for fact in filter(None, (released, why_ended, *cures)):
            error.add(fact)
        done = self.transcript[rank].done
        contents = Contents.read(done.values if done else None, self.members.namespace)
        return as_raised(error, first.kinds, contents)

    def payloads(self) -> dict[int, Payload]:
        """Return the values that the ranks have sent back, still packed, by rank."""
        values = {rank: done.values for rank, done in self.done().items()}
        return {rank: each for rank, each in values.items() if isinstance(each, Payload)}

    def done(self) -> dict[int, Done]:
        """Return the `Done` message of each rank that has sent it."""
        return {track.rank: track.done for track in self.transcript if track.done is not None}

    def value(self, done: Done) -> Any:
        """Unpickle and return the values that a rank has sent with its `Done`; None without values.

        If the task has fetched a single name, return only that name's value.
        """
        if not isinstance(done.values, Payload):
            return None
        values = localize(unpickle(open_payload(done.values), self.members.namespace), done.values)
        is_one = len(self.task.fetch) == 1 and not self.task.keeps
        return values[self.task.fetch[0]] if is_one else values
