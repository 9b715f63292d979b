"""Tests of `nbdist.worker.received`: models and tensors of several ranks, gathered."""

from __future__ import annotations

import pytest
import torch

from nbdist.errors import UsageError, WorkerError
from nbdist.values.shared_memory import Segment, to_end
from nbdist.worker import received
from nbdist.worker.received import Homeward, KeptValues
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)

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


def test_what_it_leaves_alone() -> None:
    """All that means the same in the notebook is pickled as ever."""
    assert Homeward().reduce(torch.nn.Linear(1, 1)) is NotImplemented  # type: ignore[comparison-overlap]


def test_a_model_of_ddp(world: World) -> None:
    """Its module comes, in whatever it is."""
    for model in (each["model"] for each in world.gather("replicated")):
        assert type(model) is torch.nn.Linear
        assert model(torch.ones(2)).shape == (3,)


def test_a_tensor_comes_whole(world: World) -> None:
    """From all ranks that it is spread over, which may be one."""
    assert [each.tolist() for each in world.gather("rows")] == [
        torch.arange(10.0).view(5, 2).tolist()
    ] * 2
    assert world.gather("alone", rank=1).tolist() == [1.0, 1.0]
    for ranks in ([0], [1]):
        with pytest.raises(UsageError, match=r"`rows` is spread over ranks 0-1 .*full_tensor\(\)"):
            world.gather("rows", ranks=ranks)


def test_a_model_of_fsdp(world: World) -> None:
    """It comes as it was before, whole, with its gradients, its optimizer, and what they share."""
    model, plain, optimizer = world.gather(["sharded", "plain", "optimizer"], rank=None)
    for each, values, stepped in zip(model, plain, optimizer, strict=True):
        assert [type(layer) for layer in each] == [torch.nn.Linear] * 2
        assert all(map(torch.equal, each.parameters(), values))
        assert each(torch.ones(1, 4)).shape == (1, 3)
        for parameter in each.parameters():
            assert type(parameter) is torch.nn.Parameter
            assert parameter.grad.shape == parameter.shape
            assert stepped.state[parameter]["momentum_buffer"].equal(parameter.grad)


def test_ranks_that_have_different_ones(world: World) -> None:
    """None of them waits for the others."""
    world.execute("differing = rows if rank else rows.to(torch.int)")
    with pytest.raises(UsageError, match=r"`differing` is spread .* not have the same of it there"):
        world.gather("differing")
    world.execute("differing = rows if rank else 1")
    with pytest.raises(UsageError, match=r"rank 0 does not have the same"):
        world.gather("differing")


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("mesh", "a mesh is of the ranks' groups: gather its `mesh`"),
        ("dist.group.WORLD", "a process group connects the ranks"),
    ],
)
def test_what_stays(world: World, expression: str, said: str) -> None:
    """What connects the ranks has no meaning in the notebook, which is said."""
    with pytest.raises(UsageError, match=said):
        world.gather(expression)


def test_what_a_function_returns(world: World) -> None:
    """A DDP model comes as its module; nobody has asked all ranks to put a DTensor together."""
    assert (
        type(world.run(lambda: __import__("__main__").replicated).rank(0)["model"])
        is torch.nn.Linear
    )
    with pytest.raises(WorkerError, match=r"run `whole = x.full_tensor\(\)` of it on all of them"):
        world.run(lambda: __import__("__main__").rows)


def segment(size: int) -> Segment:
    return to_end(Segment.filling([b"x" * size]))


def test_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many, and so many bytes, but for the newest one; memory of others is released."""
    monkeypatch.setattr(received, "MOST_BYTES", 1000)
    kept = KeptValues()
    for number in range(received.MOST + 2):
        kept.keep(str(number), segment(10))
    assert repr(kept) == "<KeptValues 16, 160 B>"
    assert kept.find("1") == received.REPLACED
    kept.keep("big", segment(2000))
    assert repr(kept) == "<KeptValues 1, 1.95 KiB>"
    assert kept.find("17") == received.REPLACED
    kept.keep("none", "cannot be sent")
    assert isinstance(kept.find("big"), Segment)
    assert kept.find("none") == "cannot be sent"
    kept.let_go("big")
    assert repr(kept) == "<KeptValues 0, 0 B>"


def test_what_was_cleaned_says_so() -> None:
    """And why there is none of a task that nobody knows."""
    kept = KeptValues()
    kept.keep("a", segment(10))
    kept.keep("b", "cannot be sent")
    kept.clean()
    assert (kept.find("a"), kept.find("b")) == (received.CLEANED, "cannot be sent")
    assert kept.find("c") == received.REPLACED
