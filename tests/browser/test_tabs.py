"""Tabs of two ranks in JupyterLab: clicked, saved, and in a file that is not trusted."""

from __future__ import annotations

import nbformat
import pytest
from nbconvert import HTMLExporter

from tests.browser.conftest import LOOK_MS, NO_IDLE_IMPORTS, Lab, Notebook

pytestmark = pytest.mark.shared_world

TALL = """%%distributed -n 2
import os, time
print("first line of rank", rank)
while not os.path.exists("seen"):
    time.sleep(0.05)
print("x" * 900, *["many words"] * 90)
print("last line of rank", rank)"""

CELLS = (
    f"{NO_IDLE_IMPORTS}%load_ext nbdist\n%config NbDist.layout = 'tabs'",
    TALL,
    "%%distributed\nprint('shard', rank)\nassert rank == 0, 'rank 1 is odd'",
)

TABS = """number => {
    const cell = window.jupyterapp.shell.currentWidget.content.widgets[number].node;
    const page = cell.querySelector(".jp-OutputArea").getBoundingClientRect();
    // A long line opens, too.
    const names = [...cell.querySelectorAll(":not(details *) > details > summary")];
    const parts = [...cell.querySelectorAll("details > div")];
    const shown = parts.filter(each => each.checkVisibility());
    return {
        rows: new Set(names.map(each => Math.round(each.getBoundingClientRect().top))).size,
        shown: shown.map(each => each.innerText),
        fits: shown.every(each => each.getBoundingClientRect().right <= page.right + 1),
        below: shown.every(each => each.getBoundingClientRect().top
            >= names[0].getBoundingClientRect().bottom - 1),
        left: shown.map(each => Math.round(each.getBoundingClientRect().left)),
        words: [...cell.querySelectorAll("pre")].map(each => getComputedStyle(each).wordBreak),
    };
}"""

OPENS = """([number, text]) => {
    const cell = window.jupyterapp.shell.currentWidget.content.widgets[number].node;
    const parts = [...cell.querySelectorAll("details > div")];
    const shown = parts.filter(each => each.checkVisibility());
    return shown.some(each => each.innerText.includes(text));
}"""


def click(notebook: Notebook, rank: int, number: int = 1) -> None:
    """Click on the name of a rank, and wait for its last line."""
    cell = notebook.page.locator(".jp-Notebook .jp-Cell").nth(number)
    cell.locator("summary", has_text=f"rank {rank}").first.click()
    said = [number, f"last line of rank {rank}"]
    notebook.page.wait_for_function(OPENS, arg=said, polling=LOOK_MS)


def test_a_click_on_a_tab_shows_one_rank(lab: Lab) -> None:
    """A click on a name shows this rank alone; in an untrusted file each rank opens by itself."""
    lab.write("tabs.ipynb", CELLS)
    notebook = lab.open("tabs.ipynb")
    notebook.start(0)
    notebook.ended()
    notebook.start(1)
    notebook.wait_for(1, "first line of rank 0")
    live = notebook.wait_for(1, "first line of rank 1")
    assert live.index("first line of rank 0") < live.index("first line of rank 1")
    (lab.folder / "seen").touch()
    notebook.ended()
    notebook.start(2)
    notebook.ended()

    shown = notebook.page.evaluate(TABS, 1)
    assert [text.split("\n")[0] for text in shown["shown"]] == ["first line of rank 0"]
    left = shown["left"]
    click(notebook, 1)
    shown = notebook.page.evaluate(TABS, 1)
    assert [text.split("\n")[0] for text in shown["shown"]] == ["first line of rank 1"]
    assert (shown["rows"], shown["fits"], shown["below"]) == (1, True, True)
    assert shown["left"] == left
    assert {*shown["words"]} == {"normal"}
    # The tab of the rank that failed is open, and the tabs of another cell do not change.
    (failed,) = notebook.page.evaluate(TABS, 2)["shown"]
    assert "AssertionError: rank 1 is odd" in failed
    assert len(notebook.page.evaluate(TABS, 1)["shown"]) == 1
    notebook.screenshot("tabs")
    notebook.screenshot("tabs-dark-700", 700, "JupyterLab Dark")
    notebook.save()
    lab.close()

    content = nbformat.read(lab.folder / "tabs.ipynb", as_version=4)
    html, _ = HTMLExporter().from_notebook_node(content)
    assert html.count("<details name=") == 4
    content.metadata["came_by"] = "mail"
    nbformat.write(content, lab.folder / "tabs.ipynb")
    reopened = lab.open("tabs.ipynb")
    assert not reopened.is_trusted()
    click(reopened, 1)
    shown = reopened.page.evaluate(TABS, 1)
    assert ["first line of rank 0" in text for text in shown["shown"]] == [True, False]
    assert shown["fits"]
    reopened.screenshot("tabs-not-trusted")
