"""Tests of `nbdist.worker.group.nccl`: what torch has recorded of this generation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdist.worker.compat import torch as seam
from nbdist.world.world import World
from tests.worlds import NewWorld

pytestmark = [
    pytest.mark.shared_world,
    pytest.mark.skipif(not seam.RECORDS_GLOO, reason="this torch records nothing of gloo's"),
]


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(2) as world:
        world.execute(
            "import time\n"
            "from nbdist.worker.group.nccl import MOST_BEGUN, Counts, Recording\n"
            "recording = Recording()\n"
            "def counts(): return [*recording.counts().values()]"
        )
        yield world


def test_what_was_begun(world: World) -> None:
    """With name, number and sizes, the oldest first, from a time on."""
    world.execute(
        "dist.barrier()\n"
        "recording.start_over()\n"
        "began = time.time_ns()\n"
        "dist.all_reduce(torch.ones(2, 3))\n"
        "dist.broadcast(torch.ones(4, dtype=torch.int64), 0)\n"
        "found = recording.begun(recording.counts(), began)\n"
        "later = recording.begun(recording.counts(), time.time_ns())"
    )
    for found, later in world.gather("found, later"):
        said = [(each.name, each.sizes, each.dtypes, each.elements) for each in found]
        assert said == [("all_reduce", "[2, 3]", "Float", "6"), ("broadcast", "[4]", "Long", "4")]
        assert found[1].number == found[0].number + 1
        assert later == ()


def test_only_the_last_of_many(world: World) -> None:
    """Ranks that do not meet are rarely further apart."""
    world.execute(
        "began = time.time_ns()\n"
        "for _ in range(MOST_BEGUN + 9): dist.all_reduce(torch.ones(1))\n"
        "found = recording.begun(recording.counts(), began)\n"
        "last = recording.begun(recording.counts(), began)[-1].number"
    )
    for found, last in world.gather("found, last"):
        assert [each.number for each in found] == list(range(last - 63, last + 1))


def test_what_is_waited_for(world: World) -> None:
    """The last that has not ended, and how many have not."""
    world.execute(
        "store, recording = dist.group.WORLD.get_group_store(), Recording()\n"
        "if rank == 1: store.wait(['go'])\n"
        "works = [dist.all_reduce(torch.ones(1), async_op=True)]\n"
        "works.append(dist.broadcast(torch.ones(1), 1, async_op=True))\n"
        "if rank == 0:\n"
        "    unfinished = sum(each.unfinished for each in recording.counts().values())\n"
        "    waited_for = recording.waited_for(recording.counts())\n"
        "    store.set('go', '')\n"
        "for work in works: work.wait()"
    )
    assert world.gather("unfinished, waited_for", ranks=[0]) == [(2, "broadcast")]


def test_another_generation(world: World) -> None:
    """Nothing of what has begun before is under way, or the last one."""
    world.execute(
        "recording = Recording()\n"
        "dist.all_reduce(torch.ones(1))\n"
        "before = recording.last()\n"
        "recording.start_over()\n"
        "after, begun = recording.last(), recording.begun(recording.counts(), 0)"
    )
    for before, after, begun in world.gather("before, after, begun"):
        assert before.name == "all_reduce"
        assert (after, begun) == (None, ())
