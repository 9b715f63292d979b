"""Tests of `nbdist.values.updates` and `linked`: values that arrive, and changes in place."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from nbdist.values.linked import CannotRebuild, NotThere, read, reducer_for, write
from nbdist.values.links import Links, MemoryBlock
from nbdist.values.scan import Scan
from nbdist.values.states import ObjectState
from nbdist.values.updates import ObjectUpdate, apply, is_replaced, update_of


class Sender:
    """Stands for the notebook: sends values, and later their changes."""

    def __init__(self) -> None:
        self.links, self.known = Links(), dict[int, ObjectState]()
        self.updates: list[ObjectUpdate] = []
        self.replaced: list[Any] = []

    def send(self, **values: Any) -> list[bytes]:
        """Return the frames that make another process equal to this one."""
        scan = self._scan(values)
        self.replaced = []
        while changed := self._replaced(scan):
            for key in changed:
                self.replaced.append(self.links.find(key))
                self.links.renew(self.links.by_key[key])
            scan = self._scan(values)
        self.updates = []
        for key, state in scan.states.items():
            before = self.known.get(key)
            if before is None or before == state:
                continue
            if (block := self.links.blocks.get(key)) is not None:
                self.updates.append((key, "block", block))
            else:
                entry, parts = self.links.by_key[key], state.changed_since(before)
                self.updates.append(update_of(entry, state, before, parts, scan))
        message = write(values, self.updates, self.links, scan.states, self.known.keys(), {})
        self.known |= scan.states
        return [bytes(memoryview(frame)) for frame in message.frames]

    def _scan(self, values: dict[str, Any]) -> Scan:
        scan = Scan(self.links, reducer_for({}), {})
        for value in values.values():
            scan.token(value)
        scan.run()
        return scan

    def _replaced(self, scan: Scan) -> list[int]:
        return [
            key
            for key, state in scan.states.items()
            if key in self.known and is_replaced(state.changed_since(self.known[key]))
        ]


class Receiver:
    """Stands for a rank: keeps the objects that it received, and changes them in place."""

    def __init__(self) -> None:
        self.links = Links()
        self.roots: list[Any] = []

    def receive(self, frames: list[bytes]) -> dict[str, Any]:
        """Apply all updates of a message, and return its values."""
        arrived = read(frames, self.links.find, {})
        for key, _, root in arrived.blocks:
            address = root.__array_interface__["data"][0]
            self.links.blocks.add(
                MemoryBlock(key, address, address + root.nbytes, weakref.ref(root))
            )
            self.roots.append(root)
        for key, tool, value in arrived.objects:
            self.links.add(value, tool, key)
        token = Scan(self.links, reducer_for({}), {}, adds=False).token
        for key, tool, data in arrived.updates:
            if tool == "block":
                self.links.find(key)[:] = np.frombuffer(data, np.uint8)
            else:
                apply(self.links.find(key), tool, data, token)
        return arrived.values


class Pair:
    """A sender and a receiver."""

    def __init__(self) -> None:
        self.sender, self.receiver = Sender(), Receiver()

    def send(self, **values: Any) -> Any:
        """Return the values that arrive: a dict of several values, or the only value."""
        found = self.receiver.receive(self.sender.send(**values))
        return found if len(found) > 1 else next(iter(found.values()))


@pytest.fixture
def pair() -> Pair:
    return Pair()


class Plain:
    """An instance with attributes."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


class Other(Plain):
    """A class with the layout of `Plain`."""


class Slots:
    """An instance with slots."""

    __slots__ = ("a", "b", "c")


class Bag(dict[str, Any]):
    """A dict with attributes."""


class Row(list[Any]):
    """A list with attributes."""


class Stated:
    """An instance with `__getstate__` and `__setstate__` of its own."""

    def __init__(self) -> None:
        self.a, self.cache = [1], 0

    def __getstate__(self) -> Any:
        return ("v1", self.a)

    def __setstate__(self, state: Any) -> None:
        self.a, self.cache = state[1], 0


class Watched:
    """An instance that allows no attribute but `_a` to be set."""

    def __init__(self) -> None:
        self._a = 1

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_a":
            raise LookupError(name)
        object.__setattr__(self, name, value)


def shown(value: Any) -> Any:
    """Return the contents of a value in a form that can be compared."""
    if isinstance(value, pd.DataFrame | pd.Series):
        return value.to_dict(), [*map(repr, getattr(value, "dtypes", ()))] if value.ndim > 1 else ""
    if isinstance(value, torch.Tensor):
        grad = None if value.grad is None else value.grad.tolist()
        return value.tolist(), value.dtype, value.requires_grad, grad, shown(vars(value))
    if isinstance(value, np.ndarray):
        return value.tolist(), value.dtype, value.flags.writeable
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, torch.nn.Module):
        return [shown(each) for each in value.parameters()], value.training
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    own = [
        (name, getattr(value, name))
        for kind in type(value).__mro__
        for name in getattr(kind, "__slots__", ())
        if hasattr(value, name)
    ]
    own += sorted(getattr(value, "__dict__", {}).items())
    if isinstance(value, dict):
        return type(value), [(k, shown(v)) for k, v in value.items()], own, str(value)[:20]
    if isinstance(value, list | deque):
        return type(value), [*map(shown, value)], own
    if isinstance(value, set):
        return sorted(map(str, value))
    if isinstance(value, bytearray | int | str | tuple | float | type(None)):
        return value
    return type(value), own


def with_slots() -> Slots:
    slots = Slots()
    slots.a = slots.b = 1
    return slots


def emptied(slots: Slots) -> None:
    del slots.a
    slots.c = 5


def with_no_grad(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def changed(value: Any) -> None:
        with torch.no_grad():
            change(value)

    return changed


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "dict": (lambda: {"a": 1, "b": 2}, lambda v: (v.update(c=3, a=5), v.pop("b"))),
    "dict, another order": (lambda: {"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a"))),
    "dict, a new key before others": (
        lambda: {"a": 1, "b": 2},
        lambda v: (items := dict(v), v.clear(), v.update(z=0), v.update(items)),
    ),
    "dict, emptied": (lambda: {"a": 1}, lambda v: v.clear()),
    "dict, many": (
        lambda: dict.fromkeys(range(5000), 1),
        lambda v: (v.pop(0), v.update({5001: 1, 7: 2})),
    ),
    "dict, tuples as keys": (lambda: {(1, 2): 1, (3,): 2}, lambda v: v.update({(1, 2): 5})),
    "OrderedDict": (lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    "defaultdict": (lambda: defaultdict(list), lambda v: setattr(v, "default_factory", dict)),
    "a dict with attributes": (Bag, lambda v: (v.update(a=1), setattr(v, "b", 2))),
    "list": (lambda: [1, 2], lambda v: (v.append(3), v.pop(0))),
    "a list with attributes": (lambda: Row([1]), lambda v: (v.append(3), setattr(v, "a", 2))),
    "deque": (lambda: deque([1, 2], 2), lambda v: v.append(3)),
    "set": (lambda: {1, 2}, lambda v: (v.add(3), v.remove(1))),
    "bytearray": (lambda: bytearray(b"abc"), lambda v: v.extend(b"d")),
    "instance": (lambda: Plain(a=1, b=2), lambda v: (setattr(v, "c", 3), delattr(v, "a"))),
    "instance, class": (lambda: Plain(a=1), lambda v: setattr(v, "__class__", Other)),
    "slots": (with_slots, emptied),
    "a state of its own": (Stated, lambda v: v.a.append(2) or setattr(v, "a", [3])),
    "an instance with a guard": (Watched, lambda v: setattr(v, "_a", 2)),
    "tensor": (lambda: torch.zeros(3), lambda v: v.add_(1)),
    "tensor, shape": (lambda: torch.zeros(4), lambda v: v.resize_(2, 2)),
    "tensor, grown": (lambda: torch.zeros(4), lambda v: v.resize_(9).fill_(1)),
    "tensor, other memory": (lambda: torch.zeros(3), lambda v: setattr(v, "data", torch.ones(3))),
    "tensor, another type": (
        lambda: torch.zeros(3),
        lambda v: setattr(v, "data", torch.ones(3, dtype=torch.float64)),
    ),
    "tensor, attribute": (lambda: torch.zeros(3), lambda v: setattr(v, "mark", 1)),
    "parameter": (lambda: torch.nn.Parameter(torch.zeros(3)), with_no_grad(lambda v: v.fill_(2))),
    "parameter, gradient": (
        lambda: torch.nn.Parameter(torch.zeros(3)),
        lambda v: (v * 2).sum().backward(),
    ),
    "parameter, frozen": (
        lambda: torch.nn.Parameter(torch.zeros(3)),
        lambda v: v.requires_grad_(requires_grad=False),
    ),
    "module": (
        lambda: torch.nn.Linear(2, 2),
        lambda v: (v.eval(), with_no_grad(lambda w: w.fill_(1))(v.weight)),
    ),
    "module, a new layer": (
        lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)),
        lambda v: v.append(torch.nn.Linear(1, 1)),
    ),
    "array": (lambda: np.zeros((2, 2)), lambda v: v.__setitem__((0, 1), 5)),
    "array, fixed": (lambda: np.zeros(3), lambda v: v.setflags(write=False)),
    "array of objects": (lambda: np.array([None, 1], object), lambda v: v.__setitem__(0, "x")),
    "DataFrame, a new column": (
        lambda: pd.DataFrame({"a": [1, 2], "s": ["x", "y"]}),
        lambda v: v.insert(1, "b", [3.0, 4]),
    ),
    "DataFrame": (
        lambda: pd.DataFrame({"a": [1, 2], "s": ["x", "y"]}),
        lambda v: v.__setitem__("a", [5, 6]),
    ),
    "DataFrame, fewer": (
        lambda: pd.DataFrame({"a": [1, 2], "b": [3, 4]}),
        lambda v: v.pop("a"),
    ),
    "Series": (lambda: pd.Series([1.0, 2.0]), lambda v: v.__setitem__(0, 5)),
    "Generator": (lambda: np.random.default_rng(0), lambda v: v.random()),
    "partial": (lambda: functools.partial(print, 1, end=""), lambda v: v.keywords.update(sep="-")),
    "namespace": (lambda: types.SimpleNamespace(a=1), lambda v: vars(v).update(b=2)),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_is_made_in_place(case: str, pair: Pair) -> None:
    """A counterpart gets a change and stays the same object; an unchanged object is not sent."""
    make, change = CHANGES[case]
    value = make()
    there = pair.send(value=value)
    assert shown(there) == shown(value)
    assert there is not value
    holder = pair.send(holder=[value])
    assert holder[0] is there
    assert pair.sender.updates == []
    change(value)
    again = pair.send(holder=[value])[0]
    assert all(each is not value for each in pair.sender.replaced)
    assert pair.sender.updates
    assert again is there is holder[0]
    assert shown(there) == shown(value)
    pair.send(value=value)
    assert pair.sender.updates == [], "nothing has changed since"


class Made:
    """An instance that is pickled as its class and arguments."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return Made, (self.number,)


REPLACED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "array, another shape": (lambda: np.zeros(4), lambda v: v.resize((2, 2), refcheck=False)),
    "made from other arguments": (lambda: Made(1), lambda v: setattr(v, "number", 2)),
}


@pytest.mark.parametrize("case", REPLACED)
def test_an_object_is_replaced_if_it_must_be(case: str, pair: Pair) -> None:
    """Objects that refer to the replaced one stay the same, and refer to the new one."""
    make, change = REPLACED[case]
    value = make()
    holder = {"a": [value], "b": Plain(part=value)}
    there = pair.send(holder=holder)
    was, rows, part = there["a"][0], there["a"], there["b"]
    change(value)
    pair.send(holder=holder)
    assert pair.sender.replaced == [value]
    now = there["a"][0]
    assert now is not was
    assert now is there["b"].part
    assert (there["a"] is rows, there["b"] is part) == (True, True)
    assert shown(now) == shown(value)


# --- parts ------------------------------------------------------------------------------


def test_changes_of_different_parts_are_all_kept(pair: Pair) -> None:
    """Entries of dicts, attributes and slots that one side has changed are there afterwards."""
    cfg, plain = {"a": 1, "b": 2, "c": 3}, Plain(a=1, b=2)
    slots, bag = with_slots(), Bag(a=1)
    tensor = torch.nn.Parameter(torch.zeros(2))
    there = pair.send(cfg=cfg, plain=plain, slots=slots, bag=bag, tensor=tensor)
    there["cfg"].update(b="theirs", new="theirs")
    there["plain"].b = there["plain"].new = "theirs"
    there["slots"].b = "theirs"
    there["bag"].update(b="theirs")
    there["tensor"].grad = torch.ones(2)
    cfg.update(a="ours", ours=1)
    del cfg["c"]
    plain.a, slots.a, bag["a"] = "ours", "ours", "ours"
    bag.name = "ours"  # type: ignore[attr-defined]
    tensor.requires_grad_(requires_grad=False)
    pair.send(all=[cfg, plain, slots, bag, tensor])
    assert there["cfg"] == {"a": "ours", "b": "theirs", "new": "theirs", "ours": 1}
    assert vars(there["plain"]) == {"a": "ours", "b": "theirs", "new": "theirs"}
    assert (there["slots"].a, there["slots"].b) == ("ours", "theirs")
    assert (there["bag"], there["bag"].name) == ({"a": "ours", "b": "theirs"}, "ours")
    assert (there["tensor"].grad.tolist(), there["tensor"].requires_grad) == ([1, 1], False)


def test_a_dict_has_the_senders_order(pair: Pair) -> None:
    """A dict has the sender's order, and keys that the receiver has added come last."""
    cfg = {"a": 1, "b": 2, "c": 3}
    there = pair.send(cfg=cfg)
    there["theirs"] = 1
    cfg["a"] = cfg.pop("a")
    pair.send(all=[cfg])
    assert [*there] == ["b", "c", "a", "theirs"]


def test_new_objects_within_a_change_get_keys(pair: Pair) -> None:
    """A new object in a change gets a key, and refers to objects that the receiver knows."""
    known, top = [1], {"a": 1}
    there = pair.send(top=top, known=known)
    top["new"] = new = [known, [2]]
    pair.send(other=[5])
    pair.send(top=top)
    assert there["top"]["new"] == [[1], [2]]
    assert there["top"]["new"][0] is there["known"]
    new[1].append(3)
    assert pair.send(found=[new])[0] is there["top"]["new"]
    assert there["top"]["new"] == [[1], [2, 3]]


# --- one message ------------------------------------------------------------------------


def test_values_of_one_message_share_objects(pair: Pair) -> None:
    """An object that several values of a message, or an earlier message, have stays one object."""
    model = torch.nn.Linear(2, 1)
    first = pair.send(model=model, params=[*model.parameters()])
    assert first["params"][0] is first["model"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    there = pair.send(optimizer=optimizer)
    assert there.param_groups[0]["params"][0] is first["model"].weight
    first["model"](torch.ones(2)).sum().backward()
    before = first["model"].weight.clone()
    there.step()
    assert not first["model"].weight.equal(before)


MEMORY: dict[str, Callable[[Any], Any]] = {
    "a slice": lambda x: x[1:3],
    "its data": lambda x: x.detach(),
    "a transposed view": lambda x: x.view(2, 2).T,
    "its array": lambda x: x.detach().numpy(),
    "a column": lambda x: x.view(2, 2)[:, 1],
    "expanded": lambda x: x[1].expand(3),
}


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("case", MEMORY)
def test_views_share_memory_at_the_receiver(case: str, pair: Pair, *, is_first: bool) -> None:
    """A view and its tensor share memory, whichever comes first and whichever side changes it."""
    x = torch.arange(4.0)
    view = MEMORY[case](x)
    values = [("view", view), ("x", x)] if is_first else [("x", x), ("view", view)]
    there = {name: pair.send(**{name: value}) for name, value in values}
    there["x"][1] = 7
    assert 7 in there["view"]
    x.fill_(9)
    pair.send(x=x)
    assert (np.asarray(there["view"]) == 9).all()


@pytest.mark.parametrize("is_first", [False, True])
def test_a_storage_is_the_memory_of_its_tensor(pair: Pair, *, is_first: bool) -> None:
    """A tensor and its storage share memory, whichever of the two is sent first."""
    x = torch.arange(4.0)
    values = [("x", x), ("storage", x.untyped_storage())]
    values = values[::-1] if is_first else values
    there = {name: pair.send(**{name: value}) for name, value in values}
    assert there["storage"].data_ptr() == there["x"].untyped_storage().data_ptr()


def test_an_array_and_its_tensor_share_memory(pair: Pair) -> None:
    """An array, its tensor and a slice of the array show the same memory at the receiver."""
    array = np.arange(4.0)
    tensor, part = torch.from_numpy(array), array[1:]
    there = pair.send(array=array)
    both = pair.send(tensor=tensor, part=part)
    there[1] = 7
    assert (both["tensor"][1].item(), both["part"][0]) == (7, 7)
    array[2] = 5
    pair.send(part=part)
    assert there.tolist() == both["tensor"].tolist() == [0, 1, 5, 3]


def test_an_object_that_the_receiver_lacks_is_an_error(pair: Pair) -> None:
    """The error has the key of the object."""
    x = [1]
    pair.send(x=x)
    frames = pair.sender.send(holder=[x])
    with pytest.raises(NotThere) as caught:
        read(frames, lambda key: None, {})
    assert caught.value.key == pair.sender.links.key_of(x)


def broken() -> None:
    raise LookupError("not here")


class Broken:
    """An instance that cannot be rebuilt."""

    def __reduce__(self) -> Any:
        return broken, ()


def test_a_value_that_cannot_be_rebuilt_is_named(pair: Pair) -> None:
    """The error has the variable and the cause; names that were bound early are unbound."""
    frames = pair.sender.send(first=[1], second=Broken())
    names = {"own": 1}
    with pytest.raises(CannotRebuild) as caught:
        read(frames, lambda key: None, names)
    assert caught.value.name == "second"
    assert isinstance(caught.value.__cause__, LookupError)
    assert names == {"own": 1}


def test_a_message_has_the_keys_of_new_objects(pair: Pair) -> None:
    """A message has the keys of objects that are new to the receiver, and of their memory."""
    x, known = torch.zeros(3), [1]
    pair.send(known=known)
    links = pair.sender.links
    scan = Scan(links, reducer_for({}), {})
    value = [known, x]
    scan.token(value)
    scan.run()
    message = write({"v": value}, [], links, scan.states, pair.sender.known.keys(), {})
    assert message.keys == scan.states.keys() - {links.key_of(known)}
    assert len(message.keys) == 3
    assert message.size >= sum(memoryview(frame).nbytes for frame in message.frames[1:])


def test_definitions_are_changed_in_place(notebook: Any, pair: Pair) -> None:
    """Functions, classes and variables of closures get changes, and stay the same objects."""
    notebook.run(
        "def f(x=1): return x\n"
        "class Net:\n    size = 1\n    old = 1\n    def run(self): return self.size\n"
        "def make():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n"
        "        return n\n    def get(): return n\n    return up, get\n"
        "up, get = make()\nnet = Net()"
    )
    names = notebook.names
    sender = Namespaced(names)
    there = sender.send("f", "net", "up")
    kind, got = type(there["net"]), sender.send("get")["get"]
    assert (there["up"](), got()) == (1, 1)
    f = there["f"]
    notebook.run(
        "f.__defaults__ = (5,)\nf.calls = 3\nNet.size = 7\ndel Net.old\n"
        "Net.run = lambda self: -self.size\n"
        "[up() for _ in range(8)]"
    )
    again = sender.send("f", "net", "up", "get")
    assert (again["f"] is f, f(), f.calls) == (True, 5, 3)
    assert (type(again["net"]) is kind, hasattr(kind, "old"), there["net"].run()) == (
        True,
        False,
        -7,
    )
    assert (got(), there["up"](), got()) == (8, 9, 9)
    notebook.run("f.__code__ = (lambda x=1: x * 100).__code__\ndel f.calls")
    sender.send("f")
    assert (f(), hasattr(f, "calls")) == (500, False)


class Namespaced:
    """A sender of a notebook's variables to a receiver with another namespace."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names, self.theirs = names, dict[str, Any](__name__="__main__")
        self.links, self.known, self.receiver = Links(), dict[int, ObjectState](), Links()

    def send(self, *wanted: str) -> dict[str, Any]:
        """Return the values of variables as the receiver has them after they were sent."""
        values = {name: self.names[name] for name in wanted}
        scan = Scan(self.links, reducer_for(self.names), self.names)
        for value in values.values():
            scan.token(value)
        scan.run()
        updates = [
            update_of(self.links.by_key[key], state, before, state.changed_since(before), scan)
            for key, state in scan.states.items()
            if (before := self.known.get(key)) is not None and before != state
        ]
        message = write(values, updates, self.links, scan.states, self.known.keys(), self.names)
        self.known |= scan.states
        frames = [bytes(memoryview(frame)) for frame in message.frames]
        arrived = read(frames, self.receiver.find, self.theirs)
        for key, tool, value in arrived.objects:
            self.receiver.add(value, tool, key)
        token = Scan(self.receiver, reducer_for(self.theirs), self.theirs, adds=False).token
        for key, tool, data in arrived.updates:
            apply(self.receiver.find(key), tool, data, token)
        return arrived.values
