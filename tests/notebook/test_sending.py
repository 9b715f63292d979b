"""Tests of `nbdist.notebook.sending`: `-o`, `--timeout` and `--local`, in a real kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from nbdist.errors import UsageError
from tests.notebook.front_end import Notebook, body

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module")
def two() -> Iterator[Notebook]:
    """A notebook with two workers."""
    notebook = Notebook("%load_ext nbdist", "%dist_init -n 2")
    yield notebook
    notebook.close()


def test_a_name_for_the_result(two: Notebook) -> None:
    """It has the last value of each rank, which stays there until it is asked for."""
    assert two.run("%%distributed -o result\ntorch.ones(2) * rank").errors == []
    assert two.value("repr(result.values)") == "<LastValues of ranks 0-1, none is here>"
    assert two.value("result.rank(1).tolist()") == [1.0, 1.0]
    assert two.value("repr(result.values)") == (
        "<LastValues of ranks 0-1, those of rank 1 are here>"
    )
    two.run("%%distributed\n'another'")
    assert two.value("[each.tolist() for each in result]") == [[0.0, 0.0], [1.0, 1.0]]
    assert two.run("%%distributed -o nothing\nif rank: 5").errors == []
    assert two.value("[*nothing]") == [None, None]


def test_the_result_of_a_cell_that_failed(two: Notebook) -> None:
    """It has what failed, and the value of the others."""
    assert two.run("%%distributed -o failed\n1 / (1 - rank)").errors != []
    assert two.value("failed.ok, [*failed.errors], failed.rank(0)") == (False, [1], 1.0)


def test_a_value_that_is_gone(two: Notebook) -> None:
    """With its worker, or since it was released: one line says how, and what stays."""
    two.run("%%distributed -o old\nrank")
    two.run("%dist_clean")
    said = two.run("old.rank(0)").error
    assert said.startswith("ValueLost: the last value of that cell on rank 0 is gone, by `%dist_c")
    two.run("%%distributed -o old\nrank")
    two.run("%dist_restart -r 1")
    assert two.value("old.rank(0)") == 0
    assert "on rank 1 is gone, with their workers." in two.run("old.rank(1)").error


def test_a_cell_that_takes_too_long(two: Notebook) -> None:
    """It is stopped, and one line says where its ranks were; they keep their variables."""
    cell = "import time\nkept = 7\nif rank: time.sleep(60)\ndist.barrier()"
    said = two.run(f"%%distributed --timeout 1.2\n{cell}").error
    assert said == (
        "CellTimeout: the cell was stopped after 1.2 s, as `--timeout` says: "
        "rank 0 waits in barrier, line 5 · rank 1 is in line 4: if rank: time.sleep(60); "
        "all variables are kept."
    )
    assert body(two.run("%%distributed --timeout 60\nkept"))[-1] == "7"


def test_a_script_that_takes_too_long(two: Notebook, tmp_path_factory: pytest.TempPathFactory):
    """`%dist_run` has the same options."""
    script = tmp_path_factory.mktemp("script") / "sleeps.py"
    script.write_text("import time\nbegun = 1\ntime.sleep(60)\n")
    said = two.run(f"%dist_run --timeout 1 {script}").error
    assert "after 1 s, as `--timeout` says: ranks 0-1 are in sleeps.py line 3: time.sleep" in said
    assert two.run(f"%dist_run --no-wait -o job {script}").errors == []
    two.run("job.interrupt()")
    assert "have stopped" in two.run("job.wait()").error


def test_a_cell_that_runs_here_too(two: Notebook) -> None:
    """What it binds it binds on both sides; on the workers the name is theirs."""
    ran = two.run("%%distributed --local -o there\nx = sum(range(10))\nprint('said')\nx")
    assert ran.errors == []
    assert ran.streams == ["said\n"]
    assert ran.results == [{"text/plain": "45"}]
    assert ran.displays[-1]["data"]["text/plain"].endswith("said\n45")
    assert two.value("x, there.rank(1)") == (45, 45)
    two.run("%%distributed\nx = rank")
    assert two.run("%%distributed --local\ny = x").errors == []
    assert two.value("y") == 45
    assert body(two.run("%%distributed\ny")) == ["── rank 0 ──", "0", "── rank 1 ──", "1"]


def test_a_cell_that_awaits_cannot_run_here(two: Notebook) -> None:
    """It is refused before it is sent."""
    said = two.run("%%distributed --local\nimport asyncio\nawait asyncio.sleep(0); sent = 1").error
    assert said.startswith("UsageError: `--local`: the cell awaits something")
    assert body(two.run("%%distributed\n'sent' in globals()"))[-1] == "False"


def test_a_cell_that_fails_here(two: Notebook) -> None:
    """The error is shown as any of the notebook, and fails the cell."""
    ran = two.run("%%distributed --local\nworld_size")
    here, last = ran.errors
    assert here["ename"] == "NameError"
    assert last["ename"] == "LocalCellError"
    assert last["evalue"].startswith("the cell raised in the notebook: NameError: ")
    assert last["evalue"].endswith(" 2 ranks ran it.")
    assert ran.displays[-1]["data"]["text/plain"].endswith("── ranks 0-1 (same) ──\n2")


def test_what_is_no_name(typed: Callable[[str], str]) -> None:
    """It is found before anything is started."""
    with pytest.raises(UsageError, match="`-o 1a`: a name for the result, such as `-o result`"):
        typed("%dist_run -o 1a --no-python true")
    with pytest.raises(UsageError, match="`--timeout x`: a number of seconds, such as 30"):
        typed("%dist_run --timeout x --no-python true")
