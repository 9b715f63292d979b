"""Which of the processes that a job's launcher has started on this node is to be the agent; pure.

torchrun, mpirun and srun start a command several times on a node, and tell each its number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.wire.worker_environ import NBDIST_DECIDES


@dataclass(frozen=True, slots=True)
class Starter:
    """What numbers processes: the variables of a number on its node, of the node, and of the job.

    The first of the variables that is there counts; those of the job tell it from others.
    """

    local_rank: tuple[str, ...]
    node: tuple[str, ...]
    job: tuple[str, ...]


# The one that stands nearest to the process comes first: mpirun and torchrun run in Slurm's jobs.
STARTERS = (
    Starter(
        ("LOCAL_RANK",),
        ("GROUP_RANK",),
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    ),
    Starter(("OMPI_COMM_WORLD_LOCAL_RANK",), (), ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    Starter(("MPI_LOCALRANKID", "PALS_LOCAL_RANKID"), (), ("PMI_JOBID", "HYDI_CONTROL_FD")),
    Starter(("SLURM_LOCALID",), ("SLURM_NODEID",), ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)

COMPLETION_INDEX = "JOB_COMPLETION_INDEX"
"""The number of a pod in an Indexed Job of Kubernetes."""

OF_STARTERS = (
    *("TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "PALS_", "HYDI_"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID"),
)
"""What begins so is for the process that was started, and would mislead libraries in workers."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one process: whether it `leads` its node, and which `node` that is, or -1.

    `key` is the same for all processes of the job on this node, and for no other's.
    """

    leads: bool
    node: int
    key: str


def part_of(environ: Mapping[str, str], place: str) -> Part:
    """Find out which part the process with this environment has in joining that place."""
    index = _number(environ, (COMPLETION_INDEX,))
    for starter in STARTERS:
        local_rank = _number(environ, starter.local_rank)
        if local_rank < 0:
            continue
        node = _number(environ, starter.node)
        job = [environ.get(name, "") for name in starter.job]
        return Part(local_rank == 0, node if node >= 0 else index, _key(place, node, job))
    return Part(leads=True, node=index, key="")


def without_starters(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out what was said to this process by what has started it, and is not the agent's.

    torchrun sets OMP_NUM_THREADS to 1 where nobody has set it.
    """
    left_out = set(NBDIST_DECIDES)
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("OMP_NUM_THREADS") == "1":
        left_out.add("OMP_NUM_THREADS")
    return {
        name: value
        for name, value in environ.items()
        if name not in left_out and not name.startswith(OF_STARTERS)
    }


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    for name in names:
        text = environ.get(name, "")
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
    return -1


def _key(place: str, node: int, job: list[str]) -> str:
    text = "\0".join([place, str(node), *job])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
