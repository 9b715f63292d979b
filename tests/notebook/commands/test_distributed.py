"""Tests of `nbdist.notebook.commands.cells`: which ranks a cell is for."""

from __future__ import annotations

import pytest

from nbdist.errors import UsageError
from nbdist.notebook.command import Line
from nbdist.notebook.commands.cells import distributed, rank
from nbdist.notebook.pool import Pools
from tests.notebook.front_end import Notebook, body

pytestmark = pytest.mark.shared_world


@pytest.mark.parametrize(
    ("text", "ranks", "pool"),
    [
        ("-1,0", "-1,0", "default"),
        ("0, 2-3", "0,2-3", "default"),
        ("1 --pool a", "1", "a"),
        ("--pool=a ::2", "::2", "a"),
    ],
)
def test_ranks_of_a_rank_cell(pools: Pools, text: str, ranks: str, pool: str):
    """They may begin with a sign and have spaces between them; `--pool` may stand anywhere."""
    line = Line(rank, pools, text, "pass")
    assert (line.options.ranks, line.pool.name) == (ranks, pool)
    assert (line.text, line.cell) == (f"%%rank {text}", "pass")


def test_a_rank_cell_needs_ranks(pools: Pools):
    """Without any it says how they look."""
    with pytest.raises(UsageError, match="`%%rank` needs ranks: `%%rank 0`"):
        Line(rank, pools, "--pool a", "pass")


@pytest.mark.parametrize("text", ["-r -1,0", "--ranks=-1,0", "-r=-1,0 --setup"])
def test_ranks_of_a_distributed_cell(pools: Pools, text: str):
    """`-r` takes what begins with a sign."""
    assert Line(distributed, pools, text, "pass").options.ranks == "-1,0"


def test_one_line(notebook: Notebook) -> None:
    """`%distributed` runs a line, after options; nothing in it is replaced by the notebook's."""
    notebook.run("here = 5")
    assert notebook.run("%distributed here, there = rank, world_size  # both").errors == []
    shown = body(notebook.run("%distributed -r [0, 1] print(f'{here} of {there}')"))
    assert shown == ["── rank 0 ──", "0 of 4", "── rank 1 ──", "1 of 4"]
    assert "`%distributed x = 1`; `%%distributed` on the" in notebook.run("%distributed -n 4").error


def test_comments_after_magics(notebook: Notebook) -> None:
    """What follows a `#` is for people, on every line of a magic."""
    assert notebook.run("%%distributed -n 4  # it's four\nd = {'#': rank}").errors == []
    assert body(notebook.run("%%rank 0, 1 # some\nd"))[::2] == ["── rank 0 ──", "── rank 1 ──"]
    for line in ("d  # a dict by rank", "d['#'] --as numbers  # by rank", "d['#']+0 --as more"):
        assert notebook.run(f"%dist_gather {line}").errors == []
    assert notebook.value("numbers, more, d[1]") == ([0, 1, 2, 3], [0, 1, 2, 3], {"#": 1})
    assert "4 workers" in notebook.run("%dist_status # now").text


def test_what_is_not_of_a_distributed_cell(notebook: Notebook) -> None:
    """One line before anything runs, here or there: where to split, what to take out."""
    place = "must be the first line of its cell: split the cell at line"
    for cell, said in (
        ("here_too = 1\n\n%%distributed\nx = 1", f"UsageError: %%distributed {place} 3."),
        ("%%distributed\nx = 1\n\n%%rank 0\ny = 1", f"UsageError: %%rank {place} 4."),
        ("%%distributed\nx = 1\n%dist_gather x\nx", "UsageError: line 3: `%dist_gather` is for"),
        ("%%distributed\nx = 1\n%load_ext nbdist", "UsageError: line 3: `%load_ext nbdist` is"),
    ):
        assert notebook.run(cell).error.startswith(said)
    for cell in ("here_too", "%%distributed\ny"):
        assert (
            "NameError" in notebook.run(cell).errors[0]["ename" if cell == "here_too" else "evalue"]
        )


def test_magics_at_the_end_of_a_cell(notebook: Notebook) -> None:
    """They are the notebook's, and run after it; not where it has failed."""
    assert notebook.run("%%distributed\nlast = rank\n\n%dist_gather last  # here").errors == []
    assert notebook.value("last") == [0, 1, 2, 3]
    failed = notebook.run("%%rank 0\nlast = 7\n1 / 0\n%dist_gather last")
    assert failed.errors[0]["evalue"].endswith("ZeroDivisionError: division by zero")
    assert notebook.value("last") == [0, 1, 2, 3]
