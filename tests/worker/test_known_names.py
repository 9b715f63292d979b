"""Tests of `nbdist.worker.control`: what is said without running users' code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nbdist.wire.control import Complete, Completions, Description, Inspect
from nbdist.worker.control import attributes, complete, describe, look_up


class Never(BaseException):
    """Users' code was run."""


def never(*_: object) -> Any:
    raise Never


class Traps:
    """An object that must only be looked at."""

    there = 3

    def __init__(self) -> None:
        self.own = {"images": 1, "labels": 2, 3: 4}

    __getattr__ = __getattribute__ = __dir__ = __repr__ = never  # type: ignore[assignment]
    costly = property(never)


class Net(torch.nn.Module):
    """A small net."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 3)
        self.register_buffer("mean", torch.zeros(2))

    @staticmethod
    def of(size: int) -> Net:
        raise Never


def train(model: Net, lr: float = 0.1) -> None:
    """Train it."""


NAMES: dict[str, Any] = {
    "traps": Traps(),
    "net": Net(),
    "Net": Net,
    "train": train,
    "batch": {"images": 1, "labels": 2, 3: 4},
    "grad": torch.zeros(2, 3, dtype=torch.float64),
    "math": math,
    "epoch": 3,
}
Net.__getattr__ = never  # type: ignore[method-assign]


def texts(code: str) -> list[str]:
    found = complete(NAMES, code)
    assert (found.end, code[: found.start]) == (len(code), code[: found.start])
    return [each.text for each in found.candidates]


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("x = tra", ["train", "traps"]),
        ("print(epo", ["epoch"]),
        ("traps.ow", ["own"]),
        ("traps.there", ["there"]),
        ("traps.cos", ["costly"]),
        ("traps.costly.re", []),
        ("net.fir", ["first"]),
        ("net.first.wei", ["weight"]),
        ("net.me", ["mean"]),
        ("net.first.weight.requires_grad", ["requires_grad", "requires_grad_"]),
        ("grad.dtype.is_fl", ["is_floating_point"]),
        ("math.sq", ["sqrt"]),
        ("batch['im", ["images"]),
        ('batch["', ["images", "labels"]),
        ("traps.own['la", ["labels"]),
        ("nope.x", []),
        ("nope.x.", []),
        ("f().ow", []),
        ("'text'.lo", []),
        ("3.re", []),
        ("", []),
        ("a + ", []),
    ],
)
def test_what_can_stand_there(code: str, wanted: list[str]) -> None:
    """Names, attributes to any depth, keys; nothing where code would have to run."""
    assert texts(code) == wanted


def test_where_and_of_what_kind() -> None:
    """What is replaced is the word before the cursor, wherever that is in the cell."""
    code = "# %%distributed\nnet.first.wei\nlater"
    found = look_up(NAMES, Complete(code, code.index("\nlater")))
    assert isinstance(found, Completions)
    assert code[found.start : found.end] == "wei"
    kinds = {each.text: each.type for each in complete(NAMES, "t").candidates}
    assert (kinds["train"], kinds["type"], kinds["try"]) == ("function", "class", "keyword")
    (first,) = complete(NAMES, "net.fi").candidates
    assert (first.text, first.type) == ("first", "instance")


def test_what_its_maker_has_put_there_comes_first() -> None:
    """The layers of a model, before what torch gives all of them; of a library all alike."""
    assert texts("net.")[:2] == ["first", "mean"]
    assert texts("traps.")[:2] == ["own", "costly"]
    assert texts("math.") == sorted(texts("math."))


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("train(net", ["Signature: train(model: 'Net', lr: 'float' = 0.1)", "Train it."]),
        ("net.of", ["Signature: of(size: 'int')"]),
        ("Net", ["Type:      type", "Docstring: A small net."]),
        ("epoch", ["Type:      int", "Value:     3"]),
        ("grad", ["Type:      Tensor", "shape (2, 3), torch.float64, cpu"]),
        ("batch", ["Type:      dict", "3 entries"]),
        ("net", ["Type:      Net", "Docstring: A small net."]),
        ("traps", ["Type:      Traps", "An object that must only be looked at."]),
        ("len", ["Signature: len(obj, /)"]),
    ],
)
def test_what_it_is(code: str, wanted: list[str]) -> None:
    """Signature, type, value of what has one, docstring; of the function in whose call one is."""
    found = look_up(NAMES, Inspect(code, len(code.partition("(")[0])))
    assert isinstance(found, Description)
    for each in wanted:
        assert each in found.data["text/plain"]


def test_nothing_is_said_of_what_is_not_there() -> None:
    """Nor of what only a property could tell."""
    assert describe(NAMES, "nope") == describe(NAMES, "traps.costly") == Description({})


def test_of_a_module_that_is_half_made() -> None:
    """Its class is known before its parts are."""
    half = Net.__new__(Net)
    assert "forward" in attributes(half)
    assert [each.text for each in complete({"half": half}, "half.forw").candidates] == ["forward"]
