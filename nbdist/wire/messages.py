"""What crosses between the notebook and an agent, as frozen dataclasses.

Both sides run the same version of nbdist (`Hello` carries it), so these travel as
pickles over a private channel; see `nbdist.wire.frames`.  What ranks show is in
`nbdist.wire.outputs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nbdist.layout import Seat, seat_of
from nbdist.wire.looks import Collective, GetStacks, RankState, Stack
from nbdist.wire.outputs import Output
from nbdist.wire.payload import Payload
from nbdist.wire.scripts import Script

DEFAULT_POOL = "default"
"""The pool of a world that names none; torchrun's name for the role of such workers."""

CONTROL_REQUEST = "nbdist_request"
"""The kind of message by which an agent asks a worker's control thread for something."""


# --- a cell on its way to the ranks -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sync:
    """Copy names from the rank `source` to the ranks `to`; None for those that lack any."""

    names: tuple[str, ...]
    source: int
    to: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """Source to run on some ranks at once.

    `names` is a pickled mapping to bind in the ranks first; after the source has run
    the values of the names in `fetch` come back in `Done.values`.  With
    `execution_count` the ranks number the cell as the notebook does, so that their
    tracebacks say `Cell In[5]`.  `sync` is done before the source.  A `script` is run instead
    of the source; `restarts` says how often the same has been run before, and how often it
    may be run again in all.  `log_level` is the level from which on somebody listens to the
    ranks' records of `logging`, None for nobody.
    """

    id: str
    source: str
    ranks: tuple[int, ...]
    names: Payload | None = None
    fetch: tuple[str, ...] = ()
    execution_count: int | None = None
    script: Script | None = None
    restarts: tuple[int, int] = (0, 0)
    sync: Sync | None = None
    log_level: int | None = None


# --- starting workers ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resources:
    """What each worker is to have, for launchers that can see to it; 0 where nothing was said.

    `cpus` is a number of cores, `memory` a number of MiB.
    """

    cpus: int = 0
    memory: int = 0


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """What every rank of a world has in common.

    `environ` is the notebook's whole environment; `threads` is how many each rank may
    use for one operation; `backend` is None for no process group; `use_nursery` forks
    the workers from a process that has torch imported, else each is spawned, with `wrap`
    before its command.  `per_node` is 0 for one node, else how many ranks each has, and
    `min_nodes` of these are enough to begin with; other hosts get the variables that
    `copy_env` has patterns for, and each worker `resources` where the launcher can see to it.
    With `own_path` the interpreter's own `sys.path` follows after `sys_path`; with
    `share_gpus` several ranks of nccl can have one GPU.
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
    pool: str = DEFAULT_POOL
    log_dir: str = ""
    use_nursery: bool = True
    per_node: int = 0
    min_nodes: int = 1
    wrap: tuple[str, ...] = ()
    own_path: bool = False
    copy_env: tuple[str, ...] = ()
    resources: Resources = Resources()
    share_gpus: bool = False

    @property
    def command(self) -> tuple[str, ...]:
        """The command line of a worker that is not forked."""
        return (*self.wrap, self.python, "-m", "nbdist.worker")

    def seat(self, rank: int) -> Seat:
        """Which node the rank is on, and where there."""
        return seat_of(rank, self.world_size, self.per_node)


@dataclass(frozen=True, slots=True)
class LivingGroups:
    """What a worker that replaces a dead one has to join besides the world's own group.

    `members` are the ranks of each group that survivors hold, by its name.
    """

    members: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RankStart:
    """What one worker process is told before its first import of user code.

    `token` marks the escape sequences by which it talks to its agent on stdout;
    `store_path` is the file through which the ranks of this machine find one another;
    with `living` it replaces a worker that has died, or is one more; `gpus` are those that
    it sees.  `born` is the generation in which the world's group got its size.
    """

    rank: int
    local_rank: int
    local_world_size: int
    world: WorldSpec
    connection_file: str
    token: str
    store_path: str
    generation: int
    environ: Mapping[str, str]
    living: LivingGroups | None = None
    gpus: tuple[str, ...] = ()
    born: int = 1

    @property
    def device(self) -> str:
        """Its own GPU as torch names it; shared where there are fewer than workers."""
        return f"cuda:{self.local_rank % len(self.gpus)}" if self.gpus else "cpu"

    @property
    def stack_file(self) -> str:
        """Into which its C code writes stacks: at a signal, and when it crashes."""
        return self.connection_file.removesuffix(".json") + ".stack"


def over_file(store: str | Path, generation: int) -> Path:
    """It is there when forming this generation of the group has been called off."""
    return Path(f"{store}.over{generation}")


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as its agent sees it; memory in bytes (PSS: shared pages count in part).

    A busy one has a `place` and its line's `code`; `collective` is its last, None if unknown.
    """

    rank: int
    pid: int
    host: str
    state: RankState
    busy_seconds: float
    memory: int
    device: str
    place: Place | None = None
    code: str = ""
    collective: Collective | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank that runs a cell is.

    `line` of the cell, or of a script's `file` with its text in `code`, 0 where unknown;
    `operation` is the collective it waits for, "" if it
    does something else; `counts` has by group how many collectives it has begun, `moved` the
    bytes that its connections have carried, `is_calm` whether none of gloo's threads has
    anything to do; `unfinished` how many collectives seem to have begun and not ended.
    `is_deaf`: C code holds the GIL, so nothing more is known, unless the line is.
    `is_stopped`: by a signal such as SIGSTOP.
    """

    line: int = 0
    operation: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    moved: int = 0
    is_calm: bool = False
    unfinished: int = 0
    is_deaf: bool = False
    is_stopped: bool = False
    file: str = ""
    code: str = ""


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
class Interrupt:
    """Send SIGINT to these ranks, as Stop does to an ordinary kernel."""

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


Request = StartWorld | StopWorld | GetStatus | GetStacks | Interrupt | Heal | Scale | Kill


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
class Call:
    """Notebook to agent: do this and answer under the same id."""

    id: int
    request: Request


@dataclass(frozen=True, slots=True)
class Run:
    """Notebook to agent: run the cell on those of its ranks that live there, all at once."""

    cell: Cell


@dataclass(frozen=True, slots=True)
class Look:
    """Notebook to agent: say where these ranks are; answered by `Seen`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Free:
    """Notebook to agent: break open whatever collective these ranks wait in."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LetGo:
    """Notebook to agent: what these ranks sent back of a cell has been read."""

    cell_id: str
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
    """Agent to notebook: the reply to the `Call` of this id."""

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
class Outputs:
    """Agent to notebook: what ranks have shown since the last batch, in each rank's order.

    `cell_id` is the cell that was running then, "" where there was none.
    """

    items: tuple[tuple[int, str, Output], ...]


Down = Call | Run | Look | Free | LetGo | Received | Leave
Up = Hello | Answer | Outputs | Seen | Starting
