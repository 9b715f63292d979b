"""Words for ranks, times and errors, and the HTML that panels and tables share.  Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Hashable, Iterable, Mapping
from html import escape
from itertools import groupby
from typing import TypeVar

from nbdist.output.ansi import ansi_html, cut, strip
from nbdist.output.events import Died, Failure, RankError
from nbdist.output.fingerprint import read_bar
from nbdist.output.screen import Line
from nbdist.words import count, name_ranks, one_line

_CODES_PER_CHARACTER = 8

_Said = TypeVar("_Said", bound=Hashable)


def fold_ranks(said: Mapping[int, _Said]) -> dict[_Said, list[int]]:
    """Group ranks of which the same is to be said, as they come."""
    found: dict[_Said, list[int]] = {}
    for rank in sorted(said):
        found.setdefault(said[rank], []).append(rank)
    return found


def more_ranks(ranks: Collection[int]) -> str:
    """Say `and 16 more: ranks 48-63`."""
    return f"and {len(ranks)} more: {name_ranks(ranks)}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Say `8 ranks`; `rank 3` where the cell ran on that one alone."""
    ranks = tuple(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else count(len(ranks), "rank")


def seconds_text(seconds: float) -> str:
    """Say `3.2 s`, `12 min 5 s`, `2 h 7 min`."""
    if seconds < 600:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def error_text(error: RankError) -> str:
    """Say the error in one line: `ValueError: bad shard`, `the process exited with code 3`."""
    match error:
        case Failure(name=name, message=message):
            line = one_line(strip(message))
            return f"{name}: {line}" if line else name
        case Died() as died:
            if died.exit_code == -signal.SIGKILL and not died.why:
                return "killed (SIGKILL), often by the system for using too much memory"
            return f"the process {died.end}"


def traceback_text(failure: Failure) -> str:
    """Give the traceback as IPython prints it, colours and all, and the account below it."""
    traceback = "\n".join(failure.traceback).strip("\n") or error_text(failure)
    return "\n".join([traceback, *failure.account])


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
    # Colour codes take no room, but neither they nor the search for them may go on for ever.
    start = text[: _CODES_PER_CHARACTER * width]
    plain = strip(start).partition("\x1b")[0]
    if len(start) == len(text) and len(plain) <= width:
        return text
    return f"{plain[:width]} … more characters"


# --- the parts that panels and tables are drawn from.  Pure -----------------------------------


GREEN, BLUE, RED, AMBER, GREY = "#2a9d4a", "#2f7fe6", "#d43a3a", "#b7791f", "#868e96"
_PANEL = "font-family:monospace;font-size:13px;line-height:1.4;text-align:left;margin:0"
_STDERR = "background-color:rgba(255,80,80,0.1)"
_TABLE = (
    "border-collapse:collapse;border:none;margin:2px 0;font-size:13px;table-layout:auto;"
    "text-align:left"
)
LINES = "white-space:pre-wrap;overflow-wrap:break-word"
_LONG, _THREE_ROWS = 600, 230
"""Characters from which on a line opens, and of those what is seen: three rows of a narrow page."""

_DRAWN, _BAR = re.compile("[█▉▊▋▌▍▎▏]{2,}"), rf'<span style="color:{BLUE}">\g<0></span>'


def panel(*parts: str) -> str:
    """Make the one `<div>` that a cell's output is."""
    return f'<div style="{_PANEL}">{"".join(parts)}</div>'


def line(html: str) -> str:
    """Make a line of its own, "" of nothing."""
    return f"<div>{html}</div>" if html else ""


def dim(text: str) -> str:
    """Escape text, and have it stand back."""
    return f'<span style="opacity:0.62">{escape(text, quote=False)}</span>' if text else ""


def bold(text: str) -> str:
    return f'<span style="font-weight:bold">{escape(text, quote=False)}</span>'


def coloured(text: str, colour: str) -> str:
    return f'<span style="color:{colour}">{escape(text, quote=False)}</span>'


def barred(body: str, colour: str, style: str = "") -> str:
    """Draw a bar of this colour to the left of a block."""
    return f'<div style="{_bar(colour)}{style}">{body}</div>'


def details(title: str, body: str, colour: str, *, is_open: bool, style: str = "") -> str:
    """Do the same, with a title that opens and closes it."""
    summary = f'<summary style="cursor:pointer">{title}</summary>'
    return f'<details{" open" * is_open} style="{_bar(colour)}{style}">{summary}{body}</details>'


def _bar(colour: str) -> str:
    return f"border-left:3px solid {colour};padding-left:8px;margin:3px 0"


def table(rows: Iterable[Iterable[tuple[str, str]]]) -> str:
    """Lay out rows of cells, each with its style; "" where there are none."""
    cells = "".join(
        '<tr style="background-color:transparent">'
        + "".join(f'<td style="{style}">{html}</td>' for style, html in row)
        + "</tr>"
        for row in rows
    )
    return f'<table style="{_TABLE}"><tbody>{cells}</tbody></table>' if cells else ""


def lines_html(lines: Iterable[Line], width: int) -> str:
    """Write lines of text, those of stderr tinted, each cut at `width` characters.

    A very long one is three rows high, and opens.
    """
    parts = []
    for (is_stderr, is_long), run in groupby(lines, key=_kind):
        style = f"{LINES};{_STDERR}" if is_stderr else LINES
        texts = [clip(line.text, width) for line in run]
        if is_long and width > _LONG:
            parts += [f'<details style="{style}">{_opening(text)}</details>' for text in texts]
            continue
        # An empty line would have no height in a block of its own.
        text = "\n".join(_DRAWN.sub(_BAR, ansi_html(text)) or " " for text in texts)
        parts.append(f'<div style="{style}">{text}</div>')
    return "".join(parts)


def _kind(line: Line) -> tuple[bool, bool]:
    """Say whether it is tinted, as errors and warnings are but not bars, and whether it is long."""
    is_long = len(line.text) > _LONG and len(strip(line.text[: 2 * _LONG])) > _THREE_ROWS
    return line.stderr and read_bar(line.text) is None, is_long


def _opening(text: str) -> str:
    """Write the beginning of a line, and behind it the rest."""
    start, rest = cut(text, _THREE_ROWS)
    more = dim(f" … {len(rest):,} more characters" if "\x1b" not in rest else " … more characters")
    return f'<summary style="cursor:pointer">{ansi_html(start)}{more}</summary>{ansi_html(rest)}'


def size(html: str) -> int:
    """Count the bytes that this is on the wire."""
    return len(html) if html.isascii() else len(html.encode("utf-8", "surrogatepass"))
