"""What a world is to be (`WorldSpec`), and what each worker process starts with (`WorkerStart`)."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from nbdist.config import WorldConfig
from nbdist.errors import UsageError
from nbdist.system.processes import MODULE
from nbdist.topology import Slot, Slots, is_slice, uses_nccl

Versions = Mapping[str, str]
"""By what it is the version of; "" where it is not there."""


class Difference(NamedTuple):
    """What differs, and its two versions."""

    what: str
    there: str
    here: str

    @property
    def why(self) -> str:
        """Why that cannot be; Python's functions crash another one, not only fail there."""
        return f"functions and values go to the same minor version of {self.what} only"


@cache
def versions_here() -> Versions:
    """Look at this interpreter; nothing is imported."""
    found = {"Python": platform.python_version()}
    for package in ("torch", "cloudpickle"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


def difference(there: Versions, here: Versions) -> Difference | None:
    """Find the first that is not of the same minor version in both, where both have it."""
    for what, ours in here.items():
        theirs = there.get(what, "")
        if theirs and ours and theirs.split(".")[:2] != ours.split(".")[:2]:
            return Difference(what, theirs, ours)
    return None


LAST_LINE_SAYS = 78
"""The exit code of a worker that cannot start, for a reason that its last line says in full."""


class TorchStore(NamedTuple):
    """A store of torch's own rendezvous, `--rdzv-backend` and `--rdzv-endpoint`.

    Ranks of one world have a `name` there that no other has.
    """

    backend: str
    endpoint: str
    name: str


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """What every rank of a world has in common.

    `environ` is the notebook's whole environment, on other machines what was asked for: with
    secrets.  `threads` is how many each rank may use for one operation; `backend` is None for no
    process group.  `slots` has where each rank sits, () on one node, `room` for how many each
    simulated node has room; `node` is the one that this spec is for, with its own `gpus`, None on
    one machine, whose nodes are simulated.  `log_limit` is bytes for each stream of a rank, 0 for
    no limit.  `sys_path` and `argv` are the notebook's; with `own_path` the interpreter's own path
    follows.  gloo connects ranks by the `interface`; user code's own rank 0 can listen at
    `master_addr` and `master_port`, 0 for one that the agent holds.  With `torch_store` the ranks
    meet there.  `versions` are the notebook's where the user names an interpreter or a wrapper.
    `config` is what was asked for, with what the notebook chose where nothing was said: launcher,
    name, log folder, interpreter elsewhere, and whether workers are forked.
    """

    world_size: int
    backend: str | None
    environ: Mapping[str, str] = field(repr=False)
    cwd: str
    sys_path: tuple[str, ...]
    threads: int
    python: str
    gpus: tuple[str, ...] = ()
    log_limit: int = 0
    slots: Slots = ()
    room: tuple[int, ...] = ()
    node: int | None = None
    own_path: bool = False
    master_addr: str = "localhost"
    master_port: int = 0
    interface: str = "lo"
    argv: tuple[str, ...] = ("",)
    torch_store: TorchStore | None = None
    versions: Versions = field(default_factory=dict)
    config: WorldConfig = field(default_factory=WorldConfig)

    @property
    def name(self) -> str:
        """The name of the world, which the notebook has chosen if the user has not."""
        return self.config.name or ""

    @property
    def wrap(self) -> tuple[str, ...]:
        """What stands before each worker's command; on other machines agents are wrapped."""
        return self.config.wrapper if self.node is None else ()

    @property
    def command(self) -> tuple[str, ...]:
        """The command line of a worker that is not forked."""
        return (*self.wrap, self.python, *MODULE, "nbdist.worker")

    @property
    def nodes(self) -> list[int]:
        """The node of each rank."""
        return [each.node for each in self.slots] or [0] * self.world_size

    def slot(self, rank: int) -> Slot:
        """Return a rank's slot; as torchrun does it counts nodes that have ranks, without a gap."""
        node, local_rank = self.slots[rank] if self.slots else (0, rank)
        there = sorted({*self.nodes})
        return Slot(local_rank, self.nodes.count(node), there.index(node), len(there))

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of the node that this is for."""
        return tuple(rank for rank, node in enumerate(self.nodes) if self.node in (None, node))

    def gpus_of(self, rank: int) -> tuple[str, ...]:
        """Choose what CUDA shows the rank: all GPUs of its node, or its own MIG slice.

        Simulated nodes have some each, as CUDA_VISIBLE_DEVICES, so that LOCAL_RANK is a valid
        index on each; where there are too few GPUs, nodes share some.
        """
        gpus, nodes = self.gpus, self.nodes
        if gpus and self.node is None and len({*nodes}) > 1:
            node = nodes[rank]
            first, here = sum(each < node for each in nodes), min(nodes.count(node), len(gpus))
            gpus = tuple(gpus[(first + each) % len(gpus)] for each in range(here))
        own = self.slot(rank).local_rank % max(1, len(gpus))
        return gpus[own : own + 1] if any(map(is_slice, gpus)) else gpus


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What one worker process needs before its first import of user code.

    `token` marks the escape sequences for its agent in its stdout.  The ranks of this machine find
    one another through the file `store_path`, or those of all machines through `store_socket`.
    Names of a `cancel_file` begin with `cancel_path`.  With `joins` a worker is replaced or added,
    and joins these groups, the ranks of each by name, besides the world's own.  `gpus` are those
    that it sees; `sized_in` is the generation in which the world's group got its size.
    """

    rank: int
    world: WorldSpec
    connection_file: str
    token: str
    store_path: str
    cancel_path: str
    generation: int
    environ: Mapping[str, str]
    joins: Mapping[str, tuple[int, ...]] | None = None
    gpus: tuple[str, ...] = ()
    sized_in: int = 1
    store_socket: str = ""

    @property
    def local_rank(self) -> int:
        """Its number among the ranks of its node."""
        return self.world.slot(self.rank).local_rank

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
        has_logs = self.world.config.log_dir
        return Path(self.environ["TORCHELASTIC_ERROR_FILE"]).parent if has_logs else None

    @property
    def stack_file(self) -> str:
        """Into which it writes where its stack is, and its C code the stack when it crashes."""
        return self.connection_file.removesuffix(".json") + ".stack"

    @property
    def task_socket(self) -> str:
        """On which it waits for its agent's tasks."""
        return self.connection_file.removesuffix(".json") + ".tasks"


def cancel_file(path: str | Path, generation: int) -> Path:
    """Name the file that is there once forming this generation has been called off."""
    return Path(f"{path}.over{generation}")


def moved_path(path: str, here: str, there: str) -> str:
    """Return the path below `there` where it lies below `here`; else the path itself."""
    if path == here or path.startswith(f"{here}/"):
        return there + path[len(here) :]
    return path


LINK_TIMEOUT = 10.0
"""Seconds without a link after which a machine counts as lost, by default.

TCP sends what was lost again after 0.2, 0.6, 1.4, 3.0 and 6.2 s: a cable that is out for a second
may be silent for nearly three.
"""


# --- environment variables --------------------------------------------------------------------

NBDIST_DECIDES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME"),
        *("MASTER_ADDR", "MASTER_PORT", "NBDIST_WORLD", "PYDEVD_DISABLE_FILE_VALIDATION"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
    }
)
"""What a user cannot set for the workers, because it says which rank each is."""

WITH_NCCL: Mapping[str, str] = {
    # Else torch's watchdog ends a worker whose communicator was aborted or whose context is
    # corrupt, before a cell can say so.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Else a first abort writes Flight Recorder's trace to a file, for up to 15 s.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Else the watchdog sleeps for four times as many milliseconds where a rank has died, as if it
    # had written one: a minute, for which the end of its group waits (seen with torch 2.11).
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # What it sets up in NVLink's switches does not survive an abort, so healing demands it
    # (NVIDIA's in-process restart does too).
    "NCCL_NVLS_ENABLE": "0",
    # Else a rank connects with its first collective of a kind, where it waits for the others in
    # C++ before Flight Recorder has that (NCCL from 2.22 on).
    "NCCL_RUNTIME_CONNECT": "0",
    # nccl's own monitor listens on TCP and answers everybody; like Flight Recorder it counts what
    # a rank has launched, and knows neither what has ended nor send and recv.
    "NCCL_RAS_ENABLE": "0",
}
"""What ranks whose backend uses nccl have besides; and NCCL_SOCKET_IFNAME.

Read in torch 2.13's and 2.15's headers and libraries.  TORCH_NCCL_DESYNC_DEBUG is never set: torch
then takes TORCH_NCCL_ASYNC_ERROR_HANDLING=0 for 3.
"""

NBDIST_SETS = NBDIST_DECIDES | {
    *("OMP_NUM_THREADS", "PYTHON_EXEC", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "MPLBACKEND"),
    *(*WITH_NCCL, "NCCL_SOCKET_IFNAME"),
}
"""All names of `torchrun_variables`."""


DEBUG_VARIABLES: Mapping[str, str] = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "PYTHONFAULTHANDLER": "1",
}
"""torchx's `--debug`; the last is for processes that a worker starts, it has its own.

But for NCCL_DESYNC_DEBUG, with which torch ends a worker whose collective waits too long.
"""

SET_ON_IMPORT = re.compile(
    r"KMP_(DUPLICATE_LIB_OK|INIT_AT_FORK)|PYTORCH_NVML_BASED_CUDA_CHECK|TORCHINDUCTOR_CACHE_DIR"
    r"|QT_QPA_.*|PYDEVD_.*|WANDB_SERVICE|_.*"
)
"""Variables that sklearn, torch, Lightning, polars and others set in each process they are in.

A rank that has its own value keeps it when the notebook's value changes.
"""

READ_AT_START = re.compile(
    r"(LD|MALLOC|KMP|GOMP|MKL|OPENBLAS|GLIBC)_.*|PYTHON(?!_EXEC|FAULTHANDLER|PATH).*"
    r"|TORCH_(LOGS|LOGS_.*|CPP_LOG_LEVEL|SHOW_CPP_STACKTRACES)"
)
"""What an interpreter, or a library on import, reads once: too late for a fork of either."""

MULTI_RANK_NCCL = (2, 30)
"""The first version of NCCL that takes several ranks on one GPU by itself."""


def check_nvls(backend: str, environ: Mapping[str, str], *, shared: bool) -> str:
    """Return a line on what the user's NCCL_NVLS_ENABLE costs, "" where it is not set.

    UsageError where ranks share a GPU, or have slices of one: NCCL would refuse to connect them.
    """
    value = environ.get("NCCL_NVLS_ENABLE", "0")
    if value == "0" or not uses_nccl(backend):
        return ""
    if value == "1" and shared:
        raise UsageError(
            "NCCL_NVLS_ENABLE=1 cannot work where several ranks are on one GPU: "
            "`--env NCCL_NVLS_ENABLE=0` turns it off."
        )
    return (
        f"NCCL_NVLS_ENABLE={value}: faster, but after an aborted collective the group may not be "
        "rebuilt; ranks are restarted then and lose their variables."
    )


def sharing_variables(
    rank: int, version: tuple[int, ...], environ: Mapping[str, str], *, slices: bool = False
) -> Mapping[str, str]:
    """Choose what lets NCCL of this version have several ranks on one GPU, before its first use.

    MIG `slices` of one GPU count as that GPU (NCCL to 2.31), but have multiprocessors of their own.
    Older ones recognise two ranks on one GPU by host and bus: each rank gets a host of its own, and
    meets the others through sockets of the loopback interface.  All else that the user set stays.
    """
    wanted = {"NCCL_NVLS_ENABLE": "0"}  # which adds up in the switch between GPUs
    if not slices:
        wanted["NCCL_MAX_CTAS"] = "1"  # the kernels of all ranks have to fit on it
    if version >= MULTI_RANK_NCCL:
        wanted["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        wanted |= {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=lo", "NCCL_MNNVL_ENABLE": "0"}
    chosen = {name: environ.get(name, value) for name, value in wanted.items()}
    if version < MULTI_RANK_NCCL:
        chosen["NCCL_HOSTID"] = f"{environ.get('NCCL_HOSTID', 'nbdist')}-{rank}"
    return chosen


def torchrun_variables(
    spec: WorldSpec, rank: int, port: int, error_file: str = ""
) -> Mapping[str, str]:
    """Work out the rank's part of the environment.

    `port` is one that nothing listens on yet; `error_file` is what `@record` writes to.  Names and
    meanings are torch.distributed.elastic's (agent/server/local_elastic_agent.py), as Accelerate
    and Lightning read them; a test compares them with a real torchrun's.  There is no
    TORCHELASTIC_SIGNALS_TO_HANDLE, which is for torchrun's own process.
    """
    slot, size = spec.slot(rank), str(spec.world_size)
    gpus = spec.gpus_of(rank)
    unless_set = {
        # gloo would ask the host's name for an address, and listen on that one.
        "GLOO_SOCKET_IFNAME": spec.interface,
        # torchrun's 1 ends a worker ten minutes into a wait, also in a debugger; nbdist itself
        # aborts collectives that wait in vain.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",  # which ends a worker that waits, too
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # figures are the cell's outputs
    }
    if uses_nccl(spec.backend or ""):
        # nccl would choose an interface itself; without the = also one whose name begins so.
        unless_set |= {"NCCL_SOCKET_IFNAME": f"={spec.interface}", **WITH_NCCL}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(slot.local_rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(slot.local_world_size),
        "GROUP_RANK": str(slot.node),
        "GROUP_WORLD_SIZE": str(slot.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": spec.config.pool,
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": str(spec.master_port or port),
        # Nothing listens on MASTER_PORT: user code's own rank 0 makes a store there.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": spec.name,
        "TORCHELASTIC_ERROR_FILE": error_file,
        # torchrun's 1 leaves the other cores idle.
        "OMP_NUM_THREADS": spec.environ.get("OMP_NUM_THREADS") or str(spec.threads),
        "PYTHON_EXEC": spec.python,  # for a torchrun in a cell
        "NBDIST_WORLD": spec.name,
        **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # a debugger's warning that none can heed
        **{name: spec.environ.get(name, value) for name, value in unless_set.items()},
    }
