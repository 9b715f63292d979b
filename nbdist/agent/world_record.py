"""The record of a world: its facts, its tasks, and the outputs that no notebook has acknowledged.

Runs in the process that serves the notebook, which is the agent of a world on one machine, or the
head of a world on several.  That process owns the facts about the world (`WorldFacts`): it passes
each start and each change of the world to the record, which makes the notebook's answer.
`NotebookLink` passes the record each message from or to the notebook.  The next notebook that
attaches gets the facts and the outputs, and `nbdist mcp` gets the last task and the last task that
failed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from nbdist.agent.group_formation import Formation
from nbdist.agent.outbox import ENOUGH_IN_A_BATCH, TEXT_KEPT, Backlog
from nbdist.output.events import Died, Done, Failure, Output, RankError, size_of
from nbdist.values.payload import refs_in
from nbdist.wire import messages
from nbdist.wire.messages import Outputs, RankOutput
from nbdist.wire.places import RankPosition, Stack
from nbdist.wire.queries import Inspection, ReportedFailure, TaskSummary
from nbdist.wire.work import task_from
from nbdist.wire.world_facts import Renumbering, WorldFacts, died_again_text

TEXT_OF_ALL, TEXT_AT_LEAST = 256 << 20, 1 << 16
"""How many characters of a task's text are kept, to replay them to the next notebook.

Each rank has an equal share of `TEXT_OF_ALL`, but at least `TEXT_AT_LEAST` and at most `TEXT_KEPT`
characters."""

Changing = messages.StartWorld | messages.StopWorld | messages.Heal | messages.Scale | messages.Grow
"""The calls after which the world may have other workers."""


class WorldRecord:
    """The facts of a world, its latest tasks, and outputs for the next notebook that attaches.

    Tasks of different ranks can run side by side.  Outputs are kept only if the world has the
    `detach` option.  Those of a finished task are dropped when the notebook has acknowledged all
    outputs, or when the next task begins.
    """

    def __init__(self) -> None:
        self.facts: WorldFacts | None = None  # None before the first start has succeeded
        self.memory = messages.HandoverState()  # what the notebook leaves to the next notebook
        self.began = time.time()  # when the world or its last task was started
        self.pending_calls: dict[int, Changing] = {}  # calls without an answer, by number
        # By rank: the deaths after which `UnattendedHealing` has replaced ranks, until a notebook
        # itself asks for a change of the workers, and runs the set-up cells on the new workers.
        self._replaced: dict[int, Died] = {}
        self._deaths: dict[int, Died] = {}  # by rank: the last death since the last start
        self._next_call = 1  # the number of the notebook's next call
        # By rank: the variables that tasks have bound, each with its import path if it was imported
        # (`Done.imported`), and otherwise with None.
        self._bound: dict[int, dict[str, str | None]] = {}
        self._count = 0  # how many tasks have begun since the world was started
        # By id: the tasks in progress, and finished tasks whose outputs are not dropped yet.
        self._tasks: dict[str, _TaskRecord] = {}
        self._other_outputs = Backlog()  # outputs that belong to none of `_tasks`
        # By task id: the ranks that must keep shared memory with returned values, because no
        # notebook has released the values yet.
        self._lent: dict[str, set[int]] = {}
        self._last: _TaskRecord | None = None
        self._failed: _TaskRecord | None = None  # the last failed task other than `_last`

    def __repr__(self) -> str:
        return f"<WorldRecord of {sorted(self.ranks)}, {len(self._tasks)} tasks>"

    @property
    def ranks(self) -> Collection[int]:
        """The ranks of the world; empty while the world has no workers."""
        return self.facts.pids.keys() if self.facts else ()

    @property
    def running_ranks(self) -> set[int]:
        """The ranks that run a task."""
        return set[int]().union(*(task.running for task in self._tasks.values()))

    @property
    def running_task(self) -> messages.RunTask | None:
        """The newest task in progress; None if no task is in progress."""
        return next((t.run for t in reversed(self._tasks.values()) if t.running), None)

    @property
    def detach(self) -> bool:
        """Whether the world keeps running after its notebook has ended."""
        return self.memory.config.detach

    @property
    def heals(self) -> bool:
        """Whether dead ranks are replaced by new workers (`--on-failure heal`).

        The rules of the last task decide this; before the first task the result is False.
        """
        return self._last is not None and self._last.run.rules.heals

    @property
    def has_world(self) -> bool:
        """Whether the world has workers, or is starting them."""
        starts = any(isinstance(each, messages.StartWorld) for each in self.pending_calls.values())
        return bool(self.ranks) or starts

    @property
    def state(self) -> str:
        """The state of the world: "changing", "no workers", "busy", "ready" or "broken"."""
        if self.pending_calls:
            return "changing"
        if self.facts is None or not self.facts.pids:
            return "no workers"
        if self.running_ranks:
            return "busy"
        return "ready" if self.facts.is_whole and not self.facts.dead else "broken"

    def record_received(self, message: messages.Down) -> None:
        """Update the record from a message that the notebook or this process itself has sent."""
        match message:
            case messages.HandoverState():
                self.memory = message
            case messages.AgentRequest(number, request):
                self._next_call = max(self._next_call, number + 1)
                if isinstance(request, Changing):
                    self.pending_calls[number] = request
                    if number != messages.OWN_REQUEST:
                        self._replaced = {}
                if isinstance(request, messages.Grow) and self.facts:
                    self.facts = replace(self.facts, joined=())
            case messages.RunTask():
                self._begin_task(message)
            case messages.AbortRanks(ranks):
                for task in self._tasks.values():
                    task.abort(ranks)
            case messages.SendInput(rank, reply):
                for backlog in self._backlogs:
                    backlog.discard_input_request(rank, reply.number)
            case messages.ReleaseRankValues(task_id, ranks):
                self._lent.get(task_id, set()).difference_update(ranks)

    def record_sent(self, message: messages.Up) -> None:
        """Update the record from a message to the notebook, even if there is no notebook now."""
        match message:
            case messages.AgentReply(number, reply) if number in self.pending_calls:
                request = self.pending_calls.pop(number)
                if number == messages.OWN_REQUEST and isinstance(reply, messages.Healed):
                    self._replaced |= reply.replaced
                if isinstance(request, messages.StopWorld) or isinstance(
                    reply, messages.StartFailure
                ):
                    self._forget_world(WorldFacts(self.facts.spec) if self.facts else None)
            case Outputs(items):
                for item in items:
                    self._record_output(*item)
            case messages.Located(places) if places:
                for task in self._tasks.values():
                    task.places = places
            case messages.Decided(decision=messages.Decision.ABORT):
                self._record_broken_group()
            case messages.Aborted(places):
                self._record_broken_group()
                for task in self._tasks.values():
                    task.aborted |= {r: place for r, place in places.items() if r in task.run.ranks}
            case messages.NodeJoined(host) if self.facts and host not in self.facts.joined:
                self.facts = replace(self.facts, joined=(*self.facts.joined, host))

    def mark_all_acknowledged(self) -> None:
        """Record that the notebook has acknowledged all batches of outputs that were sent.

        The outputs of finished tasks need not be replayed any more, and are forgotten.
        """
        if self.detach:
            self._forget_finished()

    @property
    def tasks(self) -> Inspection:
        """The newest task, and the last task during which or after which a rank failed."""
        last, failed = self._last, self._last_failed
        return Inspection(
            last=last.summary() if last else None, failed=failed.summary() if failed else None
        )

    @property
    def _last_failed(self) -> _TaskRecord | None:
        return self._last if self._last and self._last.troubles else self._failed

    @property
    def _backlogs(self) -> list[Backlog]:
        return [*(task.backlog for task in self._tasks.values()), self._other_outputs]

    def _begin_task(self, run: messages.RunTask) -> None:
        for task in self._tasks.values():
            task.running.difference_update(run.ranks)
        self._forget_finished()
        self._failed, size = self._last_failed, len(self.ranks)
        dead = self.facts.dead.keys() if self.facts else ()
        text = min(TEXT_KEPT, max(TEXT_AT_LEAST, TEXT_OF_ALL // max(1, size)))
        self._last = _TaskRecord(run, size, {*run.ranks}.difference(dead))
        self._last.backlog = Backlog(text)
        self._tasks[run.id] = self._last
        self._count += 1
        self.began = time.time()

    def _forget_finished(self) -> None:
        """Forget the tasks that all ranks have finished, and outputs outside of tasks."""
        self._tasks = {name: task for name, task in self._tasks.items() if task.running}
        self._other_outputs = Backlog()

    def _record_output(self, rank: int, task_id: str, output: Output) -> None:
        # An output outside of a task belongs to the newest task that the rank has run.
        tasks = [t for t in self._tasks.values() if rank in t.run.ranks and task_id in ("", t.id)]
        task = tasks[-1] if tasks else None
        if isinstance(output, Failure | Died) and (failed := task or self._last):
            failed.fail(rank, task_id, output)
            if failed is not self._last and failed.troubles:
                self._failed = failed
        match output:
            case Done():
                if task is not None:
                    task.mark_finished(rank)
                self._record_done(rank, task_id, output)
            case Died():
                self._deaths[rank] = output
                for each in self._tasks.values():
                    each.mark_finished(rank)
                if self.facts:
                    self.facts = replace(self.facts, dead={**self.facts.dead, rank: output})
            case Failure() if output.connections:
                self._record_broken_group()
        if self.detach:
            (task.backlog if task else self._other_outputs).add(rank, task_id, output)

    def _record_done(self, rank: int, task_id: str, done: Done) -> None:
        bound = self._bound.setdefault(rank, {})
        for name in done.gone:
            bound.pop(name, None)
        bound.update((name, done.imported.get(name)) for name in done.bound)
        if refs_in(done.values):
            self._lent.setdefault(task_id, set()).add(rank)
        # Drop the tasks whose values are released on all ranks.
        self._lent = {task: ranks for task, ranks in self._lent.items() if ranks}

    def _record_broken_group(self) -> None:
        self.facts = self.facts and replace(self.facts, is_whole=False)

    def _forget_world(self, facts: WorldFacts | None) -> None:
        """Record that the world has new workers, or none; `facts` are its new facts.

        Forgets the variables of the earlier workers, and the outputs for the next notebook.
        """
        self.facts, self._bound = facts, {}
        self._tasks, self._other_outputs, self._count = {}, Backlog(), 0

    # --- starts and changes of the world ------------------------------------------------------

    def record_start(self, formed: Formation, hosts: Mapping[int, str] = {}) -> WorldFacts:
        """Record that all ranks were started; return the facts, which answer the `StartWorld`.

        `hosts` has the name of each rank's machine if the world has a head, and is empty otherwise.
        """
        facts = WorldFacts(formed.spec, formed.pids, formed.logs, hosts, formed.missing)
        # A worker may have died after it had joined the group, while others were still starting.
        # The notebook has got this death already, and handles it after this answer.
        deaths, self._deaths = self._deaths.items(), {}
        dead = {rank: died for rank, died in deaths if died.pid == formed.pids.get(rank)}
        self._forget_world(replace(facts, dead=dead))
        self.began = time.time()
        return facts

    def record_change(
        self, formed: Formation, hosts: Mapping[int, str] = {}, rejoin_hint: str = ""
    ) -> messages.Healed:
        """Record an attempt to form the group again; return the answer to the request for it.

        `hosts` has the name of each rank's machine if the world has a head.  `rejoin_hint` tells
        the user how lost machines can join again.  The deaths of ranks were recorded before, from
        their outputs.
        """
        assert self.facts is not None
        change, problem = formed.change, formed.problem
        # Forget the deaths of ranks that the world does not have, such as a new rank that could not
        # be added.  If ranks have got other numbers, also forget each death under a number that now
        # belongs to another process.
        dead = {
            rank: died
            for rank, died in self.facts.dead.items()
            if rank < change.after and (died.pid == formed.pids.get(rank) or not change.moved)
        }
        if again := [rank for rank, died in dead.items() if died.pid == formed.pids.get(rank)]:
            problem = died_again_text(again)
        self._bound = {
            rank: self._bound.get(old, {}) for rank, old in change.was.items() if rank not in dead
        }
        self.facts = replace(
            self.facts,
            spec=formed.spec,
            pids=formed.pids,
            logs=formed.logs,
            hosts=hosts,
            rejoin_hint=rejoin_hint,
            is_whole=not problem,
            problem=problem,
            dead=dead if problem else {},
        )
        return messages.Healed(self.facts, change, {} if problem else dead, formed.not_scaled)

    # --- for the next notebook ----------------------------------------------------------------

    @property
    def unattended_change(self) -> messages.Healed | None:
        """What `UnattendedHealing` has changed, for a notebook that attaches; None if nothing.

        Changes before the last request of a notebook to change the world (`Changing`) are left out.
        """
        if self.facts is None or not self._replaced:
            return None
        return messages.Healed(self.facts, Renumbering.none(len(self.facts.pids)), self._replaced)

    def attached(self, since: float) -> messages.Attached:
        """Return the world and its tasks, without outputs, for a notebook that attaches.

        `since` is the wall-clock time at which the last notebook left the world.  The caller must
        make sure that the world has been started.
        """
        assert self.facts is not None
        tasks = tuple(task.attached for task in self._tasks.values())
        forgotten, call = max(0, self._count - len(tasks)), self._next_call
        # If ranks were replaced meanwhile, the notebook must ask for healing before its first cell:
        # it then runs the set-up cells on these ranks.
        facts = replace(self.facts, is_whole=self.facts.is_whole and not self._replaced)
        return messages.Attached(*(facts, self.memory, self._bound, tasks, call, forgotten, since))

    def replay_batches(self) -> list[Outputs]:
        """Return the recorded outputs in batches, for a notebook that attaches."""
        batches: list[list[RankOutput]] = [[]]
        size = 0
        for item in (item for backlog in self._backlogs for item in backlog.items):
            if size > ENOUGH_IN_A_BATCH:
                batches.append([])
                size = 0
            batches[-1].append(item)
            size += size_of(item[2])
        return [Outputs(tuple(batch)) for batch in batches if batch]

    def pop_unreleased_values(self) -> list[messages.ReleaseRankValues]:
        """Return messages that make workers release returned values that no notebook will read.

        Called when the notebook that got the values has exited without releasing them.  Values of
        tasks whose outputs will be replayed stay.  A later call does not return the same messages.
        """
        finished = [task for task in self._lent if task not in self._tasks]
        return [messages.ReleaseRankValues(task, tuple(self._lent.pop(task))) for task in finished]


# --- tasks ----------------------------------------------------------------------------------------

MAX_RECORD_LINES, MAX_RECORD_LINE_LENGTH, MAX_RECORD_MESSAGE_LENGTH = 60, 400, 2000
WITH_LINES, MAX_RANK_FAILURES = 8, 256
"""For how many ranks of a task errors are kept with tracebacks, and for how many at all.

The ranks that fail first are kept, because one of them has probably caused the other failures."""


@dataclass(slots=True)
class _TaskRecord:
    """The record of one task: the task as it was sent, and the outputs and failures of its ranks.

    `size` is the number of ranks of the world, and `running` has the ranks that have not finished
    the task.  A notebook that attaches gets `backlog`, the outputs; `nbdist mcp` gets `troubles`,
    the failures.
    """

    run: messages.RunTask
    size: int
    running: set[int]
    began: float = field(default_factory=time.monotonic)
    began_ns: int = field(default_factory=time.time_ns)
    ended: dict[int, float] = field(default_factory=dict)  # by rank, in monotonic seconds
    backlog: Backlog = field(default_factory=Backlog)
    # Where ranks were when they were last located.
    places: Mapping[int, RankPosition] = field(default_factory=dict)
    # Where ranks waited whose collectives were then aborted.
    aborted: dict[int, RankPosition] = field(default_factory=dict)
    troubles: dict[int, ReportedFailure] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The id of the task."""
        return self.run.id

    @property
    def attached(self) -> messages.AttachedTask:
        """The task as a notebook that attaches gets it."""
        return messages.AttachedTask(self.run, self.began, self.began_ns, {**self.ended})

    def mark_finished(self, rank: int) -> None:
        """Record that a rank finishes the task now; do nothing if it is not running the task."""
        if rank in self.running:
            self.running.discard(rank)
            self.ended[rank] = time.monotonic()

    def abort(self, ranks: tuple[int, ...]) -> None:
        """Record where `ranks` wait in collectives, because these are being aborted now."""
        own = (rank for rank in ranks if rank in self.run.ranks)
        places = {rank: self.places.get(rank, RankPosition()) for rank in own}
        self.aborted.update((rank, place) for rank, place in places.items() if place.operation)

    def fail(self, rank: int, task_id: str, error: Failure | Died) -> None:
        """Record that a rank has failed in this task, or has died while idle after this task.

        `task_id` is "" for an idle rank; a failure in another task is ignored.  Only the first
        failure of each rank is recorded, and failures of at most `MAX_RANK_FAILURES` ranks.
        """
        if task_id in ("", self.run.id) and len(self.troubles) < MAX_RANK_FAILURES:
            kept = shortened(error, has_lines=len(self.troubles) < WITH_LINES)
            self.troubles.setdefault(rank, ReportedFailure(rank, kept, is_idle=not task_id))

    def summary(self) -> TaskSummary:
        """Return the summary that `nbdist mcp` gets."""
        task = task_from(self.run.task)
        return TaskSummary(
            title=task.title[:MAX_RECORD_LINE_LENGTH],
            cell=task.execution_count,
            ranks=self.run.ranks,
            size=self.size,
            began_ns=self.began_ns,
            troubles=tuple(self.troubles.values()),
            places=_as_stacks(self.places),
            aborted=_as_stacks(self.aborted),
        )


def _as_stacks(places: Mapping[int, RankPosition]) -> tuple[Stack, ...]:
    return tuple(Stack(rank, 0, "busy", place) for rank, place in places.items())


def shortened(error: RankError, *, has_lines: bool) -> RankError:
    """Return a copy of an error whose texts are cut to the limits of a record.

    With `has_lines=False` the copy has no traceback and no last lines.
    """
    if isinstance(error, Died):
        return error._replace(last_lines=_cut(error.last_lines) if has_lines else ())
    lines = [line for frame in error.traceback for line in frame.splitlines()]
    return error._replace(
        message=error.message[:MAX_RECORD_MESSAGE_LENGTH],
        traceback=_cut([*lines[-MAX_RECORD_LINES:], *error.account]) if has_lines else (),
        kinds=(),
        account=(),
    )


def _cut(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(line[:MAX_RECORD_LINE_LENGTH] for line in lines)
