"""The same notebook in Notebook 7, and a page that is loaded again while a cell runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import RUN_ALL, RUN_TIMEOUT

if TYPE_CHECKING:
    from tests.browser.conftest import Lab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

CELLS = [
    "%load_ext nbdist",
    "%%distributed -n 2\nprint(f'I am rank {rank} of {world_size}')",
    "%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()",
    "%dist_gather t",
    "t",
]

# Says a number several times a second, until a file says that it is enough.
COUNTING = """%%distributed -n 2
import os, time
for number in range(30):
    print(f"number {number} of rank {rank}")
    if os.path.exists("enough"):
        break
    time.sleep(0.7)
while not os.path.exists("enough"):
    time.sleep(0.1)
print("counted")"""


def test_cells_in_notebook_7(notebook_7: Lab) -> None:
    """They run and are drawn as in JupyterLab."""
    notebook_7.write("cells.ipynb", CELLS)
    notebook = notebook_7.open("cells.ipynb")
    cells = notebook.run_all()
    notebook.screenshot("notebook-7")
    assert [cell.errors for cell in cells if cell.errors] == []
    _, ranks, reduced, _, gathered = [cell.shown for cell in cells]
    assert "I am rank 0 of 2" in ranks
    assert "I am rank 1 of 2" in ranks
    assert "2.0" in reduced
    assert gathered.count("tensor([2.])") == 2


def test_page_that_is_loaded_again(lab: Lab) -> None:
    """The cell runs on; what the page has missed is shown by %dist_output, all of it."""
    lab.write("reload.ipynb", ["%load_ext nbdist", COUNTING])
    notebook = lab.open("reload.ipynb")
    notebook.save()
    notebook.page.evaluate(RUN_ALL)
    notebook.page.get_by_text("number 1 of rank 0").first.wait_for()
    notebook.page.reload()
    notebook.wait_until_ready("unknown")  # a busy kernel does not answer a page that asks
    (lab.folder / "enough").touch()
    notebook.wait_until_ready()
    missed = "\n".join(cell.shown for cell in notebook.cells())
    assert "counted" not in missed  # a page that knew of the end would make this test idle

    notebook.page.evaluate("""() => {
        const commands = window.jupyterapp.commands;
        const content = window.jupyterapp.shell.currentWidget.content;
        content.activeCellIndex = content.widgets.length - 1;
        return commands.execute("notebook:insert-cell-below").then(() => {
            content.activeCell.model.sharedModel.setSource("%dist_output");
            window.nbdistRan = null;
            return commands.execute("notebook:run-cell").then(() => { window.nbdistRan = "done"; });
        });
    }""")
    notebook.page.wait_for_function("window.nbdistRan === 'done'", timeout=RUN_TIMEOUT * 1000)
    notebook.wait_until_ready()
    shown = notebook.cells()[-1].shown
    notebook.screenshot("reloaded")
    for rank in range(2):
        assert f"number 0 of rank {rank}" in shown
    assert "counted" in shown
