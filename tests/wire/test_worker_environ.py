"""Tests of `nbdist.wire.worker_environ`: what torchrun would give each rank, and nccl's part."""

from __future__ import annotations

from nbdist.seats import fill
from nbdist.wire.start import WorldSpec
from nbdist.wire.worker_environ import (
    NBDIST_DECIDES,
    NBDIST_SETS,
    sharing_variables,
    torchrun_variables,
)

SPEC = WorldSpec(
    4,
    "gloo",
    {"MPLBACKEND": "agg"},
    "/",
    (),
    3,
    "/bin/py",
    ("4", "5", "6"),
    "run",
    seats=fill((2, 2)),
)


def test_ranks_on_two_nodes() -> None:
    """Each has its seat and its node's slice of the GPUs; all else is the world's."""
    first, last = (torchrun_variables(SPEC, rank, 29500, "/error.json") for rank in (0, 3))
    seats = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [first[name] for name in seats] == ["0", "0", "2", "0", "2"]
    assert [last[name] for name in seats] == ["3", "1", "2", "1", "2"]
    assert (first["CUDA_VISIBLE_DEVICES"], last["CUDA_VISIBLE_DEVICES"]) == ("4,5", "6,4")
    common = first.keys() - {*seats, "ROLE_RANK", "CUDA_VISIBLE_DEVICES"}
    assert all(first[name] == last[name] for name in common)
    assert (first["MASTER_PORT"], first["TORCHELASTIC_RUN_ID"]) == ("29500", "run")


def test_what_the_user_has_set_stays() -> None:
    """But for what a rank is told by."""
    assert torchrun_variables(SPEC, 0, 0)["MPLBACKEND"] == "agg"
    assert torchrun_variables(SPEC, 0, 0)["OMP_NUM_THREADS"] == "3"
    assert NBDIST_DECIDES < NBDIST_SETS
    assert torchrun_variables(SPEC, 0, 0).keys() == NBDIST_SETS


def test_nccl_that_takes_several_ranks_on_one_gpu() -> None:
    """From 2.30 on one variable allows it; the user's own settings win."""
    theirs = {"NCCL_MAX_CTAS": "4", "NCCL_HOSTID": "node"}
    assert sharing_variables(3, (2, 30, 7), theirs) == {
        "NCCL_MAX_CTAS": "4",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }


def test_nccl_that_refuses_several_ranks_on_one_gpu() -> None:
    """Each rank is on a host of its own, and meets the others on the loopback interface."""
    first, second = (sharing_variables(rank, (2, 28, 9), {}) for rank in (0, 1))
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert {**first, "NCCL_HOSTID": ""} == {
        "NCCL_MAX_CTAS": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_HOSTID": "",
    }
    # Also where the user has named the host.
    assert sharing_variables(1, (2, 28), {"NCCL_HOSTID": "node"})["NCCL_HOSTID"] == "node-1"
