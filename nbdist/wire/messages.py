"""What crosses between the notebook and an agent, as frozen dataclasses.

Both sides run the same version of nbdist (`Hello` carries it), so these travel as
pickles over a socket in a folder that only this user can open: who could write to it could
run code anyway, since running code is what it is for.  What ranks show is in
`nbdist.output.events`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbdist.output.events import Died, Output
from nbdist.topology import Seats
from nbdist.values.payload import SegmentRef
from nbdist.wire.control import Completions, Description, Question
from nbdist.wire.files import CodeFile, GetLogs, LogTail
from nbdist.wire.spec import WorldSpec
from nbdist.wire.views import Place, Stack, Usage, WorkerStatus
from nbdist.wire.work import InputReply, Task

if TYPE_CHECKING:
    from nbdist.config import WorldConfig

# --- calls to an agent, each answered by exactly one `Answer` ------------------------------


@dataclass(frozen=True, slots=True)
class StartWorld:
    """Start all workers of `spec` and form their group; answered by `WorldStarted`.

    A head needs the options too, with what the notebook has chosen (`wanted_elsewhere`).
    """

    spec: WorldSpec
    wanted: WorldConfig | None = None


@dataclass(frozen=True, slots=True)
class StopWorld:
    """End all workers, politely for `grace` seconds, then by force."""

    grace: float


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Answered by a tuple of `WorkerStatus`."""


@dataclass(frozen=True, slots=True)
class GetRefused:
    """Notebook to head: how many connections it refused; answered by a number."""


@dataclass(frozen=True, slots=True)
class GetStacks:
    """Answered by a tuple of `Stack`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Consult:
    """Put a question to one of these ranks, an idle one if there is any.

    Answered by what the rank answers, None where none does in time.
    """

    ranks: tuple[int, ...]
    question: Question


@dataclass(frozen=True, slots=True)
class Heal:
    """Replace dead workers and form the group anew in all; answered by `Healed`."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Have as many workers as this spec says, and a group of them; answered by `Healed`.

    `keep` are the ranks that stay, which are the first of the new world, in this order.
    """

    spec: WorldSpec
    keep: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kill:
    """End these ranks' processes now; `Died` follows for each, and says `why`."""

    ranks: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class GetCode:
    """Make the node's folder hold these files, by their paths; answered by `CodeHeld`.

    By the `landmarks` the node tells whether it shares the notebook's folder.
    """

    landmarks: Mapping[str, tuple[int, int]]
    files: Mapping[str, CodeFile]


@dataclass(frozen=True, slots=True)
class PutCode:
    """Take in some of what was missing; answered by `CodeHeld`."""

    contents: Mapping[CodeFile, bytes]


@dataclass(frozen=True, slots=True)
class Grow:
    """Take in the machines that have come since the start; answered by `Healed`."""


Request = (
    StartWorld
    | StopWorld
    | GetStatus
    | GetRefused
    | GetStacks
    | GetLogs
    | Consult
    | Heal
    | Scale
    | Grow
    | Kill
    | GetCode
    | PutCode
)


@dataclass(frozen=True, slots=True)
class WorldStarted:
    """All ranks are up and share a group; `logs` are their log folders ("" for none).

    `lacks` says what is missing in the libraries that they have, a sentence each.  `hosts` has
    the machine of each rank where there are several,
    and `spec` is what the world became, where that depends on other machines.
    """

    pids: Mapping[int, int]
    logs: Mapping[int, str]
    lacks: tuple[str, ...] = ()
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

    There are as many as `pids`, where `seats` says.  `not_scaled` says why they are as many as
    before, "" when they are as many as was asked for.  `hosts` has the machine of each where
    there are several, and `spec` is what the world became, as in `WorldStarted`.  `way_back` is
    what has lost machines back that do not come by themselves.
    """

    pids: Mapping[int, int]
    logs: Mapping[int, str]
    seats: Seats = ()
    problem: str = ""
    not_scaled: str = ""
    hosts: Mapping[int, str] = field(default_factory=dict)
    spec: WorldSpec | None = None
    way_back: str = ""


@dataclass(frozen=True, slots=True)
class CodeHeld:
    """What a node lacks of the notebook's files; it has written them where it lacks nothing.

    Where it is the very same folder there (`is_shared`) nothing has to be sent.
    """

    host: str
    lacks: tuple[CodeFile, ...] = ()
    is_shared: bool = False
    problem: str = ""


Reply = (
    WorldStarted
    | StartFailure
    | Healed
    | CodeHeld
    | tuple[WorkerStatus, ...]
    | tuple[Stack, ...]
    | tuple[LogTail, ...]
    | Completions
    | Description
    | int
    | None
)


# --- what goes over the link ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Notebook to agent: do this and answer under the same id."""

    id: int
    request: Request


@dataclass(frozen=True, slots=True)
class Run:
    """Notebook to agent: pass the packed task on to those of its ranks that live there, at once.

    `segments` is the shared memory that it refers to.
    """

    id: str
    ranks: tuple[int, ...]
    task: bytes
    segments: tuple[SegmentRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Locate:
    """Notebook to agent: say where these ranks are; answered by `Located`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Notebook to agent: abort whatever collectives these ranks wait in."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Notebook to agent: have these ranks leave what they run (`nbdist.agent.stopping`)."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spare:
    """Notebook to agent: end none of these for Stop unless that is pressed again."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LetGo:
    """Notebook to agent: what these ranks sent back of a task has been read."""

    task_id: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Enter:
    """Notebook to agent: pass on to this rank what was typed for it."""

    rank: int
    reply: InputReply


@dataclass(frozen=True, slots=True)
class Remember:
    """Notebook to agent: what the next notebook has to know that takes the world over.

    `options` are those of the world by the fields of `WorldConfig`, `patience` that of the task
    which comes next, `setup` the set-up cells with their keys.
    """

    options: Mapping[str, Any]
    patience: Mapping[str, Any] = field(default_factory=dict)
    setup: tuple[tuple[str, Task], ...] = ()


@dataclass(frozen=True, slots=True)
class Received:
    """Notebook to agent: one more batch of outputs has been taken in."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Notebook to agent: end everything and go."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Agent to notebook, once, first."""

    version: str
    pid: int
    host: str


@dataclass(slots=True)
class Attached:
    """Agent to notebook, after the hello, where it takes a world over; `Outputs` follow.

    `run` is the task that no notebook has seen to its end, None for none; it was sent at
    `started`, monotonic, and ranks ended it at `ended`.  `bound` has by rank the names that
    tasks have bound, with what they imported; `dead` are ranks that nobody has replaced.
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
    lacks: tuple[str, ...] = ()
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


@dataclass(frozen=True, slots=True)
class Answer:
    """Agent to notebook: the reply to the `Ask` of this id."""

    id: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class Starting:
    """Agent to notebook: of the workers that are being started so many are up by now.

    `text` says which of several machines have come.
    """

    up: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Located:
    """Agent to notebook: where the ranks are that a `Locate` asked for."""

    places: Mapping[int, Place]


@dataclass(frozen=True, slots=True)
class Used:
    """Agent to notebook, every few seconds while a task runs: what its workers use, by rank."""

    usage: Mapping[int, Usage]


@dataclass(frozen=True, slots=True)
class Came:
    """Agent to notebook: this machine has come, and there could be more ranks: `Grow`."""

    host: str


@dataclass(frozen=True, slots=True)
class Silent:
    """Agent to notebook, again and again: these machines, which may be none, do not respond.

    Each counts as lost after `timeout` seconds.
    """

    hosts: tuple[str, ...]
    timeout: float


@dataclass(frozen=True, slots=True)
class Aborted:
    """Agent to notebook: the collectives are being aborted in which these ranks wait."""

    places: Mapping[int, Place]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Agent to notebook: what ranks have shown since the last batch, in each rank's order.

    `task_id` is the task that was running then, "" where there was none.
    """

    items: tuple[tuple[int, str, Output], ...]


Down = Ask | Run | Locate | Abort | Interrupt | Spare | LetGo | Enter | Remember | Received | Leave
Up = Hello | Attached | Answer | Outputs | Located | Aborted | Starting | Used | Came | Silent
