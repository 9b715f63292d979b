"""What crosses between the notebook and an agent, as frozen dataclasses.

Both sides run the same version of nbdist (`Hello` carries it), so these travel as
pickles over a socket in a folder that only this user can open: who could write to it could
run code anyway, since running code is what it is for.  What ranks show is in
`nbdist.output.events`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.output.events import Output
from nbdist.wire.places import Place, Stack, Usage, WorkerStatus
from nbdist.wire.questions import Completions, Description, Question
from nbdist.wire.start import WorldSpec
from nbdist.wire.task import InputReply

# --- calls to an agent, each answered by exactly one `Answer` ------------------------------


@dataclass(frozen=True, slots=True)
class StartWorld:
    """Start all workers of `spec` and form their group; answered by `WorldStarted`."""

    spec: WorldSpec


@dataclass(frozen=True, slots=True)
class StopWorld:
    """End all workers, politely for `grace` seconds, then by force."""

    grace: float


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Answered by a tuple of `WorkerStatus`."""


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
    """Have as many workers as this spec says, and a group of them; answered by `Healed`."""

    spec: WorldSpec


@dataclass(frozen=True, slots=True)
class Kill:
    """End these ranks' processes now; `Died` follows for each."""

    ranks: tuple[int, ...]


Request = StartWorld | StopWorld | GetStatus | GetStacks | Consult | Heal | Scale | Kill


@dataclass(frozen=True, slots=True)
class WorldStarted:
    """All ranks are up and share a group; `logs` are their log folders ("" for none).

    `lacks` says what is missing in the libraries that they have, a sentence each.
    """

    pids: Mapping[int, int]
    logs: Mapping[int, str]
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StartFailure:
    """A rank could not start; nothing of the half-started world is left."""

    rank: int
    host: str
    command: str
    reason: str
    last_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Healed:
    """All ranks share a group again; `problem` says why they do not, "" when they do.

    There are as many as `pids`.  `not_scaled` says why they are as many as before, "" when
    they are as many as was asked for.
    """

    pids: Mapping[int, int]
    logs: Mapping[int, str]
    problem: str = ""
    not_scaled: str = ""


Reply = (
    WorldStarted
    | StartFailure
    | Healed
    | tuple[WorkerStatus, ...]
    | tuple[Stack, ...]
    | Completions
    | Description
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
    """Notebook to agent: pass the packed task on to those of its ranks that live there, at once."""

    id: str
    ranks: tuple[int, ...]
    task: bytes


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
    """Notebook to agent: have these ranks leave what they run (`nbdist.node.stopping`)."""

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


@dataclass(frozen=True, slots=True)
class Answer:
    """Agent to notebook: the reply to the `Ask` of this id."""

    id: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class Starting:
    """Agent to notebook: of the workers that are being started so many are up by now."""

    up: int


@dataclass(frozen=True, slots=True)
class Located:
    """Agent to notebook: where the ranks are that a `Locate` asked for."""

    places: Mapping[int, Place]


@dataclass(frozen=True, slots=True)
class Used:
    """Agent to notebook, every few seconds while a task runs: what its workers use, by rank."""

    usage: Mapping[int, Usage]


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


Down = Ask | Run | Locate | Abort | Interrupt | LetGo | Enter | Received | Leave
Up = Hello | Answer | Outputs | Located | Aborted | Starting | Used


def to_bytes(message: Down | Up) -> bytes:
    """Pack the message into one frame."""
    return pickle.dumps(message, protocol=5)


def down_from(frame: bytes) -> Down:
    """Unpack what the notebook has sent to this agent."""
    message: Down = pickle.loads(frame)
    return message


def up_from(frame: bytes) -> Up:
    """Unpack what an agent has sent to this notebook."""
    message: Up = pickle.loads(frame)
    return message
