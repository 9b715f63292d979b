"""Tests of `nbdist.notebook.auto_mode`: which cells are sent to the workers, and which stay."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.macro import Macro
from traitlets.config import Config

from nbdist.notebook.auto_mode import (
    AutoCells,
    Side,
    _is_theirs,
    in_one,
    parts_of,
    runs_there,
)
from nbdist.notebook.options import NbDist
from nbdist.notebook.pool import Pools
from nbdist.world.world import World

PLAIN = "x = 1"

SIDE = Side({"lines", "acc", "rank"}.__contains__, {"%ours", "%%ours"}.__contains__)


class Shell(InteractiveShell):
    """With a request whose cell has tags."""

    request: Any = None

    def get_parent(self) -> dict[str, Any]:
        return {"metadata": {} if self.request is None else self.request}


@pytest.fixture(scope="module")
def shell() -> Shell:
    """That keeps its history in memory."""
    config = Config()
    config.HistoryManager.enabled = False
    return Shell(config=config)


@pytest.fixture
def cells(shell: Shell) -> Any:
    """Of a notebook without workers, with auto mode on."""
    shell.request = {}
    pools = Pools(shell, NbDist(display="plain"))
    pools.auto.pool = "default"
    return AutoCells(pools)


def ran(cells: Any, code: str, *, silent: bool = False, stored: bool = True) -> str:
    """What the kernel runs in place of the code."""
    return str(cells.do_execute(lambda code, *_, **__: code, code, silent, stored))


def test_what_stays_and_what_is_sent(cells: Any, shell: Shell) -> None:
    """Magics of the notebook, commands, cells without code; what is silent, and other tags."""
    for code in ("%cd x", "!ls", "ls", "cd /tmp", "%%local\nx", "# a\n\n%%html\nx", "", "# only"):
        assert ran(cells, code) == code
        assert not runs_there(cells._pools, code)
    assert ran(cells, PLAIN, silent=True) == ran(cells, PLAIN, stored=False) == PLAIN
    cells._pools.auto.pool = None
    assert not runs_there(cells._pools, PLAIN)
    for shell.request in ({}, {"tags": ["a"]}, {"tags": "distributed"}, {"tags": None}, []):
        assert ran(cells, PLAIN) == PLAIN
    # Other cells are sent, as if the magic stood above; to the pool that was named, or for a tag.
    cells._pools.auto.pool, shell.request = "default", {}
    shell.user_ns["again"] = Macro("y = 2\n")
    for code in (PLAIN, "# a\nx?", "%time x", "%cd x\ny = = 1", "again"):
        sent = "y = 2\n" if code == "again" else code
        assert ran(cells, code) == f"%%distributed --auto\n{sent}"
        assert runs_there(cells._pools, code)
    cells._pools.auto.pool = "other"
    assert ran(cells, PLAIN) == f"%%distributed --auto --pool other\n{PLAIN}"
    cells._pools.auto.pool = None
    shell.request = {"tags": ["a", "distributed"]}
    assert ran(cells, PLAIN) == f"%%distributed --auto\n{PLAIN}"
    assert ran(cells, "%cd x") == "%cd x"


def test_extensions_that_both_have_loaded(cells: Any, shell: Shell) -> None:
    """Their magics run on the ranks; whose a name is."""
    shell.register_magic_function(ours, "line", "ours")
    assert ran(cells, "%ours x") == "%ours x"
    ran(cells, f"%load_ext {__name__}")
    assert ran(cells, "%ours x") == "%%distributed --auto\n%ours x"
    world = World(1, log_dir="")
    world.session.names.found({0: {"model": None}})
    names = ("model", "torch", "dist", "x")
    assert [n for n in names if _is_theirs(world, {"torch": 1}, n)] == ["model", "dist"]
    assert not _is_theirs(None, {}, "dist")


def ours(line: str) -> None:
    """A magic of an extension."""


def test_the_history(cells: Any) -> None:
    """It has what was typed, also in a terminal; what ran in its place is for `%dist_export`."""

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
    """From which line on something runs where, in its order."""
    return [(part.first, "here" if part.is_here else "there") for part in parts_of(code, SIDE)]


def test_where_lines_run() -> None:
    """Magics of the notebook and commands here, all others on the ranks, in their order."""
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
        assert in_one(code, parts_of(code, SIDE), MAGIC) or not where


def test_one_cell_of_them() -> None:
    """Each part stands in its own lines, and the ranks' part has its line numbers."""
    code = "x = 1\nz = 2\n%dist_gather x\ny = 2"
    first, nothing, here, last = in_one(code, parts_of(code, SIDE), MAGIC).splitlines()
    assert (nothing, here) == ("", "%dist_gather x")
    for line, sent in ((first, "x = 1\nz = 2\n"), (last, "#\n#\n#\ny = 2")):
        arguments = line.partition("(")[2].partition("(")[2]
        assert ast.literal_eval(f"({arguments}") == ("distributed", "--auto", sent)
    assert in_one("x", parts_of("x", SIDE), MAGIC) == f"%%{MAGIC}\nx"
    assert in_one("%cd", parts_of("%cd", SIDE), MAGIC) == "%cd"


MAGIC = "distributed --auto"
