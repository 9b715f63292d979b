"""Tests of `nbdist.tools.origins`: functions of a notebook's cells, files beside a script."""

from __future__ import annotations

import json
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbdist.tools.origins import File, Origins, Written, file_of, literal, sharing
from nbdist.tools.script_text import Imported

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


Names = dict[str, Any]


def read(file: File, folder: Path, names: Names) -> Names:
    """Write it, and run the line that reads it where only that much is known."""
    assert file.write(folder, names) == (folder / file.name).stat().st_size
    known: Names = {"DATA": folder, "np": np, "torch": torch, "pickle": pickle}
    exec(file.code, known)
    assert file.module in known
    return known


def made(*names: str, **values: Any) -> File:
    found = file_of(names or [*values], values)
    assert isinstance(found, File), found
    return found


def test_arrays(tmp_path: Path) -> None:
    """As numpy has them; arrays of objects as a pickle."""
    names = {"x": np.arange(6.0).reshape(2, 3), "y": np.array([{}, None])}
    known = read(made(x=names["x"]), tmp_path, names)
    assert (known["x"] == names["x"]).all()
    assert made(x=names["x"]).code == 'x = np.load(DATA / "x.npy")'
    assert made(y=names["y"]).kind == "pkl"
    assert read(made(y=names["y"]), tmp_path, names)["y"].tolist() == [{}, None]


def test_tensors(tmp_path: Path) -> None:
    """Plain ones are read as such, without trust; a module needs it."""
    names = {"table": {"a": torch.ones(2)}, "net": torch.nn.Linear(2, 2)}
    plain, whole = made(table=names["table"]), made(net=names["net"])
    assert plain.code == 'table = torch.load(DATA / "table.pt", map_location="cpu")'
    assert read(plain, tmp_path, names)["table"]["a"].tolist() == [1, 1]
    assert whole.code.endswith('map_location="cpu", weights_only=False)')
    assert torch.equal(read(whole, tmp_path, names)["net"].weight, names["net"].weight)


def test_what_shares_objects_is_in_one_file(tmp_path: Path) -> None:
    """A model and its optimizer still share parameters."""
    net = torch.nn.Linear(2, 2)
    names = {"net": net, "x": [1, 2], "opt": torch.optim.SGD(net.parameters()), "view": net.weight}
    assert sorted(map(sorted, sharing(names, names))) == [["net", "opt", "view"], ["x"]]
    known = read(made("net", "opt", **names), tmp_path, names)
    assert known["opt"].param_groups[0]["params"][0] is known["net"].weight


def test_classes_of_the_notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are named: the script has to define them before the file is read."""
    main = types.ModuleType("__main__")
    exec("class Point:\n    def __init__(self): self.x = 1\ndef f(): pass", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    names = {"points": [main.Point()], "both": (main.Point(), torch.ones(1)), "call": main.f}
    assert made(points=names["points"]).needs == {"Point"}
    assert made(both=names["both"]).needs == {"Point"}
    assert made(call=names["call"]).needs == {"f"}
    assert read(made(points=names["points"]), tmp_path, names)["points"][0].x == 1


def test_what_cannot_be_saved() -> None:
    """The reason is pickle's."""
    assert "cannot pickle" in str(file_of(["lock"], {"lock": threading.Lock()}))
