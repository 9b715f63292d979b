"""What a world's ranks have in common, and what each worker process starts with.

Made by the notebook (`WorldSpec`) and by each agent (`WorkerStart`); a worker gets both before its
first import of user code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nbdist.seats import Seat, Seats, gpus_of, ranks_on, seat_of
from nbdist.system.processes import MODULE
from nbdist.topology import is_slice
from nbdist.wire.versions import Versions

LAST_LINE_SAYS = 78
"""The exit code of a worker that cannot start, for a reason that its last line says in full."""


@dataclass(frozen=True, slots=True)
class TorchStore:
    """A store of torch's own rendezvous, `--rdzv-backend` and `--rdzv-endpoint`.

    Ranks of one world have a `name` there that no other has.
    """

    backend: str
    endpoint: str
    name: str


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """What every rank of a world has in common.

    `environ` is the notebook's whole environment; `threads` is how many each rank may
    use for one operation; `backend` is None for no process group; `use_fork_server` forks
    the workers from a process that has torch imported, else each is spawned, with `wrap`
    before its command.  `seats` has where each rank sits, () on one node, and `room` for how
    many each simulated node has room.  `node` is the one that this spec is for, with its own
    `gpus`; None on one machine, which has all ranks, whose nodes are simulated.
    A rank's log files have `log_limit` bytes for each stream, or with 0 no limit.
    `sys_path` and `argv` are the notebook's, for what cells run; with `own_path` the
    interpreter's own path follows after it; with `share_gpus` several ranks of nccl can
    have one GPU; of each node's those are used that `gpus_asked` numbers, "" for all; with
    `sync_code` edited modules are imported anew before each task.
    `interface` is that of the network by which gloo connects ranks, and at `master_addr` user
    code's own rank 0 can listen; `master_port` 0 is one that the agent holds.
    With `torch_store` the ranks meet there.  `versions` are those of the notebook where a worker's
    may be others: of an interpreter or a wrapper that the user names.
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
    seats: Seats = ()
    room: tuple[int, ...] = ()
    node: int | None = None
    wrap: tuple[str, ...] = ()
    own_path: bool = False
    share_gpus: bool = False
    gpus_asked: str = ""
    master_addr: str = "localhost"
    master_port: int = 0
    interface: str = "lo"
    argv: tuple[str, ...] = ("",)
    sync_code: bool = False
    torch_store: TorchStore | None = None
    versions: Versions = field(default_factory=dict)

    @property
    def command(self) -> tuple[str, ...]:
        """The command line of a worker that is not forked."""
        return (*self.wrap, self.python, *MODULE, "nbdist.worker")

    def seat(self, rank: int) -> Seat:
        """Return which node the rank is on, and where there."""
        return seat_of(rank, self.world_size, self.seats)

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of the node that this is for."""
        if self.node is None:
            return tuple(range(self.world_size))
        return ranks_on(self.node, self.world_size, self.seats)

    def gpus_of(self, rank: int) -> tuple[str, ...]:
        """Choose what CUDA shows the rank: all of its node's, or its own MIG slice."""
        gpus = gpus_of(rank, self.seats if self.node is None else (), self.gpus)
        own = self.seat(rank).local_rank % max(1, len(gpus))
        return gpus[own : own + 1] if any(map(is_slice, gpus)) else gpus


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What one worker process needs before its first import of user code.

    `token` marks the escape sequences for its agent in its stdout;
    `store_path` is the file through which the ranks of this machine find one another, or
    else `store_socket` is where they ask for a store of all machines; the names of
    `over_file` begin with `over_path`;
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
    store_socket: str = ""

    @property
    def device(self) -> str:
        """Its own GPU as torch names it; shared where there are fewer than workers.

        Intel's are not counted: with their backend each rank has the one of its number.
        """
        if "xccl" in (self.world.backend or ""):
            return f"xpu:{self.local_rank}"
        return f"cuda:{self.local_rank % len(self.gpus)}" if self.gpus else "cpu"

    @property
    def gpu(self) -> str:
        """Its own GPU as CUDA_VISIBLE_DEVICES names it, "" for none."""
        return self.gpus[self.local_rank % len(self.gpus)] if self.gpus else ""

    @property
    def has_slice(self) -> bool:
        """Whether that is a MIG slice, of a GPU of which other ranks may have others."""
        return is_slice(self.gpu)

    @property
    def log_folder(self) -> Path | None:
        """Where the rank's log files are; torch's error file is beside them."""
        return Path(self.environ["TORCHELASTIC_ERROR_FILE"]).parent if self.world.log_dir else None

    @property
    def stack_file(self) -> str:
        """Into which it writes where its stack is, and its C code the stack when it crashes."""
        return self.connection_file.removesuffix(".json") + ".stack"

    @property
    def task_socket(self) -> str:
        """On which it waits for its agent's tasks."""
        return self.connection_file.removesuffix(".json") + ".tasks"


def over_file(path: str | Path, generation: int) -> Path:
    """Name the file that is there once forming this generation has been called off."""
    return Path(f"{path}.over{generation}")
