"""JupyterLab's own debugger over the ranks of a world, by clicks."""

from __future__ import annotations

import psutil
import pytest

from tests.browser.conftest import HEIGHT, LOOK_MS, NO_IDLE_IMPORTS, Lab, Notebook
from tests.waiting import SOON

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


def switch(notebook: Notebook, *, on: bool) -> None:
    """Switch the debugger on or off by a click on the bug in the notebook's toolbar."""
    notebook.page.locator(".jp-DebuggerBugButton").first.click()
    state = "attached" if on else "detached"
    notebook.page.wait_for_selector('.jp-NotebookPanel[data-jp-debugger="true"]', state=state)


def stop_at_line(notebook: Notebook, line: int, text: str) -> list[str]:
    """Set a breakpoint in a line of cell 1, run the cell, and return the frames at the line."""
    click_breakpoint(notebook, 1, line)
    notebook.page.wait_for_selector(".jp-DebuggerBreakpoint", state="attached")
    notebook.page.evaluate("window.jupyterapp.commands.execute('debugger:show-panel')")
    notebook.start(1)
    return wait_for_line(notebook, text)


def evaluate(notebook: Notebook, code: str) -> None:
    """Run code on the shown rank in the debugger's console (*Evaluate Code*), and close it."""
    page = notebook.page
    page.locator('[data-command="debugger:evaluate"]').first.click()
    console = page.locator(".jp-DebugConsole")
    prompt = console.locator(".jp-CodeConsole-promptCell .cm-content")
    prompt.click()
    prompt.press_sequentially(code)
    prompt.press("Shift+Enter")
    console.locator(".jp-CodeConsole-content .jp-OutputArea-output").wait_for()
    notebook.picture("debugger-console")
    page.locator(".lm-TabBar-tab", has_text="Console").locator(".lm-TabBar-tabCloseIcon").click()
    page.wait_for_selector(".jp-DebugConsole", state="detached")


def check_steps(notebook: Notebook) -> None:
    """Stop all ranks at a breakpoint, step over a collective, and continue, by clicks."""
    notebook.start(0)
    notebook.ended()
    switch(notebook, on=True)
    frames = stop_at_line(notebook, 4, "dist.all_reduce(gradient)")
    assert frames[0].startswith("rank 0 · train_step")
    assert frames[1].startswith("rank 0 · <module>")
    notebook.page.wait_for_function(f"() => ({VARIABLES})().includes('gradient')", polling=LOOK_MS)
    notebook.picture("debugger-stopped")
    click(notebook, "next")
    wait_for_line(notebook, "return weight - 0.01 * gradient")
    notebook.picture("debugger-stepped")
    click(notebook, "continue")
    wait_for_line(notebook, "dist.all_reduce(gradient)")
    go_on_to_the_end(notebook)
    notebook.ended()
    assert "trained 2.43" in notebook.wait_for(1, "trained")
    switch(notebook, on=False)
    notebook.start(2)
    notebook.ended()


def test_a_breakpoint_stops_all_ranks_and_steps_move_them_together(lab: Lab) -> None:
    """By clicks: a breakpoint, the frames of a rank, a step over a collective, and continue."""
    lab.write("debugged.ipynb", CELLS)
    check_steps(lab.open("debugged.ipynb"))


def test_breakpoints_stop_ranks_in_notebook_7_too(lab: Lab) -> None:
    """The clicks of the test before have the same effects in Notebook 7."""
    lab.write("seven.ipynb", CELLS)
    path = f"{lab.folder.name}/seven.ipynb"
    with lab.page.context.new_page() as page:
        page.set_viewport_size({"width": 1280, "height": HEIGHT})
        page.goto(f"{lab.page.url.partition('lab')[0]}notebooks/{path}")
        notebook = Notebook(page, path)
        notebook.wait_until_ready()
        check_steps(notebook)


CHANGED = """%%distributed
weight = torch.ones(1)
dist.all_reduce(weight)
print("weight", weight.item(), file=open(f"weight{rank}", "w"))
if rank == 1:
    raise ValueError("odd shard")
dist.barrier()"""


def test_ranks_at_a_breakpoint_can_be_changed_stopped_and_lost(lab: Lab) -> None:
    """By clicks: change a variable, pause at an exception, Stop, and restart the kernel."""
    start = f"{NO_IDLE_IMPORTS}%load_ext nbdist\n%dist_init -n 2"
    lab.write("changed.ipynb", (start, CHANGED))
    notebook = lab.open("changed.ipynb")
    notebook.start(0)
    notebook.ended()
    switch(notebook, on=True)
    assert stop_at_line(notebook, 3, "dist.all_reduce(weight)")[0].startswith("rank 0")
    evaluate(notebook, "weight.fill_(5)")
    notebook.page.locator(".jp-PauseOnExceptions").first.click()
    notebook.page.locator(".lm-Menu-item", has_text="userUnhandled").click()
    click(notebook, "continue")
    # Rank 0 waits in the barrier; rank 1 is shown with its exception.
    frames = wait_for_line(notebook, 'raise ValueError("odd shard")')
    assert frames[0].startswith("rank 1 · <module>")
    assert [(lab.folder / f"weight{rank}").read_text() for rank in (0, 1)] == ["weight 6.0\n"] * 2
    notebook.picture("debugger-exception")
    go_on_to_the_end(notebook)
    assert "ValueError: odd shard" in notebook.ended()[1].shown

    notebook.start(1)
    wait_for_line(notebook, "dist.all_reduce(weight)")
    notebook.page.locator('[data-command="notebook:interrupt-kernel"]').first.click()
    assert "Interrupted" in str(notebook.ended()[1].errors)

    notebook.start(1)
    wait_for_line(notebook, "dist.all_reduce(weight)")
    ranks = [each for each in psutil.process_iter() if _is_rank_of(each, lab)]
    assert len(ranks) >= 2
    # JupyterLab's own bar "Paused in Debugger" covers the button on a narrow page.
    restart = "() => { window.jupyterapp.commands.execute('notebook:restart-kernel'); }"
    notebook.page.evaluate(restart)
    notebook.page.locator(".jp-Dialog .jp-mod-accept").click()
    _, alive = psutil.wait_procs(ranks, timeout=SOON)
    assert alive == []
    notebook.wait_until_ready()
    notebook.start(0)
    assert notebook.ended()[0].errors == []


def _is_rank_of(process: psutil.Process, lab: Lab) -> bool:
    """Return True if a process of nbdist works in the folder of a test."""
    try:
        return process.cwd() == str(lab.folder) and "nbdist" in " ".join(process.cmdline())
    except psutil.Error:  # the process has ended, or is another user's
        return False
