"""Tests of `nbdist.worker.group.default`: new groups meet, whatever a rank has missed before."""

from __future__ import annotations

import pytest

from nbdist.errors import WorkerError
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(3)

ALL_MEET = """
t = torch.full((1,), float(rank))
dist.all_reduce(t, group=dist.new_group())
assert t.item() == sum(range(world_size)), t
"""


def test_a_rank_that_missed_a_group(world: World) -> None:
    """It raised before a `new_group` of others, who needed no freeing: the next one is all's."""
    with pytest.raises(WorkerError, match="bad"):
        world.execute(
            "if rank == 1: raise ValueError('bad')\n"
            "pair = dist.new_group([0, 2])\ndist.barrier(group=pair)"
        )
    world.execute(ALL_MEET)
    world.execute("if rank != 1: dist.barrier(group=pair)")


def test_a_cell_for_some_ranks(world: World) -> None:
    """Its groups need nothing of those that do not run it."""
    world.execute("dist.barrier(group=dist.new_group([0, 2]))", ranks=[0, 2])
    world.execute(ALL_MEET)


def test_the_same_members_again(world: World) -> None:
    """Members who alone know of a group can make it, destroy it and make it again."""
    for _ in range(2):
        world.execute(
            "for _ in range(2):\n"
            "    if rank < 2:\n"
            "        pair = dist.new_group([0, 1], use_local_synchronization=True)\n"
            "        dist.barrier(group=pair)\n"
            "        dist.destroy_process_group(pair)"
        )
    world.execute(ALL_MEET)


def test_all_names_of_a_cell(world: World) -> None:
    """They are equal on all ranks, and no two are the same."""
    result = world.execute("", fetch=("[dist.new_group().group_name for _ in range(2)]",))
    names = result.rank(0)
    assert list(result) == [names] * 3
    assert len({*names, *world.execute("", fetch=("dist.new_group().group_name",))}) == 3


def test_count_of_groups(world: World) -> None:
    """torch's own count of groups goes on as ever."""
    before = world.gather("dist.get_pg_count()")
    world.execute("dist.new_group()")
    assert world.gather("dist.get_pg_count()") == [count + 1 for count in before]
