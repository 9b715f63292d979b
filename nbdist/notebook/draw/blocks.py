"""The parts that a live and a final panel are drawn from; runs in the notebook kernel.

Only tags and inline styles that JupyterLab's sanitiser lets through; no fixed text
colours but legible ones, and translucent backgrounds, for light and dark themes.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby

from nbdist.errors import format_ranks
from nbdist.notebook.draw.ansi import ansi_html
from nbdist.notebook.draw.summary import (
    MANY_RANKS,
    MARKS,
    ranks_text,
    seconds_text,
    state_counts,
)
from nbdist.world.screen import Line
from nbdist.world.sgr import strip
from nbdist.world.track import State
from nbdist.world.transcript import Transcript

GREEN, BLUE, RED, AMBER, GREY = "#2a9d4a", "#2f7fe6", "#d43a3a", "#b7791f", "#868e96"
COLOURS: dict[State, str] = {
    "waiting": GREY,
    "running": BLUE,
    "ok": GREEN,
    "failed": RED,
    "died": RED,
    "aborted": GREY,
}
_PANEL = "font-family:monospace;font-size:13px;line-height:1.4;text-align:left;margin:0"
_STDERR = "background-color:rgba(255,80,80,0.1)"
_SQUARE = (
    "display:inline-block;min-width:19px;border-radius:3px;margin:1px;padding:0 2px;"
    "text-align:center"
)
_MOST_SQUARES = 128
_CODES_PER_CHARACTER = 8
TABLE = (
    "border-collapse:collapse;border:none;margin:2px 0;font-size:13px;table-layout:auto;"
    "text-align:left"
)
LINES = "white-space:pre-wrap;overflow-wrap:break-word"


def panel(*parts: str) -> str:
    """The one `<div>` that a cell's output is."""
    return f'<div style="{_PANEL}">{"".join(parts)}</div>'


def dim(text: str) -> str:
    """Escaped text that stands back."""
    return f'<span style="opacity:0.62">{escape(text, quote=False)}</span>' if text else ""


def bold(text: str) -> str:
    return f'<span style="font-weight:bold">{escape(text, quote=False)}</span>'


def coloured(text: str, colour: str) -> str:
    return f'<span style="color:{colour}">{escape(text, quote=False)}</span>'


def mark(state: State) -> str:
    """`✓`, `✗` or `●` in the colour of the state."""
    return coloured(MARKS[state], COLOURS[state])


def head(transcript: Transcript, seconds: float, extra: str = "") -> str:
    """`8 ranks · 12.3 s · ● 7 · ✗ 1`, and a square for each rank if there are many."""
    parts = [bold(ranks_text(transcript)), dim(seconds_text(seconds))]
    parts += [
        coloured(f"{MARKS[state]} {number}", COLOURS[state])
        for state, number in state_counts(transcript)
    ]
    if extra:
        parts.append(dim(extra))
    line = f"<div>{dim(' · ').join(parts)}</div>"
    return line + (squares(transcript) if len(transcript.ranks) > MANY_RANKS else "")


def silent(transcript: Transcript, extra: str = "") -> str:
    """All there is to say of a cell that showed nothing, in one dim line."""
    parts = [ranks_text(transcript), seconds_text(transcript.elapsed())]
    return f"<div>{dim(' · '.join([*parts, extra] if extra else parts))}</div>"


def squares(transcript: Transcript) -> str:
    """A numbered square per rank, coloured by state; runs of ranks where those would be many."""
    states = [(track.rank, track.state) for track in transcript]
    runs = [[rank] for rank, _ in states]
    by_rank = dict(states)
    if len(states) > _MOST_SQUARES:
        runs = [[rank for rank, _ in run] for _, run in groupby(states, key=lambda item: item[1])]
    chips = [
        f'<span style="{_SQUARE};background-color:{COLOURS[by_rank[run[0]]]}">'
        f"{format_ranks(run)}</span>"
        for run in runs[:_MOST_SQUARES]
    ]
    more = f" and {len(runs) - _MOST_SQUARES} more" if len(runs) > _MOST_SQUARES else ""
    style = "color:#ffffff;font-size:10px;line-height:1.5;margin:2px 0"
    return f'<div style="{style}">{"".join(chips)}</div>{dim(more)}'


def lines_html(lines: Iterable[Line], width: int) -> str:
    """Lines of text, those of stderr tinted, each cut at `width` characters."""
    parts = []
    for is_stderr, run in groupby(lines, key=lambda line: line.stderr):
        # An empty line would have no height in a block of its own.
        text = "\n".join(ansi_html(clip(line.text, width)) or " " for line in run)
        style = f"{LINES};{_STDERR}" if is_stderr else LINES
        parts.append(f'<div style="{style}">{text}</div>')
    return "".join(parts)


def traceback_html(text: str, lines: int, width: int) -> str:
    """A coloured traceback; of a long one the first line and the last `lines`."""
    rows = text.split("\n")
    if len(rows) > lines + 1:
        rows = [rows[0], f"… {len(rows) - lines - 1} lines …", *rows[-lines:]]
    body = ansi_html("\n".join(clip(row, width) for row in rows))
    return f'<div style="{LINES}">{body}</div>'


def display_html(html: str) -> str:
    """A figure or a table in its place, in the page's own way of breaking lines."""
    return f'<div style="white-space:normal;overflow-x:auto;margin:4px 0">{html}</div>'


def clip(text: str, width: int) -> str:
    """The text, or as much of it as fits in `width` characters and how many follow."""
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


def size(html: str) -> int:
    """How many bytes this is on the wire."""
    return len(html) if html.isascii() else len(html.encode("utf-8", "surrogatepass"))
