"""Tests of `nbdist.notebook.commands.cells`: `-o`, `--timeout` and `--local`, in a real kernel."""

from __future__ import annotations

import pytest

from tests.notebook.front_end import Notebook, body

pytestmark = pytest.mark.shared_world


def test_a_name_for_the_result(two: Notebook) -> None:
    """It maps ranks to their last values, also of `x;`, and has what failed."""
    assert two.run("%%distributed -o result\nprint('said')\ntorch.ones(2) * rank").errors == []
    assert two.value("result[1].tolist(), result.rank(0).tolist()") == ([1.0, 1.0], [0.0, 0.0])
    assert two.value("[*result.keys()], len(result), len(result.items())") == ([0, 1], 2, 2)
    assert two.value("[each.tolist() for each in result]") == [[0.0, 0.0], [1.0, 1.0]]
    assert two.value("result.stdout[1], result.stderr") == ("said\n", {0: "", 1: ""})
    (shown,) = two.run("result").results
    head, *values = shown["text/plain"].splitlines()
    assert head.startswith("<CellResult of ranks 0-1, ")
    assert values == ["{0: tensor([0., 0.]), 1: tensor([1., 1.])}>"]
    assert two.run("%%distributed -o nothing\nif rank: 5").errors == []
    assert two.value("[*nothing]") == [None, None]
    assert body(two.run("%%distributed -o quiet\nrank + 5;")) == []
    assert two.value("dict(quiet)") == {0: 5, 1: 6}
    assert two.run("%%distributed -o failed\n1 / (1 - rank)").errors != []
    assert two.value("failed.ok, [*failed.errors], failed.rank(0)") == (False, [1], 1.0)


def test_each_run_has_a_result_of_its_own(two: Notebook) -> None:
    """As it was at its end, big or small; what cannot be had is said once somebody asks."""
    cell = """
    results = []
    for lr in (0.1, 0.2, 0.3):
        for n in (1, 20_000):
            get_ipython().run_cell_magic("distributed", "-o out", "torch.full((n,), lr + rank)")
            results.append(out)
    """
    assert two.run(cell).errors == []
    assert "<78.3 KiB, still on the rank>" in two.value("repr(results[1])")
    for rank in (1, 0):
        found = two.value(f"[round(each[{rank}][-1].item(), 1) for each in results]")
        assert found == [round(lr + rank, 1) for lr in (0.1, 0.1, 0.2, 0.2, 0.3, 0.3)]
    two.run("%%distributed -o small\nx = torch.zeros(2); x")
    two.run("%%distributed -o big\ny = torch.zeros(20_000); y")
    two.run("%%distributed\nx += 5; y += 5")
    assert two.value("[each.tolist() for each in small]") == [[0.0, 0.0]] * 2
    assert two.value("big[0].sum().item()") == 0.0
    two.run("%dist_restart -r 1")
    assert two.value("small[1].tolist(), big[0].sum().item()") == ([0.0, 0.0], 0.0)
    said = two.run("big[1]").error
    assert said.startswith("ValueLost: the last value of that cell on rank 1 is gone with its work")
    two.run("%%distributed -o old\ntorch.ones(20_000)")
    two.run("%dist_clean")
    said = two.run("old.rank(0)").error
    assert said == (
        "ValueLost: the last value of that cell on rank 0 is gone: `%dist_memory --free` "
        "released it. What "
        "a cell binds to a variable stays, and `%dist_gather variable` brings it."
    )
    assert two.run("%%distributed -o odd\n[(n for n in 'ab')]").errors == []
    said = two.run("odd[1]").error
    assert "on rank 1 cannot be sent to the notebook (generator in `it[0]`): " in said


def test_what_a_rank_raises_is_caught_with_what_it_has(two: Notebook) -> None:
    """In a cell, and by a job; our line is shown with it."""
    two.run("class Final(Exception):\n    def __init_subclass__(cls): raise TypeError('never')")
    caught = (
        "try: get_ipython().run_cell_magic('distributed', '-o out', 'open(\"/no/such\")')\n"
        "except OSError as error: found = error"
    )
    assert two.run(caught).errors == []
    assert two.value("found.errno, found.filename, sorted(found.errors)") == (2, "/no/such", [0, 1])
    two.run("%%distributed --no-wait -o job\nraise Final('a', 3)")
    ran = two.run("try: job.wait()\nexcept Final as error: print(error.args)\njob.wait()")
    assert ran.streams == ["('a', 3)\n"]
    (error,) = ran.errors
    assert error["ename"] == "Final"
    (line,) = error["traceback"]
    assert "WorkerError\x1b[0m: 2 of 2 ranks failed (0-1); first: rank " in line


def test_what_takes_too_long(two: Notebook, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cell or script is stopped, and one line says where its ranks were; variables stay."""
    cell = "import time\nkept = 7\nif rank: time.sleep(60)\ndist.barrier()"
    said = two.run(f"%%distributed --timeout 1.2\n{cell}").error
    assert said == (
        "CellTimeout: the cell was stopped by `--timeout 1.2`: "
        "rank 0 waits in barrier, line 5 · rank 1 is in line 4: if rank: time.sleep(60); no "
        "variables were lost"
        "."
    )
    assert body(two.run("%%distributed --timeout 60\nkept"))[-1] == "7"
    script = tmp_path_factory.mktemp("script") / "sleeps.py"
    script.write_text("import time\nbegun = 1\ntime.sleep(60)\n")
    said = two.run(f"%dist_run --timeout 1 {script}").error
    assert "by `--timeout 1`: ranks 0-1 are in sleeps.py line 3: time.sleep" in said
    assert two.run(f"%dist_run --no-wait -o job {script}").errors == []
    two.run("job.interrupt()")
    assert "Stopped on ranks" in two.run("job.wait()").error


def test_a_cell_that_runs_here_too(two: Notebook) -> None:
    """What it binds it binds on both sides; what fails here fails the cell; `await` is refused."""
    ran = two.run("%%distributed --here-too -o there\nx = sum(range(10))\nprint('said')\nx")
    assert ran.errors == []
    assert ran.streams == ["said\n"]
    assert ran.results == [{"text/plain": "45"}]
    assert ran.displays[-1]["data"]["text/plain"].endswith("said\n45")
    assert two.value("x, there.rank(1)") == (45, 45)
    two.run("%%distributed\nx = rank")
    assert two.run("%%distributed --here-too\ny = x").errors == []
    assert two.value("y") == 45
    assert body(two.run("%%distributed\ny")) == ["── rank 0 ──", "0", "── rank 1 ──", "1"]
    said = two.run(
        "%%distributed --here-too\nimport asyncio\nawait asyncio.sleep(0); sent = 1"
    ).error
    assert said.startswith("UsageError: `--here-too`: the cell uses `await`")
    assert body(two.run("%%distributed\n'sent' in globals()"))[-1] == "False"
    ran = two.run("%%distributed --here-too\nworld_size")
    here, last = ran.errors
    assert here["ename"] == "NameError"
    assert last["ename"] == "LocalCellError"
    assert last["evalue"].startswith("the cell raised in the notebook: NameError: ")
    assert last["evalue"].endswith(" 2 ranks ran it.")
    assert ran.displays[-1]["data"]["text/plain"].endswith("── ranks 0-1 (same) ──\n2")
