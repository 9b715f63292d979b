"""The kernel is restarted in mid-cell, in JupyterLab, and the next one takes the workers over."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nbdist.terminal.listing import kill_world
from nbdist.world.agents import worlds
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.browser.conftest import Lab

NAME = f"lab-{os.getpid()}"

CELLS = (
    "%load_ext nbdist",
    f"%%distributed -n 2 --detach --name {NAME}\n"
    "import pathlib, time\nfor step in range(30):\n    loss = torch.ones(1) / (step + 1)\n"
    "    dist.all_reduce(loss)\n    print(f'step {step}: loss {loss.item():.3f}')\n"
    "    pathlib.Path(f'at {step}').touch()\n"
    "    while step in (3, 8) and not pathlib.Path(f'after {step}').exists(): time.sleep(0.02)",
    f"%load_ext nbdist\n%dist_attach {NAME}",
    "%%distributed\nprint('still here:', step, loss.item() > 0)",
    "%dist_shutdown",
)

RESTART = "() => window.jupyterapp.shell.currentWidget.context.sessionContext.restartKernel()"


def test_restart_in_mid_cell(lab: Lab) -> None:
    """The training goes on; below `%dist_attach` stands all of it, and then what comes."""
    lab.write("detached.ipynb", CELLS)
    notebook = lab.open("detached.ipynb")
    try:
        notebook.start(0)
        notebook.start(1)
        notebook.wait_for(1, "step 3")
        notebook.page.evaluate(RESTART)
        notebook.wait_until_ready()
        (lab.folder / "after 3").touch()
        wait_until((lab.folder / "at 8").exists, "it trains without a notebook")
        notebook.start(2)
        notebook.wait_for(2, "attached to")
        notebook.wait_for(2, "step 8")
        notebook.screenshot("detached-live")
        (lab.folder / "after 8").touch()
        notebook.wait_for(2, "✓ 2")
        notebook.start(3)
        notebook.wait_for(3, "still here: 29 True")
        shown = notebook.cells()
        assert "step 0: loss 2.000" in shown[2].shown
        assert "step 29: loss 0.067" in shown[2].shown
        assert [cell.errors for cell in shown[2:]] == [[]] * 3
        notebook.screenshot("detached")
        notebook.start(4)
        notebook.wait_for(4, "workers ended")
    finally:
        if any(each.held.name == NAME for each in worlds()):
            kill_world(NAME)
