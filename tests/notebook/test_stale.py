"""Tests of `nbdist.notebook.stale`: a module that is edited between two cells."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.front_end import Notebook

TOLD = "`%autoreload 2` under %%distributed, or `%dist_restart`"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Notebook]:
    """A notebook in whose path the folder is, with two workers."""
    (folder / "my_train.py").write_text("def steps():\n    return 'first version'\n")
    (folder / "my_data.py").write_text("kind = 'first'\n")
    for file in folder.iterdir():
        edit(file, file.read_text(), seconds=-60)
    notebook = Notebook(
        "%load_ext nbdist",
        f"import sys\nsys.path.insert(0, {str(folder)!r})",
        "%%distributed -n 2\nimport my_train",
        "%%rank 1\nimport my_data",
    )
    yield notebook
    notebook.close()


def edit(file: Path, text: str, seconds: float) -> None:
    """Write it so long after (or before) now."""
    file.write_text(text)
    at = time.time() + seconds
    os.utime(file, (at, at))


def test_who_runs_the_old_one_is_told(two: Notebook, folder: Path) -> None:
    """Once, with the ranks that have imported it and what to do; also of a cell that fails."""
    edit(folder / "my_train.py", "def steps():\n    return 'second, longer'\n", seconds=-30)
    edit(folder / "my_data.py", "kind = 'the second'\n", seconds=-30)
    shown = two.run("%%distributed\nmy_train.steps()").text
    assert "first version" in shown
    assert f"my_train.py changed after ranks 0-1 imported it: {TOLD}" in shown
    assert f"my_data.py changed after rank 1 imported it: {TOLD}" in shown
    assert "imported it" not in two.run("%%distributed\nmy_train.steps()").text
    edit(folder / "my_data.py", "kind = 'another'\n", seconds=-20)
    failed = two.run("%%rank 1\n1 / 0").panel["text/plain"]
    assert f"my_data.py changed after rank 1 imported it: {TOLD}" in failed


def test_autoreload_on_the_workers(two: Notebook, folder: Path) -> None:
    """It is there without `%load_ext`, and then nothing need be said."""
    assert two.run("%%distributed\n%autoreload 2").errors == []
    shown = two.run("%%distributed\nmy_train.steps()").text
    assert "second, longer" in shown
    edit(folder / "my_train.py", "def steps():\n    return 'third, longer still'\n", seconds=-10)
    shown = two.run("%%distributed\nmy_train.steps()").text
    assert "third, longer still" in shown
    assert "imported it" not in shown
    loaded = two.run("%%distributed\n%load_ext autoreload")
    assert loaded.errors == []
