"""Tests of `nbdist.notebook.exporting.import_block`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.notebook.exporting.import_block import ImportBlock, Imported, imported_by
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
