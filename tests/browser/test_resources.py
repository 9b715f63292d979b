"""What ranks use, as a reader sees it: in the head of a running cell, and where memory was full."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.browser.conftest import Lab, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

CELLS = [
    "%load_ext nbdist",
    "%%distributed -n 2\n"
    "import os, time\n"
    "from tqdm import tqdm\n"
    "model = torch.nn.Linear(1000, 1000 * (rank + 1))\n"
    "bar = tqdm(total=1000, desc='train')\n"
    "while not os.path.exists('gate'):\n"
    "    time.sleep(0.02 * (rank + 1)); bar.update()\n"
    "print('done', rank)",
    "%%distributed\nprint('the next cell')",
    "%dist_output",
    "%%distributed\n"
    "def step():\n"
    "    batch = torch.ones(2000, 1000)\n"
    "    return torch.empty(1 << 50)\n"
    "if rank == 1: step()",
    "%dist_memory",
    "%dist_status",
]


def run(notebook: Notebook, number: int) -> None:
    """Have a cell run, and do not wait for it."""
    notebook.page.evaluate(
        """number => {
            const content = window.jupyterapp.shell.currentWidget.content;
            content.activeCellIndex = number;
            window.jupyterapp.commands.execute("notebook:run-cell");
        }""",
        number,
    )


def wait_for(notebook: Notebook, number: int, text: str) -> str:
    """What the cell shows once it shows this."""
    notebook.page.wait_for_function(
        """([number, text]) => document.querySelectorAll(".jp-CodeCell")[number]
            ?.querySelector(".jp-Cell-outputArea")?.innerText.includes(text)""",
        arg=[number, text],
        timeout=30_000,
    )
    return notebook.cells()[number].shown


def test_a_page_that_is_reloaded_in_mid_cell(lab: Lab) -> None:
    """The panel says what ranks use, and when it ended; the next cell shows what was missed."""
    lab.write("resources.ipynb", CELLS)
    notebook = lab.open("resources.ipynb")
    run(notebook, 0)
    run(notebook, 1)
    live = wait_for(notebook, 1, "live view at ")
    head = live.splitlines()[0]
    assert re.search(r"2 ranks · [\d.]+ s · ● 2 · cpu [\d.]+", head)
    wait_for(notebook, 1, "% behind")
    notebook.screenshot("resources-live")
    notebook.save()
    notebook.page.reload()
    # The kernel answers nobody new while it runs a cell.
    notebook.wait_until_ready(kernel="unknown")
    notebook.screenshot("resources-reloaded")
    (lab.folder / "gate").touch()
    notebook.wait_until_ready()
    run(notebook, 2)
    said = wait_for(notebook, 2, "the next cell")
    assert "The page was reloaded while cell [2] ran. Its complete output:" in said
    assert "train" not in said  # it is closed
    notebook.page.locator("summary", has_text="The page was reloaded").click()
    assert "done 1" in wait_for(notebook, 2, "done 0")
    run(notebook, 3)
    assert "the next cell" in wait_for(notebook, 3, "2 ranks")
    run(notebook, 4)
    failed = wait_for(notebook, 4, "in use")
    assert re.search(r"rank 1: .+ has .* in use, this rank [\d.]+ MiB", failed)
    assert "model.weight (2000, 1000) float32" in failed
    run(notebook, 5)
    memory = wait_for(notebook, 5, "by variable")
    assert "model.weight" in memory
    assert "batch in step(), line 4" in memory
    run(notebook, 6)
    assert "idle" in wait_for(notebook, 6, "rank")
    notebook.screenshot("resources-after")
