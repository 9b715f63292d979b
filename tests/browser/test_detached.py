"""The kernel is restarted in mid-cell, in JupyterLab, and the next one takes the workers over."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from nbdist.terminal.listing import kill_world
from nbdist.world.registry import worlds
from tests.browser.test_jobs import SAYS

if TYPE_CHECKING:
    from tests.browser.conftest import Lab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

NAME = f"lab-{os.getpid()}"

CELLS = (
    "%load_ext nbdist",
    f"%%distributed -n 2 --detach --name {NAME}\n"
    "import time\nfor step in range(30):\n    loss = torch.ones(1) / (step + 1)\n"
    "    dist.all_reduce(loss)\n    print(f'step {step}: loss {loss.item():.3f}')\n"
    "    time.sleep(0.3)",
    f"%load_ext nbdist\n%dist_attach {NAME}",
    "%%distributed\nprint('still here:', step, loss.item() > 0)",
    "%dist_shutdown",
)

RUN = """number => {
    window.jupyterapp.shell.currentWidget.content.activeCellIndex = number;
    window.jupyterapp.commands.execute("notebook:run-cell");
}"""

RESTART = "() => window.jupyterapp.shell.currentWidget.context.sessionContext.restartKernel()"


def test_restart_in_mid_cell(lab: Lab) -> None:
    """The training goes on; below `%dist_attach` stands all of it, and then what comes."""
    lab.write("detached.ipynb", CELLS)
    notebook = lab.open("detached.ipynb")
    page = notebook.page
    try:
        for number in (0, 1):
            page.evaluate(RUN, number)
        page.wait_for_function(SAYS, arg=[1, "step 3"])
        page.evaluate(RESTART)
        notebook.wait_until_ready()
        page.evaluate(RUN, 2)
        page.wait_for_function(SAYS, arg=[2, "attached to"])
        page.wait_for_function(SAYS, arg=[2, "step 8"])
        notebook.screenshot("detached-live")
        page.wait_for_function(SAYS, arg=[2, "✓ 2"])
        page.evaluate(RUN, 3)
        page.wait_for_function(SAYS, arg=[3, "still here: 29 True"])
        shown = notebook.cells()
        assert "step 0: loss 2.000" in shown[2].shown
        assert "step 29: loss 0.067" in shown[2].shown
        assert [cell.errors for cell in shown[2:]] == [[]] * 3
        notebook.screenshot("detached")
        page.evaluate(RUN, 4)
        page.wait_for_function(SAYS, arg=[4, "workers ended"])
    finally:
        for each in worlds():
            if each.held.name == NAME:
                kill_world(NAME)
