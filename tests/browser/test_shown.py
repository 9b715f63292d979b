"""All that ranks show, in JupyterLab: what the panel cannot embed, who failed, narrow tables."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbconvert import HTMLExporter

if TYPE_CHECKING:
    from tests.browser.conftest import Lab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

CELLS = [
    "%load_ext nbdist",
    """%%distributed -n 4
from IPython.display import *
print("rank", rank)
display(Markdown("**done** with `everything`"), Math(r"x^2 + \\frac{1}{2}"))
JSON({"rank": rank})""",
    "%%distributed\n%%markdown\n# A title of ranks",
    """%%distributed -r 0,1
import plotly.graph_objects as go
go.Figure(go.Scatter(y=[1, 2, rank]), layout={"height": 220})""",
    "%%distributed\nimport sympy\nsympy.Symbol('alpha') ** 2",
    """%%distributed -r 0
import time
for step in range(3):
    clear_output(wait=True)
    display(Markdown(f"step **{step}**"))
    time.sleep(0.2)""",
    "%dist_status",
    """%%distributed
if rank == 2: raise ValueError("bad shard")
dist.all_reduce(torch.ones(1))""",
]


def test_what_ranks_show(lab: Lab) -> None:
    """Each kind is rendered below its panel, and in the saved file and its HTML as well."""
    lab.write("shown.ipynb", CELLS)
    notebook = lab.open("shown.ipynb")
    *_, kinds, title, figure, sympy, steps, status, failed = notebook.run_all()
    assert re.search(r"ranks 0-3\s+done with everything", kinds.shown)
    assert "Markdown, shown below" in kinds.shown
    assert "A title of ranks" in title.shown
    assert "plotly figure, shown below" in figure.shown
    assert "LaTeX, shown below" in sympy.shown
    assert "idle" in status.shown
    assert "step 2" in steps.shown
    assert "step 1" not in steps.shown
    assert "✗ 1 · 3 released" in failed.shown
    rendered = {
        name: notebook.page.locator(f".jp-OutputArea-output {name}").count()
        for name in ("strong", "mjx-container", ".jp-RenderedJSON", ".js-plotly-plot, .plotly")
    }
    assert rendered["strong"] >= 2
    assert rendered["mjx-container"] >= 2
    notebook.screenshot("shown")
    notebook.picture_from(6, "shown-narrow", width=900)
    notebook.save()
    saved = nbformat.read(lab.folder / "shown.ipynb", as_version=4)
    outputs = [output for cell in saved.cells for output in cell.outputs]
    assert sum("text/markdown" in output.get("data", {}) for output in outputs) == 3
    assert "CPU cores" not in str(outputs)
    html, _ = HTMLExporter().from_notebook_node(saved)
    assert "<strong>done</strong>" in html
    assert "application/vnd.plotly.v1+json" in str(outputs)
