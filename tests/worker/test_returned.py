"""Tests of `nbdist.worker.returned`: values sent to the notebook, and last values that are kept."""

from __future__ import annotations

import pytest
import torch

from nbdist.errors import UsageError, WorkerError
from nbdist.values.payload import Segment, run_to_end
from nbdist.worker import returned
from nbdist.worker.returned import KeptValues, ReturnReducer
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)


# --- models and tensors of several ranks, gathered --------------------------------------


MADE = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
replicated = {"model": DistributedDataParallel(torch.nn.Linear(2, 3))}
mesh = init_device_mesh("cpu", (2,))
rows = distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [Shard(0)])
own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
alone = distribute_tensor(torch.full((2,), float(rank)), own, [Shard(0)])
torch.manual_seed(0)
sharded = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))
plain = [p.detach().clone() for p in sharded.parameters()]
fully_shard(sharded[0]); fully_shard(sharded)
optimizer = torch.optim.SGD(sharded.parameters(), lr=0.0, momentum=0.9)
sharded(torch.ones(1, 4)).sum().backward(); optimizer.step()
"""


@pytest.fixture(scope="module")
def started(started: World) -> World:
    started.execute(MADE)
    return started


def test_a_dtensor_is_gathered_whole(world: World) -> None:
    """A DTensor comes whole from all its ranks; ranks that are missing or differ are an error."""
    rows = torch.arange(10.0).view(5, 2).tolist()
    assert [each.tolist() for each in world.gather("rows")] == [rows] * 2
    assert world.gather("alone", rank=1).tolist() == [1.0, 1.0]
    for ranks in ([0], [1]):
        with pytest.raises(UsageError, match=r"`rows` is spread over ranks 0-1 .*full_tensor\(\)"):
            world.gather("rows", ranks=ranks)
    for other, said in (
        ("rows.to(torch.int)", r"`differing` is spread .* not have the same of it there"),
        ("1", r"rank 0 does not have the same"),
    ):
        world.execute(f"differing = rows if rank else {other}")
        with pytest.raises(UsageError, match=said):
            world.gather("differing")


def test_meshes_and_groups_are_not_gathered(world: World) -> None:
    """A mesh or a process group is refused with the reason; usual values are pickled as usual."""
    with pytest.raises(UsageError, match="a mesh is of the ranks' groups: gather its `mesh`"):
        world.gather("mesh")
    with pytest.raises(UsageError, match="a process group connects the ranks"):
        world.gather("dist.group.WORLD")
    assert ReturnReducer().reduce(torch.nn.Linear(1, 1)) is NotImplemented  # type: ignore[comparison-overlap]


def test_an_fsdp_model_comes_as_before_sharding(world: World) -> None:
    """A model of FSDP2 comes whole, as before `fully_shard`, with gradients and optimizer."""
    model, plain, optimizer = world.gather(["sharded", "plain", "optimizer"], rank=None)
    for each, values, stepped in zip(model, plain, optimizer, strict=True):
        assert [type(layer) for layer in each] == [torch.nn.Linear] * 2
        assert all(map(torch.equal, each.parameters(), values))
        assert each(torch.ones(1, 4)).shape == (1, 3)
        for parameter in each.parameters():
            assert type(parameter) is torch.nn.Parameter
            assert parameter.grad.shape == parameter.shape
            assert stepped.state[parameter]["momentum_buffer"].equal(parameter.grad)


def test_a_ddp_model_comes_as_its_module(world: World) -> None:
    """A model of DDP comes as the module in it, also in a dict.

    If a function of `World.run` returns a DTensor, the DTensor is refused with a remedy.
    """
    models = world.run(lambda: __import__("__main__").replicated)
    for model in (each["model"] for each in [*world.gather("replicated"), *models]):
        assert type(model) is torch.nn.Linear
        assert model(torch.ones(2)).shape == (3,)
    with pytest.raises(WorkerError, match=r"run `whole = x.full_tensor\(\)` of it on all of them"):
        world.run(lambda: __import__("__main__").rows)


def segment(size: int) -> Segment:
    return run_to_end(Segment.filling([b"x" * size]))


def test_the_newest_values_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest values are kept, up to a number and a size; of others the reason is kept."""
    monkeypatch.setattr(returned, "MAX_KEPT_BYTES", 1000)
    kept, names = KeptValues(), [*map(str, range(returned.MAX_KEPT_RESULTS + 2))]
    for name in names:
        kept.keep(name, segment(10))
    there = [name for name in names if isinstance(kept.find(name), Segment)]
    assert there == names[2:]
    assert kept.find("1") == returned.REPLACED
    kept.keep("big", segment(2000))
    assert {kept.find(name) for name in names} == {returned.REPLACED}
    kept.keep("none", "cannot be sent")
    assert isinstance(kept.find("big"), Segment)
    assert kept.find("none") == "cannot be sent"
    kept.clean()
    assert (kept.find("big"), kept.find("none")) == (returned.CLEANED, "cannot be sent")
    assert kept.find("c") == returned.REPLACED
    kept.keep("a", segment(10))
    kept.release_values("a")
    assert kept.find("a") == returned.REPLACED
