"""Tests of `nbdist.notebook.commands.lifecycle`, and of `%dist_sync`, in a notebook."""

from __future__ import annotations

import pytest

from tests.notebook.front_end import Notebook

pytestmark = pytest.mark.shared_world


@pytest.fixture
def notebook(kernel: Notebook) -> Notebook:
    """Two workers, who have just been told of."""
    if kernel.run("%%distributed -n 2\npass").errors:
        assert kernel.run("%dist_scale 2").errors == []
        assert kernel.run("%%distributed\npass").errors == []
    return kernel


def test_the_size_is_told(notebook: Notebook) -> None:
    """Once, in one line, by `%dist_scale` alone; new ranks and what they lack are named."""
    notebook.run("%%distributed\nmade = 5")
    said = notebook.run("%dist_scale +1").text
    assert said.startswith("now 3 workers · new rank 2 does not have made"), said
    assert "now 3 workers" not in notebook.run("%%distributed\nprint(world_size)").text
    assert notebook.run("%dist_scale -1").text == "now 2 workers"


def test_the_first_rank_leaves(notebook: Notebook) -> None:
    """The other keeps its variables, and is the first now: here, in the next cell, in status."""
    notebook.run("number = 41\n%dist_scale 3")
    notebook.run("%%distributed\nwas = rank + number - 41")
    moved = "ranks 1-2 are now ranks 0-1"
    assert notebook.run("%dist_scale -r 1-2").text == f"now 2 workers · {moved}"
    said = notebook.run("%%distributed\nprint(rank, was, number)").text
    assert moved in said
    assert "0 1 41" in said
    assert "1 2 41" in said
    assert "are now" not in notebook.run("%%distributed\nprint(rank)").text
    assert notebook.run("%dist_scale -r 0,1").text == "already 2 workers"


def test_names_of_the_workers_are_copied(notebook: Notebook) -> None:
    """To the ranks that lack them; or to those that are named."""
    notebook.run("%%distributed\nmine = [rank]\nother = mine")
    notebook.run("%dist_scale 4")
    assert notebook.run("%dist_sync mine other --from 1").text == (
        "copied mine, other from rank 1 to ranks 2-3"
    )
    notebook.run("%%distributed\nsame = mine is other")
    notebook.run("%dist_gather (mine[0],same) --as found")
    assert notebook.value("found") == [(0, True), (1, True), (1, True), (1, True)]
    said = notebook.run("%dist_sync mine").text
    assert said == "all ranks have mine already; `-r all` copies to all of them"
    assert notebook.run("%dist_sync mine --from -1 -r 0").text == (
        "copied mine from rank 3 to rank 0"
    )
    notebook.run("mine = 'changed here'")
    assert "changed here" in notebook.run("%%distributed\nmine").text


CANNOT = {
    "%dist_scale 1 -r 0": "not both",
    "%dist_scale -r 5": "there is no rank 5",
    "%dist_scale -2": "it takes at least one worker. There are 2",
    "%dist_scale many": "that is not a number of workers",
    "%dist_sync gone": "rank 0: this rank has no `gone`; nothing was copied",
    "%dist_sync mine.x": "a name is copied, not an expression",
    "%dist_sync lock": "rank 0: `lock` cannot be copied: TypeError: cannot pickle",
    "%dist_sync mine --from 0,1": "it takes one rank to copy from",
    "%dist_sync mine -r 5": "there is no rank 5",
}


def test_what_cannot_be_is_one_line(notebook: Notebook) -> None:
    """With the remedy; the workers are as they were."""
    notebook.run("%%distributed\nimport threading; mine = 1\nif rank == 0: lock = threading.Lock()")
    for typed, said in CANNOT.items():
        assert said in notebook.run(typed).error, typed
    assert notebook.run("%dist_gather rank --as ranks").errors == []
    assert notebook.value("ranks") == [0, 1]
