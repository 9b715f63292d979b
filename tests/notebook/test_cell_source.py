"""Tests of `nbdist.notebook.cell_source`: it is checked and numbered before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.ultratb import SyntaxTB

from nbdist.errors import UsageError
from nbdist.notebook.cell_source import CellSyntaxError, check_source, in_notebook_lines


@pytest.fixture
def shell() -> Any:
    """What transforms cells and words syntax errors in any shell of IPython."""
    shell = TransformerManager()
    shell.SyntaxTB = SyntaxTB(theme_name="nocolor") if _has_themes() else SyntaxTB("NoColor")
    return shell


def _has_themes() -> bool:
    return "theme_name" in SyntaxTB.__init__.__code__.co_varnames


def test_lines_have_the_notebooks_numbers():
    """The magic's line is a comment; another cell magic has to stay first."""
    assert in_notebook_lines("%%rank 0", "a\nb") == "# %%rank 0\na\nb"
    assert in_notebook_lines("%%rank 0", "%%time\na") == "%%time\na"


def test_magics_are_python_afterwards(shell: Any):
    """What is planned by is what will run."""
    python = check_source(shell, "%%distributed", "!ls\nawait x")
    assert python.splitlines() == ["# %%distributed", "get_ipython().system('ls')", "await x"]


def test_a_syntax_error_is_found_first(shell: Any):
    """With its line in the cell; it is shown as IPython shows it, and that nothing has run."""
    with pytest.raises(CellSyntaxError, match=r"\(line 3 of the cell\); nothing") as found:
        check_source(shell, "%%distributed -n 2", "a = 1\nb = = 2")
    *shown, last = found.value._render_traceback_()
    assert "b = = 2" in "\n".join(shown)
    assert last == "Nothing has run on the workers."


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("x = 1\nreturn 5", "(line 3 of the cell); nothing has run. The last line of a cell is"),
        ("yield 5", "'yield' outside function (line 2 of the cell); nothing has run. `yield`"),
        ("break", "'break' outside loop (line 2 of the cell); nothing has run."),
        (
            "if 1:\n    x = 1\n  y = 2",
            "unindent does not match any outer indentation level (line 4",
        ),
        ("def f():\n    x = 1\n    global x", "assigned to before global declaration"),
    ],
)
def test_what_only_a_compiler_or_tokenizer_finds(shell: Any, cell: str, said: str):
    """Also what parses, and what IPython cannot transform, is said with its line, and a remedy."""
    with pytest.raises(SyntaxError) as found:
        check_source(shell, "%%distributed", cell)
    assert said in str(found.value)
    shown = found.value._render_traceback_()  # type: ignore[attr-defined]
    assert cell.splitlines()[-1].strip() in "\n".join(shown)


def test_an_indented_cell(shell: Any):
    """Lines that were cut out of a function are moved to the left, as in any cell."""
    python = check_source(shell, "%%rank 0", "    a = 1\n    if a:\n        b = 2\n")
    assert python.splitlines() == ["# %%rank 0", "a = 1", "if a:", "    b = 2"]


def test_warnings_are_the_workers(shell: Any):
    """What Python warns of as it compiles is said by the ranks, and by nobody else."""
    assert check_source(shell, "%%distributed", "1 is 1\n'\\d'")


def test_comments_alone_are_a_mistake(shell: Any):
    """They would start workers for nothing."""
    with pytest.raises(UsageError, match="`%%distributed`: the cell has no code"):
        check_source(shell, "%%distributed -n 2", "# later")


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("x = 1\n%dist_gather x\nx", "line 3: `%dist_gather` is for the notebook, not for the"),
        ("%dist_status", "line 2: `%dist_status` is for the notebook"),
        ("if x:\n    y = %dist_gather x", "line 3: `%dist_gather` is for the notebook"),
        ("%distributed x = 1", "line 2: `%distributed` is for the notebook"),
        ("import os\n%load_ext nbdist", "line 3: `%load_ext nbdist` is for the notebook"),
        ("x\n%%rank 0\ny", "%%rank must be the first line of its cell: split the cell at line 3"),
    ],
)
def test_magics_of_the_notebook(shell: Any, cell: str, said: str):
    """Ranks have none of them; which line it is, and what to do, is said before anything runs."""
    with pytest.raises(UsageError) as found:
        check_source(shell, "%%distributed", cell)
    assert str(found.value).startswith(said)


def test_magics_of_the_ranks(shell: Any):
    """All others are theirs, and what looks like one of the notebook's in a text."""
    for cell in ("%load_ext autoreload", "%time x", "s = '%dist_gather x'", "%rankings"):
        assert check_source(shell, "%%distributed", cell)
