"""Tests of `nbdist.notebook.exporting.script_text`."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from nbdist.notebook.exporting.script_text import (
    DISPLAY,
    Setting,
    docstring,
    joined,
    prologue,
    spaced,
)


def test_the_docstring() -> None:
    """It is one whatever is told in it, and its lines fit."""
    setting = Setting("train", 4, "", "a.ipynb", ("Set: X.",))
    text = docstring(setting, ['`!echo """x"""\\n` ' + "long " * 40])
    told = ast.get_docstring(ast.parse(text)) or ""
    assert "torchrun --nproc-per-node 4 train.py" in told
    assert "Set: X." in told
    assert "Not carried over:\n- `!echo '''x'''/n` long" in told
    assert max(map(len, text.split("\n"))) <= 90
    assert "Not carried over" not in docstring(setting, [])


@pytest.mark.parametrize(
    ("backend", "group"),
    [("", 'init_process_group("gloo")'), ("none", ""), ("mpi", 'init_process_group("mpi")')],
)
def test_the_prologue(backend: str, group: str) -> None:
    """It binds what workers have."""
    text = prologue(backend)
    bound = {
        node.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    assert bound == {"rank", "world_size", "local_rank", "device"}
    assert (group in text) if group else "init_process_group" not in text


def test_spacing() -> None:
    """Two empty lines around definitions, none between values, one between other parts."""
    assert spaced(["a = 1", "b = 2", "def f():\n    pass", "c = 3"]) == [
        *("a = 1", "b = 2", "", "", "def f():\n    pass", "", "", "c = 3"),
    ]
    parts = ["x = 1", "# head\ndef f():\n    pass", "if y:\n    pass", "", "z = 1"]
    assert joined(parts) == (
        "x = 1\n\n\n# head\ndef f():\n    pass\n\n\nif y:\n    pass\n\nz = 1\n"
    )


def test_display(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints one value a line."""
    names: dict[str, Any] = {}
    exec(DISPLAY, names)
    names["display"]("a", 1)
    assert capsys.readouterr().out == "'a'\n1\n"
