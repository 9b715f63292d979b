"""Small tables about a world: its states, the machines of ranks, and open prompts.

`Engine`, `RankTable` and `TaskRun` use this module in the notebook's process.  Nothing in it does
I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from nbdist.errors import UsageError
from nbdist.output.events import InputRequest
from nbdist.topology import parse_ranks
from nbdist.wire.spec import WorldSpec
from nbdist.words import count, format_ranks, name_ranks


class WorldState(Enum):
    """The state of a world.  The value is the text that users read."""

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
        """Whether the world has worker processes that can answer requests or be ended."""
        return self not in (
            WorldState.STOPPED,
            WorldState.STOPPING,
            WorldState.STARTING,
            WorldState.LOST,
        )


class Event(Enum):
    """An event that can change the state of a world."""

    START = "start"
    STARTED = "started"
    START_FAILED = "start failed"
    RANK_DIED = "rank died"
    ABORTED = "collectives aborted"
    HEAL = "heal"
    SCALE = "scale"
    HEALED = "healed"
    HEAL_FAILED = "heal failed"
    AGENT_LOST = "agent lost"
    STOP = "stop"
    STOPPED = "all stopped"


FORMED = (WorldState.READY, WorldState.BROKEN)
"""The states to which events lead while a world has workers and is not healing or stopping."""

# No event leads to RUNNING, INTERRUPTING and STUCK: several tasks can run side by side, so
# `Engine.state` derives these states of a READY world from its tasks.
# In STARTING the notebook waits for replies of the agent, and handles none of its events.  If a
# worker exits before the group is formed, the reply to `StartWorld` is a failure (START_FAILED);
# the message about a later death is handled in READY.
TRANSITIONS: dict[tuple[WorldState, Event], WorldState] = {
    (WorldState.STOPPED, Event.START): WorldState.STARTING,
    (WorldState.STARTING, Event.STARTED): WorldState.READY,
    (WorldState.STARTING, Event.START_FAILED): WorldState.STOPPED,
    (WorldState.BROKEN, Event.HEAL): WorldState.HEALING,
    (WorldState.READY, Event.SCALE): WorldState.HEALING,
    (WorldState.HEALING, Event.HEALED): WorldState.READY,
    (WorldState.HEALING, Event.HEAL_FAILED): WorldState.BROKEN,
    (WorldState.HEALING, Event.RANK_DIED): WorldState.HEALING,
    (WorldState.STOPPING, Event.STOPPED): WorldState.STOPPED,
    # Messages about workers can still be unread when the end of the workers is requested.
    (WorldState.STOPPING, Event.RANK_DIED): WorldState.STOPPING,
    (WorldState.STOPPING, Event.ABORTED): WorldState.STOPPING,
    (WorldState.LOST, Event.START): WorldState.STARTING,
    **{(state, Event.RANK_DIED): WorldState.BROKEN for state in FORMED},
    # Collectives were aborted, or connections of the group were closed.
    **{(state, Event.ABORTED): WorldState.BROKEN for state in FORMED},
    **{(state, Event.STOP): WorldState.STOPPING for state in WorldState},
    **{(state, Event.AGENT_LOST): WorldState.LOST for state in WorldState},
}


def next_state(state: WorldState, event: Event) -> WorldState:
    """Return the state after `event`; RuntimeError if the event cannot happen in `state`."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise RuntimeError(f"{event} cannot happen to a world that is {state}") from None


@dataclass(frozen=True, slots=True)
class Machines:
    """By rank: the name of the rank's machine, and the number of the rank on it, from 0."""

    by_rank: Mapping[int, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, hosts: Mapping[int, str], spec: WorldSpec) -> Machines:
        """Return the table with each rank's machine from `hosts`, and local rank from `spec`."""
        return cls({rank: (host, spec.slot(rank).local_rank) for rank, host in hosts.items()})

    @classmethod
    def one(cls, host: str, size: int) -> Machines:
        """Return the table of a world whose ranks are all on `host`.

        The number of a rank on the machine is then the rank itself, even if nodes are simulated.
        """
        return cls({rank: (host, rank) for rank in range(size)})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all machines, in the order of their lowest ranks."""
        return tuple(dict.fromkeys(self.by_rank[rank][0] for rank in sorted(self.by_rank)))

    def name(self, rank: int) -> str:
        """Return the name of a rank's machine; "" if the rank is not known."""
        return self.by_rank.get(rank, ("", 0))[0]

    def who(self, ranks: Iterable[int]) -> str:
        """Write `ranks 0-1 on hosta, 2 on hostb`; on one machine `ranks 0-2`."""
        numbers = tuple(ranks)
        if len(self.names) < 2:
            return name_ranks(numbers)
        on: dict[str, list[int]] = {}
        for rank in sorted(set(numbers)):
            on.setdefault(self.name(rank), []).append(rank)
        parts = ", ".join(f"{format_ranks(some)} on {host}" for host, some in on.items())
        return f"{'ranks' if len(set(numbers)) > 1 else 'rank'} {parts}"

    def __str__(self) -> str:
        """Write `hosta`, or `hosta, hostb and hostc`, or `hosta and 7 other machines`."""
        first, *others = self.names or ("",)
        if len(others) > MAX_NAMED_MACHINES:
            return f"{first} and {len(others)} other machines"
        return ", ".join([first, *others[:-1]]) + (f" and {others[-1]}" if others else "")


MAX_NAMED_MACHINES = (
    3  # machines that a line names after the first; if there are more, they are only counted
)


def size_text(size: int, moved: Mapping[int, int]) -> str:
    """Write `now 3 workers`, or `now 3 workers · rank 3 is now rank 2` if ranks have moved."""
    return " · ".join(filter(None, [f"now {count(size, 'worker')}", moved_text(moved)]))


def moved_text(moved: Mapping[int, int]) -> str:
    """Write `rank 3 is now rank 1`, or `ranks 4-7 are now ranks 0-3`; "" if no rank has moved."""
    old, new = sorted(moved), sorted(moved.values())
    is_in_order = [moved[rank] for rank in old] == new
    if len(moved) < 2 or not is_in_order:
        return ", ".join(f"rank {rank} is now rank {moved[rank]}" for rank in old)
    return f"{name_ranks(old)} are now {name_ranks(new)}"


SETTLE_SECONDS = 0.1  # seconds to wait after a prompt, in case other ranks show prompts too

STAY_SECONDS = 0.3  # seconds to wait after an answer, in case the same rank shows another prompt

NO_INPUT = (
    "input() and breakpoint() need JupyterLab or a terminal; this run has neither (nbclient, "
    "papermill). Set a variable instead of calling input()."
)

TO_RANKS = "-r"


class Prompts:
    """The open prompts of a task: at most one per rank.  Times are monotonic seconds.

    The user answers one rank at a time, the lowest rank first.  But if the rank that was answered
    last asks again, it comes before the others, so that a debugger session is not interrupted.
    """

    def __init__(self) -> None:
        self._open: dict[int, InputRequest] = {}
        self._changed = 0.0
        self._last: int | None = None
        self._answered = float("-inf")
        self._seconds = 0.0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wait for input."""
        return tuple(sorted(self._open))

    def __getitem__(self, rank: int) -> InputRequest:
        return self._open[rank]

    def seconds(self, now: float) -> float:
        """Return the total time during which at least one rank waited for input."""
        return self._seconds + (now - self._changed if self._open else 0.0)

    def receive(self, rank: int, request: InputRequest, now: float) -> None:
        """Record a rank's prompt, in place of an earlier prompt of that rank."""
        self._count(now)
        self._open[rank] = request

    def drop(self, rank: int, now: float) -> None:
        """Remove the prompt of a rank that has finished or has got its input."""
        self._count(now)
        self._open.pop(rank, None)

    def answered(self, rank: int, now: float) -> None:
        """Remove the prompt of a rank that the user has answered.

        If the rank soon shows another prompt, the user answers that prompt next (`STAY_SECONDS`).
        """
        self.drop(rank, now)
        self._last, self._answered = rank, now

    def next(self, now: float, unfinished: Collection[int]) -> int | None:
        """Return the rank whose prompt the user should answer now; None if the caller should wait.

        Returns None if there is no prompt.  Also returns None for a short time after a prompt or an
        answer, if further ranks of `unfinished` may still show a prompt.
        """
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
        """Write the text in front of the input box: `[rank 3] ipdb> `."""
        return f"[rank {rank}] {self._open[rank].prompt}"

    def answers(self, rank: int, typed: str, size: int) -> dict[int, str]:
        """Return the input for each rank, from a line that was typed at the prompt of `rank`.

        Usually the whole line is input for `rank` alone.  In a debugger, `-r all c` sends `c` to
        all ranks that wait in a debugger now.  Raises UsageError if no named rank waits in a
        debugger, or if the world has no such ranks.
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
        """A text such as `rank 3 waits for your input`; "" without prompts.

        If several ranks are in the debugger, the text also says how to answer all of them.
        """
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
