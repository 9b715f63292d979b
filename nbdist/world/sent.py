"""A task that ranks have been given: what they have said of it, and what became of it.  No I/O.

Prompts are answered in the order of the ranks, one after the other: what is typed is for one
rank, as its prompt says, since programs that ask differ in what they have to be told, and a
debugger always does.  A rank that has been answered comes again first if it asks again soon, so
that a conversation with the debugger of one rank, or two questions of one cell, are not torn
apart.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from nbdist.config import CONTROL_TIMEOUT, Patience
from nbdist.errors import (
    KEPT,
    AgentLost,
    CellTimeout,
    NbdistError,
    RanksNotStopped,
    RanksReleased,
    UsageError,
    WorkerDied,
    WorkerError,
)
from nbdist.output.events import (
    NAME_PROBLEM,
    Died,
    Done,
    Failure,
    InputRequest,
    Moved,
    Output,
    RankError,
)
from nbdist.output.transcript import Transcript, follows
from nbdist.topology import parse_ranks
from nbdist.values.payload import Payload, as_read, open_payload
from nbdist.values.pickling import unpickle
from nbdist.wire.messages import Attached, Silent
from nbdist.wire.views import Place, Usage
from nbdist.wire.work import Task, task_from
from nbdist.words import name_ranks
from nbdist.world.hangs import (
    Watch,
    never_meet,
    released_text,
    silent_text,
    stalled_text,
    waits_text,
)
from nbdist.world.names import Shipped
from nbdist.world.result import CellResult, Contents, as_raised
from nbdist.world.states import Machines

SETTLE_SECONDS = 0.1
"""Seconds that a rank is given to ask before one that comes after it."""

STAY_SECONDS = 0.3
"""Seconds that the one who was answered last is given to ask again before others."""

NOBODY = (
    "input() and breakpoint() need JupyterLab or a terminal; this run has neither (nbclient, "
    "papermill). Set a variable instead of calling input()."
)

TO_RANKS = "-r"


class Prompts:
    """Those at which ranks of a task wait, one a rank; times are monotonic seconds."""

    def __init__(self) -> None:
        self._open: dict[int, InputRequest] = {}
        self._changed = 0.0
        self._last: int | None = None
        self._answered = float("-inf")
        self._seconds = 0.0

    def __repr__(self) -> str:
        return f"<Prompts of {name_ranks(self.ranks) if self._open else 'no rank'}>"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who asks."""
        return tuple(sorted(self._open))

    def __getitem__(self, rank: int) -> InputRequest:
        return self._open[rank]

    def seconds(self, now: float) -> float:
        """Count those in which any rank has waited for somebody to type."""
        return self._seconds + (now - self._changed if self._open else 0.0)

    def receive(self, rank: int, request: InputRequest, now: float) -> None:
        """Take in what a rank asks; what it asked before it has given up."""
        self._count(now)
        self._open[rank] = request

    def drop(self, rank: int, now: float) -> None:
        """Forget what it asks: it has ended, or somebody has answered."""
        self._count(now)
        self._open.pop(rank, None)

    def answered(self, rank: int, now: float) -> None:
        """Note that it has been answered."""
        self.drop(rank, now)
        self._last, self._answered = rank, now

    def next(self, now: float, unfinished: Collection[int]) -> int | None:
        """Choose the rank that is to be answered now; None where one that is due may come yet."""
        if not self._open:
            return None
        if self._last in self._open:
            return self._last
        may_come = self._last in unfinished and now - self._answered < STAY_SECONDS
        others = set(unfinished) - self._open.keys() - {self._last}
        may_come |= bool(others) and now - self._changed < SETTLE_SECONDS
        return None if may_come else min(self._open)

    def _count(self, now: float) -> None:
        self._seconds = self.seconds(now)
        self._changed = now

    # --- what is typed --------------------------------------------------------------------

    def prompt(self, rank: int) -> str:
        """Write what stands before the input box: `[rank 3] ipdb> `."""
        return f"[rank {rank}] {self._open[rank].prompt}"

    def answers(self, rank: int, typed: str, size: int) -> dict[int, str]:
        """Say which ranks get what of a line that was typed for this one.

        `-r all c`, in a debugger, is for all those that wait in one now; UsageError for ranks
        that there are not.
        """
        words = typed.split(maxsplit=2)
        if not self._open[rank].by_debugger or len(words) < 2 or words[0] != TO_RANKS:
            return {rank: typed}
        chosen = parse_ranks(words[1], size)
        waiting = [each for each in chosen if each in self._open and self._open[each].by_debugger]
        if not waiting:
            raise UsageError(f"`{typed}`: none of these ranks is in the debugger.")
        return dict.fromkeys(waiting, words[2] if len(words) > 2 else "")

    @property
    def text(self) -> str:
        """`rank 3 waits for your input`; how to answer several at once; "" where none does.

        Said in the head of a cell that runs.
        """
        ranks = self.ranks
        if not ranks:
            return ""
        debugged = [rank for rank in ranks if self._open[rank].by_debugger]
        what = "is in the debugger" if len(debugged) == len(ranks) else "waits for your input"
        if len(ranks) == 1:
            return f"{name_ranks(ranks)} {what}"
        what = what.replace("is in", "are in").replace("waits", "wait") + ", one at a time"
        also = " · `-r all c` goes to all of them" if len(debugged) == len(ranks) else ""
        return f"{name_ranks(ranks)} {what}{also}"


News = list[tuple[int, Output]]


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers at the time when the task was sent: how many, where, and what they share.

    `heals` says whether the policy for deaths is to replace the dead, `namespace` is where
    what they send back finds its classes.
    """

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


class SentTask:
    """A task from the time when it was sent: what its ranks have said, and where they are.

    `transcript` has all that they have shown so far, `shipped` says what its names are.  When it
    is over, `fate` says what was done about ranks that died, and `restart` why it is to be run
    again, "" where it is not.  `fated` are the ranks of which `fate` speaks.  `shows_value`: a rank
    has shown what its last line gave.
    `was_stalled`: when Stop came a network between them was.
    """

    def __init__(
        self,
        task: Task,
        patience: Patience,
        crew: Crew,
        shipped: Mapping[str, Shipped] | None = None,
        started: tuple[float, int] | None = None,
        ended: Mapping[int, float] | None = None,
    ) -> None:
        """Take note of a task that is being sent.

        Or was `started` earlier, by the monotonic clock and by that on the wall, by another
        notebook; these ranks have `ended` it before anybody could see that.
        """
        self.task = task
        self.shipped: Mapping[str, Shipped] = shipped or {}
        self.patience = patience
        self.transcript = Transcript(task.ranks)
        self.prompts = Prompts()
        self.crew = crew
        self.aborted: dict[int, Place] = {}
        self.places: dict[int, Place] = {}
        self.moved: dict[int, Moved] = {}
        self.usage: Mapping[int, Usage] = {}
        self.silent = Silent((), 0.0)
        self.stops = 0
        self.stops_met = 0  # of these, so many have been acted on
        self.raises_stops = False  # one that comes now ends what is being done
        self.interrupts = 0
        self.spared: frozenset[int] = frozenset()  # these are ended only if Stop comes again
        self.give_up_at = float("inf")
        self.is_stopping = self.is_over = self.shows_value = self.was_stalled = False
        self.lost: AgentLost | None = None
        self.fate = self.restart = self.why_died = self.differing = self.lacking = ""
        self.fated: tuple[int, ...] = ()
        self.timed_out: str | None = None  # where its ranks were
        self._why_aborted = ""
        self._news: News = []
        self._has_met_death = False
        self._started, self._started_ns = started or (time.monotonic(), time.time_ns())
        self._ended = dict(ended or {})
        self._watch = Watch(self._started, patience.hang_timeout)
        self.transcript.start(self._started)

    @classmethod
    def found(cls, there: Attached, crew: Crew) -> Self:
        """Make the task that ranks were given by another notebook, as it was then."""
        assert there.run is not None
        patience = Patience(**there.memory.patience)
        if patience.control_timeout is None:  # somebody waits for it now
            patience = replace(patience, control_timeout=CONTROL_TIMEOUT)
        started, task = (there.started, there.started_ns), task_from(there.run.task)
        return cls(task, patience, crew, started=started, ended=there.ended)

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
    def age(self) -> float:
        """Seconds since it was sent, without those in which a rank waited for somebody to type."""
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
    def died(self) -> bool:
        """Whether the process of any rank ended."""
        return bool(self.deaths)

    @property
    def _why_ended(self) -> str:
        """Why its agent has ended a rank, the first one; "" where only Stop ended some."""
        whys = (f"{died.why}." for died in self.deaths.values() if died.why and not died.by_stop)
        return next(whys, "")

    @property
    def killed_by_stop(self) -> tuple[int, ...]:
        """The ranks that Stop did not end; none where others have died for another reason."""
        deaths = self.deaths
        return tuple(deaths) if all(died.by_stop for died in deaths.values()) else ()

    @property
    def waits(self) -> str:
        """Which machine or network is silent, and which ranks wait; "" for neither."""
        stalled = stalled_text(self.places, self.crew.machines)
        return " · ".join(filter(None, [silent_text(self.silent), stalled, self._waiting]))

    @property
    def _waiting(self) -> str:
        """Which ranks wait in which collective, and where the others are; "" if none waits.

        Nor where one waits for your input, for whom all others may wait.
        """
        if self.prompts.ranks:
            return ""
        unfinished = self.unfinished
        places = {rank: self._watch.places.get(rank, Place()) for rank in unfinished}
        waiting = any(place.operation for place in places.values())
        others = set(range(self.crew.size)) - set(self.task.ranks)
        # Who waits in a cell for some ranks may wait for those that do not run it.
        if not waiting or (self.age < self.patience.hang_timeout and not others):
            return ""
        done = set(self.task.ranks) - set(unfinished)
        finished = f" · {name_ranks(done)} finished" if done else ""
        absent = f" · not in this cell: {name_ranks(others)}" if others else ""
        verdict = " · these calls do not match and would wait forever" if never_meet(places) else ""
        return waits_text(places, self.task.source) + finished + absent + verdict

    @property
    def doing(self) -> str:
        """Where those are that have not finished, as far as is known."""
        places = {rank: self._watch.places.get(rank) for rank in self.unfinished}
        known = {rank: place for rank, place in places.items() if place is not None}
        return waits_text(known, self.task.source)

    @property
    def not_stopped(self) -> RanksNotStopped:
        """Say who has not left it, and whether that may still cost variables."""
        return RanksNotStopped(self.unfinished, self.doing, is_safe=self._is_safe)

    @property
    def _is_safe(self) -> bool:
        return self.spared.issuperset(self.unfinished)

    # --- what became of it ----------------------------------------------------------------

    def received(self, rank: int) -> Mapping[str, Shipped]:
        """Return what of `shipped` this rank has, as far as is known."""
        error = self.transcript[rank].error
        was_refused = isinstance(error, Failure) and error.name == NAME_PROBLEM
        return {} if was_refused else self.shipped

    def let_go(self) -> None:
        """Keep no memory of what was shipped: a task is kept for longer than its names."""
        self.shipped = {name: replace(each, kept=None) for name, each in self.shipped.items()}

    @property
    def made(self) -> frozenset[str]:
        """Names that it bound on any rank, without what it imported."""
        return frozenset().union(*(done.made for done in self._done().values()))

    def result(self) -> CellResult[Any]:
        """Return what has become of it so far; does not raise for failed ranks.

        Last values, which another may be unable to read, are for `value` one by one.
        """
        values = {
            rank: None if self.task.keeps else self.value(done)
            for rank, done in self._done().items()
            if done.status == "ok"
        }
        seconds = self.transcript.elapsed(time.monotonic())
        errors = self.transcript.errors
        return CellResult(
            self.task, self.transcript, seconds, errors, values, self.crew.machines.by_rank
        )

    def error(self) -> NbdistError | None:
        """Return the one error that a failed or unfinished task raises; None when all went well."""
        if self.lost is not None:
            return self.lost
        cause = self.transcript.root_cause()
        if self.timed_out is not None and (cause is None or _is_of_stop(cause[1])):
            late, killed, seconds = self.unfinished, self.killed_by_stop, self.patience.timeout
            is_safe = self._is_safe
            return CellTimeout(seconds or 0.0, self.timed_out, late, killed, is_safe=is_safe)
        if self.unfinished:
            return self.not_stopped
        if cause is None:
            return None
        rank, first = cause
        host, pid = self.crew.machines.name(rank), self.crew.pids.get(rank, 0)
        errors, ran = self.transcript.errors, len(self.task.ranks)
        own = {rank: error for rank, error in errors.items() if not follows(error)}
        seconds = self.seconds_until(first.time_ns)
        if isinstance(first, Died):
            code, end = first.exit_code, first.end
            died = WorkerDied(rank, host, pid, errors, ran, seconds, code, end)
            for said in filter(None, (self._why_ended, self.why_died, self.fate)):
                died.add(said)
            return died
        if not own and self.aborted and not self.is_stopping:
            return RanksReleased(rank, host, pid, errors, self._why_aborted, self.fate)
        error = WorkerError(
            *(rank, host, pid, own or errors, ran, seconds),
            cause=(first.name, first.message),
            who=self.crew.machines.who([rank]),
        )
        if self.aborted:
            error.add(f"{released_text(self.aborted)}{'' if self.fate else KEPT}.")
        for said in filter(None, (self._why_ended, self.fate)):
            error.add(said)
        if self.differing:
            error.add(f"Before that: {self.differing}.")
        if self.lacking:
            error.add(self.lacking)
        done = self.transcript[rank].done
        contents = Contents.read(done.values if done else None, self.crew.namespace)
        return as_raised(error, first.kinds, contents)

    def payloads(self) -> dict[int, Payload]:
        """Return the values that were fetched, as they came."""
        fetched = {rank: done.values for rank, done in self._done().items()}
        return {rank: each for rank, each in fetched.items() if isinstance(each, Payload)}

    def _done(self) -> dict[int, Done]:
        return {track.rank: track.done for track in self.transcript if track.done is not None}

    def value(self, done: Done) -> Any:
        """Read what a rank has brought back."""
        if not isinstance(done.values, Payload):
            return None
        values = unpickle(open_payload(done.values), self.crew.namespace)
        values = as_read(values, done.values)
        if len(self.task.fetch) == 1 and not self.task.keeps:
            return values[self.task.fetch[0]]
        return values


def _is_of_stop(error: RankError) -> bool:
    """Say whether it is what Stop leads to."""
    return error.by_stop if isinstance(error, Died) else follows(error)
