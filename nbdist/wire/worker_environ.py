"""The environment variables that torchrun gives its workers, and a few of nbdist's own.

Names and meanings are torch.distributed.elastic's (agent/server/local_elastic_agent.py);
libraries such as Accelerate and Lightning read them.  A test compares them with those of a
real torchrun, name by name.  What differs in more than numbers, names and paths:

=============================== ======== ============= =======================================
name                            torchrun here          why
=============================== ======== ============= =======================================
OMP_NUM_THREADS                 1        cores / ranks torchrun leaves the other cores idle
TORCHELASTIC_USE_AGENT_STORE    True     False         nothing listens on MASTER_PORT: user
                                                       code's own rank 0 makes a store there
TORCH_NCCL_ASYNC_ERROR_HANDLING 1        0             1 ends a worker ten minutes into a wait,
                                                       also in a debugger; nbdist itself aborts
                                                       collectives that wait in vain
TORCHELASTIC_SIGNALS_TO_HANDLE  set      unset         the torchrun process's own business
PYTHON_EXEC                     unset    the workers'  a torchrun in a cell uses it as well
GLOO_SOCKET_IFNAME              unset    lo            gloo would ask the host's name for an
                                                       address, and listen on that one
TORCH_NCCL_ENABLE_MONITORING    unset    0             it ends a worker that waits, as above
TORCH_NCCL_RETHROW_CUDA_ERRORS  unset    0, with nccl  else torch's watchdog ends a worker whose
                                                       communicator was aborted or whose context
                                                       is corrupt, before a cell can say so
TORCH_NCCL_DUMP_ON_TIMEOUT      unset    0, with nccl  else a first abort writes Flight Recorder's
                                                       trace to a file, for up to 15 s
NCCL_NVLS_ENABLE                unset    0, with nccl  what it sets up in NVLink's switches does
                                                       not survive an abort, so healing demands it
                                                       (NVIDIA's in-process restart does too)
NCCL_SOCKET_IFNAME              unset    =lo, with     nccl would listen on an interface of its
                                         nccl          own choice; on several machines it is the
                                                       one that gloo has, and not those whose names
                                                       begin so: hence the =
NCCL_RAS_ENABLE                 unset    0, with nccl  nccl's own monitor listens on TCP only, and
                                                       answers whoever asks; it counts what a rank
                                                       has launched, as Flight Recorder does, and
                                                       knows not what has ended, nor send and recv
CUDA_VISIBLE_DEVICES            as it is the GPUs used what `--gpus` chose, a slice of it per
                                                       simulated node, or each rank's MIG slice
MPLBACKEND                      unset    inline        figures are outputs of the cell
PYDEVD_DISABLE_FILE_VALIDATION  unset    1             a debugger's warning that none can heed
NBDIST_WORLD                    unset    the name      `--name`
=============================== ======== ============= =======================================

The user's own OMP_NUM_THREADS, TORCH_NCCL_*, NCCL_*, GLOO_SOCKET_IFNAME and MPLBACKEND win.
Where ranks share a GPU there is `sharing_variables` besides.  Of what ends a process torch 2.15's
`nccl` reads TORCH_NCCL_ASYNC_ERROR_HANDLING alone, and later ones the monitoring too.  Never set
here is TORCH_NCCL_DESYNC_DEBUG: torch then takes TORCH_NCCL_ASYNC_ERROR_HANDLING=0 for 3.
Read in torch 2.13's and 2.15's headers and libraries; not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Mapping

from nbdist.errors import UsageError
from nbdist.topology import uses_nccl
from nbdist.wire.start import WorldSpec

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
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
}
"""What ranks whose backend uses nccl have besides; and NCCL_SOCKET_IFNAME."""

NBDIST_SETS = NBDIST_DECIDES | {
    *("OMP_NUM_THREADS", "PYTHON_EXEC", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "MPLBACKEND"),
    *(*WITH_NCCL, "NCCL_SOCKET_IFNAME"),
}
"""All names of `torchrun_variables`."""


MULTI_RANK_NCCL = (2, 30)
"""The first version of NCCL that takes several ranks on one GPU by itself."""


def check_nvls(backend: str, environ: Mapping[str, str], *, shared: bool) -> str:
    """Return a line on what the user's NCCL_NVLS_ENABLE costs, "" where it is not set.

    UsageError where ranks share a GPU, or have slices of one: NCCL would refuse to connect them.
    """
    value = environ.get("NCCL_NVLS_ENABLE", "0") if uses_nccl(backend) else "0"
    if value == "1" and shared:
        raise UsageError(
            "NCCL_NVLS_ENABLE=1 cannot work where several ranks are on one GPU: "
            "`--env NCCL_NVLS_ENABLE=0` turns it off."
        )
    if value == "0":
        return ""
    return (
        f"NCCL_NVLS_ENABLE={value}: faster, but after an aborted collective the group may not be "
        "rebuilt; ranks are restarted then and lose their variables."
    )


def sharing_variables(
    rank: int, version: tuple[int, ...], environ: Mapping[str, str], *, slices: bool = False
) -> Mapping[str, str]:
    """Choose what lets NCCL of this version have several ranks on one GPU, before its first use.

    MIG `slices` of one GPU count as that GPU (NCCL to 2.31), but have multiprocessors of their own.
    Older ones recognise two ranks on one GPU by host and bus.  With a host of its own each rank
    passes, and meets the others through sockets, of the loopback interface: they are on one
    machine.  What the user has set stays, but for the host, which has to be each rank's own.
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

    `port` is one that nothing listens on yet; `error_file` is what `@record` writes to.
    """
    seat, size = spec.seat(rank), str(spec.world_size)
    gpus = spec.gpus_of(rank)
    with_nccl = {"NCCL_SOCKET_IFNAME": f"={spec.interface}", **WITH_NCCL}
    nccl = with_nccl if uses_nccl(spec.backend or "") else {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(seat.local_rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(seat.local_world_size),
        "GROUP_RANK": str(seat.node),
        "GROUP_WORLD_SIZE": str(seat.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": spec.pool,
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": str(spec.master_port or port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": spec.name,
        "TORCHELASTIC_ERROR_FILE": error_file,
        "OMP_NUM_THREADS": spec.environ.get("OMP_NUM_THREADS") or str(spec.threads),
        "PYTHON_EXEC": spec.python,
        "NBDIST_WORLD": spec.name,
        **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
        "GLOO_SOCKET_IFNAME": spec.environ.get("GLOO_SOCKET_IFNAME", spec.interface),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": spec.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        "TORCH_NCCL_ENABLE_MONITORING": spec.environ.get("TORCH_NCCL_ENABLE_MONITORING", "0"),
        "MPLBACKEND": spec.environ.get("MPLBACKEND", "module://matplotlib_inline.backend_inline"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        **{name: spec.environ.get(name, value) for name, value in nccl.items()},
    }
