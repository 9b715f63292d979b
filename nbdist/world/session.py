"""The engine of a world: sends tasks to the workers, waits for results, and heals the group.

Runs in the notebook's process, on the thread that made the world, but `ask_from_thread` and
`consult` on any thread.  `nbdist.world.lifecycle` starts and ends the workers, `nbdist.world.inbox`
handles the messages of their agent, and `nbdist.world.recovery` follows a task and heals the group.
"""

from __future__ import annotations

import sys
import time
import uuid
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

from nbdist import errors, topology
from nbdist.config import Patience, read_restarts
from nbdist.errors import AgentLost, BadRanks, UsageError, WorldNotStarted
from nbdist.output.events import TO_BE_RESTARTED
from nbdist.topology import RankSelection
from nbdist.values.payload import Payload, Segment, open_payload, pack_frames
from nbdist.wire.control import TypingQuestion
from nbdist.wire.messages import (
    Consult,
    Grow,
    Heal,
    Kill,
    ReleaseRankValues,
    Reply,
    RequestBody,
    Scale,
    SendInput,
)
from nbdist.wire.status import WorkerStatus
from nbdist.wire.work import Attempt, CellCode, InputReply, OpCall, Task, Work
from nbdist.words import format_ranks, name_ranks
from nbdist.world import inbox, lifecycle, recovery
from nbdist.world.agents import module_of
from nbdist.world.name_table import list_names
from nbdist.world.result import CellResult
from nbdist.world.sent_objects import Parcel
from nbdist.world.spec import parse_size, scaled
from nbdist.world.states import Renumbering, WorldState
from nbdist.world.stop import StopEvent
from nbdist.world.task_history import ANY
from nbdist.world.task_run import TaskRun
from nbdist.world.workers import LATE_KEPT, KeptVariables, Workers

RANK_STATUS_TIMEOUT = 10.0  # seconds for an answer about ranks; longer than a head takes
RANKS_KILLED_TIMEOUT = 60.0  # seconds for killed ranks to end; long, as the machine may be busy


class Session(Workers):
    """The workers of a world with operations on them: run tasks, restart, replace, scale, ask."""

    # Functions whose first argument is a `Workers`, as methods.
    follow = recovery.follow
    receive = inbox.receive
    receive_waiting = inbox.receive_waiting
    handle_agent_loss = inbox.handle_agent_loss
    starting = lifecycle.starting
    starting_texts = lifecycle.starting_texts
    start = lifecycle.start
    start_anew = lifecycle.start_anew
    shutdown = lifecycle.shutdown
    attach = lifecycle.attach

    def __repr__(self) -> str:
        running = "".join(f" {run}" for run in self.runs if run.unfinished)
        return f"<Session {self.size} ranks, {self.state.value}{running}>"

    def select_ranks(
        self, ranks: RankSelection | None = None, rank: int | None = None
    ) -> tuple[int, ...]:
        """Return the ranks that the arguments select, all without both: `topology.select_ranks`."""
        if ranks is None and rank is None:
            return self.everyone
        # Before the start the size is not known if other machines determine it.  So a list of
        # numbers is not compared with the size.
        is_final = self.state.has_workers or isinstance(ranks, str)
        return topology.select_ranks(ranks, rank, self.size if is_final else sys.maxsize)

    def task(
        self,
        work: Work | str = "",
        *,
        ranks: RankSelection | None = None,
        rank: int | None = None,
        **fields: Any,
    ) -> Task:
        """Return a new task with these `fields`, by default on all ranks.

        If `work` is a text, the text is a cell's source.  Raises as `select_ranks`.
        """
        work = CellCode(work) if isinstance(work, str) else work
        return Task(uuid.uuid4().hex, self.select_ranks(ranks, rank), work, **fields)

    def submit(
        self,
        task: Task,
        patience: Patience | None = None,
        shipped: Mapping[int, Parcel] | None = None,
    ) -> TaskRun:
        """Send a task to its ranks, after healing a broken group; do not wait for the task's end.

        Other ranks may run another task meanwhile.  `shipped` has by rank the names and objects
        that the task brings to the rank.  If the task cannot run, the task is not sent, and an
        error says why, such as WorldNotStarted, WorldBusy, WorkerDied, WorldBroken, AgentLost or
        CodeNotSent.
        """
        self.receive_waiting()
        self.wait_until_free(task.ranks)
        if damage := self.wait_for_stop(task.ranks):
            warnings.warn(f"The task before was stopped late. {damage}", stacklevel=2)
        before = self.everyone
        if self.is_idle:
            self.heal()
        self.check_ready(task.ranks)
        if self.code is not None:
            for _ in self.code.send_changes(self.link.calling):
                pass
        return self.send(self.with_current_ranks(task, before), patience, shipped)

    def with_current_ranks(self, task: Task, before: Sequence[int]) -> Task:
        """Return the task for the present size of the world, which healing may have changed.

        A task on the ranks `before`, which were all ranks, becomes a task on all present ranks.
        Raises BadRanks for another task that has a rank which does not exist.
        """
        if task.ranks == before:
            return replace(task, ranks=self.everyone)
        if missing := [rank for rank in task.ranks if rank >= self.size]:
            raise BadRanks(format_ranks(task.ranks), self.size, f"there is no rank {missing[0]}")
        return task

    def count_stop(self, task: Task) -> bool:
        """Count a Stop that came during a task, and wake `follow`; for a signal handler.

        Returns False if the handler has to raise KeyboardInterrupt instead: `task` was not sent
        yet, another was sent since it ended, or `StopState.is_interruptible` is True.
        """
        running = self.find_run(task.id)
        if running is None or running.stop.is_interruptible:
            return False
        running.stop.presses += 1
        if self.link_or_none is not None:
            self.link_or_none.wake()
        return True

    def reply(self, running: TaskRun, answers: Mapping[int, str | None]) -> None:
        """Send each rank its answer to its prompt; None means the end of input (EOF)."""
        for rank, text in answers.items():
            self.link.send(SendInput(rank, InputReply(running.prompts[rank].number, text)))
            running.prompts.answered(rank, time.monotonic())

    def attempts(self, task: Task, max_restarts: int) -> Iterator[Task]:
        """Yield copies of a task: for the first attempt, and for at most `max_restarts` restarts.

        The caller submits and follows each copy before the next, and takes a further copy only if
        the attempt before has a `TaskRun.restart_text`.
        """
        for number in range(read_restarts(max_restarts) + 1):
            yield replace(task, id=uuid.uuid4().hex, attempt=Attempt(number, max_restarts))

    def run(self, task: Task) -> CellResult[Any]:
        """Send a task and return its result; raise its error, or KeyboardInterrupt after Stop."""
        return self.finish(self.submit(task))

    def finish(self, running: TaskRun) -> CellResult[Any]:
        """Wait for a task that has been sent; return its result and raise as `run`."""
        self.wait(running)
        self.check(running)
        return running.result()

    def wait(self, running: TaskRun) -> None:
        """Follow a task until `follow` ends, and ignore the task's output."""
        for _ in self.follow(running):
            pass

    def check(self, running: TaskRun) -> None:
        """Raise the error of a followed task, if it has one, or KeyboardInterrupt after Stop."""
        if running.stop.was_pressed:
            recovery_text = recovery.late_stop_text(running)
            if recovery_text or running.damage:
                raise errors.Interrupted(running.task.ranks, recovery_text, running.damage)
            raise KeyboardInterrupt
        if error := running.error():
            self.mark_reported(running.recovered_ranks)
            raise error

    def interrupt(self) -> None:
        """Interrupt the ranks that run a task, as Stop does; do nothing if no rank runs a task."""
        for run in self.runs:
            recovery.interrupt(self, run)

    def stopped_task(self, ranks: Collection[int] | None = None) -> TaskRun | None:
        """Return a stopped task that `ranks` still run, or that has not been completed; or None.

        Without `ranks` the tasks of all ranks count.  So they do if the group is broken, because
        the group can only be healed once all ranks have ended their tasks.  A task that all its
        ranks have ended is returned whatever the `ranks`: `follow` still has to complete it, for
        example by healing the group.
        """
        if ranks is None or self.is_broken:
            ranks = self.everyone
        for run in self.known_runs:
            # A job has a caller that waits for the job's end, also after Stop.
            is_left = run.stop.is_stopping and not run.is_over and not run.is_job
            if is_left and not (run.unfinished and {*run.unfinished}.isdisjoint(ranks)):
                return run
        return None

    def wait_for_stop(self, ranks: Collection[int] | None = None) -> str:
        """Wait for ranks that were still in a stopped task when Stop returned control.

        Waits at most `stop.LATE_TIMEOUT` seconds for the ranks of `stopped_task(ranks)`.  Returns
        the task's `TaskRun.damage`, or "" if no task was stopped or if the damage was the same
        before.  Another Stop interrupts the ranks again, and raises KeyboardInterrupt.
        `TaskRun.pop_outputs` returns the newest outputs of the wait.
        """
        if (running := self.stopped_task(ranks)) is None:
            return ""
        reported_damage = running.damage
        before = running.stop.presses
        running.stop.handle(StopEvent.LATE_WAIT, time.monotonic())
        newest: deque[tuple[int, Any]] = deque(maxlen=LATE_KEPT)
        for outputs in self.follow(running):
            newest += outputs
        running.return_outputs(newest)
        if running.stop.presses > before:
            recovery.interrupt(self, running)
            raise KeyboardInterrupt
        return "" if running.damage == reported_damage else running.damage

    def keep_setup(
        self,
        key: str,
        task: Task,
        segment: Segment | None,
        packed: Payload | None = None,
        parcel: Parcel | None = None,
    ) -> None:
        """Keep a cell, which new workers on the cell's ranks will run too.

        `segment`, the shared memory with the cell's names, is closed once the cell is dropped.
        `packed` has the names and objects that each new worker gets, and `parcel` records them.
        """
        task = replace(task, forget={}, deleted={}, names={} if packed is None else {ANY: packed})
        self.setup.keep(key, task, segment, parcel)
        self.remember()

    def release_values(self, running: TaskRun) -> None:
        """Let ranks release the shared memory of a task's values, which this process has read."""
        payloads = running.payloads().items()
        self.release_lent_values(
            running.task, (rank for rank, payload in payloads if payload.segment)
        )

    def release_lent_values(self, task: Task, ranks: Iterable[int]) -> None:
        """Let ranks release the values that they hold for a task, returned or not bound yet."""
        if lent := tuple(ranks):
            self.link.send(ReleaseRankValues(task.id, lent))

    def check_ready(self, ranks: Collection[int] | None = None) -> None:
        """Raise an error unless a task for `ranks`, by default all, can be sent now.

        The error says why the task cannot be sent, and names a remedy.
        """
        running = self.failed_runs[-1] if self.failed_runs else None
        ranks = self.everyone if ranks is None or self.is_broken else ranks
        busy = next((r for r in self.runs if not {*r.unfinished}.isdisjoint(ranks)), None)
        if self.is_whole and busy is None:
            return
        if self.state in (WorldState.STOPPED, WorldState.STARTING, WorldState.STOPPING):
            raise WorldNotStarted("The cell")
        if self.lost is not None:
            raise self.lost
        if busy is not None:
            if busy.stop.is_stopping and not busy.is_job:
                raise busy.not_stopped
            raise errors.WorldBusy(busy.unfinished, busy.age)
        # After deaths, each task until the repair raises the same error with the present remedy.
        if running is not None and running.deaths:
            running.recovery_text = recovery.healing_text(self, running.deaths)
            if error := running.error():
                raise error
        dead = {rank: died for rank, died in self.dead.items() if not died.by_restart}
        raise recovery.death_error(self, dead) if dead else recovery.broken_error(self)

    def heal(self) -> None:
        """Repair a broken group as `on_failure` says; then let machines that have come join.

        Then binds the variables in `keep` of a `replace` that has failed.  Raises as `run` if the
        new worker cannot unpickle them, and does not try again.
        """
        recovery.heal(self)
        if self.joined and self.is_whole and self.is_idle:
            self.joined = {}
            recovery.regroup(self, Grow())
        if self.kept.frames and self.is_whole and self.is_idle:
            kept, self.kept = self.kept, KeptVariables()
            self.bind_kept(kept.frames)

    def restart(
        self, n: int | str | None = None, keep: Sequence[str] = (), **changes: Any
    ) -> tuple[str, ...]:
        """End all workers and start new ones, with the variables in `keep`; see `World.restart`.

        Returns the names of the variables that were kept.  If the start fails or is interrupted,
        the old options are valid again, and the variables are kept for the next restart.  Raises
        the error of a set-up cell that failed in the new workers.
        """
        kept = self.kept
        if self.state.has_workers or not kept.names:
            kept = KeptVariables(tuple(keep), self.fetch_kept(keep, self.everyone))
        elif lacking := [name for name in keep if name not in kept.names]:
            have = list_names(kept.names)
            raise UsageError(f"`--keep`: there is no `{lacking[0]}`; kept from before: {have}.")
        # Configured again, since the notebook's environment, path or folder may have changed.
        before, size = self.config, self.size
        after = before.with_changes(n, **changes)
        if is_moved := after.agent_options != before.agent_options:
            module_of(after.launcher_name)  # raises UsageError before any worker is ended
        self.configure(after, name=self.spec.name)
        try:
            self.start_anew(agent_too=is_moved)
        except BaseException:  # also KeyboardInterrupt by Stop
            if not self.state.has_workers:
                self.kept = kept
                self.configure(before, name=self.spec.name)
            raise
        # Only now, since other machines determine the size during the start.
        self.setup.renumber(Renumbering(size, self.size, {}))
        try:
            error = recovery.replay(self, self.everyone)
        except BaseException:  # also KeyboardInterrupt by Stop
            if self.is_whole:
                self.bind_kept(kept.frames)
            raise
        self.bind_kept(kept.frames)
        if error:
            raise error
        return kept.names

    def replace(self, ranks: RankSelection, keep: Sequence[str] = ()) -> None:
        """Restart ranks in place, with the variables in `keep`; see `World.replace`.

        If the group cannot be formed, `heal` binds the variables once it has formed the group.
        """
        self.receive_waiting()
        ranks = self.select_ranks(ranks)
        others = set(self.unfinished) - set(ranks)
        if others or not (self.is_whole or self.is_broken):
            self.check_ready()
        kept, ending = self.kept, {*ranks}  # `kept` has variables if an earlier try has failed
        if keep:
            kept = KeptVariables(tuple(keep), self.fetch_kept(keep, ranks))
        recovery.record_changes(self, self.everyone)
        self.kept = kept
        self.ask(Kill((*ending,), TO_BE_RESTARTED))
        deadline = time.monotonic() + RANKS_KILLED_TIMEOUT
        while self.lost is None and (alive := ending - self.dead.keys()):
            if time.monotonic() > deadline:
                seconds = f"{RANKS_KILLED_TIMEOUT:.0f} s"
                self.problem = f"{name_ranks(alive)} did not end within {seconds}"
                raise recovery.broken_error(self)
            self.receive(max(0.0, deadline - time.monotonic()))
        if self.is_broken:
            recovery.regroup(self, Heal())
        if self.lost is not None:
            raise self.lost
        if self.is_broken:
            raise recovery.broken_error(self)
        self.heal()

    def scale(self, n: int | str | None = None, ranks: RankSelection | None = None) -> None:
        """Change the number of workers to `n`, or keep only these ranks; see `World.scale`."""
        self.receive_waiting()
        self.wait_until_free(self.everyone)
        if self.is_idle:
            self.heal()
        if not self.state.has_workers:
            raise self.lost or WorldNotStarted("`%dist_scale`")
        self.check_ready()
        before = self.size
        if ranks is not None:
            keep = tuple(sorted(self.select_ranks(ranks)))
            size = len(keep)
        elif n is not None:
            size = parse_size(n, before)
            keep = self.everyone[:size]
        else:
            forms = "a number of workers (4, +2) or the ranks to keep (`-r 0,2-3`)"
            raise UsageError(f"`%dist_scale` takes {forms}.")
        if size == before:
            return
        spec, self.warning = scaled(self.spec, size, keep=keep)
        _, why = recovery.regroup(self, Scale(spec, keep))
        if self.lost is not None:
            raise self.lost
        if self.is_elsewhere:  # `apply_healed` leaves a head's config alone: machines come and go
            self.config = self.config.with_size(self.size)
        if self.is_broken:
            raise recovery.broken_error(self)
        if why:
            raise errors.ScaleError(before, size, why)

    def fetch_kept(self, names: Sequence[str], ranks: Iterable[int]) -> dict[int, list[bytes]]:
        """Return the pickled variables of each rank, for the workers that will replace these ranks.

        Raises as `run`; UsageError instead of a rank's error if a variable is on no rank.
        """
        if not names:
            return {}
        keep = OpCall("values.keep", {"names": tuple(names)})
        running = self.submit(self.task(keep, ranks=tuple(ranks)))
        self.wait(running)
        lacking = [name for name in names if not self.names.ranks_with(name)]
        if running.transcript.errors and lacking:
            raise UsageError(f"`--keep`: no rank has `{lacking[0]}`; all workers are as they were.")
        self.check(running)
        kept = {
            rank: [bytes(memoryview(frame)) for frame in open_payload(payload)]
            for rank, payload in running.result().by_rank.items()
        }
        self.release_lent_values(running.task, running.task.ranks)
        return kept

    def bind_kept(self, kept: Mapping[int, list[bytes]]) -> None:
        """Bind variables that `fetch_kept` has returned; skip those of ranks that do not exist."""
        for rank, frames in kept.items():
            if rank >= self.size:
                continue
            payload, segment = pack_frames(frames)
            with closing(segment) if segment else nullcontext():
                task = self.task(OpCall("values.give_back", {"packed": payload}), ranks=(rank,))
                running = self.submit(task)
                self.finish(running)
                self.names.objects.record_gained(rank, running.gained(rank))

    # --- the agent ------------------------------------------------------------------------

    def ask(self, request: RequestBody) -> Any:
        """Ask the agent about its ranks, also while they are busy, and return the reply.

        Returns an empty tuple if there are no workers or if the agent has ended.
        """
        self.receive_waiting()
        if not self.state.has_workers:
            return ()
        try:
            return self._with_host_names(self.link.call(request))
        except AgentLost as lost:
            self.handle_agent_loss(lost)
            return ()

    def ask_from_thread(self, request: RequestBody) -> Any:
        """Ask as `ask`, but from any thread, so without handling earlier messages of the agent.

        Returns an empty tuple as `ask` does, and if no answer comes within `RANK_STATUS_TIMEOUT`.
        """
        future = self._send_request(request)
        try:
            return (
                () if future is None else self._with_host_names(future.result(RANK_STATUS_TIMEOUT))
            )
        except (AgentLost, TimeoutError):
            return ()

    def _with_host_names(self, reply: Reply) -> Any:
        """Return the reply; rows of a status get the host names of `machines`, as far as known."""
        match reply:
            case (WorkerStatus(), *_):
                name = self.machines.name
                return tuple(replace(row, host=name(row.rank) or row.host) for row in reply)
        return reply

    def consult(self, question: TypingQuestion, ranks: Iterable[int]) -> Future[Reply] | None:
        """Ask an idle rank of `ranks` a question about names; any thread may call this.

        Returns a future, or None if there are no workers or the agent has ended.  The future's
        result is None if no rank has answered in time; wait for the future with a timeout.
        """
        return self._send_request(Consult(tuple(ranks), question))

    def _send_request(self, request: RequestBody) -> Future[Reply] | None:
        if not self.state.has_workers or (link := self.link_or_none) is None or not link.is_up:
            return None
        return link.ask(request)
