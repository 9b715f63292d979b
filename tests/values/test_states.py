"""Tests of `nbdist.values.states` and `scan`: which change of an object changes which state."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from nbdist.values import scan as scanning
from nbdist.values.linked import reducer_for
from nbdist.values.links import Links
from nbdist.values.scan import Scan
from nbdist.values.states import CLASS, HEAD_PART, ObjectState, is_different, keys_in


class Process:
    """The objects of a process, whose states are read again and again."""

    def __init__(self, namespace: dict[str, Any] | None = None) -> None:
        self.links, self.namespace = Links(), namespace if namespace is not None else {}

    def scan(self, value: Any, **options: Any) -> Scan:
        """Read the states of all objects that a value leads to."""
        scan = Scan(self.links, reducer_for(self.namespace), self.namespace, **options)
        scan.token(value)
        scan.run()
        return scan

    def changes(self, value: Any, change: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
        """Return the objects that a change changes, with their parts, None for the whole object.

        Also check that nothing counts as changed before, and that known states make no difference.
        """
        before = self.scan(value).states
        assert self.scan(value).states == before, "nothing has changed yet"
        for _ in range(2):  # objects get samples, which then suffice
            assert self.scan(value, before=before.get).states == before
        change(value)
        after = self.scan(value, before=before.get).states
        assert self.scan(value).states == after, "known states must change no state"
        return [
            (self.links.find(key), after[key].changed_since(state))
            for key, state in before.items()
            if key in after and after[key] != state
        ]


@pytest.fixture
def process() -> Process:
    return Process()


class Plain:
    """An instance with attributes."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def made(self) -> int:
        """Return a default."""
        return 0


class Slots:
    """An instance with slots, of which some are empty."""

    __slots__ = ("a", "b")


class Both(Slots):
    """An instance with slots and attributes."""


class Chosen:
    """An instance whose `__getstate__` chooses what is pickled."""

    def __init__(self) -> None:
        self.kept, self.cache = [1], 1

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": self.kept}


class Reduced:
    """An instance with a `__reduce__` of its own."""

    def __init__(self, number: int = 1) -> None:
        self.number, self.parts = number, [1]

    def __reduce__(self) -> Any:
        return Reduced, (self.number,), {"parts": self.parts}


class Bag(dict[str, Any]):
    """A dict with attributes."""


class Row(list[Any]):
    """A list with attributes."""


class Pair(tuple[Any, ...]):
    """A subclass of tuple."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Frozen:
    parts: list[int]


class Color(enum.Enum):
    RED = 1


Point = namedtuple("Point", "x y")


def with_slots() -> Slots:
    slots = Slots()
    slots.a = 1
    return slots


def counter() -> Callable[[], int]:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(3))


TABLE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "dict, a new key": (lambda: {"a": 1}, lambda v: v.update(b=2), {"b"}),
    "dict, a value": (lambda: {"a": 1, "b": 2}, lambda v: v.update(b=3), {"b"}),
    "dict, a key that goes": (lambda: {"a": 1, "b": 2}, lambda v: v.pop("a"), {"a"}),
    "dict, True for 1": (lambda: {"a": 1}, lambda v: v.update(a=True), {"a"}),
    "dict, 1.0 for 1": (lambda: {"a": 1}, lambda v: v.update(a=1.0), {"a"}),
    "dict, -0.0 for 0.0": (lambda: {"a": 0.0}, lambda v: v.update(a=-0.0), {"a"}),
    "dict, a long text": (lambda: {"a": "x" * 999}, lambda v: v.update(a="x" * 998), {"a"}),
    "dict, long bytes": (lambda: {"a": b"x" * 999}, lambda v: v.update(a="x" * 999), {"a"}),
    "dict, another order": (lambda: {"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a")), set()),
    "dict, many entries": (lambda: dict.fromkeys(range(5000)), lambda v: v.update({7: 1}), None),
    "dict, parts in other places": (
        lambda: {"a": [1], "b": [2]},
        lambda v: v.update(a=v["b"], b=v["a"]),
        {"a", "b"},
    ),
    "list, parts in other places": (lambda: [[1], [2]], lambda v: v.reverse(), None),
    "dict, a tuple as key": (lambda: {(1, "a"): 1}, lambda v: v.update({(1, "a"): 2}), "any"),
    "OrderedDict": (lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end("a"), set()),
    "defaultdict, factory": (
        lambda: defaultdict(list),
        lambda v: setattr(v, "default_factory", dict),
        {("default_factory",)},
    ),
    "a dict's attribute": (Bag, lambda v: setattr(v, "name", 1), {("attribute", "name")}),
    "a dict's own item": (Bag, lambda v: v.update(a=1), {"a"}),
    "list": (lambda: [1], lambda v: v.append(2), None),
    "list, another order": (lambda: [1, 2], lambda v: v.reverse(), None),
    "list, True for 1": (lambda: [1], lambda v: v.insert(0, v.pop() == 1), None),
    "a list's attribute": (Row, lambda v: setattr(v, "name", 1), None),
    "deque": (lambda: deque([1], 3), lambda v: v.append(2), None),
    "set": (lambda: {1}, lambda v: v.add(2), None),
    "set, True for 1": (lambda: {1}, lambda v: v.add(v.pop() == 1), None),
    "bytearray": (lambda: bytearray(9), lambda v: v.__setitem__(3, 1), None),
    "instance": (lambda: Plain(a=1), lambda v: setattr(v, "a", 2), {"a"}),
    "instance, an attribute that goes": (lambda: Plain(a=1), lambda v: delattr(v, "a"), {"a"}),
    "instance, class": (
        lambda: Plain(a=1),
        lambda v: setattr(v, "__class__", type("Plain", (Plain,), {})),
        {CLASS},
    ),
    "instance, a part's class": (
        lambda: Plain(a=[], b=()),
        lambda v: setattr(v, "a", ()),
        {"a"},
    ),
    "module, a hook": (
        lambda: torch.nn.Linear(1, 1),
        lambda v: v.register_forward_hook(lambda *_: None),
        "any",
    ),
    "module, another empty table": (
        lambda: torch.nn.Linear(1, 1),
        lambda v: vars(v).update(_forward_hooks=set()),
        {"_forward_hooks"},
    ),
    "module, a number for an empty table": (
        lambda: torch.nn.Linear(1, 1),
        lambda v: vars(v).update(_forward_hooks=0),
        {"_forward_hooks"},
    ),
    "module, a tuple": (
        lambda: torch.nn.Conv2d(1, 1, 1),
        lambda v: setattr(v, "stride", (2, 2)),
        {"stride"},
    ),
    "module, another order": (
        lambda: torch.nn.Linear(1, 1),
        lambda v: vars(v).update(in_features=vars(v).pop("in_features")),
        set(),
    ),
    "module, a weight": (
        lambda: torch.nn.Linear(1, 1)._parameters,
        lambda v: v.update(weight=parameter()),
        {"weight"},
    ),
    "slots": (with_slots, lambda v: setattr(v, "b", 2), {"b"}),
    "slots, one that becomes empty": (with_slots, lambda v: delattr(v, "a"), {"a"}),
    "slots and attributes": (Both, lambda v: (setattr(v, "a", 1), setattr(v, "c", 1)), {"a", "c"}),
    "__getstate__": (Chosen, lambda v: setattr(v, "kept", 2), {"kept"}),
    "__reduce__, arguments": (Reduced, lambda v: setattr(v, "number", 2), {HEAD_PART}),
    "__reduce__, state": (Reduced, lambda v: setattr(v, "parts", None), {"state"}),
    "tensor": (
        lambda: torch.zeros(3),
        lambda v: setattr(v, "requires_grad", True),
        {"requires_grad"},
    ),
    "tensor, another memory": (
        lambda: torch.zeros(3),
        lambda v: setattr(v, "data", torch.zeros(3)),
        {"data"},
    ),
    "tensor, shape": (lambda: torch.zeros(4), lambda v: v.resize_(2, 2), {"data"}),
    "tensor, attribute": (lambda: torch.zeros(3), lambda v: setattr(v, "name_", 1), {".name_"}),
    "parameter, grad": (parameter, lambda v: setattr(v, "grad", torch.zeros(3)), {"grad"}),
    "array, fixed": (
        lambda: np.zeros(3),
        lambda v: setattr(v.flags, "writeable", False),
        {"writeable"},
    ),
    "array, shape": (lambda: np.zeros(4), lambda v: v.resize((2, 2), refcheck=False), {HEAD_PART}),
    "array of objects": (
        lambda: np.array([[1], None], object),
        lambda v: v.__setitem__(1, 2),
        {"state"},
    ),
    "DataFrame, a new column": (
        lambda: pd.DataFrame({"a": [1, 2]}),
        lambda v: v.insert(1, "b", [3, 4]),
        "any",
    ),
    "DataFrame, index": (
        lambda: pd.DataFrame({"a": [1, 2]}),
        lambda v: setattr(v, "index", ["x", "y"]),
        "any",
    ),
    "Series, name": (lambda: pd.Series([1.0]), lambda v: setattr(v, "name", "s"), "any"),
    "numpy's Generator": (lambda: np.random.default_rng(0), lambda v: v.random(), "any"),
    "RandomState": (lambda: np.random.RandomState(0), lambda v: v.rand(), "any"),
    "torch's Generator": (torch.Generator, lambda v: torch.rand(1, generator=v), "any"),
    "iterator": (lambda: iter([1, 2]), next, "any"),
    "partial": (
        lambda: functools.partial(print, 1),
        lambda v: v.keywords.update(end=""),
        "any",
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_a_change_changes_one_state(case: str, process: Process) -> None:
    """Only the changed object has a new state, in the listed parts; "any" allows any change."""
    make, change, parts = TABLE[case]
    value = make()
    outer = [value, [1], {"of": value}]
    changes = process.changes(outer, lambda _: change(value))
    if parts == "any":
        assert changes
        return
    assert [(each[0] is value, each[1]) for each in changes] == [(True, parts)]


INSIDE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a list": (lambda: [[1]], lambda v: v[0]),
    "a tuple": (lambda: ((1, [1]),), lambda v: v[0][1]),
    "a frozenset": (lambda: frozenset({Plain(a=1)}), lambda v: next(iter(v))),
    "a dict's values": (lambda: {"a": [1]}, lambda v: v["a"]),
    "a dict's keys": (lambda: {Plain(a=1): 1}, lambda v: next(iter(v))),
    "a set": (lambda: {Plain(a=1)}, lambda v: next(iter(v))),
    "a named tuple": (lambda: Point(1, [1]), lambda v: v.y),
    "a frozen dataclass": (lambda: Frozen([1]), lambda v: v.parts),
    "a bound method": (lambda: Plain(a=1).made, lambda v: v.__self__),
    "a method of a list": (lambda: [1].append, lambda v: v.__self__),
    "a method": (lambda: types.MethodType(len, Plain(a=1)), lambda v: v.__self__),
    "a partial": (lambda: functools.partial(print, [1]), lambda v: v.args[0]),
    "a weak reference": (lambda: (lambda x: [x, weakref.ref(x)])(Plain(a=1)), lambda v: v[1]()),
    "a slice": (lambda: slice([1]), lambda v: v.stop),
    "a deque": (lambda: deque([[1]]), lambda v: v[0]),
    "a default": (lambda: defaultdict(Plain(a=1).made), lambda v: v.default_factory.__self__),
    "an instance": (lambda: Plain(part=[1]), lambda v: v.part),
    "a state of its own": (Chosen, lambda v: v.kept),
    "a way of its own": (Reduced, lambda v: v.parts),
    "a tensor": (lambda: _with(torch.zeros(1), name_=[1]), lambda v: v.name_),
    "a module": (lambda: _with(torch.nn.Linear(1, 1), extra=[1]), lambda v: v.extra),
    "an array of objects": (lambda: np.array([[1], None], object), lambda v: v[0]),
    "a namespace": (lambda: types.SimpleNamespace(part=[1]), lambda v: v.part),
    "a class with slots": (lambda: _with(Slots(), a=[1]), lambda v: v.a),
    "itself": (lambda: _loop(), lambda v: v),
}


def _with(value: Any, **parts: Any) -> Any:
    for name, part in parts.items():
        setattr(value, name, part)
    return value


def _loop() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize("case", INSIDE)
def test_a_change_inside_changes_the_part_alone(case: str, process: Process) -> None:
    """The object that contains the part keeps its state, whatever kind of object it is."""
    make, find = INSIDE[case]
    value = make()
    part = find(value)
    change = part.append if isinstance(part, list) else partial_setattr(part)
    (found,) = process.changes(value, lambda _: change(2))
    assert found[0] is part


def partial_setattr(part: Any) -> Callable[[Any], None]:
    return lambda value: setattr(part, "a", value)


EQUAL: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a set in another order": (
        lambda: {8, 0, "a"},
        lambda v: (v.clear(), v.update(["a", 0, 8])),
    ),
    "NaN": (lambda: [float("nan")], lambda v: v.__setitem__(0, float("nan"))),
    "an equal text": (lambda: {"a": "x" * 99}, lambda v: v.update(a="".join(["x"] * 99))),
    "an equal tuple": (lambda: {"a": (1, 2)}, lambda v: v.update(a=tuple(range(1, 3)))),
    "an equal path": (lambda: [Path("/a")], lambda v: v.__setitem__(0, Path("/a"))),
    "an equal date": (
        lambda: [datetime.date(2020, 1, 1)],
        lambda v: v.__setitem__(0, datetime.date(2020, 1, 1)),
    ),
    "a number of numpy's": (lambda: [np.float32(1)], lambda v: v.__setitem__(0, np.float32(1))),
    "there and back": (lambda: [1], lambda v: (v.append(2), v.pop())),
    "a dict that was as it is": (lambda: {"a": 1}, lambda v: (v.update(b=1), v.pop("b"))),
    "a cache that is not sent": (Chosen, lambda v: setattr(v, "cache", 2)),
    "an array's element, and back": (lambda: np.zeros(3), lambda v: v.__isub__(0)),
    "a DataFrame that was asked": (
        lambda: pd.DataFrame({"a": [1, 2], "s": ["x", "y"]}),
        lambda v: (v.sum(numeric_only=True), v["a"], v.describe(), repr(v)),
    ),
    "a model that has computed": (
        lambda: torch.nn.Linear(2, 2),
        lambda v: v(torch.ones(2)),
    ),
    "a model with another empty table": (
        lambda: torch.nn.Linear(2, 2),
        lambda v: vars(v).update(_forward_hooks=OrderedDict()),
    ),
    "a class that was used": (lambda: Plain, lambda v: v().__eq__(1)),
    "a member of an enumeration": (lambda: [Color.RED], lambda v: Color(1)),
}


@pytest.mark.parametrize("case", EQUAL)
def test_equal_values_and_hidden_changes_are_no_change(case: str, process: Process) -> None:
    """No state changes if a value is replaced by an equal one, or if users cannot see a change."""
    make, change = EQUAL[case]
    assert process.changes(make(), change) == []


UNCHANGED: dict[str, Callable[[], Any]] = {
    "a dict": lambda: {"a": 1, "b": [1], "c": (1, "x")},
    "an ordered dict": lambda: OrderedDict(a=1),
    "a list": lambda: [1, None, "x", [2]],
    "an instance": lambda: Plain(a=1, b=[1]),
    "slots": with_slots,
    "a module": lambda: torch.nn.Conv2d(1, 1, 1),
    "a tensor": lambda: torch.zeros(3),
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_an_unchanged_object_keeps_its_known_state(
    case: str, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scans return the known state of an unchanged object; from the third on they make no state."""
    value = UNCHANGED[case]()
    before = process.scan(value).states
    for _ in range(2):
        after = process.scan(value, before=before.get).states
        key = process.links.key_of(value)
        assert key is not None
        assert after[key] is before[key]
        assert after.keys() == before.keys()
        for name in ("_state", "_unit"):
            monkeypatch.delattr(Scan, name, raising=False)


def test_a_reference_to_an_empty_dict_changes_its_module(process: Process) -> None:
    """A module has changed if a variable refers to one of its empty dicts for the first time.

    The dict then is an object with a key in the module's state, and no longer "empty".
    """
    module = torch.nn.Linear(1, 1)
    before = process.scan(module).states
    process.scan(module, before=before.get)
    both = [module._forward_hooks, module]
    after = process.scan(both, before=before.get).states
    key = process.links.key_of(module)
    assert key is not None
    assert after[key].changed_since(before[key]) == {"_forward_hooks"}


def test_no_known_state_keeps_an_object_alive(process: Process) -> None:
    """A container's known state keeps no part alive: the state does not hold parts with a key."""
    value = {"part": Plain(a=1), "number": 1}
    before = process.scan(value).states
    process.scan(value, before=before.get)
    part = weakref.ref(value["part"])
    value.clear()
    assert part() is None
    assert before


def test_a_random_forest_changes_by_fit_only(process: Process) -> None:
    """A random forest of scikit-learn has the same state after `predict`, and not after `fit`."""
    ensemble = pytest.importorskip("sklearn.ensemble")
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10) % 2
    forest = ensemble.RandomForestClassifier(3, random_state=0).fit(x, y)
    assert process.changes(forest, lambda v: v.predict(x)) == []
    assert process.changes(forest, lambda v: v.fit(x, 1 - y))


# --- definitions ------------------------------------------------------------------------

DEFINED = """
limit = 3
def f(x=[1], *, y=2):
    "Words."
    return x, limit
class Net:
    size = 1
    shared = []
    def forward(self): return self.size
def make():
    count = 0
    def up():
        nonlocal count
        count += 1
        return count
    def get(): return count
    return up, get
up, get = make()
net = Net()
"""

DEFINITIONS: dict[str, tuple[str, str, Any]] = {
    "a default": ("f", "f.__defaults__ = (2,)", {"__defaults__"}),
    "a keyword's default": ("f", "f.__kwdefaults__['y'] = 3", {"__kwdefaults__"}),
    "an attribute": ("f", "f.calls = 1", {".calls"}),
    "its code": ("f", "f.__code__ = (lambda x, y=1: 5).__code__", {"__code__"}),
    "its words": ("f", "f.__doc__ = 'Others.'", {"__doc__"}),
    "a class's attribute": ("Net", "Net.size = 2", {"size"}),
    "a new attribute": ("Net", "Net.more = 2", {"more"}),
    "an attribute that goes": ("Net", "del Net.size", {"size"}),
    "a method": ("Net", "Net.forward = lambda self: 2", {"forward"}),
    "a variable of closures": ("up.__closure__[0]", "up()", None),
    "a list of a class": ("Net.shared", "Net.shared.append(1)", None),
}


@pytest.fixture
def defined(notebook: Any) -> Process:
    notebook.run(DEFINED)
    return Process(notebook.names)


@pytest.mark.parametrize("case", DEFINITIONS)
def test_a_changed_definition_changes_its_state_alone(case: str, defined: Process) -> None:
    """Objects that refer to a changed function, class or variable keep their states."""
    name, change, parts = DEFINITIONS[case]
    names = defined.namespace
    value = eval(name, names)
    whole = [names["f"], names["net"], names["up"], names["get"]]
    changes = defined.changes(whole, lambda _: exec(change, names))
    assert [(each[0] is value, each[1]) for each in changes] == [(True, parts)]


def test_names_that_functions_read_are_no_state(defined: Process) -> None:
    """The notebook's variables that a function reads are reported beside its state."""
    names = defined.namespace
    scan = defined.scan(names["f"])
    key = defined.links.key_of(names["f"])
    assert scan.needs[key] & names.keys() == {"limit"}
    assert defined.changes(names["f"], lambda _: names.update(limit=[4])) == []


def test_imported_objects_have_no_key(process: Process) -> None:
    """Functions, classes and modules of packages have no key, nor do numbers and texts."""
    for value in (len, np.sum, json_dumps(), torch.nn.Linear, Path, types, 5, "x", None, (1, "a")):
        scan = process.scan(value)
        assert (scan.states, keys_in(scan.token(value))) == ({}, [])
    assert len(process.links) == 0


def json_dumps() -> Any:
    import json

    return json.dumps


# --- memory -----------------------------------------------------------------------------

SHOWN: dict[str, Callable[[], tuple[Any, Any]]] = {
    "two views": lambda: (lambda x: (x[:3], x[2:]))(torch.zeros(5)),
    "tied weights": lambda: (lambda p: (p, p.view(3, 1)))(parameter()),
    "an array and its tensor": lambda: (lambda x: (torch.from_numpy(x), x))(np.zeros(4)),
    "a tensor and its array": lambda: (lambda x: (x, x.numpy()))(torch.zeros(4)),
    "rows and columns": lambda: (lambda x: (x[0], x[:, 0]))(torch.zeros(3, 3)),
    "an array from behind": lambda: (lambda x: (x, x[::-1]))(np.zeros(4)),
    "a tensor and its `.data`": lambda: (lambda p: (p, p.data))(parameter()),
}


@pytest.mark.parametrize("case", SHOWN)
def test_memory_has_a_state_of_its_own(case: str, process: Process) -> None:
    """A changed element changes the state of the memory alone, to which all views refer."""
    first, second = SHOWN[case]()
    both = [first, second]
    scan = process.scan(both)
    blocks = [
        {key for key in scan.states[process.links.key_of(each)].children if key in scan.blocks}
        for each in (first, second)
    ]
    assert all(len(each) == 1 for each in blocks)
    assert blocks[0] == blocks[1]

    before = scan.states
    with torch.no_grad():
        first[0] = 7
    after = process.scan(both).states
    assert {key for key in before if after[key] != before[key]} == blocks[0]


def test_trusted_samples_save_reading(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `trusts_samples` memory is not read as a whole if its samples are as before.

    Of memory above WHOLE_LIMIT only samples are read in any case.
    """
    monkeypatch.setattr(scanning, "QUICK_BYTES", 1 << 10)
    read: list[int] = []
    digest = scanning.digest_bytes

    def digest_bytes(data: Any) -> str:
        read.append(memoryview(data).nbytes)
        return digest(data)

    monkeypatch.setattr(scanning, "digest_bytes", digest_bytes)
    array = np.zeros(1 << 20, np.uint8)
    before = process.scan(array).states
    assert max(read) == array.nbytes
    read.clear()
    trusting = {"before": before.get, "trusts_samples": True}
    assert process.scan(array, **trusting).states == before
    assert max(read, default=0) < 1000
    assert process.scan(array, before=before.get).states == before
    assert max(read) == array.nbytes
    array[:] = 1
    after = process.scan(array, **trusting)
    (block,) = after.blocks
    assert after.states[block] != before[block]
    monkeypatch.setattr(scanning, "WHOLE_LIMIT", 1 << 10)
    read.clear()
    sampled = process.scan(array).states[block]
    array[:] = 2
    assert process.scan(array).states[block] != sampled
    assert max(read, default=0) < 1000


def test_a_rank_reads_no_memory_and_gives_no_keys(process: Process) -> None:
    """A rank reads only the requested objects, and gives a new part no key."""
    value = [torch.zeros(3), {"a": [1]}]
    before = process.scan(value)
    rank = process.scan(value, adds=False)
    assert len(process.links) == len(before.states)
    assert rank.states == {}, "without `read` nothing is read"
    scan = Scan(process.links, reducer_for({}), {}, adds=False)
    scan.read([process.links.by_id[id(value)]])
    assert [*scan.states] == [process.links.key_of(value)]
    value.append([2])
    again = Scan(process.links, reducer_for({}), {}, adds=False)
    again.read([process.links.by_id[id(value)]])
    assert again.states != scan.states
    assert process.links.key_of(value[-1]) is None


# --- methods of users are not called ----------------------------------------------------


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a user's method was called")


UNASKED = (
    "__eq__", "__ne__", "__bool__", "__len__", "__hash__", "__iter__", "__contains__",
    "__getitem__", "__repr__", "__str__", "__call__", "__lt__", "items", "keys", "values", "get",
)  # fmt: skip


@pytest.mark.parametrize("base", [object, dict, list, OrderedDict, deque, set])
def test_no_method_of_a_user_is_called(base: type, process: Process) -> None:
    """A user's class may override Python's methods; states are found without calling them."""
    hostile = type("Hostile", (base,), dict.fromkeys(UNASKED, _never))
    value = hostile()
    value.part = [1]
    holder: list[Any] = [value]
    (found,) = process.changes(holder, lambda _: value.part.append(2))
    assert found[0] is value.part
    (found,) = process.changes(holder, lambda _: setattr(value, "other", 1))
    assert found[0] is value


def test_no_property_of_a_user_is_read(process: Process) -> None:
    """The parts of an instance are its own attributes: no property, no `__getattr__` is called."""

    class Lazy:
        part = property(_never)
        __getattr__ = _never
        __dir__ = _never

        def __init__(self) -> None:
            self.kept = 1

    process.scan(Lazy())
    (found,) = process.changes(value := Plain(kept=1), lambda _: setattr(value, "kept", 2))
    assert found[1] == {"kept"}


def test_errors_of_a_users_class_come_through(process: Process) -> None:
    """The caller gets an error of `__reduce__`, or of a type that cannot be pickled."""

    class Refusing:
        def __reduce__(self) -> Any:
            raise LookupError("not now")

    with pytest.raises(LookupError, match="not now"):
        process.scan([Refusing()])
    with pytest.raises(TypeError, match="cannot pickle"):
        process.scan([threading.Lock()])


def test_tokens_differ_by_type_and_sign() -> None:
    """Tokens of equal values differ if their types do, or the signs of their zeros."""
    for one, other in ((1, True), (1, 1.0), (0.0, -0.0), ("1", b"1"), (None, 0), ((1,), (True,))):
        assert is_different(one, other)
        assert not is_different(one, one)
    nan = float("nan")
    assert not is_different(nan, float("nan"))
    assert ObjectState({"a": 1}) == ObjectState({"a": 1}) != ObjectState({"a": True})
    assert ObjectState({"a": 0.0}).changed_since(ObjectState({"a": -0.0, "b": 1})) == {"a", "b"}
    assert ObjectState(None, (), b"1").changed_since(ObjectState({"a": 1})) is None
    assert keys_in(("t", (..., 5), ("t", (..., 6)), ..., 7)) == [5, 6]


def test_a_dataframe_changes_as_a_whole(process: Process) -> None:
    """A DataFrame has changed if its contents have, and not if pandas stores them differently."""
    frame = pd.DataFrame({"a": [1, 2]})
    frame["b"] = [3, 4]
    assert process.changes(frame, lambda frame: (frame.corr(), frame.values.sum())) == []
    for change in (
        lambda frame: frame.loc.__setitem__((0, "a"), 9),
        lambda frame: setattr(frame, "columns", ["c", "d"]),
        lambda frame: frame.attrs.update(k=1),
        lambda frame: frame.__setitem__("e", 1.5),
    ):
        ((changed, parts),) = process.changes(frame, change)
        assert (changed is frame, parts) == (True, None)
