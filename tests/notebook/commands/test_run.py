"""`%dist_run`, `--max-restarts` and `%dist_memory` as they are seen in a notebook."""

from __future__ import annotations

import re

import pytest

from nbdist.errors import UsageError
from nbdist.notebook.commands.run import (
    dist_run,
    failed_rank,
    freed_figures,
    headline,
    memory_tables,
    per_rank,
    split_line,
    tensor_rows,
    used_figures,
)
from nbdist.notebook.pool import Pools
from nbdist.output.events import Died, Failure
from nbdist.system.limits import MemoryLimit
from nbdist.wire.ops import Cleaned, GpuMemory, Memory, NameMemory, Peak
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


TORCHRUNS = (
    "--standalone --nnodes=1 --node_rank 0 --master-addr=localhost --master_port 29500 --rdzv-id=7"
    " --rdzv-backend=c10d --rdzv-endpoint=localhost:0 -t 3 --redirects 3 --use-env"
)


def test_a_line_of_torchrun(notebook: Notebook) -> None:
    """What one world needs not is ignored, which one line says; `-r` is a rank here."""
    (notebook.folder / "torchruns.py").write_text("print('ran')\n")
    ran = notebook.run(f"%dist_run {TORCHRUNS} --nproc-per-node=2 torchruns.py --standalone")
    assert "ran" in body(ran)
    (said,) = (line for line in ran.text.splitlines() if "ignored" in line)
    assert {*re.findall(r"`(--[\w-]+)", said)} == {
        *("--standalone", "--nnodes", "--node-rank", "--master-addr", "--master-port"),
        *("--rdzv-id", "--rdzv-backend", "--rdzv-endpoint", "--tee", "--redirects", "--use-env"),
    }
    ran = notebook.run("%dist_run --nproc-per-node=2 -r 1 torchruns.py")
    assert "`-r 1` is rank 1 here, not torchrun's `--redirects 1`" in ran.text
    assert "redirects" not in notebook.run("%dist_run -r 1 torchruns.py").text
    for option in ("--nnodes=2", "--node-rank=1"):
        (error,) = notebook.run(f"%dist_run {option} torchruns.py").errors
        assert f"`{option}`: " in error["evalue"]


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
    first, second, third = filter(None, panels.values())
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


# --- %dist_memory: figures of all ranks, names once; and `--free` -----------------------------


MIB, GIB = 2**20, 2**30

X = NameMemory("x", 4 * MIB, (1024, 1024), "float32")


def memory(
    pss: int, *held: NameMemory, gpu: GpuMemory | None = None, kept: tuple[NameMemory, ...] = ()
) -> Memory:
    """A rank's, on a machine of 24 GiB."""
    limit = MemoryLimit("this machine", 24 * GIB, 20 * GIB)
    size = sum(each.size for each in held)
    return Memory(pss, Peak(pss), limit, gpu, held, size, kept, sum(each.size for each in kept))


def test_equal_ranks_are_one_row():
    """From which to which in the head; columns of GPUs only where there are some."""
    found = {0: memory(40 * MIB, X), 1: memory(60 * MIB, X), 2: memory(40 * MIB, X)}
    assert headline(found) == "ranks 0-2 · 40-60 MiB · this machine 4 GiB of 24 GiB"
    assert per_rank(found, used_figures) == [
        ("ranks", "memory", "peak in last cell", "in variables"),
        ("0,2", "40 MiB", "40 MiB", "4 MiB"),
        ("1", "60 MiB", "60 MiB", "4 MiB"),
    ]
    gpu = GpuMemory("1", 61 * GIB, 80 * GIB, 40 * GIB, Peak(50 * GIB, is_bound=True))
    found = {1: memory(GIB, X, gpu=gpu)}
    assert headline(found).startswith("rank 1 · 1 GiB · GPU 61 GiB of 80 GiB · ")
    assert per_rank(found, used_figures)[1][5:] == ("40 GiB", "at most 50 GiB")
    # Before and after `--free`: as many digits as ranks can share.
    alike, other = Cleaned((240 * MIB, 43 * MIB)), Cleaned((2**30, 43 * MIB))
    freed = {0: alike, 1: other, 2: Cleaned((238 * MIB, 43 * MIB)), 3: alike}
    assert per_rank(freed, freed_figures) == [
        ("ranks", "memory before", "after"),
        ("0,2-3", "240 MiB", "43 MiB"),
        ("1", "1.0 GiB", "43 MiB"),
    ]
    on_gpu = Cleaned((0, 0), (3 * 2**30, 2**30), (4 * 2**30, 2**30))
    assert per_rank({0: on_gpu}, freed_figures) == [
        ("ranks", "memory before", "after", "GPU tensors before", "after",
         "GPU held by torch before", "after"),
        ("0", "0 MiB", "0 MiB", "3.0 GiB", "1.0 GiB", "4.0 GiB", "1.0 GiB"),
    ]  # fmt: skip


def test_names():
    """A row for each, with the ranks where it is so; the largest first."""
    small, other = (
        NameMemory("x", MIB, (5,), "int8", "cuda:0"),
        NameMemory("list", 9 * MIB, count=300),
    )
    found = {0: memory(0), 1: memory(0)}
    held = [(0, X), (1, small), (0, other), (1, other)]
    assert tensor_rows(found, held) == [
        ("size", "name", "what", "device", "ranks"),
        ("9 MiB", "list", "300 tensors", "cpu", "all"),
        ("4 MiB", "x", "(1024, 1024) float32", "cpu", "0"),
        ("1 MiB", "x", "(5,) int8", "cuda:0", "1"),
    ]
    assert tensor_rows(found, []) == []


def test_what_is_held_unseen():
    """With the way to let go of it, where there is any."""
    assert "%dist_clean" not in memory_tables({0: memory(MIB, X)}).text
    said = "4 MiB that only the last traceback and `Out` hold on rank 1: `%dist_memory --free`"
    assert said in memory_tables({0: memory(MIB, X), 1: memory(MIB, kept=(X,))}).text
