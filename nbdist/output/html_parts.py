"""Functions that write the parts of panels and tables as HTML: text, blocks, images, tracebacks.

The notebook's process calls these functions.  Pure: no I/O here.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from functools import lru_cache
from html import escape
from html.parser import HTMLParser
from itertools import groupby
from typing import Any

from nbdist.output.ansi import ansi_html, cut, strip
from nbdist.output.events import Display, MimeBundle, text_of
from nbdist.output.fingerprint import read_bar
from nbdist.output.mimes import images_in, mime_of
from nbdist.output.screen import ScreenLine
from nbdist.output.wording import TracebackPart

GREEN, BLUE, RED, AMBER, GREY = "#2a9d4a", "#2f7fe6", "#d43a3a", "#b7791f", "#868e96"
INDENT = "0.6em"
"""About the width of a character, by which JupyterLab indents printed text.

The unit is not `ch`, because JupyterLab drops styles with that unit.
"""

_PANEL = (
    "font-family:monospace;font-size:13px;line-height:1.4;text-align:left;margin:0;"
    f"padding:0 0 0 {INDENT}"
)
_STDERR_STYLE = "background-color:rgba(255,80,80,0.1)"
_LEFT = "border-left:3px solid {};padding-left:8px;margin:3px 0"
_TABLE = (
    "border-collapse:collapse;border:none;margin:2px 0;font-size:13px;table-layout:auto;"
    "text-align:left"
)
LINES = "white-space:pre-wrap;overflow-wrap:break-word"
_TEXT = (  # `word-break`: without it JupyterLab breaks lines of <pre> in the middle of words
    "margin:0;padding:0;border:none;background-color:transparent;font-family:monospace;"
    f"font-size:13px;line-height:1.4;word-break:normal;{LINES}"
)
_LONG, _THREE_ROWS = 600, 230
"""A line with more than `_LONG` characters may be folded; then `_THREE_ROWS` of them are visible.

The visible part fills three rows of a narrow page.
"""

_BAR_BLOCKS, _BAR = re.compile("[█▉▊▋▌▍▎▏]{2,}"), rf'<span style="color:{BLUE}">\g<0></span>'


def panel(*parts: str) -> str:
    """Wrap the parts of a panel in one `<div>`."""
    return f'<div style="{_PANEL}">{"".join(parts)}</div>'


def line(html: str) -> str:
    """Put HTML on a line of its own; return "" for empty HTML."""
    return f"<div>{html}</div>" if html else ""


def dim(text: str) -> str:
    """Escape a text, and style it paler than other texts; return "" for an empty text."""
    return f'<span style="opacity:0.62">{escape(text, quote=False)}</span>' if text else ""


def bold(text: str) -> str:
    return f'<span style="font-weight:bold">{escape(text, quote=False)}</span>'


def coloured(text: str, colour: str) -> str:
    return f'<span style="color:{colour}">{escape(text, quote=False)}</span>'


def barred(body: str, colour: str, style: str = "") -> str:
    """Return a block of HTML with a line of this colour along its left side."""
    return f'<div style="{_LEFT.format(colour)}{style}">{body}</div>'


def details(title: str, body: str, colour: str, *, is_open: bool, style: str = "") -> str:
    """Return a block of HTML, with a line on its left, below a title that opens it by a click.

    If `is_open`, the block is open from the start.
    """
    start = f'<details{" open" * is_open} style="{_LEFT.format(colour)}{style}">'
    return f"{start}{opening(title)}{body}</details>"


def opening(html: str) -> str:
    """Return the title of `<details>`, which stays visible while the details are closed."""
    return f'<summary style="cursor:pointer">{html}</summary>'


def table(rows: Iterable[Iterable[tuple[str, str]]], style: str = "") -> str:
    """Write a table, whose cells are pairs of a style and HTML; return "" without rows."""
    cells = "".join(
        '<tr style="background-color:transparent">'
        + "".join(f'<td style="{style}">{html}</td>' for style, html in row)
        + "</tr>"
        for row in rows
    )
    return f'<table style="{_TABLE}{style}"><tbody>{cells}</tbody></table>' if cells else ""


def text_html(html: str, style: str = "") -> str:
    """Put a text in `<pre>`, which keeps line breaks on pages that drop styles, such as GitHub."""
    return f'<pre style="{_TEXT}{style}">{html}</pre>'


def lines_html(lines: Iterable[ScreenLine], *, opens: bool) -> str:
    """Return lines as HTML, with a tint for stderr.

    With `opens`, only the beginning of a very long line is visible until a click opens the line.
    """
    parts = []
    for (is_stderr, is_long), run in groupby(lines, key=_kind):
        tint = f";{_STDERR_STYLE}" if is_stderr else ""
        if is_long and opens:
            style = f"{LINES}{tint}"
            parts += [f'<details style="{style}">{_long(line.text)}</details>' for line in run]
            continue
        # An empty line becomes a space, since a `<pre>` with an empty line alone has no height.
        text = "\n".join(_BAR_BLOCKS.sub(_BAR, ansi_html(line.text)) or " " for line in run)
        parts.append(text_html(text, tint))
    return "".join(parts)


def _kind(line: ScreenLine) -> tuple[bool, bool]:
    """Return whether a line is tinted, and whether it is long.

    A line of stderr is tinted unless it is a progress bar.
    """
    is_long = len(line.text) > _LONG and len(strip(line.text[: 2 * _LONG])) > _THREE_ROWS
    return line.stderr and read_bar(line.text) is None, is_long


def _long(text: str) -> str:
    start, tail = cut(text, _THREE_ROWS)
    more = dim(f" … {len(tail):,} more characters" if "\x1b" not in tail else " … more characters")
    return opening(ansi_html(start) + more) + ansi_html(tail)


def size(html: str) -> int:
    """Return the number of bytes of the HTML in UTF-8."""
    return len(html) if html.isascii() else len(html.encode("utf-8", "surrogatepass"))


# --- figures, tables and HTML of a rank -------------------------------------------------------

_LONGEST_HTML = 200_000
_BASE64 = re.compile(r"[A-Za-z0-9+/=]*\Z")
# Tags that have no end tag, or whose end tag may be left out.
_VOID_TAGS = frozenset(
    {*("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param")}
    | {*("source", "track", "wbr", "p", "li", "dt", "dd", "tr", "td", "th", "thead", "tbody")}
    | {"tfoot", "option", "colgroup"}
)


def kind_text(data: MimeBundle) -> str:
    """Return a name for content that only the page can render: `Markdown`, or a mime type."""
    mimes = [mime for mime in map(mime_of, data) if mime.embedding != "text"]
    page_only = [mime for mime in mimes if mime.embedding == "page"]
    mime = (page_only or mimes)[0]
    return mime.name or mime.kind


def is_figure(data: MimeBundle) -> bool:
    """Return True if a panel shows this content of a display as an image."""
    return "text/html" not in data and any(images_in(data)) and not is_page_only(data)


def is_page_only(data: MimeBundle) -> bool:
    """Return True if only the page, such as JupyterLab, can show this content, and no panel can.

    Also return True for HTML that is very long, or that could damage the panel around it.
    """
    if "text/html" in data:
        html = text_of(data["text/html"])
        if len(html) > _LONGEST_HTML or not _is_contained(html):
            return True
    kinds = {mime_of(kind).embedding for kind in data}
    return "page" in kinds or ("other form" in kinds and kinds.isdisjoint(("html", "image")))


def embed(display: Display) -> str | None:
    """Return the display as HTML for a panel; None if the panel can show only text, or nothing."""
    data, metadata = display.data, display.metadata
    if is_page_only(data):
        return None
    if "text/html" in data:
        return text_of(data["text/html"])
    if (mime := next(images_in(data), None)) is None:
        return None
    text = text_of(data[mime.kind])
    encoded = "".join(text.split()) if mime.is_base64 else b64encode(text.encode()).decode()
    return _image(mime.kind, encoded, metadata) if _BASE64.match(encoded) else None


def _image(kind: str, encoded: str, metadata: MimeBundle) -> str:
    of_kind = metadata.get(kind)
    about: Mapping[str, Any] = of_kind if isinstance(of_kind, Mapping) else metadata
    size = "".join(
        f' {side}="{value:.0f}"'
        for side in ("width", "height")
        if isinstance(value := about.get(side), (int, float))
    )
    # A browser shrinks the image to a narrow page; `height:auto` keeps the ratio of its sides.
    shape = "max-width:100%;height:auto"
    colour = {"light": "#ffffff", "dark": "#000000"}.get(str(about.get("needs_background")))
    shape += f";background-color:{colour}" if colour else ""
    return f'<img src="data:{kind};base64,{escape(encoded)}"{size} style="{shape}">'


_LATER = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="16"><text y="12" opacity="0" '
    'font-family="monospace" font-size="12" fill="{colour}">{text}'
    '<set attributeName="opacity" to="1" begin="{seconds}s"/></text></svg>'
)


def shown_later(text: str, seconds: int) -> str:
    """Draw a line of text that stays invisible for the first `seconds` seconds on a page.

    Each new drawing of the panel restarts that time, so the line appears only if the panel is no
    longer drawn, as in a reloaded page.  The line is an SVG image with an animation, since panels
    can have neither scripts nor style sheets.
    """
    width = int(7.5 * len(text))
    drawn = _LATER.format(width=width, colour=GREY, text=escape(text), seconds=seconds)
    encoded = b64encode(drawn.encode()).decode()
    # The image is no higher than the line of text in which it stands.
    style = "max-width:100%;height:auto;vertical-align:middle"
    return f'<img src="data:image/svg+xml;base64,{encoded}" width="{width}" style="{style}">'


@lru_cache(maxsize=256)
def _is_contained(html: str) -> bool:
    """Return True if the HTML has no scripts, and an end tag for each tag that needs one.

    A tag that stays open would change how the page shows the parts of the panel after the display.
    """
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
        elif tag not in _VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # HTML reads `<div/>` as `<div>`, which needs an end tag; in an SVG `<path/>` is complete.
        if "svg" not in self.open:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID_TAGS and (not self.open or self.open.pop() != tag):
            self.is_fine = False


# --- tracebacks -------------------------------------------------------------------------------


def traceback_html(parts: Iterable[TracebackPart]) -> str:
    """Return the parts of a traceback in colours; a click on a folded part shows its rows."""
    html = ""
    for part in parts:
        shown = text_html(ansi_html("\n".join(part.rows)))
        html += f"<details>{opening(dim(part.folded))}{shown}</details>" if part.folded else shown
    return html
