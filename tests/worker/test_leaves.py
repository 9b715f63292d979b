"""Tests of `nbdist.worker.leaves`: what a value is made of, and where."""

from __future__ import annotations

from collections import deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from nbdist.worker import leaves as module
from nbdist.worker.leaves import Again, TooManyLeaves, leaves

Pair = namedtuple("Pair", "a b")


@dataclass
class Config:
    lr: float
    sizes: tuple[int, ...]


class Plain:
    def __init__(self) -> None:
        self.rate = 0.5
        self._hidden = [1]


class Empty:
    pass


class Scheduler(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {"last": 3}


def paths(value: object) -> list[str]:
    return [*leaves(value)]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (5, [""]),
        ("text", [""]),
        (torch.ones(2), [""]),
        (np.ones(2), [""]),
        ({1, 2}, [""]),
        ([1, "a"], ["[0]", "[1]"]),
        ((), []),
        ({"a": {"b": [1]}, 2: 3}, ["['a']['b'][0]", "[2]"]),
        (deque([Pair(1, [2])]), ["[0].a", "[0].b[0]"]),
        (Config(0.1, (1, 2)), ["lr", "sizes[0]", "sizes[1]"]),
        ([Plain()], ["[0].rate", "[0]._hidden[0]"]),
        (Empty(), [""]),
        (Scheduler(), ["last"]),
        ([0.5] * 31, [f"[{n}]" for n in range(31)]),
        ([0.5] * 32, [""]),
        (np.array([{"a": 1}], dtype=object), ["[0]['a']"]),
        (pd.DataFrame({"a": [1], "b": ["x"]}, index=[7]), ["['a']", "['b'][0]", "index"]),
        (pd.Series([1]), ["", "index"]),
    ],
    ids=lambda each: type(each).__name__,
)
def test_paths(value: object, found: list[str]):
    """Each leaf is where code would look for it."""
    assert paths(value) == found


def test_modules_and_optimizers():
    """Parameters and buffers once each, and an optimizer's state after a step."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
    found = paths({"net": model})
    assert found[:2] == ["['net'].0.weight", "['net'].0.bias"]
    assert "['net'].1.running_mean" in found
    assert paths(model)[0] == "0.weight"
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    assert {"state[0]['exp_avg']", "param_groups[0]['lr']"} <= {*paths(optimizer)}


def test_long_lists_are_arrays():
    """Of numbers of one kind that an array can hold."""
    assert leaves([1] * 40)[""].dtype == np.int64
    assert len(leaves([1] * 39 + [1.0])) == 40
    assert len(leaves([10**30] * 40)) == 40


def test_what_holds_itself():
    """It ends there."""
    loop: list[Any] = [1]
    loop.append(loop)
    assert isinstance(leaves(loop)["[1]"], Again)


def test_too_many(monkeypatch: pytest.MonkeyPatch):
    """Nobody would compare so many one by one."""
    monkeypatch.setattr(module, "MOST_LEAVES", 3)
    assert len(leaves([None] * 3)) == 3
    with pytest.raises(TooManyLeaves):
        leaves([None] * 4)
