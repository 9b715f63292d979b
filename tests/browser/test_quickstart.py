"""The quickstart in JupyterLab, as its reader sees it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.browser.conftest import Lab, ShownCell

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "01-quickstart.ipynb"

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


def clear_outputs(notebook: Path) -> None:
    """As nobody has run it yet, so that all that is seen comes from this run."""
    content = json.loads(notebook.read_text())
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    notebook.write_text(json.dumps(content))


def make_untrusted(notebook: Path) -> None:
    """As it came by mail: JupyterLab has signed what it saved, and this is something else."""
    content = json.loads(notebook.read_text())
    content["metadata"]["came_by"] = "mail"
    notebook.write_text(json.dumps(content))


def all_text(cells: list[ShownCell]) -> str:
    return "\n".join(cell.shown for cell in cells)


def test_the_quickstart_in_jupyterlab(lab: Lab) -> None:
    """Run All trains on four ranks and shows it; saved and opened untrusted, it reads the same."""
    copy = Path(shutil.copy(QUICKSTART, lab.folder))
    clear_outputs(copy)
    notebook = lab.open(copy.name)
    assert all_text(notebook.cells()).strip() == ""

    cells = notebook.run_all()
    notebook.screenshot("quickstart")
    assert [cell.errors for cell in cells if cell.errors] == []
    assert all(re.fullmatch(r"\[\d+\]:", cell.prompt) for cell in cells)
    shown = all_text(cells)
    assert shown.count("4 ranks") >= 4
    for rank in range(4):
        assert f"I am rank {rank} of 4" in shown
        assert re.search(rf"rank {rank}\s+loss \d\.\d+ -> 0\.\d+", shown)
    [accuracy] = re.findall(r"accuracy (\d+\.\d)%", shown)
    assert float(accuracy) > 95
    images = sum(cell.images for cell in cells)
    assert images == 3

    notebook.save()
    notebook.page.close()
    make_untrusted(copy)
    reopened = lab.open(copy.name)
    assert not reopened.is_trusted()
    reopened.screenshot("quickstart-reopened")
    assert all_text(reopened.cells()) == shown
    assert sum(cell.images for cell in reopened.cells()) == images
