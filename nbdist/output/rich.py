"""Figures, tables and HTML of a rank as part of one panel.  Pure.

What the page has to render itself (Markdown, LaTeX, JSON, plotly, vega, HTML that is broken or
runs scripts) cannot be part of it: `leftovers`, to be displayed below the panel.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from html import escape
from html.parser import HTMLParser
from typing import Any

from nbdist.output.events import Display, MimeBundle, text_of
from nbdist.output.transcript import Transcript
from nbdist.words import name_ranks

_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_EMBEDDED = frozenset({"text/plain", "text/html", "image/svg+xml", *_IMAGES})
# What stands next to HTML or an image of the same thing, and is not to be preferred to it.
_BESIDE = frozenset({"application/vnd.dataresource+json", "text/latex", "text/markdown"})
_KINDS = {
    "text/markdown": "Markdown",
    "text/latex": "LaTeX",
    "text/html": "HTML",
    "application/json": "JSON",
    "application/geo+json": "GeoJSON",
    "application/vnd.plotly.v1+json": "plotly figure",
}
MOST_BELOW = 32
"""Displays of a cell that are shown below its panel."""

_LONGEST_HTML = 200_000
_BASE64 = re.compile(r"[A-Za-z0-9+/=]*\Z")
_VOID = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input"}
    | {"link", "meta", "param", "source", "track", "wbr"}
)
# HTML lets these end without a tag.
_LENIENT = frozenset(
    ["p", "li", "dt", "dd", "tr", "td", "th", "thead", "tbody", "tfoot", "option", "colgroup"]
)


def leftovers(
    transcript: Transcript, ranks: Collection[int] | None = None
) -> list[tuple[tuple[int, ...], Display]]:
    """Find what only the page can render, with the ranks that show it; of equal ones the first.

    In the order of the ranks, all or some, and of what each has shown; a rank that shows the
    same twice has two.
    """
    found: dict[object, tuple[list[int], Display]] = {}
    for each in transcript:
        if ranks is not None and each.rank not in ranks:
            continue
        times: Counter[bytes] = Counter()
        for shown in each.displays:
            if is_leftover(shown.display.data):
                key = shown.content
                found.setdefault((key, times[key]), ([], shown.display))[0].append(each.rank)
                times[key] += 1
    return [(tuple(those), display) for those, display in found.values()]


def kind_text(data: MimeBundle) -> str:
    """Say what a bundle is that only the page can render: `Markdown`, or its mime type."""
    kinds = [kind for kind in data if kind != "text/plain"]
    own = [kind for kind in kinds if kind not in _EMBEDDED | _BESIDE]
    kind = (own or kinds)[0]
    return _KINDS.get(kind, kind)


def figures(transcript: Transcript) -> list[tuple[str, Display]]:
    """Find the images that are part of the panel, each with its ranks, for programs."""
    return [
        (ranks, replace(display, data=_images(display.data)))
        for ranks, display in _displays(transcript)
        if (html := embed(display)) is not None and is_image(html)
    ]


def _displays(transcript: Transcript) -> list[tuple[str, Display]]:
    groups = transcript.groups()
    return [(name_ranks(each.ranks), shown.display) for each in groups for shown in each.displays]


def is_leftover(data: MimeBundle) -> bool:
    """Say whether the bundle can only be shown by the page's own renderers."""
    if "text/html" in data and not _is_embeddable(text_of(data["text/html"])):
        return True
    others = data.keys() - _EMBEDDED
    has_picture = any(kind in data for kind in _EMBEDDED - {"text/plain"})
    return bool(others - _BESIDE) if has_picture else bool(others)


def embed(display: Display) -> str | None:
    """Write the display as HTML, None if it has only text."""
    data, metadata = display.data, display.metadata
    if is_leftover(data):
        return None
    if "text/html" in data:
        return text_of(data["text/html"])
    if "image/svg+xml" in data:
        encoded = b64encode(text_of(data["image/svg+xml"]).encode()).decode()
        return _image("image/svg+xml", encoded, metadata)
    for kind in _IMAGES:
        if kind in data:
            encoded = "".join(text_of(data[kind]).split())
            return _image(kind, encoded, metadata) if _BASE64.match(encoded) else None
    return None


def _images(data: MimeBundle) -> dict[str, object]:
    """Keep the images of a bundle."""
    return {kind: data[kind] for kind in (*_IMAGES, "image/svg+xml") if kind in data}


def is_image(html: str) -> bool:
    """Say whether this result of `embed` is an image: a panel's size is counted without."""
    return html.startswith("<img ")


def _image(kind: str, encoded: str, metadata: MimeBundle) -> str:
    found = metadata.get(kind)
    about: Mapping[str, Any] = found if isinstance(found, Mapping) else metadata
    size = "".join(
        f' {side}="{value:.0f}"'
        for side in ("width", "height")
        if isinstance(value := about.get(side), (int, float))
    )
    # Where it has to be less wide it is less high too, whatever its attributes say.
    shape = "max-width:100%;height:auto"
    background = {"light": ";background-color:#ffffff", "dark": ";background-color:#000000"}.get(
        str(about.get("needs_background")), ""
    )
    return f'<img src="data:{kind};base64,{escape(encoded)}"{size} style="{shape}{background}">'


def _is_embeddable(html: str) -> bool:
    return len(html) <= _LONGEST_HTML and _is_contained(html)


@lru_cache(maxsize=256)
def _is_contained(html: str) -> bool:
    """Say whether the markup has no scripts and closes what it opens: nothing leaks out."""
    parser = _Balance()
    parser.feed(html)
    parser.close()
    return parser.is_fine and not parser.open


class _Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.is_fine = True

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.is_fine = False
        elif tag not in _VOID and tag not in _LENIENT:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # `<div/>` opens a div in HTML; inside an SVG, `<path/>` is complete.
        if "svg" not in self.open:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID or tag in _LENIENT:
            return
        if not self.open or self.open.pop() != tag:
            self.is_fine = False
