"""Failures, deaths and Stop as they are seen in a notebook."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebook.front_end import Notebook
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world


def test_rank_that_dies_while_idle(notebook: Notebook, tmp_path: Path) -> None:
    """It is told under the last cell, with no cell run, and a new rank is in its place."""
    gate = tmp_path / "dies"
    notebook.run(
        "%%rank 1\nkept = 1\nimport os, signal, threading, time\ndef later():\n"
        f"    while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\nthreading.Thread(target=later).start()"
    )
    last = notebook.client.execute("None")
    notebook.reply_to(last)
    gate.touch()
    said = (
        r"rank 1 was killed by SIGKILL while no cell was running · rank 1 was restarted and its "
        r"variables \(.+\) are gone; other ranks are unaffected"
    )
    shown, deadline = "", time.monotonic() + SOON
    while not re.fullmatch(said, shown):
        message = notebook.client.get_iopub_msg(timeout=deadline - time.monotonic())
        if message["msg_type"] in ("display_data", "update_display_data"):
            shown = message["content"]["data"]["text/plain"]
            assert message["parent_header"]["msg_id"] == last
    outcome = notebook.run("%%distributed\ndist.barrier()")
    assert "rank 1" not in outcome.text
    assert "killed by SIGKILL while no cell was running" in notebook.run("%dist_why").text


BOMB = """
import os, signal
import nbdist.notebook.extension
class Bomb:
    def __reduce__(self):
        session = {session}
        if {pid} in session.pids.values():
            os.kill({pid}, signal.SIGKILL)
            while not any("Died" in repr(news) for news in [*session.link.arrived]): pass
        return int, (7,)
bomb = Bomb()
"""


@pytest.mark.parametrize("magic", ["%%distributed -r 0\nbomb", "%dist_push bomb"])
def test_death_while_a_cell_is_sent(notebook: Notebook, magic: str) -> None:
    """A rank that dies after the cell has looked, and before it runs, is told in it or the next."""
    pid = notebook.run("%%rank 1\nimport os; os.getpid()").text.split()[-1]
    session = "nbdist.notebook.extension._loaded[get_ipython()][0].default.world.session"
    notebook.run(BOMB.format(session=session, pid=pid))
    told = [notebook.run(magic), notebook.run("%%distributed\npass")]
    assert [outcome.errors for outcome in told] == [[], []]
    said = "rank 1 was killed by SIGKILL while no cell was running · rank 1 was restarted"
    assert sum(outcome.text.count(said) for outcome in told) == 1


@pytest.mark.own_agent
def test_agent_that_dies(fresh: Callable[..., Notebook]) -> None:
    """It is told under the last cell, and in the next; workers can be started again."""
    notebook = fresh("%load_ext nbdist", "%%distributed -n 2\npass")
    (agent,) = (
        each for each in notebook.process.children() if "nbdist.agent" in " ".join(each.cmdline())
    )
    agent.kill()
    notebook.next_shown("was killed by SIGKILL, and its workers ended with it")
    assert "the agent" in notebook.run("%%distributed -n 2\n1").error
    assert "2 workers ready" in notebook.run("%dist_restart").text
    assert notebook.run("%%distributed\npass").errors == []


def test_why_of_an_exception(notebook: Notebook) -> None:
    """`%dist_why` has place and traceback, a line for what followed; until the next failure."""
    notebook.run("%%distributed\nif rank == 1:\n    raise ValueError('bad shard')\ndist.barrier()")
    why = notebook.run("%dist_why").text
    assert re.match(r"\d\d:\d\d:\d\d · rank 1 on .* \(pid \d+\) · .* s into Cell In", why)
    assert "ValueError: bad shard" in why
    assert "\nranks 0,2-3: Released: it waited in barrier (cell line 4)" in why
    notebook.run("%dist_restart")
    notebook.run("%%distributed\npass")
    assert notebook.run("%dist_why").text == why
    notebook.run("%%distributed\n1 / 0")
    why = notebook.run("%dist_why").text
    assert "ZeroDivisionError: division by zero" in why
    assert why.endswith(": the same")


def test_setup_cell(notebook: Notebook) -> None:
    """It runs again in new workers with the notebook's names; what it binds is the workers'."""
    notebook.run("start, base = 40, 'of the notebook'")
    assert notebook.run("%%distributed --setup\nbase = start + 2").errors == []
    said = "rank 2 was restarted and its variables"
    for restart, says in (("-r 2", said), ("", "worker variables cleared")):
        assert says in notebook.run(f"%dist_restart {restart}").text
        outcome = notebook.run("%%distributed\nbase == 42")
        assert "True" in outcome.text
        assert "was not sent" not in outcome.text
    notebook.run("%dist_shutdown")


def test_restart_keeps_what_is_named(notebook: Notebook) -> None:
    """Of some ranks or of all; the notebook's own variable of that name is not in the way."""
    notebook.run("first = 'of the notebook'")
    notebook.run("%%distributed\nfirst, second = [rank], rank")
    said = notebook.run("%dist_restart -r 1,3 --keep first").text
    assert "ranks 1,3 were restarted and their variables (" in said
    assert ("second" in said, "first" in said) == (True, False)
    said = notebook.run("%dist_restart --keep first").text
    assert "worker variables cleared except first" in said
    outcome = notebook.run("%%distributed\nassert first == [rank]")
    assert "was not sent" not in outcome.text


def test_no_free_and_hang_timeout(notebook: Notebook) -> None:
    """A wait without an end is told of when it was asked for, and ends with Stop."""
    outcome = notebook.run(
        "%%distributed --no-free --hang-timeout 0.5\nif rank != 1: dist.barrier()",
        notebook.stop_at("ranks 0,2-3 wait in barrier, line 2 · rank 1 finished"),
    )
    assert outcome.error == "KeyboardInterrupt: Stopped on ranks 0-3. No variables were lost."
    assert notebook.run("%%distributed\ndist.barrier()").errors == []
