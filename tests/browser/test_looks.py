"""Bars, figures, tables and failures in JupyterLab: where they are on the page, in both themes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import RUN_ALL, RUN_TIMEOUT, WIDTH
from tests.browser.test_quickstart import make_untrusted

if TYPE_CHECKING:
    from tests.browser.conftest import Lab, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

CELLS = {
    "load": "%load_ext nbdist",
    "bars": """%%distributed -n 4
import os, time
from tqdm.auto import tqdm
print("loading shards")
for step in (bar := tqdm(range(60), desc="train")):
    bar.set_postfix(loss=f"{2.3 - step / 50 + rank / 100:.3f}")
    while rank == 3 and step == 50 and not os.path.exists("looked"):
        time.sleep(0.05)
    time.sleep(0.06 if rank < 3 else 0.08)""",
    "nested": """%%distributed
for epoch in tqdm(range(2), desc="epoch"):
    for step in tqdm(range(8), desc="step", leave=False):
        time.sleep(0.02)""",
    "short": """%%distributed
for epoch in range(3):
    print(f"epoch {epoch} loss {2.3 - epoch / 2 + rank / 100:.3f}")""",
    "figures": """%%distributed
import matplotlib.pyplot as plt
plt.plot([0, 1, 2], [rank, 0, 3])
plt.title(f"loss of rank {rank}")
plt.show()""",
    "tables": """%%distributed
import pandas
pandas.DataFrame({"loss": [2.3 + rank, 1.1], "accuracy": [0.41, 0.87]})""",
    "widget": """%%distributed
import ipywidgets, warnings
warnings.warn("an old way of doing this")
ipywidgets.IntSlider(value=3)""",
    "long": """%%distributed -r 0
print("weights", " ".join(f"{number % 97 / 97:.3f}" for number in range(3300)), "END")""",
    "failed": """%%distributed
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 2)))
print("shard", rank // 2)
out = model(torch.randn(2, 4 + (rank == 2)))""",
}

# The places of the cell's images on the page, and of its blocks.
PLACES = """([number, kind]) => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    return [...cells[number].node.querySelectorAll(`.jp-Cell-outputArea ${kind}`)].map(each => {
        const {left, top, width, height} = each.getBoundingClientRect();
        return {left, top, width, height};
    });
}"""
DARK = """window.jupyterapp.commands.execute(
    "apputils:change-theme", {theme: "JupyterLab Dark"})"""


def number_of(name: str) -> int:
    return [*CELLS].index(name)


def places(notebook: Notebook, name: str, kind: str) -> list[dict[str, float]]:
    found: list[dict[str, float]] = notebook.page.evaluate(PLACES, [number_of(name), kind])
    return [place for place in found if place["width"]]


def in_a_row(found: list[dict[str, float]]) -> list[int]:
    """How many stand beside one another, row by row."""
    tops = [round(place["top"]) for place in found]
    assert tops == sorted(tops)
    return [tops.count(top) for top in dict.fromkeys(tops)]


def test_looks(lab: Lab) -> None:
    """What ranks show is side by side, aligned, in rank order, and reads the same untrusted."""
    lab.write("looks.ipynb", [*CELLS.values()])
    notebook = lab.open("looks.ipynb")
    notebook.wait_until_ready()
    notebook.page.evaluate(RUN_ALL)
    notebook.page.get_by_text("slowest", exact=True).first.wait_for()
    rows = places(notebook, "bars", "tr")
    bars = [place for place in places(notebook, "bars", "td span") if place["height"] == 10]
    notebook.picture_from(number_of("bars"), "looks-bars-live")
    live = notebook.cells()[number_of("bars")].shown
    (lab.folder / "looked").touch()
    assert in_a_row(rows) == [1] * 5  # a bar for each rank, and what they printed before
    assert len({round(bar["left"]) for bar in bars}) == 1
    assert re.search(r"rank 3\s+train\s+\d+%\s+\d+/60\s+\d\d:\d\d<\d\d:\d\d.*slowest", live)

    notebook.page.wait_for_function("window.nbdistRan !== null", timeout=RUN_TIMEOUT * 1000)
    notebook.wait_until_ready()
    check(notebook)
    notebook.picture_from(number_of("bars"), "looks-bars")
    notebook.picture_from(number_of("figures"), "looks-figures")
    notebook.picture_from(number_of("widget"), "looks-failed")
    notebook.save()
    notebook.page.evaluate(DARK)
    notebook.page.wait_for_timeout(1000)
    notebook.picture_from(number_of("bars"), "looks-bars-dark-700", 700)
    notebook.picture_from(number_of("figures"), "looks-figures-dark-700", 700)
    notebook.picture_from(number_of("widget"), "looks-failed-dark")
    notebook.page.close()
    make_untrusted(lab.folder / "looks.ipynb")
    reopened = lab.open("looks.ipynb")
    assert not reopened.is_trusted()
    check(reopened)
    reopened.picture_from(number_of("figures"), "looks-reopened-700", 700)


def check(notebook: Notebook) -> None:
    """All that can be measured on the page, at two widths."""
    cells = dict(zip(CELLS, notebook.cells(), strict=True))
    assert [name for name, cell in cells.items() if cell.errors] == ["failed"]
    for name, ranks in (("bars", 4), ("short", 4), ("figures", 4), ("tables", 4)):
        found = re.findall(r"^rank (\d)", cells[name].shown, re.MULTILINE)
        assert found == [str(rank) for rank in range(ranks)]
    assert "loss 1.300 (rank 0) to 1.330 (rank 3)" in cells["short"].shown
    assert "Loading widget" not in cells["widget"].shown
    assert "IntSlider(value=3)" in cells["widget"].shown
    assert "line 3: UserWarning: an old way of doing this" in cells["widget"].shown
    failed = cells["failed"].shown
    assert failed.index("rank 2 ✗") < failed.index("ranks 0-1") < failed.index("rank 3")
    assert "calls in torch" in failed

    notebook.resize(WIDTH)
    assert in_a_row(places(notebook, "figures", "img")) == [2, 2]
    assert in_a_row(places(notebook, "tables", ".dataframe")) == [4]
    (line,) = places(notebook, "long", "details details")
    assert line["height"] < 4 * 20
    notebook.resize(700)
    images = places(notebook, "figures", "img")
    assert in_a_row(images) == [2, 2]
    assert max(image["left"] + image["width"] for image in images) < 700
    assert in_a_row(places(notebook, "tables", ".dataframe"))[0] in (2, 3)
    for image in images:
        assert 1.1 < image["width"] / image["height"] < 1.6
    notebook.resize(WIDTH)
