"""Tests of `nbdist.notebook.exporting.origins`, with functions of a real notebook's cells."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbdist.notebook.exporting.import_block import Imported
from nbdist.notebook.exporting.origins import Origins, Written, literal

Ask = Callable[[str], Any]


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    # Without its database, whose thread would outlive it.
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture
def origin(shell: InteractiveShell) -> Callable[..., Any]:
    """Runs cells, then says where a name of theirs comes from."""
    shell.reset(new_session=False)

    def ask(name: str, *cells: str) -> Any:
        for cell in cells:
            shell.run_cell(cell, store_history=True).raise_error()
        history = shell.history_manager.input_hist_parsed
        return Origins(shell.user_ns, [*history]).of(name, shell.user_ns[name])

    return ask


@pytest.mark.parametrize(
    ("cells", "name", "found"),
    [
        (["import json as j"], "j", [Imported("j", "json")]),
        (["from json import dumps as d"], "d", [Imported("d", "json", "dumps")]),
        (["if True:\n    from os import path"], "path", [Imported("path", "os", "path")]),
        (["import xml.dom.minidom"], "xml", [Imported("xml.dom.minidom", "xml.dom.minidom")]),
        (["x = __import__('json')"], "x", [Imported("x", "json")]),
        (["x = __import__('json').loads"], "x", [Imported("x", "json", "loads")]),
    ],
)
def test_imports(origin: Callable[..., Any], cells: list[str], name: str, found: object) -> None:
    """As a cell has imported them, or else by the module's own name."""
    assert origin(name, *cells) == found


def test_a_function(origin: Callable[..., Any]) -> None:
    """With its decorators and the comment above it, as it was when this one was made."""
    cells = [
        "import functools\nk = 2\nclass Base: pass\n",
        "# doubles\n@functools.lru_cache\ndef f(x=k):\n    # why\n    return x * scale",
    ]
    found = origin("f", *cells)
    assert found == Written(
        cells[1], frozenset({"functools", "k", "scale"}), frozenset({"functools", "k"})
    )
    assert origin("g", "g = f").text == "g = f"
    assert origin("f", "def f(): return 2").text == "def f(): return 2"
    assert origin("sq", "sq = lambda x: x * scale") == Written(
        "sq = lambda x: x * scale", frozenset({"scale"}), frozenset()
    )


def test_a_class(origin: Callable[..., Any]) -> None:
    """Also one without functions of its own."""
    text = "class Net(Base):\n    def forward(self):\n        return model"
    found = origin("Net", "class Base:\n    pass", text)
    assert found == Written(text, frozenset({"Base", "model"}), frozenset({"Base"}))
    assert origin("Base").text == "class Base:\n    pass"
    assert origin("P", "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int").text == (
        "class P(NamedTuple):\n    x: int"
    )


def test_what_code_has_made(origin: Callable[..., Any]) -> None:
    """Its own line makes it again: a closure, a partial."""
    cell = "def make(n):\n    def add(x):\n        return x + n\n    return add\nadd = make(3)"
    assert origin("add", cell) == Written("add = make(3)", frozenset({"make"}), frozenset({"make"}))
    found = origin("half", "from functools import partial\nhalf = partial(pow, 0.5)")
    assert found.text == "half = partial(pow, 0.5)"


def test_values(origin: Callable[..., Any]) -> None:
    """Small plain ones as they were typed, if that is what they are still."""
    typed = "# all of them\nsizes = {'a': 1,  'b': [1, 2]}"
    assert origin("sizes", typed).text == typed
    assert origin("sizes", "sizes['c'] = 3").text == 'sizes = {"a": 1, "b": [1, 2], "c": 3}'
    assert origin("n", "n = 3 * 4").text == "n = 12"
    assert origin("thing", "thing = object()") is None
    assert origin("many", "many = list(range(1000))") is None


@pytest.mark.parametrize(
    "value",
    [
        *(1, 1.5, True, None, "a'b", 'a"b', "'\"\n", b"x", (), (1,), [], {}, {1}, range(3), 1j),
        [{"a": (1, "x" * 70)}, ["y" * 70]],
        {"key" * 5 + str(i): [i, "text"] for i in range(12)},
        [i * 1000 for i in range(60)],
        tuple(f"layer{i}" for i in range(20)),
    ],
)
def test_literals(value: object) -> None:
    """What is written is the same value, of the same type, in lines that fit."""
    text = literal(value)
    assert text is not None
    assert repr(eval(text)) == repr(value)
    assert max(map(len, text.split("\n"))) <= 100 or len(repr(value)) < 200


def test_no_literals() -> None:
    """What could not be read back is not written."""
    circle: list[object] = []
    circle.append(circle)
    wide: list[object] = [0]
    for _ in range(18):  # as text it would be a quarter of a million zeros
        wide = [wide, wide]
    nothing = (circle, wide, object(), json, "x" * 2000, {1: object()})
    assert [literal(each) for each in nothing] == [None] * 6
    assert eval(literal(float("inf")) or "") == float("inf")
    assert eval(literal(Path("a")) or "", {"Path": Path}) == Path("a")
