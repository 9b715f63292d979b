"""What JupyterLab offers while somebody types in a cell of the workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.conftest import Lab, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

POPUP, TOOLTIP = ".jp-Completer", ".jp-Tooltip"
SOON = 15_000

ON_WORKERS = """%%distributed -n 2
class Net(torch.nn.Module):
    '''An encoder and a head.'''
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(8, 4)
        self.head = torch.nn.Linear(4, 2)
net = Net()
def train_for(net, steps: int = 3):
    '''Train the net for so many steps.'''"""

LONG = """%%distributed
import pathlib, time
while not pathlib.Path("go_on").exists():
    time.sleep(0.05)"""

EDIT = """index => {
    const content = window.jupyterapp.shell.currentWidget.content;
    content.activeCellIndex = index;
    content.mode = "edit";
    content.activeCell.editor.focus();
}"""

TAG = """index => {
    const content = window.jupyterapp.shell.currentWidget.content;
    content.widgets[index].model.setMetadata("tags", ["distributed"]);
}"""

RUN_CELL = """index => {
    const content = window.jupyterapp.shell.currentWidget.content;
    content.activeCellIndex = index;
    window.jupyterapp.commands.execute("notebook:run-cell");
}"""


def type_in(notebook: Notebook, index: int, text: str) -> Page:
    """Type in place of what stands in this cell."""
    page = notebook.page
    page.evaluate(EDIT, index)
    page.keyboard.press("Control+A")
    page.keyboard.type(text)
    return page


def picture(page: Page, name: str) -> None:
    """As `Notebook.screenshot`, with what a change of the window's size would close."""
    folder = Path(os.environ.get("NBDIST_SHOTS") or Path(__file__).parent / "shots")
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{name}.png")


def offered(page: Page, name: str, wanted: str) -> str:
    """Press Tab; the text of the popup in which this is offered."""
    page.keyboard.press("Tab")
    popup = page.locator(POPUP, has_text=wanted)
    popup.wait_for(timeout=SOON)
    picture(page, name)
    text = popup.inner_text()
    page.keyboard.press("Escape")
    popup.wait_for(state="hidden", timeout=SOON)
    return text


def described(page: Page, name: str, wanted: str) -> str:
    """Press Shift-Tab; the text of the tooltip that says this."""
    page.keyboard.press("Shift+Tab")
    tooltip = page.locator(TOOLTIP, has_text=wanted)
    tooltip.wait_for(timeout=SOON)
    picture(page, name)
    text = tooltip.inner_text()
    page.keyboard.press("Escape")
    return text


def test_workers_names(lab: Lab) -> None:
    """Their attributes in the popup, a signature at Shift-Tab, options in the magic's line."""
    lab.write("names.ipynb", ["%load_ext nbdist", ON_WORKERS, "net", ""])
    notebook = lab.open("names.ipynb")
    _, _, plain, _ = notebook.run_all()
    hint = "`net` is on ranks 0-1: begin the cell with %%distributed, or `%dist_gather net`"
    assert plain.errors == [f"NameError: {hint}"]
    page = type_in(notebook, 3, "%%distributed\nnet.")
    text = offered(page, "completion-names", "encoder")
    assert {"encoder", "head", "parameters"} <= {*text.split()}
    page = type_in(notebook, 3, "%%distributed\ntrain_for(")
    text = described(page, "completion-signature", "Train the net for so many steps.")
    assert "steps: int = 3" in text
    page = type_in(notebook, 3, "%%distributed --")
    assert "--backend" in offered(page, "completion-options", "--hang-timeout")
    page = type_in(notebook, 3, "%dist_gather ")
    assert "train_for" in offered(page, "completion-gather", "net")


def test_while_ranks_are_at_work(lab: Lab) -> None:
    """The same while a cell runs on all of them, and the notebook waits for it."""
    pytest.importorskip("ipykernel", minversion="7.4", reason="ipykernel 6 cannot")
    lab.write("busy.ipynb", ["%load_ext nbdist", ON_WORKERS, LONG, "", "rank"])
    notebook = lab.open("busy.ipynb")
    for index in (0, 1):
        notebook.page.evaluate(RUN_CELL, index)
    notebook.wait_until_ready()
    notebook.page.evaluate(RUN_CELL, 2)
    notebook.wait_until_ready("busy")
    page = type_in(notebook, 3, "%%distributed\nnet.")
    assert "encoder" in offered(page, "completion-while-busy", "encoder")
    page = type_in(notebook, 3, "%%distributed\ntrain_for(")
    assert "steps" in described(page, "completion-signature-while-busy", "Train the net")
    notebook.wait_until_ready("busy")
    (lab.folder / "go_on").touch()
    notebook.wait_until_ready()
    page.evaluate(TAG, 4)
    page.evaluate(RUN_CELL, 4)
    notebook.wait_until_ready()
    notebook.screenshot("completion-tagged-cell")
    assert "rank 1" in notebook.cells()[4].shown
