"""Tests of `%dist_run` and `--max-restarts` as they are seen in a notebook."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbdist.errors import UsageError
from nbdist.notebook.commands.run import dist_run, failed_rank, split_line
from nbdist.notebook.pool import Pools
from nbdist.output.ansi import strip
from nbdist.output.events import Died, Failure
from tests.notebook.front_end import Notebook, Outcome, body, lasting

pytestmark = pytest.mark.shared_world

kernel = lasting("%load_ext nbdist", "import os; os.chdir('{folder}')")


@pytest.fixture
def folder(kernel: Notebook) -> Path:
    """That of the notebook, with the scripts."""
    return kernel.folder


@pytest.fixture
def notebook(kernel: Notebook) -> Notebook:
    """The notebook with two workers."""
    if kernel.run("%%distributed -n 2\npass").errors:
        assert kernel.run("%dist_restart -n 2").errors == []
    return kernel


def shown(outcome: Outcome) -> list[str]:
    """The texts of all panels of a cell, the last content of each."""
    texts = {
        each["transient"]["display_id"]: each["data"]["text/plain"]
        for each in (*outcome.displays, *outcome.updates)
    }
    return list(texts.values())


def failed(outcome: Outcome) -> str:
    """The one line of a cell that has failed, possibly below panels."""
    (error,) = outcome.errors
    text = strip("\n".join(error["traceback"]))
    assert "\n" not in text
    return text


# --- %dist_run ------------------------------------------------------------------------------


def test_first_script_starts_the_workers(kernel: Notebook, folder: Path) -> None:
    """Options before it are ours, what follows is the script's, as a shell would have it."""
    (folder / "arguments.py").write_text("import sys\nprint(sys.argv[1:])\nleft = rank\n")
    line = "%dist_run -n 2 arguments.py -n 5 'a b' \"c d\" -r 1 $HOME {left} --max-restarts"
    expected = ["-n", "5", "a b", "c d", "-r", "1", "$HOME", "{left}", "--max-restarts"]
    assert body(kernel.run(line)) == ["── ranks 0-1 (same) ──", str(expected)]
    kernel.run("%dist_gather left")
    assert kernel.value("left") == [0, 1]


def test_executables_and_modules(notebook: Notebook, folder: Path) -> None:
    """`$$` reaches the shell as it is; a module is found in the notebook's folder."""
    lines = body(notebook.run("%dist_run -r 1 --no-python bash -c 'echo $$ $RANK'"))
    assert lines[-1].split()[-1] == "1"
    (folder / "pkg").mkdir()
    (folder / "pkg" / "mod.py").write_text("import sys\nprint('mod', sys.argv[1:])\n")
    lines = body(notebook.run("%dist_run --pass-local-rank -r 0 -m pkg.mod a"))
    assert lines[-1] == "mod ['--local-rank=0', 'a']"


@pytest.mark.parametrize(
    ("line", "ours", "program"),
    [
        ("x.py -r 1", "", ["x.py", "-r", "1"]),
        ("-n 4 -m pkg.mod -m x", "-n 4 -m", ["pkg.mod", "-m", "x"]),
        ("-r -1 --no-free x.py", "-r -1 --no-free", ["x.py"]),
        ("-n4 --ranks=0,2 x.py", "-n4 --ranks=0,2", ["x.py"]),
        ("--max-r 2 --pass x.py", "--max-r 2 --pass", ["x.py"]),
        ("--no-python -- -x", "--no-python", ["-x"]),
        ("-n", "-n", []),
        ("x.py '' \"a 'b'\"", "", ["x.py", "", "a 'b'"]),
        (
            "--standalone --tee 3 --rdzv_id=7 --nproc_per_node 2 --master-port 9 x.py --tee 1",
            "--standalone --tee 3 --rdzv_id=7 -n 2 --master-port 9",
            ["x.py", "--tee", "1"],
        ),
    ],
)
def test_whose_option_it_is(line: str, ours: str, program: list[str]) -> None:
    """Ours end with the first word that is none; torchrun's take their values with them."""
    assert split_line(dist_run.run, line) == (ours, program)


def test_error_in_a_script(notebook: Notebook, folder: Path) -> None:
    """The panel has the script's own lines, the error one line."""
    path = folder / "fails.py"
    path.write_text("def bad():\n    raise ValueError('no data')\nbad()\n")
    outcome = notebook.run("%dist_run fails.py")
    assert "2 of 2 ranks failed (0-1); first: rank" in failed(outcome)
    (text,) = shown(outcome)
    assert f"File {path}:3\n" in text
    assert "nbdist/" not in text


def test_it_runs_where_the_notebook_is(notebook: Notebook, folder: Path) -> None:
    """After `%cd` scripts are found and run in the new folder, with what lies beside them."""
    project = folder / "project"
    project.mkdir()
    (project / "data.txt").write_text("7")
    (project / "where.py").write_text(
        "import os, sys\nprint(os.getcwd(), open('data.txt').read(), *sys.argv[1:])\n"
    )
    notebook.run("rate, epochs = 0.25, 3")
    assert notebook.run(f"%cd {project}").errors == []
    ran = notebook.run("%dist_run where.py --lr {rate} --epochs=$epochs --twice {2 * epochs}")
    words = "--lr 0.25 --epochs=3 --twice 6"
    assert body(ran) == ["── ranks 0-1 (same) ──", f"{project} 7 {words}"]
    notebook.run("import os; os.chdir('..'); os.environ['NBT_SEEN'], os.environ['API_KEY'] = 'ab'")
    seen = notebook.run("%%distributed\nimport os\nprint(os.getcwd(), os.environ['NBT_SEEN'])")
    changed = "environment variables `API_KEY`, `NBT_SEEN` changed in the notebook"
    *lines, note = body(seen)
    assert note == f"{changed}, and on the ranks too"
    assert lines == ["── ranks 0-1 (same) ──", f"{folder} a"]
    again = notebook.run("%%distributed\nprint(os.environ['API_KEY'])")
    assert body(again) == ["── ranks 0-1 (same) ──", "b"]
    for text in (note, seen.panel["text/html"]):
        assert " 'b'" not in text
    notebook.run("del os.environ['NBT_SEEN'], os.environ['API_KEY']")
    assert "`API_KEY`, `NBT_SEEN` changed" in notebook.run("%%distributed\npass").text


# --- --max-restarts -------------------------------------------------------------------------


def test_cell_that_is_run_again(notebook: Notebook) -> None:
    """Each restart is told in a line; each attempt has the notebook's names as the first had."""
    notebook.run("class Net:\n    size = 1\nnet = Net()")
    notebook.run("%%distributed\nearlier = Net")  # shipped before, and lacked by a new rank
    outcome = notebook.run(
        "%%distributed --max-restarts 3\n"
        "import os, signal\n"
        "net = [net, Net]\n"
        "count = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if rank == 1 and count == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.barrier()\n"
        "if rank == 0 and count == 1: raise ValueError('no data')\n"
        "print(count, os.environ['TORCHELASTIC_MAX_RESTARTS'], type(net[0]).__name__)\n"
    )
    assert outcome.errors == []
    first, second, third = shown(outcome)
    assert "rank 1 ✗" in first
    assert "ValueError: no data" in second
    assert "rank 1 was killed by SIGKILL: restart 1 of 3" in second
    assert "rank 0 raised ValueError: no data: restart 2 of 3" in third
    assert "2 3 Net" in third
    assert "rank 0" in notebook.run("%dist_why").text  # what led to the last restart
    counts = "os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['TORCHELASTIC_MAX_RESTARTS']"
    again = body(notebook.run(f"%%distributed\nprint(*({counts}), len(net))"))
    assert again == ["── ranks 0-1 (same) ──", "0 0 2"]


def test_the_one_that_failed_first(pools: Pools) -> None:
    """Unless its process has ended: then there is nothing to look at."""
    pool = pools.default
    with pytest.raises(UsageError, match=r"no rank has failed yet. `-r 2`"):
        failed_rank(pool)
    pool.failed = 3, Failure("ValueError", "bad", (), 0)
    assert failed_rank(pool) == 3
    pool.failed = 2, Died(-9, 0)
    with pytest.raises(
        UsageError,
        match=r"rank 2 was killed by SIGKILL, so .* `%dist_output "
        r"--failed`",
    ):
        failed_rank(pool)
