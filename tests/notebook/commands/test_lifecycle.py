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
def test_the_size_changes(kernel: Notebook) -> None:
    """It is said once, with what new ranks lack and which ranks are others now."""
    assert kernel.run("%%distributed -n 2\npass").errors == []
    kernel.run("%%distributed\nkept = made = 5")
    said = kernel.run("%dist_scale +1").text
    assert said.startswith("now 3 workers · new rank 2 does not have kept and made"), said
    assert "now 3 workers" not in kernel.run("%%distributed\nprint(world_size)").text
    assert kernel.run("%dist_scale -1").text == "now 2 workers"
    kernel.run("number = 41\n%dist_scale 3")
    kernel.run("%%distributed\nwas = rank + number - 41")
    moved = "ranks 1-2 are now ranks 0-1"
    assert kernel.run("%dist_scale -r 1-2").text == f"now 2 workers · {moved}"
    said = kernel.run("%%distributed\nprint(rank, was, number)").text
    for each in (moved, "0 1 41", "1 2 41"):
        assert each in said
    assert "are now" not in kernel.run("%%distributed\nprint(rank)").text
    assert kernel.run("%dist_scale -r 0,1").text == "already 2 workers"
    # What new ranks lack is copied, to those or to the ones that are named.
    kernel.run("%%distributed\nmine = [rank]\nother = mine")
    kernel.run("%dist_scale 4")
    said = kernel.run("%dist_sync mine other --from 1").text
    assert said == "copied mine, other from rank 1 to ranks 2-3"
    kernel.run("%dist_gather (mine[0],mine is other) --as found")
    assert kernel.value("found") == [(0, True), (1, True), (1, True), (1, True)]
    said = kernel.run("%dist_sync mine").text
    assert said == "all ranks have mine already; `-r all` copies to all of them"
    said = kernel.run("%dist_sync mine --from -1 -r 0").text
    assert said == "copied mine from rank 3 to rank 0"
