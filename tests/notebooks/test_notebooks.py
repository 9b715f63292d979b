"""The tutorials: each runs from top to bottom, and is saved with what it shows.

One notebook kernel runs them, the pools first: meanwhile its fork server imports what ranks need.
A reader's first one is in `tests/browser`, that of many machines in `tests/hosts`.
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

QUICKSTART, WRONG, TORCHRUN, FINE_TUNING, MANY_MACHINES, REINFORCEMENT = sorted(
    Path(__file__).parents[2].glob("notebooks/*.ipynb")
)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def failed(cell: NotebookNode) -> list[str]:
    """The names of the exceptions that ended it, none or one."""
    return [output.ename for output in cell.outputs if output.output_type == "error"]


def kinds(cell: NotebookNode) -> set[str]:
    """What a cell shows, by type: the texts of two runs differ in their times."""
    return {kind for output in cell.outputs for kind in output.get("data", {"text/plain": ""})}


def text(notebook: NotebookNode) -> str:
    """All that the cells show, as plain text."""
    return "\n".join(
        f"{output.ename}: {output.evalue}"
        if output.output_type == "error"
        else output.get("text") or output.get("data", {}).get("text/plain", "")
        for cell in code_cells(notebook)
        for output in cell.outputs
    )


def cleared(notebook: NotebookNode) -> NotebookNode:
    """A copy of it that nobody has run yet: all that is seen comes from a run of its own."""
    copy = nbformat.from_dict(notebook)
    for cell in code_cells(copy):
        cell.outputs, cell.execution_count = [], None
    return copy


def run(notebook: NotebookNode, kernel: Notebook, folder: Path) -> NotebookNode:
    """A copy of the notebook, run by nbclient in this folder."""
    copy, environ = cleared(notebook), {"NBDIST_LOG_DIR": str(folder / "logs")}
    begins = f"os.chdir({str(folder)!r}), os.environ.update({environ!r})"
    assert not (said := kernel.fails_at(f"(lambda os: ({begins}))(__import__('os'))")), said
    execute(copy, kernel)
    return copy


def check_run(saved: NotebookNode, fresh: NotebookNode) -> None:
    """Cells fail that are to fail, and no other; the saved file shows what a new run shows."""
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
    """What a tutorial shows as it was saved, and as it runs now."""
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
        (FINE_TUNING, r"test loss (\d\.\d\d) -> (\d\.\d\d)", -1, 6),
    ],
)
def test_what_is_trained_gets_better(
    kernel: Notebook, file: Path, numbers: str, sign: int, times: int, tmp_path: Path
) -> None:
    """In cells, under torchrun as a script that is made of them, and when that comes back."""
    for shown in both(file, kernel, tmp_path):
        found = re.findall(numbers, shown)
        assert len(found) == times
        assert all(sign * (float(after) - float(before)) > 0 for before, after in found)


def test_from_torchrun(kernel: Notebook, tmp_path: Path) -> None:
    """It shows torchrun's ways: restarts, snapshots, of which none is left, and changing sizes."""
    for shown in both(TORCHRUN, kernel, tmp_path):
        assert "rank 2 was killed by SIGKILL: restart 1 of 3" in shown
        assert shown.count("goes on at epoch 4") == 4
        assert "restored trainer on" in shown
        assert "now 2 workers" in shown
        assert "3 workers, same weights: True" in shown
    assert [*tmp_path.glob("**/snapshots/*")] == []


def test_all_that_goes_wrong(kernel: Notebook, tmp_path: Path) -> None:
    """After a failure, a stuck barrier, a death and Stop training goes on, with equal weights."""
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
