"""Workers that are shut down, scaled, synced, and attached to a new kernel of the notebook."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbdist.terminal.worlds import kill_world
from nbdist.world.agents import RunningWorld, worlds
from nbdist.world.engine import FOLDER_REMOVED
from tests.notebook.front_end import Notebook, Outcome, body
from tests.waiting import SOON, wait_until


def test_a_line_says_that_nothing_was_interrupted_or_ended(typed: Callable[[str], str]):
    """Without workers, `%dist_interrupt` and `%dist_shutdown` answer with a line."""
    assert typed("%dist_interrupt") == "no cell is running on the workers\n"
    assert typed("%dist_shutdown") == "no workers were running\n"
    assert typed("%dist_shutdown --pool a") == "no workers were running\n"


def test_a_stopped_shutdown_is_completed(fresh: Callable[..., Notebook]):
    """If Stop interrupts a shutdown, the next cell ends the old workers before it starts others."""
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


def test_workers_start_if_the_notebooks_folder_was_removed(
    fresh: Callable[..., Notebook], tmp_path: Path
) -> None:
    """After a git checkout, say, workers start in the nearest folder that exists, as a line says.

    Replaced workers, and workers of an agent that starts later, use the same folder.
    """
    folder = tmp_path / "branch" / "notebooks"
    folder.mkdir(parents=True)
    notebook = fresh(f"import os; os.chdir({str(folder)!r})", "%load_ext nbdist", "%dist_init -n 2")
    shutil.rmtree(tmp_path / "branch")
    where = "%%distributed\nimport os; print(os.getcwd())"
    notebook.run("%dist_restart -r 1")
    assert body(notebook.run(f"{where} if rank else ''"))[-1] == str(tmp_path)
    note = FOLDER_REMOVED.format(folder, tmp_path)
    for line in ("%dist_restart", "%dist_shutdown", "%dist_init -n 2 --no-fork"):
        shown = notebook.run(line).text
        assert (note in shown) == (line != "%dist_shutdown")
    assert body(notebook.run(where)) == ["── ranks 0-1 (same) ──", str(tmp_path)]
    assert f" in {tmp_path}. " in notebook.run("%dist_run script.py").error


@pytest.mark.shared_world
def test_scale_says_which_ranks_are_new_or_moved(kernel: Notebook) -> None:
    """A note names, once, the variables that new ranks lack and the ranks with new numbers."""
    assert kernel.run("%%distributed -n 2\npass").errors == []
    kernel.run("%%distributed\nkept = made = 5; rank = dist.get_rank()")
    text = kernel.run("%dist_scale +1").text
    assert text.startswith("now 3 workers · new rank 2 does not have kept and made"), text
    assert "now 3 workers" not in kernel.run("%%distributed\nprint(world_size)").text
    assert kernel.run("%dist_scale -1").text == "now 2 workers"
    kernel.run("number = 41\n%dist_scale 3")
    kernel.run("%%distributed\nwas = rank + number - 41")
    moved = "ranks 1-2 are now ranks 0-1"
    assert kernel.run("%dist_scale -r 1-2").text == f"now 2 workers · {moved}"
    text = kernel.run("%%distributed\nprint(rank, was, number)").text
    for each in (moved, "0 1 41", "1 2 41"):
        assert each in text
    assert "are now" not in kernel.run("%%distributed\nprint(rank)").text
    assert kernel.run("%dist_scale -r 0,1").text == "already 2 workers"
    # `%dist_sync` copies variables to ranks that lack them, or to the ranks after `-r`.
    kernel.run("%%distributed\nmine = [rank]\nother = mine")
    kernel.run("%dist_scale 4")
    text = kernel.run("%dist_sync mine other --from 1").text
    assert text == "copied mine, other from rank 1 to ranks 2-3"
    kernel.run("%dist_gather (mine[0],mine is other) --as found")
    assert kernel.value("found") == [(0, True), (1, True), (1, True), (1, True)]
    text = kernel.run("%dist_sync mine").text
    assert text == "all ranks have mine already; `-r all` copies to all of them"
    text = kernel.run("%dist_sync mine --from -1 -r 0").text
    assert text == "copied mine from rank 3 to rank 0"


# --- worlds that outlive a kernel, and the next kernel ----------------------------------------


LOOP = """%%distributed
import os, time
step = 0
while True:
    total = torch.ones(1) * step
    dist.all_reduce(total)
    if step < 3:
        print("step", step, total.item())
    step += 1
    time.sleep(0.01)
    # Together: a rank that looked for itself could leave the other in a collective.
    is_open = torch.tensor(float(os.path.exists(GATE)))
    dist.all_reduce(is_open)
    if is_open:
        break
print("trained")
"""

NO_AGENT = {"NBDIST_PRESTART": "0"}
"""The environment of a notebook that starts no agent, but attaches to a running world."""

STEPS = ["step 0 0.0", "step 1 2.0", "step 2 4.0"]


def named(name: str) -> list[RunningWorld]:
    return [each for each in worlds() if each.info.name == name]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the test's world; the fixture kills the world if it still runs."""
    name = f"{request.node.name}-{os.getpid()}"  # this machine may run the test twice at once
    yield name
    for _ in named(name):
        kill_world(name)


def begin(notebook: Notebook, name: str, gate: Path) -> None:
    """Run a loop on two workers that outlive the notebook, until the file `gate` exists."""
    first = f"%%distributed -n 2 --detach --name {name}\nGATE = {str(gate)!r}\nx = rank"
    assert notebook.run(first).errors == []
    notebook.client.execute(LOOP)
    wait_until(lambda: named(name)[0].info.state == "busy", "it runs")


@pytest.mark.own_agent
def test_attach_follows_the_cell(fresh: Callable[..., Notebook], name: str, tmp_path: Path) -> None:
    """A new kernel shows the missed and the further output, and uses the workers as before."""
    gate = tmp_path / "gate"
    first = fresh("%load_ext nbdist", "sent, same = [1], [1]")
    first.run(f"%%distributed -n 2 --detach --name {name}\nsent.append(2); same[0]")
    begin(first, name, gate)
    os.kill(first.process.pid, signal.SIGKILL)
    wait_until(lambda: named(name)[0].is_detached, "its notebook is gone")
    second = fresh("%load_ext nbdist", "x = 'mine'; sent, same = [3], [3]", env=NO_AGENT)

    def open_gate(outcome: Outcome) -> None:
        if outcome.updates:  # the panel is live
            gate.touch()

    shown = second.run(f"%dist_attach {name}", open_gate)
    *lines, last = body(shown)
    assert f"attached to {name}" in last
    assert last.endswith("import os, time")
    assert lines[1:] == [*STEPS, "trained"]
    # Variables that the workers have are not replaced by the new notebook's.
    assert body(second.run("%%distributed\nprint(x, world_size)"))[1::2] == ["0 2", "1 2"]
    ran = second.run("%%distributed\nprint(sent, same)").text
    assert "[1, 2] [3]" in ran, "what was sent, and changed on the ranks, is theirs too"
    assert "`sent` was changed on the ranks since it was sent" in ran
    assert second.run("%dist_gather step").errors == []
    assert second.value("step[0] == step[1] > 3") is True
    assert name in second.run("%dist_status").text
    assert second.run("%dist_restart -r 1").errors == []
    assert "rank 1" in second.run("%%distributed\nprint(x)").error
    assert "this notebook uses it" in second.run(f"%dist_attach {name}").error
    assert second.run("%dist_shutdown").text == "workers ended"
    assert named(name) == []


@pytest.mark.own_agent
def test_workers_survive_a_restart_of_the_kernel(
    fresh: Callable[..., Notebook], name: str, tmp_path: Path
) -> None:
    """Workers run on after a kernel's restart; the next kernel attaches, and Stop ends the cell."""
    notebook = fresh("%load_ext nbdist", env=NO_AGENT)
    begin(notebook, name, tmp_path / "gate")
    notebook.manager.restart_kernel(now=False)
    notebook.client.wait_for_ready(timeout=SOON)
    assert notebook.run("%load_ext nbdist").errors == []
    (error,) = notebook.run(f"%dist_attach {name}", notebook.stop_at("step 2")).errors
    assert error["ename"] in ("Interrupted", "KeyboardInterrupt")
    assert body(notebook.run("%%distributed\nprint(step > 0)"))[-1] == "True"
    assert kill_world(name) == 0
    assert "SIGTERM" not in notebook.run("%%distributed\npass").error
    assert named(name) == []


@pytest.mark.own_agent
def test_tasks_side_by_side_outlive_their_notebook(
    fresh: Callable[..., Notebook], name: str, tmp_path: Path
) -> None:
    """The next notebook shows both tasks' output: the newest is its cell, the other a job."""
    gates = [tmp_path / "first", tmp_path / "second"]
    first = fresh("%load_ext nbdist")
    assert first.run(f"%%distributed -n 2 --detach --name {name}\nimport os, time").errors == []
    for rank, gate in enumerate(gates):
        loop = f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)"
        cell = f"print('begun', rank)\n{loop}\nkept = rank + 5\nprint('ended', rank)"
        assert first.run(f"%%distributed -r {rank} --no-wait\n{cell}").errors == []
    os.kill(first.process.pid, signal.SIGKILL)
    wait_until(lambda: named(name)[0].is_detached, "its notebook is gone")
    assert named(name)[0].info.state == "busy"
    second = fresh("%load_ext nbdist", env=NO_AGENT)

    def open_gate(outcome: Outcome) -> None:
        if outcome.updates:  # the panel is live
            gates[1].touch()

    attached = second.run(f"%dist_attach {name}", open_gate)
    assert attached.errors == []
    assert "begun 0" in attached.seen
    assert "begun 1" in attached.seen
    assert "ended 1" in attached.seen
    assert "ended 0" not in attached.seen
    second.run("from nbdist.notebook.extension import pools_of")
    stops = "[job.task_run.stop for job in pools_of(get_ipython()).find('default').jobs.running]"
    assert second.value(f"[stop.is_of_job for stop in {stops}]") == [True]
    assert second.run("%dist_gather kept -r 1").errors == []
    gates[0].touch()
    assert second.run("%dist_gather kept").errors == []
    assert second.value("kept") == [5, 6]
    assert second.run("%dist_shutdown").text == "workers ended"
