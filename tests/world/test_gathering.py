"""Tests of `nbdist.world.exchange`: `World.gather` of several names, joined, and refused."""

from __future__ import annotations

import pytest
import torch

from nbdist.errors import UsageError
from nbdist.world.exchange import check_expressions
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)


@pytest.fixture(scope="module")
def started(started: World) -> World:
    started.execute("t = torch.full((2,), float(rank)); big = torch.ones(50_000) * rank")
    started.execute("only = 1", ranks=[0])
    return started


def test_several_names(world: World) -> None:
    """A tuple, with a list for each."""
    big, numbers = world.gather(["big", "rank"])
    assert [each.sum().item() for each in big] == [0.0, 50_000.0]
    assert numbers == [0, 1]
    assert world.gather("rank", rank=1) == 1
    assert world.gather(["rank", "world_size"], rank=1) == (1, 2)
    assert world.gather("t", join="stack").tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert world.gather("t[None]", join="cat", dim=1).tolist() == [[0.0, 0.0, 1.0, 1.0]]


def test_what_was_read_is_released(world: World) -> None:
    """The workers keep no shared memory for it."""
    world.gather("big")
    world.execute("import os\nlinks = [f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd')]")
    count = "sum('memfd:nbdist' in os.readlink(each) for each in links if os.path.exists(each))"
    assert world.gather(count) == [0, 0]


def test_empty_tensors_stay_two(world: World) -> None:
    """Two that are filled later have a memory each, gathered or synced."""
    world.execute("pair = torch.empty(0), torch.empty(0)", ranks=[0])
    for tensor, number in zip(pair := world.gather("pair", rank=0), (1, 2), strict=True):
        torch.full((3,), float(number), out=tensor)
    assert [tensor.tolist() for tensor in pair] == [[1.0] * 3, [2.0] * 3]
    world.sync(["pair"])
    world.execute("for n, t in enumerate(pair): torch.full((3,), float(n), out=t)")
    assert world.gather("[t.tolist() for t in pair]", rank=1) == [[0.0] * 3, [1.0] * 3]


def test_gradients_come_along(world: World) -> None:
    """A gathered model has those of its rank, and so has a synced one."""
    world.execute("model = torch.nn.Linear(2, 1); (model(torch.ones(2)) * (rank + 1)).backward()")
    assert [each.bias.grad.item() for each in world.gather("model")] == [1.0, 2.0]
    world.sync(["model"], source=1, ranks=[0])
    assert world.gather("model.bias.grad.item()") == [2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "ranks", "said"),
    [
        ("nope", None, "^no rank has `nope`.$"),
        ("nope", [1], "^rank 1 has no `nope`.$"),
        ("only", None, "^rank 1 has no `only`; rank 0 has it: `-r 0`.$"),
        ("only", [1], "^rank 1 has no `only`; rank 0 has it: `-r 0`.$"),
        ("1 // rank", None, "^`1 // rank` on rank 0: ZeroDivisionError: .*.$"),
    ],
)
def test_who_has_what(world: World, name: str, ranks: list[int] | None, said: str) -> None:
    """One line; all ranks go on."""
    with pytest.raises(UsageError, match=said):
        world.gather(name, ranks)
    assert world.gather("rank") == [0, 1]


def test_no_expression() -> None:
    """It is told before any worker is asked."""
    with pytest.raises(UsageError, match="`x = 1` is no expression"):
        check_expressions(["y", "x = 1"])
