"""The engine of a world: a task from `submit` to its end, on workers that it keeps whole.

In the notebook's process, on the thread that made the world; `nbdist.world.recovery` is below it.
"""

from __future__ import annotations

import operator
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

from nbdist import topology
from nbdist.config import Patience, read_restarts
from nbdist.errors import AgentLost, BadRanks, Interrupted, StartError, UsageError, WorldNotStarted
from nbdist.values.payload import open_payload, pack_frames
from nbdist.values.shared_memory import Segment
from nbdist.wire.control import Question
from nbdist.wire.messages import Consult, Enter, LetGo, Reply, Request
from nbdist.wire.views import WorkerStatus
from nbdist.wire.work import Attempt, Call, InputReply, Source, Task, Work
from nbdist.words import format_ranks
from nbdist.world import recovery
from nbdist.world.agents import module_of
from nbdist.world.names import Shipped
from nbdist.world.result import CellResult
from nbdist.world.running import RunningTask
from nbdist.world.spec import parse_size
from nbdist.world.states import Renumbering, State
from nbdist.world.workers import Workers

LOOK_TIMEOUT = 10.0
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
        on = self.everyone if ranks is None else self._checked(ranks)
        work = Source(work) if isinstance(work, str) else work
        return Task(uuid.uuid4().hex, on, work, **fields)

    def _checked(self, ranks: Sequence[int]) -> tuple[int, ...]:
        # Before the start it is not known yet how many there will be.
        size = self.size if self.state.has_workers else None
        for rank in ranks:
            is_number = hasattr(rank, "__index__")  # numpy's too
            if not is_number or rank < 0 or (size is not None and rank >= size):
                raise BadRanks(str(ranks), self.size, f"{rank!r} is none of them, by its number")
        return tuple(map(operator.index, ranks))

    def submit(
        self,
        task: Task,
        patience: Patience | None = None,
        shipped: Mapping[str, Shipped] | None = None,
    ) -> RunningTask:
        """Send a task to all of its ranks at once, which are made ready first.

        `shipped` is what its names are, where they are the notebook's.  Raises what keeps it from
        running, with nothing sent: WorldNotStarted, WorldBusy, WorkerDied, AgentLost, CodeNotSent.
        """
        self.receive_waiting()
        self.wait_for_stop()
        before = self.everyone
        if self.is_idle:
            self.heal()
        self.check_ready()
        if self.code is not None:
            for _ in self.code.bringing(self.link.calling):
                pass
        return self.send(self.of_those_there(task, before), patience, shipped)

    def of_those_there(self, task: Task, before: Sequence[int]) -> Task:
        """Return a task that was for all ranks for those that there are now, more or fewer."""
        if task.ranks == before:
            return replace(task, ranks=self.everyone)
        if missing := [rank for rank in task.ranks if rank >= self.size]:
            raise BadRanks(format_ranks(task.ranks), self.size, f"there is no rank {missing[0]}")
        return task

    def follow(self, running: RunningTask, *, answers: bool = False) -> recovery.Following:
        """Yield new output of `running` until every rank has finished.

            for news in session.follow(running):
                with running.counting_stops():
                    draw(news)

        The first Stop (KeyboardInterrupt) interrupts the ranks and goes on; the second gives
        control back, with ranks unfinished.  Neither raises: `running.stops` counts them.  At the
        end the group is whole again, as far as the policy says.

        With `answers` the caller has to `reply` to prompts; otherwise ranks get an error.  Send the
        generator the longest time in seconds that it may block; 0.0 polls.
        """
        return recovery.follow(self, running, answers=answers)

    def meet_stop(self, task: Task) -> bool:
        """Count a Stop for `follow`, for a handler of signals; False where it is to be raised."""
        running = self.running
        if running is None or running.task.id != task.id or running.raises_stops:
            return False
        running.stops += 1
        self.wake()
        return True

    def reply(self, running: RunningTask, answers: Mapping[int, str | None]) -> None:
        """Give each of these ranks what was typed for it, None for the end of all input."""
        for rank, text in answers.items():
            self.link.send(Enter(rank, InputReply(running.prompts[rank].number, text)))
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

    def finish(self, running: RunningTask) -> CellResult[Any]:
        """Wait for a task that has been sent; raises as `run`."""
        self.wait(running)
        self.check(running)
        return running.result()

    def wait(self, running: RunningTask) -> None:
        """Follow a task to its end, without a look at what it shows."""
        for _ in self.follow(running):
            pass

    def check(self, running: RunningTask) -> None:
        """Raise the error of a task that has been followed, or KeyboardInterrupt after Stop."""
        if running.stops:
            fate = recovery.late_stop_text(running)
            raise Interrupted((), fate=fate) if fate else KeyboardInterrupt
        if error := running.error():
            self.told(running.fated)
            raise error

    def interrupt(self) -> None:
        """Have the ranks that run a task leave it; does nothing when none does."""
        if self.running is not None:
            recovery.interrupt(self, self.running)

    def wait_for_stop(self) -> None:
        """Give ranks time again that had not left yet when Stop gave control back."""
        running = self.running
        if running is None or not (running.is_stopping and running.unfinished):
            return
        running.give_up_at, stops = time.monotonic() + LATE_TIMEOUT, running.stops
        for _ in self.follow(running):
            if running.stops > stops:
                break
        if running.stops > stops:
            self.interrupt()
            raise KeyboardInterrupt

    def keep_setup(self, key: str, task: Task, segment: Segment | None) -> None:
        """Run this cell in every new worker too; the segment with its names stays open for that."""
        self.setup.keep(key, task, segment)
        self.remember()

    def let_go(self, running: RunningTask) -> None:
        """Have workers release the values that it fetched, which have been read."""
        payloads = running.payloads().items()
        self.let_go_of(running.task, (rank for rank, payload in payloads if payload.segment))

    def let_go_of(self, task: Task, ranks: Iterable[int]) -> None:
        """Have these ranks release values that were lent inside of what they returned."""
        if lent := tuple(ranks):
            self.link.send(LetGo(task.id, lent))

    def check_ready(self) -> None:
        """Raise the error that says why no task can be sent now."""
        if error := recovery.refusal(self):
            raise error

    def heal(self) -> None:
        """Do about deaths and broken collectives what `on_failure` says; take in who has come."""
        recovery.heal(self)
        recovery.grow(self)

    def restart(self, n: int | str | None = None, keep: Sequence[str] = (), **changes: Any) -> None:
        """End all workers and start new ones, out of every state; with what `keep` names."""
        kept = self.take(keep, self.everyone)
        # The notebook's environment, path and folder may have changed meanwhile.
        before, size = self.config, self.size
        after = before.but(n, **changes)
        if is_moved := after.machines != before.machines:
            module_of(after.launched_by)  # UsageError, with all workers left as they are
        self.configure(after)
        try:
            self.start_anew(agent_too=is_moved)
        except StartError:
            self.configure(before)
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
        kept = self.take(keep, ranks)
        recovery.replace(self, ranks)
        self.give_back(kept)

    def scale(self, n: int | str | None = None, ranks: Sequence[int] | None = None) -> None:
        """Have as many workers as `n` says, or only these ranks; nothing where there are."""
        self.receive_waiting()
        if self.is_idle:
            self.heal()
        if not self.state.has_workers:
            raise self.lost or WorldNotStarted("`%dist_scale`")
        self.check_ready()
        if ranks is not None:
            keep = topology.parse_ranks(",".join(map(str, ranks)), self.size)
            size = len(keep)
        elif n is not None:
            size = parse_size(n, self.size)
            keep = self.everyone[:size]
        else:
            forms = "a number of workers (4, +2) or the ranks to keep (`-r 0,2-3`)"
            raise UsageError(f"`%dist_scale` takes {forms}.")
        if size != self.size:
            recovery.scale(self, size, keep)

    def take(self, names: Sequence[str], ranks: Iterable[int]) -> Kept:
        """Fetch these names from these ranks, to outlive their workers; raises as `run` does."""
        if not names:
            return {}
        running = self.submit(self.task(ranks=tuple(ranks), fetch=tuple(names)))
        self.wait(running)
        lacking = [name for name in names if not self.names.ranks_with(name)]
        if running.transcript.errors and lacking:
            raise UsageError(f"`--keep`: no rank has `{lacking[0]}`; all workers are as they were.")
        self.check(running)
        return {
            rank: [bytes(memoryview(frame)) for frame in open_payload(payload)]
            for rank, payload in running.payloads().items()
        }

    def give_back(self, kept: Kept) -> None:
        """Bind it again; ranks that there are no more are left out."""
        for rank, frames in kept.items():
            if rank >= self.size:
                continue
            payload, segment = pack_frames(frames)
            with closing(segment) if segment else nullcontext():
                self.run(self.task(Call("values.give_back", {"packed": payload}), ranks=(rank,)))

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
        except (AgentLost, FutureTimeoutError):
            return ()

    def consult(self, question: Question, ranks: Iterable[int]) -> Future[Reply] | None:
        """Put a question about names to one of these ranks, from any thread; None without workers.

        The reply is None where no rank has answered in time; wait for it with a bound.
        """
        return self._asked(Consult(tuple(ranks), question))

    def _named(self, reply: Reply) -> Any:
        """Name machines in the rows of a status as elsewhere."""
        if not (isinstance(reply, tuple) and reply and isinstance(reply[0], WorkerStatus)):
            return reply
        name = self.machines.name
        return tuple(replace(row, host=name(row.rank) or row.host) for row in reply)

    def _asked(self, request: Request) -> Future[Reply] | None:
        if not self.state.has_workers or (link := self._link) is None or not link.is_up:
            return None
        return link.ask(request)
