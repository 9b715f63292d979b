"""The stand-in acts as nccl2 does, which tests/gpu proves of nccl2, and worlds heal on it.

A rank fails while others are in its collectives: they are released, and the world goes on.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nbdist import topology
from nbdist.errors import WorkerError
from nbdist.world import dispatch
from nbdist.world.states import WorldState
from nbdist.world.task_error import error_of
from nbdist.world.world import World
from tests.faults.collectives import BEFORE
from tests.standin import processes
from tests.standin.processes import CHECKS, Said, both
from tests.waiting import SOON, wait_until

RANKS = 4

pytestmark = [pytest.mark.own_agent, pytest.mark.shared_world(RANKS)]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """The results of the contract's checks on two ranks."""
    folder = tmp_path_factory.mktemp("standin")
    return both(folder, "cpu", {**os.environ, "PYTHONPATH": processes.path_with_standin(folder)})


@pytest.mark.parametrize("check", CHECKS)
def test_both_ranks_pass_the_contract(said: Said, check: str) -> None:
    """Both ranks pass each check of the contract."""
    said.passed(check)


@pytest.mark.parametrize(("asked", "name"), [("1", "ProcessGroupNCCL2"), ("0", "ProcessGroupNCCL")])
def test_doctor_names_the_class_of_nccl(asked: str, name: str) -> None:
    """`nbdist doctor` names torch's own class for `nccl`, of two classes; no stand-in is used."""
    done = subprocess.run(
        [sys.executable, "-m", "nbdist.worker", "about"],
        env={**os.environ, "TORCH_DIST_USE_NCCL2": asked},
        capture_output=True,
        text=True,
        timeout=SOON,
    )
    nccl = json.loads(done.stdout)["nccl"]
    if not nccl:
        pytest.skip("this torch has no nccl")
    assert re.fullmatch(rf"[\d.]+ \({name}\)", nccl)


SETUP = BEFORE + "second = dist.new_group()\n"

BAD = "if rank == 1: raise ValueError('bad')\n"


@dataclass(frozen=True)
class Row:
    """A cell, its expected error, words of the message, and the ranks that the error is of.

    Ranks that are `lost` are restarted; with `is_stopped` the test presses Stop.
    """

    source: str
    error: str
    said: str = ""
    ranks: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    is_stopped: bool = False


def _raises(source: str, waited: str, **more: Any) -> Row:
    """Return a row in which rank 1 raises an error in line 2, while other ranks have `waited`."""
    ranks, said = more.pop("ranks", (1,)), f"{waited} and w"
    before = f"t, u = torch.ones(256), torch.ones(256)\n{BAD}"
    return Row(before + source, "WorkerError", said if waited else "", ranks, **more)


IN_LINE = "Ranks 0,2-3 were waiting in {} (line {})"

ROWS = {
    "raises": _raises("dist.all_reduce(t)\nt.sum().item()", IN_LINE.format("all_reduce", 4)),
    "raises, others run ahead": _raises("dist.all_reduce(t)", IN_LINE.format("all_reduce", 3)),
    "raises, send and recv": _raises(
        "dist.recv(t, 1) if rank == 0 else None\nt.sum().item()",
        "Rank 0 was waiting in recv (line 4)",
    ),
    "raises, two groups": _raises(
        "one = dist.all_reduce(t, async_op=True)\n"
        "two = dist.all_reduce(u, group=second, async_op=True)\n"
        "one.wait(); two.wait(); (t + u).sum().item()",
        IN_LINE.format("all_reduce", 5),
    ),
    "raises, a group's first collective": _raises(
        "dist.all_reduce(t, group=fresh)\nt.sum().item()", IN_LINE.format("all_reduce", 4)
    ),
    "raises, DDP": _raises(
        "net(torch.ones(2, 64)).sum().backward()\noptimizer.step()",
        IN_LINE.format("all_reduce", 3),
    ),
    "raises, FSDP2": _raises(
        "sharded(torch.ones(2, 64)).sum().backward()", IN_LINE.format("_all_gather_base", 3)
    ),
    "raises, an abort hangs": _raises(
        "dist.all_reduce(t)\nt.sum().item()",
        IN_LINE.format("all_reduce", 4),
        ranks=(1, 2),
        lost=(2,),
    ),
    "raises, nccl timed out": _raises(
        "dist.all_reduce(t, group=brief)\nt.sum().item(); time.sleep(1.5)", "", ranks=()
    ),
    "has a poisoned context": Row(
        "from tests.standin.device import DEVICE\nt = torch.ones(256)\n"
        "DEVICE.is_poisoned = rank == 1\ndist.all_reduce(t)\nt.sum().item()",
        "WorkerError",
        "A GPU error (device-side assert triggered) made the process of rank 1 unusable. Rank 1",
        ranks=(1,),
        lost=(1,),
    ),
    "skips": Row(
        "t = torch.ones(1)\nif rank != 1:\n    dist.all_reduce(t); t.item()",
        "RanksReleased",
        "ranks 0,2-3 wait in all_reduce, line 3; rank 1 finished the cell without it.",
    ),
    "skips, others run ahead": Row(
        "if rank != 1: dist.all_reduce(torch.ones(1))",
        "RanksReleased",
        "ranks 0,2-3 wait in all_reduce, line 1; rank 1 finished the cell without it.",
    ),
    "mismatch": Row(
        "t = torch.ones(8 if rank == 1 else 4)\ndist.all_reduce(t)\nt.sum().item()",
        "RanksReleased",
        "all_reduce (line 3), sizes differ: ranks 0,2-3 [4], rank 1 [8].",
    ),
    "calls another": Row(
        "t = torch.ones(4)\ndist.broadcast(t, 0) if rank == 1 else dist.all_reduce(t)\n"
        "t.sum().item()",
        "RanksReleased",
        "ranks 0,2-3 are in all_reduce (line 3), rank 1 in broadcast (line 3): these calls do not",
    ),
    "is killed": Row(
        "import os, signal\nt = torch.ones(256)\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.all_reduce(t)\nt.sum().item()",
        "WorkerDied",
        "was killed by SIGKILL",
        lost=(1,),
    ),
    "Stop": Row(
        "import time\nif rank == 1: time.sleep(600)\n"
        "t = torch.ones(1); dist.all_reduce(t); t.item()",
        "WorkerError",
        IN_LINE.format("all_reduce", 3),
        is_stopped=True,
    ),
    "is slow": Row(
        "import time\nif rank == 1: time.sleep(2)\nt = torch.ones(1); dist.all_reduce(t)\n"
        "assert t.item() == world_size",
        "",
    ),
    # All ranks wait then, for a collective with which only the GPU is busy.
    "is slow on its GPU, with parts that differ": Row(
        "import time\nfrom tests.standin.device import DEVICE\n"
        "given, sizes = torch.ones(world_size * (rank + 1)), [n + 1 for n in range(world_size)]\n"
        "dist.all_to_all_single(torch.empty(sum(sizes)), given, sizes, [rank + 1] * world_size)\n"
        "dist.all_gather([torch.empty(n) for n in sizes], torch.ones(rank + 1))\n"
        "if rank == 1: DEVICE.stream.put(lambda: time.sleep(4))\n"
        "t = torch.ones(1); dist.all_reduce(t)\nassert t.item() == world_size",
        "",
    ),
}

BREAKS = "from tests.standin.backend import FAULTS\nif rank == 2: FAULTS.add({!r})"
"""A cell that plants a fault on rank 2."""

FIRST = {
    "raises, a group's first collective": "fresh = dist.new_group()",
    "raises, an abort hangs": BREAKS.format("abort"),
    "raises, nccl timed out": "import time; from datetime import timedelta\n"
    "brief = dist.new_group(timeout=timedelta(seconds=0.2))",
}
"""Cells that run before the cells of `ROWS`, by name."""

GOES_ON = """
for group in (None, second):
    t = torch.full((1,), float(rank)); dist.all_reduce(t, group=group)
    assert t.item() == sum(range(world_size)), t
if rank % 2 == 0:
    t = torch.ones(1); dist.all_reduce(t, group=evens); assert t.item() == (world_size + 1) // 2, t
for p in net.parameters(): dist.broadcast(p.detach(), 0)
optimizer.state.clear(); optimizer.zero_grad()
net(torch.full((2, 64), float(rank))).sum().backward(); optimizer.step()
weights = [torch.empty_like(net.module.weight) for _ in range(world_size)]
dist.all_gather(weights, net.module.weight.detach())
assert all(torch.equal(weights[0], other) for other in weights)
sharded(torch.full((2, 64), float(rank))).sum().backward()
"""


@pytest.fixture(scope="module")
def started() -> Iterator[World]:
    """A world on the stand-in, whose agent finds no GPU and looks for none."""
    with (
        tempfile.TemporaryDirectory(prefix="standin-") as folder,
        mock.patch.dict(os.environ, PYTHONPATH=processes.path_with_standin(Path(folder))),
        mock.patch.object(topology, "check_start", return_value=None),
        World(RANKS, backend="nccl", log_dir="", show=False) as world,
    ):
        yield world


@pytest.fixture
def world(started: World) -> World:
    """The world with models and groups, which are made again if a row has lost them."""
    if started.state is not WorldState.READY:
        started.restart()
    if None in started.gather("globals().get('second') and rank"):
        if None in started.gather("globals().get('t') and rank"):
            started.restart()
        started.execute(SETUP)
    return started


@pytest.mark.parametrize("name", ROWS)
def test_a_world_goes_on_after_a_failure(world: World, name: str) -> None:
    """Survivors keep processes and variables, and earlier groups and models still work."""
    row = ROWS[name]
    if name in FIRST:
        world.execute(FIRST[name])
    before, began = dict(world.pids), time.monotonic()
    running = world.submit(world.task(row.source))
    if row.is_stopped:
        for _ in world.follow(running):
            if running.age > 1.0:
                break
        world.interrupt()
        began = time.monotonic()
    dispatch.wait(world.engine, running)
    idle = time.monotonic() - began
    world.execute("t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size, t")
    sys.stdout.write(f"{idle:.2f} s to idle, {time.monotonic() - began:.2f} s to a collective\n")
    error = error_of(running)
    assert (row.error or "NoneType") in [kind.__name__ for kind in type(error).__mro__], error
    assert row.said in str(error)
    if row.ranks:
        assert getattr(error, "errors", {}).keys() == {*row.ranks}
    assert {each for each in before if before[each] != world.pids[each]} == {*row.lost}
    kept = [None if rank in row.lost else rank for rank in range(world.size)]
    assert world.gather("globals().get('kept')") == kept
    if not row.lost:
        world.execute(GOES_ON)


def test_a_failed_connection_is_tried_again(world: World) -> None:
    """If a rank cannot connect, the next cell tries again, and no variables are lost."""
    before = dict(world.pids)
    world.execute(BREAKS.format("connect"))
    with pytest.raises(WorkerError, match="bad"):
        world.execute(ROWS["raises"].source)
    assert world.state is WorldState.BROKEN
    world.execute(GOES_ON)
    assert world.pids == before


def test_status_names_the_collective_of_a_rank(world: World) -> None:
    """`status` says in which collective each rank waits, with its place, and which was the last."""
    source = "import time\nif rank == 1: time.sleep(600)\nt = torch.ones(4); dist.all_reduce(t)"
    running = world.submit(world.task(source))

    def waits(rank: int) -> tuple[str, int, bool]:
        found = world.status()[rank]
        assert found.place is not None
        named = str(found.collective).startswith("all_reduce #")
        return found.place.operation, found.place.line, named and not found.collective.is_done

    try:
        for rank in (0, 2, 3):
            wait_until(lambda rank=rank: waits(rank) == ("all_reduce", 3, True))
        wait_until(lambda: waits(1) == ("", 2, False))
    finally:
        world.interrupt()
        dispatch.wait(world.engine, running)
