"""What a world's ranks have in common, and what each worker process starts with.

Made by the notebook (`WorldSpec`) and by each agent (`WorkerStart`); a worker gets both before its
first import of user code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nbdist.topology import Seat, seat_of
from nbdist.wire.interpreter import MODULE


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
        """Return which node the rank is on, and where there."""
        return seat_of(rank, self.world_size, self.per_node)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What one worker process needs before its first import of user code.

    `token` marks the escape sequences for its agent in its stdout;
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
    """Name the file that is there once forming this generation has been called off."""
    return Path(f"{path}.over{generation}")
