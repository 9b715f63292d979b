"""A task that ranks have been given: what they say, what is to be done, what became of it.

No I/O: `Workers` feeds it with what comes up, `nbdist.world.recovery` takes its next steps.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Self

from nbdist import errors
from nbdist.config import CONTROL_TIMEOUT, Patience
from nbdist.errors import KEPT, NbdistError
from nbdist.output import events
from nbdist.output.events import Died, Done, Failure, Output
from nbdist.output.transcript import Transcript, follows
from nbdist.values.payload import Payload, as_read, open_payload
from nbdist.values.pickling import unpickle
from nbdist.wire.messages import Aborted, Attached, Located, Silent, Used
from nbdist.wire.views import Place, Usage
from nbdist.wire.work import Task, task_from
from nbdist.words import name_ranks
from nbdist.world import hangs
from nbdist.world.names import Sent
from nbdist.world.result import CellResult, Contents, as_raised
from nbdist.world.sent_objects import NOTHING_SENT, Parcel
from nbdist.world.states import Machines, Prompts

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


News = list[tuple[int, Output]]


@dataclass(frozen=True, slots=True)
class Members:
    """The workers when the task was sent; `heals`: the dead are to be replaced."""

    size: int
    backend: str
    machines: Machines
    pids: Mapping[int, int]
    namespace: dict[str, Any]
    heals: bool

    @property
    def has_group(self) -> bool:
        """Whether there is a group whose collectives can be aborted."""
        return self.backend != "none"

    @property
    def runs_ahead(self) -> bool:
        """With nccl a rank can have finished the task before its collectives have ended."""
        return "nccl" in self.backend


class TaskRun:
    """A task from the time when it was sent: what its ranks have said, and where they are.

    `transcript` has all that they have shown so far, `shipped` says what its names are.  When it
    is over, `fate` says what was done about ranks that died (`fated`), and `restart` why it is to
    be run again, "" where it is not.  `shows_value`: a rank has shown what its last line gave.
    `was_stalled`: when Stop came a network between them was.
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
        """Take note of a task that is being sent.

        Or that another notebook has `started`, at these times of the monotonic and the wall clock;
        `ended` are the ranks that have finished it meanwhile, and when.
        """
        self.task = task
        self.shipped: Mapping[int, Parcel] = shipped or {}
        self.sent_at: int | None = None  # by the clock of the table of names
        self.patience = patience
        self.transcript = Transcript(task.ranks)
        self.prompts = Prompts()
        self.members = members
        self.aborted: dict[int, Place] = {}
        self.places: dict[int, Place] = {}
        self.unwoken: dict[int, Place] = {}  # where ranks waited that gloo did not wake
        self.asked = 0.0  # answers to what was asked before that come too late
        self.moved: dict[int, events.Moved] = {}
        self.usage: Mapping[int, Usage] = {}
        self.silent = Silent((), 0.0)
        self.stops = 0
        self.stops_met = 0  # of these, so many have been acted on
        self.raises_stops = False  # one that comes now ends what is being done
        self.interrupts = 0
        self.spared: frozenset[int] = frozenset()  # these are ended only if Stop comes again
        self.give_up_at = float("inf")
        self.is_stopping = self.is_over = self.shows_value = self.was_stalled = False
        self.lost: errors.AgentLost | None = None
        self.fate = self.restart = self.why_died = self.differing = self.lacking = ""
        self.replicas = ""  # which ranks of a training ended at another step, and how to mend that
        self.incomplete = ""  # which variables may hold a part of a collective's result
        self.fated: tuple[int, ...] = ()
        self.timed_out: str | None = None  # where its ranks were
        self._why_aborted = ""
        # Of ranks whose connections another rank has ended, what torch said.
        self._released: dict[int, Failure] = {}
        self._news: News = []
        self._has_met_death = False
        self._started, self._started_ns = started or (time.monotonic(), time.time_ns())
        self._ended = dict(ended or {})
        self._watch = hangs.Watch(self._started, patience.hang_timeout)
        self.transcript.start(self._started)

    def __repr__(self) -> str:
        return f"<TaskRun {self.task.id[:8]} unfinished {self.unfinished}>"

    @classmethod
    def found(cls, there: Attached, members: Members) -> Self:
        """Make the task that ranks were given by another notebook, as it was then."""
        assert there.run is not None
        patience = there.memory.patience
        if patience.control_timeout is None:  # a cell waits for it now
            patience = replace(patience, control_timeout=CONTROL_TIMEOUT)
        started, task = (there.started, there.started_ns), task_from(there.run.task)
        return cls(task, patience, members, started=started, ended=there.ended)

    # --- what is known --------------------------------------------------------------------

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The ranks that still run it."""
        return tuple(track.rank for track in self.transcript if track.finished is None)

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """How many bytes of how many its ranks have packed, as far as they have said."""
        moved = self.moved.values()
        return sum(each.done for each in moved), sum(each.total for each in moved)

    @property
    def next_to_ask(self) -> int | None:
        """The rank that is to be answered now, if any."""
        return self.prompts.next(time.monotonic(), self.unfinished)

    @property
    def age(self) -> float:
        """Seconds since it was sent, without those in which a rank waited for input."""
        now = time.monotonic()
        return now - self._started - self.prompts.seconds(now)

    def seconds_until(self, time_ns: int) -> float:
        """Count from when it was sent to a time on the clock."""
        return max(0.0, (time_ns - self._started_ns) / 1e9)

    @property
    def deaths(self) -> dict[int, Died]:
        """The ranks whose processes have ended, and how."""
        return {each.rank: each.died for each in self.transcript if each.died is not None}

    @property
    def killed_by_stop(self) -> tuple[int, ...]:
        """The ranks that Stop did not end; none where others have died for another reason."""
        deaths = self.deaths
        return tuple(deaths) if all(died.by_stop for died in deaths.values()) else ()

    @property
    def waits(self) -> str:
        """Which machine or network is silent, and which ranks wait; "" for neither."""
        stalled = hangs.stalled_text(self.places, self.members.machines)
        return " · ".join(filter(None, [hangs.silent_text(self.silent), stalled, self._waiting]))

    @property
    def _waiting(self) -> str:
        """Which ranks wait in which collective, and where the others are; "" if none waits."""
        if self.prompts.ranks:  # all others may wait for the input
            return ""
        unfinished = self.unfinished
        places = {rank: self._watch.places.get(rank, Place()) for rank in unfinished}
        waiting = any(place.operation for place in places.values())
        others = set(range(self.members.size)) - set(self.task.ranks)
        # A rank in a cell for some ranks may wait for those that do not run it.
        if not waiting or (self.age < self.patience.hang_timeout and not others):
            return ""
        said = hangs.waits_text(places, self.task.source)
        if done := set(self.task.ranks) - set(unfinished):
            said += f" · {name_ranks(done)} finished"
        if others:
            said += f" · not in this cell: {name_ranks(others)}"
        if hangs.never_meet(places):
            said += " · these calls do not match and would wait forever"
        return said

    @property
    def doing(self) -> str:
        """Where those are that have not finished, as far as is known."""
        places, unfinished = self._watch.places, self.unfinished
        known = {rank: places[rank] for rank in unfinished if rank in places}
        return hangs.waits_text(known, self.task.source)

    @property
    def not_stopped(self) -> errors.RanksNotStopped:
        """The error that names the ranks that have not left it, and if they may lose variables."""
        return errors.RanksNotStopped(self.unfinished, self.doing, is_safe=self._is_safe)

    @property
    def _is_safe(self) -> bool:
        return self.spared.issuperset(self.unfinished)

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
        if self.deaths and not self._has_met_death:
            self._has_met_death = True
            if not self.members.heals:
                yield Step.END_SURVIVORS
            elif self.members.has_group:
                yield Step.ABORT_FOR_DEAD
        if not self._is_watched:
            return
        # Ranks that do not run the task will not join either.
        if len(unfinished) < self.members.size:
            self._watch.poll_fast(now)
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
        return () if self.members.runs_ahead else self._watch.aborted_in_vain(self.unfinished)

    def seconds_to_look(self, now: float) -> float:
        """Return for how many seconds there is nothing to ask the ranks, and nothing to do."""
        until_look = self._watch.wait(now) if self._is_watched else float("inf")
        return max(0.0, min(until_look, self._seconds_left(now)))

    @property
    def _is_watched(self) -> bool:
        """Whether ranks that wait in collectives are located, and released if they wait in vain.

        A rank that waits for another rank, which is in the debugger, does not wait in vain.
        """
        return self.members.has_group and not self.prompts.ranks

    def _seconds_left(self, now: float) -> float:
        if self.patience.timeout is None or self.is_stopping:
            return float("inf")
        # Input takes as long as it takes.
        return self._started + self.patience.timeout + self.prompts.seconds(now) - now

    def _can_never_go_on(self, unfinished: tuple[int, ...], now: float) -> bool:
        ahead, has_failed = self.members.runs_ahead, bool(self.transcript.errors)
        if len(unfinished) == self.members.size:
            # With gloo ranks whose sizes differ meet, and get what is wrong.
            differ = ahead and bool(hangs.differing(self.places))
            known = differ or hangs.never_meet(self.places)
            return self._watch.is_dead_end(unfinished, now, is_known=known, runs_ahead=ahead)
        # The sooner the better where the task has failed anyway.
        unchanged = GPU_UNCHANGED if has_failed and ahead else hangs.UNCHANGED
        if not self._watch.is_deadlocked(unfinished, now, unchanged):
            return False
        finished = (place for rank, place in self.places.items() if rank not in unfinished)
        # Their GPUs may still do what is waited for; or wait too, where a rank has failed.
        return has_failed or not any(place.operation for place in finished)

    # --- what happens ---------------------------------------------------------------------

    @contextmanager
    def counting_stops(self, *, raises: bool = False) -> Iterator[None]:
        """Count a Stop (KeyboardInterrupt) that comes inside, for the loop to act on.

        Consumers need it while they show news; it `raises` where it is to end what is done there.
        """
        self.raises_stops = raises
        try:
            yield
        except KeyboardInterrupt:
            self.stops += 1
        finally:
            self.raises_stops = False

    def stop(self, now: float) -> None:
        """Note that its ranks are being interrupted, and when control is wanted back."""
        wait = self.patience.control_timeout
        self.is_stopping = True
        self.was_stalled = any(place.stalled for place in self.places.values())
        self.interrupts, self.spared = self.interrupts + 1, frozenset()
        for rank in self.prompts.ranks:  # their answers come too late
            self.prompts.drop(rank, now)
        self.give_up_at = float("inf") if wait is None else now + wait
        self._watch.poll_fast(now)

    @property
    def ends_after_stop(self) -> bool:
        """Whether Stop was pressed in a cell that waits for what is done at its end."""
        return self.raises_stops and self.stops > 0 and self.patience.control_timeout is not None

    def wants_control(self, before: int) -> bool:
        """Return True if Stop came twice since `before`, to a cell that waits for control."""
        return self.patience.control_timeout is not None and self.stops > before + 1

    def take(self, news: Located | Aborted | Silent | Used, now: float) -> None:
        """Take in what its agent says of it."""
        match news:
            case Located(places, asked) if asked >= self.asked:
                self.places, unfinished = dict(places), self.unfinished
                known = {rank: place for rank, place in places.items() if rank in unfinished}
                self._watch.take(known, now, sum(place.in_flight for place in places.values()))
            case Aborted(places):
                self.aborted.update(places)
                self._watch.start_over(now)
            case Silent():
                self.silent = news
            case Used(usage):
                self.usage = {**self.usage, **usage}  # those of one machine

    def abort(self, now: float) -> None:
        """Note that its ranks can never go on, and that their collectives are being aborted."""
        unfinished, places = self.unfinished, self.places
        self.take(Aborted({rank: self._watch.places[rank] for rank in unfinished}), now)
        ran, failed, size = (
            self.task.ranks,
            {*self.transcript.errors, *unfinished},
            self.members.size,
        )
        self.differing = hangs.differing(places)
        self._why_aborted = hangs.why_aborted(self.aborted, places, ran, failed, size)

    def explains_death(self, places: Mapping[int, Place]) -> str:
        """Return why gloo has ended a rank, by where the others were; "" for other deaths."""
        said = (hangs.why_died(rank, died, places) for rank, died in sorted(self.deaths.items()))
        return next(filter(None, said), "")

    def take_loss(self, lost: errors.AgentLost) -> None:
        """Note that the agent has ended, and so have the ranks."""
        self.lost = lost
        for rank in self.unfinished:
            self.receive(rank, Died(-signal.SIGKILL, time.time_ns()))

    def receive(self, rank: int, output: Output) -> None:
        """Take in an output of the task."""
        # An abort leads to it: gloo raises, with nccl a worker interrupts itself.
        was_interrupted = rank in self.aborted and not self.is_stopping
        leads = {"KeyboardInterrupt"} if was_interrupted else ()
        if isinstance(output, Failure) and (output.connections == "ended" or output.name in leads):
            if rank not in self.aborted:
                self._released[rank] = output
            output = self._in_one_line(rank, output)
        now = time.monotonic()
        if isinstance(output, Done | Died):
            now = self._ended.pop(rank, now)
            self.prompts.drop(rank, now)
        match output:
            case Done():
                self._watch.finished()
            case events.InputRequest():
                self.prompts.receive(rank, output, now)
            case events.Display(is_result=True):
                self.shows_value = True
        self.transcript.receive(rank, output, now)
        if self._released and isinstance(output, Failure | Died):
            self._explain_released()
        self._news.append((rank, output))

    def _in_one_line(self, rank: int, failure: Failure) -> Failure:
        aborted, errors = self.aborted.get(rank), self.transcript.errors.values()
        return hangs.in_one_line(failure, aborted, self.task.script, errors)

    def _explain_released(self) -> None:
        """Say of released ranks for whom they waited: news of that rank may come after theirs."""
        for rank, failure in self._released.items():
            track, explained = self.transcript[rank], self._in_one_line(rank, failure)
            if track.failure is not None and track.failure.message != explained.message:
                track.failure, track.version = explained, track.version + 1

    def take_news(self) -> News:
        """Return what ranks have shown since this was last asked."""
        news, self._news = self._news, []
        return news

    def waits_after(self, rank: int) -> bool:
        """Return True if this rank is done with the task, and others are not."""
        return bool(self.unfinished) and rank in set(self.task.ranks) - set(self.unfinished)

    def is_of_another(self, rank: int, output: Output) -> bool:
        """Return True if it changes what an earlier task has shown."""
        has = self.transcript[rank].has_display
        return isinstance(output, events.Update) and not has(output.display_id)

    @property
    def damage(self) -> str:
        """Which variables its end has left incomplete or different on its ranks; "" for none."""
        return " ".join(filter(None, (self.incomplete, self.replicas)))

    # --- what became of it ----------------------------------------------------------------

    def received(self, rank: int) -> Parcel:
        """Return what of `shipped` this rank has, as far as is known."""
        error = self.transcript[rank].error
        was_refused = isinstance(error, Failure) and error.name == events.NAME_PROBLEM
        return NOTHING_SENT if was_refused else self.shipped.get(rank, NOTHING_SENT)

    def shipped_names(self) -> dict[str, Sent]:
        """Return the records of the variables that went to any rank."""
        return {n: record for each in self.shipped.values() for n, record in each.names.items()}

    def gained(self, rank: int) -> tuple[int, ...]:
        """Return the keys of the notebook's objects that a rank has got from elsewhere."""
        done = self.done().get(rank)
        return () if done is None else done.gained

    @property
    def made(self) -> frozenset[str]:
        """Names that it bound on any rank, without what it imported."""
        return frozenset().union(*(done.made for done in self.done().values()))

    def result(self) -> CellResult[Any]:
        """Return what has become of it so far; last values are read one by one, by `value`."""
        done = {rank: each for rank, each in self.done().items() if each.status == "ok"}
        if self.task.brings_small:
            values = dict[int, Any]()
            for rank, each in done.items():
                # Nobody has asked for it: a value that cannot be read here is no error.
                with suppress(Exception):
                    values |= {rank: self.value(each)} if each.kept is None else {}
        else:
            values = {r: None if self.task.keeps else self.value(each) for r, each in done.items()}
        told, hosts = self.transcript, self.members.machines.by_rank
        seconds = told.elapsed(time.monotonic())
        return CellResult(self.task, told, seconds, told.errors, values, hosts)

    def error(self) -> NbdistError | None:
        """Return the one error that a failed or unfinished task raises; None when all went well."""
        if self.lost is not None:
            return self.lost
        cause = self.transcript.root_cause()
        is_of_stop = cause is None or follows(cause[1]) or getattr(cause[1], "by_stop", False)
        if self.timed_out is not None and is_of_stop:
            late, timeout = self.unfinished, self.patience.timeout or 0.0
            is_safe = self._is_safe and not (self.killed_by_stop or self.damage)
            stopped = errors.CellTimeout(timeout, self.timed_out, late, is_safe=is_safe)
            if self.damage:
                stopped.add(self.damage)
            return stopped
        if self.unfinished:
            return self.not_stopped
        if cause is None:
            return None
        rank, first = cause
        failed = self.transcript.errors
        own = {rank: error for rank, error in failed.items() if not follows(error)}
        if not own and not self.is_stopping:  # the cell itself has raised KeyboardInterrupt
            own = {
                rank: error
                for rank, error in failed.items()
                if isinstance(error, Failure) and error.connections != "ended"
            }
            rank, first = min(own.items(), key=lambda item: item[1].time_ns, default=cause)
        host, pid = self.members.machines.name(rank), self.members.pids.get(rank, 0)
        blame = errors.Blame(rank, host, pid, failed)
        seconds, deaths = self.seconds_until(first.time_ns), self.deaths.values()
        why_ended = next((f"{each.why}." for each in deaths if each.why and not each.by_stop), "")
        if isinstance(first, Died):
            died = errors.WorkerDied(blame, seconds, first.exit_code, first.end)
            for fact in filter(None, (why_ended, self.why_died, self.fate, self.damage)):
                died.add(fact)
            return died
        if not own and self.aborted and not self.is_stopping:
            facts = " ".join(filter(None, (self.fate, self.damage)))
            return errors.RanksReleased(blame, self._why_aborted, facts)
        blame = errors.Blame(rank, host, pid, own or failed)
        who, said = self.members.machines.who([rank]), (first.name, first.message)
        error = errors.WorkerError(blame, len(self.task.ranks), seconds, said, who)
        kept, differing = "" if self.fate or self.damage else KEPT, self.differing
        released = f"{hangs.released_text(self.aborted)}{kept}." if self.aborted else ""
        differing = f"Before that: {differing}." if differing else ""
        cures = (self.fate, differing, self.lacking, self.damage)
        for fact in filter(None, (released, why_ended, *cures)):
            error.add(fact)
        done = self.transcript[rank].done
        contents = Contents.read(done.values if done else None, self.members.namespace)
        return as_raised(error, first.kinds, contents)

    def payloads(self) -> dict[int, Payload]:
        """Return the values that were fetched, as they came."""
        found = {rank: done.values for rank, done in self.done().items()}
        return {rank: each for rank, each in found.items() if isinstance(each, Payload)}

    def done(self) -> dict[int, Done]:
        """Return what the ranks have said at their end."""
        return {track.rank: track.done for track in self.transcript if track.done is not None}

    def value(self, done: Done) -> Any:
        """Read what a rank has brought back."""
        if not isinstance(done.values, Payload):
            return None
        values = as_read(unpickle(open_payload(done.values), self.members.namespace), done.values)
        is_one = len(self.task.fetch) == 1 and not self.task.keeps
        return values[self.task.fetch[0]] if is_one else values
