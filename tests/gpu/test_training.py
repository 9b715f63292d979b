"""Training on the GPU goes on after a failure.

With gloo the same objects go on as if nothing had been, bit by bit; the tests are those of
`tests.faults.test_training`.  With nccl the ranks that waited have run ahead of the
collective that was aborted, and their optimizer may have taken a step with what it left: the
weights are taken from who knows them, or from a copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdist.world.states import State
from nbdist.world.world import World
from tests.faults import test_training as faults
from tests.gpu import lab
from tests.gpu.conftest import Figure

pytestmark = [pytest.mark.shared_world, pytest.mark.timeout(75)]

MODELS = ("DDP", "FSDP2") if lab.DEVICE == "cpu" else ("DDP",)
"""What goes on bit by bit with gloo: FSDP2 wants nccl for CUDA devices."""

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


@pytest.fixture(scope="module")
def started(kind: str) -> Iterator[World]:
    """Two workers: a sum of two is the same in any order."""
    with lab.make_world(kind, 2) as world:
        yield world


@pytest.fixture
def world(world: World) -> World:
    world.execute(faults.TRAINING, setup=True)
    return world


def can_go_on(world: World, model: str, breaks: str) -> None:
    """Skip what this torch cannot: nbdist says so at the start."""
    broken_off = "in the middle" in breaks
    version = world.gather("tuple(map(int, torch.__version__.split('.')[:2]))")[0]
    if model == "FSDP2" and broken_off and version < (2, 13):
        pytest.skip("before torch 2.13 an FSDP2 model has to be made anew after that")


@pytest.mark.parametrize("breaks", faults.BREAKS)
@pytest.mark.parametrize("model", MODELS)
def test_weights_with_gloo(world: World, kind: str, model: str, breaks: str) -> None:
    """Those of an unbroken run: five steps, a failure, five more; the same objects all the time."""
    if kind != "gloo":
        pytest.skip("for gloo")
    can_go_on(world, model, breaks)
    faults.test_weights_are_those_of_an_unbroken_run(world, model, breaks)


@pytest.mark.parametrize("breaks", faults.BREAKS)
@pytest.mark.parametrize("model", ["DDP", "FSDP2"])
def test_weights_with_nccl(
    world: World, kind: str, figure: Figure, model: str, breaks: str
) -> None:
    """From a copy that each rank made before, the same objects go on as an unbroken run does."""
    if kind != "nccl":
        pytest.skip("for nccl")
    can_go_on(world, model, breaks)
    world.execute(f"hook = None; net, optimizer = make({model!r}); train(net, optimizer, range(5))")
    world.execute(KEEP)
    lab.ends(world, faults.BREAKS[breaks])
    assert world.state is State.READY
    world.execute("if hook is not None: hook.remove()")
    whole = "all(bool((p == kept).all()) for p, kept in zip(net.parameters(), saved))"
    if model == "DDP":  # parts of FSDP2's are tensors that compare in a collective
        intact = sum(world.gather(whole))
        figure(f"{kind}, {model} {breaks}: ranks with the weights as before", intact, "of 2")
    world.execute(
        f"{BACK}\ntrain(net, optimizer, range(5, 10))\n"
        f"unbroken = make({model!r}); train(*unbroken, range(10))"
    )
    first, second = world.gather("weights(net)")
    assert first.equal(second)
    assert first.equal(world.gather("weights(unbroken[0])")[0])


@pytest.mark.parametrize("dying", [0, 1])
def test_a_replaced_rank_takes_over_the_weights(world: World, kind: str, dying: int) -> None:
    """After a death the survivor's model and optimizer go to the new rank, over the group."""
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


def test_another_number_of_ranks(world: World) -> None:
    """A DDP model goes on among three, and among two again."""
    world.execute("net, optimizer = make('DDP'); train(net, optimizer, range(3))")
    for size in (3, 2):
        world.scale(size)
        world.sync(["net", "optimizer"])
        world.execute("t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size")
        world.execute("train(net, optimizer, range(3))")
        first, *others = world.gather("weights(net)")
        assert len(others) == size - 1
        assert all(first.equal(other) for other in others)
