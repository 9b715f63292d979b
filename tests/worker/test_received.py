"""Tests of `nbdist.worker.received`: what was changed since it came, and what goes home."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nbdist.errors import UsageError, WorkerError
from nbdist.values.payload import open_payload, pack_frames
from nbdist.values.pickling import pickle, unpickle
from nbdist.values.shared_memory import Segment, open_segment, to_end
from nbdist.worker import received
from nbdist.worker.received import Homeward, KeptValues, Received, are_own, edges
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)


class Box:
    """A user's own."""

    def __init__(self, value: Any) -> None:
        self.value = value


def made() -> dict[str, Any]:
    model = torch.nn.Linear(3, 3)
    return {
        "model": model,
        "adam": torch.optim.Adam(model.parameters()),
        "tensor": torch.zeros(1000),
        "array": np.zeros(1000),
        "rows": [1, [2, "three"]],
        "table": {"a": 1},
        "box": Box([1]),
        "n": 3,
        "f": made,
        "lines": (line for line in "ab"),
    }


def step(names: dict[str, Any]) -> None:
    names["model"](torch.ones(3)).sum().backward()
    names["adam"].step()


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], set[str]]] = [
    (lambda names: None, set()),
    (step, {"model", "adam"}),
    (lambda names: names["model"].eval(), {"model"}),
    (lambda names: names["model"].weight.data.add_(1), {"model", "adam"}),
    (lambda names: names["tensor"].numpy().__setitem__(5, 1), {"tensor"}),
    (lambda names: names["array"].__setitem__(5, 1), {"array"}),
    (lambda names: names["rows"][1].append(4), {"rows"}),
    (lambda names: names["table"].update(b=2), {"table"}),
    (lambda names: setattr(names["box"], "value", 2), {"box"}),
    (lambda names: names.update(table={"a": 1}, n=4), {"table"}),
    (lambda names: names.update(rows=5), {"rows"}),
    (lambda names: names.pop("rows"), set()),
    (lambda names: next(names["lines"]), set()),
    (lambda names: (names["table"].update(a=2), names["table"].update(a=1)), set()),
]


@pytest.mark.parametrize(("change", "found"), CHANGES)
def test_what_has_been_changed(change: Callable[[dict[str, Any]], Any], found: set[str]) -> None:
    """Whatever it is; not what cannot be looked at, nor what looks as it did."""
    names = made()
    known = Received(names)
    known.note(names)
    change(names)
    assert known.changed([*made(), "unknown"]) == found
    known.note(names)
    assert known.changed(names) == set()
    assert "array" in known._known


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda x, y: x.sum() + y.sum(), set()),
        (lambda x, y: x.view(-1)[300_000:300_001].fill_(1.0), {"x"}),
        (lambda x, y: x.view(-1)[-1:].fill_(1.0), {"x"}),
        (lambda x, y: y.__setitem__(0, 1), {"y"}),
        (lambda x, y: y.__setitem__(300_000, 1), {"y"}),
        (lambda x, y: setattr(x, "data", x.data.clone()), {"x"}),
    ],
)
def test_big_values(
    change: Callable[[Any, Any], Any], found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not read when they come; one element that is written to is noticed all the same."""
    monkeypatch.setattr(received, "READ_MOST", 1 << 20)
    read: list[int] = []
    digest = received.digest_of
    monkeypatch.setattr(
        received, "digest_of", lambda view: (read.append(memoryview(view).nbytes), digest(view))[1]
    )
    values = {"x": torch.zeros(1000, 1000), "y": np.zeros(1_000_000)}
    payload, segment = pack_frames(pickle(values, {}).frames)
    assert segment is not None
    with segment:
        names = unpickle(open_payload(payload))
        known = Received(names)
        known.note(names)
        assert sum(read) < 1 << 18
        change(names["x"], names["y"])
        assert known.changed(names) == found


def test_big_values_of_no_mapping() -> None:
    """Of memory of this process's own there is nothing to see: it is read."""
    names = {"x": torch.zeros(20_000_000)}
    known = Received(names)
    known.note(names)
    assert known.changed(names) == set()
    names["x"][7] = 1
    assert known.changed(names) == {"x"}


PAGE = mmap.PAGESIZE


def test_what_has_been_written_to() -> None:
    """The pages of a segment are this process's own once written to, not when read."""
    with to_end(Segment.filling([bytes(100), bytes(20 * PAGE), bytes(100)])) as segment:
        _, frame, _ = open_segment(segment.ref)
        array = np.frombuffer(frame, np.uint8)
        address = array.ctypes.data
        assert not are_own(address, array.nbytes)
        assert not array.any()
        assert not are_own(address, array.nbytes), "they have been read"
        array[10 * PAGE] = 1
        assert are_own(address, array.nbytes)
        assert not are_own(address, 9 * PAGE)
        own = np.ones(10 * PAGE, np.uint8)
        assert are_own(own.ctypes.data, own.nbytes)


def test_what_lies_in_no_whole_page() -> None:
    """Is for others to look at; small memory is all of that."""
    memory = memoryview(bytes(range(256)) * (3 * PAGE // 256))
    first, last = edges(memory, PAGE + 100)
    assert (first, last) == (memory[: PAGE - 100], memory[-100:])
    assert edges(memory[: 2 * PAGE], PAGE) == (b"", b"")
    first, last = edges(memory[:50], PAGE + 100)
    assert bytes(first) + bytes(last) == memory[:50]
    assert not are_own(PAGE + 100, 50)


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
