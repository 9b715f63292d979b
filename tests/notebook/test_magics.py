"""Tests of the magics in a real notebook kernel, which is used as a front end uses a kernel."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbdist.notebook.command import find_commands
from tests.notebook.front_end import Notebook, Outcome, body
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world


@pytest.mark.smoke
def test_ranks_never_interleave(notebook: Notebook) -> None:
    """Lines are sorted by rank; `%dist_output` shows the last lines again, or all that are kept."""
    outcome = notebook.run(
        "%%distributed\nimport time\nfor i in range(3):\n"
        "    print(f'rank {rank} line {i}')\n    time.sleep(0.02 * (4 - rank))"
    )
    printed = [line for line in body(outcome) if line.startswith("rank")]
    assert printed == [f"rank {rank} line {i}" for rank in range(4) for i in range(3)]
    notebook.run("%%distributed\nfor i in range(500): print(f'{rank}:{i}')")
    again = notebook.run("%dist_output").text
    assert ("{0-3}:499" in again, ":17\n" in again) == (True, False)
    lines = body(notebook.run("%dist_output -r 1 --all"))
    assert [line for line in lines if ":" in line] == [f"1:{i}" for i in range(500)]
    notebook.run("%%distributed\nfor i in range(10_300): print(i)")
    first, *lines = notebook.run("%dist_output -r 1").text.splitlines()
    assert lines == [str(i) for i in range(9_300, 10_300)]
    assert first.endswith(" lines more: %dist_output -r 1 --all")
    header, log, *lines = notebook.run("%dist_output -r 1 --all").text.splitlines()
    assert log.startswith("… 300 lines only in the log")
    assert (header, lines) == ("── rank 1 ──", [str(i) for i in range(300, 10_300)])


@pytest.mark.smoke
def test_names_of_the_notebook_are_sent_with_a_cell(notebook: Notebook) -> None:
    """A cell finds the notebook's variables and functions; names that it binds stay on ranks."""
    notebook.run("def scaled(x):\n    return x * scale")
    for cell, last in (("scale = 3", 9), ("scale = 4", 12), ("%%distributed\nscale = -1", -3)):
        assert notebook.run(cell).errors == []
        assert body(notebook.run("%%distributed\nscaled(rank)"))[-1] == str(last)
    assert notebook.value("scale") == 4


def test_a_cell_can_run_on_some_ranks(notebook: Notebook) -> None:
    """`%%rank` and `-r` select ranks for one cell only; with another `-n` the cell does not run."""
    for magic, ranks in (
        ("%%rank 0, 2-3", [0, 2, 3]),
        ("%%distributed -r ::2", [0, 2]),
        ("%%distributed -n 4 --ranks -2,0", [0, 2]),
        ("%%rank -1", [3]),
        ("%%distributed -r all", [0, 1, 2, 3]),
    ):
        lines = body(notebook.run(f"{magic}\nprint('on', rank)"))
        assert [line for line in lines if line.startswith("on")] == [f"on {r}" for r in ranks]
    assert notebook.run("%%distributed -r 9\npass").error.startswith("BadRanks: `9` selects no")
    assert notebook.run("%%distributed\npass").text.startswith("4 ranks")
    assert "`-r 0-1` runs on some" in notebook.run("%%distributed -n 2\nran = True").error
    assert "NameError" in notebook.run("%%distributed\nran").error


@pytest.mark.smoke
def test_training_survives_stop_death_and_failure(notebook: Notebook, tmp_path: Path) -> None:
    """DDP trains equal models; Stop and errors lose no variables, a death those of its rank."""
    notebook.run(f"import os; os.environ['NBDIST_SNAPSHOT_DIR'] = {str(tmp_path)!r}")
    assert notebook.run("%dist_restart -n 2").errors == []
    trained = notebook.run(
        "%%distributed\nfrom torch.nn.parallel import DistributedDataParallel\n"
        "torch.manual_seed(0)\nnet = DistributedDataParallel(torch.nn.Linear(2, 1))\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.5)\n"
        "x = torch.eye(2)[[rank]]\nfor step in range(50):\n    opt.zero_grad()\n"
        "    loss = ((net(x) - rank) ** 2).mean()\n    loss.backward()\n    opt.step()\n"
        "assert loss < 0.1\nprint(net.module.weight.tolist())"
    )
    same, weights = body(trained)
    assert (same, len(eval(weights)[0])) == ("── ranks 0-1 (same) ──", 2)
    assert notebook.run("%dist_snapshot step").errors == []
    waits = "print('waits')\nif rank: dist.barrier()\nimport time; time.sleep(600)"
    stopped = notebook.run(f"%%distributed\n{waits}", notebook.stop_at("waits")).error
    assert stopped == "KeyboardInterrupt: Stopped on ranks 0-1. No variables were lost."
    error = notebook.run("%%rank 1\nimport os, signal; os.kill(os.getpid(), signal.SIGKILL)").error
    assert "was killed by SIGKILL" in error
    assert "Rank 1 was restarted and its variables (" in error
    has_step = "%%distributed\nprint('step' in globals()); dist.barrier()"
    assert body(notebook.run(has_step))[1::2] == ["True", "False"]
    assert "restored step on ranks 0-1 from " in notebook.run("%dist_restore").text
    assert body(notebook.run("%%distributed\nstep")) == ["── ranks 0-1 (same) ──", "49"]
    failed = notebook.run("%%distributed\nif rank: raise ValueError('bad')\ndist.barrier()")
    freed = "ValueError: bad. Rank 0 was waiting in barrier (line 3) and was released; no variables"
    assert freed in failed.error
    assert "waited in barrier (cell line 3)" in failed.panel["text/plain"]
    assert "Connection closed" not in failed.panel["text/plain"]
    notebook.run("del os.environ['NBDIST_SNAPSHOT_DIR']")
    assert notebook.run("%dist_restart -n 4").errors == []


KINDS = """%%distributed
from IPython.display import *
print("kinds:")
display(Markdown("**done**"), Math("x^2"), JSON({"rank": rank}, expanded=True))
display({"application/x-mine": {"a": [1, 2]}}, raw=True)
import sympy
sympy.Symbol("x") ** 2"""
CHANGED = """%%distributed
from IPython.display import *
display(Markdown("gone"))
clear_output()
handle = display(Markdown("one"), display_id=True)
handle.update(Markdown(f"**two** {rank}"))"""


def below_of(outcome: Outcome) -> list[Any]:
    """Return what a page renders of the displays below the panel, with captions as plain text."""
    assert (outcome.errors, outcome.streams) == ([], [])
    contents = [each["data"] for each in outcome.displays[1:]]
    return [
        next((data[kind] for kind in data if kind not in {"text/plain", "text/html"}), None)
        or data["text/plain"]
        for data in contents
    ]


def test_displays_of_any_kind_reach_the_page(notebook: Notebook) -> None:
    """Each display is below the panel as its rank has sent it; the panel names the kind."""
    outcome = notebook.run(KINDS)
    others = [part for rank in (1, 2, 3) for part in (f"rank {rank}", {"rank": rank})]
    assert below_of(outcome) == [
        "ranks 0-3", "**done**", "$\\displaystyle x^2$", "rank 0", {"rank": 0},
        "ranks 0-3", {"a": [1, 2]}, "$\\displaystyle x^{2}$", *others,
    ]  # fmt: skip
    shown = next(each for each in outcome.displays if "application/json" in each["data"])
    assert shown["metadata"]["application/json"]["expanded"] is True
    panel = (outcome.updates or outcome.displays[:1])[-1]["data"]
    for word in ("Markdown", "LaTeX", "JSON", "application/x-mine"):
        assert f"{word}, shown below" in panel["text/html"]
    assert "\n**done**\n$\\displaystyle x^2$\n" in panel["text/plain"]
    assert "object>" not in panel["text/plain"]
    # Blocks that hold nothing but such displays are left out of the panel.
    outcome = notebook.run(CHANGED)
    assert len(below_of(outcome)) == 8
    panel = (outcome.updates or outcome.displays[:1])[-1]["data"]
    assert "4 ranks" in panel["text/html"]
    assert not re.search("shown below|>ranks? ", panel["text/html"])
    # The text form of the panel does not repeat the displays that are below the panel.
    assert panel["text/plain"] == "4 ranks · ✓ 4"
    assert [each["data"]["text/plain"] for each in outcome.displays[2::2]] == [
        f"**two** {rank}" for rank in range(4)
    ]


def test_displays_can_be_updated_and_cleared(notebook: Notebook) -> None:
    """Below the panel are the displays that a cell has at its end; later cells can update them."""
    shown = [part for rank in range(4) for part in (f"rank {rank}", f"**two** {rank}")]
    assert below_of(notebook.run(CHANGED)) == shown
    assert below_of(notebook.run("%dist_output -r 2")) == shown[4:6]
    later = notebook.run("%%distributed\nhandle.update(Markdown('three'))")
    # Updates of some ranks can come before those of other ranks.
    newest = {each["transient"]["display_id"]: each["data"] for each in later.updates}
    assert [each.get("text/markdown") for each in newest.values()].count("three") == 1
    assert below_of(notebook.run("%dist_output -2")) == ["ranks 0-3", "three"]
    error = notebook.run("%dist_output -99").error
    assert re.search(r"`%dist_output -99`: the output of \d+ cells is kept", error)
    title = notebook.run("%%rank 0\n%%markdown\n# Title")
    assert below_of(title) == ["# Title\n"]  # the head names the only rank


def test_comments_and_final_magics_are_allowed_in_cells(notebook: Notebook) -> None:
    """`%distributed` runs one line; a line may end in a comment, and a cell in `%dist_gather`."""
    notebook.run("here = 5")
    assert notebook.run("%distributed here, there = rank, world_size  # both").errors == []
    shown = body(notebook.run("%distributed -r [0, 1] print(f'{here} of {there}')"))
    assert shown == ["── rank 0 ──", "0 of 4", "── rank 1 ──", "1 of 4"]
    assert "`%distributed x = 1`; `%%distributed` on the" in notebook.run("%distributed -n 4").error
    assert notebook.run("%%distributed -n 4  # it's four\nd = {'#': rank}").errors == []
    assert body(notebook.run("%%rank 0, 1 # some\nd"))[::2] == ["── rank 0 ──", "── rank 1 ──"]
    for line in ("d  # a dict by rank", "d['#'] --as numbers  # by rank", "d['#']+0 --as more"):
        assert notebook.run(f"%dist_gather {line}").errors == []
    assert notebook.value("numbers, more, d[1]") == ([0, 1, 2, 3], [0, 1, 2, 3], {"#": 1})
    assert "4 workers" in notebook.run("%dist_status # now").text
    assert notebook.run("%%distributed\nlast = rank\n\n%dist_gather last  # here").errors == []
    assert notebook.value("last") == [0, 1, 2, 3]
    failed = notebook.run("%%rank 0\nlast = 7\n1 / 0\n%dist_gather last")
    assert failed.errors[0]["evalue"].endswith("ZeroDivisionError: division by zero")
    assert notebook.value("last") == [0, 1, 2, 3]


def test_workers_are_started_shown_and_ended(fresh: Callable[..., Notebook]) -> None:
    """`%dist_init`, `%dist_status` and `%dist_shutdown` each answer with one clear display.

    A warning about workers that share a CPU core stays below the answer.
    """
    one_core = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    notebook = fresh("%load_ext nbdist", one_core)
    answer, *warnings = notebook.run("%dist_init -n 2 --name exp").text.splitlines()
    assert answer == "2 workers ready · gloo"
    assert [line.startswith("2 workers on 1 CPU core: ") for line in warnings] == [True]
    assert notebook.run("%dist_init -n 2 --name exp").text == answer
    notebook.run("%%distributed\nx = 1\nglobals()['half \\ud800'] = 2")
    head, columns, *lines = notebook.run("%dist_status -v").text.splitlines()
    assert head.startswith("2 workers on ")
    assert head.endswith(" · gloo · ready · exp")
    assert columns.split() == ["rank", "state", "pid", "device", "memory"], lines
    pids = []
    for rank, line in enumerate(lines[:2]):
        number, state, pid, device, memory, unit = line.split()
        assert (number, state, device, unit) == (str(rank), "idle", "cpu", "MiB")
        assert float(memory) > 1
        pids.append(int(pid))
    assert all(map(psutil.pid_exists, pids))
    assert "made on the workers: half \\ud800, x" in lines  # escaped, as pages need
    assert "have no log files: NBDIST_LOG_DIR is empty" in notebook.run("%dist_log").error
    assert notebook.run("%dist_shutdown").text == "workers ended"
    assert not any(map(psutil.pid_exists, pids))
    assert "WorldNotStarted" in notebook.run("%dist_gather x").error
    stopped: list[bool] = []

    def stop(outcome: Outcome) -> None:
        if len(outcome.updates) >= 2 and not stopped:
            stopped.append(True)
            notebook.manager.interrupt_kernel()

    # `-f` redraws the status in its place until Stop, which is no error here.
    assert notebook.run("%dist_status -f 0.1", stop).text.startswith("no workers are running")
    assert stopped


def test_magics_are_listed_and_have_help(notebook: Notebook) -> None:
    """`%dist_<TAB>` lists all magics of nbdist; `%dist_gather?` shows the magic's options."""
    reply = notebook.client.complete("%dist_", 6, reply=True, timeout=SOON)
    magics = sorted(each.shown_name for each in find_commands())
    assert sorted(reply["content"]["matches"]) == [x for x in magics if x.startswith("%dist_")]
    (payload,) = notebook.run("%dist_gather?").reply["payload"]
    assert "--stack" in payload["data"]["text/plain"]
