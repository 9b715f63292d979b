"""Failures, deaths and Stop as they are seen in a notebook."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.notebook.front_end import Notebook, Outcome, body
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world


def later(gate: Path, does: str) -> str:
    """Lines of a cell after which its rank does this once there is a file."""
    return (
        "import os, signal, threading, time\ndef later():\n"
        f"    while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n    {does}\n"
        "threading.Thread(target=later).start()"
    )


def test_rank_that_dies_while_idle(notebook: Notebook, tmp_path: Path) -> None:
    """It is told under the last cell, with no cell run, and a new rank is in its place."""
    gate = tmp_path / "dies"
    kills = later(gate, "os.kill(os.getpid(), signal.SIGKILL)")
    notebook.run(f"%%rank 1\nkept = 1\n{kills}")
    last = notebook.client.execute("None")
    notebook.client.get_shell_msg(timeout=SOON)
    gate.touch()
    said = (
        r"rank 1 was killed by SIGKILL while no cell was running · rank 1 was restarted and its "
        r"variables \(.+\) are gone; other ranks are unaffected"
    )
    started, deadline = time.monotonic(), time.monotonic() + SOON
    shown = ""
    while not re.fullmatch(said, shown):
        message = notebook.client.get_iopub_msg(timeout=deadline - time.monotonic())
        if message["msg_type"] in ("display_data", "update_display_data"):
            shown = message["content"]["data"]["text/plain"]
            sys.stdout.write(f"{shown}\n")
            assert message["parent_header"]["msg_id"] == last
    sys.stdout.write(f"told {time.monotonic() - started:.2f} s after the death\n")
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
            while not session.link.arrived: pass
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
    _agent(notebook).kill()
    notebook.next_shown("was killed by SIGKILL, and its workers ended with it")
    assert "the agent" in notebook.run("%%distributed -n 2\n1").error
    assert "2 workers ready" in notebook.run("%dist_restart").text
    assert notebook.run("%%distributed\npass").errors == []


def _agent(notebook: Notebook) -> psutil.Process:
    children = notebook.process.children()
    (agent,) = [child for child in children if "nbdist.agent" in " ".join(child.cmdline())]
    return agent


# --- what ranks are doing ---------------------------------------------------------------


def test_stacks_of_a_rank_that_holds_the_gil(notebook: Notebook) -> None:
    """A rank that is stopped says so, and how it goes on."""
    status = notebook.run("%dist_status").text.splitlines()
    pid = int(status[4].split()[2])
    os.kill(pid, signal.SIGSTOP)
    try:
        said = notebook.run("%dist_stack")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert body(said) == [
        "── ranks 0-1,3 same · idle ──",
        "── rank 2 · stopped by a signal ──",
        f"  `kill -CONT {pid}` resumes it",
    ]
    assert "<details open" in said.panel["text/html"]
    assert body(notebook.run("%dist_stack -r -1")) == ["── rank 3 · idle ──"]
    assert "have no log files: NBDIST_LOG_DIR is empty" in notebook.run("%dist_log").error


# --- why ----------------------------------------------------------------------------------


def test_why_of_an_exception(notebook: Notebook) -> None:
    """`%dist_why` has time, rank, process and traceback, and a line for what followed."""
    status = notebook.run("%dist_status").text
    (pid,) = re.findall(r"^1 +\w+ +(\d+)", status, re.MULTILINE)
    failed = notebook.run(
        "%%distributed\nif rank == 1:\n    raise ValueError('bad shard')\ndist.barrier()"
    )
    number = failed.reply["execution_count"]
    why = notebook.run("%dist_why")
    first, *lines = why.text.splitlines()
    assert re.match(r"\d\d:\d\d:\d\d · rank 1 on ", first)
    assert f" (pid {pid}) · " in first
    assert first.endswith(f"s into Cell In[{number}] · ValueError: bad shard")
    assert f"Cell In[{number}], line 3" in why.text
    assert lines[-1].startswith("ranks 0,2-3: Released: it waited in barrier (cell line 4)")
    assert "raise" in why.panel["text/html"]
    # Restarts and other cells do not change it; the next failure does.
    notebook.run("%dist_restart")
    notebook.run("%%distributed\npass")
    assert notebook.run("%dist_why").text == why.text
    notebook.run("%%distributed\n1 / 0")
    assert "ZeroDivisionError: division by zero" in notebook.run("%dist_why").text
    assert notebook.run("%dist_why").text.endswith(": the same")


def test_why_of_a_crash(notebook: Notebook) -> None:
    """A rank that crashed left its Python stack, in its block and in `%dist_why`."""
    outcome = notebook.run(
        "%%distributed\nimport ctypes\nprint('hello')\ndef crash():\n    ctypes.string_at(0)\n"
        "if rank == 2: crash()\ndist.barrier()"
    )
    number = outcome.reply["execution_count"]
    assert "was killed by SIGSEGV" in outcome.error
    stack = [
        "Fatal Python error: Segmentation fault, in",
        f"  Cell In[{number}], line 6",
        "    if rank == 2: crash()",
        f"  Cell In[{number}], line 5, in crash",
        "    ctypes.string_at(0)",
    ]
    block = outcome.panel["text/plain"].partition("── rank 2 ✗ ──\n")[2].splitlines()
    assert block[0] == "hello"
    assert block[1:6] == stack
    why = notebook.run("%dist_why").text.splitlines()
    assert why[0].endswith(f"Cell In[{number}] · the process was killed by SIGSEGV")
    assert why[1:3] == ["its last lines:", "hello"]
    assert why[3:8] == stack
    assert why[-1].startswith("ranks 0-1,3: Released: it waited ")


# --- stop -------------------------------------------------------------------------------


def test_interrupt_after_a_second_stop(notebook: Notebook) -> None:
    """Two Stops at once give the notebook back; `%dist_interrupt` ends what still runs."""
    presses: list[float] = []

    def press(outcome: Outcome) -> None:
        shown = [each["data"]["text/plain"] for each in (*outcome.displays, *outcome.updates)]
        if any("running" in text for text in shown) and not presses:
            presses.append(time.monotonic())
            notebook.manager.interrupt_kernel()
            time.sleep(0.3)
            notebook.manager.interrupt_kernel()

    notebook.run(
        "%%distributed\nimport signal, time\nprint('running')\n"
        "if rank: signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(0.1)",
        press,
    )
    outcome = notebook.run("%dist_interrupt")
    assert "Ranks 1-3 were restarted and their variables (" in outcome.errors[0]["evalue"]
    assert notebook.run("%%distributed\ndist.barrier()").errors == []


# --- policies -----------------------------------------------------------------------------


def test_setup_cell(notebook: Notebook) -> None:
    """It runs again in every new worker, with the names of the notebook that it uses."""
    notebook.run("start = 40")
    notebook.run("%%distributed\nlost = rank")
    assert notebook.run("%%distributed --setup\nbase = start + 2").errors == []
    said = "rank 2 was restarted and its variables ("
    assert notebook.run("%dist_restart -r 2").text.startswith(said)
    assert "True" in notebook.run("%%distributed\nbase == 42").text
    # What it binds is the workers', also in new ones: the notebook's does not overwrite it.
    notebook.run("base = 'of the notebook'")
    assert notebook.run("%%distributed --setup\nbase = start + 3").errors == []
    assert "worker variables cleared" in notebook.run("%dist_restart").text
    outcome = notebook.run("%%distributed\nbase == 43")
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
