"""Tests of `nbdist.wire.spec`: command, slots, device, files and environment of a worker."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from nbdist.config import WorldConfig
from nbdist.errors import UsageError
from nbdist.topology import Position, Slot, place_ranks
from nbdist.wire.spec import (
    NBDIST_DECIDES,
    NBDIST_SETS,
    WITH_NCCL,
    WorkerStart,
    WorldSpec,
    cancel_file,
    check_nvls,
    sharing_variables,
    torchrun_variables,
)

NICE = WorldConfig(wrap="nice -n 5")
WRAPPED = WorldSpec(4, "gloo", {}, "/", (), 1, "/venv/bin/python", config=NICE)
START = WorkerStart(1, WRAPPED, "/run/3.json", "token", "/run/store", "/run/over", 1, {})


def test_a_spawned_worker_has_its_command_and_files() -> None:
    """A worker has its wrap, slot and files; its spec is sent whole, and shown without secrets."""
    assert " ".join(WRAPPED.command) == "nice -n 5 /venv/bin/python -P -m nbdist.worker"
    assert replace(WRAPPED, node=1).wrap == ()  # on a cluster the agents are wrapped
    assert WRAPPED.slot(3) == Slot(3, 4, 0, 1)
    assert replace(WRAPPED, slots=place_ranks((), (2, 2), 4)).slot(3) == Slot(1, 2, 1, 2)
    assert START.stack_file == "/run/3.stack"
    assert cancel_file(START.cancel_path, 2) == Path("/run/over.over2")
    # Log files are beside torch's error file, which has a path also without log files.
    environ = {"TORCHELASTIC_ERROR_FILE": "/logs/run/0/error.json"}
    for log_dir, folder in (("", None), ("/logs", Path("/logs/run/0"))):
        world = replace(WRAPPED, config=WorldConfig(log_dir=log_dir))
        assert replace(START, world=world, environ=environ).log_folder == folder
    spec = replace(WRAPPED, environ={"A": "secret"}, config=WorldConfig(env={"A": "secret"}))
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert "'gloo'" in repr(spec)
    assert "secret" not in repr(spec)


def test_a_worker_has_its_own_device() -> None:
    """A worker's device is its own GPU, a GPU that it shares if GPUs are few, or the CPU."""
    for gpus, device in (((), "cpu"), (("4", "5"), "cuda:1"), (("4",), "cuda:0")):
        assert replace(START, gpus=gpus).device == device
    intels = replace(START, world=replace(START.world, backend="cpu:gloo,xpu:xccl"))
    assert intels.device == "xpu:1"


def test_a_node_has_its_own_ranks_and_gpus() -> None:
    """A node has its own ranks, which see all its GPUs; simulated nodes divide the GPUs."""
    world = replace(WRAPPED, slots=(Position(0, 0), Position(1, 0), Position(0, 1)), world_size=3)
    real = replace(world, node=0, gpus=("0", "1"))
    assert (real.here, real.gpus_of(2)) == ((0, 2), ("0", "1"))
    found = [replace(real, node=node).here for node in (1, 2, None)]
    assert found == [(1,), (), (0, 1, 2)]
    assert replace(world, gpus=("0", "1", "2")).gpus_of(1) == ("2",)
    assert [replace(WRAPPED, node=node).here for node in (0, 1)] == [(0, 1, 2, 3), ()]


SEATS = place_ranks((), (2, 2), 4)
USER, RUN = {"MPLBACKEND": "agg"}, WorldConfig(name="run")
SPEC = WorldSpec(4, "gloo", USER, "/", (), 3, "py", ("4", "5", "6"), slots=SEATS, config=RUN)
NCCLS = {*WITH_NCCL, "NCCL_SOCKET_IFNAME"}


def test_ranks_on_two_nodes_have_their_own_variables() -> None:
    """A rank has the variables of its slot and its node's GPUs; all others are the world's."""
    first, last = (torchrun_variables(SPEC, rank, 29500, "/error.json") for rank in (0, 3))
    slots = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [first[name] for name in slots] == ["0", "0", "2", "0", "2"]
    assert [last[name] for name in slots] == ["3", "1", "2", "1", "2"]
    assert (first["CUDA_VISIBLE_DEVICES"], last["CUDA_VISIBLE_DEVICES"]) == ("4,5", "6,4")
    common = first.keys() - {*slots, "ROLE_RANK", "CUDA_VISIBLE_DEVICES"}
    assert all(first[name] == last[name] for name in common)
    assert (first["MASTER_PORT"], first["TORCHELASTIC_RUN_ID"]) == ("29500", "run")
    # A user's variable stays; without nccl exactly NBDIST_SETS without NCCLS are set.
    assert torchrun_variables(SPEC, 0, 0)["MPLBACKEND"] == "agg"
    assert torchrun_variables(SPEC, 0, 0)["OMP_NUM_THREADS"] == "3"
    assert NBDIST_DECIDES < NBDIST_SETS
    assert torchrun_variables(SPEC, 0, 0).keys() == NBDIST_SETS - NCCLS


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_is_set_up_safely(backend: str) -> None:
    """No thread of torch ends ranks, and NCCL uses gloo's interface; a user's values win."""
    spec = replace(SPEC, backend=backend)
    given = torchrun_variables(spec, 0, 0)
    assert given.keys() == NBDIST_SETS
    assert {name: given[name] for name in NCCLS} == {
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_RUNTIME_CONNECT": "0",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "=lo",
    }
    assert given["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert given["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    between = torchrun_variables(replace(spec, node=1, interface="eth1"), 2, 0)
    assert between["NCCL_SOCKET_IFNAME"] == "=eth1"
    theirs = dict.fromkeys(NCCLS, "theirs")
    assert {*torchrun_variables(replace(spec, environ=theirs), 0, 0).items()} >= {*theirs.items()}


def test_nvls_of_the_user_is_allowed_with_a_warning() -> None:
    """A line warns of the cost of NVLS; for ranks that share a GPU the value 1 is refused."""
    on = {"NCCL_NVLS_ENABLE": "1"}
    assert check_nvls("nccl", {}, shared=True) == check_nvls("gloo", on, shared=True) == ""
    assert check_nvls("nccl", {"NCCL_NVLS_ENABLE": "0"}, shared=True) == ""
    said = check_nvls("nccl", on, shared=False)
    assert said.startswith("NCCL_NVLS_ENABLE=1: faster, but after an aborted collective")
    # With the value 2 NCCL itself goes without NVLS if ranks share a GPU.
    assert "=2: faster" in check_nvls("nccl", {"NCCL_NVLS_ENABLE": "2"}, shared=True)
    with pytest.raises(UsageError, match="ENABLE=1 cannot work where several ranks"):
        check_nvls("nccl", on, shared=True)


def test_nccl_connects_ranks_that_share_a_gpu() -> None:
    """NCCL needs a single variable from 2.30 on, and several before; the user's settings win."""
    theirs = {"NCCL_MAX_CTAS": "4", "NCCL_HOSTID": "node"}
    assert sharing_variables(3, (2, 30, 7), theirs) == {
        "NCCL_MAX_CTAS": "4",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }
    # Each rank has another host for NCCL, and connects to the others over the loopback interface.
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
    # Hosts also differ if the user has named the host.
    assert sharing_variables(1, (2, 28), {"NCCL_HOSTID": "node"})["NCCL_HOSTID"] == "node-1"
