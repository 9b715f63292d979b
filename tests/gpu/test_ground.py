"""The ground of other tests: nccl's backend, processes without CUDA, sockets, and the start."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from ipaddress import ip_address

import psutil
import pytest

from nbdist.errors import NotEnoughGpus
from nbdist.world.world import World
from tests.gpu import lab
from tests.gpu.conftest import Fact, Figure
from tests.notebook.front_end import Notebook
from tests.waiting import wait_until

SUM = "t = torch.ones(1, device=device); dist.all_reduce(t); assert t.item() == world_size"

LISTENING = """
import psutil
process = psutil.Process()
found = getattr(process, "net_connections", process.connections)("inet")
found = sorted({each.laddr[:2] for each in found if each.status == psutil.CONN_LISTEN})
"""

pytestmark = pytest.mark.timeout(90)


def test_the_backend_of_cuda_tensors_is_reported(world: World, kind: str, fact: Fact) -> None:
    """The report has the backend's class and name, and whether it can be connected again."""
    world.execute("t = torch.ones(1); dist.all_reduce(t)")
    world.execute(
        "group = dist.group.WORLD; backend = group._get_backend(device)\n"
        "about = type(backend).__name__, backend.name(),"
        " getattr(backend, 'supports_reconfigure', False)"
    )
    (about,) = {*world.gather("about")}
    fact(f"{kind}: class, name, can be connected anew", ", ".join(map(str, about)))
    assert lab.DEVICE == "cpu" or kind in about[1]


def test_the_doctor_names_gpus_and_nccl(gpu: str, fact: Fact) -> None:
    """`nbdist doctor` names the GPUs and nccl, and finds no problem with torch."""
    command = [sys.executable, "-m", "nbdist.terminal", "doctor"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    fact("doctor", " | ".join(line for line in lines if "torch " in line or " GPU" in line))
    assert not [line for line in lines if line.startswith("problem: ") and "torch" in line]
    if gpu == "cuda":
        (torch,) = (line for line in lines if line.startswith("ok: torch "))
        assert re.search(r" for (CUDA|ROCm) [\d.]+ · nccl [\d.]+ \(ProcessGroupNCCL2?\) ", torch)
        assert any(line.startswith(f"ok: {lab.gpus()} GPU") for line in lines)


def test_no_rank_listens_beyond_loopback(world: World, kind: str, fact: Fact) -> None:
    """After collectives of the group and of a subgroup no rank listens beyond loopback."""
    world.execute(
        "t = torch.ones(1); dist.all_reduce(t); pair = dist.new_group([0, 1])\n"
        "if rank < 2: dist.all_reduce(t, group=pair)"
    )
    world.execute(LISTENING)
    found = sorted({place for places in world.gather("found") for place in places})
    fact(f"{kind}: listens on", ", ".join(f"{host}:{port}" for host, port in found) or "nothing")
    assert all(ip_address(host).is_loopback for host, _ in found), found


def test_a_notebook_has_no_cuda(gpu: str) -> None:
    """The kernel opens no device of the driver, and does not import torch."""
    options = "" if gpu == "cuda" else "--backend gloo "
    options += "--share-gpus " if 0 < lab.gpus() < 2 else ""
    notebook = Notebook("%load_ext nbdist")
    try:
        shown = notebook.run(f"%%distributed -n 2 {options}\n{SUM}; t.device.type")
        assert shown.errors == [], shown.errors
        assert gpu in shown.text
        assert lab.cuda_traces(notebook.process.pid) == []
        assert not notebook.value("'torch' in __import__('sys').modules")
    finally:
        notebook.close()


def test_agent_and_fork_server_have_no_cuda(gpu: str) -> None:
    """Agent and fork server have no device of the driver open, and forks have no CUDA context."""
    with lab.make_world("gloo", 2) as world:
        agent = psutil.Process(world.pids[0]).parent()
        assert agent is not None
        fork_server = min(agent.children(), key=psutil.Process.create_time)
        world.execute("torch.ones(1, device=device)")
        for process in (fork_server, agent):
            assert lab.cuda_traces(process.pid) == [], process.cmdline()
        assert fork_server.num_threads() == 1
        assert world.gather("torch.cuda._is_in_bad_fork()") == [False] * 2
        assert world.gather("torch.cuda.is_initialized()") == [gpu == "cuda"] * 2
        if gpu == "cuda":
            assert all(lab.cuda_traces(pid) for pid in world.pids.values())
        # New workers come from the same process.
        world.restart()
        world.execute("torch.ones(1, device=device)")
        assert world.gather("torch.cuda._is_in_bad_fork()") == [False] * 2
        assert lab.cuda_traces(fork_server.pid) == []


def test_each_rank_has_its_gpu(world: World, gpu: str) -> None:
    """`device` is the rank's own GPU and the current device; LOCAL_RANK is the rank's number."""
    assert [each.device for each in world.status()] == world.gather("str(device)")
    if gpu == "cpu":
        assert world.gather("str(device)") == ["cpu"] * 4
        return
    number = lab.gpus()
    assert world.gather("str(device)") == [f"cuda:{rank % number}" for rank in range(4)]
    assert world.gather("torch.cuda.current_device()") == [rank % number for rank in range(4)]
    assert world.gather("torch.ones(1).cuda().device.index") == [r % number for r in range(4)]
    assert world.gather("int(__import__('os').environ['LOCAL_RANK'])") == [0, 1, 2, 3]


def test_more_ranks_of_nccl_than_gpus_are_refused() -> None:
    """Without the option more ranks than GPUs are refused, with a line that names the option."""
    if lab.DEVICE == "cpu" or not lab.gpus():
        pytest.skip("no GPU is visible here")
    with pytest.raises(NotEnoughGpus, match="`--share-gpus` for several on one"):
        World(lab.gpus() + 1, log_dir="")


@pytest.mark.parametrize("n", [2, 4])
def test_ended_workers_leave_no_memory_on_gpus(kind: str, figure: Figure, n: int) -> None:
    """Workers leave no memory on the GPU when they end; the report has the times of a start."""
    before, started = lab.used_on_device(), time.monotonic()
    with lab.make_world(kind, n) as world:
        world.execute(SUM)
        figure(f"{kind}: start to the first all_reduce, n={n}", time.monotonic() - started, "s")
        used = (lab.used_on_device() - before) / n / 2**20
        figure(f"{kind}: memory on the device per rank, n={n}", used, "MiB")
        started = time.monotonic()
        world.restart()
        world.execute(SUM)
        figure(f"{kind}: restart to an all_reduce, n={n}", time.monotonic() - started, "s")
    wait_until(lambda: lab.used_on_device() <= before + (64 << 20), "the memory comes back", 10.0)
