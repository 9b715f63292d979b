"""Tests of `nbdist.worker.group`, of gloo: groups aborted and connected anew, again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbdist.errors import RanksReleased, WorkerError
from nbdist.worker.compat import torch as seam
from nbdist.worker.group import gloo, stores
from nbdist.worker.group.gloo import connections_after
from nbdist.world.world import World
from tests.cells import run

pytestmark = pytest.mark.shared_world(2)

PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534]"

FAILS = "if rank == 1: raise ValueError\ndist.all_reduce(torch.ones(1))"

SET_UP = """
import os
pair = dist.new_group([0, 1])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
"""

WORKS = """
for group in (None, pair):
    t = torch.full((1,), float(rank))
    dist.all_reduce(t, group=group)
    assert t.item() == 1, t
model(torch.ones(2, 4)).sum().backward()
"""

HELD = "(len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')))"


def heal(world: World, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(WorkerError):
            world.execute(FAILS)


def test_the_first_collective_after_healing(world: World) -> None:
    """Its number is that of the one that failed before; whoever waits in it is named and freed."""
    for _ in range(2):
        heal(world)
        with pytest.raises(RanksReleased, match="all_reduce"):
            world.execute("if rank == 0: dist.all_reduce(torch.ones(1))")
    world.execute("dist.barrier()")


@pytest.mark.skipif(not seam.RECORDS_GLOO, reason="this torch records nothing of gloo's")
def test_the_last_collective_after_healing(world: World) -> None:
    """There is none until one has begun, and then it is that one."""
    world.execute("dist.all_reduce(torch.ones(1))\ndist.barrier()")
    heal(world)
    assert [status.collective for status in world.status()] == [None, None]
    world.execute("dist.barrier()")
    last = [status.collective for status in world.status()]
    assert [(each.name, each.is_done) for each in last if each] == [("barrier", True)] * 2


def test_groups_of_several_devices(world: World) -> None:
    """A group whose backends are given by device is connected anew as others are."""
    world.execute("pair = dist.new_group(backend='cpu:gloo,cuda:gloo')")
    heal(world)
    world.execute("t = torch.ones(1)\ndist.all_reduce(t, group=pair)\nassert t.item() == 2")


def test_a_backend_of_ones_own(world: World, tmp_path: Path) -> None:
    """Code that makes gloo backends itself, as older libraries do, gets one that is connected."""
    world.execute(
        f"store = dist.FileStore({str(tmp_path / 'store')!r}, world_size)\n"
        "own = dist.ProcessGroupGloo(store, rank, world_size)\n"
        "t = torch.ones(1)\nown.allreduce([t]).wait()\nassert t.item() == 2\n"
        "own.barrier().wait()\ndel own, store"
    )


HINT = "This is typically caused by a remote worker crashing. GLHF!"


def test_what_gloo_says_is_reworded() -> None:
    """What it means for the connections stays known; nothing of a user's own is changed."""
    ended = RuntimeError(f"{PAIR} Connection closed by peer [127.0.0.1]:9. {HINT}")
    other, own = RuntimeError(f"{PAIR} op.nbytes <= nbytes"), RuntimeError("a gloo of mine")
    for error in (ended, other, own):
        gloo.reword(error)
    assert [str(ended), str(own)] == [gloo.ABORTED, "a gloo of mine"]
    assert str(other) == "[gloo/transport/tcp/pair.cc:534] op.nbytes <= nbytes"
    assert connections_after(str(ended)) == "ended"


def test_what_a_cell_catches(world: World) -> None:
    """Code that prints what it was released with prints our words."""
    source = "if rank: raise ValueError('mine')\ntry: dist.barrier()\n"
    ran = run(world, f"{source}except RuntimeError as error: print(error)")
    assert ran.lines(0) == [gloo.ABORTED]
    ran = run(world, f"{source}except RuntimeError: 1 / 0")
    assert gloo.ABORTED in ran.traceback(0)
    assert "GLHF" not in ran.traceback(0)
    assert "nbdist/" not in ran.traceback(0)


@pytest.mark.parametrize(
    ("message", "connections"),
    [
        (f"{PAIR} Connection closed by peer [127.0.0.1]:9", "ended"),
        (f"{PAIR} Read error [127.0.0.1]:9: Connection reset by peer", "ended"),
        (f"{PAIR} writev [127.0.0.1]:9: Broken pipe", "ended"),
        (stores.ABORTED, "ended"),
        (gloo.ABORTED, "ended"),
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
            "500ms for recv operation to complete",
            "timed out",
        ),
        ("Application timeout caused pair closure", "timed out"),
        ("[Errno 104] Connection reset by peer", ""),
        ("Connection closed by peer", ""),
        ("bad shard", ""),
    ],
)
def test_what_is_said_of_connections(message: str, connections: str) -> None:
    """That those to other ranks have ended, or timed out; nothing of a user's own."""
    assert connections_after(message) == connections


SETUP = """
import threading, time
ours = get_ipython().kernel.group

def abort():
    while not ours.waits_to_meet:
        time.sleep(0.01)
    ours.abort()
"""


@pytest.fixture(scope="module")
def started(started: World) -> World:
    started.execute(SETUP)
    return started


def test_groups_that_a_rank_holds(world: World) -> None:
    """Those besides the world's own, by name, with their ranks; none while that is destroyed."""
    world.execute(
        "before = ours.held()  # by earlier tests\n"
        "one, both = [dist.new_group(ranks) for ranks in ([1], [0, 1])]\n"
        "held = {name: each for name, each in ours.held().items() if name not in before}\n"
        "names = [each.group_name for each in (one, both) if each is not dist.GroupMember."
        "NON_GROUP_MEMBER]\n"
        "dist.destroy_process_group()\n"
        "gone = ours.held()"
    )
    held, names, gone = zip(*world.gather("held, names, gone"), strict=True)
    assert [sorted(each.values()) for each in held] == [[(0, 1)], [(0, 1), (1,)]]
    assert [sorted(each) for each in held] == [sorted(each) for each in names]
    assert gone == ({}, {})


def test_an_aborted_new_group(world: World) -> None:
    """A rank that waits in the store for the others is out too."""
    world.execute(
        "if rank == 0:\n"
        "    thread = threading.Thread(target=abort); thread.start()\n"
        "    try: dist.new_group([0, 1])\n"
        "    except ConnectionResetError as error: said = str(error)\n"
        "    thread.join()"
    )
    (said,) = world.gather("said", ranks=[0])
    assert said.startswith("Connection closed by peer")
    heal(world)
    world.execute(
        "dist.all_reduce(t := torch.ones(1), group=dist.new_group([0, 1]))\nassert t == 2"
    )


def test_groups_are_the_same_ones_afterwards(world: World) -> None:
    """They are connected anew in place, also those that only some ranks still hold."""
    world.execute(
        "default, pair, lost = dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([0, 1])\n"
        "if rank == 1: dist.destroy_process_group(lost)"
    )
    heal(world)
    world.execute(
        "assert dist.group.WORLD is default\n"
        "for each in (default, pair):\n"
        "    dist.all_reduce(t := torch.ones(1), group=each)\n"
        "    assert t.item() == 2"
    )


def test_what_healing_leaves(world: World) -> None:
    """No descriptor, and from torch 2.14 on no thread either; last, since its model stays."""
    world.execute(SET_UP + WORKS)
    heal(world)
    world.execute(WORKS)
    before = world.gather(HELD)
    heal(world, times=10)
    world.execute(WORKS)
    for (descriptors, threads), (fewer, least) in zip(world.gather(HELD), before, strict=True):
        assert descriptors <= fewer + 2
        assert threads <= least or not seam.RENEWS_GLOO
