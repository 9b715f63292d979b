"""`%dist_run`, `--max-restarts` and `%dist_memory` in a notebook."""

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


def test_a_first_script_starts_workers_and_gets_its_arguments(kernel: Notebook) -> None:
    """Options before the script are nbdist's; words after it are the script's, as in a shell."""
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
def test_options_end_at_the_script_or_module(line: str, ours: str, program: list[str]) -> None:
    """The program begins at the first word that is neither an option nor an option's value."""
    assert split_line(dist_run.run, line) == (ours, program)


TORCHRUNS = (
    "--standalone --nnodes=1 --node_rank 0 --master-addr=localhost --master_port 29500 --rdzv-id=7"
    " --rdzv-backend=c10d --rdzv-endpoint=localhost:0 -t 3 --redirects 3 --use-env"
)


def test_a_line_of_torchrun_can_be_typed(notebook: Notebook) -> None:
    """A line names the ignored options of torchrun, and says that `-r` selects ranks here."""
    (notebook.folder / "torchruns.py").write_text("print('ran')\n")
    ran = notebook.run(f"%dist_run {TORCHRUNS} --nproc-per-node=2 torchruns.py --standalone")
    assert "ran" in body(ran)
    (note,) = (line for line in ran.text.splitlines() if "ignored" in line)
    assert {*re.findall(r"`(--[\w-]+)", note)} == {
        *("--standalone", "--nnodes", "--node-rank", "--master-addr", "--master-port"),
        *("--rdzv-id", "--rdzv-backend", "--rdzv-endpoint", "--tee", "--redirects", "--use-env"),
    }
    ran = notebook.run("%dist_run --nproc-per-node=2 -r 1 torchruns.py")
    assert "`-r 1` is rank 1 here, not torchrun's `--redirects 1`" in ran.text
    assert "redirects" not in notebook.run("%dist_run -r 1 torchruns.py").text
    for option in ("--nnodes=2", "--node-rank=1"):
        (error,) = notebook.run(f"%dist_run {option} torchruns.py").errors
        assert f"`{option}`: " in error["evalue"]


def test_scripts_run_in_the_notebooks_folder(notebook: Notebook) -> None:
    """After `%cd` scripts are found and run in the new folder, and read the files in it."""
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


def test_a_failed_cell_is_run_again(notebook: Notebook) -> None:
    """A line names the reason of each restart; each attempt has the notebook's names again."""
    notebook.run("class Net:\n    size = 1\nnet = Net()")
    notebook.run("%%distributed\nearlier = Net")  # sends `Net`, which a new rank will lack
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
    assert "rank 0" in notebook.run("%dist_why").text  # the cause of the last restart
    counts = "os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['TORCHELASTIC_MAX_RESTARTS']"
    again = body(notebook.run(f"%%distributed\nprint(*({counts}), len(net))"))
    assert again == ["── ranks 0-1 (same) ──", "0 0 2"]


def test_the_debugger_chooses_the_rank_that_failed_first(pools: Pools) -> None:
    """`failed_rank` returns the rank that failed first, or raises if none has or that rank died."""
    pool = pools.default
    with pytest.raises(UsageError, match=r"no rank has failed yet. `-r 2`"):
        failed_rank(pool)
    pool.failures.first_error = 1.0, 3, Failure("ValueError", "bad", (), 0)
    assert failed_rank(pool) == 3
    pool.failures.first_error = 2.0, 2, Died(-9, 0)
    message = r"rank 2 was killed by SIGKILL, so .* `%dist_output --failed`"
    with pytest.raises(UsageError, match=message):
        failed_rank(pool)


# --- %dist_memory: tables by rank and by variable; `--free` -----------------------------------


MIB, GIB = 2**20, 2**30

X = NameMemory("x", 4 * MIB, (1024, 1024), "float32")


def memory(
    pss: int, *tensors: NameMemory, gpu: GpuMemory | None = None, kept: tuple[NameMemory, ...] = ()
) -> Memory:
    """Return the memory of a rank on a machine of 24 GiB."""
    limit = MemoryLimit("this machine", 24 * GIB, 20 * GIB)
    size = sum(each.size for each in tensors)
    return Memory(pss, Peak(pss), limit, gpu, tensors, size, kept, sum(each.size for each in kept))


def test_equal_ranks_share_a_row():
    """The headline has the range of memory; columns for GPUs appear only if ranks have GPUs."""
    by_rank = {0: memory(40 * MIB, X), 1: memory(60 * MIB, X), 2: memory(40 * MIB, X)}
    assert headline(by_rank) == "ranks 0-2 · 40-60 MiB · this machine 4 GiB of 24 GiB"
    assert per_rank(by_rank, used_figures) == [
        ("ranks", "memory", "peak in last cell", "in variables"),
        ("0,2", "40 MiB", "40 MiB", "4 MiB"),
        ("1", "60 MiB", "60 MiB", "4 MiB"),
    ]
    gpu = GpuMemory("1", 61 * GIB, 80 * GIB, 40 * GIB, Peak(50 * GIB, is_bound=True))
    by_rank = {1: memory(GIB, X, gpu=gpu)}
    assert headline(by_rank).startswith("rank 1 · 1 GiB · GPU 61 GiB of 80 GiB · ")
    assert per_rank(by_rank, used_figures)[1][5:] == ("40 GiB", "at most 50 GiB")
    # Sizes before and after `--free` are rounded, so that ranks share a row.
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


def test_tensors_are_listed_by_size_with_their_ranks():
    """Each different tensor has a row with its ranks; the largest tensor comes first."""
    small, other = (
        NameMemory("x", MIB, (5,), "int8", "cuda:0"),
        NameMemory("list", 9 * MIB, count=300),
    )
    by_rank = {0: memory(0), 1: memory(0)}
    tensors = [(0, X), (1, small), (0, other), (1, other)]
    assert tensor_rows(by_rank, tensors) == [
        ("size", "name", "what", "device", "ranks"),
        ("9 MiB", "list", "300 tensors", "cpu", "all"),
        ("4 MiB", "x", "(1024, 1024) float32", "cpu", "0"),
        ("1 MiB", "x", "(5,) int8", "cuda:0", "1"),
    ]
    assert tensor_rows(by_rank, []) == []


def test_tensors_held_by_a_traceback_are_listed():
    """If only the last traceback and `Out` hold tensors, a line says so and names `--free`."""
    assert "%dist_clean" not in memory_tables({0: memory(MIB, X)}).text
    line = "4 MiB that only the last traceback and `Out` hold on rank 1: `%dist_memory --free`"
    assert line in memory_tables({0: memory(MIB, X), 1: memory(MIB, kept=(X,))}).text
