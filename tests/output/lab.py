"""Transcripts of made-up cells, their panels as HTML and text, and a check of a panel's HTML."""

from __future__ import annotations

import base64
import io
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from html.parser import HTMLParser
from typing import Any

from tqdm.std import tqdm

from nbdist.output.events import Died, Display, Done, Failure, Output, Text
from nbdist.output.html import panel_html
from nbdist.output.layout import final_layout, live_layout
from nbdist.output.panel import Panel as Shown
from nbdist.output.panel import PanelBlock, PanelItem
from nbdist.output.tabs import final_tabs
from nbdist.output.text import panel_text
from nbdist.output.transcript import Transcript

# The markup that a panel may have; `test_html` compares tags and styles with JupyterLab's list.
TAGS = {"div", "pre", "span", "details", "summary", "table", "tbody", "tr", "td", "img"}
ATTRIBUTES = {"style", "open", "src", "title", "width", "height"}
STYLES = {
    *("align-items", "background-color", "border", "border-bottom", "border-collapse"),
    *("border-left", "border-radius", "box-sizing", "color", "column-gap", "cursor", "display"),
    *("flex", "flex-direction", "flex-wrap", "font-family", "font-size", "font-style"),
    *(
        "font-weight",
        "height",
        "justify-content",
        "line-height",
        "margin",
        "max-height",
        "max-width",
        "min-width",
    ),
    *("opacity", "order", "overflow", "overflow-wrap", "overflow-x", "padding", "padding-left"),
    *("table-layout", "text-align", "text-decoration", "text-overflow", "vertical-align"),
    *("white-space", "width", "word-break", "word-spacing"),
}


# Markup that JupyterLab removes from an untrusted notebook, so that tabs open independently.
TRUSTED_ATTRIBUTES, TRUSTED_STYLES = {"name"}, {"container-type"}


class Panel(HTMLParser):
    """A parsed panel, with text and images; fails on a tag that is not allowed or not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.stack: list[str] = []
        self.opened: list[bool] = []
        self.images: list[dict[str, str | None]] = []
        self.feed(html)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        assert {name for name, _ in attrs} <= ATTRIBUTES | TRUSTED_ATTRIBUTES
        rules = [each.partition(":") for each in str(dict(attrs).get("style", "color:")).split(";")]
        assert {name for name, _, _ in rules} <= STYLES | TRUSTED_STYLES
        # JupyterLab drops a value with a variable or `anywhere`, and gives no message.
        assert all("var(" not in value and "anywhere" not in value for *_, value in rules)
        if tag == "details":
            self.opened.append("open" in dict(attrs))
        if tag == "img":
            self.images.append(dict(attrs))
        else:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag
        if tag in {"div", "pre", "summary", "tr"}:
            self.words.append("\n")

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def lines(self) -> list[str]:
        return [line for line in "".join(self.words).split("\n") if line]


# --- outputs of a rank --------------------------------------------------------------------------


def out(text: str) -> Text:
    return Text("stdout", text)


def err(text: str) -> Text:
    return Text("stderr", text)


def value(text: str) -> Display:
    return Display({"text/plain": text}, {}, is_result=True)


def drawing(text: str, display_id: str | None = None) -> Display:
    """A display that has only text."""
    return Display({"text/plain": text}, {}, display_id)


def figure(title: str) -> Display:
    """A figure as matplotlib sends it, whose PNG has only a header and the title."""
    size = struct.pack(">II", 300, 200)
    png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + size + title.encode() * 1000
    text = "<Figure size 300x200 with 1 Axes>"
    data = {"image/png": base64.encodebytes(png).decode(), "text/plain": text}
    return Display(data, {"image/png": {"width": 300, "height": 200}})


def lines(count: int, text: str = "") -> Text:
    """Text of `count` lines, each with its number."""
    return out("".join(f"{text}{number}\n" for number in range(count)))


def failure(message: str = "bad", time_ns: int = 1, name: str = "E", line: int = 2) -> Failure:
    """An exception in a line of a cell."""
    place = f"\x1b[36mCell In[1], line {line}\x1b[39m"
    return Failure(name, message, ("-----", place, f"{name}: {message}"), time_ns)


def nested_bars(epochs: int = 4, steps: int = 8) -> list[str]:
    """Return tqdm's output after each update of nested bars, of 4 epochs of 8 steps in all."""
    written, found = io.StringIO(), []
    outer = tqdm(total=4, file=written, desc="epoch", position=0, mininterval=0)
    for _ in range(epochs):
        inner = tqdm(total=8, file=written, desc="step", position=1, mininterval=0, leave=False)
        for _ in range(steps):
            inner.update()
            found.append(written.getvalue())
        inner.close()
        outer.update()
        found.append(written.getvalue())
    outer.close()
    return [*found, written.getvalue()]


# --- cells --------------------------------------------------------------------------------------


def make(
    ranks: int,
    said: Callable[[int], Sequence[Output]],
    *,
    finished: bool = True,
    seconds: Callable[[int], float] = lambda rank: 1.2,
) -> Transcript:
    """Return the transcript of a cell on `ranks` ranks; a rank that sent a Failure has failed."""
    transcript = Transcript(range(ranks))
    transcript.start(0.0)
    for rank in range(ranks):
        outputs = said(rank)
        failed = any(isinstance(output, Failure) for output in outputs)
        for output in outputs:
            transcript.receive(rank, output, 1.2)
        if finished and not any(isinstance(output, Died) for output in outputs):
            transcript.receive(rank, Done("error" if failed else "ok", seconds(rank)), 1.2)
    return transcript


def running(ranks: int, said: Callable[[int], Sequence[Output]]) -> Transcript:
    """Return the transcript of a cell that has not finished on any rank."""
    return make(ranks, said, finished=False)


def ranks_of(blocks: Iterable[PanelBlock]) -> list[tuple[int, ...]]:
    """Return the ranks of each block."""
    return [block.group.ranks for block in blocks]


def kinds(items: Iterable[PanelItem]) -> list[object]:
    """Replace each list of lines by its length, and keep all other items."""
    return [len(item) if isinstance(item, list) else item for item in items]


def final_html(transcript: Transcript, *options: Any) -> str:
    """Return the HTML of a finished cell's panel."""
    return panel_html(final_layout(transcript, *options))


def tabs_of(transcript: Transcript, name: str = "x") -> Shown:
    """Return the panel of a finished cell whose ranks have tabs, with `name` for its tabs."""
    return final_tabs(final_layout(transcript), transcript, {}, name)


def tabs_html(transcript: Transcript) -> str:
    """Return the HTML of a finished cell's panel with tabs."""
    return panel_html(tabs_of(transcript))


def final_text(transcript: Transcript, *options: Any) -> str:
    """Return a finished cell's panel as text."""
    return panel_text(final_layout(transcript, *options))


def live_html(transcript: Transcript, now: float = 1.0, note: str = "") -> str:
    """Return the HTML of a running cell's panel."""
    return panel_html(live_layout(transcript, now, note))


def live_text(transcript: Transcript, now: float = 1.0, note: str = "") -> str:
    """Return a running cell's panel as text."""
    return panel_text(live_layout(transcript, now, note))


def unfold(text: str, ranks: int) -> list[str]:
    """Return the text of each rank from a text with sets such as `cuda:{0-3}`, `0x{7fa0,7fb0}`."""
    parts = re.split(r"(0x)?\{([^}]*)\}", text)
    said = [parts[0]] * ranks
    for start, body, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        values = [value for run in body.split(",") for value in _values(run.strip())]
        said = [f"{own}{start or ''}{v}{rest}" for own, v in zip(said, values, strict=True)]
    return said


def _values(run: str) -> Iterator[str]:
    value, _, times = run.partition("*")
    first, _, last = value.partition("-")
    if first and last:
        yield from (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
    else:
        yield from [value] * int(times or 1)
