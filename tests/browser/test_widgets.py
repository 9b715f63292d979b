"""Widgets of two ranks in JupyterLab, moved there, also after the page was reloaded."""

from __future__ import annotations

import nbformat
import pytest

from tests.browser.conftest import LOOK_MS, NO_IDLE_IMPORTS, Lab, Notebook

pytestmark = pytest.mark.shared_world

CELLS = (
    f"{NO_IDLE_IMPORTS}%load_ext nbdist",
    """%%distributed -n 2
import ipywidgets
slider = ipywidgets.IntSlider(value=3 + 10 * rank, description=f"of rank {rank}")
slider.observe(lambda change: print("moved to", change.new), "value")
slider""",
    "%%distributed\nprint('has', slider.value)",
    "%dist_shutdown",
)

IS_UP = "window.jupyterapp?.shell.currentWidget?.isVisible"

SLIDERS = """() => {
    const found = [...document.querySelectorAll(".widget-slider .widget-readout")];
    return found.map(each => each.innerText);
}"""


def wait_for_sliders(notebook: Notebook, *values: str) -> None:
    """Return once the page shows sliders with these values, and no others."""
    is_so = f"values => JSON.stringify(({SLIDERS})()) === JSON.stringify(values)"
    notebook.page.wait_for_function(is_so, arg=[*values], polling=LOOK_MS)


def move(notebook: Notebook, rank: int) -> None:
    """Move the slider of this rank by one."""
    notebook.page.locator(".noUi-handle").nth(rank).press("ArrowRight")


def test_a_moved_slider_changes_its_rank_s_value(lab: Lab) -> None:
    """A moved slider changes the value on its rank while no cell runs, also after a reload."""
    pytest.importorskip("ipywidgets")
    lab.write("sliders.ipynb", CELLS)
    notebook = lab.open("sliders.ipynb")
    notebook.start(0)
    notebook.ended()
    notebook.start(1)
    notebook.ended()
    wait_for_sliders(notebook, "3", "13")
    move(notebook, 0)
    move(notebook, 1)
    move(notebook, 1)
    wait_for_sliders(notebook, "4", "15")
    notebook.wait_for(1, "moved to 15")
    notebook.screenshot("widgets")
    notebook.screenshot("widgets-dark", theme="JupyterLab Dark")
    notebook.screenshot("widgets-narrow", width=700)
    notebook.start(2)
    notebook.ended()
    shown = notebook.wait_for(2, "has 15")
    assert "has 4" in shown

    notebook.save()
    notebook.page.reload()
    notebook.page.wait_for_function(IS_UP, polling=LOOK_MS)
    notebook = lab.open("sliders.ipynb")
    wait_for_sliders(notebook, "4", "15")
    move(notebook, 0)
    notebook.start(2)
    notebook.ended()
    notebook.wait_for(2, "has 5")

    notebook.save()
    saved = nbformat.read(lab.folder / "sliders.ipynb", 4)
    (states,) = saved.metadata["widgets"].values()
    values = {each["state"].get("value") for each in states["state"].values()}
    assert {5, 15} <= values
    notebook.start(3)
    notebook.ended()
    wait_for_sliders(notebook)
