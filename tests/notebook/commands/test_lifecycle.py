"""Tests of `nbdist.notebook.commands.lifecycle`, and of `%dist_sync`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.notebook.front_end import Notebook


def test_nothing_to_interrupt_or_end(typed: Callable[[str], str]):
    """A line says so."""
    assert typed("%dist_interrupt") == "no cell is running on the workers\n"
    assert typed("%dist_shutdown") == "no workers were running\n"
    assert typed("%dist_shutdown --pool a") == "no workers were running\n"


def test_a_stopped_shutdown_is_completed(fresh: Callable[..., Notebook]):
    """Workers whose end was being waited for when Stop came are ended by what comes next."""
    notebook = fresh("%load_ext nbdist")
    before = notebook.process.children(recursive=True)
    notebook.run("%%distributed -n 2\nimport atexit, time; atexit.register(time.sleep, 60)")
    stopped = notebook.run(
        "import os, signal, threading\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "get_ipython().run_line_magic('dist_shutdown', '')"
    )
    assert stopped.error.startswith("KeyboardInterrupt: Stopped.")
    assert notebook.run("%%distributed -n 3\npass").errors == []
    assert notebook.run("%dist_status").text.splitlines()[0].endswith(" · gloo · ready")
    assert notebook.run("%dist_shutdown").errors == []
    assert notebook.process.children(recursive=True) == before


@pytest.mark.shared_world
def test_a_task_that_nothing_follows(notebook: Notebook):
    """A cell is told how to end it, and does not wait; variables are kept."""
    notebook.run("%%distributed\nkept = rank")
    notebook.run(
        "from nbdist.notebook.extension import _loaded\n"
        "world = _loaded[get_ipython()][0].default.world\n"
        "running = world.submit(world.task('import time; time.sleep(600)'))"
    )
    (error,) = notebook.run("%%distributed\npass").errors
    assert "stop it with `%dist_interrupt`" in error["evalue"]
    said = notebook.run("%dist_interrupt")
    last = said.displays[-1]["data"]["text/plain"]
    assert (said.errors, last) == ([], "Stopped on ranks 0-3. No variables were lost.")
    assert notebook.run("%%distributed\nassert kept == rank").errors == []


@pytest.fixture
def pair(kernel: Notebook) -> Notebook:
    """Two workers, who have just been told of."""
    if kernel.run("%%distributed -n 2\npass").errors:
        assert kernel.run("%dist_scale 2").errors == []
        assert kernel.run("%%distributed\npass").errors == []
    return kernel


@pytest.mark.shared_world
def test_the_size_changes(pair: Notebook) -> None:
    """It is said once, with what new ranks lack and which ranks are others now."""
    pair.run("%%distributed\nkept = made = 5")
    said = pair.run("%dist_scale +1").text
    assert said.startswith("now 3 workers · new rank 2 does not have kept and made"), said
    assert "now 3 workers" not in pair.run("%%distributed\nprint(world_size)").text
    assert pair.run("%dist_scale -1").text == "now 2 workers"
    pair.run("number = 41\n%dist_scale 3")
    pair.run("%%distributed\nwas = rank + number - 41")
    moved = "ranks 1-2 are now ranks 0-1"
    assert pair.run("%dist_scale -r 1-2").text == f"now 2 workers · {moved}"
    said = pair.run("%%distributed\nprint(rank, was, number)").text
    assert moved in said
    assert "0 1 41" in said
    assert "1 2 41" in said
    assert "are now" not in pair.run("%%distributed\nprint(rank)").text
    assert pair.run("%dist_scale -r 0,1").text == "already 2 workers"


@pytest.mark.shared_world
def test_names_of_the_workers_are_copied(pair: Notebook) -> None:
    """To the ranks that lack them; or to those that are named."""
    pair.run("%%distributed\nmine = [rank]\nother = mine")
    pair.run("%dist_scale 4")
    said = pair.run("%dist_sync mine other --from 1").text
    assert said == "copied mine, other from rank 1 to ranks 2-3"
    pair.run("%dist_gather (mine[0],mine is other) --as found")
    assert pair.value("found") == [(0, True), (1, True), (1, True), (1, True)]
    said = pair.run("%dist_sync mine").text
    assert said == "all ranks have mine already; `-r all` copies to all of them"
    said = pair.run("%dist_sync mine --from -1 -r 0").text
    assert said == "copied mine from rank 3 to rank 0"
