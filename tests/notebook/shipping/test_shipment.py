"""Tests of `nbdist.notebook.shipping`: values of any shape arrive as they are.

With hypothesis: containers, dataclasses, arrays, tensors that share memory, cycles, changed
here and there in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TELL = """
import numpy as np, zlib
from dataclasses import dataclass
@dataclass(eq=False)
class Point:
    x: object
    y: object

def parts(value):
    'What it holds.'
    if isinstance(value, Point):
        return [value.x, value.y]
    if isinstance(value, dict):
        return [each for item in value.items() for each in item]
    return value if isinstance(value, (list, tuple)) else []

def walk(top):
    'All objects in it, each once, by their ids and in an order of its own.'
    found, waiting = {}, [top]
    while waiting:
        value = waiting.pop()
        if id(value) not in found and not isinstance(value, (int, float, str, bytes, type(None))):
            found[id(value)] = value
            waiting += parts(value)
    return found

def tell(top):
    'What it is made of, what is one object, and which tensors share memory.'
    import torch
    found, spans, lines = walk(top), {}, []
    numbers = {key: f"#{number}" for number, key in enumerate(found)}
    for key, value in found.items():
        said = [type(value).__name__, *(numbers.get(id(each), repr(each)) for each in parts(value))]
        if isinstance(value, torch.Tensor):
            start = value.data_ptr()
            end = start + value.numel() * value.element_size()
            said += [n for n, (a, b) in spans.items() if start < b and a < end]
            spans[numbers[key]] = start, end
            value = value.numpy()
        if isinstance(value, np.ndarray):
            said += [value.shape, zlib.crc32(value.tobytes())]
        lines.append(said)
    return lines

def spoil(top):
    'Changes all that there is in place.'
    import torch
    for value in walk(top).values():
        if isinstance(value, torch.Tensor):
            value.add_(1)
        elif isinstance(value, np.ndarray):
            value += 1
        elif isinstance(value, dict):
            value["spoilt"] = 1
        elif isinstance(value, list):
            value.append("spoilt")
        elif isinstance(value, Point):
            value.x = "spoilt"
"""

SIZE = 9000  # more than goes in a message


@dataclass(frozen=True)
class Node:
    """A thing to be made: its kind, what it holds by number, and a number of its own."""

    kind: str
    holds: tuple[int, ...]
    seed: int


KINDS = ("list", "dict", "tuple", "point", "tensor", "view", "array", "plain", "loop")
nodes = st.builds(
    Node,
    st.sampled_from(KINDS),
    st.lists(st.integers(0, 99), max_size=4).map(tuple),
    st.integers(0, 9),
)


def make(plan: list[Node], point: Any) -> list[Any]:
    """Make the things in order; each may hold any of those before it."""
    made: list[Any] = []
    for node in plan:
        holds = [made[number % len(made)] for number in node.holds] if made else []
        made.append(_make(node, holds, made, point))
    return made


def _make(node: Node, holds: list[Any], made: list[Any], point: Any) -> Any:
    match node.kind:
        case "list":
            return holds
        case "dict":
            return {f"k{number}": value for number, value in enumerate(holds)}
        case "tuple":
            # With something in it that can change: who has the same of what cannot does not matter.
            return (*holds, [])
        case "point":
            return point(holds[0] if holds else None, node.seed)
        case "tensor":
            return torch.full((SIZE,), float(node.seed), dtype=torch.float64)
        case "view":
            tensors = [each for each in made if isinstance(each, torch.Tensor)]
            whole = tensors[node.seed % len(tensors)] if tensors else torch.zeros(SIZE)
            return whole[node.seed * 100 : whole.numel() - node.seed * 100]
        case "array":
            return np.full(SIZE, float(node.seed))
        case "loop":
            loop: list[Any] = [*holds]
            loop.append(loop)
            return loop
    return [node.seed, 0.5, "text", b"bytes", None][node.seed % 5]


def change(value: Any, seed: int) -> None:
    """Change one thing in place, where it can be."""
    if isinstance(value, torch.Tensor) and value.numel():
        value[seed * 77 % value.numel()] += 1
    elif isinstance(value, np.ndarray):
        value[seed * 77 % len(value)] += 1
    elif isinstance(value, dict):
        value[f"k{seed}"] = seed
    elif isinstance(value, list):
        value.append(seed)
    elif hasattr(value, "x"):
        value.y = seed + 100


@pytest.mark.world
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(nodes, min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=4),
    st.integers(0, 99),
)
def test_what_arrives_is_what_there_is(
    house: Any,
    plan: list[Node],
    changes: list[tuple[int, int]],
    second: int,
):
    """Two names, with all that they share, after each change here, whatever was done there."""
    house.cell(TELL)
    names = house.notebook.names
    made = make(plan, names["Point"])
    names.update(a=made[-1], b=made[second % len(made)])
    house.table.bound_in_notebook({"a", "b"})

    def check() -> None:
        here = names["tell"]([names["a"], names["b"]])
        assert house.distributed("tell([a, b])") == here
        house.distributed("spoil([a, b])")
        assert names["tell"]([names["a"], names["b"]]) == here, "what was spoilt there is here"

    check()
    for number, seed in changes:
        change(made[number % len(made)], seed)
        # What is as it was is not sent: they have spoilt it, and that stays there.
        house.table.bound_in_notebook({"a", "b"})
        names.update(a=[names["a"]], b=[names["b"]])
        check()
