"""Tests of `nbdist.worker.counterparts`: what came, what a rank has changed, and what is freed."""

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
from nbdist.wire.ops import Inspected, Replaced
from nbdist.worker import counterparts as module
from nbdist.worker.counterparts import Counterparts, are_written
from nbdist.world.name_table import NameTable
from nbdist.world.sent_objects import NOTHING_SENT, Parcel


class Rank:
    """A notebook's table, and the counterparts of one rank, in one process."""

    def __init__(self) -> None:
        self.table, self.names = NameTable({}), dict[str, Any]()
        self.own = Counterparts(self.names)
        self.segments: list[Any] = []

    def send(self, *pushed: str, **values: Any) -> None:
        """Bind variables in the notebook, and send them; or push those that there are."""
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

    def sent(self) -> dict[int, None]:
        """Return the keys of all objects that the rank has been sent, each as a whole."""
        return dict.fromkeys(self.table.objects.of(0))

    def changed(self) -> list[Any]:
        """Return the rank's own objects that it has changed; of memory the bytes."""
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
    """Something that is not light: what is light is held to tell it from others."""


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
def test_what_has_been_changed(number: int, rank: Rank) -> None:
    """Whatever it is, also through another variable; not what looks as it did."""
    change, found = CHANGES[number]
    rank.send(**made())
    assert rank.own.inspect(rank.sent(), ()) == Inspected()
    change(rank.names)
    assert {name for name in made() if rank.own.is_changed(name)} == found
    rank.finish()
    rank.send(*found)
    assert not any(map(rank.own.is_changed, made()))
    assert rank.changed() == []


def test_which_objects_have_been_changed(rank: Rank) -> None:
    """Objects that were asked for, in the parts that were asked for, and no others."""
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


def test_what_is_under_a_name(rank: Rank) -> None:
    """Its type, whether it is what was sent, and which variables hold it or a parameter of it."""
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


def test_changes_of_both_sides(rank: Rank) -> None:
    """What was changed here stays changed after an update of other parts."""
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


def test_an_object_that_is_gone(rank: Rank) -> None:
    """The key is reported once with the end of a task, and as gone if it is asked for."""
    rows, box = [Plain()], Box(1)
    rank.send(rows=rows, box=box)
    keys = [rank.table.objects.links.key_of(each) for each in (rows, box)]
    rank.names.clear()
    assert rank.own.inspect(dict.fromkeys(keys), ()).gone == (keys[1],), "the list is held"
    assert {*rank.own.pop_ended_keys()} == {*rank.sent()}
    assert rank.own.pop_ended_keys() == ()
    assert rank.own.inspect(dict.fromkeys(keys), ()) == Inspected()


def test_a_message_for_what_is_gone(rank: Rank) -> None:
    """Nothing is made or changed: the notebook learns which object to send again."""
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
    """Its pickling drops the last references to objects, as a collection of garbage may."""

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects

    def __reduce__(self) -> Any:
        self.objects.clear()
        return list, ([np.full(2, float(number)) for number in range(50)],)


def test_objects_that_end_while_a_message_is_written(rank: Rank) -> None:
    """New objects that get their ids are sent, and are not taken for objects that the rank has."""
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


def test_what_the_notebook_has_forgotten(rank: Rank) -> None:
    """It is held as long as this rank holds it, and its end is not reported."""
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


def test_variables_that_the_notebook_has_deleted(rank: Rank) -> None:
    """They are deleted here, unless they or what they lead to was changed here."""
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
    """Return the first object in it that can be referred to weakly."""
    while isinstance(value, list | dict):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


@pytest.mark.parametrize("kind", FREED)
def test_memory_is_freed_with_the_last_variable(kind: str, rank: Rank) -> None:
    """Whatever it is, the tables of the rank hold nothing of it after the task."""
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
    """The old one ends here once it has ended in the notebook, unless this rank holds it."""
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


def test_garbage_in_a_circle_stays_while_the_rank_is_idle(rank: Rank) -> None:
    """The notebook sends references to what it believes to be there: it is told after a task."""
    box = Box(None)
    box.value = box
    rank.send(box=box)
    (key,) = [k for k in rank.sent() if rank.own.links.find(k) is rank.names["box"]]
    rank.own.begin_idle()
    rank.own.begin_idle()
    del rank.names["box"]
    gc.collect()
    assert rank.own.links.find(key) is not None
    rank.own.end_idle()
    assert rank.own._pin not in gc.callbacks
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
def test_big_values(number: int, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not read unless a page was written to; one element is noticed all the same."""
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


def test_a_block_that_no_page_of_was_written_to(rank: Rank) -> None:
    """A question about big memory takes no time and no memory, though all of it was read."""
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
    """Nothing can be seen of it: it is read."""
    own = np.ones(1 << 20, np.uint8)
    assert are_written(own.__array_interface__["data"][0], own.nbytes)


def test_new_contents_of_memory_are_no_change_of_the_rank(rank: Rank) -> None:
    """They are what was sent; what this rank writes afterwards is its own."""
    x, y = torch.zeros(1000), np.zeros(1000)
    rank.send(x=x, y=y)
    x += 1
    y += 1
    rank.send(x=x, y=y)
    assert (rank.names["x"] == 1).all()
    assert not any(map(rank.own.is_changed, "xy"))
    rank.names["y"][5] = 7
    assert [name for name in "xy" if rank.own.is_changed(name)] == ["y"]


def test_memory_that_moves_with_its_tensors(rank: Rank) -> None:
    """A tensor that a rank gives other memory is changed; new contents go where it is now."""
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


def test_objects_that_another_rank_gets(rank: Rank) -> None:
    """They have their keys there too, and are compared with what the notebook has sent."""
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


def test_values_that_replace_variables(rank: Rank) -> None:
    """In place where the structure is the same; else it is said what still belongs to the old."""
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


def test_an_object_that_cannot_be_looked_at(rank: Rank) -> None:
    """What raises is no error of the question, and other objects are compared all the same."""
    box, rows = Box(1), [1]
    rank.send(box=box, rows=rows)

    def refuse(*_: Any) -> None:
        raise LookupError("not now")

    there = rank.names["box"]
    there.__class__ = type("Box", (Box,), {"__reduce__": refuse, "__getstate__": refuse})
    rank.names["rows"].append(1)
    found = rank.own.inspect(rank.sent(), ())
    assert rank.table.objects.links.key_of(rows) in found.changed


def test_modules_and_functions_have_no_others(rank: Rank) -> None:
    """Everything leads to them."""
    rank.names.update(math=types, f=len, both=[types])
    assert rank.own.inspect({}, ("math",)).names["math"].others == ()
