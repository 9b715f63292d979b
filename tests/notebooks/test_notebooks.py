"""Tests of the tutorials: each runs from top to bottom, and was saved with its outputs.

A single kernel runs all, first the tutorial with pools: meanwhile its fork server makes imports.
The quickstart is tested in `tests/browser`, the tutorial on many machines also in `tests/hosts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from tests.notebook.front_end import CLEAN, Notebook, execute

pytestmark = pytest.mark.kernel

FOLDER = Path(__file__).parents[2] / "notebooks"
QUICKSTART, WRONG, TORCHRUN, FSDP2, MANY_MACHINES, REINFORCEMENT = sorted(FOLDER.glob("*.ipynb"))


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def failed(cell: NotebookNode) -> list[str]:
    """Return the name of the exception that ended a cell, as a list, or an empty list."""
    return [output.ename for output in cell.outputs if output.output_type == "error"]


def kinds(cell: NotebookNode) -> set[str]:
    """Return the types of a cell's outputs: the texts of two runs differ in their times."""
    return {kind for output in cell.outputs for kind in output.get("data", {"text/plain": ""})}


def text(notebook: NotebookNode) -> str:
    """Return all outputs of a notebook as plain text."""
    return "\n".join(
        f"{output.ename}: {output.evalue}"
        if output.output_type == "error"
        else output.get("text") or output.get("data", {}).get("text/plain", "")
        for cell in code_cells(notebook)
        for output in cell.outputs
    )


def cleared(notebook: NotebookNode) -> NotebookNode:
    """Return a copy without outputs, so that all outputs come from the next run."""
    copy = nbformat.from_dict(notebook)
    for cell in code_cells(copy):
        cell.outputs, cell.execution_count = [], None
    return copy


def run(notebook: NotebookNode, kernel: Notebook, folder: Path) -> NotebookNode:
    """Run a copy of a notebook in a folder by nbclient, and return the copy."""
    copy, environ = cleared(notebook), {"NBDIST_LOG_DIR": str(folder / "logs")}
    begins = f"os.chdir({str(folder)!r}), os.environ.update({environ!r})"
    assert not (said := kernel.fails_at(f"(lambda os: ({begins}))(__import__('os'))")), said
    execute(copy, kernel)
    return copy


def check_run(saved: NotebookNode, fresh: NotebookNode) -> None:
    """Check that exactly the cells with the tag fail, and that outputs have the saved types."""
    for cell, again in zip(code_cells(saved), code_cells(fresh), strict=True):
        assert failed(cell) == failed(again), again
        is_to_fail = "raises-exception" in again.metadata.get("tags", ())
        assert bool(failed(again)) == is_to_fail, again
        assert kinds(cell) == kinds(again), again
    for notebook in (saved, fresh):
        counts = [cell.execution_count for cell in code_cells(notebook)]
        assert counts == list(range(1, len(counts) + 1)), "saved after cells ran out of order"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Notebook]:
    with closing(Notebook()) as kernel:
        yield kernel


def both(file: Path, kernel: Notebook, folder: Path) -> tuple[str, str]:
    """Return the text of a tutorial's outputs, as saved and as of a new run."""
    saved = nbformat.read(file, as_version=4)
    try:
        fresh = run(saved, kernel, folder)
    finally:
        assert not (said := kernel.fails_at(CLEAN)), said
    check_run(saved, fresh)
    return text(saved), text(fresh)


@pytest.mark.parametrize(
    ("file", "numbers", "sign", "times"),
    [
        (REINFORCEMENT, r"(\d+) -> (\d+) steps", 1, 1),
        (FSDP2, r"test loss (\d\.\d\d) -> (\d\.\d\d)", -1, 6),
    ],
)
def test_training_improves_the_models(
    kernel: Notebook, file: Path, numbers: str, sign: int, times: int, tmp_path: Path
) -> None:
    """Training improves a model in cells, and in their script under torchrun and `%dist_run`."""
    for shown in both(file, kernel, tmp_path):
        found = re.findall(numbers, shown)
        assert len(found) == times
        assert all(sign * (float(after) - float(before)) > 0 for before, after in found)


def test_the_tutorial_from_torchrun_restarts_and_resizes(kernel: Notebook, tmp_path: Path) -> None:
    """The tutorial shows restarts, snapshots and changing sizes, and leaves no snapshot behind."""
    for shown in both(TORCHRUN, kernel, tmp_path):
        assert shown.count("exists already") == 1  # new ranks do not say so again
        assert "rank 2 was killed by SIGKILL: restart 1 of 3" in shown
        assert shown.count("goes on at epoch 4") == 4
        assert "restored trainer on" in shown
        assert "now 2 workers" in shown
        assert "3 workers, same weights: True" in shown
    assert [*tmp_path.glob("**/snapshots/*")] == []


def test_the_tutorial_on_many_machines_runs_on_one(kernel: Notebook, tmp_path: Path) -> None:
    """The tutorial on many machines runs on one, with two simulated nodes of two workers each."""
    for shown in both(MANY_MACHINES, kernel, tmp_path):
        assert "rank 2 is worker 0 of node 1" in shown
        assert "4 workers as 2x2 on " in shown
        assert "ranks that answer: 4" in shown


def test_training_goes_on_after_all_that_goes_wrong(kernel: Notebook, tmp_path: Path) -> None:
    """Training goes on with equal weights after a failure, a stuck barrier, a death and Stop."""
    told = (
        "Ranks 0-1,3 were waiting in all_reduce (line 4) and were released. Gradients of `model` "
        "on ranks 0-1,3 may hold a part of the result",
        "RanksReleased: ranks 0,2-3 wait in barrier, line 3; rank 1 finished the cell without it.",
        "WorkerDied: rank 2 on ",
        "Interrupted: Stopped on ranks 0-3. No variables were lost.",
    )
    for shown in both(WRONG, kernel, tmp_path):
        assert [each for each in told if each not in shown] == []
        assert shown.count("4 ranks · ✓ 4\n") == 5
        assert {*re.findall(r"loss \d\.\d+, same weights: (\w+)", shown)} == {"True"}
