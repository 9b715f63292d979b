"""Tests of `nbdist.notebook.extension`: cells that load nbdist and go on with a cell magic."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbdist.notebook.cell_text import transform_first_lines
from nbdist.notebook.extension import RestOfCell
from tests.notebook.front_end import Notebook

pytestmark = pytest.mark.shared_world


@pytest.fixture
def shell() -> Any:
    """One that loads as much of nbdist as this is about."""
    shell: Any = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    shell.user_ns["ran"] = ran = []

    def load(_: str) -> None:
        RestOfCell(shell)
        shell.input_transformers_cleanup.insert(0, transform_first_lines)
        shell.register_magic_function(place, "line", "%distributed")

    def place(line: str) -> None:
        raise ValueError(line)

    def distributed(line: str, cell: str) -> None:
        ran.append((line, cell))
        shell.run_cell("ran.append('nested')")
        if "wrong" in cell:
            raise ValueError("wrong")

    shell.register_magic_function(load, "line", "load_ext")
    shell.register_magic_function(distributed, "cell", "distributed")
    return shell


def run(shell: Any, cell: str) -> BaseException | None:
    """Run a cell; what it raised."""
    with redirect_stdout(io.StringIO()):
        result = shell.run_cell(cell, store_history=True)
    error: BaseException | None = result.error_in_exec
    assert result.success == (error is None)
    assert "run_code" not in vars(shell)
    return error


def test_the_rest_is_the_cell_magics(shell: Any) -> None:
    """Nothing of it runs here; where it fails, the cell that loaded nbdist has."""
    assert run(shell, "# a\n%load_ext nbdist\n%%distributed -n 4\nhere = 1\nx\n") is None
    assert shell.user_ns["ran"] == [("-n 4", "# a\n# %load_ext nbdist\nhere = 1\nx\n"), "nested"]
    assert run(shell, "after = 1") is None
    assert "after" in shell.user_ns
    assert "here" not in shell.user_ns
    error = run(shell, "%load_ext nbdist\n%%distributed\nwrong = 1\nx\n")
    assert repr(error) == "ValueError('wrong')"
    assert "wrong" not in shell.user_ns


def test_a_magic_that_is_not_first(shell: Any) -> None:
    """What it stands below has run, since nbdist was not there; what stands below it has not."""
    error = run(shell, "before = 1\n%load_ext nbdist\nx = 1\n%%distributed\nhere = 1\n")
    assert repr(error) == "ValueError('at line 4')"
    assert {"before", "x", "here"} & shell.user_ns.keys() == {"before"}


def test_line_numbers_are_the_cells(notebook: Notebook) -> None:
    """Also in a cell that loads nbdist again; the magics at its end do not run once it failed."""
    wrong = notebook.run("%load_ext nbdist\n\n# a\n%%distributed\nx = 1\n1 / 0\n%dist_gather x")
    (error,) = wrong.errors
    assert "line 6" in (wrong.updates or wrong.displays)[-1]["data"]["text/plain"]
    assert "ZeroDivisionError" in error["evalue"]
    assert notebook.run("x").errors[0]["ename"] == "NameError"
