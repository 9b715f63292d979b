"""A task in progress: its output, the facts about its ranks, how it ended, and the result.

Runs in the notebook's process and does no I/O.  The agent supervises the task
(`nbdist.agent.supervisor`), and `nbdist.world.inbox` passes the agent's messages to this module.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from nbdist.config import CONTROL_TIMEOUT, Patience
from nbdist.errors import AgentLost
from nbdist.output import events
from nbdist.output.events import Died, Done, Failure, Output
from nbdist.output.transcript import Transcript
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
from nbdist.wire.work import InputReply, Task, task_from
from nbdist.world import hangs
from nbdist.world.ending import Ending
from nbdist.world.name_table import Sent
from nbdist.world.rank_reports import RankReports
from nbdist.world.releases import Releases
from nbdist.world.result import CellResult
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


@dataclass(frozen=True, slots=True)
class TaskClock:
    """When a task was sent: in monotonic seconds, and in nanoseconds since 1970.

    If another notebook has sent the task, `ended` has by rank the monotonic seconds when the rank
    finished.
    """

    started: float = field(default_factory=time.monotonic)
    started_ns: int = field(default_factory=time.time_ns)
    ended: Mapping[int, float] = field(default_factory=dict)

    def seconds_until(self, time_ns: int) -> float:
        """Return the seconds from sending the task to a time; `time_ns` counts from 1970."""
        return max(0.0, (time_ns - self.started_ns) / 1e9)


class TaskRun:
    """A task that was sent to its ranks: their output, where they are, and how the task ended.

    `transcript` has the output of the ranks, and their errors.  `reports` says where the ranks are,
    `releases` which of them were released from collectives, `stop` what Stop does to the task, and
    `ending` how the task ended.  `nbdist.world.wait_texts` and `nbdist.world.task_error` write the
    texts and the error about a task.
    """

    def __init__(
        self,
        task: Task,
        patience: Patience,
        members: Members,
        shipped: Mapping[int, Parcel] | None = None,
        clock: TaskClock | None = None,
    ) -> None:
        """Start the clock of a task that is being sent.

        `shipped` has by rank the names and objects that the task brings.
        """
        self.task = task
        self.patience = patience
        self.members = members
        self.shipped: Mapping[int, Parcel] = shipped or {}
        self.sent_at: int | None = None  # see `NameTable.record_sent`
        self.clock = clock or TaskClock()
        self.transcript = Transcript(task.ranks)
        self.transcript.start(self.clock.started)
        self.prompts = Prompts()
        self.stop = StopState(patience)
        self.reports = RankReports()
        self.releases = Releases(task, self.transcript)
        self.ending = Ending()
        self.is_over = False  # True once the work after the task, such as healing, is done
        self.shows_value = False  # whether a rank has displayed the value of the last line
        # Records the outcomes of a rank's items, and returns the rank's next items.  None if the
        # task is no `World.map`, or if another notebook has called `World.map`.
        self.answer_items: Callable[[int, events.ItemsWanted, float], InputReply] | None = None
        self._outputs: RankOutputs = []

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
        clock = TaskClock(sent.started, sent.started_ns, sent.ended)
        return cls(task_from(sent.run.task), patience, members, clock=clock)

    @property
    def rules(self) -> Rules:
        """The rules by which the agent supervises the task."""
        return self.members.rules(self.patience)

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The ranks that still run the task."""
        return tuple(track.rank for track in self.transcript if track.finished is None)

    @property
    def age(self) -> float:
        """Seconds since the task was sent, without the time in which a rank waited for input."""
        now = time.monotonic()
        return now - self.clock.started - self.prompts.seconds(now)

    # --- events ---------------------------------------------------------------------------

    def record_interrupt(self, now: float) -> None:
        """Record that the ranks are interrupted: store whether a network is stalled, drop prompts.

        An interrupted rank gets no input for its prompt.
        """
        self.stop.was_stalled = self.reports.is_stalled
        for rank in self.prompts.ranks:
            self.prompts.drop(rank, now)

    def handle_message(
        self, message: Located | Aborted | Decided | UnresponsiveHosts | UsageReport, now: float
    ) -> None:
        """Update this task from a message of the agent; ignore what is about other tasks."""
        match message:
            case Aborted(places):
                self.releases.record_aborted(places)
                self.reports.present_places = {}
            case Decided(task_id):
                if task_id == self.task.id:
                    self._handle_decision(message, now)
            case Located() | UnresponsiveHosts() | UsageReport():
                self.reports.handle(message, self.task.ranks)

    def _handle_decision(self, decided: Decided, now: float) -> None:
        """Record a decision of the agent: to abort collectives, stop the task, or kill ranks."""
        match decided.decision:
            case Decision.ABORT:
                self.releases.record_decision(decided, self.members.size)
                self.reports.present_places = {}
            case Decision.TIME_OUT if not self.stop.is_stopping:  # Stop may have come first
                where = hangs.waits_text(decided.waiting, self.task.source)
                self.ending = replace(self.ending, timed_out=where)
                self.stop.handle(StopEvent.TIMED_OUT, now)
                self.record_interrupt(now)
            case Decision.END_UNWAKEABLE:
                self.reports.unwoken = decided.waiting

    def handle_agent_loss(self, lost: AgentLost) -> None:
        """Record that the agent has ended, and all unfinished ranks with it."""
        self.ending = replace(self.ending, lost=lost)
        for rank in self.unfinished:
            self.receive(rank, Died(-signal.SIGKILL, time.time_ns()))

    def receive(self, rank: int, output: Output) -> None:
        """Add a rank's output to the transcript, keep it for `pop_outputs`, and update the prompts.

        If the output is an error that the rank's release has caused, a short error takes its place.
        """
        output = self.releases.shorten(rank, output, is_stopping=self.stop.is_stopping)
        now = time.monotonic()
        match output:
            case Done() | Died():
                if self.transcript[rank].finished is None:
                    now = self.clock.ended.get(rank, now)
                self.prompts.drop(rank, now)
            case events.InputRequest():
                self.prompts.receive(rank, output, now)
            case events.Display(is_result=True):
                self.shows_value = True
        self.transcript.receive(rank, output, now)
        if isinstance(output, Failure | Died):
            self.releases.update_reasons()
        self._outputs.append((rank, output))

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
        done = self.transcript.done.get(rank)
        return () if done is None else done.gained

    @property
    def made(self) -> frozenset[str]:
        """The names that the task has bound on any rank, without the names that it imported."""
        return frozenset().union(*(done.made for done in self.transcript.done.values()))

    def result(self) -> CellResult[Any]:
        """Return the result so far, with the values of the ranks that have succeeded.

        If `Task.keeps` is True, the ranks may have kept their values.  Then each value in the
        result is None, and `value` unpickles the values that ranks have sent.
        """
        transcript, hosts = self.transcript, self.members.machines.by_rank
        done = {rank: each for rank, each in transcript.done.items() if each.status == "ok"}
        if self.task.brings_small:
            values = dict[int, Any]()
            for rank, each in done.items():
                # The user has not asked for the last value: failing to read it is no error.
                with suppress(Exception):
                    values |= {rank: self.value(each)} if each.kept is None else {}
        else:
            values = {r: None if self.task.keeps else self.value(each) for r, each in done.items()}
        seconds = transcript.elapsed(time.monotonic())
        return CellResult(self.task, transcript, seconds, transcript.errors, values, hosts)

    def value(self, done: Done) -> Any:
        """Unpickle and return the values that a rank has sent with its `Done`; None without values.

        If the task has fetched a single name, return only that name's value.
        """
        if not isinstance(done.values, Payload):
            return None
        values = localize(unpickle(open_payload(done.values), self.members.namespace), done.values)
        is_one = len(self.task.fetch) == 1 and not self.task.keeps
        return values[self.task.fetch[0]] if is_one else values
