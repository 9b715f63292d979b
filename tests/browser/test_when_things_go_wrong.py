"""Failures, deaths and the Stop button in JupyterLab, as a reader sees them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import RUN_ALL, RUN_TIMEOUT
from tests.browser.test_quickstart import all_text, clear_outputs

if TYPE_CHECKING:
    from tests.browser.conftest import Lab

WRONG = Path(__file__).parents[2] / "notebooks" / "02-when-things-go-wrong.ipynb"

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

STOP = "jp-button[data-command='notebook:interrupt-kernel']"

WAITING = """%%distributed -n 2
kept = 10 + rank
print("now it waits")
if rank == 0:
    import time
    time.sleep(3600)
dist.barrier()"""


def test_all_that_goes_wrong_in_jupyterlab(lab: Lab) -> None:
    """Run All goes through a failure, a stuck barrier, a death and Stop, and trains on."""
    copy = Path(shutil.copy(WRONG, lab.folder))
    clear_outputs(copy)
    notebook = lab.open(copy.name)
    cells = notebook.run_all()
    notebook.screenshot("when-things-go-wrong")
    unlike = [cell for cell in cells if not re.fullmatch(r"\[\d+\]:", cell.prompt)]
    assert unlike == []
    errors = [error for cell in cells for error in cell.errors]
    assert [re.split(r"[:(]", error)[0] for error in errors] == [
        "WorkerError",
        "RanksReleased",
        "WorkerDied",
        "Interrupted",
    ]
    shown = all_text(cells)
    assert (
        "Ranks 0-1,3 were waiting in all_reduce (line 4) and were released; no variables were lost."
    ) in shown
    assert "ranks 0,2-3 wait in barrier, line 3; rank 1 finished the cell without it." in shown
    assert "was killed by SIGKILL" in shown
    assert "Stopped on ranks 0-3. No variables were lost." in shown
    assert len(re.findall(r"rank \d\s+loss \d\.\d+, same weights: True", shown)) == 5 * 4
    assert "same weights: False" not in shown


def test_the_stop_button(lab: Lab) -> None:
    """It ends a cell that waits, whose variables are there for the next one."""
    lab.write("stop.ipynb", ["%load_ext nbdist", WAITING])
    notebook = lab.open("stop.ipynb")
    notebook.wait_until_ready()
    notebook.page.evaluate(RUN_ALL)
    notebook.page.get_by_text("now it waits", exact=True).last.wait_for()
    notebook.page.locator(STOP).click()
    notebook.page.wait_for_function("window.nbdistRan !== null", timeout=RUN_TIMEOUT * 1000)
    notebook.wait_until_ready()
    [_, waiting] = notebook.cells()
    assert waiting.errors == ["Interrupted: Stopped on ranks 0-1. No variables were lost."]
