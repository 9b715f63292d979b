"""Tests of `nbdist.notebook.auto_mode`: which cells are sent to the workers, and which stay."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.macro import Macro
from traitlets.config import Config

from nbdist.notebook.auto_mode import AutoCells, _is_theirs, runs_there
from nbdist.notebook.options import NbDist
from nbdist.notebook.pool import Pools
from nbdist.world.world import World

PLAIN = "x = 1"


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


@pytest.mark.parametrize(
    "code", ["%cd x", "!ls", "ls", "cd /tmp", "%%local\nx", "# a\n\n%%html\nx", "", "# only"]
)
def test_what_stays(cells: Any, code: str) -> None:
    """Magics of the notebook, commands, and cells without code."""
    assert ran(cells, code) == code
    assert not runs_there(cells._pools, code)


def test_what_is_sent(cells: Any, shell: Shell) -> None:
    """Other cells, as if the magic stood above them; to the pool that was named."""
    assert ran(cells, PLAIN) == f"%%distributed --auto\n{PLAIN}"
    assert runs_there(cells._pools, PLAIN)
    assert ran(cells, "# a\nx?") == "%%distributed --auto\n# a\nx?"
    assert ran(cells, "%time x") == "%%distributed --auto\n%time x"
    assert ran(cells, "%cd x\ny = = 1") == "%%distributed --auto\n%cd x\ny = = 1"
    shell.user_ns["again"] = Macro("y = 2\n")
    assert ran(cells, "again") == "%%distributed --auto\ny = 2\n"
    cells._pools.auto.pool = "other"
    assert ran(cells, PLAIN) == f"%%distributed --auto --pool other\n{PLAIN}"
    cells._pools.auto.pool = None
    assert ran(cells, PLAIN) == PLAIN
    assert not runs_there(cells._pools, PLAIN)


def test_extensions_that_both_have_loaded(cells: Any, shell: Shell) -> None:
    """Their magics run on the ranks; those of extensions that only the notebook has, here."""
    shell.register_magic_function(ours, "line", "ours")
    assert ran(cells, "%ours x") == "%ours x"
    ran(cells, f"%load_ext {__name__}")
    assert ran(cells, "%ours x") == "%%distributed --auto\n%ours x"


def ours(line: str) -> None:
    """A magic of an extension."""


def test_whose_a_name_is() -> None:
    """What the notebook has, it has itself, also a module that is ready in every worker."""
    world = World(1, log_dir="")
    world.session.names.found({0: {"model": None}})
    theirs = [
        name for name in ("model", "torch", "dist", "x") if _is_theirs(world, {"torch": 1}, name)
    ]
    assert theirs == ["model", "dist"]
    assert not _is_theirs(None, {}, "dist")


def test_nothing_that_front_ends_ask_for_themselves(cells: Any) -> None:
    """What is silent, or not stored; also what lists variables, where there are no workers."""
    assert ran(cells, PLAIN, silent=True) == PLAIN
    assert ran(cells, PLAIN, stored=False) == PLAIN
    assert ran(cells, "%who_ls", silent=True) == "%who_ls"


@pytest.mark.parametrize("metadata", [{"tags": ["a", "distributed"]}])
def test_a_tag(cells: Any, shell: Shell, metadata: Any) -> None:
    """It stands in for the magic, also while auto mode is off."""
    cells._pools.auto.pool, shell.request = None, metadata
    assert ran(cells, PLAIN) == f"%%distributed --auto\n{PLAIN}"
    assert ran(cells, "%cd x") == "%cd x"


@pytest.mark.parametrize("metadata", [{"tags": ["a"]}, {"tags": "distributed"}, {"tags": None}, []])
def test_other_metadata(cells: Any, shell: Shell, metadata: Any) -> None:
    """Of any form."""
    cells._pools.auto.pool, shell.request = None, metadata
    assert ran(cells, PLAIN) == PLAIN


def test_the_history(cells: Any) -> None:
    """It has what was typed; what ran in its place is kept for `%dist_export`."""

    def stored(source: str, raw: str) -> tuple[str, str]:
        return cells.store_inputs(lambda _, *both: both, 1, source, raw)  # type: ignore[no-any-return]

    sent = ran(cells, "%time x")
    assert stored("...", sent) == ("get_ipython().run_line_magic('time', 'x')\n", "%time x")
    assert "..." in cells._pools.auto.ran.values()
    assert stored("other", "other") == ("other", "other")
    ran(cells, "%cd")
    assert stored("...", "%cd") == ("...", "%cd")


def test_in_a_terminal(cells: Any) -> None:
    """What somebody has typed is stored there."""
    assert cells.run_cell(lambda code, *_: code, PLAIN, store_history=True).endswith(PLAIN)
    assert cells.run_cell(lambda code, *_: code, PLAIN) == PLAIN
