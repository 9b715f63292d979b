"""Tests of `nbdist.notebook.jobs`, and of how cells are sent: `--no-wait`, `-o`, `--timeout`."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty

import ipykernel
import psutil
import pytest

from tests.notebook.front_end import Notebook, body
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world

HAS_SUBSHELLS = int(ipykernel.__version__.partition(".")[0]) >= 7


class Subshell:
    """A console that JupyterLab has opened as a subshell of the kernel."""

    def __init__(self, notebook: Notebook) -> None:
        self._client = notebook.client
        request = self._client.session.msg("create_subshell_request", {})
        self._client.control_channel.send(request)
        reply = self._client.get_control_msg(timeout=SOON)
        self._id = reply["content"]["subshell_id"]

    def run(self, code: str) -> str:
        """Run code in the subshell; return the text that is shown, or the error's message."""
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        request = self._client.session.msg("execute_request", {**content, "user_expressions": {}})
        request["header"]["subshell_id"] = self._id
        self._client.shell_channel.send(request)
        shown, deadline = [], time.monotonic() + SOON
        while time.monotonic() < deadline:
            try:
                message = self._client.get_iopub_msg(timeout=0.2)
            except Empty:
                continue
            if message["parent_header"].get("msg_id") != request["header"]["msg_id"]:
                continue
            match message["content"]:
                case {"data": {"text/plain": text}}:
                    shown.append(text)
                case {"evalue": text}:
                    shown.append(text)
                case {"execution_state": "idle"}:
                    return "\n".join(shown)
        raise AssertionError(f"not done after {SOON} s: {code}")


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
"""Presses Stop as soon as the kernel's main thread is in the function with the given name.

The function must not block for long in one call: Python loses the effect of a signal that comes
after `time.sleep` has released the GIL and before it sleeps, until that sleep ends.
"""

REST = """
def rest(*_):
    while True:
        time.sleep(0.05)
"""
"""Defines the function `rest`, which only Stop ends."""

STOPPED = "Stopped on ranks 0-1. No variables were lost."

SLEEPS = "import time\nkept = rank\nprint('begun')\ntime.sleep(600)"


@pytest.fixture
def notebook(two: Notebook) -> Iterator[Notebook]:
    yield two
    assert two.run("%dist_interrupt").errors == []


def begin(notebook: Notebook, source: str) -> str:
    """Send a cell without waiting for its end; return the id of its display."""
    sent = notebook.run(f"%%distributed --no-wait -o job\n{source}")
    assert sent.errors == []
    texts = "\n".join(each["data"]["text/plain"] for each in (*sent.displays, *sent.updates))
    assert "running on 2 ranks in the background · `job.wait()` waits for it" in texts
    return str(sent.displays[0]["transient"]["display_id"])


def sleep(notebook: Notebook) -> str:
    """Send a job that sleeps; once it sleeps, return the id of its display."""
    display_id = begin(notebook, SLEEPS)
    idle_until(notebook, display_id, "begun")
    return display_id


def shown(notebook: Notebook) -> str:
    """Return the text of the object `job` in the notebook."""
    return str(notebook.run("job").results[0]["text/plain"])


def idle_until(notebook: Notebook, display_id: str, expected: str) -> list[tuple[str, str]]:
    """Wait until the display has a text while no cell runs; return its updates and their cells."""
    updates: list[tuple[str, str]] = []
    deadline = time.monotonic() + SOON
    while not updates or expected not in updates[-1][0]:
        assert time.monotonic() < deadline, f"{expected!r} is not in {updates}"
        try:
            message = notebook.client.get_iopub_msg(timeout=0.2)
        except Empty:
            continue
        if message["msg_type"] == "update_display_data":
            content = message["content"]
            assert content["transient"]["display_id"] == display_id
            updates.append((content["data"]["text/plain"], message["parent_header"]["msg_id"]))
    return updates


def test_a_job_is_live_while_the_notebook_is_idle(notebook: Notebook, tmp_path: Path) -> None:
    """Only the job's panel is redrawn, in the cell that sent the job; plain cells run meanwhile."""
    may_end = tmp_path / "may-end"
    cell = "import os, time\nfor step in range(8):\n    print('step', step); time.sleep(0.15)\n"
    cell += f"while not os.path.exists({str(may_end)!r}): time.sleep(0.01)\nprint('all')\nrank"
    begun = time.monotonic()
    display_id = begin(notebook, cell)
    assert notebook.value("1 + 1") == 2
    assert shown(notebook).startswith("<Job running · 2 ranks · ")
    drawn = idle_until(notebook, display_id, "step 2")
    assert notebook.value("job.has_ended") is False
    may_end.touch()
    drawn += idle_until(notebook, display_id, "✓ 2")
    lasted = time.monotonic() - begun
    assert len({cell for _, cell in drawn}) == 1  # although another cell has run meanwhile
    live = [text for text, _ in drawn if "● 2" in text]
    assert any("step 2" in text and "all" not in text for text in live)
    assert len(live) <= 1 + lasted / 0.25 + 2
    assert "step 7" in drawn[-1][0]
    assert shown(notebook).startswith("<Job done · 2 ranks · ")
    assert notebook.value("job.wait(), job.done(), [*job.result()]") == (None, True, [0, 1])


def test_a_failed_job_raises_or_is_noted_once(notebook: Notebook) -> None:
    """`wait` and `result` raise a job's failure; if neither has, the next cell notes it, once."""
    failure = "rank 1 failed, of 2, after "
    display_id = begin(notebook, "if rank: raise ValueError('bad shard')")
    (text, _) = idle_until(notebook, display_id, failure)[-1]
    assert "── rank 1 ✗ ──" in text
    assert text.count("ValueError: bad shard") == 2
    for call in ("job.wait()", "job.result()", "job.wait(0.1)"):
        assert notebook.run(call).error.startswith(f"WorkerError: {failure}")
    assert "ValueError: bad shard" in notebook.run("%dist_why").text
    assert shown(notebook).startswith("<Job failed · 2 ranks · ")
    assert "failed" not in notebook.run("%%distributed\npass").text  # `wait` has raised the failure
    idle_until(notebook, begin(notebook, "1 / (1 - rank)"), failure)
    notebook.value("1 + 1")
    assert f"`job` has failed: {failure}" in notebook.run("%%distributed\npass").text
    assert "failed" not in notebook.run("%%distributed\npass").text
    display_id = begin(notebook, "import time; time.sleep(1.5)\n1 / (1 - rank)")
    assert notebook.run("job.wait(0.1)").error.startswith("JobTimeout")
    idle_until(notebook, display_id, failure)  # `wait` had ended before
    assert f"`job` has failed: {failure}" in notebook.run("%%distributed\npass").text
    assert "failed" not in notebook.run("%%distributed\npass").text


def test_stop_while_idle_ends_the_job(notebook: Notebook) -> None:
    """Stop between cells stops a job for which no cell waits; the ranks keep their variables."""
    display_id = sleep(notebook)
    notebook.manager.interrupt_kernel()
    idle_until(notebook, display_id, STOPPED)
    assert notebook.run("job.wait()").error == f"KeyboardInterrupt: {STOPPED}"
    assert shown(notebook).startswith("<Job stopped · ")
    notebook.manager.interrupt_kernel()  # ignored without a job
    assert notebook.run("%%distributed\nassert kept == rank").errors == []


def test_stop_ends_the_waiting_but_not_the_job(notebook: Notebook) -> None:
    """Stop ends `wait`, `await` or a plain cell; the job runs on until `%dist_interrupt`."""
    sleep(notebook)
    error = "KeyboardInterrupt: Stopped. `job` keeps running: "
    assert notebook.run(PRESS.format(name="Job.wait") + "job.wait()").error.startswith(error)
    for name, cell in (
        ("rest", f"{REST}rest()"),
        ("Job.done", "while not job.done(): pass"),
        ("EpollSelector.select", "await job"),
    ):
        (plain,) = notebook.run(PRESS.format(name=name) + cell).errors
        assert plain["ename"] in ("CancelledError", "KeyboardInterrupt", "Interrupted")
    assert notebook.value("job.done(), job.task_run.stop.presses") == (False, 0)
    assert notebook.run("job.wait(1.1)").error == (
        "JobTimeout: `job` is still running after 1.1 s: ranks 0-1 are in line 5: time.sleep(600)."
    )
    # A magic's own text is the last; the job's panel may be among the displays of its cell.
    status, output, stopped = (
        notebook.run(f"%dist_{word}").texts[-1] for word in ("status", "output", "interrupt")
    )
    assert "running a cell" in status
    assert output.endswith("── ranks 0-1 (same) ──\nbegun")
    assert stopped == STOPPED
    assert notebook.run("%dist_interrupt").text == "no cell is running on the workers"


def test_the_next_distributed_cell_waits_for_the_job(notebook: Notebook) -> None:
    """A cell says that it waits for the job, and Stop ends only the wait; magics wait too."""
    sleep(notebook)
    stop = notebook.stop_at("Waiting for `job` (running for ")
    error = notebook.run("%%distributed\nnever = 1", stop).error
    assert error.startswith("KeyboardInterrupt: Stopped. This cell has not run; `job`")
    assert notebook.value("job.done()") is False
    notebook.run("%dist_interrupt")
    begin(notebook, "import time; time.sleep(1.5); late = rank + 1")
    assert notebook.run("%dist_gather late").errors == []
    assert notebook.value("late") == [1, 2]
    begin(notebook, "time.sleep(1.5); late = -1")
    waited = notebook.run("%%distributed\nlate, 'never' in globals()")
    assert waited.errors == []
    assert "(-1, False)" in waited.drawn[-1]


def test_a_restart_ends_the_job(notebook: Notebook) -> None:
    """A job ends with its workers and says why, also if Stop interrupts the restart."""
    display_id = begin(notebook, SLEEPS)
    restarted = notebook.run("%dist_restart")
    assert restarted.errors == []
    of_job = [each for each in restarted.updates if each["transient"]["display_id"] == display_id]
    ended = "the workers ended before the cell had finished"
    shown = of_job[-1]["data"]["text/plain"]
    assert shown.endswith(ended)
    assert " · ∅ 2" in shown.splitlines()[0]
    lost = notebook.run("job.result()").error
    assert lost.startswith("JobLost: `job` was lost after ")
    assert lost.endswith(": its workers were restarted.")
    assert notebook.run("%%distributed\npass").errors == []
    begin(notebook, SLEEPS)
    assert notebook.run(PRESS.format(name="_stop") + "%dist_restart").errors != []
    assert notebook.run("job.result(9)").error.endswith(": its workers were ended.")
    assert notebook.run("%dist_restart").errors == []


def test_a_restart_with_a_failed_setup_ends_the_job(notebook: Notebook, tmp_path: Path) -> None:
    """If the set-up cell fails in the new workers, the job has ended, and the next cell runs."""
    flag = tmp_path / "fail"
    setup = f"import os; assert not os.path.exists({str(flag)!r})"
    assert notebook.run(f"%%distributed --setup\n{setup}").errors == []
    begin(notebook, SLEEPS)
    flag.touch()
    assert "AssertionError" in notebook.run("%dist_restart").error
    assert notebook.run("job.result(9)").error.endswith(": its workers were restarted.")
    assert notebook.run("%%distributed\npass").errors == []
    notebook.run("%dist_shutdown")


def test_a_waiting_cell_asks_for_the_jobs_input(notebook: Notebook) -> None:
    """A job's panel says who waits for input; `wait` asks, and Stop at the prompt ends the job."""
    cell = "name = input('name? ') if rank else 'nobody'; name"
    asks = "rank 1 waits for your input · you will be asked when a cell"
    for typed in (["Ada"], []):
        idle_until(notebook, begin(notebook, cell), asks)
        waited = notebook.run("job.wait()", typed=iter(typed))
        assert waited.prompts == ["[rank 1] name? "]
        assert bool(waited.errors) == (not typed)
        if typed:
            assert notebook.value("[*job.result()]") == ["nobody", "Ada"]
    assert waited.error.startswith("KeyboardInterrupt: ")


@pytest.mark.skipif(not HAS_SUBSHELLS, reason="ipykernel 6 has no subshells")
def test_a_subshell_can_wait_for_a_job(notebook: Notebook) -> None:
    """Code in a subshell can wait for and interrupt a job, whose steps the main thread runs."""
    begin(notebook, "import time; time.sleep(0.6); rank")
    subshell = Subshell(notebook)
    assert subshell.run("job.wait(); job.done()") == "True"
    begin(notebook, SLEEPS)
    assert subshell.run("job.interrupt(); job.wait()") == STOPPED


def test_done_is_right_at_the_first_call(notebook: Notebook) -> None:
    """`done` is true after a job's end, even if none of its output was received before the call."""
    source = "for i in range(3000): print(i)\n1 / 0"
    looped = notebook.run(
        f"get_ipython().run_cell_magic('distributed', '--no-wait -o job', {source!r})\n"
        "import time; time.sleep(1.5)\nprint(job.done())"
    )
    assert looped.streams == ["True\n"]
    notebook.run("try: job.wait()\nexcept Exception: pass")
    begin(notebook, "import time; time.sleep(0.5); 'last'")  # below, only `done` lets the job go on
    assert notebook.run("while not job.done(): time.sleep(0.05)").errors == []
    assert notebook.value("job.result().rank(0)") == "last"


def test_a_job_can_be_awaited(notebook: Notebook) -> None:
    """`await job` lets other coroutines run, and returns the result or raises the cell's error."""
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
    assert notebook.run(textwrap.dedent(cell)).streams == ["True 1\n"]
    begin(notebook, "{}[rank]")
    ran = notebook.run("try: await job\nexcept KeyError as error: print(error.args[0] in (0, 1))")
    assert ran.streams == ["True\n"]
    begin(notebook, SLEEPS)
    timed_out = notebook.run("await asyncio.wait_for(job, 0.3)")
    assert [each["ename"] for each in timed_out.errors] == ["TimeoutError"]
    assert notebook.value("job.done()") is False


def test_jobs_are_gathered_by_asyncio(notebook: Notebook) -> None:
    """`gather` accepts ended and running jobs, also of another pool, and can return errors."""
    begin(notebook, "rank")
    assert notebook.run("first = job; first.wait()").errors == []
    begin(notebook, "import time; time.sleep(0.3); rank + 10")
    assert notebook.run("%%distributed -n 1 --pool other --no-wait -o other\n1 / 0").errors == []
    cell = """
    import asyncio
    results = await asyncio.gather(first, job, other, return_exceptions=True)
    print([*results[0]], [*results[1]], isinstance(results[2], ZeroDivisionError))
    done = [await each for each in asyncio.as_completed([first, job], timeout=60)]
    print(len(done), (await asyncio.wait_for(job, 5)).rank(1))
    """
    ran = notebook.run(textwrap.dedent(cell))
    assert ran.streams == ["[0, 1] [10, 11] True\n2 11\n"]
    assert notebook.run("%dist_shutdown --pool other").errors == []


def test_a_stopped_job_cancels_what_awaits_it(notebook: Notebook) -> None:
    """`interrupt` and `cancel` end `await` and `gather` by CancelledError; the kernel lives on."""
    cell = """
    import asyncio
    async def stop(way):
        await asyncio.sleep(0.2)
        getattr(job, way)()
    stopping = asyncio.create_task(stop({way!r}))
    try:
        await asyncio.gather(job)
    except asyncio.CancelledError as error:
        print(error, job.cancelled())
    """
    for method, printed in (
        ("interrupt", f"{STOPPED} False"),
        ("cancel", f"`job` was cancelled. {STOPPED} True"),
    ):
        begin(notebook, SLEEPS)
        assert notebook.run(textwrap.dedent(cell).format(way=method)).streams == [f"{printed}\n"]
    # Between cells, nobody handles the error of a task that awaits the job: the kernel lives on.
    sleep(notebook)
    assert notebook.run("awaiting = asyncio.ensure_future(job)").errors == []
    assert notebook.run("job.interrupt(); job.wait()").errors != []
    assert notebook.run("_ = await asyncio.wait([awaiting])").errors == []
    assert notebook.value("awaiting.cancelled()") is True


def test_a_cancelled_job_raises_as_a_future_does(notebook: Notebook) -> None:
    """After `cancel`, methods that wait raise CancelledError in a line; no variables are lost."""
    display_id = sleep(notebook)
    state = "job.running(), job.done(), job.cancelled(), job.cancel()"
    assert notebook.value(state) == (True, False, False, True)
    idle_until(notebook, display_id, STOPPED)
    assert notebook.value(state) == (False, True, True, False)
    for call in ("wait()", "result()", "result(1)", "exception()", "exception(timeout=1)"):
        assert notebook.run(f"job.{call}").error == f"JobCancelled: `job` was cancelled. {STOPPED}"
    cell = """
    import asyncio, concurrent.futures
    try:
        job.result()
    except concurrent.futures.CancelledError:
        print("as a future's")
    try:
        await job
    except asyncio.CancelledError:
        print("as a task's")
    """
    assert notebook.run(textwrap.dedent(cell)).streams == ["as a future's\nas a task's\n"]
    assert shown(notebook).startswith("<Job stopped · ")
    assert notebook.run("%%distributed\nassert kept == rank").errors == []


def test_an_ended_job_is_not_cancelled(notebook: Notebook) -> None:
    """`cancel` after the end keeps the result; `exception` returns an error or interrupt."""
    ended = notebook.run(
        "get_ipython().run_cell_magic('distributed', '--no-wait -o job', 'rank')\n"
        "import time; time.sleep(1)\nprint(job.cancel(), job.cancelled(), job.exception())"
    )
    assert ended.streams == ["False False None\n"]
    assert notebook.value("[*job.result()]") == [0, 1]
    begin(notebook, "1 / rank")
    failed = "isinstance(job.exception(), ZeroDivisionError), job.running()"
    assert notebook.value(failed) == (True, False)
    begin(notebook, SLEEPS)
    assert notebook.run("job.exception(0.2)").error.startswith("JobTimeout: ")
    notebook.run("job.interrupt()")
    stopped = "isinstance(job.exception(), KeyboardInterrupt), job.cancelled()"
    assert notebook.value(stopped) == (True, False)


def test_callbacks_are_called_once_when_the_job_has_ended(
    notebook: Notebook, tmp_path: Path
) -> None:
    """The main thread calls each callback once, even if added after the end or if another fails.

    Between cells, a callback's output appears below the job's cell.  A callback's error is logged.
    """
    may_end = tmp_path / "may-end"
    wait = f"import os, time\nwhile not os.path.exists({str(may_end)!r}): time.sleep(0.01)\nrank"
    display_id = begin(notebook, wait)
    cell = """
    import threading
    calls = []
    def record(job):
        calls.append((threading.current_thread() is threading.main_thread(), [*job.result()]))
    def fail(job):
        raise ValueError("bad callback")
    for each in (record, fail, lambda job: print("said by a callback"), record):
        job.add_done_callback(each)
    calls
    """
    added = notebook.run(textwrap.dedent(cell))
    assert added.results[0]["text/plain"] == "[]"
    may_end.touch()
    sender, printed = "", ""
    deadline = time.monotonic() + SOON
    while "said by a callback" not in printed:
        assert time.monotonic() < deadline, printed
        try:
            message = notebook.client.get_iopub_msg(timeout=0.2)
        except Empty:
            continue
        content = message["content"]
        if message["msg_type"] == "update_display_data":
            assert content["transient"]["display_id"] == display_id
            sender = message["parent_header"]["msg_id"]
        elif message["msg_type"] == "stream":
            printed += content["text"]
            assert message["parent_header"]["msg_id"] == sender
    assert "exception calling callback for <Job done" in printed
    assert "ValueError: bad callback" in printed
    assert notebook.value("calls") == [(True, [0, 1])] * 2
    # A new callback is called now; if another thread adds it, the main thread calls it.
    assert notebook.value("job.add_done_callback(record), len(calls)") == (None, 3)
    notebook.run("threading.Thread(target=job.add_done_callback, args=[record]).start()")
    deadline = time.monotonic() + SOON
    while notebook.value("len(calls)") < 4:
        assert time.monotonic() < deadline
    assert notebook.value("calls[-1], len(calls)") == ((True, [0, 1]), 4)
    assert notebook.run("%%distributed\npass").errors == []


def test_a_callback_can_use_the_workers(notebook: Notebook) -> None:
    """A callback may send another cell; a restart calls callbacks too; Stop ends a callback."""
    begin(notebook, "x = rank")
    cell = """
    def follow(job):
        get_ipython().run_cell_magic("distributed", "-o next_one", "x + 1")
    job.add_done_callback(follow)
    job.wait()
    print([*next_one])
    """
    assert notebook.run(textwrap.dedent(cell)).streams == ["[1, 2]\n"]
    begin(notebook, SLEEPS)
    notebook.run("job.add_done_callback(lambda job: print(type(job.exception()).__name__))")
    assert notebook.run("%dist_restart").streams == ["JobLost\n"]
    begin(notebook, "rank")
    cell = f"{REST}job.add_done_callback(rest)\njob.wait()"
    pressed = notebook.run(PRESS.format(name="rest") + cell)
    assert [each["ename"] for each in pressed.errors] == ["KeyboardInterrupt"]
    assert notebook.value("[*job.result()]") == [0, 1]


def test_each_run_has_a_result_of_its_own(two: Notebook) -> None:
    """A result has the values at its run's end, big or small; a lost value's error says why."""
    cell = """
    results = []
    for lr in (0.1, 0.2):
        for n in (1, 20_000):
            get_ipython().run_cell_magic("distributed", "-o out", "torch.full((n,), lr + rank)")
            results.append(out)
    """
    assert two.run(textwrap.dedent(cell)).errors == []
    assert "<78.3 KiB, still on the rank>" in two.value("repr(results[1])")
    for rank in (1, 0):
        last_elements = two.value(f"[round(each[{rank}][-1].item(), 1) for each in results]")
        assert last_elements == [round(lr + rank, 1) for lr in (0.1, 0.1, 0.2, 0.2)]
    assert body(two.run("%%distributed -o quiet\nrank + 5;")) == []
    assert two.run("%%distributed -o failed\n1 / (1 - rank)").errors != []
    contents = two.value("dict(quiet), failed.ok, [*failed.errors], failed.rank(0)")
    assert contents == ({0: 5, 1: 6}, False, [1], 1.0)
    two.run("%%distributed -o small\nx = torch.zeros(2); x")
    two.run("%%distributed -o big\ny = torch.zeros(20_000); y")
    two.run("%%distributed\nx += 5; y += 5")
    assert two.value("small[0].tolist(), big[0].sum().item()") == ([0.0, 0.0], 0.0)
    two.run("%dist_restart -r 1")
    assert two.value("small[1].tolist(), big[0].sum().item()") == ([0.0, 0.0], 0.0)
    lost = two.run("big[1]").error
    assert lost.startswith("ValueLost: the last value of that cell on rank 1 is gone with its work")
    two.run("%%distributed -o old\ntorch.ones(20_000)")
    assert two.run("%dist_clean").text.startswith("ranks 0-1 · ")
    assert two.run("old.rank(0)").error == (
        "ValueLost: the last value of that cell on rank 0 is gone: `%dist_memory --free` released "
        "it. What a cell binds to a variable stays, and `%dist_gather variable` brings it."
    )
    assert two.run("%%distributed -o odd\n[(n for n in 'ab')]").errors == []
    problem = "on rank 1 cannot be sent to the notebook (generator in `it[0]`): "
    assert problem in two.run("odd[1]").error


def test_timeout_stops_a_cell_or_script(two: Notebook, tmp_path: Path) -> None:
    """After `--timeout` a line says where the ranks were stopped; variables of the ranks stay."""
    cell = "import time\nkept = 7\nif rank: time.sleep(60)\ndist.barrier()"
    assert two.run(f"%%distributed --timeout 1.2\n{cell}").error == (
        "CellTimeout: the cell was stopped by `--timeout 1.2`: rank 0 waits in barrier, line 5 · "
        "rank 1 is in line 4: if rank: time.sleep(60); no variables were lost."
    )
    assert body(two.run("%%distributed --timeout 60\nkept"))[-1] == "7"
    script = tmp_path / "sleeps.py"
    script.write_text("import time\nbegun = 1\ntime.sleep(60)\n")
    error = two.run(f"%dist_run --timeout 1 {script}").error
    assert "by `--timeout 1`: ranks 0-1 are in sleeps.py line 3: time.sleep" in error
    assert two.run(f"%dist_run --no-wait -o job {script}").errors == []
    two.run("job.interrupt()")
    assert "Stopped on ranks" in two.run("job.wait()").error


def test_here_too_runs_a_cell_on_both_sides(two: Notebook) -> None:
    """The cell binds names here and on ranks, fails if it fails here, and must not use `await`."""
    ran = two.run("%%distributed --here-too -o there\nx = sum(range(10))\nprint('said')\nx")
    assert (ran.errors, ran.streams, ran.results) == ([], ["said\n"], [{"text/plain": "45"}])
    assert ran.texts[-1].endswith("said\n45")
    assert two.value("x, there.rank(1)") == (45, 45)
    two.run("%%distributed\nx = rank")
    assert two.run("%%distributed --here-too\ny = x").errors == []
    assert two.value("y") == 45
    assert body(two.run("%%distributed\ny")) == ["── rank 0 ──", "0", "── rank 1 ──", "1"]
    # The ranks keep their own values even if they bind the name after the notebook.
    slow = "import time\nif 'rank' in globals(): time.sleep(0.5)\nz = x + 1"
    assert two.run(f"%%distributed --here-too\n{slow}").errors == []
    assert two.value("z") == 46
    assert body(two.run("%%distributed\nz")) == ["── rank 0 ──", "1", "── rank 1 ──", "2"]
    # With `--no-wait` ranks keep their values too, unless the notebook binds the name again.
    slow = "import time\nif 'rank' in globals(): time.sleep(1)\nw = v = x + 1"
    assert two.run(f"%%distributed --no-wait --here-too -o job\n{slow}").errors == []
    assert two.value("v, w") == (46, 46)
    assert two.run("v = 7").errors == []
    assert two.run("job.wait()").errors == []
    *shown, notice = body(two.run("%%distributed\nw, v"))
    assert shown == ["── rank 0 ──", "(1, 7)", "── rank 1 ──", "(2, 7)"]
    assert notice.startswith("the notebook's `v` (int) replaces the ranks'")
    refused = two.run("%%distributed --here-too\nimport asyncio\nawait asyncio.sleep(0); sent = 1")
    assert refused.error.startswith("UsageError: `--here-too`: the cell uses `await`")
    assert body(two.run("%%distributed\n'sent' in globals()"))[-1] == "False"
    ran = two.run("%%distributed --here-too\nworld_size")
    assert [each["ename"] for each in ran.errors] == ["NameError", "LocalCellError"]
    error = ran.errors[1]["evalue"]
    assert error.startswith("the cell raised in the notebook: NameError: ")
    assert error.endswith(" 2 ranks ran it.")
    assert ran.texts[-1].endswith("── ranks 0-1 (same) ──\n2")


@pytest.mark.skipif(not HAS_SUBSHELLS, reason="ipykernel 6 has no subshells")
def test_a_subshell_can_look_at_a_running_cell(two: Notebook, tmp_path: Path) -> None:
    """Magics that only show something run, others are refused; the running cell loses no output."""
    gate = tmp_path / "gate"
    subshell = Subshell(two)
    two.client.execute(
        "%%distributed\nimport os, time\nnumber = 0\n"
        f"while number < 300 or not os.path.exists({str(gate)!r}):\n"
        "    if number < 300: print(number)\n"
        "    number += 1; time.sleep(0.002)"
    )
    status = ""
    while "busy" not in status or "line " not in status:
        status = subshell.run("%dist_status")
    assert status.startswith("2 workers on ")
    assert " · running a cell" in status.splitlines()[0]
    for _ in range(30):
        assert "running a cell\n── rank" in subshell.run("%dist_stack")
    log = subshell.run("%dist_log")
    assert "no lines" in log or "files: " in log
    refused = subshell.run("%dist_memory")
    assert refused.startswith("`%dist_memory` cannot run in a subshell")
    assert "`%dist_stack`, `%dist_status`" in refused
    assert subshell.run("%%distributed\n1").startswith("`%%distributed` cannot run")
    gate.touch()
    # Output that arrived while magics ran in the subshell belongs to the cell.
    lines = "".join(f"{number}\n" for number in range(300))
    assert lines in two.run("%dist_output --all").text


def test_unloading_ends_a_job_and_its_workers(two: Notebook) -> None:
    """`%unload_ext` ends the job with its workers, and Stop between cells has no effect again."""
    status = two.run("%dist_status").text.splitlines()
    sleep(two)
    assert two.run("%unload_ext nbdist").errors == []
    assert not any(psutil.pid_exists(int(line.split()[2])) for line in status[2:4])
    assert "JobLost" in two.run("job.wait()").errors[0]["ename"]
    two.manager.interrupt_kernel()
    assert two.value("1 + 1") == 2
