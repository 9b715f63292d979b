"""Tests of `nbdist.notebook.commands.lifecycle`: what is said where there are no workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nbdist.errors import UsageError
from tests.notebook.front_end import Notebook


def test_nothing_to_interrupt_or_end(typed: Callable[[str], str]):
    """A line says so."""
    assert typed("%dist_interrupt") == "no cell is running on the workers\n"
    assert typed("%dist_shutdown") == "no workers were running\n"
    assert typed("%dist_shutdown --pool a") == "no workers were running\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--keep 1a", "names separated by commas, such as `step,history`"),
        ("--keep a,b.c", "names separated by commas"),
        ("-r 1 --debug", "the options of workers can only be changed for all of them"),
    ],
)
def test_what_cannot_be(typed: Callable[[str], str], options: str, said: str):
    """It is told before anything is ended; some ranks share a group with the others."""
    with pytest.raises(UsageError, match=said):
        typed(f"%dist_restart {options}")


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
