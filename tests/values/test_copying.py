"""Tests of `nbdist.values.copying`: copies of values into objects that exist already."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nbdist.values.copying import copy_into


class Plain:
    """An instance with attributes."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


class Net(torch.nn.Module):
    """Two layers that share a weight, and a buffer."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(size, size), torch.nn.Linear(size, size)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.zeros(1))


def copied(there: dict[str, Any], new: dict[str, Any], *others: tuple[Any, Any]) -> set[str]:
    """Copy new variables into old ones; return the names that could not be copied in place.

    `others` has pairs of an old and a new object to be copied with the variables.
    """
    pairs = {name: (there[name], value) for name, value in new.items() if name in there}
    instead, failed = copy_into(pairs, others, *new.values())
    for name, value in new.items():
        there[name] = value if name in failed else instead.get(id(value), value)
    return failed


KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "dict": (lambda: {"a": 1, "b": 2}, lambda: {"b": 3, "c": [4]}),
    "OrderedDict": (lambda: OrderedDict(a=1), lambda: OrderedDict(b=2, a=1)),
    "defaultdict": (lambda: defaultdict(list, a=1), lambda: defaultdict(list, a=2)),
    "list": (lambda: [1, 2, 3], lambda: [4]),
    "deque": (lambda: deque([1], 3), lambda: deque([4, 5], 3)),
    "set": (lambda: {1}, lambda: {2, 3}),
    "bytearray": (lambda: bytearray(b"abc"), lambda: bytearray(b"d")),
    "array": (lambda: np.zeros(3), lambda: np.arange(3.0)),
    "tensor": (lambda: torch.zeros(3), lambda: torch.arange(3.0)),
    "parameter": (
        lambda: torch.nn.Parameter(torch.zeros(2)),
        lambda: torch.nn.Parameter(torch.ones(2)),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_existing_object_gets_the_new_contents(kind: str) -> None:
    """An object with new contents stays the same object, at the top and inside of others."""
    for wrap in (lambda v: v, lambda v: [v], lambda v: {"of": v}, lambda v: Plain(of=v)):
        old, new = KINDS[kind][0](), KINDS[kind][1]()
        expected = copy.deepcopy(new)
        there = {"x": wrap(old)}
        top = there["x"]
        assert copied(there, {"x": wrap(new)}) == set()
        assert there["x"] is top
        if isinstance(expected, np.ndarray | torch.Tensor):
            assert np.array_equal(old.tolist(), expected.tolist())
        else:
            assert old == expected


def test_a_new_tuple_has_the_existing_parts() -> None:
    """A copied tuple is a new tuple, in which a list is the existing list with new contents."""
    part = [1]
    there = {"x": {"t": (part, 2)}}
    assert copied(there, {"x": {"t": ([5], 3)}}) == set()
    assert there["x"]["t"] == ([5], 3)
    assert there["x"]["t"][0] is part
    top = {"x": (part, 2)}
    assert copied(top, {"x": ([6], 4)}) == set()
    assert top["x"] == ([6], 4)
    assert top["x"][0] is part


def test_a_model_stays_linked_with_its_optimizer() -> None:
    """Parameters, gradients and buffers are copied, and the optimizer keeps the parameters."""
    there: dict[str, Any] = {"net": Net()}
    optimizer = torch.optim.Adam(there["net"].parameters())
    source = Net()
    other = torch.optim.Adam(source.parameters())
    for net, steps in ((there["net"], optimizer), (source, other)):
        net.second(net.first(torch.ones(2))).sum().backward()
        steps.step()
    source.steps += 7
    source.eval()
    weight = there["net"].first.weight
    wrapper = [there["net"]]
    assert copied(there, {"net": source}) == set()
    net = there["net"]
    assert net is wrapper[0] is not source
    assert net.first.weight is net.second.weight is weight is optimizer.param_groups[0]["params"][0]
    assert weight.equal(source.first.weight)
    assert weight.grad is not None
    assert weight.grad.equal(source.first.weight.grad)
    assert (net.steps.item(), net.training) == (7, False)


def test_a_model_and_its_optimizer_are_copied_together() -> None:
    """The copied state belongs to the existing parameters, which the optimizer still trains."""
    net, source = Net(), Net()
    there: dict[str, Any] = {"net": net, "opt": torch.optim.Adam(net.parameters())}
    other = torch.optim.Adam(source.parameters(), lr=0.5)
    source.second(source.first(torch.ones(2))).sum().backward()
    other.step()
    optimizer = there["opt"]
    assert copied(there, {"net": source, "opt": other}) == set()
    assert there["opt"] is optimizer
    assert {id(each) for each in optimizer.state} == {id(each) for each in net.parameters()}
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(
        a is b for a, b in zip(optimizer.param_groups[0]["params"], net.parameters(), strict=True)
    )
    before = net.first.weight.clone()
    net.second(net.first(torch.ones(2))).sum().backward()
    optimizer.step()
    assert not net.first.weight.equal(before)


def test_an_optimizer_copied_alone_keeps_its_parameters() -> None:
    """A copied optimizer refers to the existing parameters, which get the new values."""
    net, source = Net(), Net()
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1, momentum=0.9)
    there: dict[str, Any] = {"net": net}
    pairs = [*zip(net.parameters(), source.parameters(), strict=True)]
    with torch.no_grad():
        source.first.weight.fill_(3)
    assert copied(there, {"opt": optimizer}, *pairs) == set()
    assert there["opt"] is optimizer
    assert optimizer.param_groups[0]["params"][0] is net.first.weight
    assert (net.first.weight == 3).all()


OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "another shape": (lambda: torch.zeros(2), lambda: torch.zeros(3)),
    "another type": (lambda: torch.zeros(2), lambda: torch.zeros(2, dtype=torch.float64)),
    "another layout": (lambda: torch.zeros(2, 2), lambda: torch.zeros(2, 2).to_sparse()),
    "another class": (lambda: torch.zeros(2), lambda: [1]),
    "a model of another size": (Net, lambda: Net(3)),
    "other layers": (Net, lambda: torch.nn.Linear(2, 2)),
    "one layer more": (
        lambda: torch.nn.Sequential(torch.nn.Linear(1, 1)),
        lambda: torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()),
    ),
    "a model within": (lambda: {"a": {"of": Net()}}, lambda: {"a": {"of": Net(3)}}),
    "an array of another size": (lambda: np.zeros(2), lambda: np.zeros(3)),
    "a number": (lambda: 1, lambda: 2),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_value_of_another_structure_replaces_the_old(case: str) -> None:
    """The variable is bound to the new value; neither the old nor the new value is changed."""
    old, new = OTHERS[case][0](), OTHERS[case][1]()
    before, after = copy.deepcopy(old), copy.deepcopy(new)
    there = {"x": old}
    assert copied(there, {"x": new}) == {"x"}
    assert there["x"] is new
    for kept, was in ((old, before), (new, after)):
        assert shown(kept) == shown(was)


def shown(value: Any) -> Any:
    """Return the contents of a value in a form that can be compared."""
    if isinstance(value, torch.nn.Module):
        return [each.tolist() for each in value.state_dict().values()]
    if isinstance(value, torch.Tensor):
        return value.to_dense().tolist(), value.dtype, value.layout
    if isinstance(value, np.ndarray):
        return value.tolist()
    return {k: shown(v) for k, v in value.items()} if isinstance(value, dict) else value


def test_an_optimizer_is_replaced_with_its_model() -> None:
    """An optimizer is replaced if its model is, and never has another model's parameters."""
    net, source = Net(), Net(3)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, source))
    there: dict[str, Any] = {"net": net, "opt": optimizer, "cfg": {"lr": 1}}
    cfg = there["cfg"]
    assert copied(there, {"net": source, "opt": other, "cfg": {"lr": 2}}) == {"net", "opt"}
    assert (there["net"], there["opt"]) == (source, other)
    assert other.param_groups[0]["params"][0] is source.first.weight
    assert optimizer.param_groups[0]["params"][0] is net.first.weight
    assert (there["cfg"] is cfg, cfg) == (True, {"lr": 2})


def test_a_list_of_parameters_is_replaced_with_its_model() -> None:
    """The list is replaced with the model, though each of its parameters could be copied."""
    net, source = (torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2))
    source.append(torch.nn.ReLU())
    there: dict[str, Any] = {"net": net, "params": [*net.parameters()]}
    before = net[0].weight.clone()
    new = {"net": source, "params": [*source.parameters()]}
    assert copied(there, new) == {"net", "params"}
    assert there["params"][0] is there["net"][0].weight is source[0].weight
    assert net[0].weight.equal(before)


def test_new_parts_refer_to_existing_objects() -> None:
    """New containers and instances refer to the existing model, at any depth."""
    net, source = Net(), Net()
    there: dict[str, Any] = {"net": net, "held": {}}
    held = there["held"]
    new = {"deep": [{"of": (source, Plain(net=source))}]}
    assert copied(there, {"net": source, "held": new}) == set()
    assert there["held"] is held
    model, plain = held["deep"][0]["of"]
    assert model is plain.net is net


def test_equal_plain_values_do_not_hinder_copying() -> None:
    """Values are copied in place though equal numbers, texts, None or True are elsewhere too."""
    for old, new in ((1, 2), ("a", "b"), (None, 2), (False, True), ((), (1,))):
        there: dict[str, Any] = {"x": {"same": new, "other": old}, "y": [old]}
        x, y = there["x"], there["y"]
        assert copied(there, {"x": {"same": new, "other": new}, "y": [new]}) == set()
        assert (there["x"] is x, there["y"] is y) == (True, True)
        assert (x, y) == ({"same": new, "other": new}, [new])
    net, source = torch.nn.BatchNorm1d(1).eval(), torch.nn.BatchNorm1d(1).train()
    there = {"net": net}
    assert copied(there, {"net": source}) == set()
    assert (there["net"] is net, net.training) == (True, True)


def test_a_list_that_contains_itself_is_copied_once() -> None:
    """The existing list gets the new contents, and contains itself."""
    old: list[Any] = [1]
    old.append(old)
    new: list[Any] = [2]
    new.append(new)
    there = {"x": old}
    assert copied(there, {"x": new}) == set()
    assert there["x"] is old
    assert (old[0], old[1] is old, len(old)) == (2, True, 2)


def test_two_objects_with_one_new_value_become_one() -> None:
    """If two parts have the same new object, both names lead to a single object afterwards."""
    shared = [9]
    a, b = [1], [2]
    there = {"x": {"a": a, "b": b}}
    copied(there, {"x": {"a": shared, "b": shared}})
    assert there["x"]["a"] is there["x"]["b"]
    assert there["x"]["a"] == [9]


def test_a_read_only_array_is_replaced() -> None:
    """A variable with a read-only array gets the new contents in a new array."""
    old = np.zeros(3)
    old.setflags(write=False)
    there = {"x": old}
    copied(there, {"x": np.arange(3.0)})
    assert there["x"].tolist() == [0, 1, 2]


def test_attributes_that_the_new_instance_lacks_are_deleted() -> None:
    """The existing instance has exactly the attributes of the new instance."""
    there = {"x": Plain(a=1, old=2)}
    x = there["x"]
    copied(there, {"x": Plain(a=3, new=4)})
    assert there["x"] is x
    assert vars(x) == {"a": 3, "new": 4}
