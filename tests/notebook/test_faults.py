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

from nbdist.output.ansi import strip
from tests.notebook.front_end import Notebook, Outcome, body
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world


def test_rank_that_dies(notebook: Notebook) -> None:
    """The cell says which rank died and how; the rank is replaced, the others keep all."""
    shipped = "%%distributed\nassert weights == [1, 2]"
    notebook.run("weights = [1, 2]")
    notebook.run("%%distributed\nkept = weights")
    outcome = notebook.run("%%distributed\nimport os\nif rank == 2: os._exit(3)")
    assert "rank 2 on " in outcome.error
    assert re.search(r"exited with code 3 \d+\.\d", outcome.error)
    said = r"Rank 2 was restarted and its variables \(.+\) are gone; other ranks are unaffected"
    assert re.search(said, outcome.error)
    assert notebook.run(shipped).errors == []  # to the new rank too
    assert body(notebook.run("%%distributed\n'kept' in globals()")) == [
        "── ranks 0-1,3 (same) ──",
        "True",
        "── rank 2 ──",
        "False",
    ]


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


def test_death_while_idle_that_the_event_loop_did_not_see(notebook: Notebook) -> None:
    """The next cell runs, with a rank in its place, and says so."""
    outcome = notebook.run(
        "import os, signal, time\n"
        "get_ipython().run_cell_magic('rank', '1', 'import os; pid = os.getpid()')\n"
        "get_ipython().run_line_magic('dist_gather', 'pid -r 1')\n"
        "os.kill(pid, signal.SIGKILL); time.sleep(2)\n"
        "get_ipython().run_cell_magic('distributed', '', 'dist.barrier()')"
    )
    assert outcome.errors == []
    said = "rank 1 was killed by SIGKILL while no cell was running"
    assert said in outcome.displays[-1]["data"]["text/plain"]


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


@pytest.mark.parametrize(
    "magic", ["%%distributed\nbomb", "%dist_push bomb", "%%distributed -r 0\nbomb"]
)
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
    """It is told under the last cell, where that is watched, and in the next as in the status."""
    notebook = fresh("%load_ext nbdist", "%%distributed -n 2\npass")
    _agent(notebook).kill()
    shown, deadline = "", time.monotonic() + SOON
    while "was killed by SIGKILL, and its workers ended with it" not in shown:
        message = notebook.client.get_iopub_msg(timeout=deadline - time.monotonic())
        if message["msg_type"] in ("display_data", "update_display_data"):
            shown = message["content"]["data"]["text/plain"]
    assert "2 workers ready" in notebook.run("%dist_restart").text
    agent = _agent(notebook)
    agent.kill()
    agent.wait(SOON)
    error = notebook.run("%%distributed\n1").error
    assert "the agent on " in error
    assert "was killed by SIGKILL" in error
    assert "the agent" in notebook.run("%%distributed -n 2\n1").error
    assert "2 workers ready" in notebook.run("%dist_restart").text
    assert notebook.run("%%distributed\npass").errors == []


def _agent(notebook: Notebook) -> psutil.Process:
    children = notebook.process.children()
    (agent,) = [child for child in children if "nbdist.agent" in " ".join(child.cmdline())]
    return agent


# --- what ranks are doing ---------------------------------------------------------------


def test_status_has_the_last_collective(notebook: Notebook) -> None:
    """Once there was one, `%dist_status` names each rank's last, and whether it is done."""
    notebook.run("%%distributed\ndist.barrier()")
    _, head, *lines = notebook.run("%dist_status").text.splitlines()
    assert head.endswith("last collective")
    assert len(lines) == 4
    for line in lines:
        assert "barrier #" in line
        assert line.endswith(", done")


def test_stacks_of_idle_ranks(notebook: Notebook) -> None:
    """`%dist_stack` says that they are idle, equal ones once."""
    lines = body(notebook.run("%dist_stack"))
    assert lines == ["── ranks 0-3 same · idle ──"]
    assert body(notebook.run("%dist_stack -r -1")) == ["── rank 3 · idle ──"]
    assert "BadRanks" in notebook.run("%dist_stack -r 9").error


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
    html = said.panel["text/html"]
    assert "<details open" in html
    assert "rank 2" in html


def test_stacks_without_workers(typed: Callable[[str], str]) -> None:
    """Without workers one line says how to start some."""
    assert typed("%dist_stack").startswith("no workers are running")


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


def test_why_of_a_death_while_idle(notebook: Notebook, tmp_path: Path) -> None:
    """What a rank said before it died with no cell running can be read afterwards."""
    gate = tmp_path / "dies"
    notebook.run("%%rank 1\n" + later(gate, "print('farewell'); os._exit(7)"))
    gate.touch()
    deadline = time.monotonic() + SOON
    why = [""]
    while not why[0].endswith("the process exited with code 7 while no cell was running"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
        why = notebook.run("%dist_why").text.splitlines()
    assert " · rank 1 on " in why[0]
    assert why[1] == "its last lines:"
    assert why[-1] == "farewell"


# --- stop -------------------------------------------------------------------------------


def interrupt_when(notebook: Notebook, is_seen: str) -> Callable[[Outcome], None]:
    """Presses Stop, as a front end does, as soon as some text is shown."""
    pressed: list[float] = []

    def watch(outcome: Outcome) -> None:
        if not pressed and any(
            is_seen in each["data"]["text/plain"] for each in (*outcome.displays, *outcome.updates)
        ):
            pressed.append(time.monotonic())
            notebook.manager.interrupt_kernel()

    return watch


@pytest.mark.parametrize("waits", ["while True: pass", "time.sleep(600)"])
def test_stop(notebook: Notebook, waits: str) -> None:
    """Stop ends the cell on all ranks within seconds; variables and workers are kept."""
    outcome = notebook.run(
        f"%%distributed\nimport time\nkept = rank\nprint('running')\n{waits}",
        interrupt_when(notebook, "running"),
    )
    assert outcome.error == "KeyboardInterrupt: Stopped on ranks 0-3. No variables were lost."
    assert body(notebook.run("%%distributed -r 2\nkept")) == ["── rank 2 ──", "2"]


def test_stop_of_training_that_stops_early(notebook: Notebook) -> None:
    """Who catches it and goes on is waited for by the next cell; nothing is lost."""
    outcome = notebook.run(
        "%%distributed\nimport time\nprint('running')\ntry:\n    while True: time.sleep(0.01)\n"
        "except KeyboardInterrupt:\n    pass\nfor step in range(60): time.sleep(0.1)\n"
        "result = step",
        interrupt_when(notebook, "running"),
    )
    said = "ranks 0-3 have not stopped yet (ranks 0-3 are in line 8: for st"
    assert said in outcome.error
    outcome = notebook.run("%%distributed\nresult")
    assert body(outcome) == ["── ranks 0-3 (same) ──", "59"]


def test_stop_of_ranks_that_do_not_listen(notebook: Notebook) -> None:
    """Control is back in 5 s; who did not stop is replaced, the others keep all."""
    asked = time.monotonic()
    outcome = notebook.run(
        "%%distributed\nimport signal, time\nkept = rank\n"
        "if rank: signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print('running')\nwhile True: time.sleep(0.1)",
        interrupt_when(notebook, "running"),
    )
    sys.stdout.write(f"{time.monotonic() - asked:.2f} s\n")
    said = "Stopped. Ranks 1-3 ignored Stop and were restarted; variables lost: "
    assert outcome.error.startswith(f"KeyboardInterrupt: {said}")
    assert "kept" in outcome.error
    assert outcome.error.endswith("; other ranks are unaffected.")
    assert body(notebook.run("%%distributed -r 0\nkept")) == ["── rank 0 ──", "0"]
    assert notebook.run("%%distributed\ndist.barrier()").errors == []


def test_stop_of_a_gather(notebook: Notebook) -> None:
    """Stop works for `%dist_gather` as it does for a cell."""
    notebook.run(
        "%%distributed\nclass Slow:\n    @property\n    def value(self):\n"
        "        import time; time.sleep(600)\nslow = Slow()"
    )
    request = notebook.client.execute("%dist_gather slow.value --as v")
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        message = notebook.client.get_iopub_msg(timeout=SOON)
        if message["parent_header"].get("msg_id") == request and message["msg_type"] == "error":
            break
        if message["msg_type"] == "execute_input":
            time.sleep(0.5)  # nothing shows from outside that the ranks are at it
            notebook.manager.interrupt_kernel()
    said = strip("\n".join(message["content"]["traceback"]))
    assert message["content"]["ename"] in ("Interrupted", "KeyboardInterrupt", "WorkerError")
    assert "\n" not in said
    assert notebook.run("%%distributed\npass").errors == []


def test_stop_of_a_local_cell(notebook: Notebook) -> None:
    """It stops the notebook's own code; the workers go on with what they do."""
    notebook.run(
        "%%distributed\nimport threading, time\nkept = rank\n"
        "ticks = []\nticking = threading.Thread(target=lambda: [ticks.append(time.sleep(0.1)) for _"
        " in range(20)])\nticking.start()"
    )
    outcome = notebook.run(
        "import os, signal, threading, time\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\ntime.sleep(60)"
    )
    assert [error["ename"] for error in outcome.errors] == ["KeyboardInterrupt"]
    assert notebook.run("%%distributed\nticking.join(); assert len(ticks) == 20").errors == []


def test_interrupt_when_nothing_runs(notebook: Notebook) -> None:
    """It says so."""
    assert notebook.run("%dist_interrupt").text == "no cell is running on the workers"


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
    assert notebook.run("%%distributed --setup\nbase = start + 2").errors == []
    said = "rank 2 was restarted and its variables ("
    assert notebook.run("%dist_restart -r 2").text.startswith(said)
    assert "True" in notebook.run("%%distributed\nbase == 42").text
    assert "worker variables cleared" in notebook.run("%dist_restart").text
    assert "True" in notebook.run("%%distributed\nbase == 42").text
    assert notebook.run("%dist_restart --no-fork").errors == []  # other workers altogether
    assert "True" in notebook.run("%%distributed\nbase == 42").text
    # What it binds is the workers', also in new ones: the notebook's does not overwrite it.
    notebook.run("base = 'of the notebook'")
    assert notebook.run("%%distributed --setup\nbase = start + 3").errors == []
    for restart in ("%dist_restart -r 2", "%dist_restart"):
        assert notebook.run(restart).errors == []
        outcome = notebook.run("%%distributed\nbase == 43")
        assert "True" in outcome.text
        assert "was not sent" not in outcome.text
    notebook.run("%dist_shutdown")


def test_restart_of_some_ranks(notebook: Notebook) -> None:
    """The others keep their variables; what is named is carried over."""
    notebook.run("%%distributed\nfirst = second = rank")
    outcome = notebook.run("%dist_restart -r 1,3 --keep first")
    assert "ranks 1,3 were restarted and their variables (" in outcome.text
    assert "second" in outcome.text
    assert "first" not in outcome.text
    notebook.run("%%distributed\nhas = 'second' in globals()")
    notebook.run("%dist_gather (first,has) --as found")
    assert notebook.value("found") == [(0, True), (1, False), (2, True), (3, False)]
    notebook.run("first = 'of the notebook'")
    notebook.run("%%distributed\nfirst = [rank]")
    notebook.run("%dist_restart -r 1,3 --keep first")
    outcome = notebook.run("%%distributed\nassert first == [rank]")
    assert outcome.errors == []
    assert "was not sent" not in outcome.text


def test_restart_keeps_what_is_named(notebook: Notebook) -> None:
    """Of all ranks; the notebook's own variable of that name does not get in the way."""
    notebook.run("mine = 'notebook'")
    notebook.run("%%distributed\nmine = rank")
    assert "worker variables cleared except mine" in notebook.run("%dist_restart --keep mine").text
    notebook.run("%%distributed\nagain = mine")
    notebook.run("%dist_gather again")
    assert notebook.value("again") == [0, 1, 2, 3]


def test_on_failure_stop(notebook: Notebook) -> None:
    """All workers end with a death; the next cell starts that many new ones."""
    notebook.run("%dist_init --on-failure stop")
    outcome = notebook.run("%%distributed\nimport os\nif rank == 2: os._exit(3)")
    assert "All workers were ended (`--on-failure stop`); the next cell starts" in outcome.error
    assert "no workers are running" in notebook.run("%dist_status").text
    assert "4 ranks" in notebook.run("%%distributed\nassert world_size == 4").text
    notebook.run("%dist_init --on-failure heal")


def test_no_free_and_hang_timeout(notebook: Notebook) -> None:
    """A wait without an end is told of when it was asked for, and ends with Stop."""
    outcome = notebook.run(
        "%%distributed --no-free --hang-timeout 0.5\nif rank != 1: dist.barrier()",
        interrupt_when(notebook, "ranks 0,2-3 wait in barrier, line 2 · rank 1 finished"),
    )
    assert outcome.error == "KeyboardInterrupt: Stopped on ranks 0-3. No variables were lost."
    assert notebook.run("%%distributed\ndist.barrier()").errors == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("%%distributed --hang-timeout soon\n1", "`--hang-timeout soon`: a number of seconds"),
        ("%%distributed --hang-timeout 0\n1", "`--hang-timeout 0`: a number of seconds"),
        ("%dist_init --on-failure retry", "`--on-failure retry`: there are heal (the default)"),
        ("%dist_restart -r 1 -n 2", "the options of workers can only be changed for all of them"),
        ("%dist_restart -r 9", "`9` selects no ranks"),
        ("%dist_restart --keep 2x", "`--keep 2x`: names separated by commas"),
        ("%dist_restart --keep nowhere", "`--keep`: no rank has `nowhere`; all workers are"),
    ],
)
def test_mistakes(notebook: Notebook, source: str, said: str) -> None:
    """One line with the remedy; the workers and their variables stay as they are."""
    notebook.run("%%distributed\nkept = rank")
    assert said in notebook.run(source).error
    assert notebook.run("%%distributed\nassert kept == rank; dist.barrier()").errors == []
