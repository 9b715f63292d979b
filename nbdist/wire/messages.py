"""What crosses between the notebook and an agent; what ranks show is in `nbdist.output.events`.

Both run the same version of nbdist, so these are pickles, on a socket that only this user can open.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from nbdist.config import Patience, WorldConfig
from nbdist.output.events import Comm, Died, Output
from nbdist.system.folders import MARKER
from nbdist.values.payload import SegmentRef
from nbdist.wire.control import Question
from nbdist.wire.spec import WorldSpec
from nbdist.wire.views import GetLogs, Place, Usage
from nbdist.wire.work import InputReply, Task

# --- the notebook's code ----------------------------------------------------------------------

PART = 4 << 20
"""Bytes of files after which a message has enough: other messages need not wait for more."""

MANIFEST, NEW_FILE = ".nbdist-files", ".nbdist-new"
"""Names all files that a node was sent, so that nothing else is removed; is being written there."""

OWN_NAMES = (MARKER, MANIFEST, NEW_FILE)


class CodeFile(NamedTuple):
    """What is in a file; a program or not."""

    content: bytes
    is_program: bool = False

    @classmethod
    def read(cls, path: str) -> CodeFile:
        """Read a file; raises OSError."""
        with open(path, "rb") as file:
            return cls(file.read(), bool(os.fstat(file.fileno()).st_mode & stat.S_IXUSR))


def landmark(path: str) -> tuple[int, int] | None:
    """Return by which machines know the very same file, inode and ctime; None for no file."""
    with suppress(OSError):
        found = os.stat(path)
        return found.st_ino, found.st_ctime_ns
    return None


# --- calls to an agent, each answered by exactly one `Answer` ------------------------------


class StartWorld(NamedTuple):
    """Start all workers and form their group; answered by `WorldStarted`."""

    spec: WorldSpec


class StopWorld(NamedTuple):
    """End all workers, politely for `grace` seconds, then by force."""

    grace: float


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Answered by a tuple of `WorkerStatus`."""


@dataclass(frozen=True, slots=True)
class GetRefused:
    """Notebook to head: how many connections it refused; answered by a number."""


class GetStacks(NamedTuple):
    """Answered by a tuple of `Stack`."""

    ranks: tuple[int, ...]


class GetSecrets(NamedTuple):
    """Answered by a tuple of `RankSecrets`."""

    ranks: tuple[int, ...]


class Consult(NamedTuple):
    """Ask one of these ranks, an idle one if there is any; None where none answers in time."""

    ranks: tuple[int, ...]
    question: Question


@dataclass(frozen=True, slots=True)
class Heal:
    """Replace dead workers and form the group anew in all; answered by `Healed`."""


class Scale(NamedTuple):
    """Change the number of workers; answered by `Healed`.  The ranks of `keep` become the first."""

    spec: WorldSpec
    keep: tuple[int, ...]


class Kill(NamedTuple):
    """End these ranks' processes now; `Died` follows for each, and says `why`."""

    ranks: tuple[int, ...]
    why: str = ""


class GetCode(NamedTuple):
    """Have a copy of a folder with these files alone, unless the `landmarks` are the very same.

    Answered by `CodeHeld`; where the folder is not shared, `PutCode` follows.
    """

    landmarks: Mapping[str, tuple[int, int]]
    paths: frozenset[str]


class PutCode(NamedTuple):
    """Write some of the files that are new or have changed; answered by `CodeHeld`."""

    files: Mapping[str, CodeFile]
    is_last: bool

    @classmethod
    def of(cls, files: Iterable[tuple[str, CodeFile]]) -> Iterator[PutCode]:
        """Divide files among messages, none much larger than what one file needs."""
        part, size = dict[str, CodeFile](), 0
        for path, file in files:
            part[path] = file
            size += len(file.content)
            if size >= PART:
                yield cls(part, is_last=False)
                part, size = {}, 0
        yield cls(part, is_last=True)


@dataclass(frozen=True, slots=True)
class Grow:
    """Take in the machines that have come since the start; answered by `Healed`."""


OfEachRank = GetStacks | GetSecrets | GetLogs
"""Answered by rows, each of which has its `rank`."""

Look = GetStatus | GetRefused | OfEachRank | Consult
Change = StartWorld | StopWorld | Heal | Scale | Grow | Kill
Request = Look | Change | GetCode | PutCode


@dataclass(frozen=True, slots=True)
class WorldStarted:
    """All ranks are up and share a group; `logs` are their log folders ("" for none).

    `missing` says what their libraries lack, a sentence each.  Of several machines `hosts` has that
    of each rank.  `spec` is what the world became; a part of one has none.
    """

    pids: Mapping[int, int]
    logs: Mapping[int, str]
    missing: tuple[str, ...] = ()
    hosts: Mapping[int, str] = field(default_factory=dict)
    spec: WorldSpec | None = None


@dataclass(frozen=True, slots=True)
class StartFailure:
    """A rank, or with None an agent, could not start; nothing of the half-started world is left."""

    rank: int | None
    host: str
    command: str
    reason: str
    last_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Healed:
    """All ranks share a group again; `problem` says why they do not, "" when they do.

    `spec` is what the world became; `not_scaled` says why it has as many ranks as before.  `hosts`
    are as in `WorldStarted`; `rejoin_hint` brings back lost machines.
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
    """The notebook's folder is there, itself where it `is_shared`, or a `problem` prevents that."""

    host: str
    is_shared: bool = False
    problem: str = ""


Reply = Any
"""What the request says that it is answered by."""


# --- what goes over the link ----------------------------------------------------------------

R = TypeVar("R")


class Ask(NamedTuple, Generic[R]):
    """Notebook or head to agent, or of its store agent to head: do this, and `Answer`."""

    id: int
    request: R


class Run(NamedTuple):
    """Notebook to agent: pass the packed task, which refers to `segments`, on to its ranks."""

    id: str
    ranks: tuple[int, ...]
    task: bytes
    segments: tuple[SegmentRef, ...] = ()


class Locate(NamedTuple):
    """Notebook to agent: say where these ranks are; answered by `Located`, with this time."""

    ranks: tuple[int, ...]
    asked: float


class Abort(NamedTuple):
    """Notebook to agent: abort whatever collectives these ranks wait in."""

    ranks: tuple[int, ...]


class Interrupt(NamedTuple):
    """Notebook to agent: stop what these ranks run (`nbdist.agent.stopping`)."""

    ranks: tuple[int, ...]


class Spare(NamedTuple):
    """Notebook to agent: end none of these for Stop unless that is pressed again."""

    ranks: tuple[int, ...]


class ReleaseValues(NamedTuple):
    """Notebook to agent: what these ranks sent back of a task has been read."""

    task_id: str
    ranks: tuple[int, ...]


class SendInput(NamedTuple):
    """Notebook to agent: pass on to this rank what was typed for it."""

    rank: int
    reply: InputReply


class ToWidget(NamedTuple):
    """Notebook to agent: pass on to this rank what a page says to one of its widgets."""

    rank: int
    comm: Comm


class Remember(NamedTuple):
    """Notebook to agent: what the next notebook needs that takes the world over.

    `patience` is that of the next task, `setup` are the set-up cells with their keys.
    """

    config: WorldConfig = WorldConfig()
    patience: Patience = Patience()
    setup: tuple[tuple[str, Task], ...] = ()


@dataclass(frozen=True, slots=True)
class Received:
    """Notebook to agent: one more batch of outputs has been taken in."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Notebook to agent: end everything and go."""


class Hello(NamedTuple):
    """Agent to notebook, once, first."""

    version: str
    pid: int
    host: str


@dataclass(slots=True)
class Attached:
    """Agent to notebook, after the hello, where it takes a world over; `Outputs` follow.

    `run` is the task that no notebook has seen to its end, None for none; it was sent at
    `started`, monotonic, and ranks ended it at `ended`.  `bound` has by rank the names that
    tasks have bound, with what they imported; `dead` are ranks that were not replaced.
    Unless `is_whole` the group has to be formed anew; machines that `came` could have ranks.
    Calls are numbered from `next_call` on, `forgotten` counts tasks that have ended before,
    `since` is when the notebook before was gone.  Its agent keeps it up to date.
    """

    memory: Remember
    spec: WorldSpec | None = None
    pids: Mapping[int, int] = field(default_factory=dict)
    logs: Mapping[int, str] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    came: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    is_whole: bool = True
    dead: dict[int, Died] = field(default_factory=dict)
    bound: dict[int, dict[str, str | None]] = field(default_factory=dict)
    run: Run | None = None
    started: float = 0.0
    started_ns: int = 0
    ended: dict[int, float] = field(default_factory=dict)
    next_call: int = 1
    forgotten: int = 0
    since: float = 0.0


class Answer(NamedTuple):
    """The reply to the `Ask` of this id."""

    id: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class Starting:
    """Agent to notebook: `up` of the workers have started; `text` says which machines have come."""

    up: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Located:
    """Agent to notebook: where the ranks are that a `Locate` asked for."""

    places: Mapping[int, Place]
    asked: float = 0.0


@dataclass(frozen=True, slots=True)
class Used:
    """Agent to notebook, every few seconds while a task runs: what its workers use, by rank."""

    usage: Mapping[int, Usage]


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """Agent to notebook: this machine has come, and there could be more ranks: `Grow`."""

    host: str


@dataclass(frozen=True, slots=True)
class Silent:
    """Agent to notebook: these machines do not respond; each is lost after `timeout` seconds."""

    hosts: tuple[str, ...]
    timeout: float


@dataclass(frozen=True, slots=True)
class Aborted:
    """Agent to notebook: the collectives are being aborted in which these ranks wait."""

    places: Mapping[int, Place]


class Outputs(NamedTuple):
    """Agent to notebook: rank, task ("" for none) and output, since the last batch, in order."""

    items: tuple[tuple[int, str, Output], ...]


OfRanks = Locate | Abort | Interrupt | Spare | ReleaseValues
Down = Ask[Request] | Run | OfRanks | SendInput | ToWidget | Remember | Received | Shutdown
Up = Hello | Attached | Answer | Outputs | Located | Aborted | Starting | Used | NodeJoined | Silent
