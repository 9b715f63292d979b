"""The parts of panels and tables: wording, and HTML for text, figures and tracebacks.

The notebook's process calls these functions, mostly from other files of `nbdist.output`.
Pure: no I/O here.
"""

from __future__ import annotations

import re
import signal
from base64 import b64encode
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import lru_cache
from html import escape
from html.parser import HTMLParser
from itertools import chain, groupby, zip_longest
from typing import Any, NamedTuple, TypeVar

from nbdist.output.ansi import ansi_html, cut, strip
from nbdist.output.events import Display, Failure, MimeBundle, RankError, text_of
from nbdist.output.fingerprint import read_bar
from nbdist.output.mimes import images_in, mime_of
from nbdist.output.screen import Line
from nbdist.words import count, name_ranks, one_line

_CODES_PER_CHARACTER = 8

_Said = TypeVar("_Said", bound=Hashable)


def fold_ranks(said: Mapping[int, _Said]) -> dict[_Said, list[int]]:
    """Group the ranks that have the same value, by value; groups are in the order of ranks."""
    found: dict[_Said, list[int]] = {}
    for rank in sorted(said):
        found.setdefault(said[rank], []).append(rank)
    return found


def difference(values: Mapping[int, Hashable]) -> str:
    """Say `rank 2 differs from ranks 0-1,3`, the largest group of equals; "" if all are equal."""
    first, *others = sorted(fold_ranks(values).values(), key=lambda ranks: (-len(ranks), ranks))
    ranks = sorted(chain.from_iterable(others))
    if not ranks:
        return ""
    if len(first) == 1 and len(ranks) > 1:
        return f"{name_ranks(values)} all differ"
    verb, too = "differs" if len(ranks) == 1 else "differ", " and from each other"
    return f"{name_ranks(ranks)} {verb} from {name_ranks(first)}{too if len(others) > 1 else ''}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Say `8 ranks`, or `rank 3` for a single rank."""
    ranks = tuple(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else count(len(ranks), "rank")


def seconds_text(seconds: float) -> str:
    """Say `3.2 s`, `12 min 5 s`, `2 h 7 min`."""
    return f"{seconds:.1f} s" if seconds < 600 else whole_seconds_text(seconds)


def whole_seconds_text(seconds: float) -> str:
    """Say `3 s`, `12 min 5 s`, `2 h 7 min`."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def error_text(error: RankError) -> str:
    """Write an error in one line: `ValueError: bad shard`, `the process exited with code 3`."""
    if isinstance(error, Failure):
        line = one_line(strip(error.message))
        return f"{error.name}: {line}" if line else error.name
    if error.exit_code == -signal.SIGKILL and not error.why:
        return "killed (SIGKILL), often by the system for using too much memory"
    return f"the process {error.end}"


def traceback_text(failure: Failure) -> str:
    """Return the traceback as IPython prints it, with colours, and `account` below it."""
    traceback = "\n".join(failure.traceback).strip("\n") or error_text(failure)
    return "\n".join([traceback, *failure.account])


def body_text(error: RankError, shown: Iterable[str] = ()) -> str:
    """Return the traceback, or the last lines of a process; if it has none, the lines `shown`."""
    if isinstance(error, Failure):
        return traceback_text(error)
    lines = [*error.last_lines] or [*shown]
    return "\n".join(["its last lines:", *lines]) if lines else "it had printed nothing"


def in_log_only(lines: int, path: str | None = None) -> str:
    """Say `… 1,200 lines only in the log: logs/rank3.log`."""
    return f"… {lines_text(lines)} only in the log{f': {path}' if path else ''}"


def left_out_text(displays: int) -> str:
    """Say `… 12 displays left out; the newest are kept`."""
    return f"… {count(displays, 'display')} left out; the newest are kept"


def lines_text(number: int) -> str:
    """Say `1 line`, `1,200 lines`."""
    return f"{number:,} {'line' if number == 1 else 'lines'}"


def clip(text: str, width: int) -> str:
    """Keep as much of the text as fits in `width` characters, and say how many follow."""
    if len(text) <= width:
        return text
    if "\x1b" not in text:
        return f"{text[:width]} … {len(text) - width:,} more characters"
    # Colour codes take no width, but a text of very many codes must be cut too.
    start = text[: _CODES_PER_CHARACTER * width]
    plain = strip(start).partition("\x1b")[0]
    if len(start) == len(text) and len(plain) <= width:
        return text
    return f"{plain[:width]} … more characters"


# --- HTML parts of panels and tables ----------------------------------------------------------

GREEN, BLUE, RED, AMBER, GREY = "#2a9d4a", "#2f7fe6", "#d43a3a", "#b7791f", "#868e96"
INDENT = "0.6em"
"""The indent of printed text in JupyterLab, one character; JupyterLab drops the unit `ch`."""

_PANEL = (
    "font-family:monospace;font-size:13px;line-height:1.4;text-align:left;margin:0;"
    f"padding:0 0 0 {INDENT}"
)
_STDERR = "background-color:rgba(255,80,80,0.1)"
_LEFT = "border-left:3px solid {};padding-left:8px;margin:3px 0"
_TABLE = (
    "border-collapse:collapse;border:none;margin:2px 0;font-size:13px;table-layout:auto;"
    "text-align:left"
)
LINES = "white-space:pre-wrap;overflow-wrap:break-word"
_TEXT = (  # JupyterLab breaks lines of other <pre> in the middle of words
    "margin:0;padding:0;border:none;background-color:transparent;font-family:monospace;"
    f"font-size:13px;line-height:1.4;word-break:normal;{LINES}"
)
_LONG, _THREE_ROWS = 600, 230
"""Characters above which a line is folded, and those still seen: three rows of a narrow page."""

_DRAWN, _BAR = re.compile("[█▉▊▋▌▍▎▏]{2,}"), rf'<span style="color:{BLUE}">\g<0></span>'


def panel(*parts: str) -> str:
    """Wrap the parts of a panel in one `<div>`."""
    return f'<div style="{_PANEL}">{"".join(parts)}</div>'


def line(html: str) -> str:
    """Put HTML on a line of its own; "" if there is none."""
    return f"<div>{html}</div>" if html else ""


def dim(text: str) -> str:
    """Escape text, and show it paler than other text."""
    return f'<span style="opacity:0.62">{escape(text, quote=False)}</span>' if text else ""


def bold(text: str) -> str:
    return f'<span style="font-weight:bold">{escape(text, quote=False)}</span>'


def coloured(text: str, colour: str) -> str:
    return f'<span style="color:{colour}">{escape(text, quote=False)}</span>'


def barred(body: str, colour: str, style: str = "") -> str:
    """Draw a bar of this colour to the left of a block."""
    return f'<div style="{_LEFT.format(colour)}{style}">{body}</div>'


def details(title: str, body: str, colour: str, *, is_open: bool, style: str = "") -> str:
    """Draw a block as `barred` does, below a title that opens and closes the block."""
    start = f'<details{" open" * is_open} style="{_LEFT.format(colour)}{style}">'
    return f"{start}{opening(title)}{body}</details>"


def opening(html: str) -> str:
    """Make the title of `<details>`, which is seen also while they are closed."""
    return f'<summary style="cursor:pointer">{html}</summary>'


def table(rows: Iterable[Iterable[tuple[str, str]]], style: str = "") -> str:
    """Make a table of rows of cells, each a style and HTML; "" without rows."""
    cells = "".join(
        '<tr style="background-color:transparent">'
        + "".join(f'<td style="{style}">{html}</td>' for style, html in row)
        + "</tr>"
        for row in rows
    )
    return f'<table style="{_TABLE}{style}"><tbody>{cells}</tbody></table>' if cells else ""


def text_html(html: str, style: str = "") -> str:
    """Make a block of text that keeps its line breaks on pages that drop styles, such as GitHub."""
    return f'<pre style="{_TEXT}{style}">{html}</pre>'


def lines_html(lines: Iterable[Line], *, opens: bool) -> str:
    """Write lines as HTML, stderr tinted; with `opens`, very long lines are folded."""
    parts = []
    for (is_stderr, is_long), run in groupby(lines, key=_kind):
        tint = f";{_STDERR}" if is_stderr else ""
        if is_long and opens:
            style = f"{LINES}{tint}"
            parts += [f'<details style="{style}">{_long(line.text)}</details>' for line in run]
            continue
        # An empty line would have no height in a block of its own.
        text = "\n".join(_DRAWN.sub(_BAR, ansi_html(line.text)) or " " for line in run)
        parts.append(text_html(text, tint))
    return "".join(parts)


def _kind(line: Line) -> tuple[bool, bool]:
    """Return whether a line is tinted (stderr, but no progress bar), and whether it is long."""
    is_long = len(line.text) > _LONG and len(strip(line.text[: 2 * _LONG])) > _THREE_ROWS
    return line.stderr and read_bar(line.text) is None, is_long


def _long(text: str) -> str:
    start, rest = cut(text, _THREE_ROWS)
    more = dim(f" … {len(rest):,} more characters" if "\x1b" not in rest else " … more characters")
    return opening(ansi_html(start) + more) + ansi_html(rest)


def size(html: str) -> int:
    """Return the number of bytes of the HTML in UTF-8."""
    return len(html) if html.isascii() else len(html.encode("utf-8", "surrogatepass"))


# --- figures, tables and HTML of a rank -------------------------------------------------------

FIGURE_LATER = "figure, shown at the end"
_LONGEST_HTML = 200_000
_BASE64 = re.compile(r"[A-Za-z0-9+/=]*\Z")
# Tags without an end tag, or whose end tag may be left out.
_ENDLESS = frozenset(
    {*("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param")}
    | {*("source", "track", "wbr", "p", "li", "dt", "dd", "tr", "td", "th", "thead", "tbody")}
    | {"tfoot", "option", "colgroup"}
)


def kind_text(data: MimeBundle) -> str:
    """Name the kind of a bundle that only the page can render: `Markdown`, or its mime type."""
    mimes = [mime for mime in map(mime_of, data) if mime.embedding != "text"]
    own = [mime for mime in mimes if mime.embedding == "page"]
    mime = (own or mimes)[0]
    return mime.name or mime.kind


def is_figure(data: MimeBundle) -> bool:
    """Return True if the bundle is an image that panels can embed, and has no HTML."""
    return "text/html" not in data and any(images_in(data)) and not is_leftover(data)


def is_leftover(data: MimeBundle) -> bool:
    """Return True if only the page's own renderers can show the bundle."""
    if "text/html" in data:
        html = text_of(data["text/html"])
        if len(html) > _LONGEST_HTML or not _is_contained(html):
            return True
    found = {mime_of(kind).embedding for kind in data}
    return "page" in found or ("other form" in found and found.isdisjoint(("html", "image")))


def embed(display: Display) -> str | None:
    """Return the display as HTML; None if it has only text, or only the page can render it."""
    data, metadata = display.data, display.metadata
    if is_leftover(data):
        return None
    if "text/html" in data:
        return text_of(data["text/html"])
    if (mime := next(images_in(data), None)) is None:
        return None
    text = text_of(data[mime.kind])
    encoded = "".join(text.split()) if mime.is_base64 else b64encode(text.encode()).decode()
    return _image(mime.kind, encoded, metadata) if _BASE64.match(encoded) else None


def _image(kind: str, encoded: str, metadata: MimeBundle) -> str:
    found = metadata.get(kind)
    about: Mapping[str, Any] = found if isinstance(found, Mapping) else metadata
    size = "".join(
        f' {side}="{value:.0f}"'
        for side in ("width", "height")
        if isinstance(value := about.get(side), (int, float))
    )
    # On a narrow page the image shrinks in both directions, whatever its attributes say.
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
    """Draw a line that is invisible until it has been on a page for so many seconds.

    Each drawing of the panel restarts that time, so the line appears only if the panel is not drawn
    any more.  The line is an SVG image, since panels can have neither scripts nor style sheets.
    """
    width = int(7.5 * len(text))
    drawn = _LATER.format(width=width, colour=GREY, text=escape(text), seconds=seconds)
    encoded = b64encode(drawn.encode()).decode()
    # No higher than the line of text in which it stands.
    style = "max-width:100%;height:auto;vertical-align:middle"
    return f'<img src="data:image/svg+xml;base64,{encoded}" width="{width}" style="{style}">'


@lru_cache(maxsize=256)
def _is_contained(html: str) -> bool:
    """Return True for HTML without scripts whose tags are all closed, so that none leaks out."""
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
        elif tag not in _ENDLESS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # `<div/>` opens a div in HTML; inside an SVG, `<path/>` is complete.
        if "svg" not in self.open:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _ENDLESS and (not self.open or self.open.pop() != tag):
            self.is_fine = False


# --- tracebacks in parts ----------------------------------------------------------------------

_FRAME = re.compile(
    r"(?:Cell |Input )?In ?\[|File |<ipython-input|(?:/|~/|\.\.?/)\S+(?::\d+)?,? in "
    r"|\[\.\.\. skipping"
)
_NEXT_ERROR = re.compile(r"During handling of the above|The above exception was the direct")
_PACKAGES = r"(?:site|dist)-packages/"
_LIBRARY = re.compile(
    rf"(?:{_PACKAGES}|lib/python\d[\d.]*/(?!{_PACKAGES})|<frozen )(?P<name>[\w-]+)"
)
_ARROW = re.compile(r"-+> ?\d*")
_HEADER = re.compile(
    r"-{75}((?:\x1b\[[\d;]*m)*\n[^\n]*?) {9}(?=Traceback \(most recent call last\))"
)
"""The first two rows of IPython's traceback, which are 75 characters wide."""

_FEWEST_FOLDED = 3
_MOST_LIBRARIES = 3


class Part(NamedTuple):
    """Rows of a traceback; `folded` is the line that is shown instead of rows that are folded."""

    rows: tuple[str, ...]
    folded: str = ""

    @property
    def seen(self) -> tuple[str, ...]:
        """The rows that are seen while the part is folded."""
        return (self.folded,) if self.folded else self.rows


def parted(text: str) -> list[Part]:
    """Split a traceback in parts: three or more calls in libraries in a row are one folded part.

    The last call before an error is always seen, since it raised the error.
    """
    frames = [*_frames(text.split("\n"))]
    kinds = []
    for frame, after in zip_longest(frames, frames[1:]):
        is_last = after is None or _NEXT_ERROR.match(strip(after[0]))
        head = "" if is_last else strip(frame[0])
        found = _LIBRARY.search(head) if _FRAME.match(head) else None
        kinds.append(found["name"] if found else "")  # "": the user's own code
    parts = []
    for in_library, run in groupby(zip(frames, kinds, strict=True), key=lambda pair: bool(pair[1])):
        pairs = [*run]
        rows = tuple(row for frame, _ in pairs for row in frame)
        folded = ""
        if in_library and len(pairs) >= _FEWEST_FOLDED:
            some = [*dict.fromkeys(kind for _, kind in pairs)]
            some[_MOST_LIBRARIES:] = ["…"] * (len(some) > _MOST_LIBRARIES)
            folded = f"… {count(len(pairs), 'call')} in {', '.join(some)}"
        parts.append(Part(rows, folded))
    return parts


def _frames(rows: Iterable[str]) -> Iterator[list[str]]:
    """Yield the rows before the first call, then the rows of each call."""
    frame: list[str] = []
    for row in rows:
        plain = strip(row)
        if frame and (_FRAME.match(plain) or _NEXT_ERROR.match(plain)):
            yield frame
            frame = []
        frame.append(row)
    yield frame


def shortened(text: str, most: int) -> list[Part]:
    """Split a traceback so that about `most` rows are seen: the cell's call, and the last rows."""
    parts = parted(text)
    rows = [row for part in parts for row in part.seen]
    if len(rows) <= most + 1:
        return parts
    # The first call is in the cell.
    own = next((frame for frame in _frames(rows) if _FRAME.match(strip(frame[0]))), [])
    arrows = [row for row in own if _ARROW.match(strip(row))]
    last = rows[-most:]
    first = [row for row in dict.fromkeys([rows[0], *own[:1], *arrows[:1]]) if row not in last]
    left = len(rows) - len(first) - len(last)
    return [Part((*first, f"… {left} lines …", *last))]


def traceback_html(text: str, lines: int, width: int) -> str:
    """Write a coloured traceback in about this many lines, with library calls folded."""
    html = ""
    # On a page of 700 pixels 75 characters would take two rows.
    for part in shortened(_HEADER.sub(rf"{'-' * 66}\1", text), lines):
        body = ansi_html("\n".join(clip(row, width) for row in part.rows))
        shown = text_html(body)
        title = opening(dim(part.folded))
        html += f"<details>{title}{shown}</details>" if part.folded else shown
    return html


def traceback_rows(text: str, lines: int) -> list[str]:
    """Return the rows of a shortened traceback; folded calls are one row with their number."""
    return [row for part in shortened(text, lines) for row in part.seen]
