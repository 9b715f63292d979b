"""Tests of `nbdist.wire.worker_environ`: what torchrun would give each rank, and nccl's part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.errors import UsageError
from nbdist.seats import fill
from nbdist.wire import worker_environ
from nbdist.wire.start import WorldSpec
from nbdist.wire.worker_environ import (
    NBDIST_DECIDES,
    NBDIST_SETS,
    WITH_NCCL,
    check_nvls,
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
    assert torchrun_variables(SPEC, 0, 0).keys() == NBDIST_SETS - NCCLS


NCCLS = {*WITH_NCCL, "NCCL_SOCKET_IFNAME"}


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_ranks_with_nccl(backend: str) -> None:
    """No thread of torch's ends them, nothing listens beyond gloo's interface; the user's win."""
    spec = replace(SPEC, backend=backend)
    given = torchrun_variables(spec, 0, 0)
    assert given.keys() == NBDIST_SETS
    assert {name: given[name] for name in NCCLS} == {
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "=lo",
    }
    assert given["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert given["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    between = torchrun_variables(replace(spec, node=1, interface="eth1"), 2, 0)
    assert between["NCCL_SOCKET_IFNAME"] == "=eth1"
    theirs = dict.fromkeys(NCCLS, "theirs")
    assert {*torchrun_variables(replace(spec, environ=theirs), 0, 0).items()} >= {*theirs.items()}


def test_each_name_has_its_reason() -> None:
    """What torchrun does not set, or otherwise, is in the table of the module."""
    table = {line.split()[0] for line in worker_environ.__doc__.splitlines() if line}
    assert table >= NCCLS


def test_nvls_that_the_user_wants() -> None:
    """A line says what it costs; where ranks share a GPU nccl could not connect them."""
    on = {"NCCL_NVLS_ENABLE": "1"}
    assert check_nvls("nccl", {}, shared=True) == check_nvls("gloo", on, shared=True) == ""
    assert check_nvls("nccl", {"NCCL_NVLS_ENABLE": "0"}, shared=True) == ""
    said = check_nvls("nccl", on, shared=False)
    assert said.startswith("NCCL_NVLS_ENABLE=1: faster, but after an aborted collective")
    # By itself NCCL does without where ranks share a GPU.
    assert "=2: faster" in check_nvls("nccl", {"NCCL_NVLS_ENABLE": "2"}, shared=True)
    with pytest.raises(UsageError, match="ENABLE=1 cannot work where several ranks"):
        check_nvls("nccl", on, shared=True)


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
        "NCCL_SOCKET_IFNAME": "=lo",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_HOSTID": "",
    }
    # Slices have multiprocessors of their own.
    assert "NCCL_MAX_CTAS" not in sharing_variables(0, (2, 28), {}, slices=True)
    # Also where the user has named the host.
    assert sharing_variables(1, (2, 28), {"NCCL_HOSTID": "node"})["NCCL_HOSTID"] == "node-1"
