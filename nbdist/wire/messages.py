"""The messages between a notebook and its agent, or its head if the world has several machines.

Messages are pickles on a socket that only this user can open; both processes run the same version
of nbdist.  The notebook sends and reads them in `nbdist.world.link_socket`, the agent or head in
`nbdist.agent.notebook_link`.  The outputs of ranks are in `nbdist.output.events`.
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
from nbdist.wire.world_facts import Renumbering, WorldFacts

# --- the notebook's code ----------------------------------------------------------------------

PART = 4 << 20
"""The most bytes of an archive in one `PutCode` message.

A large archive is sent in parts, so that other messages can be sent between two parts.
"""


class Landmark(NamedTuple):
    """A file by which a machine finds out whether it shares a folder with the notebook's machine.

    The machines share the file if both see the same inode and the same time of the last change
    (ctime, in nanoseconds) at its path.
    """

    path: str
    inode: int
    changed: int

    @classmethod
    def of(cls, path: str) -> Landmark | None:
        """Return the landmark of the file at a path on this machine; None on an OSError."""
        with suppress(OSError):
            status = os.stat(path)
            return cls(path, status.st_ino, status.st_ctime_ns)
        return None


# --- requests to an agent, each answered by one `AgentReply` -----------------------------------


class StartWorld(NamedTuple):
    """Start all workers and form their group; answered by `WorldFacts` or `StartFailure`."""

    spec: WorldSpec


class StopWorld(NamedTuple):
    """End all workers: idle workers have `grace` seconds to exit, all others are killed at once.

    Answered by None once all workers have ended.
    """

    grace: float


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Ask for the status of each worker; answered by a tuple of `WorkerStatus`."""


@dataclass(frozen=True, slots=True)
class GetRefused:
    """Ask how many connections the head has refused, for wrong keys or another protocol.

    Answered by a number, or by None on a single machine, where no head listens for agents.
    """


class GetStacks(NamedTuple):
    """Ask for the stacks of some ranks; answered by a tuple of `Stack`."""

    ranks: tuple[int, ...]


class GetSecrets(NamedTuple):
    """Ask for the secrets in the ranks' environments; answered by a tuple of `RankSecrets`."""

    ranks: tuple[int, ...]


class RankSecrets(NamedTuple):
    """The values of a rank's environment variables that look like secrets by name and length."""

    rank: int
    values: tuple[str, ...]


class Consult(NamedTuple):
    """Ask an idle rank about code that the user types; answered by the rank's answer.

    An agent asks an idle rank among `ranks`.  If this rank does not answer in time, the agent asks
    a second idle rank.  The answer is None if no rank is idle, or if none answers in time.
    """

    ranks: tuple[int, ...]
    question: TypingQuestion


@dataclass(frozen=True, slots=True)
class Heal:
    """Start new workers in place of dead ones, then form the group again; answered by `Healed`."""


class Scale(NamedTuple):
    """Change the number of workers to that in `spec`; answered by `Healed`.

    The ranks in `keep` become ranks 0, 1, ... in this order, and the workers of all other old ranks
    are ended.  If new ranks cannot be started, the world mostly keeps its old size; then the answer
    says why.
    """

    spec: WorldSpec
    keep: tuple[int, ...]


class Kill(NamedTuple):
    """Kill the live processes of some ranks; answered by None.

    A `Died` with the reason `why` follows for each killed rank.
    """

    ranks: tuple[int, ...]
    why: str = ""


class SpareRanks(NamedTuple):
    """Do not kill ranks that have not reacted to Stop, unless the user presses Stop again.

    Without this request the agent kills interrupted ranks that seem stuck.  Answered by a tuple of
    the spared ranks: all of `ranks` that are alive and are not being killed already.
    """

    ranks: tuple[int, ...]


class GetCode(NamedTuple):
    """Ask whether a node has the files of the archive with this digest; answered by `CodeHeld`.

    The archive has the files of the notebook's folder, for workers on other machines.  A node that
    finds the same file `landmark` shares the folder with the notebook, and needs no archive.  A
    node that already has a copy of the folder does not look for the file.  If the node lacks the
    archive, the notebook sends the archive in `PutCode` messages.
    """

    digest: str
    landmark: Landmark | None


class PutCode(NamedTuple):
    """A part of the archive with this digest; answered by `CodeHeld`.

    The archive is a tar file that zlib has compressed.  After the last part the node unpacks the
    archive, and removes the files of the previous archive that this archive lacks.  Files that
    cells have written into the folder stay.
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
    """Let the head add ranks on machines that have joined the world; answered by `Healed`."""


OfEachRank = GetStacks | GetSecrets | GetLogs
"""Requests about ranks; each is answered by a tuple whose items all have a `rank`."""

ReadRequest = GetStatus | GetRefused | OfEachRank | Consult | SpareRanks
Change = StartWorld | StopWorld | Heal | Scale | Grow | Kill
RequestBody = ReadRequest | Change | GetCode | PutCode


@dataclass(frozen=True, slots=True)
class StartFailure:
    """The world has not started, because a rank or an agent could not start.

    If `rank` is None, an agent could not start.  For the error message, `command` names the process
    that could not start, mostly by its command line, or is "", and `last_lines` has the last lines
    of its output.
    """

    rank: int | None
    host: str
    command: str
    reason: str
    last_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Healed:
    """The answer to `Heal`, `Scale` and `Grow`: the world after an attempt to form its group again.

    `facts.problem` says why the group could not be formed, or is "".  `change` says which new
    number each rank has.  `replaced` has, by new number, the deaths of the ranks in whose place new
    workers have joined the group; it is empty if the group is not whole.  `not_scaled` says why the
    number of ranks was not changed, or is "" if the number was changed or if no change was
    requested.
    """

    facts: WorldFacts
    change: Renumbering
    replaced: Mapping[int, Died] = field(default_factory=dict)
    not_scaled: str = ""


@dataclass(frozen=True, slots=True)
class CodeHeld:
    """The state of the notebook's code on a node; the head combines the answers of all nodes.

    `is_here` is True if the node has the whole archive of the `GetCode` or `PutCode`: unpacked in a
    copy, or in a folder that the node shares with the notebook (`is_shared`).  `problem` says why
    the node did not get the archive or could not unpack it, or is "".
    """

    host: str
    is_here: bool = False
    is_shared: bool = False
    problem: str = ""


Reply = Any
"""The answer to a request; the docstring of the request's class says which type the answer has."""


# --- messages in both directions ------------------------------------------------------------

R = TypeVar("R")


OWN_REQUEST = 0
"""The id of requests that an agent or head makes itself; nobody waits for the replies."""


class AgentRequest(NamedTuple, Generic[R]):
    """A request that is answered by an `AgentReply` with the same id.

    A notebook sends requests to its agent or head, a head to its agents, and the agents of several
    machines to the head's store.
    """

    id: int
    request: R


class Rules(NamedTuple):
    """How the agent or head supervises a task: facts about the world, and options of the user.

    `size` is the number of ranks of the world; `backend` is "none" without a process group.  If
    `heals` is True, ranks that die are replaced after the task.  If `heals` is False, a death makes
    the agent end all ranks that have not finished the task.  `nbdist.config.Patience` explains the
    other fields, which are options.
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
    """Notebook to agent: run this pickled task on these ranks, and supervise it by the `rules`.

    `segments` are the segments of shared memory that the task refers to.
    """

    id: str
    ranks: tuple[int, ...]
    task: bytes
    segments: tuple[SegmentRef, ...] = ()
    rules: Rules = Rules(0)


class RequestLocations(NamedTuple):
    """Notebook to agent: find out where in its code each of these ranks is; answered by `Located`.

    `asked` is the time of the request.  The answer repeats this time, so that the notebook can tell
    the answer from the answer to an earlier request.
    """

    ranks: tuple[int, ...]
    asked: float


class AbortRanks(NamedTuple):
    """Notebook to agent: abort the pending collectives of these ranks."""

    ranks: tuple[int, ...]


class Interrupt(NamedTuple):
    """Notebook to agent: interrupt the tasks of these ranks (`nbdist.agent.interrupts`).

    `number` counts the interrupts of the task, from 1 on.  If the agent has interrupted the ranks
    because of the task's timeout, and has reported this to the notebook, that interrupt counts too.
    """

    ranks: tuple[int, ...]
    number: int = 1


class ReleaseRankValues(NamedTuple):
    """Notebook to agent: free the values that these ranks returned from a task.

    Sent when the notebook has read the values, or when nobody will read them any more.
    """

    task_id: str
    ranks: tuple[int, ...]


class SendInput(NamedTuple):
    """Notebook to agent: pass this reply to an input request on to the rank."""

    rank: int
    reply: InputReply


class ToWidget(NamedTuple):
    """Notebook to agent: pass a message of a notebook's page on to a widget on the rank."""

    rank: int
    comm: Comm


class OpenDebugger(NamedTuple):
    """Notebook to agent: let the rank start its debugger, and connect to the debugger.

    `session` is a number that the notebook has not used before.  The agent passes on what the
    debugger writes in this session, and reports the end of the session, by `FromDebugger`.  An
    earlier session of the rank is closed.
    """

    rank: int
    session: int


class ToDebugger(NamedTuple):
    """Notebook to agent: send the rank's debugger a request of the Debug Adapter Protocol."""

    rank: int
    session: int
    text: str


class CloseDebuggers(NamedTuple):
    """Notebook to agent: end the debuggers of these ranks, so that stopped code goes on."""

    ranks: tuple[int, ...]


class HandoverState(NamedTuple):
    """Notebook to agent: keep these fields for the next notebook that attaches to the world.

    `config` has the world's options.  `patience` has the options by which the last task was
    supervised, or else those of the world.  `setup` has the `--setup` cells, each as a pair of the
    text by which the notebook identifies the cell, and its task.
    """

    config: WorldConfig = WorldConfig()
    patience: Patience = Patience()
    setup: tuple[tuple[str, Task], ...] = ()


@dataclass(frozen=True, slots=True)
class BatchAcknowledged:
    """Notebook to agent: the notebook has read one batch of outputs (`Outputs`)."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Notebook to agent: end all workers and exit."""


class Hello(NamedTuple):
    """Agent to notebook: the first message on a connection, by which versions are compared."""

    version: str
    pid: int
    host: str


class AttachedTask(NamedTuple):
    """A task that some rank has not finished, or whose outputs no notebook has acknowledged.

    `started` is the time when the agent received the task, on the monotonic clock, and `started_ns`
    the same time in nanoseconds since 1970.  `ended` has, for each rank that has finished the task,
    the time when the rank finished, on the monotonic clock.
    """

    run: RunTask
    started: float
    started_ns: int
    ended: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Attached:
    """Agent to notebook: the world that the notebook attaches to.

    Sent after the `Hello`; the outputs that the agent has recorded follow.
    """

    facts: WorldFacts
    memory: HandoverState
    # By rank: the variables that tasks have bound.  For an imported name, the value is its import
    # path, such as `torch.nn:Linear` (`Done.imported`).  For any other name it is None.
    bound: Mapping[int, Mapping[str, str | None]]
    tasks: tuple[AttachedTask, ...]  # in the order in which the tasks were sent
    next_call: int  # the id that the notebook's next `AgentRequest` must have
    forgotten: int  # how many more tasks there were, whose outputs the agent has dropped
    since: float  # when the previous notebook detached, in seconds since 1970


class AgentReply(NamedTuple):
    """The reply to the `AgentRequest` with this id."""

    id: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class Starting:
    """Agent to notebook, during `StartWorld`: `up` workers have started their kernels so far.

    A head adds a `text` about its machines.
    """

    up: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Located:
    """Agent to notebook: the places of the live ranks that a `RequestLocations` asked for."""

    places: Mapping[int, RankPosition]
    asked: float = 0.0


class FromDebugger(NamedTuple):
    """Agent to notebook: a message that the debugger of a rank has written, or a session's end.

    `is_stopped` is True while a thread of the rank stands at a breakpoint or after a step.  If
    `text` is "", the session has ended; then `problem` says why the session could not begin, and is
    "" if it had begun.
    """

    rank: int
    session: int
    text: str = ""
    is_stopped: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Agent to notebook: how much memory and GPU busy ranks use, sent every few seconds."""

    usage: Mapping[int, Usage]


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """Head to notebook: this machine has joined the world, so `Grow` can add ranks there."""

    host: str


@dataclass(frozen=True, slots=True)
class UnresponsiveHosts:
    """Head to notebook: these machines are silent; () if no machine is silent any more.

    A machine counts as lost once it has been silent for `timeout` seconds.
    """

    hosts: tuple[str, ...]
    timeout: float


@dataclass(frozen=True, slots=True)
class Aborted:
    """Agent to notebook: after a Stop, the agent aborts the collectives in which some ranks wait.

    `places` says by rank where these ranks are in their code.
    """

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
    """Agent or head to notebook: a decision about a task, which the sender is carrying out.

    `waiting` has the known places of ranks that have not finished the task.  With the decision
    END_UNWAKEABLE, it has the places of the ranks that are ended.  `places` has the last known
    places of the ranks that run no other task.  `failed` are the ranks that have failed so far; the
    notebook may receive their errors after this message.
    """

    task_id: str
    decision: Decision
    waiting: Mapping[int, RankPosition] = field(default_factory=dict)
    places: Mapping[int, RankPosition] = field(default_factory=dict)
    failed: frozenset[int] = frozenset()


RankOutput = tuple[int, str, Output]
"""A rank, the id of its task ("" for none), and an output."""


class Outputs(NamedTuple):
    """Agent to notebook: a batch of outputs, in which each rank's outputs keep their order."""

    items: tuple[RankOutput, ...]


OfRanks = RequestLocations | AbortRanks | Interrupt | ReleaseRankValues | CloseDebuggers
Down = (
    AgentRequest[RequestBody]
    | RunTask
    | OfRanks
    | SendInput
    | ToWidget
    | OpenDebugger
    | ToDebugger
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
    | FromDebugger
    | UsageReport
    | NodeJoined
    | UnresponsiveHosts
)
