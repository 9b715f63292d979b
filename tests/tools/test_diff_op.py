"""Tests of `nbdist.tools.diff_op`: what values are made of, and how far apart two are."""

from __future__ import annotations

import math
import socket
import struct
from collections import deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbdist.tools import diff_op as module
from nbdist.tools.diff_op import (
    ROW,
    ROWS,
    Again,
    TooManyLeaves,
    comparable,
    compare,
    diff,
    digest_of,
    digest_on_device,
    distance,
    leaves,
    lend,
    part_of,
)
from nbdist.wire.ops import Distance, Looked
from nbdist.worker.namespace import Context, Namespace


def context(**names: Any) -> Context:
    return Context(SimpleNamespace(user_ns=names), Namespace(names), None, task_id="t")


def test_parts():
    """With size and number of elements."""
    here = context(x={"w": torch.ones(2, 3), "lr": 0.1})
    parts = diff(here, "x").parts
    assert [*parts] == ["['w']", "['lr']"]
    assert (parts["['w']"].size, parts["['w']"].count) == (24, 6)
    assert [*diff(here, "x['w'][0]").parts] == [""]


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("nope", Looked(missing="nope")),
        ("x.y", Looked(problem="AttributeError: 'list' object has no attribute 'y'")),
        (
            "[None] * 100_001",
            Looked(problem="it has more than 100,000 parts: compare one of them"),
        ),
    ],
)
def test_what_has_no_parts(expression: str, said: Looked):
    """It is told, and no error of the task's."""
    assert diff(context(x=[]), expression) == said


def test_ranks_compare_without_the_notebook():
    """One lends, the other says how far it is apart; what it has otherwise is left out."""
    one, other = context(x=[torch.ones(3), 5, torch.ones(2)]), context(x=[torch.zeros(3), 5])
    lent = lend(one, "x", ("[0]", "[1]", "[2]"))
    assert lent.packed is not None
    assert compare(other, "x", lent.packed) == {"[0]": Distance(1.0, 3)}


NAN, INF = math.nan, math.inf


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_digests_of_bytes(one, other):
    """Both kinds are equal exactly where the bytes are."""
    tensors = [torch.tensor([*data], dtype=torch.uint8) for data in (one, other)]
    assert (digest_of(tensors[0]) == digest_of(tensors[1])) == (one == other)
    first, second = map(digest_on_device, tensors)
    assert (first == second) == (one == other)


@pytest.mark.parametrize("make", [digest_of, lambda t: digest_on_device(t.view(torch.uint8))])
def test_a_change_anywhere(make):
    """One element, two that change places, all signs at once: in every row, also the last."""
    size = ROW * ROWS // 2 + 3 * ROW + 77
    whole = torch.arange(1, size + 1, dtype=torch.float64)
    seen = {make(whole), make(-whole), make(whole.flip(0))}
    swapped = whole.clone()
    swapped[[0, 1]] = whole[[1, 0]]
    seen.add(make(swapped))
    for place in (0, 1, ROW // 2, ROW * ROWS // 2, size - 1):
        changed = whole.clone()
        changed[place] += 1
        seen.add(make(changed))
    assert len(seen) == 9


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64],
)
def test_order_and_not_memory(dtype):
    """A view has the digest of its contents, whatever its strides are."""
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    assert digest_of(tensor.t()) == digest_of(tensor.t().contiguous())
    assert digest_of(tensor.flip(0)) != digest_of(tensor)
    assert part_of(tensor).kind == f"{str(dtype)[6:]} (2, 3)"
    assert digest_of(torch.empty(0, dtype=dtype)) == digest_of(torch.empty(0, 4, dtype=dtype))


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ([1.0, 2.0], [1.0, 2.0], Distance(0.0, 0)),
        ([1.0, 2.0], [1.5, 2.25], Distance(0.5, 2)),
        ([0.0, NAN], [-0.0, NAN], Distance(0.0, 0)),
        ([NAN, 1.0], [2.0, 1.0], Distance(0.0, 1, 1)),
        ([INF, INF, 1.0], [INF, -INF, 4.0], Distance(3.0, 2, 1)),
        ([2**60], [2**60 + 1], Distance(0.0, 1)),
        ([True, False], [True, True], Distance(1.0, 1)),
        ([1 + 1j], [1 - 1j], Distance(2.0, 1)),
        ([], [], Distance(0.0, 0)),
    ],
)
def test_distance(one, other, found):
    """NaN is equal to NaN, and -0.0 to 0.0; whole numbers differ also where floats would not."""
    assert distance(torch.tensor(one), torch.tensor(other)) == found


@given(st.lists(st.tuples(st.floats(width=16), st.floats(width=16)), max_size=20))
def test_distance_of_small_floats(pairs):
    """As Python's own numbers have it."""
    same = [a == b or (a != a and b != b) for a, b in pairs]
    apart = [abs(a - b) for (a, b), equal in zip(pairs, same, strict=True) if not equal]
    finite = [each for each in apart if math.isfinite(each)]
    expected = Distance(max(finite, default=0.0), same.count(False), len(apart) - len(finite))
    columns = [torch.tensor([pair[n] for pair in pairs], dtype=torch.float16) for n in (0, 1)]
    assert distance(*columns) == expected


def test_other_nans():
    """Another NaN has other bits, so another digest, and is no difference."""
    odd = torch.tensor([*struct.pack("f", NAN)[:3], 0xFF], dtype=torch.uint8).view(torch.float32)
    assert odd.isnan().all()
    assert digest_of(odd) != digest_of(torch.tensor([NAN]))
    assert distance(odd, torch.tensor([NAN])) == Distance(0.0, 0)


def test_what_is_told_of_plain_values():
    """Their type, and themselves where they are short."""
    assert part_of(0.0) == part_of(-0.0)
    assert part_of(NAN) == part_of(-NAN)
    assert part_of(1) != part_of(1.0)
    assert (part_of("ab").kind, part_of("ab").text) == ("str", "'ab'")
    assert len(part_of("a" * 1000).text) <= 60
    assert part_of("a" * 1000) != part_of("a" * 999 + "b")
    assert part_of({3, 1}) == part_of({1, 3})
    assert part_of(iter("")).digest == part_of(iter("")).digest != part_of(iter("a")).digest
    assert part_of(socket.socket).kind == "type"
    assert part_of(np.float32(1)).text == "np.float32(1.0)"
    assert part_of(np.array(["a", "b"])) != part_of(np.array(["a", "c"]))
    assert comparable(np.array(["a"])) is None
    assert part_of(torch.ones(2, device="meta")).digest == ""
    sparse = torch.eye(2).to_sparse()
    assert part_of(sparse) == part_of(sparse.clone()) != part_of((2 * torch.eye(2)).to_sparse())


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
