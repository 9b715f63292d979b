"""The engine of a world: a task from `submit` to its end, on workers that it keeps whole.

In the notebook's process, on the thread that made the world; `nbdist.world.recovery` is below it.
"""

from __future__ import annotations

import operator
import sys
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

from nbdist import errors, topology
from nbdist.config import Patience, read_restarts
from nbdist.errors import AgentLost, BadRanks, UsageError, WorldNotStarted
from nbdist.values.payload import Payload, Segment, open_payload, pack_frames
from nbdist.wire.control import Question
from nbdist.wire.messages import (
    Consult,
    Grow,
    Heal,
    Kill,
    ReleaseValues,
    Reply,
    Request,
    Scale,
    SendInput,
)
from nbdist.wire.views import WorkerStatus
from nbdist.wire.work import Attempt, Call, InputReply, Source, Task, Work
from nbdist.words import format_ranks
from nbdist.world import recovery
from nbdist.world.agents import module_of
from nbdist.world.past import ANY
from nbdist.world.result import CellResult
from nbdist.world.running import TaskRun
from nbdist.world.sent_objects import Parcel
from nbdist.world.spec import parse_size, scaled
from nbdist.world.states import Renumbering, State
from nbdist.world.workers import Workers

LOOK_TIMEOUT = 10.0
KILL_TIMEOUT = 60.0  # a killed process ends soon, but its agent may get no processor
LATE_TIMEOUT = 30.0  # seconds that the next task waits for ranks that have not left a stopped one

Kept = dict[int, list[bytes]]  # by rank, the frames of a pickle of what outlives its worker


class Session(Workers):
    """What `World` and the notebook work with: tasks, and the group that they run in."""

    def __repr__(self) -> str:
        running = f" {self.running}" if self.unfinished else ""
        return f"<Session {self.size} ranks, {self.state.value}{running}>"

    def task(
        self, work: Work | str = "", *, ranks: Sequence[int] | None = None, **fields: Any
    ) -> Task:
        """Make a task with such `fields`, on all ranks by default; a text is a cell's source."""
        # Before the start it is not known yet how many there will be.
        most = self.size if self.state.has_workers else sys.maxsize
        if hasattr(ranks, "__index__") and not getattr(ranks, "shape", ()):
            raise UsageError(f"`ranks={ranks}`: give a list of ranks, such as `ranks=[{ranks}]`.")
        for rank in () if ranks is None else ranks:
            if not (hasattr(rank, "__index__") and 0 <= rank < most):  # numpy's too
                raise BadRanks(str(ranks), self.size, f"{rank!r} is none of them, by its number")
        on = self.everyone if ranks is None else tuple(map(operator.index, ranks))
        work = Source(work) if isinstance(work, str) else work
        return Task(uuid.uuid4().hex, on, work, **fields)

    def submit(
        self,
        task: Task,
        patience: Patience | None = None,
        shipped: Mapping[int, Parcel] | None = None,
    ) -> TaskRun:
        """Send a task to all of its ranks at once, which are made ready first.

        `shipped` is by rank what its names and objects are.  Raises what keeps it from
        running, with nothing sent: WorldNotStarted, WorldBusy, WorkerDied, AgentLost, CodeNotSent.
        """
        self.receive_waiting()
        if damage := self.wait_for_stop():
            warnings.warn(f"The task before was stopped late. {damage}", stacklevel=2)
        before = self.everyone
        if self.is_idle:
            self.heal()
        self.check_ready()
        if self.code is not None:
            for _ in self.code.bringing(self.link.calling):
                pass
        return self.send(self.of_those_there(task, before), patience, shipped)

    def of_those_there(self, task: Task, before: Sequence[int]) -> Task:
        """Return a task with its ranks limited to the world's present size."""
        if task.ranks == before:
            return replace(task, ranks=self.everyone)
        if missing := [rank for rank in task.ranks if rank >= self.size]:
            raise BadRanks(format_ranks(task.ranks), self.size, f"there is no rank {missing[0]}")
        return task

    follow = recovery.follow

    def meet_stop(self, task: Task) -> bool:
        """Count a Stop for `follow`, for a handler of signals; False where it is to be raised."""
        running = self.running
        if running is None or running.task.id != task.id or running.raises_stops:
            return False
        running.stops += 1
        if self._link is not None:
            self._link.wake()
        return True

    def reply(self, running: TaskRun, answers: Mapping[int, str | None]) -> None:
        """Send each of these ranks what was typed for it, None for the end of all input."""
        for rank, text in answers.items():
            self.link.send(SendInput(rank, InputReply(running.prompts[rank].number, text)))
            running.prompts.answered(rank, time.monotonic())

    def attempts(self, task: Task, most: int) -> Iterator[Task]:
        """Yield the task to submit and follow, at most `most` times more where `restart` is set."""
        for number in range(read_restarts(most) + 1):
            yield replace(task, id=uuid.uuid4().hex, attempt=Attempt(number, most))
            if self.running is None or not self.running.restart:
                return

    def run(self, task: Task) -> CellResult[Any]:
        """Send a task and wait for it.  Raises its error, or KeyboardInterrupt after Stop."""
        return self.finish(self.submit(task))

    def finish(self, running: TaskRun) -> CellResult[Any]:
        """Wait for a task that has been sent; raises as `run`."""
        self.wait(running)
        self.check(running)
        return running.result()

    def wait(self, running: TaskRun) -> None:
        """Follow a task to its end, without a look at what it shows."""
        for _ in self.follow(running):
            pass

    def check(self, running: TaskRun) -> None:
        """Raise the error of a task that has been followed, or KeyboardInterrupt after Stop."""
        if running.stops:
            fate = recovery.late_stop_text(running)
            if fate or running.damage:
                raise errors.Interrupted(running.task.ranks, fate, running.damage)
            raise KeyboardInterrupt
        if error := running.error():
            self.told(running.fated)
            raise error

    def interrupt(self) -> None:
        """Interrupt the ranks that run a task; does nothing when none does."""
        if self.running is not None:
            recovery.interrupt(self, self.running)

    @property
    def stopped_task(self) -> TaskRun | None:
        """The stopped task that was not followed to its end, as Stop gave control back; or None."""
        running = self.running
        is_left = running is not None and running.is_stopping and not running.is_over
        return running if is_left else None

    def wait_for_stop(self) -> str:
        """Wait again for ranks that had not left yet when Stop gave control back.

        Return what the stopped task has left wrong on its ranks, which nobody has been told yet:
        `TaskRun.damage`, "" for nothing.
        """
        if (running := self.stopped_task) is None:
            return ""
        running.give_up_at, stops = time.monotonic() + LATE_TIMEOUT, running.stops
        for _ in self.follow(running):
            if running.stops > stops:
                break
        if running.stops > stops:
            self.interrupt()
            raise KeyboardInterrupt
        return running.damage

    def keep_setup(
        self,
        key: str,
        task: Task,
        segment: Segment | None,
        packed: Payload | None = None,
        parcel: Parcel | None = None,
    ) -> None:
        """Run this cell in every new worker too; the segment with its names stays open for that.

        `packed` is what every new worker gets, and `parcel` says what that is.
        """
        task = replace(task, forget={}, deleted={}, names={} if packed is None else {ANY: packed})
        self.setup.keep(key, task, segment, parcel)
        self.remember()

    def release_values(self, running: TaskRun) -> None:
        """Let workers release the values that it fetched, which have been read."""
        payloads = running.payloads().items()
        self.let_go_of(running.task, (rank for rank, payload in payloads if payload.segment))

    def let_go_of(self, task: Task, ranks: Iterable[int]) -> None:
        """Let these ranks release values that were lent inside of what they returned."""
        if lent := tuple(ranks):
            self.link.send(ReleaseValues(task.id, lent))

    def check_ready(self) -> None:
        """Raise the error that says why no task can be sent now, with the remedy."""
        running = self.running
        if self.state is State.READY:
            return
        if self.state in (State.STOPPED, State.STARTING, State.STOPPING):
            raise WorldNotStarted("The cell")
        if self.lost is not None:
            raise self.lost
        if running is not None and running.unfinished:
            if running.is_stopping:
                raise running.not_stopped
            raise errors.WorldBusy(running.unfinished, running.age)
        # Why they share no group is said again for every task until a restart.
        if running is not None and running.deaths:
            running.fate = recovery.healing_text(self, running.deaths)
            if error := running.error():
                raise error
        raise recovery.death(self, self.dead) if self.dead else errors.WorldBroken(self.problem)

    def heal(self) -> None:
        """Do about deaths and broken collectives what `on_failure` says; take in new machines."""
        recovery.heal(self)
        if self.joined and self.state is State.READY:
            self.joined = {}
            recovery.regroup(self, Grow())

    def restart(self, n: int | str | None = None, keep: Sequence[str] = (), **changes: Any) -> None:
        """End all workers and start new ones, out of every state; with what `keep` names."""
        kept = self.take(keep, self.everyone)
        # The notebook's environment, path and folder may have changed meanwhile.
        before, size = self.config, self.size
        after = before.but(n, **changes)
        if is_moved := after.machines != before.machines:
            module_of(after.launched_by)  # UsageError, with all workers left as they are
        self.configure(after, name=self.spec.name)
        try:
            self.start_anew(agent_too=is_moved)
        except errors.StartError:
            self.configure(before, name=self.spec.name)
            raise
        # Only now: on other machines it is known late how many there are.
        self.setup.renumber(Renumbering(size, self.size, {}))
        error = recovery.replay(self, self.everyone)
        self.give_back(kept)
        if error:
            raise error

    def replace(self, ranks: Sequence[int], keep: Sequence[str] = ()) -> None:
        """Restart these ranks in place, with the variables of `keep`."""
        self.receive_waiting()
        others = set(self.unfinished) - set(ranks)
        if others or self.state not in (State.READY, State.BROKEN, State.STUCK):
            self.check_ready()
        kept, ending = self.take(keep, ranks), {*ranks}
        recovery.note_changes(self, self.everyone)
        self.link.call(Kill((*ending,)))
        deadline = time.monotonic() + KILL_TIMEOUT
        while not self.dead.keys() >= ending and time.monotonic() < deadline:
            self.receive(max(0.0, deadline - time.monotonic()))
        if self.state is State.BROKEN:
            recovery.regroup(self, Heal())
        self.give_back(kept)

    def scale(self, n: int | str | None = None, ranks: Sequence[int] | None = None) -> None:
        """Change the number of workers to `n`, or keep these ranks; ScaleError, or WorldBroken."""
        self.receive_waiting()
        if self.is_idle:
            self.heal()
        if not self.state.has_workers:
            raise self.lost or WorldNotStarted("`%dist_scale`")
        self.check_ready()
        before = self.size
        if ranks is not None:
            keep = topology.parse_ranks(",".join(map(str, ranks)), before)
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
        if self.is_elsewhere:  # machines come and go, and the size changes without being asked for
            self.config = self.config.of_size(self.size)
        if self.state is State.BROKEN:
            raise errors.WorldBroken(self.problem)
        if why:
            raise errors.ScaleError(before, size, why)

    def take(self, names: Sequence[str], ranks: Iterable[int]) -> Kept:
        """Fetch these names from these ranks, to outlive their workers; raises as `run` does."""
        if not names:
            return {}
        keep = Call("values.keep", {"names": tuple(names)})
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
        self.let_go_of(running.task, running.task.ranks)
        return kept

    def give_back(self, kept: Kept) -> None:
        """Bind it again; ranks that there are no more are left out."""
        for rank, frames in kept.items():
            if rank >= self.size:
                continue
            payload, segment = pack_frames(frames)
            with closing(segment) if segment else nullcontext():
                task = self.task(Call("values.give_back", {"packed": payload}), ranks=(rank,))
                running = self.submit(task)
                self.finish(running)
                self.names.objects.gained(rank, running.gained(rank))

    # --- the agent ------------------------------------------------------------------------

    def ask(self, request: Request) -> Any:
        """Ask the agent for rows on its ranks, also while they are busy; none without workers."""
        self.receive_waiting()
        if not self.state.has_workers:
            return ()
        try:
            return self._named(self.link.call(request))
        except AgentLost as lost:
            self.take_loss(lost)
            return ()

    def look(self, request: Request) -> Any:
        """Ask the same from any thread, which takes in nothing of what ranks have said."""
        asked = self._asked(request)
        try:
            return () if asked is None else self._named(asked.result(LOOK_TIMEOUT))
        except (AgentLost, TimeoutError):
            return ()

    def _named(self, reply: Reply) -> Any:
        """Name machines in the rows of a status as elsewhere."""
        match reply:
            case (WorkerStatus(), *_):
                name = self.machines.name
                return tuple(replace(row, host=name(row.rank) or row.host) for row in reply)
        return reply

    def consult(self, question: Question, ranks: Iterable[int]) -> Future[Reply] | None:
        """Put a question about names to one of these ranks, from any thread; None without workers.

        The reply is None where no rank has answered in time; wait for it with a bound.
        """
        return self._asked(Consult(tuple(ranks), question))

    def _asked(self, request: Request) -> Future[Reply] | None:
        if not self.state.has_workers or (link := self._link) is None or not link.is_up:
            return None
        return link.ask(request)
