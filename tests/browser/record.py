"""Records the moving picture of the README from a real JupyterLab.

    python -m tests.browser.record [FILE]

Four ranks run the cells, and the picture shows the page as Chromium draws it, at the speed at
which the cells ran.  Only views in which nothing moves are shortened, or held until they are read.
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image, ImageDraw, ImageFont

from tests.browser.conftest import (
    PAINTED,
    Lab,
    Notebook,
    in_folder,
    jupyterlab,
    wait_for_idle_imports,
)
from tests.worlds import IDLE_IMPORTS

if TYPE_CHECKING:
    from playwright.sync_api import Page

PICTURE = Path(__file__).parents[2] / ".github" / "first-cells.webp"
MOST_BYTES = 1_500_000
WIDTH, HEIGHT, CAPTION_HEIGHT = 900, 690, 36
CAPTION_COLOURS = "#1f2328", "#f6f8fa"
FONT, FONT_SIZE = "DejaVuSans.ttf", 17

SAMPLES, COLOURS = 12, 128

SHORTEST, LONGEST_STILL = 0.07, 0.15
"""Seconds: frames that follow sooner are left out; a view that nothing changes is shown so long."""

SHARDS, FEATURES = 20, 256

LOAD = """%load_ext nbdist
from pathlib import Path
files = sorted(Path("model").iterdir())"""

MODEL = f"""%%distributed -n 4
from torch import nn
from tqdm.auto import tqdm

model = nn.Sequential(*[nn.TransformerEncoderLayer({FEATURES}, 8) for _ in files])
for layer, file in zip(model, tqdm(files, desc="load model")):
    layer.load_state_dict(torch.load(file))"""

TRAINING = f"""%%distributed
inputs, labels = torch.randn(4, 8, {FEATURES}), torch.randint(10, (8,))
features = model(inputs).mean(0).detach()
head = nn.parallel.DistributedDataParallel(nn.Linear({FEATURES}, 10))
optimizer = torch.optim.SGD(head.parameters(), lr=0.05)
for step in tqdm(range(140), desc="train"):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(head(features), labels)
    loss.backward()
    optimizer.step()
    track(step=step, loss=loss)
    if rank == 2 and step == 70:
        print(f"loss {{los:.3f}}")"""

TYPO, CORRECT = "los", "loss"

STILL_THERE = """%%distributed
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, loaded once")"""

# Shows a cell at the top of the page, or the end of its output at the bottom.
SCROLL = """([number, side]) => {
    const content = window.jupyterapp.shell.currentWidget.content;
    content.activeCellIndex = number;
    const box = document.querySelector(".jp-WindowedPanel-outer");
    box.scrollTop += content.widgets[number].node.getBoundingClientRect()[side]
        - box.getBoundingClientRect()[side];
}"""

# Selects a word of a cell, as a double click does, so that what is typed replaces the word.
SELECT = """([number, start]) => {
    const content = window.jupyterapp.shell.currentWidget.content;
    content.activeCellIndex = number;
    content.mode = "edit";
    const editor = content.widgets[number].editor;
    const [from, to] = start.map(each => editor.getPositionAt(each));
    editor.focus();
    editor.setSelection({start: from, end: to});
}"""


@dataclass
class Frame:
    """A view of the page, with its time in seconds and the line below it."""

    time: float
    png: bytes
    caption: str
    hold: float = 0.0


class Film:
    """The frames of a page, which Chromium sends whenever the page changes."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.caption = ""
        self.frames: list[Frame] = []
        self._chromium = page.context.new_cdp_session(page)
        self._chromium.on("Page.screencastFrame", self._add)
        self._chromium.send("Page.startScreencast", {"format": "png"})

    def _add(self, sent: dict[str, Any]) -> None:
        self._chromium.send("Page.screencastFrameAck", {"sessionId": sent["sessionId"]})
        png = base64.b64decode(sent["data"])
        self.frames.append(Frame(sent["metadata"]["timestamp"], png, self.caption))

    def hold(self, seconds: float) -> None:
        """Let the present view be shown for this time."""
        self.page.evaluate(PAINTED)
        self.page.wait_for_timeout(300)  # the frame is sent after it is drawn
        last = self.frames[-1]
        last.hold, last.caption = seconds, self.caption

    def stop(self) -> None:
        """Record nothing more."""
        self._chromium.send("Page.stopScreencast")
        self._chromium.detach()

    def write(self, file: Path) -> float:
        """Write an animated picture; return its length in seconds."""
        shown = self._shown()
        first, *others = in_few_colours([drawn(frame) for frame, _ in shown])
        first.save(
            file,
            save_all=True,
            append_images=others,
            duration=[round(1000 * seconds) for _, seconds in shown],
            loop=0,
            lossless=True,
            quality=80,
            method=2,
        )
        return sum(seconds for _, seconds in shown)

    def _shown(self) -> list[tuple[Frame, float]]:
        """Return the frames that are shown long enough to be seen, each with its seconds."""
        shown: list[tuple[Frame, float]] = []
        frames = sorted(self.frames, key=lambda frame: frame.time)
        for frame, after in zip(frames, [*frames[1:], None], strict=True):
            still = after.time - frame.time if after else LONGEST_STILL
            seconds = frame.hold or min(still, LONGEST_STILL)
            if shown and seconds < SHORTEST:
                last, so_far = shown[-1]
                shown[-1] = last, so_far + seconds
            else:
                shown.append((frame, seconds))
        return shown


def drawn(frame: Frame) -> Image.Image:
    """Return the picture of a frame, with its caption below."""
    view = Image.open(io.BytesIO(frame.png)).convert("RGB")
    text, background = CAPTION_COLOURS
    image = Image.new("RGB", (WIDTH, HEIGHT + CAPTION_HEIGHT), background)
    image.paste(view, (0, 0))
    font = ImageFont.truetype(FONT, FONT_SIZE)
    place = WIDTH // 2, HEIGHT + CAPTION_HEIGHT // 2
    ImageDraw.Draw(image).text(place, frame.caption, text, font, anchor="mm")
    return image


def in_few_colours(images: Sequence[Image.Image]) -> list[Image.Image]:
    """Return the images with the same few colours, which makes the picture a third as big."""
    some = images[:: max(1, len(images) // SAMPLES)]
    sample = Image.new("RGB", (WIDTH, sum(each.height for each in some)))
    for number, each in enumerate(some):
        sample.paste(each, (0, number * each.height))
    palette = sample.quantize(COLOURS)
    dither = Image.Dither.NONE
    return [each.quantize(palette=palette, dither=dither).convert("RGB") for each in images]


def act(lab: Lab, notebook: Notebook) -> Film:
    """Run the cells as a user does, and return the film of it."""
    page = lab.page
    notebook.start(0)
    notebook.ended()
    wait_for_idle_imports()
    page.evaluate("window.jupyterapp.commands.execute('statusbar:toggle')")
    page.evaluate(SCROLL, [1, "top"])
    film = Film(page)
    film.caption = "A model is loaded on four ranks, each a process that stays"
    film.hold(1.0)
    notebook.start(1)
    notebook.ended()
    film.hold(0.8)

    film.caption = "All ranks train it. The cell has a typo, which only rank 2 meets"
    page.evaluate(SCROLL, [2, "top"])
    film.hold(1.0)
    notebook.start(2)
    notebook.ended()
    film.caption = "Rank 2 fails; the ranks that wait for it are released, with their variables"
    film.hold(1.8)
    page.evaluate(SCROLL, [2, "bottom"])
    film.hold(1.8)

    page.evaluate(SCROLL, [2, "top"])
    film.caption = "The typo is corrected, and the same cell runs again"
    start = TRAINING.index(f"{{{TYPO}:") + 1
    page.evaluate(SELECT, [2, [start, start + len(TYPO)]])
    film.hold(0.5)
    page.keyboard.type(CORRECT, delay=150)
    film.hold(0.5)
    notebook.start(2)
    notebook.ended()
    film.hold(2.0)

    film.caption = "The model is still there: nothing was started or loaded again"
    page.evaluate(SCROLL, [3, "top"])
    notebook.start(3)
    notebook.ended()
    film.hold(2.0)
    film.stop()
    return film


def write_shards(folder: Path) -> None:
    """Write a model into files, a layer each."""
    folder.mkdir()
    for number in range(SHARDS):
        layer = torch.nn.TransformerEncoderLayer(FEATURES, 8)
        torch.save(layer.state_dict(), folder / f"{number:02}.pt")


def main() -> None:
    """Record the picture, and say how long and how big it is."""
    parser = argparse.ArgumentParser(description="Record the moving picture of the README.")
    parser.add_argument("file", nargs="?", type=Path, default=PICTURE)
    file = parser.parse_args().file
    with (
        tempfile.TemporaryDirectory() as place,
        jupyterlab(Path(place), **{IDLE_IMPORTS: "1"}) as jupyter,
        in_folder(jupyter, "demo") as lab,
    ):
        write_shards(lab.folder / "model")
        lab.write("first-cells.ipynb", [LOAD, MODEL, TRAINING, STILL_THERE])
        lab.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        film = act(lab, lab.open("first-cells.ipynb"))
    seconds = film.write(file)
    size = file.stat().st_size
    sys.stdout.write(f"{file}: {seconds:.1f} s, {size / 1e6:.2f} MB\n")
    if size > MOST_BYTES:
        raise SystemExit(f"the picture has more than {MOST_BYTES / 1e6} MB")


if __name__ == "__main__":
    main()
