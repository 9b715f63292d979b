"""Training goes on after a failure as if it had not been: the same weights, bit by bit."""

from __future__ import annotations

import pytest

from nbdist.agent.fork_server import IMPORTED_WHEN_IDLE
from nbdist.errors import NbdistError
from nbdist.world.states import State
from nbdist.world.world import World
from tests.faults.actions import Holdings

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
    """Five steps, a failure, five more; the same objects all the time."""
    world.execute(f"hook = None; net, optimizer = make({kind!r}); train(net, optimizer, range(5))")
    with pytest.raises(NbdistError):
        world.execute(BREAKS[breaks])
    assert world.state is State.READY
    world.execute(
        "if hook is not None: hook.remove()\n"
        "train(net, optimizer, range(5, 10))\n"
        f"unbroken = make({kind!r}); train(*unbroken, range(10))"
    )
    first, second = world.gather("weights(net)")
    assert first.equal(second)
    assert first.equal(world.gather("weights(unbroken[0])")[0])


def test_a_replaced_rank_takes_over_the_weights(world: World) -> None:
    """After a death survivors hold the model; the new rank gets it over the group."""
    world.execute("net, optimizer = make('DDP'); train(net, optimizer, range(5))")
    with pytest.raises(NbdistError, match="Rank 0 was restarted"):
        world.execute("import os\nif rank == 0: os._exit(1)\ntrain(net, optimizer, [5])")
    (before,) = world.gather("weights(net)", ranks=[1])
    world.execute(TRAINING, ranks=[0])
    world.execute(
        "state = [net.module.state_dict()] if rank == 1 else [None]\n"
        "dist.broadcast_object_list(state, src=1)\n"
        "net, optimizer = make('DDP'); net.module.load_state_dict(state[0])"
    )
    assert all(each.equal(before) for each in world.gather("weights(net)"))
    world.execute("train(net, optimizer, range(5, 8))")
    first, second = world.gather("weights(net)")
    assert first.equal(second)
    assert not first.equal(before)


def test_what_a_first_step_imports_is_there(world: World, idle_imports: None) -> None:
    """In a rank that is new; what the fork server has after its imports is what it has for good."""
    before = Holdings.now([*world.pids.values()])
    world.replace([0])
    last = f"{IMPORTED_WHEN_IDLE[-1]!r} in __import__('sys').modules"
    assert world.gather(last, ranks=[0]) == [True]
    assert not Holdings.now([*world.pids.values()]).has_grown_since(before)
    world.execute(TRAINING, ranks=[0])
