"""Tests of `nbdist.head.assembly`: the world of several machines is started, healed and scaled."""

from __future__ import annotations

import pytest

from nbdist.errors import ScaleError, WorkerDied, WorkerError
from nbdist.world.world import World

DIES = """
import os, torch.distributed as dist
if rank == 1: os.kill(os.getpid(), 9)
dist.barrier()
"""


def test_fewer_and_as_many_again(world: World) -> None:
    """Who stays keeps its variables and its host; what has died is replaced where it was."""
    world.execute("kept = rank")
    world.scale(ranks=[0, 2])
    assert [row.host for row in world.status()] == ["node0", "node1"]
    world.scale(4)
    assert world.gather("globals().get('kept')") == [0, 2, None, None]
    with pytest.raises(WorkerDied, match="rank 1 on node1 "):
        world.execute(DIES)
    assert world.gather("globals().get('kept')") == [0, None, None, None]


def test_more_than_there_is_room_for(world: World) -> None:
    """It is refused, and all are where they were: who is told of later is told with its host."""
    with pytest.raises(ScaleError, match="4 workers have room on these machines"):
        world.scale(6)
    assert [row.host for row in world.status()] == ["node0", "node0", "node1", "node1"]
    with pytest.raises(WorkerError, match="rank 3 on node1 "):
        world.execute("if rank == 3: raise ValueError")


def test_a_restart_after_another_size(world: World) -> None:
    """The layout holds: as many as it is for sit as they did, and fewer stay fewer."""
    world.restart(layout="2x1")
    world.scale(1)
    world.restart()
    assert [row.host for row in world.status()] == ["node0"]
    world.scale(2)
    world.restart()
    assert [row.host for row in world.status()] == ["node0", "node1"]
