"""A panel of a cell that has ended: everything of interest, bounded, and interactive.

Runs in the notebook kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbdist.errors import count, format_ranks, name_ranks
from nbdist.notebook.draw import blocks
from nbdist.notebook.draw.rich import embed, is_image, is_leftover
from nbdist.notebook.draw.summary import (
    Blocks,
    Hidden,
    Item,
    Logs,
    Silent,
    Values,
    amount,
    failed_with,
    final_layout,
    items,
    lines_shown,
    merge,
    pace,
    sameness,
    traceback_text,
    where_rest,
)
from nbdist.wire.outputs import Failure
from nbdist.world.screen import Line
from nbdist.world.track import FAILED, Shown
from nbdist.world.transcript import Group, Transcript

MOST_BYTES = 1_000_000
_HEAD_BYTES = 40_000  # The head, the squares, and the tags of the outermost blocks.
_WIDTH = 4000
_OPEN_LINES = 60
_TALL_LINES = 30
_TRACEBACK_LINES = 100
_SMALLEST_BLOCK = 1500
_BLOCK_BYTES = 600  # The tags of a block and the notes in it.
_CELL = "padding:1px 12px 1px 0;border:none;vertical-align:top;text-align:left"
# The reversed column makes the box start at its end, where the newest lines are.
_TALL = "display:flex;flex-direction:column-reverse;max-height:546px;overflow:auto"


@dataclass(slots=True)
class _Room:
    """How many bytes may still be used, shared among the blocks that are left."""

    left: int
    blocks: int
    open_lines: int = 0

    def share(self) -> int:
        """What the next block may use."""
        self.blocks -= 1
        return self.left // (self.blocks + 1)


def final_html(transcript: Transcript, logs: Logs = None, note: str = "") -> str:
    """The panel of a finished cell, at most 1 MB besides images.

    `logs` gives the name of a rank's log file; `note` is a dim line at the end.
    """
    layout = final_layout(transcript)
    end = f"<div>{blocks.dim(note)}</div>" if note else ""
    if isinstance(layout, Silent):
        return blocks.panel(blocks.silent(transcript, pace(transcript)), end)
    head = blocks.head(transcript, transcript.elapsed(), pace(transcript))
    if isinstance(layout, Values):
        return blocks.panel(head, _values(layout), end)
    return blocks.panel(head, _blocks(transcript, layout, logs), end)


def leftovers(transcript: Transcript) -> list[tuple[str, dict[str, object]]]:
    """What only JupyterLab can render (plotly, widgets ...), each with its ranks as a caption."""
    found = []
    for group in transcript.groups():
        for shown in group.track.displays:
            if is_leftover(shown.display.data):
                found.append((name_ranks(group.ranks), dict(shown.display.data)))
    return found


def _values(layout: Values) -> str:
    """Two columns: which ranks, and their value; equal values once."""
    rows = "".join(
        f'<tr style="background-color:transparent"><td style="{_CELL}">'
        f"{blocks.dim(name_ranks(group.ranks))}</td>"
        f'<td style="{_CELL}">{blocks.lines_html([line], _WIDTH)}</td></tr>'
        for group, line in layout.rows
    )
    table = f'<table style="{blocks.TABLE}"><tbody>{rows}</tbody></table>'
    return f'<div style="max-height:560px;overflow:auto">{table}</div>'


def _blocks(transcript: Transcript, layout: Blocks, logs: Logs) -> str:
    room = _Room(MOST_BYTES - _HEAD_BYTES, len(layout.main) + len(layout.rest))
    parts = [_block(transcript, group, room, logs) for group in layout.main]
    if layout.rest:
        parts.append(_rest(transcript, layout.rest, room, logs))
    return "".join(parts)


def _rest(transcript: Transcript, groups: tuple[Group, ...], room: _Room, logs: Logs) -> str:
    """The ranks that are like many others, behind one line."""
    ranks = [rank for group in groups for rank in group.ranks]
    title = blocks.bold(f"{count(len(ranks), 'more rank')}")
    said = blocks.dim(f"with output of their own: {format_ranks(ranks)}")
    room.open_lines = _OPEN_LINES
    parts = []
    for done, group in enumerate(groups):
        if room.left < _SMALLEST_BLOCK:
            left = [rank for missing in groups[done:] for rank in missing.ranks]
            text = f"{name_ranks(left)}: %dist_output -r {format_ranks(left)}"
            parts.append(f"<div>{blocks.dim(text)}</div>")
            break
        parts.append(_block(transcript, group, room, logs))
    return _details(f"{title} {said}", "".join(parts), blocks.GREY, is_open=False)


def _block(transcript: Transcript, group: Group, room: _Room, logs: Logs) -> str:
    """One group: its header, and its output when opened."""
    track = group.track
    share = room.share()
    error = _error(group, share // 2)
    body = _output(transcript, group, share - blocks.size(error) - _BLOCK_BYTES, logs)
    is_open = (
        group.ranks[0] == transcript.ranks[0]
        or track.state in FAILED
        or room.open_lines + body.lines <= _OPEN_LINES
    )
    room.open_lines += body.lines if is_open else 0
    title = [blocks.bold(name_ranks(group.ranks)), blocks.mark(track.state)]
    first = "first" if group.part == "first" and len(transcript.failed) > len(group.ranks) else ""
    words = [first, sameness(group), amount(track), track.state * (track.state == "aborted")]
    title.append(blocks.dim(" · ".join(filter(None, words))))
    if failed := failed_with(group, transcript):
        title.append(blocks.coloured(blocks.clip(failed, 200), blocks.RED))
    html = _details(
        " ".join(title), body.html + error, blocks.COLOURS[track.state], is_open=is_open
    )
    room.left -= blocks.size(html) - body.image_bytes
    return html


def _details(title: str, body: str, colour: str, *, is_open: bool) -> str:
    style = f"border-left:3px solid {colour};padding-left:8px;margin:3px 0"
    summary = f'<summary style="cursor:pointer">{title}</summary>'
    return f'<details{" open" if is_open else ""} style="{style}">{summary}{body}</details>'


@dataclass(frozen=True, slots=True)
class _Body:
    """A block's output; the size of its images is not counted against the panel's."""

    html: str
    lines: int
    image_bytes: int


def _output(transcript: Transcript, group: Group, budget: int, logs: Logs) -> _Body:
    """The group's lines and displays, the newest first into what room there is."""
    parts: list[str] = []
    shown_lines = image_bytes = 0
    for item in reversed(_fit(items(group.track, lines_shown(transcript)), budget)):
        match item:
            case Hidden():
                parts.append(f"<div>{blocks.dim(where_rest(item, group.ranks, logs))}</div>")
            case Shown():
                html = _display(item)
                parts.append(html)
                image_bytes += blocks.size(html) if _is_image(item) else 0
            case lines:
                parts.append(_text(lines))
                shown_lines += len(lines)
    return _Body("".join(reversed(parts)), shown_lines, image_bytes)


def _fit(found: list[Item], budget: int) -> list[Item]:
    """The items with as many lines from the end as fit, the others counted as hidden."""
    fitting: list[Item] = []
    for item in reversed(found):
        match item:
            case Hidden():
                fitting.append(item)
            case Shown():
                cost = 0 if _is_image(item) else blocks.size(_display(item))
                # Its text is small; what is too big for that is hidden like a line.
                budget -= min(cost, max(budget, 0))
                fitting.append(item if cost <= budget else Hidden(1, in_log_only=False))
            case lines:
                kept, used = _newest(lines, budget)
                budget -= used
                if kept:
                    fitting.append(kept)
                if len(kept) < len(lines):
                    fitting.append(Hidden(len(lines) - len(kept), in_log_only=False))
    return merge(fitting[::-1])


def _newest(lines: list[Line], budget: int) -> tuple[list[Line], int]:
    used = 0
    for number, line in enumerate(reversed(lines)):
        cost = blocks.size(blocks.lines_html([line], _WIDTH))
        if used + cost > budget:
            return lines[len(lines) - number :], used
        used += cost
    return lines, used


def _text(lines: list[Line]) -> str:
    html = blocks.lines_html(lines, _WIDTH)
    if len(lines) <= _TALL_LINES:
        return html
    return f'<div style="{_TALL}"><div>{html}</div></div>'


def _is_image(shown: Shown) -> bool:
    html = embed(shown.display)
    return html is not None and is_image(html)


def _display(shown: Shown) -> str:
    html = embed(shown.display)
    if html is not None:
        return blocks.display_html(html)
    lines = [Line(line, stderr=False) for line in shown.plain.split("\n")]
    below = f"<div>{blocks.dim('shown below')}</div>" if is_leftover(shown.display.data) else ""
    return _text(lines) + below


def _error(group: Group, budget: int) -> str:
    """The traceback: open where it came first, behind a word where it is another one."""
    error = group.track.error
    if not isinstance(error, Failure) or group.part == "same":
        return ""  # One line in the title says it.
    for lines, width in ((_TRACEBACK_LINES, 1000), (30, 400), (5, 200), (1, 100)):
        html = blocks.traceback_html(traceback_text(error), lines, width)
        if blocks.size(html) <= budget:
            break
    if group.part == "other":
        return f'<details><summary style="cursor:pointer">traceback</summary>{html}</details>'
    return html
