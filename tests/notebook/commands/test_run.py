"""Tests of `%dist_run` and `--max-restarts` as they are seen in a notebook."""

from __future__ import annotations

import pytest

from nbdist.errors import UsageError
from nbdist.notebook.commands.run import dist_run, failed_rank, split_line
from nbdist.notebook.pool import Pools
from nbdist.output.events import Died, Failure
from tests.notebook.front_end import Notebook, body, lasting

pytestmark = pytest.mark.shared_world

kernel = lasting("%load_ext nbdist", "import os; os.chdir('{folder}')")


@pytest.fixture
def notebook(kernel: Notebook) -> Notebook:
    """The notebook with two workers."""
    if kernel.run("%%distributed -n 2\npass").errors:
        assert kernel.run("%dist_restart -n 2").errors == []
    return kernel


def test_first_script_starts_the_workers(kernel: Notebook) -> None:
    """Options before it are ours, what follows is the script's, as a shell would have it."""
    (kernel.folder / "arguments.py").write_text("import sys\nprint(sys.argv[1:])\nleft = rank\n")
    line = "%dist_run -n 2 arguments.py -n 5 'a b' \"c d\" -r 1 $HOME {left} --max-restarts"
    expected = ["-n", "5", "a b", "c d", "-r", "1", "$HOME", "{left}", "--max-restarts"]
    assert body(kernel.run(line)) == ["── ranks 0-1 (same) ──", str(expected)]
    kernel.run("%dist_gather left")
    assert kernel.value("left") == [0, 1]
    # `$$` reaches the shell as it is.
    lines = body(kernel.run("%dist_run -r 1 --no-python bash -c 'echo $$ $RANK'"))
    assert lines[-1].split()[-1] == "1"


@pytest.mark.parametrize(
    ("line", "ours", "program"),
    [
        ("-n 4 -m pkg.mod -m x", "-n 4 -m", ["pkg.mod", "-m", "x"]),
        ("-r -1 --no-free x.py", "-r -1 --no-free", ["x.py"]),
        ("--max-r 2 --pass x.py", "--max-r 2 --pass", ["x.py"]),
        ("--no-python -- -x", "--no-python", ["-x"]),
        ("x.py '' \"a 'b'\"", "", ["x.py", "", "a 'b'"]),
        (
            "--standalone --tee 3 --rdzv_id=7 --nproc_per_node 2 --master-port 9 x.py --tee 1",
            "--standalone --tee 3 --rdzv_id=7 --nproc_per_node 2 --master-port 9",
            ["x.py", "--tee", "1"],
        ),
    ],
)
def test_whose_option_it_is(line: str, ours: str, program: list[str]) -> None:
    """Ours end with the first word that is none; torchrun's take their values with them."""
    assert split_line(dist_run.run, line) == (ours, program)


def test_it_runs_where_the_notebook_is(notebook: Notebook) -> None:
    """After `%cd` scripts are found and run in the new folder, with what lies beside them."""
    project = notebook.folder / "project"
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
    panels = {
        each["transient"]["display_id"]: each["data"]["text/plain"]
        for each in (*outcome.displays, *outcome.updates)
    }
    first, second, third = panels.values()
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
    pool.failed = 1.0, 3, Failure("ValueError", "bad", (), 0)
    assert failed_rank(pool) == 3
    pool.failed = 2.0, 2, Died(-9, 0)
    said = r"rank 2 was killed by SIGKILL, so .* `%dist_output --failed`"
    with pytest.raises(UsageError, match=said):
        failed_rank(pool)
