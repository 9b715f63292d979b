"""Tests of what nbdist reads in cells, which cells it refuses, and which lines run on ranks."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.ultratb import SyntaxTB
from traitlets.config import Config

from nbdist.errors import UsageError
from nbdist.notebook.auto_mode import (
    AutoCells,
    SideRules,
    _is_on_ranks,
    join_parts,
    runs_on_ranks,
    split_cell,
)
from nbdist.notebook.cell_text import (
    CellSyntaxError,
    as_comment,
    cell_magic,
    check_source,
    magic_at,
    remove_comment,
    root_at,
    split_off_magics,
    transform_first_lines,
)
from nbdist.notebook.options import NbDist
from nbdist.notebook.pool import Pools
from nbdist.world.world import World

PLAIN = "x = 1"

SIDE = SideRules({"lines", "acc", "rank"}.__contains__, {"%ours", "%%ours"}.__contains__)
"""The ranks have `lines`, `acc` and `rank`; only the notebook has the magics `ours`."""


class Shell(InteractiveShell):
    """An IPython shell whose running cell has the metadata in `request`, such as tags."""

    request: Any = None

    def get_parent(self) -> dict[str, Any]:
        return {"metadata": {} if self.request is None else self.request}


@pytest.fixture(scope="module")
def shell() -> Shell:
    """A shell that keeps its history in memory."""
    config = Config()
    config.HistoryManager.enabled = False
    return Shell(config=config)


@pytest.fixture
def cells(shell: Shell) -> Any:
    """The `AutoCells` of a notebook without workers, with auto mode on."""
    shell.request = {}
    pools = Pools(shell, NbDist(display="plain"))
    pools.auto.pool = "default"
    return AutoCells(pools)


def ran(cells: Any, code: str, *, silent: bool = False, stored: bool = True) -> str:
    """Return the code that the kernel runs in place of the typed code."""
    return str(cells.do_execute(lambda code, *_, **__: code, code, silent, stored))


def test_auto_mode_sends_python_cells_to_the_ranks(cells: Any, shell: Shell) -> None:
    """Magics of the notebook, commands, cells without code and silent requests stay as they are."""
    for code in ("%cd x", "!ls", "ls", "cd /tmp", "%%local\nx", "# a\n\n%%html\nx", "", "# only"):
        assert ran(cells, code) == code
        assert not runs_on_ranks(cells._pools, code)
    assert ran(cells, PLAIN, silent=True) == ran(cells, PLAIN, stored=False) == PLAIN
    cells._pools.auto.pool = None
    assert not runs_on_ranks(cells._pools, PLAIN)
    for shell.request in ({}, {"tags": ["a"]}, {"tags": "distributed"}, {"tags": None}, []):
        assert ran(cells, PLAIN) == PLAIN
    # Other cells get the magic as first line: for the named pool, or because of their tag.
    cells._pools.auto.pool, shell.request = "default", {}
    for code in (PLAIN, "# a\nx?", "%time x", "%cd x\ny = = 1"):
        assert ran(cells, code) == f"%%distributed --auto\n{code}"
        assert runs_on_ranks(cells._pools, code)
    cells._pools.auto.pool = "other"
    assert ran(cells, PLAIN) == f"%%distributed --auto --pool other\n{PLAIN}"
    cells._pools.auto.pool = None
    shell.request = {"tags": ["a", "distributed"]}
    assert ran(cells, PLAIN) == f"%%distributed --auto\n{PLAIN}"
    assert ran(cells, "%cd x") == "%cd x"


def test_magics_of_extensions_that_ranks_loaded_run_there(cells: Any, shell: Shell) -> None:
    """A magic runs on the ranks once a cell in auto mode has loaded its extension.

    A name belongs to the ranks if a rank has bound it, or if only they have a module of that name.
    """
    shell.register_magic_function(ours, "line", "ours")
    assert ran(cells, "%ours x") == "%ours x"
    ran(cells, f"%load_ext {__name__}")
    assert ran(cells, "%ours x") == "%%distributed --auto\n%ours x"
    world = World(1, log_dir="")
    world.engine.names.record_attached({0: {"model": None}})
    names = ("model", "torch", "dist", "x")
    assert [n for n in names if _is_on_ranks(world, {"torch": 1}, n)] == ["model", "dist"]
    assert not _is_on_ranks(None, {}, "dist")


def ours(line: str) -> None:
    """A magic of an extension."""


def test_the_history_has_the_typed_cell(cells: Any) -> None:
    """The history stores the cell as typed; `AutoMode.ran` has the code that ran in its place."""

    def stored(source: str, raw: str) -> tuple[str, str]:
        return cells.store_inputs(lambda _, *both: both, 1, source, raw)  # type: ignore[no-any-return]

    sent = ran(cells, "%time x")
    assert stored("...", sent) == ("get_ipython().run_line_magic('time', 'x')\n", "%time x")
    assert "..." in cells._pools.auto.ran.values()
    assert stored("other", "other") == ("other", "other")
    ran(cells, "%cd")
    assert stored("...", "%cd") == ("...", "%cd")
    assert cells.run_cell(lambda code, *_: code, PLAIN, store_history=True).endswith(PLAIN)
    assert cells.run_cell(lambda code, *_: code, PLAIN) == PLAIN


def sides(code: str) -> list[tuple[int, str]]:
    """Return, for each part of a cell, the number of its first line and the side where it runs."""
    return [(part.first, "here" if part.is_here else "there") for part in split_cell(code, SIDE)]


def test_each_line_runs_in_the_notebook_or_on_the_ranks() -> None:
    """The notebook runs its own magics, and commands that use or set no variables of the ranks."""
    for code, where in (
        ("x = 1", [(0, "there")]),
        ("%time acc", [(0, "there")]),
        ("%%capture\n!pip install a\n%pip install b", [(0, "here")]),
        ("%ours x", [(0, "here")]),
        ("%%!\nls", [(0, "here")]),
        ("%dist_gather acc", [(0, "here")]),
        ("%matplotlib inline", [(0, "here"), (0, "there")]),
        ("%load_ext nbdist\n%dist_auto on", [(0, "here"), (1, "here")]),
        ("%config NbDist.display = 'plain'", [(0, "here")]),
        ("!pip install x\nimport x", [(0, "here"), (1, "there")]),
        ("x = 1\n%dist_gather x\ny = 2", [(0, "there"), (1, "here"), (2, "there")]),
        ("!echo $rank", [(0, "there")]),
        ("!echo {elsewhere}", [(0, "here")]),
        ("elsewhere = 1\n!echo {elsewhere}", [(0, "there")]),
        ("!for acc in 1 2; do echo $acc; done", [(0, "here")]),
        ("files = !ls", [(0, "there")]),
        ("s = '''\n%cd x\n!ls\n'''", [(0, "there")]),
        ("if x:\n    %cd there\n    !ls", [(0, "there")]),
        ("!echo it's \\\n  going on\nx = 1", [(0, "here"), (2, "there")]),
        ("x = (1,\n%cd there", [(0, "there")]),
        ("\x00", [(0, "there")]),
        ("", []),
    ):
        assert sides(code) == where
        assert join_parts(code, split_cell(code, SIDE), MAGIC) or not where


def test_joined_parts_keep_their_line_numbers() -> None:
    """Each part stays on its own lines, and code for the ranks keeps its line numbers."""
    code = "x = 1\nz = 2\n%dist_gather x\ny = 2"
    first, nothing, here, last = join_parts(code, split_cell(code, SIDE), MAGIC).splitlines()
    assert (nothing, here) == ("", "%dist_gather x")
    for line, sent in ((first, "x = 1\nz = 2\n"), (last, "#\n#\n#\ny = 2")):
        arguments = line.partition("(")[2].partition("(")[2]
        assert ast.literal_eval(f"({arguments}") == ("distributed", "--auto", sent)
    assert join_parts("x", split_cell("x", SIDE), MAGIC) == f"%%{MAGIC}\nx"
    assert join_parts("%cd", split_cell("%cd", SIDE), MAGIC) == "%cd"


def test_lines_for_both_sides_reach_the_ranks_before_later_lines() -> None:
    """The call that sends a line of both sides to the ranks is added directly below that line."""
    code = "%matplotlib inline\n%cd there\nx = 1"
    both, call, here, last = join_parts(code, split_cell(code, SIDE), MAGIC).splitlines()
    assert (both, here) == ("%matplotlib inline", "%cd there")
    for line, sent in ((call, "%matplotlib inline\n"), (last, "#\n#\nx = 1")):
        arguments = line.partition("(")[2].partition("(")[2]
        assert ast.literal_eval(f"({arguments}") == ("distributed", "--auto", sent)


MAGIC = "distributed --auto"


# --- a cell while it is typed, and before it is sent ------------------------------------------


def test_a_cell_magic_is_found_with_its_pool_and_ranks() -> None:
    """A cell magic is found below comments and blank lines, with the pool and ranks of its line."""
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
    # `as_comment` only changes the line of a cell magic; without a cell magic it changes nothing.
    for code in ("x = 1", "x\n%%distributed", "%time x", "", "# %%distributed"):
        assert cell_magic(code) is None
        assert as_comment(code) == code
        assert as_comment(f"# a\n%%distributed -n 4\n{code}") == f"# a\n# distributed -n 4\n{code}"


def test_the_magic_in_the_cursors_line_is_found() -> None:
    """`magic_at` finds a magic at the start of the line, `root_at` an expression's first name."""
    for code, expected in (
        ("x = 1\n%dist_gather lo", ("dist_gather", " lo")),
        ("# why\n%%distributed -n 2", ("distributed", " -n 2")),
        ("x %dist_gather a", None),
        ("%%distributed -n 2\nx", None),
    ):
        magic = magic_at(code, len(code))
        assert (magic and (magic.name, magic.text)) == expected
    typed = "mod", "x = model.first.we", "print(net(x)[0].we", 'batch["im', "f(x, "
    roots = [root_at(code, len(code)) for code in typed]
    parts = [("model", True), ("net", True), ("batch", True)]
    assert roots == [("mod", False), *parts, ("", False)]


def test_a_cell_begins_with_its_magic() -> None:
    """The magic moves to the first line; lines below keep their numbers; other cells stay as is."""
    for cell, becomes in (
        ("%%distributed -n 4\nx\n", "%%distributed -n 4\nx\n"),
        ("# why\n%%distributed -n 4\nx\n", "%%distributed -n 4\n# why\nx\n"),
        ("\n  # a\n%%rank 0\nx\n", "%%rank 0\n\n  # a\nx\n"),
        ("%%rank [0, 1] --pool a\nx\n", "%%rank 0,1 --pool a\nx\n"),
        ("%%local\nx\n", "# %%local\nx\n"),
        ("%%distributed -n 2 --help", "%dist_help distributed\n"),
        ("# a\n%%rank -h\n\n", "%dist_help rank\n"),
        ("%%distributed -h\nx\n", "%%distributed -h\nx\n"),
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
    # In a terminal `%%local` stays: a plain cell would run at the end of its first line.
    assert transform_first_lines(["%%local\n", "x\n"], local_is_plain=False)[0] == "%%local\n"


def test_the_notebooks_magics_at_the_end_are_split_off() -> None:
    """`%dist_...` magics at the end are split off, each with the name to which it is assigned."""
    for cell, code, magics in (
        ("x = 1\n\n%dist_gather x  # why\n", "x = 1\n\n", [("dist_gather", "x  # why", "")]),
        (
            "x\n%dist_status\n# both\ny = %dist_gather x",
            "x\n",
            [("dist_status", "", ""), ("dist_gather", "x", "y")],
        ),
        ("for x in y:\n    %dist_push x\n", "for x in y:\n    %dist_push x\n", []),
        ("x = '''\n%dist_status\n'''", "x = '''\n%dist_status\n'''", []),
    ):
        assert split_off_magics(cell) == (code, magics)


def test_a_comment_ends_a_line() -> None:
    """A `#` begins a comment after a space and outside of quotes, as in Python and in a shell."""
    for line, without in (
        ("loss   # a list by rank", "loss  "),
        ('-n 4 # it\'s "big"', "-n 4"),
        ("d['#'] d[\"a # b\"]  # c", "d['#'] d[\"a # b\"] "),
        ("--env K=#x", "--env K=#x"),
    ):
        assert remove_comment(line) == without


@pytest.fixture
def transformer() -> Any:
    """A stand-in for a shell: the parts of IPython that transform cells and show syntax errors."""
    shell = TransformerManager()
    shell.SyntaxTB = SyntaxTB(theme_name="nocolor") if _has_themes() else SyntaxTB("NoColor")
    return shell


def _has_themes() -> bool:
    return "theme_name" in SyntaxTB.__init__.__code__.co_varnames


def test_a_valid_cell_is_transformed_to_python(transformer: Any):
    """Magics are transformed and indentation is removed; a cell with a Python warning is valid."""
    python = check_source(transformer, "%%distributed", "!ls\nawait x")
    assert python.splitlines() == ["# %%distributed", "get_ipython().system('ls')", "await x"]
    python = check_source(transformer, "%%rank 0", "    a = 1\n    if a:\n        b = 2\n")
    assert python.splitlines() == ["# %%rank 0", "a = 1", "if a:", "    b = 2"]
    assert check_source(transformer, "%%distributed", "1 is 1\n'\\d'")
    for cell in ("%load_ext autoreload", "%time x", "s = '%dist_gather x'", "%rankings"):
        assert check_source(transformer, "%%distributed", cell)


def test_a_syntax_error_is_found_first(transformer: Any):
    """The error names the line, is shown as IPython shows it, and says that nothing has run."""
    with pytest.raises(CellSyntaxError, match=r"\(line 3 of the cell\); nothing") as raised:
        check_source(transformer, "%%distributed -n 2", "a = 1\nb = = 2")
    *shown, last = raised.value._render_traceback_()
    assert "b = = 2" in "\n".join(shown)
    assert last == "Nothing has run on the workers."


def test_errors_of_the_compiler_name_their_line_and_a_remedy(transformer: Any):
    """Errors that only the compiler or tokenizer finds name their line too; some name a remedy."""
    for cell, expected in (
        ("x = 1\nreturn 5", "(line 3 of the cell); nothing has run. The last line of a cell is"),
        ("yield 5", "'yield' outside function (line 2 of the cell); nothing has run. `yield`"),
        (
            "if 1:\n    x = 1\n  y = 2",
            "unindent does not match any outer indentation level (line 4",
        ),
        ("def f():\n    x = 1\n    global x", "assigned to before global declaration"),
    ):
        with pytest.raises(SyntaxError) as raised:
            check_source(transformer, "%%distributed", cell)
        assert expected in str(raised.value)
        shown = raised.value._render_traceback_()  # type: ignore[attr-defined]
        assert cell.splitlines()[-1].strip() in "\n".join(shown)


def test_magics_of_the_notebook_are_refused_on_ranks(transformer: Any):
    """The error names the line of the magic and says what to do, before anything runs."""
    for cell, expected in (
        ("x = 1\n%dist_gather x\nx", "line 3: `%dist_gather` is for the notebook, not for the"),
        ("if x:\n    y = %dist_gather x", "line 3: `%dist_gather` is for the notebook"),
        ("%distributed x = 1", "line 2: `%distributed` is for the notebook"),
        ("x\n%%rank 0\ny", "%%rank must be the first line of its cell: split the cell at line 3"),
    ):
        with pytest.raises(UsageError) as raised:
            check_source(transformer, "%%distributed", cell)
        assert str(raised.value).startswith(expected)
