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
from pathlib import Path

from nbdist.output.events import Output
from nbdist.topology import Seat, seat_of
from nbdist.wire.interpreter import MODULE
from nbdist.wire.places import Place, Stack, WorkerStatus

# --- starting workers ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """What every rank of a world has in common.

    `environ` is the notebook's whole environment; `threads` is how many each rank may
    use for one operation; `backend` is None for no process group; `use_fork_server` forks
    the workers from a process that has torch imported, else each is spawned, with `wrap`
    before its command.  `per_node` is 0 for one node, else how many ranks each has.
    A rank's log files have `log_limit` bytes for each stream, or with 0 no limit.
    `sys_path` and `argv` are the notebook's, for what cells run; with `own_path` the
    interpreter's own path follows after it; with `share_gpus` several ranks of nccl can
    have one GPU.
    """

    world_size: int
    backend: str | None
    environ: Mapping[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    threads: int
    python: str
    gpus: tuple[str, ...] = ()
    name: str = "world"
    pool: str = "default"
    log_dir: str = ""
    log_limit: int = 0
    use_fork_server: bool = True
    per_node: int = 0
    wrap: tuple[str, ...] = ()
    own_path: bool = False
    share_gpus: bool = False
    argv: tuple[str, ...] = ("",)

    @property
    def command(self) -> tuple[str, ...]:
        """The command line of a worker that is not forked."""
        return (*self.wrap, self.python, *MODULE, "nbdist.worker")

    def seat(self, rank: int) -> Seat:
        """Which node the rank is on, and where there."""
        return seat_of(rank, self.world_size, self.per_node)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What one worker process needs before its first import of user code.

    `token` marks the escape sequences by which it talks to its agent on stdout;
    `store_path` is the file through which the ranks of this machine find one another, and
    the names of `over_file` begin with `over_path`;
    with `joins` it replaces a worker that has died, or is one more, and joins these groups,
    the ranks of each by its name, besides the world's own; `gpus` are those that
    it sees.  `sized_in` is the generation in which the world's group got its size.
    """

    rank: int
    local_rank: int
    local_world_size: int
    world: WorldSpec
    connection_file: str
    token: str
    store_path: str
    over_path: str
    generation: int
    environ: Mapping[str, str]
    joins: Mapping[str, tuple[int, ...]] | None = None
    gpus: tuple[str, ...] = ()
    sized_in: int = 1

    @property
    def device(self) -> str:
        """Its own GPU as torch names it; shared where there are fewer than workers."""
        return f"cuda:{self.local_rank % len(self.gpus)}" if self.gpus else "cpu"

    @property
    def stack_file(self) -> str:
        """Into which its C code writes stacks: at a signal, and when it crashes."""
        return self.connection_file.removesuffix(".json") + ".stack"

    @property
    def task_socket(self) -> str:
        """On which it waits for its agent's tasks."""
        return self.connection_file.removesuffix(".json") + ".tasks"


def over_file(path: str | Path, generation: int) -> Path:
    """It is there when forming this generation of the group has been called off."""
    return Path(f"{path}.over{generation}")


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


Request = StartWorld | StopWorld | GetStatus | GetStacks | Heal | Scale | Kill


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


Reply = WorldStarted | StartFailure | Healed | tuple[WorkerStatus, ...] | tuple[Stack, ...] | None


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
class Look:
    """Notebook to agent: say where these ranks are; answered by `Seen`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Free:
    """Notebook to agent: break open whatever collective these ranks wait in."""

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
class Seen:
    """Agent to notebook: where the ranks are that a `Look` asked for."""

    places: Mapping[int, Place]


@dataclass(frozen=True, slots=True)
class Freed:
    """Agent to notebook: collectives are being broken open in which these ranks wait."""

    places: Mapping[int, Place]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Agent to notebook: what ranks have shown since the last batch, in each rank's order.

    `task_id` is the task that was running then, "" where there was none.
    """

    items: tuple[tuple[int, str, Output], ...]


Down = Ask | Run | Look | Free | Interrupt | LetGo | Received | Leave
Up = Hello | Answer | Outputs | Seen | Freed | Starting


def to_bytes(message: Down | Up) -> bytes:
    """The message as one frame."""
    return pickle.dumps(message, protocol=5)


def down_from(frame: bytes) -> Down:
    """What the notebook told this agent."""
    message: Down = pickle.loads(frame)
    return message


def up_from(frame: bytes) -> Up:
    """What an agent told this notebook."""
    message: Up = pickle.loads(frame)
    return message
