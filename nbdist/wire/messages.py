"""The messages between a notebook and its agent, or head; `nbdist.output.events` has the outputs.

Messages are pickles on a socket that only this user can open: both processes run the same version
of nbdist.  `nbdist.world.agent_link` is the notebook's end, and `nbdist.agent.notebook_link` is the
agent's end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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
"""Most bytes of an archive in one `PutCode` message.

Smaller messages let other messages through in between.
"""


class Landmark(NamedTuple):
    """A file by which machines find out that they share it: they see the same inode and ctime."""

    path: str
    inode: int
    changed: int

    @classmethod
    def of(cls, path: str) -> Landmark | None:
        """Describe a file as this machine sees the file; return None if the file does not exist."""
        with suppress(OSError):
            status = os.stat(path)
            return cls(path, status.st_ino, status.st_ctime_ns)
        return None


# --- calls to an agent, each answered by exactly one `AgentReply` ------------------------------


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
    """Ask how many connections the head has refused; answered by a number."""


class GetStacks(NamedTuple):
    """Ask for the stacks of some ranks; answered by a tuple of `Stack`."""

    ranks: tuple[int, ...]


class GetSecrets(NamedTuple):
    """Ask for the secrets in the environments of ranks; answered by a tuple of `RankSecrets`."""

    ranks: tuple[int, ...]


class RankSecrets(NamedTuple):
    """The values of a rank's environment variables that are secrets, judged by their names."""

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
    """Change the number of workers; answered by `Healed`.

    The ranks in `keep` stay, and are numbered 0, 1, ... in this order; all other ranks end.
    """

    spec: WorldSpec
    keep: tuple[int, ...]


class Kill(NamedTuple):
    """Kill the processes of some ranks; a `Died` with the reason `why` follows for each."""

    ranks: tuple[int, ...]
    why: str = ""


class GetCode(NamedTuple):
    """Ask whether a node has the notebook's code with this digest; answered by `CodeHeld`.

    A node that has no copy yet, and on which `landmark` is the very same file, shares the folder
    and needs none.  Otherwise the archive follows in `PutCode` messages.
    """

    digest: str
    landmark: Landmark | None


class PutCode(NamedTuple):
    """A part of the archive with this digest; answered by `CodeHeld`.

    The archive is a tar file that zlib has compressed.  Once the node has the part that `is_last`
    it unpacks the files, and removes files of the previous archive that this one lacks.  Files
    that user code has written stay.
    """

    digest: str
    part: bytes
    is_last: bool

    @classmethod
    def of(cls, digest: str, archive: bytes) -> Iterator[PutCode]:
        """Divide an archive among messages of at most `PART` bytes."""
        for start in range(0, len(archive), PART):
            end = start + PART
            yield cls(digest, archive[start:end], is_last=end >= len(archive))


@dataclass(frozen=True, slots=True)
class Grow:
    """Add ranks on machines that have joined since the world started; answered by `Healed`."""


OfEachRank = GetStacks | GetSecrets | GetLogs
"""Requests that are answered by a tuple of rows, each of which has a `rank`."""

ReadRequest = GetStatus | GetRefused | OfEachRank | Consult
Change = StartWorld | StopWorld | Heal | Scale | Grow | Kill
RequestBody = ReadRequest | Change | GetCode | PutCode


@dataclass(frozen=True, slots=True)
class WorldStarted:
    """All ranks are running and share a group.

    The mappings are by rank.  `logs` has log folders, "" for none.  `missing` has a sentence for
    each name that the workers' libraries lack, and one for machines that have not come.  `hosts`
    is empty on a single machine.  `spec` is the world as it was started; it is None if this
    answers for one machine of several.
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
    """The group was formed again: all ranks share it unless `problem` says why they do not.

    `spec` is the world as it is now.  `not_scaled` says why the number of ranks did not change as
    asked, "" if it did.  `hosts` are as in `WorldStarted`; `rejoin_hint` tells the user how lost
    machines can join again.
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

    `is_here` is True if the node has the code that was asked for or sent: because it `is_shared`,
    or in a copy.  `problem` says why the archive could not be unpacked, "" otherwise.
    """

    host: str
    is_here: bool = False
    is_shared: bool = False
    problem: str = ""


Reply = Any
"""The answer to a request; the docstring of the request's class says which type it has."""


# --- what goes over the link ----------------------------------------------------------------

R = TypeVar("R")


class AgentRequest(NamedTuple, Generic[R]):
    """A request that is answered by an `AgentReply` with the same id.

    Sent by the notebook or a head to an agent, and by an agent to the head for the head's store.
    """

    id: int
    request: R


class RunTask(NamedTuple):
    """Notebook to agent: run this packed task on these ranks.

    `segments` are the segments of shared memory that the task refers to.
    """

    id: str
    ranks: tuple[int, ...]
    task: bytes
    segments: tuple[SegmentRef, ...] = ()


class RequestLocations(NamedTuple):
    """Notebook to agent: locate these ranks; answered by a `Located` with the same `asked`."""

    ranks: tuple[int, ...]
    asked: float


class AbortRanks(NamedTuple):
    """Notebook to agent: abort the pending collectives of these ranks."""

    ranks: tuple[int, ...]


class Interrupt(NamedTuple):
    """Notebook to agent: interrupt the tasks of these ranks (`nbdist.agent.interrupts`)."""

    ranks: tuple[int, ...]


class SpareRanks(NamedTuple):
    """Notebook to agent: kill none of these ranks for ignoring Stop until Stop is pressed again."""

    ranks: tuple[int, ...]


class ReleaseRankValues(NamedTuple):
    """Notebook to agent: the values that these ranks returned from a task have been read."""

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
    """Notebook to agent: keep this for the next notebook that attaches to the world.

    `patience` is the one of the last task that was sent, or the world's own.  `setup` has the
    set-up cells with their keys.
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


@dataclass(slots=True)
class Attached:
    """Agent to notebook: the world that the notebook attaches to.

    Sent after the `Hello`; the `Outputs` that no notebook has seen follow.  The agent keeps this
    object up to date while it runs (`nbdist.agent.world_record`), so it is not frozen.
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
    # If False, collectives were aborted or connections lost: the group must be formed again.
    is_whole: bool = True
    dead: dict[int, Died] = field(default_factory=dict)  # ranks that have not been replaced
    # By rank: the names that tasks have bound; for imported ones their module as in
    # `Done.imported`, for others None.
    bound: dict[int, dict[str, str | None]] = field(default_factory=dict)
    # The task whose end no notebook has seen, or None.
    run: RunTask | None = None
    started: float = 0.0  # when `run` was sent, on the monotonic clock
    started_ns: int = 0  # the same in nanoseconds since 1970
    # By rank: the time on the monotonic clock at which the rank finished `run`.
    ended: dict[int, float] = field(default_factory=dict)
    next_call: int = 1  # the id that the notebook's next `AgentRequest` must have
    forgotten: int = 0  # tasks before `run`, whose outputs are gone
    # When the previous notebook detached, in seconds since 1970.
    since: float = 0.0


class AgentReply(NamedTuple):
    """The reply to the `AgentRequest` of this id."""

    id: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class Starting:
    """Agent to notebook: `up` workers have started; `text` says which machines have come."""

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
    """Head to notebook: these machines do not respond; each is lost after `timeout` seconds."""

    hosts: tuple[str, ...]
    timeout: float


@dataclass(frozen=True, slots=True)
class Aborted:
    """Agent to notebook: Stop is about to abort the collectives in which these ranks wait."""

    places: Mapping[int, RankPosition]


RankOutput = tuple[int, str, Output]
"""A rank, the id of its task ("" for none), and an output."""


class Outputs(NamedTuple):
    """Agent to notebook: a batch of outputs in order."""

    items: tuple[RankOutput, ...]


OfRanks = RequestLocations | AbortRanks | Interrupt | SpareRanks | ReleaseRankValues
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
    | Starting
    | UsageReport
    | NodeJoined
    | UnresponsiveHosts
)
