"""What ranks want typed, in JupyterLab's input box."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nbformat
import pytest

from tests.browser.conftest import RUN_ALL, RUN_TIMEOUT

if TYPE_CHECKING:
    from tests.browser.conftest import Lab, Notebook, ShownCell

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

BOX = ".jp-Stdin-input"
PROMPT = ".jp-Stdin-prompt"
STOP = "jp-button[data-command='notebook:interrupt-kernel']"

NAMES = """%%distributed -n 2
print("before")
name = input("name? ")
print("hello", name)"""

DEBUGGED = """%%distributed
def step(x):
    y = x * 2
    if rank == 1:
        breakpoint()
    return y

step(rank + 20)
dist.barrier()
print("all are through")"""

FAILED = """%%distributed
def divide(x):
    return 1 / x

divide(1 - rank)"""

WAITING = "%%rank 0\ninput('for ever? ')"


def enter(notebook: Notebook, prompt: str, text: str, shot: str = "") -> None:
    """Type a line at this prompt, once it is there."""
    shown = notebook.page.locator(PROMPT, has_text=prompt)
    shown.wait_for(timeout=RUN_TIMEOUT * 1000)
    if shot:
        notebook.screenshot(shot)
    box = notebook.page.locator(BOX).element_handle()
    box.fill(text)
    box.press("Enter")
    box.wait_for_element_state("hidden")  # the next one may have the same prompt


def ended(notebook: Notebook) -> list[ShownCell]:
    """What the cells show once all have run."""
    notebook.page.wait_for_function("window.nbdistRan !== null", timeout=RUN_TIMEOUT * 1000)
    notebook.wait_until_ready()
    return notebook.cells()


def test_input_and_breakpoints(lab: Lab) -> None:
    """Each rank's prompt says whose it is; what was typed is in the one output that stays."""
    lab.write("typing.ipynb", ["%load_ext nbdist", NAMES, DEBUGGED])
    notebook = lab.open("typing.ipynb")
    notebook.wait_until_ready()
    notebook.page.evaluate(RUN_ALL)
    enter(notebook, "[rank 0] name?", "ada")
    enter(notebook, "[rank 1] name?", "bob", "typing-name")
    for line in ("p x, y", "where", "y = 7"):
        enter(notebook, "[rank 1] ipdb>", line)
    enter(notebook, "[rank 1] ipdb>", "c", "typing-debugger")
    _, named, debugged = ended(notebook)
    notebook.screenshot("typing-ended")
    assert named.shown.count("name? ") == 2
    assert "name? bob\nhello bob" in named.shown
    assert "ipdb> p x, y\n(21, 42)" in debugged.shown
    assert debugged.shown.count("ipdb> ") == 4
    assert debugged.shown.splitlines().count("all are through") == 2
    notebook.save()
    saved = nbformat.read(lab.folder / "typing.ipynb", as_version=4)
    assert [len(cell.outputs) for cell in saved.cells[1:]] == [1, 1]


def test_post_mortem_and_stop(lab: Lab) -> None:
    """`%debug` after a failed cell is the rank's; the Stop button ends a cell that waits."""
    lab.write("failed.ipynb", ["%load_ext nbdist", "%%distributed -n 2\nkept = 5", FAILED])
    notebook = lab.open("failed.ipynb")
    notebook.run_all()
    for source in ("%debug", WAITING):
        notebook.page.evaluate(
            """source => {
                const cell = window.jupyterapp.shell.currentWidget.content.activeCell;
                cell.model.sharedModel.setSource(source);
                window.nbdistRan = null;
                window.jupyterapp.commands.execute("notebook:run-cell").then(
                    () => { window.nbdistRan = "done"; },
                    error => { window.nbdistRan = String(error); },
                );
            }""",
            source,
        )
        if source == "%debug":
            enter(notebook, "[rank 1] ipdb>", "p x", "typing-post-mortem")
            enter(notebook, "[rank 1] ipdb>", "q")
            *_, last = ended(notebook)
            assert "ipdb> p x\n0" in last.shown
            assert "nbdist/" not in last.shown
        else:
            notebook.page.locator(PROMPT, has_text="[rank 0] for ever?").wait_for()
            notebook.page.locator(STOP).click()
            *_, last = ended(notebook)
            assert last.errors == ["Interrupted: Stopped on rank 0. No variables were lost."]
            assert notebook.page.locator(BOX).count() == 0
    notebook.screenshot("typing-stopped")
