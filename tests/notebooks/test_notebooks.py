"""The tutorials: each runs from top to bottom, and is saved with what it shows.

A reader's two first ones run in JupyterLab: `tests/browser`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from tests.worlds import IDLE_IMPORTS

FOLDER = Path(__file__).parents[2] / "notebooks"
MANY_MACHINES = FOLDER / "05-many-machines.ipynb"
"""It has hosts of its own: `tests/hosts`."""

NOTEBOOKS = sorted({*FOLDER.glob("*.ipynb")} - {MANY_MACHINES})
FINE_TUNING, REINFORCEMENT = NOTEBOOKS[3:]
CELL_TIMEOUT = 120
RUN_TIMEOUT = 280
EXECUTE = "from nbclient.cli import main; main()"
FOLDERS = ("CONFIG", "DATA", "RUNTIME")


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
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "\n".join(
        output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs
    )


def cleared(notebook: NotebookNode) -> NotebookNode:
    """A copy of it that nobody has run yet: all that is seen comes from a run of its own."""
    copy = nbformat.from_dict(notebook)
    for cell in code_cells(copy):
        cell.outputs, cell.execution_count = [], None
    return copy


def run(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """A copy of the notebook, run by nbclient in another folder and another process."""
    file = folder / "copy.ipynb"
    nbformat.write(cleared(notebook), file)
    options = ["--inplace", f"--timeout={CELL_TIMEOUT}", "--kernel_name=python3"]
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, *options, file.name],
        cwd=folder,
        env=os.environ
        | {f"JUPYTER_{name}_DIR": str(folder / name) for name in FOLDERS}
        | {"NBDIST_LOG_DIR": str(folder / "logs"), IDLE_IMPORTS: "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    return nbformat.read(file, as_version=4)


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


def test_from_torchrun_runs_and_is_saved_as_it_runs(tmp_path: Path) -> None:
    """It shows torchrun's ways: restarts, snapshots, of which none is left, and changing sizes."""
    saved = nbformat.read(NOTEBOOKS[2], as_version=4)
    fresh = run(saved, tmp_path)
    check_run(saved, fresh)
    assert [*tmp_path.glob("**/snapshots/*")] == []
    for shown in (text(saved), text(fresh)):
        assert "rank 2 was killed by SIGKILL: restart 1 of 3" in shown
        assert shown.count("goes on at epoch 4") == 4
        assert "restored trainer on" in shown
        assert "now 2 workers" in shown
        assert "3 workers, same weights: True" in shown


def test_what_the_first_two_show() -> None:
    """The saved quickstart has learned; after each failure all ranks have equal weights."""
    shown = text(nbformat.read(NOTEBOOKS[0], as_version=4))
    [accuracy] = re.findall(r"accuracy (\d+\.\d)%", shown)
    assert float(accuracy) > 95
    assert "I am rank 3 of 4" in shown
    notebook = nbformat.read(NOTEBOOKS[1], as_version=4)
    ends = [name for cell in code_cells(notebook) for name in failed(cell)]
    assert ends == ["WorkerError", "RanksReleased", "WorkerDied", "Interrupted"]
    same = re.findall(r"same weights: (\w+)", text(notebook))
    assert len(same) >= 5
    assert set(same) == {"True"}


@pytest.mark.parametrize(
    ("notebook", "numbers", "sign", "times"),
    [
        (FINE_TUNING, r"test loss (\d\.\d\d) -> (\d\.\d\d)", -1, 6),
        (REINFORCEMENT, r"(\d+) -> (\d+) steps", 1, 1),
    ],
)
def test_what_is_trained_gets_better(
    notebook: Path, numbers: str, sign: int, times: int, tmp_path: Path
) -> None:
    """In cells, under torchrun as a script that is made of them, and when that comes back."""
    saved = nbformat.read(notebook, as_version=4)
    fresh = run(saved, tmp_path)
    check_run(saved, fresh)
    for shown in (text(saved), text(fresh)):
        found = re.findall(numbers, shown)
        assert len(found) == times
        assert all(sign * (float(after) - float(before)) > 0 for before, after in found)
