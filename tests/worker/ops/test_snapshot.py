"""Tests of `nbdist.worker.ops.snapshot`: a rank's variables in a file, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbdist.errors import UsageError
from nbdist.world.world import World
from tests.faults.test_training import TRAINING

pytestmark = [pytest.mark.shared_world(2), pytest.mark.usefixtures("empty_snapshot_folder")]


def entries(folder: Path) -> list[str]:
    """What lies in a folder; complete snapshots have no dot in front."""
    return sorted(each.name for each in folder.iterdir())


# Its import takes a second in every new worker.
WITHOUT_FSDP = TRAINING.replace("from torch.distributed.fsdp import fully_shard", "")


def test_training_goes_on_bit_by_bit(world: World) -> None:
    """Five steps, a snapshot, five more; new workers do these from the snapshot alike.

    On three ranks, where the last bits of a sum depend on DDP's buckets.
    """
    world.restart(3)
    world.execute(f"{WITHOUT_FSDP}\nnet, optimizer = make('DDP')\ntrain(net, optimizer, range(5))")
    world.snapshot(name="five")
    world.execute("train(net, optimizer, range(5, 10))")
    went_on = world.gather("weights(net)")
    world.restart()
    world.restore(name="five")
    world.execute("train(net, optimizer, range(5, 7))")
    world.snapshot(name="seven")
    world.restore(name="seven")
    world.execute("train(net, optimizer, range(7, 10))")
    for restored, expected in zip(world.gather("weights(net)"), went_on, strict=True):
        assert restored.equal(expected)


def test_objects_stay_shared(world: World) -> None:
    """A rank's variables are one graph: what shared an object does so again, views too."""
    world.execute(
        "net = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(net.parameters(), lr=1.0)\n"
        "net(torch.ones(2)).sum().backward()\n"
        "whole = torch.arange(6.0); part = whole[2:4]; both = [whole, part]"
    )
    world.snapshot(["net", "optimizer", "whole", "part", "both"], name="a")
    world.execute("del net, optimizer, whole, part, both")
    assert world.restore(name="a").names == ("both", "net", "optimizer", "part", "whole")
    world.execute(
        "assert optimizer.param_groups[0]['params'][0] is net.weight\n"
        "assert net.weight.grad.tolist() == [[1, 1], [1, 1]]\n"
        "part.fill_(9)\n"
        "assert whole[3] == 9 and both[0] is whole and both[1] is part"
    )


def test_random_numbers_go_on(world: World) -> None:
    """Python, numpy and torch go on with the numbers that would have come."""
    draw = (
        "import random, numpy\nx = 1\n"
        "drawn = random.random(), numpy.random.rand(), torch.rand(1).item()"
    )
    world.execute(f"{draw}\ntorch.manual_seed(rank)")
    world.snapshot(["x"], name="a")
    world.execute(draw)
    first = world.gather("drawn")
    world.restart()
    world.restore()
    world.execute(draw)
    assert world.gather("drawn") == first
    world.restore(name="a", from_rank=0)
    world.execute(draw)
    assert world.gather("drawn") != first


def test_cell_functions_come_with_what_they_use(world: World) -> None:
    """Functions and classes of cells are rebuilt in the workers' namespace, with their names."""
    world.execute(
        "import math as m\nscale = 3\n"
        "def times(x): return m.floor(x) * scale\n"
        "class Net:\n    def run(self): return times(rank + 0.5)\nnet = Net()"
    )
    world.snapshot(["net"], name="a")
    world.restart()
    assert world.restore().names == ("net",)
    assert world.gather("net.run()") == [0, 3]
    world.execute("scale = 5")
    assert world.gather("net.run()") == [0, 5]


def test_no_room(world: World, tmp_path: Path) -> None:
    """Where a rank cannot write, one line says so, and earlier snapshots are as they were."""
    world.execute("x = 1")
    world.snapshot(["x"], name="a")
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, ({}, resource.RLIM_INFINITY))"
    world.execute(f"import resource\nx = torch.zeros(1 << 20)\n{limit.format(1 << 20)}", ranks=[1])
    with pytest.raises(UsageError, match=r"No snapshot was written: rank 1: File too large\.$"):
        world.snapshot(["x"], name="a")
    world.execute(limit.format("resource.RLIM_INFINITY"), ranks=[1])
    assert len(entries(tmp_path / "a")) == 2
    world.restore(name="a")
    assert world.gather("x") == [1, 1]
