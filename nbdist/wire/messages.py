"""The messages between a notebook and its agent, or head; `nbdist.output.events` has the outputs.

Messages are pickles on a socket that only this user can open; both processes run the same version
of nbdist.  `nbdist.world.agent_link` is the notebook's end of the connection, and
`nbdist.agent.notebook_link` is the other end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from nbdist.config import Patience, WorldConfig
from nbdist.output.events import Comm, Died, Output
from nbdist.values.payload import SegmentRef
from nbdist.wire.control import TypingQuestion
from nbdist.wire.log_files import GetLogs
from nbdist.wire.places import RankPosition
from nbdist.wire.spec import WorldSpec
from nbdist.wire.status import Usage
from nbdist.wire.work import InputReply, Task

# --- the notebook's code ----------------------------------------------------------------------

PART = 4 << 20
"""The most bytes of an archive in one `PutCode` message.

Other messages can pass between the parts of a large archive.
"""


class Landmark(NamedTuple):
    """A file that two machines share if both see the same inode and time of change at its path."""

    path: str
    inode: int
    changed: int

    @classmethod
    def of(cls, path: str) -> Landmark | None:
        """Describe the file at a path as this machine sees the file; return None on an OSError."""
        with suppress(OSError):
            status = os.stat(path)
            return cls(path, status.st_ino, status.st_ctime_ns)
        return None


# --- requests to an agent, each answered by one `AgentReply` -----------------------------------


class StartWorld(NamedTuple):
    """Start all workers and form their group; answered by `WorldStarted` or `StartFailure`."""

    spec: WorldSpec


class StopWorld(NamedTuple):
    """End all workers: idle workers have `grace` seconds to exit, all others are killed at once."""

    grace: float


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Ask for the status of each worker; answered by a tuple of `WorkerStatus`."""


@dataclass(frozen=True, slots=True)
class GetRefused:
    """Ask how many connections the head has refused; answered by a number, None without a head."""


class GetStacks(NamedTuple):
    """Ask for the stacks of some ranks; answered by a tuple of `Stack`."""

    ranks: tuple[int, ...]


class GetSecrets(NamedTuple):
    """Ask for the secrets in the environments of ranks; answered by a tuple of `RankSecrets`."""

    ranks: tuple[int, ...]


class RankSecrets(NamedTuple):
    """Values of a rank's environment variables, taken for secrets by their names and lengths."""

    rank: int
    values: tuple[str, ...]


class Consult(NamedTuple):
    """Ask an idle rank of `ranks` the question; answered by the rank's answer.

    At most two idle ranks are asked, one after the other.  The answer is None if neither answers in
    time, or if no rank is idle.
    """

    ranks: tuple[int, ...]
    question: TypingQuestion


@dataclass(frozen=True, slots=True)
class Heal:
    """Replace dead workers and connect the group of all workers again; answered by `Healed`."""


class Scale(NamedTuple):
    """Change the number of workers; answered by `Healed`, also if the number cannot change.

    If the number changes, the ranks in `keep` become ranks 0, 1, ... in this order; others end.
    """

    spec: WorldSpec
    keep: tuple[int, ...]


class Kill(NamedTuple):
    """Kill the live processes of some ranks; a `Died` with the reason `why` follows for each."""

    ranks: tuple[int, ...]
    why: str = ""


class SpareRanks(NamedTuple):
    """Kill none of these ranks for ignoring Stop until Stop is pressed again.

    Answered at once by a tuple of the ranks that are spared: they live, and were not killed yet.
    """

    ranks: tuple[int, ...]


class GetCode(NamedTuple):
    """Ask whether a node has the notebook's code with this digest; answered by `CodeHeld`.

    A node that has no copy yet, and on which `landmark` is the very same file, shares the folder
    and needs no copy.  If the node lacks the code, the archive follows in `PutCode` messages.
    """

    digest: str
    landmark: Landmark | None


class PutCode(NamedTuple):
    """A part of the archive with this digest; answered by `CodeHeld`.

    The archive is a tar file that zlib has compressed.  After the part that `is_last` the node
    unpacks the files, and removes files that only the previous archive has.  Other files, such as
    those of user code, stay.
    """

    digest: str
    part: bytes
    is_last: bool

    @classmethod
    def of(cls, digest: str, archive: bytes) -> Iterator[PutCode]:
        """Yield messages with the parts of an archive, of at most `PART` bytes each."""
        for start in range(0, len(archive), PART):
            end = start + PART
            yield cls(digest, archive[start:end], is_last=end >= len(archive))


@dataclass(frozen=True, slots=True)
class Grow:
    """Let the head add ranks on machines that have joined; answered by `Healed`."""


OfEachRank = GetStacks | GetSecrets | GetLogs
"""Requests about ranks; each is answered by a tuple whose items all have a `rank`."""

ReadRequest = GetStatus | GetRefused | OfEachRank | Consult | SpareRanks
Change = StartWorld | StopWorld | Heal | Scale | Grow | Kill
RequestBody = ReadRequest | Change | GetCode | PutCode


@dataclass(frozen=True, slots=True)
class WorldStarted:
    """All ranks are running, and share a group unless the world has no backend.

    The mappings are by rank.  `logs` has log folders, "" for none.  `missing` has a sentence for
    each name that nbdist needs and the workers' libraries lack, and for machines that have not
    come.  `hosts` is empty on a single machine.  `spec` is the world as started, or None in the
    answer to a `StartPart`.
    """

    pids: Mapping[int, int]
    logs: Mapping[int, str]
    missing: tuple[str, ...] = ()
    hosts: Mapping[int, str] = field(default_factory=dict)
    spec: WorldSpec | None = None


@dataclass(frozen=True, slots=True)
class StartFailure:
    """A rank could not start, or an agent if `rank` is None; all other workers have been ended."""

    rank: int | None
    host: str
    command: str
    reason: str
    last_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Healed:
    """The result of forming the group again; `problem` says why not all ranks share the group.

    `spec` is the world as it is now.  `not_scaled` says why the request to change the number of
    ranks failed, "" if no such request failed.  `hosts` are as in `WorldStarted`; `rejoin_hint`
    tells the user how lost machines can join again.
    """

    pids: Mapping[int, int]
    logs: Mapping[int, str]
    spec: WorldSpec
    problem: str = ""
    not_scaled: str = ""
    hosts: Mapping[int, str] = field(default_factory=dict)
    rejoin_hint: str = ""


@dataclass(frozen=True, slots=True)
class CodeHeld:
    """The state of the notebook's code on a node.

    `is_here` is True if the node has the whole code that was asked for or sent: in a copy, or
    because the folder `is_shared`.  `problem` says why an archive could not be unpacked, or is "".
    """

    host: str
    is_here: bool = False
    is_shared: bool = False
    problem: str = ""


Reply = Any
"""The answer to a request; the docstring of the request's class says which type it has."""


# --- messages in both directions ------------------------------------------------------------

R = TypeVar("R")


class AgentRequest(NamedTuple, Generic[R]):
    """A request that is answered by an `AgentReply` with the same id.

    Sent by the notebook to an agent or head, by a head to agents, by agents to the head's store.
    """

    id: int
    request: R


class Rules(NamedTuple):
    """How a task is supervised: facts about its world, and what `Patience` says about supervision.

    `size` is the number of ranks of the world, `backend` is "none" without a process group.  If
    `heals` is True, ranks that die are replaced after the task; if not, a death ends the others.
    """

    size: int
    backend: str = "none"
    heals: bool = True
    hang_timeout: float = Patience.hang_timeout
    aborts: bool = True
    timeout: float | None = None
    holds_stop: bool = False

    @property
    def has_group(self) -> bool:
        """Whether the ranks share a process group, whose collectives can be aborted."""
        return self.backend != "none"

    @property
    def runs_ahead(self) -> bool:
        """Whether a rank can finish a task before its collectives complete, as with nccl."""
        return "nccl" in self.backend


class RunTask(NamedTuple):
    """Notebook to agent: run this packed task on these ranks, and supervise it by the `rules`.

    `segments` are the segments of shared memory that the task refers to.
    """

    id: str
    ranks: tuple[int, ...]
    task: bytes
    segments: tuple[SegmentRef, ...] = ()
    rules: Rules = Rules(0)


class RequestLocations(NamedTuple):
    """Notebook to agent: locate these ranks; answered by a `Located` with the same `asked`."""

    ranks: tuple[int, ...]
    asked: float


class AbortRanks(NamedTuple):
    """Notebook to agent: abort the pending collectives of these ranks."""

    ranks: tuple[int, ...]


class Interrupt(NamedTuple):
    """Notebook to agent: interrupt the tasks of these ranks (`nbdist.agent.interrupts`).

    `number` is 1 for the first interrupt of the task.  The notebook counts its own interrupts, and
    each timeout that it has heard of.
    """

    ranks: tuple[int, ...]
    number: int = 1


class ReleaseRankValues(NamedTuple):
    """Notebook to agent: free what these ranks returned from a task, as nobody will read that."""

    task_id: str
    ranks: tuple[int, ...]


class SendInput(NamedTuple):
    """Notebook to agent: pass this reply to an input request on to the rank."""

    rank: int
    reply: InputReply


class ToWidget(NamedTuple):
    """Notebook to agent: pass a page's message on to one of the rank's widgets."""

    rank: int
    comm: Comm


class HandoverState(NamedTuple):
    """Notebook to agent: keep these fields for the next notebook that attaches to the world.

    `patience` is that of the last task, or the world's own.  `setup` has the `--setup`
    cells, each with the text by which the notebook knows the cell.
    """

    config: WorldConfig = WorldConfig()
    patience: Patience = Patience()
    setup: tuple[tuple[str, Task], ...] = ()


@dataclass(frozen=True, slots=True)
class BatchAcknowledged:
    """Notebook to agent: acknowledge one batch of outputs."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Notebook to agent: end all workers and exit."""


class Hello(NamedTuple):
    """Agent to notebook: the first message on a connection."""

    version: str
    pid: int
    host: str


class AttachedTask(NamedTuple):
    """A task in `Attached`: a rank has not finished it, or not all its outputs are acknowledged.

    `started` is when the task was sent, on the monotonic clock, and `started_ns` the same in
    nanoseconds since 1970.  `ended` has by rank when the rank finished, on the monotonic clock.
    """

    run: RunTask
    started: float
    started_ns: int
    ended: Mapping[int, float]


@dataclass(slots=True)
class Attached:
    """Agent to notebook: the world that the notebook attaches to.

    Sent after the `Hello`; the outputs that the agent has recorded follow.  Not frozen, because the
    agent keeps its own object of this class up to date (`nbdist.agent.world_record`).
    """

    memory: HandoverState
    spec: WorldSpec | None = None
    # By rank, as in `WorldStarted`.
    pids: Mapping[int, int] = field(default_factory=dict)
    logs: Mapping[int, str] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    # Machines that have joined, and could have ranks.
    came: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # as in `WorldStarted`
    # If False, the group must be formed again, as after collectives were aborted.
    is_whole: bool = True
    dead: dict[int, Died] = field(default_factory=dict)  # ranks that have not been replaced
    # By rank: the names that tasks have bound; for imported ones their module as in
    # `Done.imported`, for others None.
    bound: dict[int, dict[str, str | None]] = field(default_factory=dict)
    tasks: tuple[AttachedTask, ...] = ()  # in the order in which the tasks were sent
    next_call: int = 1  # the id that the notebook's next `AgentRequest` must have
    forgotten: int = 0  # how many tasks came before `tasks`: their outputs are gone
    # When the previous notebook detached, in seconds since 1970.
    since: float = 0.0


class AgentReply(NamedTuple):
    """The reply to the `AgentRequest` with this id."""

    id: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class Starting:
    """Agent to notebook: `up` workers have started; a head adds a `text` about its machines."""

    up: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Located:
    """Agent to notebook: the places of the live ranks that a `RequestLocations` asked for."""

    places: Mapping[int, RankPosition]
    asked: float = 0.0


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Agent to notebook: memory and GPU of busy ranks, sent every few seconds while a task runs."""

    usage: Mapping[int, Usage]


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """Head to notebook: this machine has joined, so `Grow` could add ranks."""

    host: str


@dataclass(frozen=True, slots=True)
class UnresponsiveHosts:
    """Head to notebook: these machines are silent; after `timeout` seconds a machine is lost."""

    hosts: tuple[str, ...]
    timeout: float


@dataclass(frozen=True, slots=True)
class Aborted:
    """Agent to notebook: Stop makes the agent abort the collectives in which these ranks wait."""

    places: Mapping[int, RankPosition]


class Decision(Enum):
    """An action of the agent or head about a task that it supervises."""

    ABORT = "abort collectives that can never end"
    ABORT_FOR_DEAD = "abort what may wait for a dead rank"
    TIME_OUT = "stop the task, as it takes longer than it may"
    END_SURVIVORS = "end the ranks that live, as the policy for deaths says"
    END_UNWAKEABLE = "end ranks that wait in what has been aborted, and that nothing wakes"


@dataclass(frozen=True, slots=True)
class Decided:
    """Agent or head to notebook: what was decided about a task, and is being done.

    `waiting` has the places of the ranks that the decision is about, `places` the last known places
    of all ranks.  `failed` are the ranks that have failed so far: their outputs may come later.
    """

    task_id: str
    decision: Decision
    waiting: Mapping[int, RankPosition] = field(default_factory=dict)
    places: Mapping[int, RankPosition] = field(default_factory=dict)
    failed: frozenset[int] = frozenset()


RankOutput = tuple[int, str, Output]
"""A rank, the id of its task ("" for none), and an output."""


class Outputs(NamedTuple):
    """Agent to notebook: a batch of outputs; the outputs of each rank are in their order."""

    items: tuple[RankOutput, ...]


OfRanks = RequestLocations | AbortRanks | Interrupt | ReleaseRankValues
Down = (
    AgentRequest[RequestBody]
    | RunTask
    | OfRanks
    | SendInput
    | ToWidget
    | HandoverState
    | BatchAcknowledged
    | Shutdown
)
Up = (
    Hello
    | Attached
    | AgentReply
    | Outputs
    | Located
    | Aborted
    | Decided
    | Starting
    | UsageReport
    | NodeJoined
    | UnresponsiveHosts
)
