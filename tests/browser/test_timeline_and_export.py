"""Where time went, and the way to a script, as a reader of JupyterLab sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.browser.conftest import Lab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

CELLS = [
    "%load_ext nbdist",
    "import time\n\nscale = 3\n\n\ndef prepared(x):\n    return x * scale",
    "%%distributed -n 4\nx = prepared(torch.ones(256))\nstep = 0",
    "%%distributed\nfor step in range(5):\n    time.sleep(0.3 if rank == 2 else 0.1)\n"
    "    dist.all_reduce(x)",
    "%dist_timeline",
    "%dist_export --force train.py",
    "print(open('train.py').read())",
]


def test_timeline_and_export(lab: Lab) -> None:
    """The straggler is named, with bars; a cell that is run again stands in the script once."""
    lab.write("time.ipynb", CELLS)
    notebook = lab.open("time.ipynb")
    notebook.run_all()
    cells = notebook.run_all()
    notebook.screenshot("timeline-and-export")
    assert [cell.errors for cell in cells if cell.errors] == []
    timeline, said, script = (cell.shown for cell in cells[4:])
    assert "rank 2 came last to 5 of them; others waited" in timeline
    assert timeline.count("░") > 4 * 15
    assert "train.py · 2 cells · `torchrun --nproc-per-node 4 train.py`" in said
    assert script.count("which ran 2 times") == 2
    assert script.count("def prepared(x):") == 1
    assert script.count("dist.all_reduce(x)") == 1
