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
