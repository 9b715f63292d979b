"""A group that has nccl and nothing else: no gloo connections tell who waits, or free anybody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdist.errors import RanksReleased, WorkerDied, WorkerError
from nbdist.world.world import World
from tests.gpu import lab

pytestmark = [pytest.mark.shared_world, pytest.mark.timeout(75)]

SUM = "t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size"

EVENS = "t = torch.ones(1)\nif rank % 2 == 0: dist.all_reduce(t, group=evens); t.item()"


@pytest.fixture(scope="module")
def kind() -> str:
    if not lab.has_gpu():
        pytest.skip("no GPU is visible here")
    return "nccl"


@pytest.fixture(scope="module")
def started(kind: str) -> Iterator[World]:
    with lab.make_world(kind, 4, backend="nccl") as world:
        yield world


@pytest.fixture
def world(world: World) -> World:
    world.execute(f"kept = rank\nevens = dist.new_group([0, 2])\n{EVENS}")
    return world


def test_one_rank_raises(world: World) -> None:
    """Who waits is freed; group and subgroup work on."""
    before = dict(world.pids)
    _, error = lab.ends(world, f"if rank == 1: raise ValueError('bad')\n{SUM}")
    assert isinstance(error, WorkerError)
    assert error.errors.keys() == {1}
    assert world.pids == before
    assert world.gather("kept") == [0, 1, 2, 3]
    world.execute(f"{SUM}\n{EVENS}\ndist.barrier()")


def test_one_rank_skips(world: World) -> None:
    """Who waits for it is freed."""
    _, error = lab.ends(world, f"if rank != 1:\n    {SUM}")
    assert isinstance(error, RanksReleased)
    world.execute(SUM)


@pytest.mark.parametrize("dying", [0, 3])
def test_one_rank_dies(world: World, dying: int) -> None:
    """It is replaced at once, also where others hold a subgroup that it had, or had not."""
    running, error = lab.ends(world, f"import os\nif rank == {dying}: os._exit(3)\n{SUM}")
    assert isinstance(error, WorkerDied)
    assert running.age < lab.FREED_WITHIN
    world.execute(SUM)
    world.execute("other = dist.new_group(); dist.all_reduce(torch.ones(1), group=other)")
