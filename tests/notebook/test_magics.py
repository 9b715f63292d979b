"""Tests of the magics in a real notebook kernel, driven as a front end drives it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from nbdist.errors import NbdistError, WorldNotStarted
from nbdist.notebook.command import find_commands
from nbdist.output.ansi import strip
from tests.notebook.front_end import Notebook, Outcome, body
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world

MAGICS = sorted(each.shown_name for each in find_commands())


# --- cells ------------------------------------------------------------------------------


def test_first_cell_starts_the_workers_and_later_ones_reuse_them(
    fresh: Callable[..., Notebook],
) -> None:
    """`%load_ext` and one cell are all that is needed; the next cell finds its state."""
    notebook = fresh("%load_ext nbdist")
    first = notebook.run("%%distributed -n 4\nx = 10 * rank\nprint(rank, world_size)")
    assert [line for line in body(first) if line[1:] == " 4"] == ["0 4", "1 4", "2 4", "3 4"]
    again = notebook.run("%%distributed\nprint(x)")
    assert [line for line in body(again) if line[0].isdigit()] == ["0", "10", "20", "30"]
    # The notebook has the extension's own names and no others.
    assert notebook.value("'x' in globals(), 'rank' in globals()") == (False, False)


def test_silent_cell_is_one_line(notebook: Notebook) -> None:
    """A cell that shows nothing says how many ranks ran it, and on the page how long."""
    ran = notebook.run("%%distributed\nx = 1")
    assert ran.text == "4 ranks"
    assert re.search(r"4 ranks · \d+\.\d s", ran.displays[-1]["data"]["text/html"])


def test_equal_output_is_shown_once(notebook: Notebook) -> None:
    """What all ranks say alike stands there once, under their numbers."""
    lines = body(notebook.run("%%distributed\nprint('hello')\nprint('world')"))
    assert lines == ["── ranks 0-3 (same) ──", "hello", "world"]


@pytest.mark.smoke
def test_ranks_never_interleave(notebook: Notebook) -> None:
    """Each rank's lines are together, in rank order, whatever the order they came in."""
    lines = body(
        notebook.run(
            "%%distributed\nimport time\nfor i in range(3):\n"
            "    print(f'rank {rank} line {i}')\n    time.sleep(0.02 * (4 - rank))"
        )
    )
    said = [line for line in lines if line.startswith("rank")]
    assert said == [f"rank {rank} line {i}" for rank in range(4) for i in range(3)]


def test_tutorials_that_make_the_group(notebook: Notebook) -> None:
    """Cells that initialise and destroy the group run as they are, any number of times."""
    cells = (
        "dist.init_process_group('gloo', rank=rank, world_size=world_size)",
        "t = torch.ones(1); dist.all_reduce(t); print(t.item())",
        "dist.destroy_process_group()",
    )
    assert notebook.run("%dist_restart").errors == []
    said = [notebook.run(f"%%distributed\n{cell}").text for cell in cells * 2]
    there = "The group of all 4 ranks (gloo) exists already."
    assert [there in text for text in said] == [True, *[False] * 5]
    assert said[0].splitlines()[1:] == ["── ranks 0-3 (same) ──", there]
    assert "4.0" in said[4]


def test_last_values_are_a_table(notebook: Notebook) -> None:
    """The value of the last expression of each rank is shown, equal ones merged."""
    outcome = notebook.run("%%distributed\nrank // 2")
    assert body(outcome) == ["── ranks 0-1 (same) ──", "0", "── ranks 2-3 (same) ──", "1"]
    assert "<table" in outcome.panel["text/html"]


def test_live_drawing_while_running(notebook: Notebook, tmp_path: Path) -> None:
    """Output appears while the cell runs, in the same display, at most some times a second."""

    def let_go_on(outcome: Outcome) -> None:
        for drawn in (*outcome.displays, *outcome.updates):
            for step in re.findall(r"^step (\d)$", drawn["data"]["text/plain"], re.MULTILINE):
                (tmp_path / step).touch()

    began = time.monotonic()
    outcome = notebook.run(
        "%%distributed\nimport time; from pathlib import Path\nfor step in range(5):\n"
        "    print('step', step)\n"
        f"    while not Path({str(tmp_path)!r}, str(step)).exists(): time.sleep(0.01)",
        let_go_on,
    )
    assert 5 <= 1 + len(outcome.updates) <= (time.monotonic() - began) / 0.25 + 3
    assert "step 4" in outcome.text


def test_fast_cell_is_drawn_once(notebook: Notebook) -> None:
    """A cell that is over at once does not flash."""
    assert notebook.run("%%distributed\nprint(1)").updates == []


def test_figure_is_in_the_panel(notebook: Notebook) -> None:
    """A figure is embedded in the block of its rank."""
    outcome = notebook.run("%%distributed -r 0\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);")
    assert "data:image/png;base64," in outcome.panel["text/html"]


@pytest.mark.smoke
def test_names_of_the_notebook_go_along(notebook: Notebook) -> None:
    """A cell finds the notebook's variables and functions; what it binds stays there."""
    notebook.run("scale = 3\ndef scaled(x):\n    return x * scale")
    assert "── rank 3 ──\n9" in notebook.run("%%distributed\nscaled(rank)").text
    notebook.run("scale = 4")
    assert "── rank 3 ──\n12" in notebook.run("%%distributed\nscaled(rank)").text
    notebook.run("%%distributed\nscale = -1")
    assert "── rank 3 ──\n-3" in notebook.run("%%distributed\nscaled(rank)").text
    assert notebook.value("scale") == 4


def test_line_numbers_are_the_notebooks(notebook: Notebook) -> None:
    """A traceback shows the number of the cell and of the line as the editor has them."""
    notebook.run("%%distributed\ndef fail():\n    raise ValueError('bad shard')")
    outcome = notebook.run("%%distributed\nx = 1\nif rank == 2:\n    fail()")
    number = outcome.reply["execution_count"]
    assert outcome.error.startswith("WorkerError: 1 of 4 ranks failed (2); first: rank 2 after ")
    assert outcome.error.endswith("s: ValueError: bad shard")
    text = outcome.panel["text/plain"]
    assert f"Cell In[{number}], line 4" in text
    assert f"Cell In[{number - 1}], line 3" in text
    assert "raise ValueError('bad shard')" in text
    assert "nbdist" not in text


def test_equal_tracebacks_are_folded(notebook: Notebook) -> None:
    """Ranks that fail alike are told together, with one traceback."""
    outcome = notebook.run("%%distributed\nprint('before')\n1 / 0")
    assert outcome.error.startswith("WorkerError: 4 of 4 ranks failed (0-3); first: rank ")
    assert outcome.panel["text/plain"].count("ZeroDivisionError: division by zero") == 1


def test_ranks_of_a_cell(notebook: Notebook) -> None:
    """`%%rank` and `-r` run a cell on some ranks; forms with signs and colons are read."""
    for magic, ranks in (
        ("%%rank 0,2-3", [0, 2, 3]),
        ("%%rank 0, 2-3", [0, 2, 3]),
        ("%%distributed -r 1", [1]),
        ("%%distributed -r -1", [3]),
        ("%%distributed -r=-1", [3]),
        ("%%distributed --ranks -2,0", [0, 2]),
        ("%%distributed -r ::2", [0, 2]),
        ("%%distributed -r 1:3", [1, 2]),
        ("%%distributed -r all", [0, 1, 2, 3]),
        ("%%distributed -n 4 -r 0-1", [0, 1]),
        ("%%rank -1", [3]),
    ):
        outcome = notebook.run(f"{magic}\nprint('on', rank)")
        said = [line for line in body(outcome) if line.startswith("on")]
        assert said == [f"on {rank}" for rank in ranks], magic


def test_one_off_selection_changes_no_default(notebook: Notebook) -> None:
    """A cell on some ranks, also one that fails, leaves the next cell on all."""
    assert "ValueError" in notebook.run("%%distributed -r 1\nraise ValueError(1)").error
    assert notebook.run("%%distributed -r 9\npass").error.startswith("BadRanks: `9` selects no")
    assert notebook.run("%%distributed\npass").text.startswith("4 ranks")


def test_cell_after_a_failed_one(notebook: Notebook) -> None:
    """Variables outlive a failed cell."""
    notebook.run("%%distributed\nkept = rank\nraise OSError")
    assert body(notebook.run("%%distributed -r 3\nkept")) == ["── rank 3 ──", "3"]


@pytest.mark.smoke
def test_the_main_job(notebook: Notebook, tmp_path: Path) -> None:
    """DDP trains on all ranks to the same model; a death and Stop cost no more than they say."""
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
    assert same == "── ranks 0-1 (same) ──"
    assert len(eval(weights)[0]) == 2
    assert notebook.run("%dist_snapshot step").errors == []

    pressed: list[int] = []

    def stop(outcome: Outcome) -> None:
        shown = (*outcome.displays, *outcome.updates)
        if not pressed and any("waits" in each["data"]["text/plain"] for each in shown):
            pressed.append(1)
            notebook.manager.interrupt_kernel()

    waits = "print('waits')\nif rank: dist.barrier()\nimport time; time.sleep(600)"
    stopped = notebook.run(f"%%distributed\n{waits}", stop).error
    assert stopped == "KeyboardInterrupt: Stopped on ranks 0-1. No variables were lost."
    said = notebook.run("%%rank 1\nimport os, signal; os.kill(os.getpid(), signal.SIGKILL)").error
    assert "was killed by SIGKILL" in said
    assert "Rank 1 was restarted and its variables (" in said
    there = "%%distributed\nprint('step' in globals()); dist.barrier()"
    assert body(notebook.run(there))[1::2] == ["True", "False"]
    assert "restored step on ranks 0-1 from " in notebook.run("%dist_restore").text
    assert body(notebook.run("%%distributed\nstep")) == ["── ranks 0-1 (same) ──", "49"]
    failed = notebook.run("%%distributed\nif rank: raise ValueError('bad')\ndist.barrier()")
    freed = "ValueError: bad. Rank 0 was waiting in barrier (line 3) and was released; no variables"
    assert freed in failed.error
    shown = (*failed.displays, *failed.updates)[-1]["data"]["text/plain"]
    assert "it waited in barrier (cell line 3)" in shown
    assert "Connection closed" not in shown
    notebook.run("del os.environ['NBDIST_SNAPSHOT_DIR']")
    shutil.rmtree(tmp_path)
    assert notebook.run("%dist_restart -n 4").errors == []


# --- values -----------------------------------------------------------------------------


@pytest.mark.smoke
def test_gather(notebook: Notebook) -> None:
    """`%dist_gather` gives a list by rank; the name keeps its meaning on the workers."""
    notebook.run("%%distributed\nloss = rank / 2\nt = torch.ones(2) * rank")
    notebook.run("%dist_gather loss")
    assert notebook.value("loss") == [0.0, 0.5, 1.0, 1.5]
    assert body(notebook.run("%%distributed -r 3\nloss")) == ["── rank 3 ──", "1.5"]
    notebook.run("%dist_gather loss --as losses -r 1,3")
    assert notebook.value("losses") == [0.5, 1.5]
    notebook.run("%dist_gather t.sum().item() --as sums")
    assert notebook.value("sums") == [0.0, 2.0, 4.0, 6.0]
    notebook.run("%dist_gather 'loss * 2' --as doubled -r -1")
    assert notebook.value("doubled") == 3.0


def test_gather_of_what_is_not_there(notebook: Notebook) -> None:
    """A name that the ranks lack, and an expression without a name to bind, are one line each."""
    assert "no rank has `nowhere`" in notebook.run("%dist_gather nowhere").error
    assert "--as values" in notebook.run("%dist_gather x.item()").error
    assert "`%dist_gather?` shows all options" in notebook.run("%dist_gather").error
    assert "BadRanks" in notebook.run("%dist_gather loss -r 7").error


def test_push(notebook: Notebook) -> None:
    """`%dist_push` binds a name of the notebook on the workers, though they own it."""
    notebook.run("%%distributed\nepochs = 1")
    notebook.run("epochs = 7")
    notebook.run("%%distributed\nepochs = 2")
    outcome = notebook.run("%dist_push epochs")
    assert outcome.errors == []
    assert body(notebook.run("%%distributed\nepochs")) == ["── ranks 0-3 (same) ──", "7"]
    assert "the notebook has no nowhere" in notebook.run("%dist_push nowhere").error


# --- workers ----------------------------------------------------------------------------


def test_init_status_shutdown(fresh: Callable[..., Notebook]) -> None:
    """Workers are started, shown and ended by their magics, each with one clear display."""
    notebook = fresh("%load_ext nbdist")
    assert "no workers are running" in notebook.run("%dist_status").text
    assert notebook.run("%dist_shutdown").text == "no workers were running"
    assert "2 workers ready · gloo" in notebook.run("%dist_init -n 2 --name exp").text
    assert "2 workers ready · gloo" in notebook.run("%dist_init -n 2").text
    notebook.run("%%distributed\nx = 1")
    status = notebook.run("%dist_status -v")
    lines = status.text.splitlines()
    assert lines[0].startswith("2 workers on ")
    assert lines[0].endswith(" · gloo · ready · exp")
    assert lines[1].split() == ["rank", "state", "pid", "device", "memory"]
    for rank, line in enumerate(lines[2:4]):
        number, state, pid, device, memory, unit = line.split()
        assert (number, state, device, unit) == (str(rank), "idle", "cpu", "MiB")
        assert psutil.pid_exists(int(pid))
        assert float(memory) > 1
    assert "made on the workers: x" in status.text
    assert notebook.run("%dist_shutdown").text == "workers ended"
    assert not any(psutil.pid_exists(int(line.split()[2])) for line in lines[2:4])
    assert "no workers are running" in notebook.run("%dist_status").text
    assert "WorldNotStarted" in notebook.run("%dist_gather x").error


def test_restart(notebook: Notebook) -> None:
    """`%dist_restart` gives new workers; the notebook keeps its variables."""
    notebook.run("mine = 1")
    notebook.run("%%distributed\nx = mine")
    outcome = notebook.run("%dist_restart")
    assert outcome.text == "4 workers ready · gloo · worker variables cleared"
    assert "NameError" in notebook.run("%%distributed\nx").error
    assert body(notebook.run("%%distributed\nmine")) == ["── ranks 0-3 (same) ──", "1"]
    assert "3 workers ready" in notebook.run("%dist_restart -n 3").text
    assert notebook.run("%%distributed\npass").text.startswith("3 ranks")
    assert "2 workers ready" in notebook.run("%dist_restart -n 2 --no-fork").text


def test_another_size_runs_nothing(notebook: Notebook) -> None:
    """A `-n` that differs from the running world says how to change it, and runs nothing."""
    outcome = notebook.run("%%distributed -n 8\nran = True")
    assert outcome.error == (
        "WorldSizeMismatch: 4 workers are running. `%dist_scale 8` keeps their variables, "
        "`%dist_restart -n 8` clears them."
    )
    error = notebook.run("%%distributed -n 2\nran = True").error
    assert "`-r 0-1` runs on some" in error
    assert "NameError" in notebook.run("%%distributed\nran").error
    assert "--backend" in notebook.run("%%distributed --backend none\nran = 1").error


def test_output_again(notebook: Notebook) -> None:
    """`%dist_output` shows the last cell's output once more."""
    notebook.run("%%distributed\nfor i in range(500): print(f'{rank}:{i}')")
    again = notebook.run("%dist_output").text
    assert "0:499" in again
    assert "3:499" in again
    assert "0:17\n" not in again


def test_output_of_some_ranks(notebook: Notebook) -> None:
    """`%dist_output -r 1 --all` shows all lines of that rank, and of no other."""
    notebook.run("%%distributed\nfor i in range(500): print(f'{rank}:{i}')")
    everything = notebook.run("%dist_output -r 1 --all").text
    assert "1:0\n" in everything
    assert "1:499" in everything
    assert "0:499" not in everything
    assert "BadRanks" in notebook.run("%dist_output -r 9").error


# --- what people mistype ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("%%distributed -n 0\n1", ["`-n 0`", "at least one", "`-n 4`"]),
        ("%%distributed -n x\n1", ["`-n x`", "not a number", "`-n 4`"]),
        ("%%distributed -n\n1", ["-n", "`%%distributed?` shows all options"]),
        ("%%rank\n1", ["needs ranks", "`%%rank 0`"]),
        ("%%distributed --nosuch 3\n1", ["--nosuch", "`%%distributed?` shows all options"]),
        ("%%distributed 4\n1", ["4", "`%%distributed?` shows all options"]),
        ('%%distributed -n "4\n1', ["`%%distributed?` shows all options"]),
        ("%%distributed --gpus 0,9\n1", ["--gpus"]),
        ("%%distributed --backend mpi\n1", ["--backend mpi", "gloo"]),
        ("%%distributed --launcher nowhere\n1", ["launcher", "local"]),
        ("%%distributed\n\n   \n", ["no code", "%dist_init -n 4"]),
        ("%%distributed\n# only\n# words", ["no code", "%dist_init -n 4"]),
        ("%dist_init -n 0", ["`-n 0`"]),
        ("%dist_restart -n x", ["`-n x`"]),
        ("%dist_gather a --all", ["--all", "`%dist_gather?`"]),
        ("%dist_push", ["`%dist_push?`"]),
        ("%dist_status 3", ["`%dist_status?`"]),
        ("%dist_shutdown now", ["`%dist_shutdown?`"]),
    ],
)
def test_bad_input(typed: Callable[[str], str], source: str, parts: list[str]) -> None:
    """Each mistake gets one error of one line that shows what is right; nothing is started."""
    with pytest.raises(NbdistError) as raised:
        typed(source)
    for part in parts:
        assert part in str(raised.value)
    assert "\n" not in str(raised.value)


def test_bad_ranks(notebook: Notebook) -> None:
    """So does a mistake that depends on the workers; nothing has run."""
    for source, parts in (
        ("%%distributed -n 4 -r 9\nran = 1", ["`9`", "there is no rank 9", "ranks 0-3"]),
        ("%%distributed -n 4 -r 0-\nran = 1", ["`0-`", "cannot be read", "`0,2-3`"]),
        ("%%distributed -r ''\nran = 1", ["selects no ranks", "`0,2-3`"]),
        ("%%rank x\nran = 1", ["`x`", "cannot be read"]),
        ("%%rank __import__('os')\nran = 1", ["cannot be read"]),
        ("%%distributed --nosuch 3\nran = 1", ["--nosuch", "`%%distributed?` shows all options"]),
    ):
        error = notebook.run(source).error
        for part in parts:
            assert part in error
    assert body(notebook.run("%%distributed\n'ran' in globals()"))[-1] == "False"


def test_magic_line_alone(notebook: Notebook) -> None:
    """IPython itself refuses a cell without a body, in a line on stderr, before nbdist hears."""
    outcome = notebook.run("%%distributed -n 4\n")
    assert outcome.reply["status"] == "error"
    (said,) = outcome.streams
    assert said.startswith("UsageError: %%distributed is a cell magic, but the cell body is empty.")


def test_syntax_error_is_found_here(notebook: Notebook) -> None:
    """A cell that is no Python shows the place, as IPython does, and nothing has run."""
    outcome = notebook.run("%%distributed\nran_here = 1\nx = = 2")
    (error,) = outcome.errors
    said = strip("\n".join(error["traceback"]))
    assert "x = = 2" in said
    assert "invalid syntax" in said
    assert re.search(r'(:|", line )3\n', said)  # IPython 7 writes it as Python does
    assert error["evalue"] == "invalid syntax (line 3 of the cell); nothing has run."
    assert said.endswith("Nothing has run on the workers.")
    assert "nbdist/" not in said
    assert "NameError" in notebook.run("%%distributed\nran_here").error


def test_name_that_cannot_be_pickled(notebook: Notebook) -> None:
    """The error says which name, of what type, why, and what to do; nothing has run."""
    notebook.run("import threading\nclass Loader: pass\nloader = Loader()")
    notebook.run("loader.lock = threading.Lock()")
    error = notebook.run("%%distributed\nran_too = 1\nloader").error
    assert error.startswith("VariableNotSent: `loader`: `loader.lock` (thread lock) cannot be sent")
    assert "nothing has run" in error
    assert "NameError" in notebook.run("%%distributed\nran_too").error


def test_huge_value_is_announced(notebook: Notebook) -> None:
    """A string of 200 MB is told with its size and its name, before it is sent."""
    notebook.run("huge = 'x' * 200_000_000")
    outcome = notebook.run("%%distributed\nlen(huge)")
    announced = outcome.displays[0]["data"]["text/plain"]
    assert "huge" in announced
    assert "200 MB" in announced or "191 MiB" in announced
    assert "200000000" in outcome.text
    assert announced.startswith("sending huge")
    assert f"\n{announced.replace('sending', 'sent')}" in outcome.text
    notebook.run("%%distributed\ndel huge")


def test_exit_on_the_ranks(notebook: Notebook) -> None:
    """`exit()` in a cell ends the cell and says how workers are ended, as a bare `quit` does."""
    for source in ("exit()", "quit()", "import sys\nsys.exit(3)"):
        outcome = notebook.run(f"%%distributed\n{source}")
        assert "SystemExit" in outcome.error
        assert "None" not in outcome.error
        assert (
            "the worker is still running. `%dist_shutdown` ends all workers."
            in outcome.panel["text/plain"]
        )
    for source in ("exit", "quit"):
        shown = notebook.run(f"%%distributed\n{source}").text
        assert "`%dist_shutdown` ends all workers" in shown


def test_cell_without_workers(typed: Callable[[str], str]) -> None:
    """`%%rank` before any world says how to start one."""
    with pytest.raises(WorldNotStarted) as raised:
        typed("%%rank 0\n1")
    assert str(raised.value) == (
        "The cell needs workers, and none are running. "
        "A `%%distributed -n 4` cell or `%dist_init -n 4` starts them."
    )


@pytest.mark.own_agent
def test_start_that_fails(fresh: Callable[..., Notebook]) -> None:
    """A start that fails shows one error with the rank, host, command and last lines."""
    notebook = fresh("%load_ext nbdist", env={"GLOO_SOCKET_IFNAME": "nowhere0"})
    outcome = notebook.run("%%distributed -n 2\n1")
    (error,) = outcome.errors
    said = strip("\n".join(error["traceback"]))
    assert said.startswith("StartError: rank ")
    assert "could not start" in said
    assert "nowhere0" in said
    assert notebook.process.children(recursive=True) == []
    notebook.run("import os; del os.environ['GLOO_SOCKET_IFNAME']")
    assert notebook.run("%%distributed -n 2\n1").errors == []


# --- help -------------------------------------------------------------------------------


def test_completion_of_magics(notebook: Notebook) -> None:
    """`%dist_<TAB>` lists all of them."""
    reply = notebook.client.complete("%dist_", 6, reply=True, timeout=SOON)
    assert sorted(reply["content"]["matches"]) == [x for x in MAGICS if x.startswith("%dist_")]


def test_help_of_magics(notebook: Notebook) -> None:
    """`%dist_gather?` shows what it does and its options."""
    for magic in MAGICS:
        (payload,) = notebook.run(f"{magic}?").reply["payload"]
        text = payload["data"]["text/plain"]
        assert f"{magic.lstrip('%')}" in text
        assert "usage" in text.lower() or "::" in text


# --- what is shown where, and other libraries ---------------------------------------------


def test_plain_mode(fresh: Callable[..., Notebook]) -> None:
    """With `NBDIST_DISPLAY=plain`, or `%config`, lines come as a stream, with their ranks."""
    notebook = fresh("%load_ext nbdist", env={"NBDIST_DISPLAY": "plain"})
    outcome = notebook.run("%%distributed -n 2\nprint('same')\nprint('mine', rank)")
    assert outcome.displays == []
    lines = "".join(outcome.streams).splitlines()
    assert "[0-1] same" in lines
    assert "[0] mine 0" in lines
    assert "[1] mine 1" in lines
    failed = notebook.run("%%distributed\nif rank: raise ValueError('bad')")
    (error,) = failed.errors
    assert error["evalue"].endswith("ValueError: bad")
    said = strip("".join(failed.streams))
    assert "raise ValueError('bad')" in said
    notebook.run("%config NbDist.display = 'panel'")
    assert notebook.run("%%distributed\nprint(1)").text.startswith("2 ranks")


@pytest.mark.own_agent
def test_signals_of_a_closed_kernel_reach_the_workers(fresh: Callable[..., Notebook]) -> None:
    """When the notebook kernel is killed in mid-cell, its workers end."""
    notebook = fresh("%load_ext nbdist", "%%distributed -n 2\npass")
    processes = notebook.process.children(recursive=True)
    assert len(processes) == 5  # guard, agent, fork server and two workers
    notebook.client.execute("%%distributed\nimport time; time.sleep(600)")
    os.kill(notebook.process.pid, signal.SIGKILL)
    _gone, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


def test_error_that_a_library_shows(notebook: Notebook) -> None:
    """A failed rank fails the cell also where something else shows tracebacks, as rich can."""
    notebook.run(
        "%%distributed\nshell = get_ipython()\nbefore = shell._showtraceback\n"
        "def show(kind, error, lines): print('shown by a library')\n"
        "shell._showtraceback = show"
    )
    outcome = notebook.run("%%distributed\nif rank == 1: raise ValueError('bad shard')")
    notebook.run("%%distributed\nshell._showtraceback = before")
    assert outcome.error.startswith("WorkerError: 1 of 4 ranks failed (1); first: rank 1 after ")
    assert outcome.error.endswith("s: ValueError: bad shard")
    assert "shown by a library" in outcome.panel["text/plain"]


def test_bars_are_text(notebook: Notebook) -> None:
    """`tqdm.auto` draws lines on the workers, whether ipywidgets is installed or not."""
    outcome = notebook.run(
        "%%distributed -r 0\nimport tqdm.auto\nfor _ in tqdm.auto.tqdm(range(3)): pass\n"
        "import sys; print('widgets:', 'tqdm.notebook' in sys.modules)"
    )
    assert "100%|" in outcome.text
    assert "3/3" in outcome.text
    assert "Warning" not in outcome.text
    assert "widgets: False" in outcome.text
