"""JupyterLab's own debugger over the ranks of a world, by clicks."""

from __future__ import annotations

import pytest

from tests.browser.conftest import LOOK_MS, NO_IDLE_IMPORTS, Lab, Notebook

pytestmark = pytest.mark.shared_world

TRAIN = """%%distributed
def train_step(weight):
    gradient = weight * (rank + 1)
    dist.all_reduce(gradient)
    return weight - 0.01 * gradient

weight = torch.ones(3)
for step in range(2):
    weight = train_step(weight)
print("trained", round(weight.sum().item(), 3))"""

CELLS = (f"{NO_IDLE_IMPORTS}%load_ext nbdist\n%dist_init -n 4", TRAIN, "%dist_shutdown")

FRAMES = """() => [...document.querySelectorAll(".jp-DebuggerCallstackFrame")]
    .map(each => each.innerText)"""

VARIABLES = "() => document.querySelector('.jp-DebuggerVariables')?.innerText ?? ''"

# The line of a cell that the debugger marks as the one that comes next.
MARKED = """number => {
    const cell = window.jupyterapp.shell.currentWidget.content.widgets[number];
    return cell.node.querySelector(".jp-DebuggerEditor-highlight")?.innerText ?? "";
}"""


def click_breakpoint(notebook: Notebook, cell: int, line: int) -> None:
    """Set a breakpoint by a click left of a line of a cell."""
    gutter = notebook.page.locator(".jp-CodeCell").nth(cell).locator(".cm-breakpoint-gutter")
    # The first element of a gutter is hidden: it is as wide as the gutter can become.
    gutter.locator(".cm-gutterElement").nth(line).click()


def click(notebook: Notebook, step: str) -> None:
    """Click a button of the call stack: `continue`, `next`, `stepIn` or `stepOut`."""
    notebook.page.locator(f'[data-command="debugger:{step}"]').first.click()


def wait_for_line(notebook: Notebook, text: str) -> list[str]:
    """Wait until the debugger marks this line of the cell; return the frames of the call stack."""
    is_so = f"text => ({MARKED})(1).includes(text) && ({FRAMES})().length > 0"
    notebook.page.wait_for_function(is_so, arg=text, polling=LOOK_MS)
    frames: list[str] = notebook.page.evaluate(FRAMES)
    return frames


def go_on_to_the_end(notebook: Notebook) -> None:
    """Click Continue until the cell has ended: on a busy machine, ranks may stop one by one."""
    has_ended, is_stopped = "window.nbdistRan !== null", f"({FRAMES})().length > 0"
    while not notebook.page.evaluate(has_ended):
        notebook.page.wait_for_function(f"() => {has_ended} || {is_stopped}", polling=LOOK_MS)
        if notebook.page.evaluate(is_stopped):
            notebook.page.locator('[data-command="debugger:continue"]').first.click(force=True)


def test_a_breakpoint_stops_all_ranks_and_steps_move_them_together(lab: Lab) -> None:
    """By clicks: a breakpoint, the frames of a rank, a step over a collective, and continue."""
    lab.write("debugged.ipynb", CELLS)
    notebook = lab.open("debugged.ipynb")
    page = notebook.page
    notebook.start(0)
    notebook.ended()
    page.locator(".jp-DebuggerBugButton").first.click()
    page.wait_for_selector('.jp-NotebookPanel[data-jp-debugger="true"]')
    click_breakpoint(notebook, 1, 4)
    page.wait_for_selector(".cm-breakpoint-marker, .jp-DebuggerBreakpoint")
    page.evaluate("window.jupyterapp.commands.execute('debugger:show-panel')")
    notebook.start(1)
    frames = wait_for_line(notebook, "dist.all_reduce(gradient)")
    assert frames[0].startswith("rank 0 · train_step")
    assert frames[1].startswith("rank 0 · <module>")
    page.wait_for_function(f"() => ({VARIABLES})().includes('gradient')", polling=LOOK_MS)
    notebook.picture("debugger-stopped")
    click(notebook, "next")
    wait_for_line(notebook, "return weight - 0.01 * gradient")
    notebook.picture("debugger-stepped")
    click(notebook, "continue")
    wait_for_line(notebook, "dist.all_reduce(gradient)")
    go_on_to_the_end(notebook)
    notebook.ended()
    assert "trained 2.43" in notebook.wait_for(1, "trained")
    page.locator(".jp-DebuggerBugButton").first.click()
    notebook.start(2)
    notebook.ended()
