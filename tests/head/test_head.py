"""Tests of `nbdist.head.head`: to the notebook several agents are as one."""

from __future__ import annotations

import pytest

from nbdist.errors import WorkerError
from nbdist.world.world import World

SUM = """
import os, torch, torch.distributed as dist
total = torch.tensor([float(rank)])
dist.all_reduce(total)
seat = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
"""


def test_one_cell_on_two_nodes(world: World) -> None:
    """Ranks of both reduce together, each in its own seat; what one raises frees the others."""
    world.execute(SUM)
    assert [float(each) for each in world.gather("total")] == [6.0] * 4
    assert world.gather("seat") == [[str(r % 2), "2", str(r // 2)] for r in range(4)]
    with pytest.raises(WorkerError, match=r"rank 1.*ValueError: bad shard"):
        world.execute("if rank == 1: raise ValueError('bad shard')\ndist.all_reduce(total)")
    world.execute("again = torch.ones(1)\ndist.all_reduce(again)")
    assert [float(each) for each in world.gather("again")] == [4.0] * 4
