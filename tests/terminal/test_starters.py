"""Tests of `nbdist.terminal.starters`: who of several processes is the agent of a node."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nbdist.terminal.starters import Part, part_of, without_starters

TORCHRUN = {"GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "2"}


@pytest.mark.parametrize(
    ("environ", "leads", "node"),
    [
        ({}, True, -1),
        ({**TORCHRUN, "LOCAL_RANK": "0"}, True, 1),
        ({**TORCHRUN, "LOCAL_RANK": "3"}, False, 1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, True, -1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, False, -1),
        ({**SLURM, "SLURM_LOCALID": "0"}, True, 2),
        ({**SLURM, "SLURM_LOCALID": "1"}, False, 2),
        ({**SLURM, "SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, False, -1),
        ({**SLURM, "SLURM_LOCALID": "0", **TORCHRUN, "LOCAL_RANK": "1"}, False, 1),
        ({"JOB_COMPLETION_INDEX": "3"}, True, 3),
        ({"JOB_COMPLETION_INDEX": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, False, 3),
        ({"LOCAL_RANK": "zero"}, True, -1),
    ],
)
def test_who_leads_a_node(environ: Mapping[str, str], leads: bool, node: int) -> None:  # noqa: FBT001
    """The first there, by whatever stands nearest; without a number it is alone."""
    part = part_of(environ, "a:1")
    assert (part.leads, part.node) == (leads, node)


def test_processes_meet_their_own() -> None:
    """Those of one job on one node have a key in common, and no others."""
    first = part_of({**TORCHRUN, "LOCAL_RANK": "0"}, "a:1").key
    assert part_of({**TORCHRUN, "LOCAL_RANK": "1"}, "a:1").key == first
    others = [
        part_of({**TORCHRUN, "LOCAL_RANK": "1"}, "a:2"),
        part_of({**TORCHRUN, "LOCAL_RANK": "1", "GROUP_RANK": "0"}, "a:1"),
        part_of({**TORCHRUN, "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"}, "a:1"),
        part_of({**SLURM, "SLURM_LOCALID": "1"}, "a:1"),
    ]
    assert len({first, *(part.key for part in others)}) == 5
    assert part_of({}, "a:1") == Part(leads=True, node=-1, key="")


def test_workers_do_not_take_themselves_for_others() -> None:
    """What torchrun or mpirun has said to the process is none of the agent's environment."""
    environ = {
        **{"PATH": "/bin", "HF_HOME": "/hf", "RANK": "3", "LOCAL_RANK": "1", "MASTER_PORT": "1"},
        **{"TORCHELASTIC_RUN_ID": "none", "OMPI_COMM_WORLD_RANK": "3", "OMP_NUM_THREADS": "1"},
        **{"PMIX_NAMESPACE": "x", "SLURM_JOB_ID": "7", "SLURM_LOCALID": "1"},
    }
    kept = {"PATH": "/bin", "HF_HOME": "/hf", "SLURM_JOB_ID": "7"}
    assert without_starters(environ) == kept
    del environ["TORCHELASTIC_RUN_ID"]
    assert without_starters(environ) == {**kept, "OMP_NUM_THREADS": "1"}
