"""Tests of cells that run at the same time on different ranks: jobs beside other cells."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.front_end import Notebook
from tests.waiting import wait_until

pytestmark = pytest.mark.shared_world

WAITS = "import os, time\nwhile not os.path.exists({file!r}): time.sleep(0.01)\n"
"""The beginning of a job that ends once the file exists."""


@pytest.fixture
def four(notebook: Notebook) -> Iterator[Notebook]:
    """A notebook with four workers, all of which are free again afterwards."""
    yield notebook
    notebook.run("%dist_interrupt")
    assert (
        notebook.run("%%distributed\nimport torch.distributed as dist\ndist.barrier()").errors == []
    )


@pytest.fixture
def end(tmp_path: Path) -> Path:
    """The file whose existence ends a job that `begin` has sent."""
    return tmp_path / "may-end"


def begin(notebook: Notebook, ranks: str, end: Path, code: str = "rank", name: str = "a") -> None:
    """Send a job to these ranks that waits until the file exists, and then runs `code`."""
    first = f"%%distributed -r {ranks} --no-wait -o {name}\n"
    assert notebook.run(first + WAITS.format(file=str(end)) + code).errors == []


def text_of(notebook: Notebook, source: str) -> str:
    """Run a magic, and return the last text of its own display, not of a job's panel."""
    ran = notebook.run(source)
    shown = ran.displays[-1]
    updates = [each for each in ran.updates if each["transient"] == shown["transient"]]
    return str([shown, *updates][-1]["data"]["text/plain"])


def done(notebook: Notebook, name: str = "a") -> bool:
    """Return whether the job has ended."""
    return bool(notebook.value(f"{name}.done()"))


MEETS = """
x = torch.tensor([rank + 1.0])
while rank == 0 and not os.path.exists({end!r}): time.sleep(0.01)
work = dist.all_reduce(x, group=left, async_op=True)
if rank == 1: open({begun!r}, "w").close()
work.wait()
x.item()
"""
"""Rank 1 waits in a collective of ranks 0-1, which rank 0 joins once the file `end` exists."""

WAITS_AGAIN = """
try:
    print('now')
    dist.all_reduce(torch.ones(1), group=right)
except KeyboardInterrupt:
    dist.all_reduce(torch.ones(1), group=right)
"""
"""Rank 3 leaves this code after Stop only by an abort of collectives, because rank 2 does not join.

If Stop raises KeyboardInterrupt before the first collective, rank 3 waits in the second one."""

ENDS = {
    "error": f"if rank == 2: raise ValueError('bad'){WAITS_AGAIN}",
    # No rank waits, so no abort precedes the check for incomplete collectives.
    "errors": "raise ValueError('bad')",
    "stop": f"if rank == 2: time.sleep(600){WAITS_AGAIN}",
}


@pytest.mark.parametrize("how", ENDS)
def test_collectives_of_other_cells_go_on(
    four: Notebook, end: Path, tmp_path: Path, how: str
) -> None:
    """A cell whose ranks fail, or are stopped, ends no collective of a job on other ranks."""
    groups = "left, right = dist.new_group([0, 1]), dist.new_group([2, 3])"
    imports = "import os, time, torch, torch.distributed as dist"
    assert four.run(f"%%distributed\n{imports}\n{groups}").errors == []
    begun = tmp_path / "begun"
    job = MEETS.format(end=str(end), begun=str(begun))
    assert four.run(f"%%distributed -r 0-1 --no-wait -o a\n{job}").errors == []
    wait_until(begun.exists)
    stop = four.stop_at("now") if how == "stop" else None
    (ended,) = four.run(f"%%distributed -r 2-3\n{ENDS[how]}", stop).errors
    assert ("Stopped" if how == "stop" else "bad") in ended["evalue"]
    before = four.value("a.done()")
    end.touch()
    assert before is False
    assert four.value("dict(a.result(20).items())") == {0: 3.0, 1: 3.0}
    assert four.run("%%distributed\ndist.barrier(group=right if rank > 1 else left)").errors == []


def test_a_cell_runs_beside_a_job_of_other_ranks(four: Notebook, end: Path) -> None:
    """The cell does not wait, and has its own panel and result; the job goes on and has its own."""
    begin(four, "0", end, "print('end of the job')\nrank * 10")
    ran = four.run("%%distributed -r 1-3 -o b\nprint('beside', rank)\nrank")
    assert ran.errors == []
    assert "Waiting for" not in ran.seen
    assert "beside 1" in ran.seen
    assert four.value("dict(b.items())") == {1: 1, 2: 2, 3: 3}
    assert done(four) is False
    status = text_of(four, "%dist_status")
    lines = [line.split() for line in status.splitlines()]
    job, *others = (line for line in lines if line[1:2] in (["busy"], ["idle"]))
    assert job[:2] == ["0", "busy"]
    assert [each[1] for each in others] == ["idle"] * 3
    end.touch()
    assert four.value("dict(a.result().items())") == {0: 0}


def test_the_status_shows_which_rank_runs_which_cell(four: Notebook, tmp_path: Path) -> None:
    """With two jobs at once, a column of the status has the number of each rank's cell."""
    files = {name: tmp_path / name for name in "ab"}
    begin(four, "0", files["a"])
    begin(four, "1,3", files["b"], name="b")
    lines = [line.split() for line in text_of(four, "%dist_status").splitlines()]
    heading = next(line for line in lines if line[:1] == ["rank"])
    assert heading[:4] == ["rank", "state", "cell", "pid"]
    cells = {line[0]: line[4] for line in lines if line[1:2] == ["busy"]}
    assert cells.keys() == {"0", "1", "3"}
    assert cells["1"] == cells["3"] != cells["0"]
    files["b"].touch()
    assert four.value("dict(b.result().items())") == {1: 1, 3: 3}
    assert done(four) is False
    files["a"].touch()
    assert four.value("dict(a.result().items())") == {0: 0}


def test_a_cell_that_overlaps_a_job_waits(four: Notebook, end: Path) -> None:
    """A cell on a rank of the job says that it waits; Stop ends only the wait of the cell."""
    begin(four, "0-1", end)
    stop = four.stop_at("Waiting for `a` (running for ")
    error = four.run("%%distributed -r 1-2\nnever = 1", stop).error
    assert error.startswith("KeyboardInterrupt: Stopped. This cell has not run; `a` keeps running")
    assert done(four) is False
    end.touch()
    waited = four.run("%%distributed -r 1-2\n'never' in globals()")
    assert waited.errors == []
    assert done(four) is True


def test_magics_wait_only_for_their_ranks(four: Notebook, end: Path) -> None:
    """`%dist_gather -r 1-3` runs beside a job of rank 0; without `-r` it waits for the job."""
    assert four.run("%%distributed\nown = rank + 1").errors == []
    begin(four, "0", end, "own = 100")
    assert four.run("%dist_gather own -r 1-3").errors == []
    assert four.value("own") == [2, 3, 4]
    assert four.run("sent = 5\n%dist_push sent -r 2").errors == []
    assert four.value("__import__('nbdist').current_world().gather('sent', rank=2)") == 5
    assert done(four) is False
    stop = four.stop_at("Waiting for `a` (running for ")
    assert "keeps running" in four.run("%dist_gather own", stop).error
    end.touch()
    assert four.run("%dist_gather own").errors == []
    assert four.value("own") == [100, 2, 3, 4]


def test_stop_in_a_cell_leaves_the_job_alone(four: Notebook, end: Path) -> None:
    """Stop ends the cell that waits in a collective of its own group; the job is unaffected."""
    groups = "sub = dist.new_group([1, 2, 3])"
    assert four.run(f"%%distributed\nimport torch.distributed as dist\n{groups}").errors == []
    begin(four, "0", end, "kept = 7")
    cell = "print('now')\nif rank == 1: time.sleep(600)\ndist.barrier(group=sub)"
    stopped = four.run(f"%%distributed -r 1-3\nimport time\n{cell}", four.stop_at("now"))
    assert stopped.error.startswith("KeyboardInterrupt: Stopped on ranks 1-3.")
    assert done(four) is False
    end.touch()
    assert four.run("a.result()").errors == []
    after = four.run("%%distributed\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()")
    assert after.errors == []
    assert four.run("%dist_gather kept -r 0").errors == []


def test_an_interrupt_stops_the_job_that_is_named(four: Notebook, tmp_path: Path) -> None:
    """`job.interrupt()` and `%dist_interrupt -r` stop one job; the other goes on."""
    files = {name: tmp_path / name for name in "abc"}
    begin(four, "0", files["a"])
    begin(four, "1", files["b"], name="b")
    begin(four, "2", files["c"], name="c")
    four.run("b.interrupt()")
    assert four.run("b.wait(9)").error.startswith("KeyboardInterrupt: Stopped on rank 1.")
    assert text_of(four, "%dist_interrupt -r 2").startswith("Stopped on rank 2.")
    assert [done(four, name) for name in "abc"] == [False, True, True]
    files["a"].touch()
    assert four.value("dict(a.result().items())") == {0: 0}


def test_a_timeout_ends_only_its_cell(four: Notebook, end: Path) -> None:
    """`--timeout` of a cell counts beside a job, and stops the ranks of the cell alone."""
    begin(four, "0", end)
    timed_out = four.run("%%distributed -r 1-3 --timeout 0.3\nimport time\ntime.sleep(600)")
    assert timed_out.error.startswith("CellTimeout: ")
    assert done(four) is False
    assert four.run("%%distributed -r 1-3\npass").errors == []
    end.touch()
    assert four.value("dict(a.result().items())") == {0: 0}


def test_a_death_ends_only_its_own_task(four: Notebook, end: Path) -> None:
    """A job on another rank goes on; the dead rank is replaced once the job has ended."""
    assert four.run("%%distributed\nown = rank + 1").errors == []
    begin(four, "0", end, "own = 50")
    killed = four.run("%%distributed -r 1-3\nimport os\nif rank == 2: os.kill(os.getpid(), 9)")
    assert killed.error.startswith("WorkerDied: rank 2 on ")
    assert "Rank 2 is replaced, and its variables are gone, once rank 0 has ended" in killed.error
    assert done(four) is False
    stop = four.stop_at("All ranks must be free, so that they can form their process group again.")
    assert "keeps running" in four.run("%%distributed -r 1\npass", stop).error
    end.touch()
    healed = four.run("%%distributed -r 1,3\nown")
    assert healed.errors == []
    assert "while no cell was running" not in healed.seen
    assert four.run("%dist_gather own -r 0,1,3").errors == []
    assert four.value("own") == [50, 2, 4]
    assert four.run("%%distributed\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()").errors == []


def test_the_death_of_the_jobs_rank_leaves_the_cell_alone(four: Notebook, end: Path) -> None:
    """A cell goes on while the rank of a job dies; the job's error names the rank."""
    begin(four, "0", end)
    pid = int(four.value("__import__('nbdist').current_world().pids[0]"))
    cell = f"import os, time\nif rank == 1: os.kill({pid}, 9)\ntime.sleep(1)\nrank"
    ran = four.run(f"%%distributed -r 1-3 -o b\n{cell}")
    assert ran.errors == []
    assert four.value("dict(b.items())") == {1: 1, 2: 2, 3: 3}
    assert four.run("a.result()").error.startswith("WorkerDied: rank 0 on ")
    assert four.run("%%distributed\nrank").errors == []


def test_cells_that_meet_in_a_collective_are_named(four: Notebook, end: Path) -> None:
    """A line says that a job and a cell have met in a collective and may have exchanged values."""
    assert four.run("%%distributed\nimport torch, torch.distributed as dist").errors == []
    begin(four, "0", end, "x = torch.ones(1)\ndist.all_reduce(x)\nx.item()")
    cell = f"import pathlib\nx = torch.ones(1)\npathlib.Path({str(end)!r}).touch()\n"
    ran = four.run(f"%%distributed -r 1-3 -o b\n{cell}dist.all_reduce(x)\nx.item()")
    assert ran.errors == []
    assert four.value("dict(b.items())") == {1: 4.0, 2: 4.0, 3: 4.0}
    line = "ranks 1-3 called a collective of a group with rank 0, which ran another cell at the "
    assert f"{line}same time: the cells may have exchanged values" in ran.seen
    assert four.run("a.wait(20)").errors == []


def test_an_outside_kill_of_a_free_rank_is_seen_by_later_cells(four: Notebook, end: Path) -> None:
    """A rank that dies idle beside a job is replaced after the job; the job keeps its result."""
    begin(four, "0", end)
    pid = int(four.value("__import__('nbdist').current_world().pids[3]"))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "dead" in text_of(four, "%dist_status"))
    assert done(four) is False
    end.touch()
    assert four.value("dict(a.result().items())") == {0: 0}
    assert four.run("%%distributed -r 3\nrank").errors == []
    failed = text_of(four, "%dist_output --failed")
    assert "the process was killed by SIGKILL while no cell was running" in failed


def test_a_restart_loses_all_jobs(four: Notebook, tmp_path: Path) -> None:
    """`%dist_restart` ends each job with JobLost; `-r` is refused while other ranks run jobs."""
    begin(four, "0", tmp_path / "a")
    begin(four, "1", tmp_path / "b", name="b")
    busy = four.run("%dist_restart -r 2").error
    assert busy.startswith("WorldBusy: ")
    assert done(four) is False
    assert four.run("%dist_restart").errors == []
    for name in "ab":
        assert four.run(f"{name}.result()").error.startswith("JobLost: ")


def test_many_jobs_alternate_between_ranks(four: Notebook, tmp_path: Path) -> None:
    """Jobs in a row on alternating ranks, each beside a cell, all end with their own results."""
    four.run("results = []")
    for number in range(12):
        rank, other = number % 4, (number + 1) % 4
        sent = f"%%distributed -r {rank} --no-wait -o job\nimport time\ntime.sleep(0.05)\n{number}"
        assert four.run(sent).errors == []
        four.run("results.append(job)")
        beside = four.run(f"%%distributed -r {other} -o b\n{number} * 100 + rank")
        assert beside.errors == []
        assert four.value("[*b.items()]") == [(other, number * 100 + other)]
    values = four.value("[[*job.result().items()] for job in results]")
    assert values == [[(number % 4, number)] for number in range(12)]


def test_a_restarted_rank_does_not_get_what_a_busy_rank_may_have_changed(
    four: Notebook, end: Path
) -> None:
    """A restarted rank gets no value that may be outdated; a line says that it lacks the variable.

    The ranks that may have changed the variable run a job, so they cannot be asked.
    """
    assert four.run("held = [1]\n").errors == []
    assert four.run("%%distributed\nheld.append(rank)").errors == []
    assert four.run("%dist_restart -r 3").errors == []
    begin(four, "0-2", end, "held.append(5)")
    lacks = four.run("%%distributed -r 3\nheld")
    assert "rank 3 does not have it: `%dist_sync held --from 0` copies it" in lacks.seen
    assert "NameError" in lacks.errors[0]["evalue"]
    end.touch()
    assert four.run("%dist_sync held --from 0").errors == []
    assert four.run("%%distributed -r 3 -o b\nheld").errors == []
    assert four.value("b[3]") == [1, 0, 5]


def test_cells_run_beside_a_rank_that_has_not_stopped(four: Notebook, end: Path) -> None:
    """A rank that ignores Stop keeps no other rank from running cells and jobs."""
    stubborn = (
        "import os, time\nstops = 0\nprint('begun')\n"
        "while rank == 1:\n    try:\n"
        f"        while not os.path.exists({str(end)!r}): time.sleep(0.01)\n"
        "        break\n    except KeyboardInterrupt:\n"
        f"        stops += 1; open({str(end)!r} + str(stops), 'w').close()"
    )
    was_stopped = lambda times: Path(f"{end}{times}").exists()  # noqa: E731
    stuck = four.run(f"%%distributed -r 1-3\n{stubborn}", four.stop_at("begun"))
    assert stuck.error.startswith("RanksNotStopped: rank 1 has not stopped yet")
    wait_until(lambda: was_stopped(1), "rank 1 was interrupted")
    waits = "leave the stopped cell"
    beside = four.run("%%distributed -r 2\nprint('beside', rank)")
    assert "beside 2" in beside.seen
    assert four.run("%%distributed -r 0 --no-wait -o a\nrank + 7").errors == []
    assert four.value("dict(a.result().items())") == {0: 7}
    assert waits not in "".join(beside.drawn)
    stopped = four.run("%%distributed -r 1\nnever = 1", four.stop_at(waits))
    expected = "KeyboardInterrupt: Stopped. This cell has not run; rank 1 was interrupted again."
    assert stopped.error == expected
    wait_until(lambda: was_stopped(2), "rank 1 was interrupted again")
    press_early = four.run(
        "import signal\n"
        "def press(message):\n"
        f"    if {waits!r} in str(message):\n"
        "        get_ipython().display_pub.unregister_hook(press)\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    return message\n"
        "get_ipython().display_pub.register_hook(press)"
    )
    assert press_early.errors == []
    assert four.run("%%distributed -r 1\nnever = 1").error == expected
    wait_until(lambda: was_stopped(3), "rank 1 was interrupted once more")
    end.touch()
    assert four.run("%%distributed -r 1 -o found\n'never' in globals(), stops").errors == []
    assert four.value("found[1][0], found[1][1] >= 3") == (False, True)


def test_widgets_of_a_job_are_below_the_cell_of_the_job(four: Notebook, tmp_path: Path) -> None:
    """A widget that a job shows while another cell runs does not appear below that cell."""
    files = {name: tmp_path / name for name in "ab"}
    begin(four, "0", files["a"], "import ipywidgets\ndisplay(ipywidgets.IntProgress())")
    four.run(
        f"import pathlib\na.add_done_callback(lambda _: pathlib.Path({str(files['b'])!r}).touch())"
    )
    first = f"print('own', rank)\nopen({str(files['a'])!r}, 'w').close()\n"
    ran = four.run(f"%%distributed -r 1\n{first}{WAITS.format(file=str(files['b']))}")
    assert ran.errors == []
    assert "own 1" in ran.seen
    assert done(four) is True
    assert "IntProgress" not in ran.seen


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("stop", "All workers are ended (`--on-failure stop`) once rank 0 has ended another cell."),
        (
            "restart-all",
            "All workers are restarted (`--on-failure restart-all`), and their variables are lost, "
            "once rank 0 has ended another cell.",
        ),
    ],
)
def test_an_error_says_what_the_policy_will_do(
    notebook: Notebook, end: Path, policy: str, says: str
) -> None:
    """After a death beside a job, the error says that all workers will be ended or restarted."""
    assert notebook.run(f"%dist_init -n 4 --on-failure {policy}").errors == []
    begin(notebook, "0", end)
    killed = notebook.run("%%distributed -r 1-3\nimport os\nif rank == 2: os._exit(3)")
    end.touch()
    assert notebook.value("dict(a.result().items())") == {0: 0}
    assert notebook.run("%dist_init -n 4 --on-failure heal").errors == []
    assert killed.error.endswith(f" into the cell. {says}")


def test_a_failed_cell_keeps_its_own_result(four: Notebook, end: Path) -> None:
    """`-o` has the failed cell's values, although a job's callback has sent a cell meanwhile."""
    begin(four, "0", end)
    send = "get_ipython().run_cell_magic('distributed', '-r 0', 'other = 9\\nother')"
    assert four.run(f"a.add_done_callback(lambda job: {send})").errors == []
    cell = f"import pathlib, time\npathlib.Path({str(end)!r}).touch()\ntime.sleep(1)\n"
    failed = four.run(f"%%distributed -r 1-2 -o b\n{cell}if rank == 2: raise ValueError\nrank")
    assert len(failed.errors) == 1
    assert four.run("%dist_gather other -r 0").errors == []
    assert four.value("other") == 9
    assert four.value("dict(b.items())") == {1: 1}


def test_a_watched_cell_runs_beside_a_job(four: Notebook, end: Path) -> None:
    """`--watch` compares the cell's ranks alone, and does not wait for a job on another rank."""
    begin(four, "0", end)
    train = "m.weight.grad = torch.ones_like(m.weight)\nopt.step()"
    model = "m = torch.nn.Linear(1, 1)\nopt = torch.optim.SGD(m.parameters(), lr=1.0)"
    assert (
        four.run(f"%%distributed -r 1-3\nimport torch\ntorch.manual_seed(0)\n{model}").errors == []
    )
    ran = four.run(f"%%distributed -r 1-3 --watch m --every 1\n{train}")
    assert ran.errors == []
    assert "watch: " in ran.seen
    assert done(four) is False
    end.touch()
    assert four.value("dict(a.result().items())") == {0: 0}
