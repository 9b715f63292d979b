"""The description of a world (`WorldSpec`) and of one worker process in it (`WorkerStart`).

The notebook makes a `WorldSpec` and sends it to the agents.  An agent makes a `WorkerStart`, which
has the spec, for each worker that it starts.  This file also has the environment variables that
nbdist sets for workers.
"""

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
from nbdist.system.processes import MODULE_OPTIONS
from nbdist.topology import Slot, Slots, is_slice, uses_nccl

Versions = Mapping[str, str]
"""The versions of Python and packages by name; "" for a package that is not installed."""


class Difference(NamedTuple):
    """Two versions of Python or of a package (`what`) that do not match.

    This process has the version `here`, and another process has the version `there`.
    """

    what: str
    there: str
    here: str

    @property
    def why(self) -> str:
        """A text for error messages that says that the versions must match.

        A function that was pickled by another version of Python can crash the process that calls
        the function.
        """
        return f"functions and values go to the same minor version of {self.what} only"


@cache
def versions_here() -> Versions:
    """Return the versions of this Python, torch and cloudpickle, without importing the packages."""
    versions = {"Python": platform.python_version()}
    for package in ("torch", "cloudpickle"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = ""
    return versions


def difference(other: Versions, here: Versions) -> Difference | None:
    """Return the first difference between the minor versions in `other` and `here`, or None.

    Packages that only one of the processes has are not compared.
    """
    for what, local in here.items():
        remote = other.get(what, "")
        if remote and local and remote.split(".")[:2] != local.split(".")[:2]:
            return Difference(what, remote, local)
    return None


LAST_LINE_SAYS = 78
"""The exit code of a worker that cannot start and has printed the full reason as its last line."""


class TorchStore(NamedTuple):
    """A rendezvous of torch through which the ranks find each other (`--rdzv-backend`).

    The ranks use its store in place of nbdist's own.  `name` is unique to the world, so that worlds
    can share an endpoint.
    """

    backend: str
    endpoint: str
    name: str


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """The description of a world: size, backend, environment, nodes and options.

    If a world has several machines, each agent replaces the fields that depend on the machine:
    environment, folder, interpreter, GPUs, threads, network interface
    (`nbdist.agent.worker_group.adapt_spec`).
    """

    world_size: int
    backend: str | None  # None for no process group
    # The notebook's whole environment, secrets included, and variables of options such as `--env`.
    # A spec for other machines has only variables of such options, among them `--copy-env`; each
    # agent adds the environment of its machine.
    environ: Mapping[str, str] = field(repr=False)
    cwd: str  # the ranks' folder, mostly the notebook's
    sys_path: tuple[str, ...]  # for the ranks' `sys.path`, mostly the notebook's
    threads: int  # how many CPU threads a rank may use for an operation; 0: each agent chooses
    python: str  # the path of the interpreter; "" until the agent of another machine sets its own
    gpus: tuple[str, ...] = ()  # the machine's GPUs to use, named as in CUDA_VISIBLE_DEVICES
    log_limit: int = 0  # the most bytes of a rank's log file of each stream, 0 for no limit
    slots: Slots = ()  # the node and local rank of each rank; (): all on one node, in order
    room: tuple[int, ...] = ()  # how many ranks each simulated node takes; () if none is simulated
    # The node that this spec is for; None if the spec is for all nodes, as on a single machine.
    node: int | None = None
    own_path: bool = False  # if True, the interpreter's own `sys.path` follows `sys_path`
    # The address and port at which user code on rank 0 can listen; port 0 stands for the port that
    # the agent has reserved.
    master_addr: str = "localhost"
    master_port: int = 0
    interface: str = "lo"  # the network interface by which gloo connects ranks
    # For the ranks' `sys.argv`: that of the notebook's process, without the arguments of a kernel.
    argv: tuple[str, ...] = ("",)
    torch_store: TorchStore | None = None  # None without `--rdzv-backend`
    # The notebook's versions if workers on its machine have another interpreter or a wrapper: they
    # compare their own versions with these.  Otherwise empty.
    versions: Versions = field(default_factory=dict)
    # The user's options.  The notebook has filled in the launcher, the name, the log folder, the
    # interpreter on other machines, and whether workers are forked.
    config: WorldConfig = field(default_factory=WorldConfig)
    # If True, the fork server imports what DDP, FSDP2 and optimizers need, and only then forks the
    # workers.
    for_training: bool = False

    @property
    def name(self) -> str:
        """The name of the world, chosen by the user or the notebook."""
        return self.config.name or ""

    @property
    def wrap(self) -> tuple[str, ...]:
        """The command prefix of each worker (`--wrap`).

        Empty if this spec is for one `node` of a world with several nodes: there the launcher has
        put the prefix before the agent's command.
        """
        return self.config.wrapper if self.node is None else ()

    @property
    def command(self) -> tuple[str, ...]:
        """The command line that starts a worker, if the fork server does not fork it."""
        return (*self.wrap, self.python, *MODULE_OPTIONS, "nbdist.worker")

    @property
    def nodes(self) -> list[int]:
        """The number of the node on which each rank is, in the order of ranks."""
        return [each.node for each in self.slots] or [0] * self.world_size

    def slot(self, rank: int) -> Slot:
        """Return a rank's local rank and node, with nodes numbered as by torchrun.

        Nodes without ranks are not counted, so that the numbers have no gaps.
        """
        node, local_rank = self.slots[rank] if self.slots else (0, rank)
        used_nodes = sorted({*self.nodes})
        return Slot(local_rank, self.nodes.count(node), used_nodes.index(node), len(used_nodes))

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of the node that this spec is for; all ranks if `node` is None."""
        return tuple(rank for rank, node in enumerate(self.nodes) if self.node in (None, node))

    def gpus_of(self, rank: int) -> tuple[str, ...]:
        """Return the GPUs that the rank sees: all GPUs of its node, or only its own MIG slice.

        If one machine simulates several nodes, the GPUs are divided among the nodes: each node has
        at most as many GPUs as ranks.  If there are too few GPUs, nodes share some.
        """
        gpus, nodes = self.gpus, self.nodes
        if gpus and self.node is None and len({*nodes}) > 1:
            node = nodes[rank]
            first, here = sum(each < node for each in nodes), min(nodes.count(node), len(gpus))
            gpus = tuple(gpus[(first + each) % len(gpus)] for each in range(here))
        index = self.slot(rank).local_rank % max(1, len(gpus))
        return gpus[index : index + 1] if any(map(is_slice, gpus)) else gpus


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The data that an agent passes to a worker process when the process starts."""

    rank: int
    world: WorldSpec
    connection_file: str
    token: str  # a random text in the marks that the worker writes to its stdout for the agent
    store_path: str  # the file of torch's FileStore; not used if the world has another store
    cancel_path: str  # the beginning of the path of each `cancel_file`
    generation: int  # counts the attempts to form the world's group, from 1 on
    environ: Mapping[str, str]  # environment variables of this rank, besides those of `world`
    # By the name of a group: its ranks.  A rank that was restarted or added joins those of these
    # groups to which it belongs, besides the world's own.  None in a new world.
    joins: Mapping[str, tuple[int, ...]] | None = None
    gpus: tuple[str, ...] = ()  # the GPUs that the rank sees, named as in CUDA_VISIBLE_DEVICES
    sized_in: int = 1  # the generation in which the world's group was last made anew
    store_socket: str = ""  # the agent's socket for the head's store; "" on a single machine

    @property
    def local_rank(self) -> int:
        """The rank's number among the ranks of its node."""
        return self.world.slot(self.rank).local_rank

    @property
    def device(self) -> str:
        """The rank's own device as torch names it; ranks share GPUs if there are too few.

        nbdist does not count Intel's GPUs: with the backend xccl a rank's local rank is the index
        of its GPU.
        """
        if "xccl" in (self.world.backend or ""):
            return f"xpu:{self.local_rank}"
        return f"cuda:{self.local_rank % len(self.gpus)}" if self.gpus else "cpu"

    @property
    def gpu(self) -> str:
        """The rank's own GPU as CUDA_VISIBLE_DEVICES names it, "" for none."""
        return self.gpus[self.local_rank % len(self.gpus)] if self.gpus else ""

    @property
    def has_slice(self) -> bool:
        """Whether the rank has a MIG slice of a GPU, of which other ranks may have other slices."""
        return is_slice(self.gpu)

    @property
    def log_folder(self) -> Path | None:
        """The folder of the rank's log files and of torch's error file; None without log files."""
        has_logs = self.world.config.log_dir
        return Path(self.environ["TORCHELASTIC_ERROR_FILE"]).parent if has_logs else None

    @property
    def stack_file(self) -> str:
        """The file into which faulthandler writes stacks; its first line is a `CallLayout`."""
        return self.connection_file.removesuffix(".json") + ".stack"

    @property
    def task_socket(self) -> str:
        """The unix socket on which the worker waits for tasks from its agent."""
        return self.connection_file.removesuffix(".json") + ".tasks"

    def debugger_socket(self, number: int) -> str:
        """Return the unix socket on which the worker waits for an agent that opens its debugger.

        `number` is unique in the agent.  Up to 9999 the path is no longer than `task_socket`, and
        so short enough for Linux.
        """
        return self.connection_file.removesuffix(".json") + f".d{number}"


def cancel_file(path: str | Path, generation: int) -> Path:
    """Return the path of a file by which an agent calls off an attempt to form the world's group.

    `generation` is the number of the attempt, and `path` the beginning of the file's path.  Once
    the file exists, ranks no longer wait for other ranks in this attempt.
    """
    return Path(f"{path}.over{generation}")


def moved_path(path: str, old: str, new: str) -> str:
    """Return `path` with `new` in place of the folder `old`; outside of `old`, return `path`."""
    if path == old or path.startswith(f"{old}/"):
        return new + path[len(old) :]
    return path


LINK_TIMEOUT = 10.0
"""Seconds of silence on a link after which the machine counts as lost, by default.

TCP sends lost packets again after 0.2, 0.6, 1.4, 3.0 and 6.2 s.  So the link may be silent for 3 s
if a cable is out for 1.5 s.  The timeout must be longer, or such a machine would count as lost.
"""

AGENTS_WAIT = 4
"""An agent that hears nothing of its head ends its workers after this many link timeouts.

It waits so long in order to lose no variables if the head was only stopped for some seconds.
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
"""Variables that users cannot set for workers, mostly because they say which rank a worker is."""

WITH_NCCL: Mapping[str, str] = {
    # By default torch's watchdog ends a worker whose communicator was aborted or whose context is
    # corrupt, before the cell can report the error.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # By default a first abort writes Flight Recorder's trace to a file, for up to 15 s.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # If a rank has died, the watchdog sleeps for four times this number of milliseconds, by default
    # for a minute.  Until then the process group of the watchdog cannot be destroyed (torch 2.11).
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # NVLS keeps state in NVLink's switches that does not survive an abort, so the group could not
    # be rebuilt.  NVIDIA's in-process restart turns NVLS off too.
    "NCCL_NVLS_ENABLE": "0",
    # By default a rank connects in its first collective of a kind: the rank waits for other ranks
    # in C++ before Flight Recorder has an entry of the collective, so nbdist could not show in
    # which collective the rank waits (NCCL from 2.22 on).
    "NCCL_RUNTIME_CONNECT": "0",
    # nccl's own monitor (RAS) listens on TCP and answers everybody.  nbdist has no use for the
    # monitor: it counts only the operations that were launched, which Flight Recorder counts, too.
    # It does not show which operations have completed, and no send and recv.
    "NCCL_RAS_ENABLE": "0",
}
"""Further variables of ranks whose backend uses nccl, unless the user sets them.

`torchrun_variables` adds NCCL_SOCKET_IFNAME.  The meanings were read in the headers and libraries
of torch 2.13 and 2.15.  nbdist does not set TORCH_NCCL_DESYNC_DEBUG, because with that variable
torch treats TORCH_NCCL_ASYNC_ERROR_HANDLING=0 as 3.
"""

NBDIST_SETS = NBDIST_DECIDES | {
    *("OMP_NUM_THREADS", "PYTHON_EXEC", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "MPLBACKEND"),
    *(*WITH_NCCL, "NCCL_SOCKET_IFNAME"),
}
"""The names of all variables that `torchrun_variables` may return."""


DEBUG_VARIABLES: Mapping[str, str] = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "PYTHONFAULTHANDLER": "1",
}
"""The variables that `--debug` sets: the same as torchx's `--debug`, without NCCL_DESYNC_DEBUG.

With NCCL_DESYNC_DEBUG torch ends a worker whose collective waits too long.  PYTHONFAULTHANDLER is
for processes that a worker starts; the worker enables faulthandler itself.
"""

SET_ON_IMPORT = re.compile(
    r"KMP_(DUPLICATE_LIB_OK|INIT_AT_FORK)|PYTORCH_NVML_BASED_CUDA_CHECK|TORCHINDUCTOR_CACHE_DIR"
    r"|QT_QPA_.*|PYDEVD_.*|WANDB_SERVICE|_.*"
)
"""Variables that sklearn, torch, Lightning, polars and others set in each process that uses them.

If the notebook's value of such a variable changes, a rank with another value keeps its own value.
"""

READ_AT_START = re.compile(
    r"(LD|MALLOC|KMP|GOMP|MKL|OPENBLAS|GLIBC)_.*|PYTHON(?!_EXEC|FAULTHANDLER|PATH).*"
    r"|TORCH_(LOGS|LOGS_.*|CPP_LOG_LEVEL|SHOW_CPP_STACKTRACES)"
)
"""Variables that Python or a library reads only when the process starts.

Workers are not forked if the user sets such a variable, because a forked worker would ignore it.
"""

MULTI_RANK_NCCL = (2, 30)
"""The first version of NCCL that has an option for several ranks on one GPU."""


def check_nvls(backend: str, environ: Mapping[str, str], *, shared: bool) -> str:
    """Return a warning for the user if `environ` turns on NVLS, a feature of NCCL.

    With NVLS, perhaps the group cannot be rebuilt after an abort.  Returns "" if NCCL_NVLS_ENABLE
    is 0 or not set, or if the backend does not use nccl.  `shared` is True if ranks share a GPU or
    have slices of a GPU.  NCCL refuses to connect these ranks with NVLS, so UsageError is raised if
    `shared` is True and the variable is 1.
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
    """Return the environment variables with which NCCL accepts several ranks on one GPU.

    The variables must be set before NCCL is first used.  `version` is the version of NCCL.  NCCL
    before `MULTI_RANK_NCCL` refuses two ranks that have the same host id and the same GPU.  So each
    rank gets its own NCCL_HOSTID, and the ranks connect by sockets of the loopback interface.  With
    `slices`, the ranks have MIG slices of a GPU, which NCCL up to 2.31 treats as the same GPU, too.
    Values that the user has set in `environ` stay, except that the rank is appended to NCCL_HOSTID.
    """
    # NVLS reduces in the switch between GPUs; NCCL refuses NVLS for ranks that share a GPU.
    defaults = {"NCCL_NVLS_ENABLE": "0"}
    if not slices:  # each MIG slice has multiprocessors of its own
        defaults["NCCL_MAX_CTAS"] = "1"  # the CUDA kernels of all ranks must fit on the GPU
    if version >= MULTI_RANK_NCCL:
        defaults["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        defaults |= {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=lo", "NCCL_MNNVL_ENABLE": "0"}
    chosen = {name: environ.get(name, value) for name, value in defaults.items()}
    if version < MULTI_RANK_NCCL:
        chosen["NCCL_HOSTID"] = f"{environ.get('NCCL_HOSTID', 'nbdist')}-{rank}"
    return chosen


def torchrun_variables(
    spec: WorldSpec, rank: int, port: int, error_file: str = ""
) -> Mapping[str, str]:
    """Return the environment variables of one rank: the variables of torchrun, and nbdist's own.

    `port` becomes MASTER_PORT unless the spec has a port; nothing listens on the port yet.  torch's
    decorator `@record` writes errors to `error_file`.  Names and meanings are those of
    torch.distributed.elastic (agent/server/local_elastic_agent.py), since Accelerate and Lightning
    read these variables; tests compare the variables with those of torchrun.  Only
    TORCHELASTIC_SIGNALS_TO_HANDLE is missing, which is for torchrun's own process.
    """
    slot, size = spec.slot(rank), str(spec.world_size)
    gpus = spec.gpus_of(rank)
    unless_set = {
        # By default gloo listens on the address that the host's name resolves to, which may belong
        # to another network.
        "GLOO_SOCKET_IFNAME": spec.interface,
        # torchrun sets 1: then torch ends a worker that has waited for ten minutes, even if the
        # worker is in a debugger.  nbdist itself aborts collectives that wait in vain.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",  # torch's monitor thread would end such workers, too
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # figures are the cell's outputs
    }
    if uses_nccl(spec.backend or ""):
        # By default nccl chooses an interface itself.  Without the "=", nccl would also take
        # interfaces whose names only begin with this name.
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
        # Nothing listens on MASTER_PORT: user code on rank 0 may make a store there.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": spec.name,
        "TORCHELASTIC_ERROR_FILE": error_file,
        # torchrun sets 1, with which most cores would be idle.
        "OMP_NUM_THREADS": spec.environ.get("OMP_NUM_THREADS") or str(spec.threads),
        "PYTHON_EXEC": spec.python,  # read by a torchrun that a cell starts
        "NBDIST_WORLD": spec.name,
        **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # suppresses a warning on which users cannot act
        **{name: spec.environ.get(name, value) for name, value in unless_set.items()},
    }
