"""What can go wrong on a rank, with collectives of the stand-in, and that the world goes on.

Rows are cells of a world of four ranks; `run` says how long each takes until all ranks are idle,
and until the next collective is right on all of them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from nbdist import topology
from nbdist.errors import NbdistError
from nbdist.world.running import RunningTask
from nbdist.world.states import State
from nbdist.world.world import World
from tests.faults.collectives import BEFORE
from tests.standin import processes
from tests.waiting import SOON

RANKS = 4

SETUP = BEFORE + "second = dist.new_group()\n"

BAD = "if rank == 1: raise ValueError('bad')\n"


@dataclass(frozen=True)
class Row:
    """A cell; with which error and words it ends, if any, and of which ranks.

    Ranks that are `lost` are restarted; `is_stopped`: Stop is pressed.
    """

    source: str
    error: str
    said: str = ""
    ranks: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    is_stopped: bool = False


def _raises(source: str, waited: str, **more: Any) -> Row:
    """Rank 1 does, in line 2, and the others have `waited` somewhere."""
    ranks, said = more.pop("ranks", (1,)), f"{waited} and w"
    before = f"t, u = torch.ones(256), torch.ones(256)\n{BAD}"
    return Row(before + source, "WorkerError", said if waited else "", ranks, **more)


IN_LINE = "Ranks 0,2-3 were waiting in {} (line {})"

ROWS = {
    "raises": _raises("dist.all_reduce(t)\nt.sum().item()", IN_LINE.format("all_reduce", 4)),
    "raises, others run ahead": _raises("dist.all_reduce(t)", IN_LINE.format("all_reduce", 3)),
    "raises, 20 MB": _raises(
        "t = torch.ones(5_000_000)\ndist.all_reduce(t)\nt.sum().item()",
        IN_LINE.format("all_reduce", 5),
    ),
    "raises, barrier": _raises("dist.barrier()", IN_LINE.format("barrier", 3)),
    "raises, async": _raises(
        "work = dist.all_reduce(t, async_op=True)\nwork.wait()\nt.sum().item()",
        IN_LINE.format("all_reduce", 5),
    ),
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
    "raises, objects": _raises(
        "dist.all_gather_object([None] * world_size, rank)", IN_LINE.format("_all_gather_base", 3)
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
    # All of them wait then, for a collective that nothing but the GPU is busy with.
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
"""A cell after which something goes wrong on a rank when it is done."""

FIRST = {
    "raises, a group's first collective": "fresh = dist.new_group()",
    "raises, an abort hangs": BREAKS.format("abort"),
    "raises, nccl timed out": "import time; from datetime import timedelta\n"
    "brief = dist.new_group(timeout=timedelta(seconds=0.2))",
}
"""Cells before."""

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


@dataclass(frozen=True)
class Result:
    """How it ended, and the seconds."""

    error: NbdistError | None
    idle: float
    healed: float
    pids: dict[int, int]


@contextmanager
def stand_in() -> Iterator[None]:
    """Have agents that start now give their workers the stand-in, on a machine without a GPU."""
    with (
        tempfile.TemporaryDirectory(prefix="standin-") as folder,
        mock.patch.dict(os.environ, PYTHONPATH=processes.path_with_standin(Path(folder))),
        mock.patch.object(topology, "check_start", return_value=None),
    ):
        yield


@contextmanager
def made(ranks: int = RANKS) -> Iterator[World]:
    """Make a world on the stand-in, with an agent of its own."""
    with stand_in(), World(ranks, backend="nccl", log_dir="", show=False) as world:
        yield world


def prepare(world: World) -> None:
    """Have it ready, with models and groups; anew where a row has lost them."""
    if world.state is not State.READY:
        world.restart()
    if None in world.gather("globals().get('second') and rank"):
        if None in world.gather("globals().get('t') and rank"):
            world.restart()
        world.execute(SETUP)


def run(world: World, name: str) -> Result:
    """Run a row."""
    row = ROWS[name]
    if name in FIRST:
        world.execute(FIRST[name])
    before = dict(world.pids)
    began = time.monotonic()
    running = world.submit(world.task(row.source))
    if row.is_stopped:
        _stop(world, running)
        began = time.monotonic()
    world.session.wait(running)
    idle = time.monotonic() - began
    world.execute("t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size, t")
    return Result(running.error(), idle, time.monotonic() - began, before)


def _stop(world: World, running: RunningTask) -> None:
    end = time.monotonic() + SOON
    for _ in world.follow(running):
        if running.age > 1.0 or time.monotonic() > end:
            break
    world.interrupt()
