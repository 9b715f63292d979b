"""Two tutorials in JupyterLab, as their readers see them; `tests/notebooks` runs the other ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat

from tests.notebooks.test_notebooks import NOTEBOOKS, check_run, cleared

if TYPE_CHECKING:
    from tests.browser.conftest import Lab, Notebook, ShownCell

QUICKSTART, WRONG, _ = NOTEBOOKS


def run_all(lab: Lab, source: Path) -> tuple[Notebook, list[ShownCell], str]:
    """Run All of a tutorial that nobody has run yet: its page, its cells and all that they say.

    The file that is saved is as the one in the repository.
    """
    saved = nbformat.read(source, as_version=4)
    copy = lab.folder / source.name
    nbformat.write(cleared(saved), copy)
    notebook = lab.open(source.name)
    assert not any(cell.shown for cell in notebook.cells())
    cells = notebook.run_all()
    notebook.screenshot(source.stem)
    unfinished = [cell for cell in cells if not re.fullmatch(r"\[\d+\]:", cell.prompt)]
    assert not unfinished, cells
    notebook.save()
    check_run(saved, nbformat.read(copy, as_version=4))
    return notebook, cells, "\n".join(cell.shown for cell in cells)


def test_the_quickstart(lab: Lab) -> None:
    """Run All trains on four ranks and shows it; saved and opened untrusted, it reads the same."""
    _, cells, shown = run_all(lab, QUICKSTART)
    assert [cell.errors for cell in cells if cell.errors] == []
    assert shown.count("4 ranks") >= 4
    for rank in range(4):
        assert f"I am rank {rank} of 4" in shown
        assert re.search(rf"rank {rank}\s+loss \d\.\d+ -> 0\.\d+", shown)
    [accuracy] = re.findall(r"accuracy (\d+\.\d)%", shown)
    assert float(accuracy) > 95
    images = sum(cell.images for cell in cells)
    assert images == 3

    lab.close()
    make_untrusted(lab.folder / QUICKSTART.name)
    reopened = lab.open(QUICKSTART.name)
    assert not reopened.is_trusted()
    reopened.screenshot("quickstart-reopened")
    assert "\n".join(cell.shown for cell in reopened.cells()) == shown
    assert sum(cell.images for cell in reopened.cells()) == images


def make_untrusted(notebook: Path) -> None:
    """As it came by mail: JupyterLab has signed what it saved, and this is something else."""
    content = json.loads(notebook.read_text())
    content["metadata"]["came_by"] = "mail"
    notebook.write_text(json.dumps(content))


def test_all_that_goes_wrong(lab: Lab) -> None:
    """Run All goes through a failure, a stuck barrier, a death and Stop, and trains on."""
    _, cells, shown = run_all(lab, WRONG)
    errors = [error for cell in cells for error in cell.errors]
    assert [re.split(r"[:(]", error)[0] for error in errors] == [
        "WorkerError",
        "RanksReleased",
        "WorkerDied",
        "Interrupted",
    ]
    assert (
        "Ranks 0-1,3 were waiting in all_reduce (line 4) and were released; no variables were lost."
    ) in shown
    assert "ranks 0,2-3 wait in barrier, line 3; rank 1 finished the cell without it." in shown
    assert "was killed by SIGKILL" in shown
    assert "Stopped on ranks 0-3. No variables were lost." in shown
    assert len(re.findall(r"rank \d\s+loss \d\.\d+, same weights: True", shown)) == 5 * 4
    assert "same weights: False" not in shown
