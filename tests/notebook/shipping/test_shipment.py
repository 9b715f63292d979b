"""Values of any shape arrive unchanged; the progress of a transfer, and Stop during a transfer.

Hypothesis makes containers, dataclasses, arrays, tensors that share memory, and cycles, and
changes them in the notebook and on the ranks.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nbdist.notebook import display
from nbdist.notebook.display import PlainDisplay, moved, progress_text
from nbdist.notebook.shipping import push
from tests.notebook.front_end import Notebook, lasting

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
    # Two equal tuples cannot be told apart but by `is`: they are values.
    objects = {key: value for key, value in found.items() if not isinstance(value, tuple)}
    numbers = {key: f"#{number}" for number, key in enumerate(objects)}
    for key, value in objects.items():
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

ALL = (0, 1)
SIZE = 9000  # elements; too large to be part of a message


@dataclass(frozen=True)
class Node:
    """The plan of an object: its kind, the numbers of objects that it holds, and a seed."""

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
    """Make the objects in order; each may hold objects that were made before."""
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
            # The list makes each tuple unique: equal plain tuples may be one object or several.
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
    """Change a part of a value in place, if the value can be changed."""
    if isinstance(value, torch.Tensor) and value.numel():
        value[seed * 77 % value.numel()] += 1
    elif isinstance(value, np.ndarray):
        value[seed * 77 % len(value)] += 1
    elif isinstance(value, dict):
        value[f"n{seed}"] = seed
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
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9), st.booleans()), max_size=4),
    st.integers(0, 99),
)
def test_values_arrive_as_they_are(
    house: Any,
    plan: list[Node],
    changes: list[tuple[int, int, bool]],
    second: int,
):
    """After each change here, ranks have equal values, and only lists and tuples are new objects.

    Changes on the ranks do not reach the notebook, and a push replaces them.
    """
    house.cell(TELL)
    names = house.notebook.names
    made = make(plan, names["Point"])
    names.update(a=made[-1], b=made[second % len(made)])
    house.table.record_assigned({"a", "b"})

    def check() -> list[Any]:
        expected: list[Any] = names["tell"]([names["a"], names["b"]])
        assert house.distributed("tell([a, b])") == expected
        return expected

    check()
    house.run("kept = [*walk([a, b]).values()]")
    for number, seed, wraps in changes:
        change(made[number % len(made)], seed)
        if wraps:
            names.update(a=[names["a"]], b=[names["b"]])
        house.table.record_assigned({"a", "b"})
        check()
        new_types = "[type(x).__name__ for x in kept if id(x) not in walk([a, b])]"
        assert {*house.run(new_types)} <= {"list", "tuple"}, "only containers are replaced"
    expected = check()
    house.distributed("spoil([a, b])")
    assert names["tell"]([names["a"], names["b"]]) == expected, "what was spoilt there is here"
    # Pushes of arrays are tested in tests/objects/test_hints.py.
    if not any(isinstance(each, np.ndarray) for each in made):
        house.send(push(["a", "b"], house.table, ALL))
        assert house.run("tell([a, b])") == expected


# --- the progress of a transfer ---------------------------------------------------------------


def test_a_slow_transfer_shows_its_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Progress is shown after `FIRST_SHOWN` seconds; a Stop releases the copied memory at once."""
    assert progress_text("x", 1 << 20, 3 << 20, 2.0) == "x: 1 MiB of 3 MiB · 512 KiB/s"
    ended: list[str] = []

    def copying() -> Generator[int, None, str]:
        """Yield progress as if 3 KiB were copied."""
        try:
            yield from (1024, 2048, 3072)
        finally:
            ended.append("released")
        return "made"

    assert moved(copying(), 3072, PlainDisplay(), "shipping x") == "made"
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(display, "FIRST_SHOWN", 0.0)
    moved(copying(), 3072, PlainDisplay(), "shipping x")
    assert capsys.readouterr().out.startswith("shipping x: 1 KiB of 3 KiB · ")

    class Stopped(PlainDisplay):
        def show_status(self, text: str) -> None:
            raise KeyboardInterrupt

    ended.clear()
    with pytest.raises(KeyboardInterrupt):
        moved(copying(), 3072, Stopped(), "shipping x")
    assert ended == ["released"]


SLOWLY = """
from unittest.mock import patch
import numpy as np
patch.multiple("nbdist.notebook.display", FIRST_SHOWN=0, REDRAW_INTERVAL=0).start()
patch("nbdist.values.payload.COPY_PIECE", 1 << 17).start()
old = np.arange(5)
"""

HELD = """
import os
def held():
    links = []
    for n in os.listdir('/proc/self/fd'):
        try: links.append(os.readlink(f'/proc/self/fd/{n}'))
        except OSError: pass
    return sum('memfd:nbdist' in link for link in links)
"""

STOPS = """
import signal
publisher = get_ipython().display_pub

def stop_at(text):
    'Has Stop come when this is about to be shown: while it is so.'
    def press(message):
        if text in message['content']['data'].get('text/plain', ''):
            publisher.unregister_hook(press)
            signal.raise_signal(signal.SIGINT)
        return message
    publisher.register_hook(press)
"""

THERE = f"""%%distributed -n 2
{HELD}
import nbdist.values.payload, nbdist.worker.namespace
nbdist.values.payload.COPY_PIECE = 1 << 17
nbdist.worker.namespace.MOVED_EVERY = 0
import numpy as np
theirs = np.ones(5_000_000)
"""


slow = lasting("%load_ext nbdist", SLOWLY, HELD, STOPS, THERE)
"""A notebook and two workers that copy in small pieces, and show each step of the progress."""


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("%dist_push new", "sending new: "),
        ("%%distributed\nnew[0]", "sending new: "),
        ("%dist_gather theirs --as new", "gathering theirs: "),
    ],
)
def test_stop_in_a_transfer_changes_nothing(slow: Notebook, line: str, what: str):
    """After Stop the name has its former value on both sides; no memory is held; a retry works."""
    is_sent = "gather" not in line
    slow.run("new = np.arange(5_000_000.)")
    if is_sent:
        slow.run("%%distributed\nnew = 'as it was'")
        slow.run("new = np.arange(5_000_001.)")
    slow.run(f"stop_at({what!r})")
    assert "KeyboardInterrupt: Stopped on ranks 0-1" in slow.run(line).error
    assert slow.value("bool(new.sum() > 1e9), held()") == (True, 0)
    if is_sent:
        slow.run("%dist_gather (type(new).__name__,held()) --as there")
        assert slow.value("there") == [("str", 0)] * 2
    outcome = slow.run(line)
    assert outcome.errors == []
    assert any(what in each and "MiB/s" in each for each in outcome.drawn)
    if is_sent:
        slow.run("%dist_gather len(new) --as there")
        assert slow.value("there") == [5_000_001] * 2
    else:
        assert slow.value("[float(each.sum()) for each in new]") == [5e6, 5e6]
