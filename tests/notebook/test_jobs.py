"""Tests of `nbdist.notebook.jobs`: cells that run while the notebook goes on, in a real kernel."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import psutil
import pytest

from nbdist.notebook.jobs import CellPlace
from tests.notebook.front_end import Notebook
from tests.notebook.test_idle import HAS_SUBSHELLS, Subshell
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world

PRESS = """
import os, signal, sys, threading, time
def press(name):
    def is_there(frame):
        return frame is not None and (frame.f_code.co_qualname == name or is_there(frame.f_back))
    while not is_there(sys._current_frames()[threading.main_thread().ident]):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press, args=[{name!r}]).start()
"""
"""Stop, as soon as the kernel's main thread is in a function of this name."""

SLEEPS = "import time\nkept = rank\nprint('begun')\ntime.sleep(600)"


@pytest.fixture
def notebook(two: Notebook) -> Iterator[Notebook]:
    yield two
    assert two.run("%dist_interrupt").errors == []


def test_where_a_cell_has_shown_its_output() -> None:
    """What is shown for it meanwhile belongs there, and what comes next to the cell that runs."""
    shell: Any = Page()
    place = CellPlace(shell)
    shell.parent = "the cell that runs"
    for is_wanted, shown in ((True, "the first"), (False, "the cell that runs")):
        with place.within(is_wanted):
            assert shell.parent == shown
        assert shell.parent == "the cell that runs"


class Page:
    """Shows what it is given below the cell that it was told of last."""

    parent = "the first"

    def get_parent(self) -> str:
        return self.parent

    def set_parent(self, parent: str) -> None:
        self.parent = parent


def begin(notebook: Notebook, source: str, options: str = "") -> str:
    """Send a cell without waiting for it; the name of its display."""
    sent = notebook.run(f"%%distributed --no-wait -o job {options}\n{source}")
    assert sent.errors == []
    said = [each["data"]["text/plain"] for each in (*sent.displays, *sent.updates)]
    assert any(
        each.startswith("running on 2 ranks in the background · `job.wait()` waits for it")
        for each in said
    )
    return str(sent.displays[0]["transient"]["display_id"])


def idle_until(notebook: Notebook, display_id: str, said: str) -> list[tuple[str, str]]:
    """Run no cell until this is shown there: what was, with the cell that it belongs to."""
    found: list[tuple[str, str]] = []
    deadline = time.monotonic() + SOON
    while not found or said not in found[-1][0]:
        assert time.monotonic() < deadline, f"{said!r} is not in {found}"
        try:
            message = notebook.client.get_iopub_msg(timeout=0.2)
        except Empty:
            continue
        if message["msg_type"] == "update_display_data":
            content = message["content"]
            assert content["transient"]["display_id"] == display_id
            found.append((content["data"]["text/plain"], message["parent_header"]["msg_id"]))
    return found


def test_it_is_live_while_the_notebook_is_idle(notebook: Notebook, tmp_path: Path) -> None:
    """Its panel, and no other, is drawn in the cell that sent it; plain cells run meanwhile."""
    may_end = tmp_path / "may-end"
    cell = "import os, time\nfor step in range(8):\n    print('step', step); time.sleep(0.15)\n"
    cell += f"while not os.path.exists({str(may_end)!r}): time.sleep(0.01)\nprint('all')\nrank"
    begun = time.monotonic()
    display_id = begin(notebook, cell)
    assert notebook.value("1 + 1") == 2
    said = notebook.run("job").results[0]["text/plain"]
    assert said.startswith("<Job running · 2 ranks · ")
    drawn = idle_until(notebook, display_id, "step 2")
    assert notebook.value("job.has_ended") is False
    may_end.touch()
    drawn += idle_until(notebook, display_id, "✓ 2")
    lasted = time.monotonic() - begun
    assert len({cell for _, cell in drawn}) == 1  # though another has run meanwhile
    live = [text for text, _ in drawn if "● 2" in text]
    assert any("step 2" in text and "all" not in text for text in live)
    assert len(live) <= 1 + lasted / 0.25 + 2
    assert "step 7" in drawn[-1][0]
    assert notebook.run("job").results[0]["text/plain"].startswith("<Job done · 2 ranks · ")
    assert notebook.value("job.wait(), job.done()") == (None, True)
    assert notebook.value("job.result().rank(1), [*job.result()]") == (1, [0, 1])


def test_what_it_raises(notebook: Notebook) -> None:
    """`wait` and `result` raise it, or else the next cell says it, once."""
    display_id = begin(notebook, "if rank: raise ValueError('bad shard')")
    said = "1 of 2 ranks failed (1); first: rank 1 after "
    (text, _) = idle_until(notebook, display_id, said)[-1]
    assert "── rank 1 ✗ ──" in text
    assert text.count("ValueError: bad shard") == 2
    for call in ("job.wait()", "job.result()", "job.wait(0.1)"):
        assert notebook.run(call).error.startswith(f"WorkerError: {said}")
    assert "ValueError: bad shard" in notebook.run("%dist_why").text
    assert "<Job failed · 2 ranks · " in notebook.run("job").results[0]["text/plain"]
    assert "failed" not in notebook.run("%%distributed\npass").text  # it is known
    display_id = begin(notebook, "1 / (1 - rank)")
    idle_until(notebook, display_id, "1 of 2 ranks failed (1)")
    notebook.value("1 + 1")
    said = "`job` has failed: 1 of 2 ranks failed (1); first: rank 1 after"
    assert said in notebook.run("%%distributed\npass").text
    assert "failed" not in notebook.run("%%distributed\npass").text


def test_stop_while_idle(notebook: Notebook) -> None:
    """It stops what nobody waits for; the ranks keep their variables."""
    display_id = begin(notebook, SLEEPS)
    idle_until(notebook, display_id, "begun")
    notebook.manager.interrupt_kernel()
    idle_until(notebook, display_id, "Stopped on ranks 0-1. No variables were lost.")
    stopped = notebook.run("job.wait()")
    assert stopped.error == "KeyboardInterrupt: Stopped on ranks 0-1. No variables were lost."
    assert "<Job stopped · " in notebook.run("job").results[0]["text/plain"]
    notebook.manager.interrupt_kernel()  # ignored, as ever
    assert notebook.run("%%distributed\nassert kept == rank").errors == []


def test_stop_ends_the_waiting(notebook: Notebook) -> None:
    """`wait`, `await` or a plain cell ends, and the job runs on until it is stopped itself."""
    display_id = begin(notebook, SLEEPS)
    idle_until(notebook, display_id, "begun")
    said = "KeyboardInterrupt: Stopped. `job` keeps running: "
    assert notebook.run(PRESS.format(name="Job.wait") + "job.wait()").error.startswith(said)
    for name, cell in (
        ("rest", "def rest(): time.sleep(60)\nrest()"),
        ("Job.done", "while not job.done(): pass"),
        ("EpollSelector.select", "await job"),
    ):
        (plain,) = notebook.run(PRESS.format(name=name) + cell).errors
        assert plain["ename"] in ("CancelledError", "KeyboardInterrupt", "Interrupted")
    assert notebook.value("job.done(), job.running.stops") == (False, 0)
    said = "JobTimeout: `job` is still running after 1.1 s: "
    said += "ranks 0-1 are in line 5: time.sleep(600)."
    assert notebook.run("job.wait(1.1)").error == said
    # The panel of the cell that runs may be drawn beside these.
    status, output = (notebook.run(f"%dist_{word}").displays[-1] for word in ("status", "output"))
    assert "running a cell" in status["data"]["text/plain"]
    assert output["data"]["text/plain"].endswith("── ranks 0-1 (same) ──\nbegun")
    assert notebook.value("issubclass(type(job), __import__('nbdist').Job)") is True
    last = notebook.run("%dist_interrupt").displays[-1]["data"]["text/plain"]
    assert last == "Stopped on ranks 0-1. No variables were lost."
    assert notebook.run("%dist_interrupt").text == "no cell is running on the workers"


def test_a_cell_that_comes_meanwhile(notebook: Notebook) -> None:
    """It waits and says so; Stop then ends its wait alone.  What brings values waits too."""
    begin(notebook, "import time; time.sleep(600)")
    pid = notebook.process.pid
    pressed: list[str] = []

    def press(outcome: object) -> None:
        if not pressed and (shown := getattr(outcome, "displays", [])):
            pressed.append(shown[0]["data"]["text/plain"])
            os.kill(pid, signal.SIGINT)

    said = notebook.run("%%distributed\nnever = 1", press).error
    assert said.startswith("KeyboardInterrupt: Stopped. This cell has not run; `job`")
    assert pressed[0].startswith("Waiting for `job` (")
    assert notebook.value("job.done()") is False
    notebook.run("%dist_interrupt")
    begin(notebook, "import time; time.sleep(1.5); late = rank + 1")
    assert notebook.run("%dist_gather late").errors == []
    assert notebook.value("late") == [1, 2]
    begin(notebook, "time.sleep(1.5); late = -1")
    waited = notebook.run("%%distributed\nlate, 'never' in globals()")
    assert waited.errors == []
    assert "(-1, False)" in waited.updates[-1]["data"]["text/plain"]


def test_workers_that_are_started_anew(notebook: Notebook) -> None:
    """It has ended with them, and says so; the next cell runs."""
    display_id = begin(notebook, SLEEPS)
    restarted = notebook.run("%dist_restart")
    assert restarted.errors == []
    of_job = [each for each in restarted.updates if each["transient"]["display_id"] == display_id]
    assert of_job[-1]["data"]["text/plain"].endswith(
        "the workers ended before the cell had finished"
    )
    lost = notebook.run("job.result()").error
    assert lost.startswith("JobLost: `job` was lost after ")
    assert lost.endswith(": its workers were restarted.")
    assert notebook.run("%%distributed\npass").errors == []


def test_it_runs_again_where_it_fails(notebook: Notebook) -> None:
    """A rank that dies is replaced, and `--max-restarts` counts, with nobody waiting."""
    source = "import os\nif rank and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(3)"
    begin(
        notebook,
        f"import time; time.sleep(0.2)\n{source}\ndist.barrier(); 'whole'",
        "--max-restarts 1",
    )
    assert notebook.value("job.result(30).rank(1)") == "whole"


def test_what_a_rank_wants_typed(notebook: Notebook) -> None:
    """Its panel says that it waits; who waits for the cell is asked, and Stop then stops it."""
    display_id = begin(notebook, "name = input('name? ') if rank else 'nobody'; name")
    idle_until(notebook, display_id, "rank 1 waits for your input · you will be asked when a cell")
    client = notebook.client
    for typed, said in (("Ada", ""), (None, "KeyboardInterrupt")):
        sent = client.execute("job.wait()", allow_stdin=True, stop_on_error=False)
        asked = client.get_stdin_msg(timeout=SOON)["content"]
        assert asked["prompt"] == "[rank 1] name? "
        if typed:
            client.input(typed)
        else:
            notebook.manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=SOON)
        assert reply["parent_header"]["msg_id"] == sent
        assert reply["content"].get("ename", "").replace("Interrupted", "KeyboardInterrupt") == said
        if typed:
            assert notebook.value("[*job.result()]") == ["nobody", "Ada"]
            begin(notebook, "name = input('name? ') if rank else 'nobody'; name")


@pytest.mark.skipif(not HAS_SUBSHELLS, reason="ipykernel 6 has no subshells")
def test_beside_the_notebooks_cells(notebook: Notebook) -> None:
    """Another thread waits for it and stops it; the main one takes its steps."""
    begin(notebook, "import time; time.sleep(0.6); rank")
    subshell = Subshell(notebook)
    assert subshell.run("job.wait(); job.done()") == "True"
    begin(notebook, SLEEPS)
    said = subshell.run("job.interrupt(); job.wait()")
    assert said == "Stopped on ranks 0-1. No variables were lost."


def test_done_is_right_at_the_first_call(notebook: Notebook) -> None:
    """Whatever its ranks have said meanwhile, and though nobody has looked until then."""
    source = "for i in range(3000): print(i)\n1 / 0"
    looped = notebook.run(
        f"get_ipython().run_cell_magic('distributed', '--no-wait -o job', {source!r})\n"
        "import time; time.sleep(1.5)\nprint(job.done())"
    )
    assert looped.streams == ["True\n"]
    notebook.run("try: job.wait()\nexcept Exception: pass")
    begin(notebook, "import time; time.sleep(0.5); 'last'")  # nor does the event loop look
    assert notebook.run("while not job.done(): time.sleep(0.05)").errors == []
    assert notebook.value("job.result().rank(0)") == "last"


def test_it_can_be_awaited(notebook: Notebook) -> None:
    """Other coroutines go on meanwhile; it gives the result, or raises what the cell raised."""
    begin(notebook, "import time; time.sleep(0.5); rank")
    cell = """
    import asyncio
    ticks = []
    async def clock():
        while True:
            ticks.append(1)
            await asyncio.sleep(0.02)
    ticking = asyncio.create_task(clock())
    result = await job
    ticking.cancel()
    print(len(ticks) > 5, result[1])
    """
    ran = notebook.run(textwrap.dedent(cell))
    assert (ran.errors, ran.streams) == ([], ["True 1\n"])
    begin(notebook, "{}[rank]")
    ran = notebook.run("try: await job\nexcept KeyError as error: print(error.args[0] in (0, 1))")
    assert (ran.errors, ran.streams) == ([], ["True\n"])
    begin(notebook, SLEEPS)
    late = notebook.run("await asyncio.wait_for(job, 0.3)")
    assert [each["ename"] for each in late.errors] == ["TimeoutError"]
    assert notebook.value("job.done()") is False


def test_nothing_is_left_by_the_end(two: Notebook) -> None:
    """Of the extension: the cell ends with its workers, and Stop is as before."""
    status = two.run("%dist_status").text.splitlines()
    display_id = begin(two, SLEEPS)
    idle_until(two, display_id, "begun")
    assert two.run("%unload_ext nbdist").errors == []
    assert not any(psutil.pid_exists(int(line.split()[2])) for line in status[2:4])
    assert "JobLost" in two.run("job.wait()").errors[0]["ename"]
    two.manager.interrupt_kernel()
    assert two.value("1 + 1") == 2
