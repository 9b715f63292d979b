"""Tests of `nbdist.worker.counterparts`: objects received, changes found, and memory freed."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from nbdist.notebook.shipping import plan, push
from nbdist.output.events import Done
from nbdist.values.linked import NotThere, write
from nbdist.values.payload import open_payload, pack_frames
from nbdist.values.states import MAX_PARTS
from nbdist.wire.ops import Inspected, Replaced
from nbdist.worker import counterparts as module
from nbdist.worker.counterparts import Counterparts, are_written
from nbdist.world.name_table import NameTable
from nbdist.world.sent_objects import NOTHING_SENT, Parcel


class Rank:
    """A `NameTable`, as a notebook has it, and the `Counterparts` of one rank, in one process."""

    def __init__(self) -> None:
        self.table, self.names = NameTable({}), dict[str, Any]()
        self.own = Counterparts(self.names)
        self.segments: list[Any] = []

    def send(self, *pushed: str, **values: Any) -> None:
        """Bind variables in the notebook and send their values, or push existing variables."""
        self.table.namespace.update(values)
        self.table.record_assigned(values)
        cell = ", ".join(values or self.table.namespace)
        found = push(pushed, self.table, (0,)) if pushed else plan(cell, self.table, (0,))
        shipment = found.shipment()
        self.own.forget(self.table.objects.pop_forgotten([0]).get(0, ()))
        for packet in shipment.packets:
            payload, segment = pack_frames(packet.message.frames)
            self.segments += [segment] if segment else []
            arrived = self.own.read(open_payload(payload))
            self.own.accept(arrived)
            self.own.bind_sent(arrived.values)
        self.own.end_idle()
        self.finish(shipment.parcels.get(0, Parcel()))

    def finish(self, received: Parcel = NOTHING_SENT) -> None:
        """End a task of the rank."""
        self.table.record_finished(0, Done("ok", 0.0, dead=self.own.pop_ended_keys()), received)
        self.own.end_idle()  # as the next task does

    def sent(self) -> dict[int, None]:
        """Return a request for all objects sent to the rank: keys with None, for whole objects."""
        return dict.fromkeys(self.table.objects.of(0))

    def changed(self) -> list[Any]:
        """Return the objects that the rank has changed; changed memory is returned as bytes."""
        return [self.own.links.find(key) for key in self.own.inspect(self.sent(), ()).changed]


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.names.clear()
    gc.collect()
    for segment in rank.segments:
        segment.close()


class Plain:
    """An object that is not atomic, so that an `Identity` of a list with it keeps nothing alive."""


class Box:
    """A class of the user."""

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
        "f": len,
    }


def step(names: dict[str, Any]) -> None:
    names["model"](torch.ones(3)).sum().backward()
    names["adam"].step()


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], set[str]]] = [
    (step, {"model", "adam"}),
    (lambda names: names["model"].eval(), {"model"}),
    (lambda names: names["model"].weight.data.add_(1), {"model", "adam"}),
    (lambda names: names["tensor"].numpy().__setitem__(5, 1), {"tensor"}),
    (lambda names: names["array"].__setitem__(5, 1), {"array"}),
    (lambda names: names["rows"][1].append(4), {"rows"}),
    (lambda names: setattr(names["box"], "value", 2), {"box"}),
    (lambda names: names["box"].value.append(2), {"box"}),
    (lambda names: names.update(table={"a": 1}, n=4), {"table", "n"}),
    (lambda names: names.update(rows=5), {"rows"}),
    (lambda names: (names["table"].update(a=2), names["table"].update(a=1)), set()),
    (lambda names: names["model"](torch.ones(3)), set()),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_changes_of_variables_are_found(number: int, rank: Rank) -> None:
    """All variables whose contents have changed are found, but no variable with equal contents."""
    change, found = CHANGES[number]
    rank.send(**made())
    assert rank.own.inspect(rank.sent(), ()) == Inspected()
    change(rank.names)
    assert {name for name in made() if rank.own.is_changed(name)} == found
    rank.finish()
    rank.send(*found)
    assert not any(map(rank.own.is_changed, made()))
    assert rank.changed() == []


def test_only_requested_objects_and_parts_are_compared(rank: Rank) -> None:
    """Only objects and parts that were asked for are reported as changed."""
    inner, cfg, box = [1], {"a": 1, "b": 2}, Box(1)
    rank.send(inner=inner, cfg=cfg, box=box, held=[inner])
    inspect = rank.own.inspect
    inner_key, cfg_key, box_key = (rank.table.objects.links.key_of(x) for x in (inner, cfg, box))
    assert inspect(rank.sent(), ()).changed == {}
    rank.names["inner"].append(2)
    rank.names["cfg"].update(a=5, c=6)
    rank.names["box"].more = 1
    assert inspect(rank.sent(), ()).changed == {
        inner_key: None,
        cfg_key: {"a", "c"},
        box_key: {"more"},
    }
    assert inspect({cfg_key: frozenset({"a", "b"})}, ()).changed == {cfg_key: {"a"}}
    assert inspect({cfg_key: frozenset({"b"}), 5: None}, ()) == Inspected()
    found = {id(each) for each in rank.changed()}
    assert found == {id(rank.names[name]) for name in ("inner", "cfg", "box")}


def test_inspect_describes_variables(rank: Rank) -> None:
    """`inspect` returns a variable's type, if it was changed, and which variables refer to it."""
    net = torch.nn.Linear(1, 1)
    rank.send(net=net, rows=[1], n=1)
    names = rank.names
    names.update(
        opt=torch.optim.SGD(names["net"].parameters()),
        wrapped={"of": Box((names["net"],))},
        apart=torch.zeros(1),
        closure=(lambda x: lambda: x)(names["rows"]),
        _i1=names["net"],
        text="net",
    )
    assert rank.own.inspect({}, ("net", "rows", "n", "apart", "never")).names == {
        "net": Replaced("Linear", is_changed=False, others=("opt", "wrapped")),
        "rows": Replaced("list", is_changed=False, others=("closure",)),
        "n": Replaced("int", is_changed=False),
        "apart": Replaced("Tensor", is_changed=True),
    }
    names["net"].eval()
    names["rows"] = [1]
    found = rank.own.inspect({}, ("net", "rows")).names
    assert (found["net"].is_changed, found["rows"].is_changed) == (True, True)
    assert found["rows"].others == ()


def test_an_update_keeps_the_ranks_own_changes(rank: Rank) -> None:
    """A part that the rank has changed stays so after the notebook has updated other parts."""
    cfg = {"a": 1, "b": 2}
    rank.send(cfg=cfg)
    (key,) = rank.sent()
    there = rank.names["cfg"]
    there["b"] = "theirs"
    cfg["a"] = "ours"
    rank.send(cfg=cfg)
    assert there == {"a": "ours", "b": "theirs"}
    assert rank.names["cfg"] is there
    assert rank.own.inspect({key: None}, ()).changed == {key: {"b"}}
    rank.send("cfg")
    assert there == {"a": "ours", "b": 2}
    assert rank.own.inspect({key: None}, ()).changed == {}


def test_a_push_replaces_a_dict_with_too_many_parts(rank: Rank) -> None:
    """After a push a rank's dict is as it was sent, even if it had more than MAX_PARTS entries."""
    cfg: dict[Any, Any] = {"a": 1, "b": 2}
    rank.send(cfg=cfg)
    (key,) = rank.sent()
    rank.names["cfg"].update((number, number) for number in range(MAX_PARTS))
    cfg["a"] = "ours"
    rank.send("cfg")
    assert rank.names["cfg"] == {"a": "ours", "b": 2}
    assert rank.own.inspect({key: None}, ()).changed == {}


def test_an_ended_object_is_reported_once(rank: Rank) -> None:
    """The key of an ended object is reported once after a task; before, `inspect` calls it gone."""
    rows, box = [Plain()], Box(1)
    rank.send(rows=rows, box=box)
    keys = [rank.table.objects.links.key_of(each) for each in (rows, box)]
    rank.names.clear()
    assert rank.own.inspect(dict.fromkeys(keys), ()).gone == (keys[1],), "the list is held"
    assert {*rank.own.pop_ended_keys()} == {*rank.sent()}
    assert rank.own.pop_ended_keys() == ()
    assert rank.own.inspect(dict.fromkeys(keys), ()) == Inspected()


def test_a_message_for_an_ended_object_changes_nothing(rank: Rank) -> None:
    """A message for an ended object changes nothing, and its error has the object's key."""
    box, rows = Box([1]), [1]
    rank.send(box=box, rows=rows)
    there = rank.names.pop("rows")
    del rank.names["box"]
    rows.append(2)
    for change in (lambda: setattr(box, "value", 2), lambda: None):
        change()
        rank.table.record_assigned(("box", "rows"))
        rank.table.namespace["new"] = [box]
        shipment = plan("new", rank.table, (0,)).shipment()
        (packet,) = shipment.packets
        with pytest.raises(NotThere) as caught:
            rank.own.read(packet.message.frames)
        assert caught.value.key == rank.table.objects.links.key_of(box)
    assert there == [1]


class Releases:
    """Drops the last references to objects while it is pickled, as a garbage collection may."""

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects

    def __reduce__(self) -> Any:
        self.objects.clear()
        return list, ([np.full(2, float(number)) for number in range(50)],)


def test_new_objects_with_ids_of_ended_objects_are_sent(rank: Rank) -> None:
    """New objects that get the ids of ended objects are sent whole, not as references."""
    objects = [np.full(2, -1.0) for _ in range(50)]
    rank.send(objects=objects)
    namespace, links = rank.table.namespace, rank.table.objects.links
    del namespace["objects"], rank.names["objects"]
    sent = {entry.key for entry in links.entries()}
    numbers = {id(each) for each in objects}
    message = write({"new": Releases(objects)}, (), links, {}, sent, namespace)
    arrived = rank.own.read(message.frames)
    assert [each.tolist() for each in arrived.values["new"]] == [[float(n)] * 2 for n in range(50)]
    assert numbers & message.frames.pickler.memo.copy().keys(), "no id was used again"


def test_forgotten_objects_live_while_the_rank_holds_them(rank: Rank) -> None:
    """A rank keeps an object that the notebook has forgotten while its own variables hold it.

    The end of such an object is not reported.
    """
    rank.send(rows=[Plain()], box=Box(2), other=[Plain()])
    held = rank.names["rows"]
    keys = [*rank.sent()]
    rank.own.forget(keys)
    assert rank.own.pop_ended_keys() == ()
    assert not rank.own.is_changed("box"), "what refers to it has not changed by that"
    held.append(rank.names.pop("box"))
    rank.names.clear()
    assert len(rank.own.links) == 5
    rank.own.links.has_dead = True
    assert rank.own.pop_ended_keys() == ()
    assert len(rank.own.links) == 3, "the other list has ended, with what it held"
    held = None
    assert rank.own.pop_ended_keys() == ()
    rank.own.links.has_dead = True
    assert rank.own.pop_ended_keys() == ()
    assert len(rank.own.links) == 0


def test_deleted_variables_are_deleted_on_a_rank_unless_changed(rank: Rank) -> None:
    """A rank deletes variables deleted in the notebook, unless it has changed or rebound them."""
    rank.send(rows=[1], inner=[[2]], bound=[3], n=4, kept=[5])
    rank.names["inner"][0].append("theirs")
    rank.names["bound"] = [3]
    assert rank.own.delete(["rows", "inner", "bound", "n", "never"]) == ["rows", "n"]
    assert rank.names == {"inner": [[2, "theirs"]], "bound": [3], "kept": [5]}


# --- memory -----------------------------------------------------------------------------

FREED: dict[str, Callable[[], Any]] = {
    "an instance": lambda: Box([1]),
    "a tensor": lambda: torch.zeros(1000),
    "a model": lambda: torch.nn.Linear(3, 3),
    "an array": lambda: np.zeros(1000),
    "an instance in a list": lambda: [[Box(1)]],
    "a tensor in a dict": lambda: {"a": {"b": torch.zeros(10)}},
    "a model and its optimizer": lambda: (
        lambda net: {"net": net, "opt": torch.optim.SGD(net.parameters())}
    )(torch.nn.Linear(1, 1)),
}


def innermost(value: Any) -> Any:
    """Return the first value inside of nested lists and dicts, for a weak reference."""
    while isinstance(value, list | dict):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


@pytest.mark.parametrize("kind", FREED)
def test_memory_is_freed_with_the_last_variable(kind: str, rank: Rank) -> None:
    """After a task the rank's tables hold nothing of a variable that was deleted."""
    rank.send(value=FREED[kind]())
    assert len(rank.own.links) > 0
    found = weakref.ref(innermost(rank.names["value"]))
    roots = [weakref.ref(block.owner()) for block in rank.own.links.blocks]
    del rank.names["value"]
    rank.own.links.has_dead = True
    rank.own.pop_ended_keys()
    gc.collect()
    rank.own.pop_ended_keys()
    assert found() is None
    assert [root() for root in roots] == [None] * len(roots)
    assert len(rank.own.links) == 0
    assert rank.own._states == {}
    assert rank.own._digests == {}


def test_memory_is_freed_if_the_notebook_replaces_a_variable(rank: Rank) -> None:
    """A rank frees a variable's old value once the notebook has freed its own old value."""
    kept = torch.zeros(1000)
    rank.send(x=kept, rows=[Box(1)])
    old, box = weakref.ref(rank.names["x"]), weakref.ref(rank.names["rows"][0])
    rank.send(x=torch.ones(1000), rows=[Box(2)])
    rank.own.links.has_dead = True
    rank.own.pop_ended_keys()
    assert (old() is None, box()) == (False, None)
    del kept
    rank.send(y=1)
    rank.own.links.has_dead = True
    rank.own.pop_ended_keys()
    assert old() is None


def test_a_garbage_cycle_stays_while_the_rank_is_idle(rank: Rank) -> None:
    """A garbage cycle stays until `end_idle`, as the notebook may still refer to its objects."""
    box = Box(None)
    box.value = box
    rank.send(box=box)
    (key,) = [k for k in rank.sent() if rank.own.links.find(k) is rank.names["box"]]
    assert rank.own.pop_ended_keys() == ()
    del rank.names["box"]
    gc.collect()
    assert rank.own.links.find(key) is not None
    rank.own.end_idle()
    gc.collect()
    assert rank.own.links.find(key) is None
    assert rank.own.pop_ended_keys() == (key,)


BIG_CHANGES: list[tuple[Callable[[Any, Any], Any], set[str]]] = [
    (lambda x, y: x.sum() + y.sum(), set()),
    (lambda x, y: x.view(-1)[300_000:300_001].fill_(1.0), {"x"}),
    (lambda x, y: x.view(-1)[-1:].fill_(1.0), {"x"}),
    (lambda x, y: y.__setitem__(0, 1), {"y"}),
    (lambda x, y: setattr(x, "data", x.data.clone()), {"x"}),
]


@pytest.mark.parametrize("number", range(len(BIG_CHANGES)))
def test_big_memory_is_read_only_if_written_to(
    number: int, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Big memory is read only if one of its pages was written to; one changed element is found."""
    read: list[int] = []
    digest = module.digest_bytes

    def digest_bytes(view: Any) -> str:
        read.append(memoryview(view).nbytes)
        return digest(view)

    monkeypatch.setattr(module, "PAGES_FROM_BYTES", 1 << 20)
    monkeypatch.setattr(module, "digest_bytes", digest_bytes)
    change, found = BIG_CHANGES[number]
    rank.send(x=torch.zeros(1000, 1000), y=np.zeros(1_000_000))
    change(rank.names["x"], rank.names["y"])
    assert {name for name in "xy" if rank.own.is_changed(name)} == found
    assert found or read == []


def test_unwritten_memory_is_compared_without_copies(rank: Rank) -> None:
    """Comparing memory that was only read takes hardly any memory; a single new value is found."""
    size = 256 << 20
    rank.send(x=np.zeros(size, np.uint8))
    x = rank.names["x"]
    assert x[::4096].sum() == 0
    before = psutil.Process().memory_info().rss
    (key,) = [block.key for block in rank.own.links.blocks]
    assert not are_written(x.__array_interface__["data"][0], size)
    assert rank.own.inspect({key: None}, ()) == Inspected()
    assert psutil.Process().memory_info().rss - before < size // 8
    x[12345] = 0
    assert are_written(x.__array_interface__["data"][0], size)
    assert rank.own.inspect({key: None}, ()) == Inspected(), "written to, and equal"
    x[12345] = 1
    assert rank.own.inspect({key: None}, ()).changed == {key: None}


def test_memory_of_this_process_counts_as_written() -> None:
    """Memory that is not mapped from a file counts as written, so its contents are compared."""
    own = np.ones(1 << 20, np.uint8)
    assert are_written(own.__array_interface__["data"][0], own.nbytes)


def test_new_contents_of_memory_are_no_change_of_the_rank(rank: Rank) -> None:
    """Contents that the notebook sends are no change of the rank; its own later writes are."""
    x, y = torch.zeros(1000), np.zeros(1000)
    rank.send(x=x, y=y)
    x += 1
    y += 1
    rank.send(x=x, y=y)
    assert (rank.names["x"] == 1).all()
    assert not any(map(rank.own.is_changed, "xy"))
    rank.names["y"][5] = 7
    assert [name for name in "xy" if rank.own.is_changed(name)] == ["y"]


def test_contents_reach_a_tensor_with_other_memory(rank: Rank) -> None:
    """A tensor whose memory a rank has replaced counts as changed, and gets a push's contents."""
    net = torch.nn.Linear(2, 2)
    rank.send(net=net)
    there = rank.names["net"]
    weight = there.weight
    with torch.no_grad():
        net.weight.fill_(5)
    rank.send(net=net)
    assert there.weight is weight
    assert (weight == 5).all()
    there.double()
    rank.finish()
    assert rank.own.is_changed("net")
    rank.send("net")
    assert not rank.own.is_changed("net")
    assert there.weight.equal(net.weight)


# --- from rank to rank ------------------------------------------------------------------


def test_objects_keep_their_keys_on_another_rank(rank: Rank) -> None:
    """Objects copied from rank to rank keep their keys, and are compared with the sent contents."""
    net, rows = torch.nn.Linear(1, 1), [1]
    rank.send(net=net, rows=rows)
    other = Rank()
    of_net = [entry() for entry in rank.own.links.entries() if entry() is not rank.names["rows"]]
    assert rank.own.keyed_objects([[5], 7]) == []
    keyed = rank.own.keyed_objects([*of_net, rank.names["rows"]])
    gained = other.own.register(keyed, {})
    assert {*gained} == {*rank.sent()}, "memory that a tensor fills comes with it"
    key = rank.table.objects.links.key_of(rows)
    assert other.own.links.find(key) is rank.names["rows"]
    assert other.own.inspect(dict.fromkeys(gained), ()) == Inspected()
    rank.names["rows"].append(2)
    assert other.own.inspect(dict.fromkeys(gained), ()).changed.keys() == {key}
    made = torch.nn.Linear(1, 1)
    assert rank.own.keyed_objects([made]) == []
    (new,) = rank.own.keyed_objects([made, torch.nn.Linear], adds=True)
    assert rank.own.links.find(new.key) is made


def test_variables_are_replaced_in_place_if_possible(rank: Rank) -> None:
    """A variable is changed in place if its old and its new value have the same structure.

    Otherwise the variable is bound to the new value, and the result names the variables that still
    refer to the old value.
    """
    rank.send(net=torch.nn.Linear(2, 2), rows=["a"])
    names = rank.names
    net, rows = names["net"], names["rows"]
    names["opt"] = torch.optim.SGD(net.parameters())
    source = torch.nn.Linear(2, 2)
    instead, replaced = rank.own.replace({"net": source, "rows": ["b"], "new": [source]})
    assert (names["net"] is net, names["rows"] is rows, rows) == (True, True, ["b"])
    assert (replaced, names["new"][0] is net, instead[id(source)] is net) == ({}, True, True)
    assert net.weight.equal(source.weight)
    other = torch.nn.Linear(3, 3)
    _, replaced = rank.own.replace({"net": other})
    assert names["net"] is other
    assert replaced == {"net": Replaced("Linear", is_changed=True, others=("opt", "new"))}


def test_an_object_that_raises_hides_no_other_change(rank: Rank) -> None:
    """An object that raises when compared causes no error, and changes of others are found."""
    box, rows = Box(1), [1]
    rank.send(box=box, rows=rows)

    def refuse(*_: Any) -> None:
        raise LookupError("not now")

    there = rank.names["box"]
    there.__class__ = type("Box", (Box,), {"__reduce__": refuse, "__getstate__": refuse})
    rank.names["rows"].append(1)
    found = rank.own.inspect(rank.sent(), ())
    assert rank.table.objects.links.key_of(rows) in found.changed


def test_no_variables_that_refer_to_a_module_are_listed(rank: Rank) -> None:
    """`inspect` lists no variables that refer to a Python module, since nearly all objects do."""
    rank.names.update(math=types, f=len, both=[types])
    assert rank.own.inspect({}, ("math",)).names["math"].others == ()
