"""Tests of `nbdist.worker.ops.values`: values that are gathered, pushed, scattered and synced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbdist.errors import UsageError, WorkerError
from nbdist.notebook.shipping import plan
from nbdist.notebook.shipping import push as push_of
from nbdist.output.events import Done
from nbdist.values.payload import INLINE_LIMIT, Payload, open_payload, pack_frames
from nbdist.values.pickling import pickle, unpickle
from nbdist.wire.ops import Brought, Inspected, Replaced
from nbdist.wire.work import Task
from nbdist.worker.namespace import Context, Namespace
from nbdist.worker.ops.values import (
    bind_pushed,
    bind_scattered,
    gather,
    inspect,
    push,
    scatter,
)
from nbdist.world.name_table import NameTable
from nbdist.world.world import World
from tests.bench.watch import watched

pytestmark = pytest.mark.shared_world(3)


@pytest.fixture
def context() -> Context:
    x = [1]
    names: dict[str, Any] = {"x": x, "both": [x], "lock": {"of": threading.Lock()}}
    return Context(SimpleNamespace(user_ns=names), Namespace(names), task_id="t")


def test_gathered_values_keep_shared_parts(context: Context):
    """Gathered values keep their shared parts; a big value's segment stays until its release."""
    brought = gather(context, ("x", "both", "len(x)"))
    assert brought.packed is not None
    x, both, length = unpickle(open_payload(brought.packed))
    assert (x, length) == ([1], 1)
    assert both[0] is x
    context.names["big"] = bytes(INLINE_LIMIT)
    brought = gather(context, ("big",))
    assert brought.packed is not None
    assert unpickle(open_payload(brought.packed)) == [bytes(INLINE_LIMIT)]
    context.namespace.release_values("t")
    with pytest.raises(OSError, match="shared memory"):
        open_payload(brought.packed)


def test_a_value_that_cannot_be_gathered_is_reported(context: Context):
    """A missing name, a failing expression or a value that cannot be sent is only reported."""
    attribute = "AttributeError: 'list' object has no attribute 'y'"
    lock = "`lock['of']` (thread lock) cannot be sent to the notebook: a lock works within one"
    for expression, said in (
        ("nope", Brought("nope", missing="nope")),
        ("x + [nope]", Brought("x + [nope]", missing="nope")),
        ("x.y", Brought("x.y", problem=attribute)),
        ("lock", Brought("lock", problem=f"{lock} process")),
    ):
        assert gather(context, ("x", expression)) == said


class Sender:
    """A notebook that has sent objects to one rank."""

    def __init__(self) -> None:
        self.table = NameTable({})

    def packed(self, *pushed: str, **values: Any) -> Payload:
        """Return the payload for a cell that uses `values`, or for a push of variables."""
        self.table.namespace.update(values)
        self.table.record_assigned(values)
        cell = ", ".join(values)
        found = push_of(pushed, self.table, (0,)) if pushed else plan(cell, self.table, (0,))
        shipment = found.shipment()
        self.table.record_finished(0, Done("ok", 0.0), shipment.parcels[0])
        (packet,) = shipment.packets
        return pack_frames(packet.message.frames)[0]


def test_received_values_are_bound_by_a_second_op():
    """`push` and `scatter` only bring values, which a second op binds to their names.

    A pushed value changes an object in place; a scattered part belongs to the rank.
    """
    names: dict[str, Any] = {"x": "as it was"}
    namespace = Namespace(names)
    namespace.add_ready({"rank": 1})
    names["rank"] = 0
    context, sender = Context(SimpleNamespace(user_ns=names), namespace), Sender()
    packed = sender.packed("x", "y", x=1, y=[2])
    push(context, {0: Payload((b"not for this one",)), 1: packed})
    assert names == {"rank": 0, "x": "as it was"}
    assert bind_pushed(context) == {}
    assert names == {"rank": 0, "x": 1, "y": [2]}
    y = names["y"]
    y.append("theirs")
    push(context, {1: sender.packed("y")})
    bind_pushed(context)
    assert names["y"] is y
    assert y == [2], "the push has changed it in place"
    assert not namespace.counterparts.is_changed("y")
    mine, _ = pack_frames(pickle([3, 4], {}).frames)
    scatter(context, "x", {0: Payload((b"not for this one",)), 1: mine})
    assert (names["x"], context.bound) == (1, set())
    bind_scattered(context)
    assert (names["x"], context.bound) == ([3, 4], {"x"})


def test_inspect_reports_what_a_rank_has_changed():
    """`inspect` reports changed objects that a cell or a push has sent, and rebound variables."""
    names: dict[str, Any] = {}
    context, sender = Context(SimpleNamespace(user_ns=names), Namespace(names)), Sender()
    context.namespace.add_ready({"rank": 0})
    packed = sender.packed(x=[1], y=[2])
    context.namespace.receive(Task("t", (0,), names={0: packed}), 0)
    objects = dict.fromkeys(entry.key for entry in sender.table.objects.links.entries())
    assert inspect(context, objects, ("x", "never")) == Inspected(
        {}, {"x": Replaced("list", is_changed=False)}
    )
    names["y"].append(3)
    names["both"] = [names["y"]]
    key = sender.table.objects.links.key_of(sender.table.namespace["y"])
    assert inspect(context, objects, ("y",)) == Inspected(
        {key: None}, {"y": Replaced("list", is_changed=True, others=("both",))}
    )
    push(context, {0: sender.packed("x", "y")})
    bind_pushed(context)
    assert inspect(context, objects).changed == {}
    assert names["both"][0] is names["y"]
    names["y"] = [2]
    assert inspect(context, objects, ("y",)).names["y"].is_changed


# --- copied through the group -----------------------------------------------------------


@pytest.fixture
def world(world: World) -> World:
    """Three ranks without variables of earlier tests."""
    world.execute("%reset -f")
    world.execute("import os")
    return world


def copy(
    world: World, *names: str, source: int, to: tuple[int, ...] | None = None
) -> list[frozenset[str]]:
    """Sync variables by both ops, which print nothing; return the names bound on each rank."""
    for op, more in (("values.sync", {"source": source, "to": to}), ("values.bind_synced", {})):
        world.call(op, wanted=names, **more)
        assert world.engine.task_table.last is not None
        tracks = [*world.engine.task_table.last.transcript]
        assert [track.line_count for track in tracks] == [0, 0, 0]
    return [track.done.bound if track.done else frozenset() for track in tracks]


def test_ranks_that_lack_a_name_get_all_names(world: World) -> None:
    """Ranks that lack a name get all names; with `to`, only the ranks in `to` get them.

    The source also counts as having bound the names.
    """
    world.execute("if rank: x = rank\nif rank == 1: y = [x]")
    assert copy(world, "x", "y", source=1) == [{"x", "y"}] * 3
    assert world.gather("(x, y)") == [(1, [1])] * 3
    world.execute("x = rank")
    assert copy(world, "x", "y", source=2) == [frozenset()] * 3
    assert world.gather("x") == [0, 1, 2]
    assert copy(world, "x", source=2, to=(0,)) == [{"x"}, frozenset(), {"x"}]
    assert world.gather("x") == [2, 1, 2]


def test_synced_objects_stay_shared(world: World) -> None:
    """Synced views still share the memory of their tensor; empty and read-only arrays come too."""
    world.execute(
        "import numpy as np\n"
        "if rank == 0:\n"
        "    whole = torch.arange(6.0); part = whole[2:4]; both = [whole, part]\n"
        "    empty, fixed = np.empty(0), np.arange(1000); fixed.flags.writeable = False"
    )
    copy(world, "whole", "part", "both", "empty", "fixed", source=0)
    world.execute("part.fill_(rank + 7)")
    assert world.gather("(whole[2].item(), both[0] is whole, both[1] is part)") == [
        (rank + 7.0, True, True) for rank in range(3)
    ]
    assert world.gather("(len(empty), int(fixed.sum()))") == [(0, 499_500)] * 3


def test_definitions_come_with_values_that_use_them(world: World) -> None:
    """A synced value brings the functions, classes and modules that it uses, but no data.

    A rank that has a definition of the same name keeps its own.
    """
    world.execute(
        "if rank == 0:\n"
        "    import math as m\n"
        "    scale = 3\n"
        "    def times(x): return m.floor(x) * scale\n"
        "    class Net:\n        def run(self): return times(rank + 0.5)\n"
        "    net = Net()\n"
        "if rank == 1: scale, times = 5, lambda x: 'its own'"
    )
    assert copy(world, "net", source=0) == [{"net"}] * 3
    assert world.gather("net.run()", ranks=[0, 1]) == [0, "its own"]
    with pytest.raises(WorkerError, match="NameError: name 'scale' is not defined"):
        world.execute("net.run()", ranks=[2])
    world.execute("scale = 2", ranks=[2])
    assert world.gather("net.run()", ranks=[2]) == [4]


def test_a_value_that_cannot_be_rebuilt_reaches_no_rank(world: World) -> None:
    """If a rank cannot rebuild a value, its error says so, no rank gets it, and the group works."""
    world.execute(
        "def made(number):\n"
        "    if rank == 2: raise ValueError('not here')\n"
        "    return number\n"
        "class Odd:\n    def __reduce__(self): return made, (5,)\n"
        "if rank == 0: odd = Odd()"
    )
    said = r"rank 2 failed, of 3, after .* `odd` could not be rebuilt: ValueError: not here"
    with pytest.raises(WorkerError, match=said):
        copy(world, "odd", source=0)
    assert world.gather("globals().get('odd')", ranks=[1, 2]) == [None, None]
    with pytest.raises(UsageError, match="`odd` could not be rebuilt"):
        world.sync(["odd"])
    assert world.gather("globals().get('odd')", ranks=[1, 2]) == [None, None]
    assert world.sync(["made"], ranks=[1]) == (1,)


# --- with a default device of the user -----------------------------------------------------


@pytest.fixture
def elsewhere(world: World, empty_snapshot_folder: None) -> Iterator[World]:
    """Ranks with values on the CPU, whose default device is `meta`, as in this process."""
    world.execute(
        "import nbdist\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import Shard, distribute_tensor\n"
        "torch.manual_seed(0)\n"
        "x, eye = torch.ones(4), torch.eye(3).to_sparse()\n"
        "mesh = init_device_mesh('cpu', (world_size,))\n"
        "spread = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])\n"
        "net = torch.nn.Embedding(4, 2, sparse=True)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)\n"
        "rows = torch.tensor([1, 2])\n"
        "if rank == 0: own = [x, torch.empty(0), eye]\n"
        f"{NO_CONTENTS}"
    )
    with torch.device("meta"):
        yield world
    world.execute("torch.set_default_device(None)")


NO_CONTENTS = "torch.set_default_device('meta')"
DRAW = "drawn = torch.rand(2, device='cpu').tolist()"
TRAIN = "for _ in range(6): net(rows).sum().backward(); optimizer.step(); optimizer.zero_grad()"
PLACES = "[each.device.type for each in (x, eye, net.weight, net.weight.grad, spread)]"


def test_values_with_another_default_device(elsewhere: World) -> None:
    """Values keep contents and device to ranks and from ranks, whatever the default device is."""
    x, eye, spread = elsewhere.gather(["x", "eye", "spread"])
    assert [each[2].to_dense().sum().item() for each in (x, eye, spread)] == [4, 3, 15]
    assert elsewhere.gather("x", join="stack").sum() == 12
    for value in (x[0], eye[0], torch.empty(0, device="cpu")):
        for back in elsewhere.run(torch.clone, value):
            assert back.device.type == "cpu"
            assert back.to_dense().equal(value.to_dense())
        elsewhere.scatter("part", value)
        assert elsewhere.gather("part.device.type") == ["cpu"] * 3
    assert elsewhere.sync(["own"]) == (1, 2)
    assert elsewhere.gather("[each.to_dense().sum().item() for each in own]") == [[4, 0, 3]] * 3
    elsewhere.execute("net(rows).sum().backward()")
    assert elsewhere.sync(["net"], ranks=[1]) == (1,)
    assert elsewhere.gather(PLACES) == [["cpu"] * 5] * 3


def test_tools_with_another_default_device(elsewhere: World) -> None:
    """Digests, curves and measured memory are right, although the default device is `meta`."""
    whole = "(x, eye, net, optimizer)"
    first, *others = (each.parts for each in elsewhere.call("diff", expression=whole))
    assert [*others] == [first] * 2
    elsewhere.execute("x[0] += rank")
    lent = elsewhere.call("diff.lend", [0], expression=whole, paths=["[0]"]).rank(0).packed
    found = elsewhere.call("diff.compare", [2], expression=whole, packed=lent).rank(2)
    assert (found["[0]"].most, found["[0]"].differing) == (2, 1)
    seen = watched(elsewhere, TRAIN, ["net", "optimizer"], "elsewhere")
    assert not seen.differs
    assert "compared after 2 of 6 steps" in seen.agreement()
    elsewhere.execute("nbdist.track(total=x.sum(), mean=x.mean().item())")
    assert elsewhere.tracked("total").iloc[0, 1:].tolist() == [4.0, 5.0, 6.0]
    assert {"x", "spread"} <= {each.name for each in elsewhere.call("memory").rank(0).held}


def test_snapshots_with_another_default_device(elsewhere: World) -> None:
    """Snapshots restore values and random numbers with `meta` as default, also to fewer ranks."""
    elsewhere.execute("net(rows).sum().backward()")
    elsewhere.snapshot("x", "eye", "spread", "net", "optimizer", "rows", name="a")
    elsewhere.execute(DRAW)
    drawn = elsewhere.gather("drawn")
    elsewhere.execute(f"x.zero_()\n{TRAIN}")
    elsewhere.restore(name="a")
    elsewhere.execute(DRAW)
    assert elsewhere.gather("drawn, x.sum().item()") == [(each, 4.0) for each in drawn]
    assert elsewhere.gather(PLACES) == [["cpu"] * 5] * 3
    elsewhere.scale(2)
    assert elsewhere.gather("x.sum().item()") == [4.0] * 2
    elsewhere.execute(NO_CONTENTS)
    elsewhere.restore(name="a", from_rank=2)
    assert elsewhere.gather("spread.to_local().tolist()") == [[0.0, 1, 2], [3.0, 4, 5]]
    assert elsewhere.gather(PLACES) == [["cpu"] * 5] * 2
    elsewhere.execute(TRAIN)
