"""A panel of a cell that is running: bounded, not interactive, redrawn as a whole.

An update rebuilds the page's DOM, so nothing here can be opened or scrolled.  Runs in
the notebook kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from nbdist.errors import format_ranks, name_ranks
from nbdist.notebook.draw import blocks
from nbdist.notebook.draw.rich import embed
from nbdist.notebook.draw.summary import (
    MANY_RANKS,
    failed_with,
    in_log_only,
    sameness,
    traceback_text,
)
from nbdist.wire.outputs import Failure
from nbdist.world.screen import Line
from nbdist.world.track import FAILED, Gap, Shown, Track
from nbdist.world.transcript import Group, Transcript

MOST_BYTES = 64_000
_WIDTHS = (400, 200, 100, 40)
_LINES_IN_ALL = 24
_LINES_OF_FAILED = 8
_FEW_GROUPS = 4
_MOST_ROWS = 16
_MOST_BLOCKS = 16
_TRACEBACK_LINES = 24
_DISPLAY_LINES = 8
_CELL = "padding:0 8px;border:none;vertical-align:top"


@dataclass(slots=True)
class _Room:
    """How many characters of figures and tables still fit in, and how wide a line may be."""

    width: int
    left: int

    def take(self, html: str) -> bool:
        fits = len(html) <= self.left
        self.left -= len(html) if fits else 0
        return fits


def live_html(transcript: Transcript, now: float, note: str = "") -> str:
    """The panel so far, at most 64 KB; `note` is a line such as which ranks wait where."""
    head = blocks.head(transcript, transcript.elapsed(now))
    if note:
        head += f"<div>{blocks.dim(note)}</div>"
    groups = [group for group in transcript.groups(failed_first=True) if not _is_mute(group)]
    for width in _WIDTHS:
        html = blocks.panel(head, _body(transcript, groups, _Room(width, 0)))
        left = MOST_BYTES - blocks.size(html)
        if left < 0:
            continue
        if any(group.track.displays for group in groups):
            # Once more with the displays that fit: their bytes are ASCII, or too few to matter.
            fuller = blocks.panel(head, _body(transcript, groups, _Room(width, left)))
            return fuller if blocks.size(fuller) <= MOST_BYTES else html
        return html
    return blocks.panel(head)


def _is_mute(group: Group) -> bool:
    return group.track.is_silent and group.track.state not in FAILED


def _body(transcript: Transcript, groups: list[Group], room: _Room) -> str:
    # Progress bars of all ranks will be one table here, an issue of its own.
    if len(transcript.ranks) <= MANY_RANKS or len(groups) <= _FEW_GROUPS:
        return _blocks(transcript, groups, _LINES_IN_ALL, room)
    failed = [group for group in groups if group.track.state in FAILED]
    others = [group for group in groups if group.track.state not in FAILED]
    return _blocks(transcript, failed, _LINES_OF_FAILED, room) + _rows(others, room)


def _blocks(transcript: Transcript, groups: list[Group], lines: int, room: _Room) -> str:
    each = max(2, lines // max(1, len(groups)))
    parts = [_block(transcript, group, each, room) for group in groups[:_MOST_BLOCKS]]
    more = [rank for group in groups[_MOST_BLOCKS:] for rank in group.ranks]
    if more:
        parts.append(f"<div>{blocks.dim(f'and {len(more)} more: {name_ranks(more)}')}</div>")
    return "".join(parts)


def _block(transcript: Transcript, group: Group, lines: int, room: _Room) -> str:
    track = group.track
    shown = track.tail(lines)
    earlier = track.line_count - sum(_lines(item) for item in shown)
    words = [sameness(group), f"… {earlier:,} earlier" if earlier > 0 else ""]
    header = " ".join(
        [
            blocks.bold(name_ranks(group.ranks)),
            blocks.mark(track.state),
            blocks.dim(" · ".join(filter(None, words))),
        ]
    )
    style = f"border-left:3px solid {blocks.COLOURS[track.state]};padding-left:8px;margin:3px 0"
    body = _items(shown, room) + _error(transcript, group, room)
    return f'<div style="{style}"><div>{header}</div>{body}</div>'


def _lines(item: Line | Shown | Gap) -> int:
    match item:
        case Gap(lines=lines):
            return lines
        case Shown():
            return 0
        case _:
            return 1


def _items(shown: list[Line | Shown | Gap], room: _Room) -> str:
    parts: list[str] = []
    for is_line, run in groupby(shown, key=lambda item: isinstance(item, Line)):
        if is_line:
            lines = [item for item in run if isinstance(item, Line)]
            parts.append(blocks.lines_html(lines, room.width))
            continue
        for item in run:
            match item:
                case Shown():
                    parts.append(_display(item, room))
                case Gap(lines=number):
                    parts.append(f"<div>{blocks.dim(in_log_only(number))}</div>")
    return "".join(parts)


def _display(shown: Shown, room: _Room) -> str:
    """The display if there is room, else its text."""
    html = embed(shown.display)
    if html is not None and room.take(html):
        return blocks.display_html(html)
    plain = shown.plain.split("\n")
    cut = [*plain[:_DISPLAY_LINES], "…"] if len(plain) > _DISPLAY_LINES else plain
    return blocks.lines_html([Line(line, stderr=False) for line in cut], room.width)


def _error(transcript: Transcript, group: Group, room: _Room) -> str:
    """What ended the group's cell: in full where it came first, else in a line."""
    error = group.track.error
    if group.part == "first" and isinstance(error, Failure):
        return blocks.traceback_html(traceback_text(error), _TRACEBACK_LINES, room.width)
    line = blocks.clip(failed_with(group, transcript), room.width)
    return f"<div>{blocks.coloured(line, blocks.RED)}</div>" if line else ""


def _rows(groups: list[Group], room: _Room) -> str:
    """A row for each distinct last line, 16 at most: which ranks are there, and the line."""
    last: dict[Line, list[int]] = {}
    for group in groups:
        last.setdefault(_last_line(group.track), []).extend(group.ranks)
    cells = "".join(
        f'<tr style="background-color:transparent"><td style="{_CELL};text-align:right">'
        f"{blocks.bold(format_ranks(ranks))}</td>"
        f'<td style="{_CELL};border-left:1px solid {blocks.GREY};text-align:left">'
        f"{blocks.lines_html([line], room.width)}</td></tr>"
        for line, ranks in list(last.items())[:_MOST_ROWS]
    )
    table = f'<table style="{blocks.TABLE}"><tbody>{cells}</tbody></table>' if cells else ""
    more = [rank for ranks in list(last.values())[_MOST_ROWS:] for rank in ranks]
    return table + (
        f"<div>{blocks.dim(f'and {len(more)} more: {name_ranks(more)}')}</div>" if more else ""
    )


def _last_line(track: Track) -> Line:
    match track.tail(1):
        case [Line() as line]:
            return line
        case [Shown() as shown]:
            return Line(shown.plain.split("\n")[0], stderr=False)
        case [Gap(lines=lines)]:
            return Line(in_log_only(lines), stderr=False)
        case _:
            return Line("", stderr=False)
