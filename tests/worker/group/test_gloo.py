"""Tests of `nbdist.worker.group` with gloo and DDP: groups and models that connect again."""

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

SETUP = """
import os, pickle
from nbdist.worker.group import default
from torch.nn.parallel import DistributedDataParallel as DDP
ours = get_ipython().kernel.group

def made():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    return DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0.0004)

def step(net):
    net.zero_grad()
    net(torch.full((2, 8), float(rank))).sum().backward()
    return [parameter.grad.clone() for parameter in net.parameters()]

def equal(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))

def meets(group=None):
    dist.all_reduce(t := torch.ones(1), group=group)
    return t.item() == 2
"""


@pytest.fixture(scope="module")
def started(started: World) -> World:
    started.execute(SETUP)
    return started


def heal(world: World, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(WorkerError):
            world.execute(FAILS)


# --- models of DDP: first, while there are no others ----------------------------------------


def test_ddp_models_leaves_out_failed_models(world: World) -> None:
    """`ddp_models` leaves out a model whose `__init__` has failed, even if something keeps it."""
    world.execute(
        "kept = []\n"
        "class Failing(DDP):\n"
        "    def __init__(self):\n        kept.append(self)\n        raise RuntimeError\n"
        "try: Failing()\n"
        "except RuntimeError: pass\n"
        "net = made()\n"
        "assert [each is net for each in default.ddp_models()] == [True]\n"
        "del net, kept, Failing"
    )


def test_renewed_reducers_give_equal_gradients(world: World) -> None:
    """After `renew_reducers` ranks step alike, even if the model of a rank had no bucket layout."""
    world.execute(
        "net = made()\n"
        "grads = [step(net) for _ in range(3)][-1]\n"
        "if rank == 1: net = pickle.loads(pickle.dumps(net))  # it has no layout\n"
        "default.renew_reducers()\n"
        "assert equal(step(net), grads)\n"
        "del net"
    )


# --- groups of gloo ---------------------------------------------------------------------------


def test_a_hang_right_after_healing_is_released(world: World) -> None:
    """A rank that waits in the first collective after healing is named and released."""
    for _ in range(2):
        heal(world)
        with pytest.raises(RanksReleased, match="all_reduce"):
            world.execute("if rank == 0: dist.all_reduce(torch.ones(1))")
    world.execute("dist.barrier()")


@pytest.mark.skipif(not seam.RECORDS_GLOO, reason="this torch records nothing of gloo's")
def test_healing_forgets_the_last_collective(world: World) -> None:
    """After healing a rank has no last collective, until a collective has begun."""
    world.execute("dist.all_reduce(torch.ones(1))\ndist.barrier()")
    heal(world)
    assert [status.collective for status in world.status()] == [None, None]
    world.execute("dist.barrier()")
    last = [status.collective for status in world.status()]
    assert [(each.name, each.is_done) for each in last if each] == [("barrier", True)] * 2


def test_a_gloo_backend_of_user_code_is_connected(world: World, tmp_path: Path) -> None:
    """A gloo backend that user code makes itself, as older libraries do, is connected."""
    world.execute(
        f"store = dist.FileStore({str(tmp_path / 'store')!r}, world_size)\n"
        "own = dist.ProcessGroupGloo(store, rank, world_size)\n"
        "t = torch.ones(1)\nown.allreduce([t]).wait()\nassert t.item() == 2\n"
        "own.barrier().wait()\ndel own, store"
    )


def test_messages_of_gloo_are_reworded(world: World) -> None:
    """Messages of gloo become plainer, also for cells that catch them; a user's own errors stay."""
    hint = "This is typically caused by a remote worker crashing. GLHF!"
    ended = RuntimeError(f"{PAIR} Connection closed by peer [127.0.0.1]:9. {hint}")
    other, own = RuntimeError(f"{PAIR} op.nbytes <= nbytes"), RuntimeError("a gloo of mine")
    for error in (ended, other, own):
        gloo.reword(error)
    assert [str(ended), str(own)] == [gloo.RECEIVE_ABORTED, "a gloo of mine"]
    assert str(other) == "[gloo/transport/tcp/pair.cc:534] op.nbytes <= nbytes"
    source = "if rank: raise ValueError('mine')\ntry: dist.barrier()\n"
    ran = run(world, f"{source}except RuntimeError as error: print(error)")
    assert ran.lines(0) == [gloo.RECEIVE_ABORTED]
    ran = run(world, f"{source}except RuntimeError: 1 / 0")
    assert gloo.RECEIVE_ABORTED in ran.traceback(0)
    assert "GLHF" not in ran.traceback(0)
    assert "nbdist/" not in ran.traceback(0)


SAID_OF_CONNECTIONS = {
    f"{PAIR} Connection closed by peer [127.0.0.1]:9": "ended",
    f"{PAIR} Read error [127.0.0.1]:9: Connection reset by peer": "ended",
    f"{PAIR} writev [127.0.0.1]:9: Broken pipe": "ended",
    stores.STORE_WAIT_ABORTED: "ended",
    gloo.RECEIVE_ABORTED: "ended",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 500ms "
    "for recv operation to complete": "timed out",
    "Application timeout caused pair closure": "timed out",
    **dict.fromkeys(("[Errno 104] Connection reset by peer", "Connection closed by peer"), ""),
}


def test_messages_tell_whether_connections_have_ended() -> None:
    """Messages of gloo tell that connections have ended or timed out; messages of users do not."""
    found = {message: connections_after(message) for message in SAID_OF_CONNECTIONS}
    assert found == SAID_OF_CONNECTIONS


def test_subgroups_are_listed_with_their_ranks(world: World) -> None:
    """A rank's subgroups are listed by name with ranks; without the world's group, none is."""
    world.execute(
        "before = ours.subgroup_members()  # by earlier tests\n"
        "one, both = [dist.new_group(ranks) for ranks in ([1], [0, 1])]\n"
        "held = {n: each for n, each in ours.subgroup_members().items() if n not in before}\n"
        "names = [each.group_name for each in (one, both)\n"
        "         if each is not dist.GroupMember.NON_GROUP_MEMBER]\n"
        "dist.destroy_process_group()\n"
        "gone = ours.subgroup_members()"
    )
    held, names, gone = zip(*world.gather("held, names, gone"), strict=True)
    assert [sorted(each.values()) for each in held] == [[(0, 1)], [(0, 1), (1,)]]
    assert [sorted(each) for each in held] == [sorted(each) for each in names]
    assert gone == ({}, {})


def test_healing_connects_groups_in_place(world: World) -> None:
    """Healing connects groups in place, even if a rank has destroyed another of its groups.

    A group that has a backend for each device is connected, too.
    """
    world.execute(
        "world, pair, lost = dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([0, 1])\n"
        "by_device = dist.new_group(backend='cpu:gloo,cuda:gloo')\n"
        "if rank == 1: dist.destroy_process_group(lost)"
    )
    heal(world)
    world.execute("assert dist.group.WORLD is world and all(map(meets, (world, pair, by_device)))")


# This test is late in the file, because its model stays.
def test_healing_leaves_no_descriptors_or_threads(world: World) -> None:
    """Healing leaves no descriptor, and from torch 2.14 on no thread."""
    works = "assert meets() and meets(pair)\nnet(torch.ones(2, 4)).sum().backward()"
    world.execute(f"pair = dist.new_group([0, 1])\nnet = DDP(torch.nn.Linear(4, 4))\n{works}")
    heal(world)
    world.execute(works)
    held = "(len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')))"
    before = world.gather(held)
    heal(world, times=10)
    world.execute(works)
    for (descriptors, threads), (fewer, least) in zip(world.gather(held), before, strict=True):
        assert descriptors <= fewer + 2
        assert threads <= least or not seam.RENEWS_GLOO


@pytest.mark.skipif(seam.RENEWS_GLOO, reason="with this torch a group can always be rebuilt")
def test_a_group_that_was_rebuilt_too_often_says_so(world: World) -> None:
    """A line says how often a group was formed again; its first forming does not count."""
    world.restart()
    world.execute("from nbdist.worker.compat import torch as seam\nseam.MAX_GENERATIONS = 3")
    heal(world, times=2)
    world.execute("dist.barrier()\nassert seam.MAX_GENERATIONS == 3")
    heal(world)
    problem = world.engine.rank_table.problem
    assert problem == "the group was rebuilt 2 times, which is all torch takes"
    world.restart()
