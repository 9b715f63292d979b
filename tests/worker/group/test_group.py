"""Tests of `nbdist.worker.group.group`: one rank's side of the groups, aborted and formed again."""

from __future__ import annotations

import pytest

from nbdist.errors import WorkerError
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)

SETUP = """
import threading, time
group = get_ipython().kernel.group

def abort():
    while not group.waits_to_meet:
        time.sleep(0.01)
    group.abort()
"""


@pytest.fixture(scope="module")
def started(started: World) -> World:
    started.execute(SETUP)
    return started


def break_off(world: World) -> None:
    """Have rank 1 fail while rank 0 waits in a collective, which aborts it."""
    with pytest.raises(WorkerError):
        world.execute("if rank == 1: raise ValueError\ndist.barrier()")


def test_groups_that_a_rank_holds(world: World) -> None:
    """Those besides the world's own, by name, with their ranks; none while that is destroyed."""
    world.execute(
        "one, both = [dist.new_group(ranks) for ranks in ([1], [0, 1])]\n"
        "held = group.held()\n"
        "names = [each.group_name for each in (one, both) if each is not dist.GroupMember."
        "NON_GROUP_MEMBER]\n"
        "dist.destroy_process_group()\n"
        "gone = group.held()"
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
    break_off(world)
    world.execute(
        "dist.all_reduce(t := torch.ones(1), group=dist.new_group([0, 1]))\nassert t == 2"
    )


def test_groups_are_the_same_ones_afterwards(world: World) -> None:
    """They are connected anew in place, also those that only some ranks still hold."""
    world.execute(
        "default, pair, lost = dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([0, 1])\n"
        "if rank == 1: dist.destroy_process_group(lost)"
    )
    break_off(world)
    world.execute(
        "assert dist.group.WORLD is default\n"
        "for each in (default, pair):\n"
        "    dist.all_reduce(t := torch.ones(1), group=each)\n"
        "    assert t.item() == 2"
    )
