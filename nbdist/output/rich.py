"""Figures, tables, HTML and tracebacks of a rank as part of one panel.  Pure.

What the page has to render itself (Markdown, LaTeX, JSON, plotly, vega, HTML that is broken or
runs scripts) cannot be part of it: `leftovers`, to be displayed below the panel.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape
from html.parser import HTMLParser
from itertools import groupby
from typing import Any

from nbdist.output.ansi import ansi_html, strip
from nbdist.output.events import Display, MimeBundle, text_of
from nbdist.output.transcript import Transcript
from nbdist.output.wording import LINES, clip, dim
from nbdist.words import count, name_ranks

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


# --- tracebacks in parts ----------------------------------------------------------------------


_FRAME = re.compile(
    r"(?:Cell |Input )?In ?\[|File |<ipython-input|(?:/|~/|\.\.?/)\S+(?::\d+)?,? in "
    r"|\[\.\.\. skipping"
)
_NEXT_ERROR = re.compile(r"During handling of the above|The above exception was the direct")
_LIBRARIES = (
    re.compile(r"(?:site|dist)-packages/([\w-]+)"),
    re.compile(r"lib/python\d[\d.]*/([\w-]+)"),
    re.compile(r"<frozen (\w+)"),
)
_ARROW = re.compile(r"-+> ?\d*")
_FEWEST_FOLDED = 3
_MOST_LIBRARIES = 3


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a traceback; `folded` says what they are where they need not be seen."""

    rows: tuple[str, ...]
    folded: str = ""

    @property
    def height(self) -> int:
        """How many rows are seen."""
        return 1 if self.folded else len(self.rows)


def parted(text: str) -> list[Part]:
    """Part a traceback: of three calls in libraries or more, one after the other, a folded one.

    The last call before an error is always seen: it raised it.
    """
    frames = [*_frames(text.split("\n"))]
    last = [
        number + 1 == len(frames) or bool(_NEXT_ERROR.match(strip(frames[number + 1][0])))
        for number in range(len(frames))
    ]
    kinds = [
        "" if is_last else _library(frame) for frame, is_last in zip(frames, last, strict=True)
    ]
    parts = []
    for in_library, run in groupby(zip(frames, kinds, strict=True), key=lambda pair: bool(pair[1])):
        pairs = [*run]
        rows = tuple(row for frame, _ in pairs for row in frame)
        is_long = in_library and len(pairs) >= _FEWEST_FOLDED
        parts.append(Part(rows, _label(kind for _, kind in pairs) if is_long else ""))
    return parts


def _frames(rows: Iterable[str]) -> Iterator[list[str]]:
    """Yield the rows of each call, and those before the first one."""
    frame: list[str] = []
    for row in rows:
        plain = strip(row)
        if frame and (_FRAME.match(plain) or _NEXT_ERROR.match(plain)):
            yield frame
            frame = []
        frame.append(row)
    yield frame


def _library(frame: list[str]) -> str:
    """Name the library that a call is in, "" for the user's own code."""
    head = strip(frame[0])
    if not _FRAME.match(head):
        return ""
    return next((found[1] for each in _LIBRARIES if (found := each.search(head))), "")


def _label(libraries: Iterable[str]) -> str:
    names = [*libraries]
    some = [*dict.fromkeys(names)]
    more = [] if len(some) <= _MOST_LIBRARIES else ["…"]
    return f"… {count(len(names), 'call')} in {', '.join([*some[:_MOST_LIBRARIES], *more])}"


def shortened(text: str, most: int) -> list[Part]:
    """Part it so that about `most` rows are seen: the first of the user's own, and the last."""
    parts = parted(text)
    if sum(part.height for part in parts) <= most + 1:
        return parts
    rows = [row for part in parts for row in ([part.folded] if part.folded else part.rows)]
    own = _own_line(rows)
    last = rows[-most:]
    first = [row for row in dict.fromkeys([rows[0], *own]) if row not in last]
    left = len(rows) - len(first) - len(last)
    return [Part((*first, f"… {left} lines …", *last))]


def _own_line(rows: list[str]) -> list[str]:
    """Find the first call, which is the cell's, and its line."""
    heads = [number for number, row in enumerate(rows) if _FRAME.match(strip(row))]
    if not heads:
        return []
    end = heads[1] if len(heads) > 1 else len(rows)
    arrows = [row for row in rows[heads[0] : end] if _ARROW.match(strip(row))]
    return [rows[heads[0]], *arrows[:1]]


def traceback_html(text: str, lines: int, width: int) -> str:
    """Write a coloured traceback in about this many lines, with library calls folded."""
    return "".join(_part_html(part, width) for part in shortened(text, lines))


def _part_html(part: Part, width: int) -> str:
    body = ansi_html("\n".join(clip(row, width) for row in part.rows))
    html = f'<div style="{LINES}">{body}</div>'
    if not part.folded:
        return html
    return f'<details><summary style="cursor:pointer">{dim(part.folded)}</summary>{html}</details>'


def traceback_rows(text: str, lines: int) -> list[str]:
    """Write it as lines, of folded calls only how many they are."""
    return [
        row
        for part in shortened(text, lines)
        for row in ([part.folded] if part.folded else part.rows)
    ]
