"""Training goes on after a failure as if nothing had failed: the same weights, bit by bit."""

from __future__ import annotations

import pytest

from nbdist.errors import NbdistError
from nbdist.world.states import WorldState
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)

TRAINING = """
from torch.distributed.fsdp import fully_shard

def make(kind):
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    if kind == "DDP":
        net = torch.nn.parallel.DistributedDataParallel(net)
    else:
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    return net, torch.optim.Adam(net.parameters(), lr=0.01)

def train(net, optimizer, steps):
    for step in steps:
        torch.manual_seed(1000 * step + rank)
        data = torch.randn(16, 8)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(data), data.sum(1, keepdim=True)).backward()
        optimizer.step()

def weights(net):
    # FSDP keeps a part of each parameter on each rank.
    found = [getattr(p, "full_tensor", lambda: p)() for p in net.parameters()]
    return torch.cat([p.detach().flatten() for p in found])
"""

SPOILS = (
    "if rank == 1:\n    def bad(*_): raise ValueError('bad')\n    {}\ntrain(net, optimizer, [5])"
)

BREAKS = {
    "raises in the middle of a backward": SPOILS.format(
        "def spoil(module, inputs, output): output.register_hook(bad)\n"
        "    hook = getattr(net, 'module', net)[1].register_forward_hook(spoil)"
    ),
    "raises in the middle of a forward": SPOILS.format(
        "hook = getattr(net, 'module', net)[2].register_forward_pre_hook(bad)"
    ),
    "skips": "if rank != 1: train(net, optimizer, [5])",
}


@pytest.fixture(scope="module")
def started(started: World) -> World:
    started.execute(TRAINING)
    return started


@pytest.mark.parametrize(
    ("kind", "breaks"),
    [
        ("DDP", "raises in the middle of a backward"),
        ("DDP", "skips"),
        ("FSDP2", "raises in the middle of a forward"),
        ("FSDP2", "raises in the middle of a backward"),
    ],
)
def test_weights_are_those_of_an_unbroken_run(world: World, kind: str, breaks: str) -> None:
    """Ten steps with a failure after the fifth give the same weights as ten steps without it."""
    world.execute(f"hook = None; net, optimizer = make({kind!r}); train(net, optimizer, range(5))")
    with pytest.raises(NbdistError):
        world.execute(BREAKS[breaks])
    assert world.state is WorldState.READY
    world.execute(
        "if hook is not None: hook.remove()\n"
        "train(net, optimizer, range(5, 10))\n"
        f"unbroken = make({kind!r}); train(*unbroken, range(10))"
    )
    first, second = world.gather("weights(net)")
    assert first.equal(second)
    assert first.equal(world.gather("weights(unbroken[0])")[0])
