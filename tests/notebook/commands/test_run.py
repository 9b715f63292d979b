"""Tests of `nbdist.notebook.commands.run`: scripts, attempts, debuggers and memory."""

from __future__ import annotations

import pytest

from nbdist.errors import UsageError
from nbdist.notebook.commands.run import (
    dist_run,
    failed_rank,
    freed_rows,
    headline,
    names,
    rows,
    shown_of,
    split_line,
)
from nbdist.notebook.pool import Pools
from nbdist.output.events import Died, Failure
from nbdist.system.limits import MemoryLimit
from nbdist.wire.ops import Cleaned, GpuMemory, Held, Memory, Peak
from tests.notebook.front_end import Notebook, Outcome, body, lasting

pytestmark = pytest.mark.shared_world

kernel = lasting("%load_ext nbdist", "import os; os.chdir('{folder}')")


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


def test_whose_option_it_is() -> None:
    """Ours end with the first word that is none; torchrun's take their values with them."""
    for line, ours, program in (
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
    ):
        assert split_line(dist_run.run, line) == (ours, program)


def test_it_runs_where_the_notebook_is(pair: Notebook) -> None:
    """After `%cd` scripts are found and run in the new folder, with what lies beside them."""
    project = pair.folder / "project"
    project.mkdir()
    (project / "data.txt").write_text("7")
    (project / "where.py").write_text(
        "import os, sys\nprint(os.getcwd(), open('data.txt').read(), *sys.argv[1:])\n"
    )
    pair.run("rate, epochs = 0.25, 3")
    assert pair.run(f"%cd {project}").errors == []
    ran = pair.run("%dist_run where.py --lr {rate} --epochs=$epochs --twice {2 * epochs}")
    words = "--lr 0.25 --epochs=3 --twice 6"
    assert body(ran) == ["── ranks 0-1 (same) ──", f"{project} 7 {words}"]


def test_cell_that_is_run_again(pair: Notebook) -> None:
    """Each restart is told in a line; each attempt has the notebook's names as the first had."""
    pair.run("class Net:\n    size = 1\nnet = Net()")
    pair.run("%%distributed\nearlier = Net")  # shipped before, and lacked by a new rank
    outcome = pair.run(
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
    assert "rank 0" in pair.run("%dist_why").text  # what led to the last restart
    counts = "os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['TORCHELASTIC_MAX_RESTARTS']"
    again = body(pair.run(f"%%distributed\nprint(*({counts}), len(net))"))
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


# --- where what failed is a cell on the workers, and input ---------------------------------------


FAILED = "%%distributed -n 2\ndef divide(x):\n    return 1 / x\ndivide(1 - rank)"


def test_each_rank_is_asked_in_turn(pair: Notebook) -> None:
    """Below what it has printed; one panel stays, with what was typed."""
    said = pair.run("%%distributed\nprint('hi')\nname = input('name? ')", typed=["ada", "bob"])
    assert said.prompts == ["[rank 0] name? ", "[rank 1] name? "]
    assert body(said) == ["── rank 0 ──", "hi", "name? ada", "── rank 1 ──", "hi", "name? bob"]
    asked = "%%rank 1\nimport getpass\nprint(getpass.getpass('word: ')[::-1])"
    said = pair.run(asked, typed=["secret"])
    assert said.prompts == ["[rank 1] word: "]
    assert body(said) == ["── rank 1 ──", "word: ", "terces"]
    before: list[str] = []

    def look(outcome: Outcome) -> None:
        before.extend(shown["data"]["text/plain"] for shown in outcome.displays)

    cell = "%%distributed\nprint('first', end=' ')\nif rank == 0: input('? ')"
    pair.run(cell, meanwhile=look, typed=["x"])
    head, asks, *rest = before[0].splitlines()
    assert head.startswith("2 ranks · ")
    assert asks == "rank 0 waits for your input"
    assert rest[-2:] == ["── ranks 0-1 (same) ──", "first "]


def test_a_line_for_all_that_are_in_the_debugger(pair: Notebook) -> None:
    """`-r all c`; each has bound what was typed for it alone before."""
    cell = "%%distributed\nx = 1\nbreakpoint()\nprint('x is', x)"
    said = pair.run(cell, typed=["x = 7", "-r all c"])
    assert said.prompts == ["[rank 0] ipdb> "] * 2
    assert [line for line in body(said) if line.startswith("x is")] == ["x is 7", "x is 1"]


def test_stop_at_a_prompt(pair: Notebook) -> None:
    """It ends the cell, also in a long step; nothing is lost or asked again."""
    asks = "def asks():\n try: input('a')\n except KeyboardInterrupt: input('again')\n"
    for waits in ("breakpoint()", "input()", "asks()"):
        begin = f"%%distributed\n{asks}kept = rank\n"
        said = pair.run(f"{begin}if rank:\n {waits}\n kept = 'lost'\ndist.barrier()")
        assert said.error == "KeyboardInterrupt: Stopped on ranks 0-1. No variables were lost."
        assert len(said.prompts) == 1
        assert body(pair.run("%%distributed\ndist.barrier(); kept")) == [
            "── rank 0 ──", "0", "── rank 1 ──", "1"
        ]  # fmt: skip
    cell = "%%rank 0\nimport time\ndef long():\n    print('be' + 'gun')\n    time.sleep(600)\n"
    said = pair.run(f"{cell}breakpoint()\nlong()", meanwhile=pair.stop_at("begun"), typed=["n"])
    assert said.error == "KeyboardInterrupt: Stopped on rank 0. No variables were lost."
    assert len(said.prompts) == 1
    assert "BdbQuit" not in said.panel["text/plain"]


def test_post_mortem(pair: Notebook) -> None:
    """`%dist_debug`, `%debug` and `%pdb` lead to the frames of what failed, on ranks or here."""
    assert "rank 1 after" in pair.run(FAILED).error
    for magic in ("%debug", "%dist_debug", "%dist_debug -r 1"):
        said = pair.run(magic, typed=["p x", "up", "up", "q"])
        assert said.prompts == ["[rank 1] ipdb> "] * 4
        lines = body(said)
        assert lines[1] == "ZeroDivisionError: division by zero"
        assert "----> 3     return 1 / x" in lines
        assert lines[lines.index("ipdb> p x") + 1] == "0"
        assert "*** Oldest frame" in lines
    assert pair.run("%dist_debug").error.startswith("KeyboardInterrupt: Stopped on rank 1")
    assert "p x\n0" in pair.run("%debug", typed=["p x", "q"]).text  # Stop has lost nothing
    pair.run("%pdb on")
    said = pair.run(FAILED, typed=["q"])
    assert said.prompts == ["[rank 1] ipdb> "]
    assert said.errors
    # Nothing has run: the failure before is not looked at in its place.
    said = pair.run("%%distributed\nx = = 3", typed=["q"])
    assert (said.prompts, said.errors[0]["ename"]) == ([], "CellSyntaxError")
    pair.run("%pdb off")
    pair.run("%dist_clean")
    assert "no exception:" in pair.run("%debug").errors[0]["evalue"]
    pair.run("def mine(y):\n    1 / y\nmine(0)")
    said = pair.run("%debug", typed=["p y", "q"])
    assert said.prompts == ["ipdb> "] * 2


# --- what `%dist_memory` shows -------------------------------------------------------------------


MIB, GIB = 2**20, 2**30

X = Held("x", 4 * MIB, (1024, 1024), "float32")


def memory(
    pss: int, *held: Held, gpu: GpuMemory | None = None, kept: tuple[Held, ...] = ()
) -> Memory:
    """A rank's, on a machine of 24 GiB."""
    limit = MemoryLimit("this machine", 24 * GIB, 20 * GIB)
    size = sum(each.size for each in held)
    return Memory(pss, Peak(pss), limit, gpu, held, size, kept, sum(each.size for each in kept))


def test_equal_ranks_are_one_row():
    """From which to which in the head; columns of GPUs only where there are some."""
    found = {0: memory(40 * MIB, X), 1: memory(60 * MIB, X), 2: memory(40 * MIB, X)}
    assert headline(found) == "ranks 0-2 · 40-60 MiB · this machine 4 GiB of 24 GiB"
    assert rows(found) == [
        ("ranks", "memory", "peak in last cell", "in variables"),
        ("0,2", "40 MiB", "40 MiB", "4 MiB"),
        ("1", "60 MiB", "60 MiB", "4 MiB"),
    ]
    gpu = GpuMemory("1", 61 * GIB, 80 * GIB, 40 * GIB, Peak(50 * GIB, is_bound=True))
    found = {1: memory(GIB, X, gpu=gpu)}
    assert headline(found).startswith("rank 1 · 1 GiB · GPU 61 GiB of 80 GiB · ")
    assert rows(found)[1][4:] == ("61 GiB of 80 GiB", "40 GiB", "at most 50 GiB")
    alike, other = Cleaned((240 * MIB, 43 * MIB)), Cleaned((2**30, 43 * MIB))
    assert freed_rows({0: alike, 1: other, 2: Cleaned((238 * MIB, 43 * MIB)), 3: alike}) == [
        ("ranks", "memory before", "after"),
        ("0,2-3", "240 MiB", "43 MiB"),
        ("1", "1.0 GiB", "43 MiB"),
    ]
    on_gpu = Cleaned((0, 0), (3 * 2**30, 2**30), (4 * 2**30, 2**30))
    assert freed_rows({0: on_gpu}) == [
        ("ranks", "memory before", "after", "GPU tensors before", "after",
         "GPU held by torch before", "after"),
        ("0", "0 MiB", "0 MiB", "3.0 GiB", "1.0 GiB", "4.0 GiB", "1.0 GiB"),
    ]  # fmt: skip


def test_names():
    """A row for each, with the ranks where it is so; the largest first."""
    small, other = Held("x", MIB, (5,), "int8", "cuda:0"), Held("list", 9 * MIB, count=300)
    found = {0: memory(0), 1: memory(0)}
    held = [(0, X), (1, small), (0, other), (1, other)]
    assert names(found, held) == [
        ("size", "name", "what", "device", "ranks"),
        ("9 MiB", "list", "300 tensors", "cpu", "all"),
        ("4 MiB", "x", "(1024, 1024) float32", "cpu", "0"),
        ("1 MiB", "x", "(5,) int8", "cuda:0", "1"),
    ]
    assert names(found, []) == []


def test_what_is_held_unseen():
    """With the way to let go of it, where there is any."""
    assert "%dist_clean" not in shown_of({0: memory(MIB, X)}).text
    said = "4 MiB that only the last traceback and `Out` hold on rank 1: `%dist_memory --free`"
    assert said in shown_of({0: memory(MIB, X), 1: memory(MIB, kept=(X,))}).text
