"""All that ranks show in JupyterLab, and the quickstart, as their readers see them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
from nbconvert import HTMLExporter

from tests.browser.conftest import LOOK_MS, NO_IDLE_IMPORTS, WIDTH, wait_for_idle_imports
from tests.notebooks.test_notebooks import QUICKSTART, check_run, cleared, text

if TYPE_CHECKING:
    from pathlib import Path

    from tests.browser.conftest import Lab, Notebook


def test_the_quickstart_trains_on_four_ranks(lab: Lab) -> None:
    """Run All trains on four ranks in a quickstart without outputs, with results as saved."""
    saved, copy = nbformat.read(QUICKSTART, as_version=4), lab.folder / QUICKSTART.name
    nbformat.write(cleared(saved), copy)
    notebook = lab.open(QUICKSTART.name)
    assert not any(cell.shown for cell in notebook.cells())
    notebook.start(1)
    notebook.ended()
    wait_for_idle_imports()
    cells = notebook.run_all(below=2)
    notebook.screenshot(QUICKSTART.stem)
    [(error,)] = [cell.errors for cell in cells if cell.errors]
    assert "AttributeError: 'Tensor' object has no attribute 'flaten'" in error
    prompts = [cell.prompt for cell in cells]
    assert all(re.fullmatch(r"\[\d+\]:", prompt) for prompt in prompts), " ".join(prompts)
    assert sum(cell.images for cell in cells) == 4  # one of them is a curve
    shown = "\n".join(cell.shown for cell in cells)
    assert shown.count("4 ranks") >= 4
    assert re.search(r"ranks 0-3\s+epochs\s+16/16", shown)
    assert re.search(r"loss median 0\.0\d+ · step 191", shown)
    notebook.save()
    check_run(saved, nbformat.read(copy, as_version=4))
    for each in (shown, text(saved)):
        assert all(f"I am rank {rank} of 4" in each for rank in range(4))
        [accuracy] = re.findall(r"accuracy (\d+\.\d)%", each)
        assert float(accuracy) > 95


CELLS = {
    "load": NO_IDLE_IMPORTS + "%load_ext nbdist",
    "bars": """%%distributed -n 4
import os, time
from tqdm.auto import tqdm
print("loading shards")
for step in (bar := tqdm(range(60), desc="train", mininterval=0)):
    bar.set_postfix(loss=f"{2.3 - step / 50 + rank / 100:.3f}")
    while step == 50 - 20 * (rank == 3) and not os.path.exists("looked"):
        time.sleep(0.05)""",
    "postfix": """%%distributed
from pathlib import Path
for step in (bar := tqdm(range(60), desc="epoch 1", mininterval=0)):
    time.sleep(0.02)
    bar.set_postfix(loss=f"{2.3 + rank / 100:.2f}", lr=0.001)
    while step == 50 - 20 * (rank == 3) and not Path("read").exists(): time.sleep(0.05)""",
    "nested": """%%distributed
for epoch in tqdm(range(2), desc="epoch"):
    for step in tqdm(range(8), desc="step", leave=False):
        time.sleep(0.02)""",
    "named": """%%distributed
for step in tqdm(range(20), desc="validating imagenet-1k fold"):
    time.sleep(0.05)""",
    "curves": """%%distributed
import math, random
for step in range(200):
    loss = 2.3 * math.exp(-step / 60) + 0.2 * random.random()
    track(loss=loss + (rank == 2) * max(0, step - 100) / 80, lr=0.1 * min(step / 50, 0.99**step))
    time.sleep(0.005)
    while step == 180 and not os.path.exists("tracked"): time.sleep(0.05)""",
    "short": """%%distributed
for epoch in range(3):
    print(f"epoch {epoch} loss {2.3 - epoch / 2 + rank / 100:.3f}")""",
    "figures": """%%distributed
import matplotlib.pyplot as plt
plt.plot([0, 1, 2], [rank, 0, 3])
plt.title(f"loss of rank {rank}")
plt.show()""",
    "images": """%%distributed -r 0
import base64, io
from PIL import Image
for kind in ("webp", "avif"):
    Image.new("RGB", (40, 30), "green").save(file := io.BytesIO(), kind)
    encoded = base64.b64encode(file.getvalue()).decode()
    display({f"image/{kind}": encoded, "text/plain": kind}, raw=True)""",
    "tables": """%%distributed
import pandas
pandas.DataFrame({"loss": [2.3 + rank, 1.1], "accuracy": [0.41, 0.87]})""",
    "widget": """%%distributed -r 0
import ipywidgets, warnings
warnings.warn("an old way of doing this")
ipywidgets.IntSlider(value=3)""",
    "kinds": """%%distributed
from IPython.display import *
print("rank", rank)
display(Markdown("**done** with `everything`"), Math(r"x^2 + \\frac{1}{2}"))
JSON({"rank": rank})""",
    "title": "%%distributed\n%%markdown\n# A title of ranks",
    "plotly": """%%distributed -r 0
import plotly.graph_objects as go
go.Figure(go.Scatter(y=[1, 2, 0]), layout={"height": 220})""",
    "sympy": "%%distributed -r 0\nimport sympy\nsympy.Symbol('alpha') ** 2",
    "steps": """%%distributed -r 0
for step in range(3):
    clear_output(wait=True)
    display(Markdown(f"step **{step}**"))""",
    "straggler": """%%distributed
from pathlib import Path
for step in range(2):
    Path(f"{step} {rank}").touch()
    while rank == 2 and len([*Path().glob(f"{step} *")]) < 4: time.sleep(0.01)
    time.sleep(0.5 * (rank == 2))
    dist.all_reduce(torch.ones(1))""",
    "timeline": "%dist_timeline",
    "status": "%dist_status",
    "long": """%%distributed -r 0
print("weights", " ".join(f"{number % 97 / 97:.3f}" for number in range(3300)), "END")""",
    "failed": """%%distributed
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 2)))
print("shard", rank // 2)
out = model(torch.randn(2, 4 + (rank == 2)))
dist.barrier()""",
}

# The places on the page of a cell's elements, such as images or rows.
PLACES = """([number, kind]) => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    return [...cells[number].node.querySelectorAll(`.jp-Cell-outputArea ${kind}`)].map(each => {
        const {left, top, width, height} = each.getBoundingClientRect();
        return {left, top, width, height};
    });
}"""
# Whether the live cell has a row for each rank's bar, and the slowest rank is marked.
HAS_BARS = """number => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    const all = [...cells[number].node.querySelectorAll(".jp-Cell-outputArea tr")];
    const rows = all.filter(row => row.textContent.includes("train"));
    return rows.length === 4 && rows.some(row => /rank 3.*slowest/s.test(row.textContent));
}"""

# Whether the live cell has a row for each rank, with all text behind the bar.
HAS_POSTFIX = """number => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    const all = [...cells[number].node.querySelectorAll(".jp-Cell-outputArea tr")];
    const rows = all.filter(row => /(50|51|30|31)\\/60/.test(row.textContent));
    return rows.length === 4 && rows.some(row => /rank 3.*slowest/s.test(row.textContent));
}"""

# Whether the live cell has two curves, with the text about them.
HAS_CURVES = """number => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    const shown = cells[number].node.querySelector(".jp-Cell-outputArea");
    return shown?.querySelectorAll("img").length === 2 && /loss.*4 ranks/s.test(shown.innerText);
}"""

SCROLL = """number =>
    window.jupyterapp.shell.currentWidget.content.widgets[number].node.scrollIntoView()"""


def number_of(name: str) -> int:
    return [*CELLS].index(name)


def places(notebook: Notebook, name: str, kind: str) -> list[dict[str, float]]:
    found: list[dict[str, float]] = notebook.page.evaluate(PLACES, [number_of(name), kind])
    return [place for place in found if place["width"]]


def in_a_row(found: list[dict[str, float]]) -> list[int]:
    """Return how many places each row has, from top to bottom."""
    tops = [round(place["top"]) for place in found]
    assert tops == sorted(tops)
    return [tops.count(top) for top in dict.fromkeys(tops)]


def test_outputs_of_ranks_are_aligned_in_order(lab: Lab) -> None:
    """Outputs of ranks are side by side, aligned, in rank order, and equal in an untrusted file."""
    lab.write("looks.ipynb", [*CELLS.values()])
    notebook = lab.open("looks.ipynb")
    notebook.start_all()
    notebook.page.wait_for_function(HAS_BARS, arg=number_of("bars"), polling=LOOK_MS)
    rows = places(notebook, "bars", "tr")[:4]
    bars = [place for place in places(notebook, "bars", "td span") if place["height"] == 10]
    notebook.page.evaluate(SCROLL, number_of("bars"))
    notebook.picture("looks-bars-live")
    live = notebook.cells()[number_of("bars")].shown
    (lab.folder / "looked").touch()
    assert in_a_row(rows) == [1] * 4
    assert "loading shards" in live  # below the table
    assert len({round(bar["left"]) for bar in bars}) == 1
    assert re.search(r"rank 3\s+train\s+\d+%\s+slowest\s+\d+/60\s+\d\d:\d\d<\d\d:\d\d", live)

    notebook.page.wait_for_function(HAS_POSTFIX, arg=number_of("postfix"), polling=LOOK_MS)
    notebook.page.evaluate(SCROLL, number_of("postfix"))
    check_postfix(notebook)
    (lab.folder / "read").touch()

    notebook.page.wait_for_function(HAS_CURVES, arg=number_of("curves"), polling=LOOK_MS)
    notebook.page.evaluate(SCROLL, number_of("curves"))
    notebook.picture("looks-curves-live")
    (lab.folder / "tracked").touch()

    notebook.ended()
    check(notebook)
    notebook.screenshots("looks")
    notebook.save()
    check_file(lab.folder / "looks.ipynb")
    lab.close()
    # JupyterLab has signed its saved file; after a change, as by mail, the file is not trusted.
    content = nbformat.read(lab.folder / "looks.ipynb", as_version=4)
    content.metadata["came_by"] = "mail"
    nbformat.write(content, lab.folder / "looks.ipynb")
    reopened = lab.open("looks.ipynb")
    assert not reopened.is_trusted()
    check(reopened)
    reopened.screenshot("looks-reopened-700", 700)


def check_postfix(notebook: Notebook) -> None:
    """Assert that a live row shows all text behind the bar: below the bar on a narrow page."""
    heights = {}
    for width in (700, 900, 1280):
        notebook.resize(width)
        rows, cells = (places(notebook, "postfix", kind) for kind in ("tr", "td"))
        texts = places(notebook, "postfix", "td div > span:last-child")
        meters = places(notebook, "postfix", "td div > span:first-child")
        assert len(rows) == len(texts) == len(meters) == 4
        assert max(cell["left"] + cell["width"] for cell in cells) < width
        assert max(text["left"] + text["width"] for text in texts) < width
        assert len({round(text["left"]) for text in texts}) == 1
        # The text is in one line: next to the bar, or below the bar.
        assert max(text["height"] for text in texts) < 1.5 * max(m["height"] for m in meters)
        heights[width] = rows[0]["height"] / meters[0]["height"]
        notebook.picture(f"looks-postfix-live-{width}")
    notebook.resize(WIDTH)
    assert heights[700] > 1.7
    assert max(heights[900], heights[1280]) < 1.5


def check_file(file: Path) -> None:
    """Assert that the saved file and its HTML have the outputs that panels cannot embed."""
    saved = nbformat.read(file, as_version=4)
    outputs = [output for cell in saved.cells for output in cell.outputs]
    assert sum("text/markdown" in output.get("data", {}) for output in outputs) == 3
    assert "application/vnd.plotly.v1+json" in str(outputs)
    assert "CPU cores" not in str(outputs)
    assert "── tracked ──\nloss " in saved.cells[number_of("curves")].outputs[0].data["text/plain"]
    html, _ = HTMLExporter().from_notebook_node(saved)
    assert "<strong>done</strong>" in html
    assert "rank 2 left the band" in html


def check(notebook: Notebook) -> None:
    """Assert all that can be measured on the page, at two widths."""
    cells = dict(zip(CELLS, notebook.cells(), strict=True))
    errors = {name: cell.errors for name, cell in cells.items() if cell.errors}
    assert [*errors] == ["failed"], errors
    assert re.search(r"^ranks 0-3\s+train\s+60/60\s", cells["bars"].shown, re.MULTILINE)
    assert re.search(r"^ranks 0-3\s+epoch\s+2/2\s", cells["nested"].shown, re.MULTILINE)
    for name, ranks in (("short", 4), ("figures", 4), ("tables", 4)):
        found = re.findall(r"^rank (\d)", cells[name].shown, re.MULTILINE)
        assert found == [str(rank) for rank in range(ranks)]
    assert "loss 1.300 (rank 0) to 1.330 (rank 3)" in cells["short"].shown
    assert re.search(
        r"loss median \d.*\n.* on 4 ranks · log scale\n"
        r"rank 2 left the band from (?:about )?step \d+ on",
        cells["curves"].shown,
    )
    assert "widget, shown below" in cells["widget"].shown
    assert "Error displaying widget" not in cells["widget"].shown
    assert "line 3: UserWarning: an old way of doing this" in cells["widget"].shown
    assert re.search(r"ranks 0-3\s+done with everything", cells["kinds"].shown)
    for name, said in {
        "kinds": "Markdown, shown below",
        "title": "A title of ranks",
        "plotly": "rank 0",
        "sympy": "rank 0",
        "steps": "step 2",
        "timeline": "for rank 2, which came last to 2 of them",
        "status": "idle",
    }.items():
        assert said in cells[name].shown
    assert "step 1" not in cells["steps"].shown
    # Blocks that would say nothing else are left out; captions below the panel name the ranks.
    assert not [name for name in ("plotly", "sympy") if "shown below" in cells[name].shown]
    assert "others wait for this rank" in cells["timeline"].shown
    rows = places(notebook, "timeline", "img")
    assert in_a_row(rows) == [1] * 4
    assert len({(row["left"], row["width"]) for row in rows}) == 1
    for name in ("strong", "mjx-container"):
        assert notebook.page.locator(f".jp-OutputArea-output {name}").count() >= 2
    failed = cells["failed"].shown
    assert failed.index("rank 2 ✗") < failed.index("ranks 0-1") < failed.index("rank 3")
    assert "✗ 1 · 3 released" in failed
    assert "calls in torch" in failed

    notebook.resize(WIDTH)
    assert in_a_row(places(notebook, "figures", "img")) == [2, 2]
    # An image that the browser cannot read would have another size.
    sizes = [(image["width"], image["height"]) for image in places(notebook, "images", "img")]
    assert sizes == [(40, 30)] * 2  # one for each kind in the cell "images"
    assert in_a_row(places(notebook, "tables", ".dataframe")) == [4]
    (line,) = places(notebook, "long", "details details")
    assert line["height"] < 4 * 20
    notebook.resize(700)
    images = places(notebook, "figures", "img")
    assert in_a_row(images) == [2, 2]
    assert max(image["left"] + image["width"] for image in images) < 700
    assert in_a_row(places(notebook, "tables", ".dataframe")) == [2, 2]
    for name in ("bars", "nested", "named"):
        assert max(cell["left"] + cell["width"] for cell in places(notebook, name, "td")) < 660
    curves = places(notebook, "curves", "img")
    assert in_a_row(curves) == [2]
    assert max(image["left"] + image["width"] for image in curves) < 700
    for image in images:
        assert 1.1 < image["width"] / image["height"] < 1.6
    notebook.resize(WIDTH)
