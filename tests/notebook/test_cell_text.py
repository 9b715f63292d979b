"""Tests of `nbdist.notebook.cell_text`: whose a cell is while it is typed."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.ultratb import SyntaxTB

from nbdist.errors import UsageError
from nbdist.notebook.cell_text import (
    CellSyntaxError,
    LineMagic,
    as_comment,
    cell_magic,
    check_source,
    divide,
    magic_at,
    root_at,
    transform_first_lines,
    without_comment,
)


def test_the_magic_of_a_cell() -> None:
    """Its name and whom it is for."""
    for code, name, pool, ranks in (
        ("%%distributed\nx", "distributed", None, None),
        ("%%distributed -n 4 --pool a -r 0,2-3\nx", "distributed", "a", "0,2-3"),
        ("# why\n\n  # and how\n%%rank 0, 2\nx", "rank", None, "0,2"),
        ("%%rank --pool a -1\nx", "rank", "a", "-1"),
        ("%%timeit\nx", "timeit", None, None),
    ):
        magic = cell_magic(code)
        assert (magic.name, magic.pool, magic.ranks) == (name, pool, ranks)
        assert code[magic.start :].startswith(magic.text)
    # A cell without one is the notebook's own, and no character of it changes.
    for code in ("x = 1", "x\n%%distributed", "%time x", "", "# %%distributed"):
        assert cell_magic(code) is None
        assert as_comment(code) == code
        assert as_comment(f"# a\n%%distributed -n 4\n{code}") == f"# a\n# distributed -n 4\n{code}"


def test_the_magic_of_a_line() -> None:
    """That with the cursor; whose attribute is asked for, where it is a name's."""
    for code, wanted in (
        ("x = 1\n%dist_gather lo", ("dist_gather", " lo")),
        ("# why\n%%distributed -n 2", ("distributed", " -n 2")),
        ("x %dist_gather a", None),
        ("%%distributed -n 2\nx", None),
    ):
        magic = magic_at(code, len(code))
        assert (magic and (magic.name, magic.text)) == wanted
    found = [root_at(code, len(code)) for code in ("mod", "x = model.first.we", "f(x).we")]
    assert found == [("mod", False), ("model", True), ("", True)]


def test_a_cell_begins_with_its_magic() -> None:
    """Every line that was below it keeps its number; cells of others stay as they are."""
    for cell, becomes in (
        ("%%distributed -n 4\nx\n", "%%distributed -n 4\nx\n"),
        ("# why\n%%distributed -n 4\nx\n", "%%distributed -n 4\n# why\nx\n"),
        ("\n  # a\n%%rank 0\nx\n", "%%rank 0\n\n  # a\nx\n"),
        ("%%rank [0, 1] --pool a\nx\n", "%%rank 0,1 --pool a\nx\n"),
        ("%%local\nx\n", "# %%local\nx\n"),
        ("%load_ext nbdist\n%%rank 0\nx\n", "%%rank 0\n# %load_ext nbdist\nx\n"),
        ("%load_ext nbdist # a\n\n%%distributed\n", "%%distributed\n# %load_ext nbdist # a\n\n"),
        ("x\n%%distributed\n", "get_ipython().run_line_magic('%distributed', 'at line 2')\n"),
        ("x\n\nif x:\n  %%rank 0\n", "get_ipython().run_line_magic('%rank', 'at line 4')\n"),
        (
            "%%distributed --auto\nx\n%%distributed\n",
            "get_ipython().run_line_magic('%distributed', 'at line 2')\n",
        ),
        ("x = '''\n%%distributed\n'''\n", "x = '''\n%%distributed\n'''\n"),
        ("%%writefile a\n%%distributed\n", "%%writefile a\n%%distributed\n"),
        ("%%rank 0\n%%writefile a\n%%rank 0\n", "%%rank 0\n%%writefile a\n%%rank 0\n"),
        ("", ""),
    ):
        lines = transform_first_lines(cell.splitlines(keepends=True))
        assert "".join(lines) == becomes
        assert transform_first_lines(lines) == lines
    # In a terminal, so that such a cell is not complete before it is.
    assert transform_first_lines(["%%local\n", "x\n"], local_is_plain=False)[0] == "%%local\n"


def test_what_the_notebook_runs_at_the_end() -> None:
    """Its own magics below all else, with what their values are bound to."""
    for cell, rest, magics in (
        ("x = 1\n\n%dist_gather x  # why\n", "x = 1\n\n", [("dist_gather", "x  # why", "")]),
        (
            "x\n%dist_status\n# both\ny = %dist_gather x",
            "x\n",
            [("dist_status", "", ""), ("dist_gather", "x", "y")],
        ),
        ("for x in y:\n    %dist_push x\n", "for x in y:\n    %dist_push x\n", []),
        ("x = '''\n%dist_status\n'''", "x = '''\n%dist_status\n'''", []),
    ):
        assert divide(cell) == (rest, [LineMagic(*each) for each in magics])


def test_a_comment_ends_a_line() -> None:
    """After a space and outside of quotes, as in Python and in a shell."""
    for line, without in (
        ("loss   # a list by rank", "loss  "),
        ('-n 4 # it\'s "big"', "-n 4"),
        ("d['#'] d[\"a # b\"]  # c", "d['#'] d[\"a # b\"] "),
        ("--env K=#x", "--env K=#x"),
    ):
        assert without_comment(line) == without


@pytest.fixture
def shell() -> Any:
    """What transforms cells and words syntax errors in any shell of IPython."""
    shell = TransformerManager()
    shell.SyntaxTB = SyntaxTB(theme_name="nocolor") if _has_themes() else SyntaxTB("NoColor")
    return shell


def _has_themes() -> bool:
    return "theme_name" in SyntaxTB.__init__.__code__.co_varnames


def test_what_is_python_is_sent(shell: Any):
    """Magics are transformed, indentation is taken off; ranks give the warnings."""
    python = check_source(shell, "%%distributed", "!ls\nawait x")
    assert python.splitlines() == ["# %%distributed", "get_ipython().system('ls')", "await x"]
    python = check_source(shell, "%%rank 0", "    a = 1\n    if a:\n        b = 2\n")
    assert python.splitlines() == ["# %%rank 0", "a = 1", "if a:", "    b = 2"]
    assert check_source(shell, "%%distributed", "1 is 1\n'\\d'")
    for cell in ("%load_ext autoreload", "%time x", "s = '%dist_gather x'", "%rankings"):
        assert check_source(shell, "%%distributed", cell)


def test_a_syntax_error_is_found_first(shell: Any):
    """With its line in the cell; it is shown as IPython shows it, and that nothing has run."""
    with pytest.raises(CellSyntaxError, match=r"\(line 3 of the cell\); nothing") as found:
        check_source(shell, "%%distributed -n 2", "a = 1\nb = = 2")
    *shown, last = found.value._render_traceback_()
    assert "b = = 2" in "\n".join(shown)
    assert last == "Nothing has run on the workers."


def test_what_only_a_compiler_or_tokenizer_finds(shell: Any):
    """Also what parses, and what IPython cannot transform, is said with its line, and a remedy."""
    for cell, said in (
        ("x = 1\nreturn 5", "(line 3 of the cell); nothing has run. The last line of a cell is"),
        ("yield 5", "'yield' outside function (line 2 of the cell); nothing has run. `yield`"),
        (
            "if 1:\n    x = 1\n  y = 2",
            "unindent does not match any outer indentation level (line 4",
        ),
        ("def f():\n    x = 1\n    global x", "assigned to before global declaration"),
    ):
        with pytest.raises(SyntaxError) as found:
            check_source(shell, "%%distributed", cell)
        assert said in str(found.value)
        shown = found.value._render_traceback_()  # type: ignore[attr-defined]
        assert cell.splitlines()[-1].strip() in "\n".join(shown)


def test_magics_of_the_notebook(shell: Any):
    """Ranks have none of them; which line it is, and what to do, is said before anything runs."""
    for cell, said in (
        ("x = 1\n%dist_gather x\nx", "line 3: `%dist_gather` is for the notebook, not for the"),
        ("if x:\n    y = %dist_gather x", "line 3: `%dist_gather` is for the notebook"),
        ("%distributed x = 1", "line 2: `%distributed` is for the notebook"),
        ("x\n%%rank 0\ny", "%%rank must be the first line of its cell: split the cell at line 3"),
    ):
        with pytest.raises(UsageError) as found:
            check_source(shell, "%%distributed", cell)
        assert str(found.value).startswith(said)
