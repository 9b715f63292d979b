"""Tests of `nbdist.worker.group.default`: models whose steps were broken off, or restored."""

from __future__ import annotations

import pytest

from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)

SETUP = """
import pickle
from nbdist.worker.group import default as ddp

def model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    net = torch.nn.Sequential(*layers)
    return torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.0004)

def step(net):
    net.zero_grad()
    net(torch.full((2, 8), float(rank))).sum().backward()
    return [parameter.grad.clone() for parameter in net.parameters()]

def equal(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
"""


@pytest.fixture(scope="module")
def started(started: World) -> World:
    started.execute(SETUP)
    return started


def test_models_that_there_are(world: World) -> None:
    """Not one whose `__init__` failed and that a traceback keeps alive."""
    world.execute(
        "kept = []\n"
        "class Failing(torch.nn.parallel.DistributedDataParallel):\n"
        "    def __init__(self):\n"
        "        kept.append(self)\n"
        "        raise RuntimeError\n"
        "try: Failing()\n"
        "except RuntimeError: pass\n"
        "net = model()\n"
        "assert [each is net for each in ddp.ddp_models()] == [True]\n"
        "del net, kept, Failing"
    )


def test_layout_of_buckets(world: World) -> None:
    """There is none before the second step; a restored model has the one that it is given."""
    world.execute(
        "net = model()\n"
        "before = ddp.bucket_layout(net)\n"
        "grads = [step(net) for _ in range(3)][-1]\n"
        "layout = ddp.bucket_layout(net)\n"
        "again = pickle.loads(pickle.dumps(net))\n"
        "lost = ddp.bucket_layout(again)\n"
        "ddp.set_bucket_layout(again, layout)\n"
        "kept = ddp.bucket_layout(again)\n"
        "assert equal(step(again), grads)\n"
        "other = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "ddp.set_bucket_layout(other, layout)\n"
        "refused = ddp.bucket_layout(other)\n"
        "del net, again, other"
    )
    for before, layout, lost, kept, refused in world.gather("before, layout, lost, kept, refused"):
        assert sorted(number for bucket in layout for number in bucket) == list(range(8))
        assert len(layout) > 1
        assert (before, lost, kept, refused) == ([], [], layout, [])


def test_a_step_that_was_broken_off(world: World) -> None:
    """The next one is a first one again, with the gradients of an unbroken run."""
    world.execute(
        "net, unbroken = model(), model()\n"
        "grads = [step(unbroken) for _ in range(2)][-1]\n"
        "step(net)\n"
        "net(torch.ones(2, 8))  # and no backward\n"
        "ddp.forget_broken_off_steps()\n"
        "assert equal(step(net), grads)\n"
        "del net, unbroken"
    )


def test_models_of_other_groups_stay(world: World) -> None:
    """Only those on the group that has ended get a reducer of the new one."""
    world.execute(
        "group = dist.group.WORLD\n"
        "pair = dist.new_group([0, 1])\n"
        "other = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2),\n"
        "                                                  process_group=pair)\n"
        "moved = model()\n"
        "reducers = other.reducer, moved.reducer\n"
        "ddp.move_models(group, group)\n"
        "assert other.reducer is reducers[0]\n"
        "assert moved.reducer is not reducers[1]\n"
        "step(moved)\n"
        "del other, moved, reducers"
    )


def test_models_begin_anew(world: World) -> None:
    """Ranks whose model has run and one whose has not agree about its buckets again."""
    world.execute(
        "net = model()\n"
        "grads = [step(net) for _ in range(3)][-1]\n"
        "if rank == 1: net = pickle.loads(pickle.dumps(net))\n"
        "ddp.begin_models_anew()\n"
        "assert equal(step(net), grads)\n"
        "del net"
    )
