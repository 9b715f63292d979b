"""Training on the GPU goes on after a failure.

With gloo the same objects go on bit by bit (`tests.faults.test_training`).  With nccl the ranks
that waited have run ahead of the collective that was aborted, and their optimizer may have taken
a step with its remains: the weights are taken from a rank that has them, or from a copy.
"""

from __future__ import annotations

import time

import pytest

from nbdist.world.states import WorldState
from nbdist.world.world import World
from tests.bench.watch import comparison, watched
from tests.faults import test_training as faults
from tests.gpu import lab
from tests.gpu.conftest import Figure

# Two workers: a sum of two is the same in any order.
pytestmark = [lab.NCCL, pytest.mark.shared_world(2), pytest.mark.timeout(75)]

KEEP = """
saved = [p.detach().clone() for p in net.parameters()]
state = {name: [t.clone() for t in slots.values()] for name, slots in optimizer.state.items()}
"""

BACK = """
with torch.no_grad():
    for p, kept in zip(net.parameters(), saved):
        p.copy_(kept)
    for p, slots in optimizer.state.items():
        for t, kept in zip(slots.values(), state[p]):
            t.copy_(kept)
"""


@pytest.fixture
def world(world: World) -> World:
    world.execute(faults.TRAINING, setup=True)
    return world


def can_go_on(model: str, breaks: str) -> None:
    """Skip the test if this version of torch cannot go on, as nbdist says at the start."""
    broken_off = "in the middle" in breaks
    if model == "FSDP2" and broken_off and lab.TORCH < (2, 13):
        pytest.skip("before torch 2.13 an FSDP2 model has to be made anew after that")


@pytest.mark.parametrize("breaks", faults.BREAKS)
@pytest.mark.parametrize("model", ["DDP", "FSDP2"])
def test_training_goes_on_from_a_copy(
    world: World, figure: Figure, model: str, breaks: str
) -> None:
    """From a copy that each rank made before, the same objects go on as an unbroken run does."""
    can_go_on(model, breaks)
    world.execute(f"hook = None; net, optimizer = make({model!r}); train(net, optimizer, range(5))")
    world.execute(KEEP)
    lab.ends(world, faults.BREAKS[breaks])
    assert world.state is WorldState.READY
    world.execute("if hook is not None: hook.remove()")
    whole = "all(bool((p == kept).all()) for p, kept in zip(net.parameters(), saved))"
    if model == "DDP":  # tensors of FSDP2 compare in a collective
        intact = sum(world.gather(whole))
        figure(f"{model} {breaks}: ranks with the weights as before", intact, "of 2")
    world.execute(
        f"{BACK}\ntrain(net, optimizer, range(5, 10))\n"
        f"unbroken = make({model!r}); train(*unbroken, range(10))"
    )
    first, second = world.gather("weights(net)")
    assert first.equal(second)
    assert first.equal(world.gather("weights(unbroken[0])")[0])


@pytest.mark.parametrize("dying", [0, 1])
def test_a_replaced_rank_takes_over_the_weights(world: World, dying: int) -> None:
    """After a death the survivor's model and optimizer go to the new rank, and training goes on."""
    world.execute("net, optimizer = make('DDP'); train(net, optimizer, range(5))")
    world.execute(KEEP)
    lab.ends(world, f"import os\nif rank == {dying}: os._exit(1)\ntrain(net, optimizer, [5])")
    survivor = 1 - dying
    world.execute(f"if rank == {survivor}:\n    " + BACK.strip().replace("\n", "\n    "))
    (before,) = world.gather("weights(net)", ranks=[survivor])
    world.sync(["net", "optimizer"], source=survivor, ranks=[dying])
    assert all(each.equal(before) for each in world.gather("weights(net)"))
    assert world.gather("str(next(net.parameters()).device)") == world.gather("str(device)")
    world.execute("train(net, optimizer, range(5, 8))")
    first, second = world.gather("weights(net)")
    assert first.equal(second)
    assert not first.equal(before)


def test_a_model_goes_on_with_other_numbers_of_ranks(world: World) -> None:
    """A DDP model goes on with three ranks, and with two ranks again."""
    world.execute("net, optimizer = make('DDP'); train(net, optimizer, range(3))")
    for size in (3, 2):
        world.scale(size)
        world.sync(["net", "optimizer"])
        world.execute(lab.SUM)
        world.execute("train(net, optimizer, range(3))")
        first, *others = world.gather("weights(net)")
        assert len(others) == size - 1
        assert all(first.equal(other) for other in others)


def test_watch_names_a_part_changed_on_the_gpu(world: World, figure: Figure) -> None:
    """`--watch` names the part that a rank changed on its GPU, at the next comparison."""
    world.execute("net, optimizer = make('DDP')")
    change = (
        "if rank == 1 and step == 7:\n        with torch.no_grad(): net.module[0].weight[0, 0] += 1"
    )
    began = time.monotonic()
    found = watched(
        world,
        f"for step in range(1, 21):\n    {change}\n    train(net, optimizer, [step])",
        ["net", "optimizer"],
        "gpu",
    )
    figure("20 watched steps", time.monotonic() - began, "s")
    assert found.step == 10
    assert found.head() == "watch: after step 10 rank 1 differs from rank 0"
    assert next(comparison(found, "net"))[0] == "module.0.weight"


def test_tracked_tensors_may_be_on_the_gpu(world: World, figure: Figure) -> None:
    """Tracked numbers that are on the GPU arrive, each at its step."""
    began = time.monotonic()
    world.execute("for step in range(100): track(loss=torch.tensor(step + rank / 2))")
    figure("100 calls of track with a tensor", 1e3 * (time.monotonic() - began), "ms")
    table = world.tracked("loss")
    assert table.iloc[-1].tolist() == [99.0, 99.0, 99.5]
    assert len(table) == 100
