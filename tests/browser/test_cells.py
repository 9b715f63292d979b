"""Cells of two ranks in JupyterLab, as their user sees them; and a page reloaded in mid-cell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import nbformat
import pytest

from nbdist.output.html import FOOT_SECONDS
from tests.browser.conftest import NO_IDLE_IMPORTS, WIDTH, Lab, Notebook, in_folder

if TYPE_CHECKING:
    from playwright.sync_api import Page


pytestmark = pytest.mark.shared_world

BOX, PROMPT = ".jp-Stdin-input", ".jp-Stdin-prompt"

MODEL = """%%distributed
class Net(torch.nn.Module):
    '''An encoder and a head.'''
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(8, 4)
        self.head = torch.nn.Linear(4, 2)
net = Net()
def train_for(net, steps: int = 3):
    '''Train the net for so many steps.'''"""

NAMES = """%%distributed
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


USED = (
    "%%distributed\n"
    "import os, time\n"
    "from tqdm import tqdm\n"
    "model = torch.nn.Linear(1000, 1000 * (rank + 1))\n"
    "for step in tqdm(range(100), desc='train', mininterval=0):\n"
    "    while step == 50 - 25 * rank and not os.path.exists('gate'): time.sleep(0.02)\n"
    "print('done', rank)",
    "%%distributed\nprint('the next cell')",
    "%dist_output -2",
)

EDIT = """index => {
    const content = window.jupyterapp.shell.currentWidget.content;
    content.activeCellIndex = index;
    content.mode = "edit";
    content.activeCell.editor.focus();
}"""

# The place of the first letter of each cell's output: its left edge, and its baseline.
FIRST_LETTERS = """() => window.jupyterapp.shell.currentWidget.content.widgets.map(cell => {
    const input = cell.node.querySelector(".jp-Cell-inputArea").getBoundingClientRect();
    const area = cell.node.querySelector(".jp-Cell-outputArea");
    const texts = document.createTreeWalker(area, NodeFilter.SHOW_TEXT);
    let text = texts.nextNode();
    while (!text.data.trim() || !text.parentElement.closest(".jp-OutputArea-output")) {
        text = texts.nextNode();
    }
    const letter = document.createRange();
    letter.setStart(text, 0);
    letter.setEnd(text, 1);
    const left = letter.getBoundingClientRect().left - input.left;
    const mark = document.createElement("span");
    mark.style.display = "inline-block";
    text.before(mark);
    const base = mark.getBoundingClientRect().bottom - input.bottom;
    mark.remove();
    return [left, base];
})"""

TAG = """index => {
    const content = window.jupyterapp.shell.currentWidget.content;
    content.widgets[index].model.setMetadata("tags", ["distributed"]);
}"""


@pytest.fixture(scope="module")
def lab(jupyter: Lab) -> Iterator[Lab]:
    """JupyterLab on a folder that all tests of this module share."""
    with in_folder(jupyter, "cells") as lab:
        lab.write("cells.ipynb", [])
        yield lab


@pytest.fixture
def notebook(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Notebook]:
    """A notebook with two ranks; its kernel is ended after a failed test, in case it is stuck."""
    failures = request.session.testsfailed
    notebook = lab.open("cells.ipynb")
    notebook.fill([NO_IDLE_IMPORTS + "%load_ext nbdist", "%%distributed -n 2\npass"])
    notebook.run_all()
    yield notebook
    if request.session.testsfailed > failures:
        lab.close()


BESIDE_PRINTED = (
    "print('printed by the notebook')",
    "%%distributed\nprint('printed', 'by a rank' * (rank + 1))",
    "%%distributed\npass",
    "%%rank 1\nraise ValueError",
    "%dist_status",
    "%dist_help",
    "%dist_output -r 1",
)


def test_outputs_begin_where_printed_text_begins(notebook: Notebook) -> None:
    """All output of nbdist begins at the height and left edge of the notebook's printed text."""
    notebook.fill(BESIDE_PRINTED)
    for number in range(len(BESIDE_PRINTED)):  # a cell that fails ends a "Run All"
        notebook.start(number)
        notebook.ended()
    notebook.screenshot("beside-printed")
    printed, *others = notebook.page.evaluate(FIRST_LETTERS)
    assert others == [pytest.approx(printed, abs=0.5)] * len(others)


def type_in(notebook: Notebook, index: int, text: str) -> Page:
    """Type a text in place of the text of a cell."""
    page = notebook.page
    page.evaluate(EDIT, index)
    page.keyboard.press("Control+A")
    page.keyboard.type(text)
    return page


def offered(
    notebook: Notebook, name: str, wanted: str, key: str = "Tab", kind: str = ".jp-Completer"
) -> str:
    """Press a key, and return the text of the popup that offers or says `wanted`."""
    notebook.page.keyboard.press(key)
    answer = notebook.page.locator(kind, has_text=wanted)
    answer.wait_for()
    notebook.picture(name)
    text = answer.inner_text()
    notebook.page.keyboard.press("Escape")
    answer.wait_for(state="hidden")
    return text


def enter(notebook: Notebook, prompt: str, text: str, shot: str = "") -> None:
    """Type a line at a prompt, once the page shows this prompt."""
    notebook.page.locator(PROMPT, has_text=prompt).wait_for()
    if shot:
        notebook.screenshot(shot)
    box = notebook.page.locator(BOX).element_handle()
    box.fill(text)
    box.press("Enter")
    box.wait_for_element_state("hidden")  # the next box may have the same prompt


def test_names_of_workers_are_offered_for_completion(notebook: Notebook) -> None:
    """Options of magics, names and attributes of ranks, and signatures are offered in popups."""
    notebook.fill([MODEL, "net", "", "rank"])
    plain = notebook.run_all()[1]
    hint = "`net` is on ranks 0-1: begin the cell with %%distributed, or `%dist_gather net`"
    assert plain.errors == [f"NameError: {hint}"]
    type_in(notebook, 2, "%%distributed --")
    assert "--backend" in offered(notebook, "completion-options", "--hang-timeout")
    type_in(notebook, 2, "%dist_gather ")
    assert "train_for" in offered(notebook, "completion-gather", "net")
    type_in(notebook, 2, "%%distributed\nnet.")
    # Names from the ranks and names from the page come separately.
    text = offered(notebook, "completion-names", "parameters")
    assert {"encoder", "head"} <= {*text.split()}
    type_in(notebook, 2, "%%distributed\ntrain_for(")
    signature = "completion-signature", "Train the net for", "Shift+Tab", ".jp-Tooltip"
    assert "steps: int = 3" in offered(notebook, *signature)
    notebook.page.evaluate(TAG, 3)
    notebook.start(3)
    notebook.ended()
    notebook.screenshot("completion-tagged-cell")
    assert "rank 1" in notebook.cells()[3].shown


def test_prompts_and_breakpoints_name_their_rank(lab: Lab, notebook: Notebook) -> None:
    """Each prompt names its rank, and typed text is in the cell's only output."""
    notebook.fill([NAMES, DEBUGGED])
    notebook.start_all()
    # Both ranks ask at once: the prompt that came first is shown first.
    first = notebook.page.locator(PROMPT, has_text="name?")
    first.wait_for()
    for rank in sorted(range(2), key=lambda rank: f"[rank {rank}]" not in first.inner_text()):
        enter(notebook, f"[rank {rank}] name?", ("ada", "bob")[rank], f"typing-name-{rank}")
    for line in ("p x, y", "where", "y = 7"):
        enter(notebook, "[rank 1] ipdb>", line)
    enter(notebook, "[rank 1] ipdb>", "c", "typing-debugger")
    named, debugged = notebook.ended()
    notebook.screenshot("typing-ended")
    assert named.shown.count("name? ") == 2
    assert "name? bob\nhello bob" in named.shown
    assert "ipdb> p x, y\n(21, 42)" in debugged.shown
    assert debugged.shown.count("ipdb> ") == 4
    assert debugged.shown.splitlines().count("all are through") == 2
    notebook.save()
    saved = nbformat.read(lab.folder / "cells.ipynb", as_version=4)
    assert [len(cell.outputs) for cell in saved.cells] == [1, 1]


def foot(notebook: Notebook) -> bytes:
    """Return the last line of the first panel as a PNG, which is larger if the line has text."""
    # A locator is no help, since locators wait for an element that stays.
    place = notebook.page.evaluate(
        "(({x, y, width, height}) => ({x, y, width, height}))"
        "([...document.querySelectorAll('.jp-OutputArea-output img')].at(-1)"
        ".getBoundingClientRect())"
    )
    return notebook.page.screenshot(clip=place)


def test_a_reloaded_page_says_when_it_was_drawn(lab: Lab, notebook: Notebook) -> None:
    """A reloaded page shows when its panel was drawn; the next cell says how to see the rest."""
    notebook.fill(USED)
    notebook.start(0)
    notebook.wait_for(0, "% behind")
    head = notebook.wait_for(0, " · cpu ").splitlines()[0]
    assert re.search(r"2 ranks · [\d.]+ s · ● 2 · cpu [\d.]+", head)
    # The time of the last drawing appears only in a page that draws the panel no more.
    notebook.page.wait_for_timeout((FOOT_SECONDS + 3) * 1000)
    notebook.screenshot("resources-live")
    hidden = len(foot(notebook))
    notebook.save()
    notebook.page.reload()
    # While the kernel runs a cell, the kernel does not answer a new page.
    notebook.wait_until_ready(kernel="unknown")
    notebook.page.wait_for_timeout((FOOT_SECONDS + 1) * 1000)
    notebook.screenshot("resources-reloaded")
    assert len(foot(notebook)) > 3 * hidden
    (lab.folder / "gate").touch()
    notebook.wait_until_ready()
    assert "done" not in notebook.cells()[0].shown
    notebook.start(1)
    said = notebook.wait_for(1, "the next cell")
    assert re.search(r"or reloaded before cell \[\d+\] had ended: `%dist_output -2` shows", said)
    notebook.start(2)
    notebook.wait_for(2, "done {0-1}")


UNTIL_GATE = """%%distributed
import pathlib, time
print("start", rank)
while not pathlib.Path("{gate}").exists(): time.sleep(0.05)
print("end", rank)"""

COMMAND = """([command, number]) => {
    window.jupyterapp.shell.currentWidget.content.activeCellIndex = number;
    return window.jupyterapp.commands.execute(command);
}"""


@pytest.mark.parametrize(("command", "number"), [("clear-cell-output", 1), ("move-cell-up", 0)])
def test_a_running_cell_may_be_cleared_or_moved(
    lab: Lab, notebook: Notebook, command: str, number: int
) -> None:
    """A cell that was cleared or moved while it ran has its whole output once when it ends."""
    notebook.fill(["'above'", UNTIL_GATE.format(gate=command), "'below'"])
    notebook.start(1)
    notebook.wait_for(1, "start 1")
    notebook.page.evaluate(COMMAND, [f"notebook:{command}", 1])
    if command == "clear-cell-output":
        assert notebook.cells()[1].shown == ""
    (lab.folder / command).touch()
    said = notebook.wait_for(number, "end 1")
    for text in ("start 0", "end 0", "start 1", "end 1", "2 ranks"):
        assert said.count(text) == 1
    notebook.wait_until_ready()
    notebook.save()
    saved = nbformat.read(lab.folder / "cells.ipynb", as_version=4)
    assert sum(len(cell.outputs) for cell in saved.cells) == 1


IS_WHOLE = """([number, count]) => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    const area = cells[number].node.querySelector(".jp-Cell-outputArea");
    const names = [...area.querySelectorAll("span")].filter(
        each => /^ranks? [0-9,-]+$/.test(each.textContent));
    return names.length === count && area.querySelector("img[src^='data:image/svg+xml']") !== null;
}"""

WAITS = """
import pathlib, time
while not pathlib.Path("{gate}").exists(): time.sleep(0.05)"""

# Cells, each followed by a wait, by the last text of the panel and its number of rank names.
STEADY = {
    ("loading", 1): 'print("loading")',
    ("rank 1", 2): 'print("rank", rank)',
    ("b 2", 2): 'for line in range(3): print("ab"[rank], line)',
    ("b 39", 2): 'for line in range(40): print("ab"[rank], line)',
    ("step 89", 1): 'for step in range(90): print("step", step, "loss", 1 / (1 + step + rank))',
    ("rank 1", 2, "figures"): "import matplotlib.pyplot as plt\n"
    "plt.figure(dpi=60); plt.plot(range(9)); plt.title(f'rank {rank}'); plt.show()",
}

# The height of a cell's output, and the places of the names of ranks.
MEASURE = """number => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    const area = cells[number].node.querySelector(".jp-Cell-outputArea");
    const {top, height} = area.getBoundingClientRect();
    const names = [...area.querySelectorAll("span")].filter(
        each => /^ranks? [0-9,-]+$/.test(each.textContent));
    const places = names.map(each => {
        const place = each.getBoundingClientRect();
        return [each.textContent, place.left, place.top - top];
    });
    return [...places, ["panel", height]];
}"""


@pytest.mark.parametrize("shown", STEADY, ids=[f"panel {number}" for number in range(6)])
def test_nothing_moves_when_a_cell_ends(
    lab: Lab, notebook: Notebook, shown: tuple[str, int]
) -> None:
    """When a cell ends, the panel's height and the places of its blocks stay, at any page width."""
    last, count, gate = *shown[:2], f"gate {[*STEADY].index(shown)}"
    notebook.fill([f"%%distributed\n{STEADY[shown]}{WAITS.format(gate=gate)}"])
    notebook.start(0)
    for text in (last, " · cpu "):
        notebook.wait_for(0, text)
    # Wait for the picture for a reloaded page, which comes after 2 s.
    notebook.page.wait_for_function(IS_WHOLE, arg=[0, count], polling=100)
    live, final = [], []
    for places, state in ((live, "live"), (final, "final")):
        for width in (700, 900, 1280):
            notebook.resize(width)
            places.append(notebook.page.evaluate(MEASURE, 0))
            notebook.picture(f"{gate}-{width}-{state}")
        (lab.folder / gate).touch()
        notebook.wait_for(0, "✓ 2")
        notebook.wait_until_ready()
    notebook.resize(WIDTH)
    assert [[name for name, *_ in each] for each in live] == [
        [name for name, *_ in each] for each in final
    ]
    moved = [
        abs(was - now)
        for before, after in zip(live, final, strict=True)
        for (_, *places), (_, *later) in zip(before, after, strict=True)
        for was, now in zip(places, later, strict=True)
    ]
    assert max(moved) <= 1  # sizes of characters and lines are no whole pixels


def test_cells_run_in_notebook_7_too(notebook: Notebook) -> None:
    """Cells of ranks run and are drawn in Notebook 7 as in JupyterLab."""
    notebook.fill(
        [
            "%%distributed\nprint(f'I am rank {rank} of {world_size}')",
            "%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()",
            "%%distributed\nfor step in range(99): track(loss=1 / (step + 1 + rank))",
            "%dist_gather t",
            "t",
        ]
    )
    notebook.save()
    with notebook.page.context.new_page() as page:
        page.goto(f"{notebook.page.url.partition('lab/')[0]}notebooks/{notebook.path}")
        cells = Notebook(page, notebook.path).run_all()
        Notebook(page, notebook.path).screenshot("notebook-7")
    assert [cell.errors for cell in cells if cell.errors] == []
    ranks, reduced, curves, _, gathered = [cell.shown for cell in cells]
    assert re.search(r"loss median 0.01005 · step 98\n0.01 to 0.0101 on 2 ranks", curves)
    assert cells[2].images == 1
    assert "I am rank 0 of 2" in ranks
    assert "I am rank 1 of 2" in ranks
    assert "2.0" in reduced
    assert gathered.count("tensor([2.])") == 2
