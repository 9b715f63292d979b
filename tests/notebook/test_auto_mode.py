"""Tests of `nbdist.notebook.auto_mode`: which cells are sent to the workers, and which stay."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.notebook.auto_mode import AutoCells, AutoMode

PLAIN = "x = 1"


class Shell:
    """With a request whose cell has tags."""

    def __init__(self, metadata: Any) -> None:
        self.parent = {"metadata": metadata}

    def get_parent(self) -> dict[str, Any]:
        return self.parent


def ran(code: str, *how: Any, pool: str | None = "default", metadata: Any = None) -> str:
    """What the kernel runs in place of the code."""
    mode = AutoMode()
    mode.pool = pool
    cells: Any = AutoCells(Shell(metadata or {}), mode)  # type: ignore[arg-type]
    return str(cells.do_execute(lambda code, *_, **__: code, code, *(how or (False,))))


@pytest.mark.parametrize("code", ["%time x", "!ls", "%%local\nx", "# a\n\n%%time\nx", "", "# only"])
def test_what_stays(code: str) -> None:
    """Magics, commands, and cells without code."""
    assert ran(code) == code


def test_what_is_sent() -> None:
    """Plain cells, while it is on, as if the magic stood above them; to the pool that was named."""
    assert ran(PLAIN) == f"%%distributed --auto\n{PLAIN}"
    assert ran("# a\nx?") == "%%distributed --auto\n# a\nx?"
    assert ran(PLAIN, pool="other") == f"%%distributed --auto --pool other\n{PLAIN}"
    assert ran(PLAIN, pool=None) == PLAIN


def test_nothing_that_front_ends_ask_for_themselves() -> None:
    """What is silent, or not stored."""
    assert ran(PLAIN, *(True,)) == PLAIN
    assert ran(PLAIN, *(False, False)) == PLAIN


@pytest.mark.parametrize("metadata", [{"tags": ["a", "distributed"]}])
def test_a_tag(metadata: Any) -> None:
    """It stands in for the magic, also while auto mode is off."""
    assert ran(PLAIN, pool=None, metadata=metadata) == f"%%distributed --auto\n{PLAIN}"
    assert ran("%time x", pool=None, metadata=metadata) == "%time x"


@pytest.mark.parametrize("metadata", [{"tags": ["a"]}, {"tags": "distributed"}, {"tags": None}, []])
def test_other_metadata(metadata: Any) -> None:
    """Of any form."""
    assert ran(PLAIN, pool=None, metadata=metadata) == PLAIN


def test_in_a_terminal() -> None:
    """What somebody has typed is stored there."""
    mode = AutoMode()
    mode.pool = "default"
    cells: Any = AutoCells(Shell({}), mode)  # type: ignore[arg-type]
    assert cells.run_cell(lambda code, *_: code, PLAIN, store_history=True).endswith(PLAIN)
    assert cells.run_cell(lambda code, *_: code, PLAIN) == PLAIN
    assert repr(mode) == "<AutoMode on for default>"
