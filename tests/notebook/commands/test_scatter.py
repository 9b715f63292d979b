"""Tests of `nbdist.notebook.commands.values`: what the notebook has is on the ranks in parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nbdist.errors import WorldNotStarted
from tests.notebook.front_end import Notebook, body

pytestmark = pytest.mark.shared_world


def test_without_workers(typed: Callable[[str], str]):
    """It says how to start some."""
    with pytest.raises(WorldNotStarted, match="`%dist_scatter` needs workers"):
        typed("%dist_scatter x")


def test_parts_are_the_workers(two: Notebook):
    """A later cell finds them, and the notebook its whole value, until that is bound anew."""
    two.run("x = [1, 2, 3]")
    assert two.run("%dist_scatter x").text == "scattered x: 3 elements, 2 to rank 0, 1 to rank 1"
    assert body(two.run("%%distributed\nprint(x)")) == [
        "── rank 0 ──",
        "[1, 2]",
        "── rank 1 ──",
        "[3]",
    ]
    assert two.value("x") == [1, 2, 3]
    two.run("x = 'another'")
    assert body(two.run("%%distributed\nprint(x)"))[1:] == ["another"]


def test_another_name_and_some_ranks(two: Notebook):
    """Of a dimension that is named."""
    two.run("import numpy as np; grid = np.arange(6).reshape(2, 3)")
    said = two.run("%dist_scatter grid --dim 1 --as column -r 1").text
    assert said == "scattered column: 3 along dimension 1, 3 to rank 1"
    assert two.run("%dist_gather column -r 1").errors == []
    assert two.value("column.tolist()") == [[0, 1, 2], [3, 4, 5]]
    assert "rank 0 has no `column`" in two.run("%dist_gather column --as c").error


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nope", "the notebook has no `nope`."),
        ("five", "`five` (int) cannot be split"),
        ("word --dim 2", "`word` (list) has no dimension 2 to split."),
        ("word --as a.b", "`a.b`: name the parts"),
    ],
)
def test_what_cannot_be(two: Notebook, line: str, said: str):
    """One line says why."""
    two.run("five = 5; word = [1]")
    assert said in two.run(f"%dist_scatter {line}").error
