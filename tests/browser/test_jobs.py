"""Cells that nobody waits for, in JupyterLab, as its user sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.browser.conftest import Lab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

CELLS = (
    "%load_ext nbdist",
    "%%distributed -n 2 --no-wait -o job\nimport time\nimport matplotlib.pyplot as plt\n"
    "for step in range(8):\n    print('step', step); time.sleep(0.4)\n_ = plt.plot([rank, 1])",
    "print('a plain cell'); job",
)
ENDLESS = "%%distributed --no-wait -o job\nimport time\nfor step in range(1000):\n"
ENDLESS += "    print('again', step); time.sleep(0.4)"

SAYS = """([number, text]) => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    return cells[number].node.querySelector(".jp-Cell-outputArea")?.innerText.includes(text);
}"""
INTERRUPT = "window.jupyterapp.commands.execute('notebook:interrupt-kernel')"


def test_it_is_live_and_stop_stops_it(lab: Lab) -> None:
    """Its panel is drawn while the notebook is idle; the Stop button then stops the cell."""
    lab.write("jobs.ipynb", CELLS)
    notebook = lab.open("jobs.ipynb")
    shown = notebook.run_all()
    assert "<Job running · 2 ranks · " in shown[2].shown
    assert "step 7" not in shown[1].shown
    notebook.page.wait_for_function(SAYS, arg=[1, "step 5"])
    notebook.screenshot("job-live")
    notebook.page.wait_for_function(SAYS, arg=[1, "✓ 2"])
    ended = notebook.cells()
    assert [cell.images for cell in ended] == [0, 2, 0]
    assert [cell.errors for cell in ended] == [[]] * 3
    notebook.page.evaluate(
        "source => window.jupyterapp.shell.currentWidget.content.model.sharedModel.addCell("
        "{cell_type: 'code', source})",
        ENDLESS,
    )
    notebook.page.evaluate(
        "const content = window.jupyterapp.shell.currentWidget.content;"
        "content.activeCellIndex = 3; window.jupyterapp.commands.execute('notebook:run-cell')"
    )
    notebook.page.wait_for_function(SAYS, arg=[3, "again 1"])
    notebook.wait_until_ready()
    notebook.page.evaluate(INTERRUPT)
    said = "Stopped on ranks 0-1. No variables were lost."
    notebook.page.wait_for_function(SAYS, arg=[3, said])
    notebook.screenshot("job-stopped")
