"""The states of a world as one table, on which machine each rank is, prompts of ranks.  Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from nbdist.errors import UsageError
from nbdist.output.events import InputRequest
from nbdist.topology import parse_ranks
from nbdist.wire.node_messages import Processes
from nbdist.wire.spec import WorldSpec
from nbdist.words import count, format_ranks, name_ranks


class State(Enum):
    """What a world is doing; the value is what people read."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    RUNNING = "running a cell"
    INTERRUPTING = "interrupting a cell"
    STUCK = "waiting for ranks that have not stopped yet"
    BROKEN = "broken: the process group must be rebuilt"
    HEALING = "rebuilding the process group"
    LOST = "lost: the agent has ended"
    STOPPING = "stopping"

    @property
    def has_workers(self) -> bool:
        """Whether there are worker processes to look at or to end."""
        return self not in (State.STOPPED, State.STOPPING, State.STARTING, State.LOST)


class Event(Enum):
    """What can happen to a world."""

    START = "start"
    STARTED = "started"
    START_FAILED = "start failed"
    TASK = "task started"
    TASK_DONE = "task done"
    INTERRUPT = "interrupt"
    GAVE_UP = "gave up waiting"
    RANK_DIED = "rank died"
    ABORTED = "collectives aborted"
    HEAL = "heal"
    SCALE = "scale"
    HEALED = "healed"
    HEAL_FAILED = "heal failed"
    AGENT_LOST = "agent lost"
    STOP = "stop"
    STOPPED = "all stopped"


FORMED = (State.READY, State.RUNNING, State.INTERRUPTING, State.STUCK, State.BROKEN)
"""Those in which the workers have a group, whole or broken."""

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.STOPPED, Event.START): State.STARTING,
    (State.STARTING, Event.STARTED): State.READY,
    (State.STARTING, Event.START_FAILED): State.STOPPED,
    (State.READY, Event.TASK): State.RUNNING,
    (State.RUNNING, Event.TASK_DONE): State.READY,
    (State.RUNNING, Event.INTERRUPT): State.INTERRUPTING,
    (State.INTERRUPTING, Event.INTERRUPT): State.INTERRUPTING,
    (State.INTERRUPTING, Event.TASK_DONE): State.READY,
    (State.INTERRUPTING, Event.GAVE_UP): State.STUCK,
    (State.STUCK, Event.INTERRUPT): State.STUCK,
    (State.STUCK, Event.GAVE_UP): State.STUCK,
    # The ranks that did not stop have come back after all.
    (State.STUCK, Event.TASK_DONE): State.READY,
    (State.BROKEN, Event.TASK_DONE): State.BROKEN,
    (State.BROKEN, Event.HEAL): State.HEALING,
    (State.READY, Event.SCALE): State.HEALING,
    (State.HEALING, Event.HEALED): State.READY,
    (State.HEALING, Event.HEAL_FAILED): State.BROKEN,
    (State.HEALING, Event.RANK_DIED): State.HEALING,
    (State.BROKEN, Event.INTERRUPT): State.BROKEN,
    (State.BROKEN, Event.GAVE_UP): State.BROKEN,
    (State.STOPPING, Event.STOPPED): State.STOPPED,
    # What was not read before Stop came while they were ended.
    (State.STOPPING, Event.RANK_DIED): State.STOPPING,
    (State.STOPPING, Event.ABORTED): State.STOPPING,
    (State.STOPPING, Event.TASK_DONE): State.STOPPING,
    (State.LOST, Event.START): State.STARTING,
    **{(state, Event.RANK_DIED): State.BROKEN for state in FORMED},
    # A failed task had left collectives under way.
    **{(state, Event.ABORTED): State.BROKEN for state in FORMED},
    **{(state, Event.STOP): State.STOPPING for state in State},
    **{(state, Event.AGENT_LOST): State.LOST for state in State},
}


def next_state(state: State, event: Event) -> State:
    """Return where `event` leads from `state`; RuntimeError for one that cannot happen there."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise RuntimeError(f"{event} cannot happen to a world that is {state}") from None


@dataclass(frozen=True, slots=True)
class Machines:
    """The machine of each rank, and its number there, from 0 on."""

    by_rank: Mapping[int, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, hosts: Mapping[int, str], spec: WorldSpec) -> Machines:
        """Take them from the slots of a world on several machines, named by rank in `hosts`."""
        return cls({rank: (host, spec.slot(rank).local_rank) for rank, host in hosts.items()})

    @classmethod
    def one(cls, host: str, size: int) -> Machines:
        """Return those of ranks that are on one machine, whatever nodes are simulated there."""
        return cls({rank: (host, rank) for rank in range(size)})

    @property
    def names(self) -> tuple[str, ...]:
        """All machines, in the order of their first ranks."""
        return tuple(dict.fromkeys(self.by_rank[rank][0] for rank in sorted(self.by_rank)))

    def name(self, rank: int) -> str:
        """Name the machine of a rank; "" for one that is not known."""
        return self.by_rank.get(rank, ("", 0))[0]

    def who(self, ranks: Iterable[int]) -> str:
        """Write `ranks 0-1 on hosta, 2 on hostb`; on one machine `ranks 0-2`."""
        asked = tuple(ranks)
        if len(self.names) < 2:
            return name_ranks(asked)
        on: dict[str, list[int]] = {}
        for rank in sorted(set(asked)):
            on.setdefault(self.name(rank), []).append(rank)
        parts = ", ".join(f"{format_ranks(some)} on {host}" for host, some in on.items())
        return f"{'ranks' if len(set(asked)) > 1 else 'rank'} {parts}"

    def __str__(self) -> str:
        """Write `hosta`, `hosta, hostb and hostc`, `hosta and 7 other machines`."""
        first, *others = self.names or ("",)
        if len(others) > MOST_NAMED:
            return f"{first} and {len(others)} other machines"
        return ", ".join([first, *others[:-1]]) + (f" and {others[-1]}" if others else "")


MOST_NAMED = 3  # machines besides the first that a line has room for


@dataclass(frozen=True)
class Renumbering:
    """How many ranks there were, how many there are, and what became of those that stayed."""

    before: int
    after: int
    became: Mapping[int, int]

    @property
    def moved(self) -> Mapping[int, int]:
        """The ranks that have another number now, by the old one."""
        return {old: new for old, new in self.became.items() if old != new}

    @property
    def was(self) -> Mapping[int, int]:
        """The old number of each rank by the new one."""
        return {new: old for old, new in self.became.items()}

    @property
    def new(self) -> tuple[int, ...]:
        """The ranks that were not there before."""
        return tuple(rank for rank in range(self.after) if rank not in self.was)

    def then(self, later: Renumbering) -> Renumbering:
        """Return this and a later one as one."""
        became = {old: later.became[now] for old, now in self.became.items() if now in later.became}
        return Renumbering(self.before, later.after, became)

    def of(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return which ranks these are now, without those that are gone."""
        return tuple(sorted(self.became[rank] for rank in ranks if rank in self.became))


def compare(before: Processes, after: Processes) -> Renumbering:
    """Find what became of each rank; a new process in the place of one keeps its number."""
    now = {process: rank for rank, process in after.items()}
    became = {rank: now[process] for rank, process in before.items() if process in now}
    taken = {*became.values()}
    replaced = before.keys() - became.keys() - taken & after.keys()
    return Renumbering(len(before), len(after), {**became, **{rank: rank for rank in replaced}})


def size_text(size: int, moved: Mapping[int, int]) -> str:
    """Write `now 3 workers · rank 3 is now rank 2`."""
    return " · ".join(filter(None, [f"now {count(size, 'worker')}", moved_text(moved)]))


def moved_text(moved: Mapping[int, int]) -> str:
    """Write `rank 3 is now rank 1`, `ranks 4-7 are now ranks 0-3`; "" for none."""
    old, new = sorted(moved), sorted(moved.values())
    is_in_order = [moved[rank] for rank in old] == new
    if len(moved) < 2 or not is_in_order:
        return ", ".join(f"rank {rank} is now rank {moved[rank]}" for rank in old)
    return f"{name_ranks(old)} are now {name_ranks(new)}"


SETTLE_SECONDS = 0.1  # seconds that a rank is given to ask before one that comes after it

STAY_SECONDS = 0.3  # seconds for the rank that was answered last to ask again before others

NO_INPUT = (
    "input() and breakpoint() need JupyterLab or a terminal; this run has neither (nbclient, "
    "papermill). Set a variable instead of calling input()."
)

TO_RANKS = "-r"


class Prompts:
    """Those at which ranks of a task wait, one a rank; times are monotonic seconds.

    What is typed is for one rank, as its prompt says; they are answered in the order of the ranks.
    But a rank that asks again soon comes first: a debugger's conversation is not torn apart.
    """

    def __init__(self) -> None:
        self._open: dict[int, InputRequest] = {}
        self._changed = 0.0
        self._last: int | None = None
        self._answered = float("-inf")
        self._seconds = 0.0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that ask."""
        return tuple(sorted(self._open))

    def __getitem__(self, rank: int) -> InputRequest:
        return self._open[rank]

    def seconds(self, now: float) -> float:
        """Return how long any rank has waited for input."""
        return self._seconds + (now - self._changed if self._open else 0.0)

    def receive(self, rank: int, request: InputRequest, now: float) -> None:
        """Take in what a rank asks, in place of what it asked before."""
        self._count(now)
        self._open[rank] = request

    def drop(self, rank: int, now: float) -> None:
        """Forget what it asks: it has ended, or has its input."""
        self._count(now)
        self._open.pop(rank, None)

    def answered(self, rank: int, now: float) -> None:
        """Note that it has been answered."""
        self.drop(rank, now)
        self._last, self._answered = rank, now

    def next(self, now: float, unfinished: Collection[int]) -> int | None:
        """Return the rank to answer now; None where one that comes before may ask soon."""
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

    def prompt(self, rank: int) -> str:
        """Write what stands before the input box: `[rank 3] ipdb> `."""
        return f"[rank {rank}] {self._open[rank].prompt}"

    def answers(self, rank: int, typed: str, size: int) -> dict[int, str]:
        """Return which ranks get what of a line that was typed for this one.

        `-r all c`, in a debugger, is for all that wait in one now; UsageError for unknown ranks.
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
        """`rank 3 waits for your input`, and how to answer several at once; "" for none."""
        ranks = self.ranks
        if not ranks:
            return ""
        is_debugged = all(self._open[rank].by_debugger for rank in ranks)
        if len(ranks) == 1:
            what = "is in the debugger" if is_debugged else "waits for your input"
        else:
            what = "are in the debugger" if is_debugged else "wait for your input"
            what += ", one at a time"
            what += " · `-r all c` goes to all of them" if is_debugged else ""
        return f"{name_ranks(ranks)} {what}"
