"""Tests of `nbdist.tools.script_text`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nbdist.tools.script_text import (
    DISPLAY,
    ImportBlock,
    Imported,
    Setting,
    docstring,
    imported_by,
    joined,
    prologue,
    spaced,
)
from tests.waiting import SOON

SOURCE = """
import torch, numpy as np
import os, xml.dom.minidom
from torch import optim, nn, Tensor
from torch import device as where
from __future__ import annotations
from collections import OrderedDict, defaultdict
from sklearn.model_selection import train_test_split, cross_val_score, GridSearchCV, KFold, Split
"""


def block_of(source: str) -> ImportBlock:
    block = ImportBlock()
    for node in ast.parse(source).body:
        for each in imported_by(node) or ():
            block.add(each)
    return block


@pytest.mark.world
def test_it_is_as_ruff_wants_it(tmp_path: Path) -> None:
    """Sections, order, one member a line where they are long: nothing is left to sort."""
    block = block_of(SOURCE)
    shown = "\n".join(f"print({name})" for name in sorted(block.names - {"annotations"}))
    file = tmp_path / "x.py"
    file.write_text(f"{block.lines()}\n\n{shown}\n")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "I,E,F", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=False)
    assert done.returncode == 0, done.stdout
    assert block.lines().startswith("from __future__ import annotations\n\nimport os\n")
    assert "import numpy as np\nimport torch\n" in block.lines()
    assert {"xml", "np", "where", "KFold"} <= block.names


def test_a_name_has_one_import() -> None:
    """The same thing under the same name twice is one; another one has to stay where it is."""
    block = block_of("from torch import nn")
    assert block.takes(Imported("nn", "torch.nn"))
    assert not block.takes(Imported("nn", "other", "nn"))
    block.add(Imported("nn", "torch.nn"))
    block.add(Imported("nn", "other", "nn"))
    assert block.lines() == "from torch import nn"


@pytest.mark.parametrize("source", ["x = 1", "from x import *", "from . import y"])
def test_what_stays_where_it_is(source: str) -> None:
    """Only imports whose names are known can stand elsewhere."""
    assert imported_by(ast.parse(source).body[0]) is None


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
