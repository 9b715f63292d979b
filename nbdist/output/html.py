"""A panel as HTML: at most 64 KB while its cell runs, then 1 MB without images.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from nbdist.output.ansi import strip
from nbdist.output.bars import bars_html
from nbdist.output.events import Display, Failure
from nbdist.output.layout import MARKS, Block, Hidden, Item, Panel, Row, merged
from nbdist.output.rank_transcript import Look, Shown
from nbdist.output.screen import Line
from nbdist.output.transcript import Transcript
from nbdist.output.wording import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    RED,
    barred,
    bold,
    clip,
    coloured,
    details,
    dim,
    embed,
    is_leftover,
    kind_text,
    line,
    lines_html,
    panel,
    size,
    table,
    traceback_html,
    traceback_text,
)
from nbdist.words import count, format_ranks, name_ranks

MOST_BYTES, MOST_LIVE_BYTES = 1_000_000, 64_000
_HEAD_BYTES = 40_000  # The head, the squares, and the tags of the outermost blocks.
_SMALLEST_BLOCK = 1500
_BLOCK_BYTES = 600  # The tags of a block and the notes in it.
# Wide enough for what people print; a line that does not fit in its block is cut.
_WIDTHS, _LIVE_WIDTHS = (100_000, 4000, 400), (400, 200, 100, 40)
_TALL_LINES = 30
_TRACEBACKS = ((100, 1000), (30, 400), (5, 200), (1, 100))  # lines, and their width
_LIVE_TRACEBACK_LINES = 24
_LIVE_DISPLAY_LINES = 8

_COLOURS: dict[Look, str] = {
    "waiting": GREY,
    "running": BLUE,
    "ok": GREEN,
    "failed": RED,
    "died": RED,
    "released": AMBER,
    "stopped": GREY,
    "aborted": GREY,
}
_SQUARE = (
    "display:inline-block;min-width:19px;border-radius:3px;margin:1px;padding:0 2px;"
    "text-align:center"
)
_SQUARES = "color:#ffffff;font-size:10px;line-height:1.5;margin:2px 0"
_VALUE = "padding:1px 12px 1px 0;border:none;vertical-align:top;text-align:left"
_RANKS = "padding:0 8px;border:none;vertical-align:top;text-align:right"
_LAST = f"padding:0 8px;border:none;vertical-align:top;border-left:1px solid {GREY};text-align:left"
# The reversed column makes the box start at its end, where the newest lines are.
_TALL = "display:flex;flex-direction:column-reverse;max-height:546px;overflow:auto"


def panel_html(shown: Panel) -> str:
    """Write the panel; its text says the same."""
    return _live(shown) if shown.is_live else _final(shown)


def _head(shown: Panel) -> str:
    """Write `8 ranks · 12.3 s · ● 7 · ✗ 1`, and a square for each rank if there are many."""
    if not shown.states:
        return line(dim(" · ".join(filter(None, [shown.ranks, shown.seconds, shown.pace]))))
    states = [coloured(text, _COLOURS[look]) for look, text in shown.states]
    words = bold(shown.ranks), dim(shown.seconds), *states, dim(shown.pace), dim(shown.now)
    head = line(dim(" · ").join(filter(None, words)))
    if not shown.squares:
        return head
    chips = "".join(
        f'<span style="{_SQUARE};background-color:{_COLOURS[look]}">{ranks}</span>'
        for ranks, look in shown.squares
    )
    more = dim(f" and {shown.more_squares} more") if shown.more_squares else ""
    return f'{head}<div style="{_SQUARES}">{chips}</div>{more}'


def _display_html(html: str) -> str:
    return f'<div style="white-space:normal;overflow-x:auto;margin:4px 0">{html}</div>'


def _title(block: Block) -> str:
    group = block.group
    mark = coloured(MARKS[group.shown.look], _COLOURS[group.shown.look])
    return f"{bold(name_ranks(group.ranks))} {mark} {dim(' · '.join(block.words))}"


# --- final ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Room:
    """How many bytes the blocks that are left may still use."""

    left: int
    blocks: int


def _final(shown: Panel) -> str:
    room = _Room(MOST_BYTES - _HEAD_BYTES, len(shown.blocks) + len(shown.rest))
    parts = [_head(shown), line(dim(shown.spread))]
    write = partial(_final_block, room=room)
    parts += [_side_by_side(blocks, write) for blocks in tiled(shown.blocks)]
    if shown.bars:
        parts.append(bars_html(shown.bars))
    elif shown.rows:
        parts.append(_values(shown.rows))
    if shown.rest:
        parts.append(_rest(shown.rest, room))
    if shown.silent:
        parts.append(line(dim(f"{name_ranks(shown.silent)}: no output")))
    return panel(*parts, line(dim(shown.note)))


def _values(rows: Iterable[Row]) -> str:
    found = table(
        [(_VALUE, dim(name_ranks(row.ranks))), (_VALUE, lines_html([row.line], _WIDTHS[0]))]
        for row in rows
    )
    return f'<div style="max-height:560px;overflow:auto">{found}</div>'


def _rest(blocks: tuple[Block, ...], room: _Room) -> str:
    """Write the ranks that are like many others, behind one line."""
    ranks = [rank for block in blocks for rank in block.group.ranks]
    title = bold(count(len(ranks), "more rank"))
    said = dim(f"with output of their own: {format_ranks(ranks)}")
    parts, done = [], 0
    for run in tiled(blocks):
        if room.left < _SMALLEST_BLOCK * len(run):
            left = [rank for missing in blocks[done:] for rank in missing.group.ranks]
            parts.append(line(dim(f"{name_ranks(left)}: %dist_output -r {format_ranks(left)}")))
            break
        parts.append(_side_by_side(run, partial(_final_block, room=room)))
        done += len(run)
    return details(f"{title} {said}", "".join(parts), GREY, is_open=False)


def _final_block(block: Block, style: str, room: _Room) -> str:
    share = room.left // room.blocks
    room.blocks -= 1
    error = _final_error(block, share // 2)
    body, image_bytes = _output(block, share - size(error) - _BLOCK_BYTES)
    title, colour = _title(block), _COLOURS[block.group.shown.look]
    if block.failed:
        title += f" {coloured(clip(block.failed, 200), colour)}"
    html = details(title, body + error, colour, is_open=block.is_open, style=style)
    room.left -= size(html) - image_bytes
    return html


def _output(block: Block, budget: int) -> tuple[str, int]:
    """Write the items, the newest first into what room there is; also the bytes of images."""
    parts: list[str | Hidden] = []
    image_bytes = 0
    for item in reversed(block.items):
        match item:
            case Hidden():
                parts.append(item)
            case Shown():
                html, has_image = _final_display(item), _is_image(item)
                cost = 0 if has_image else size(html)
                # Its text is small; what is too big for that is hidden like a line.
                budget -= min(cost, max(budget, 0))
                fits = cost <= budget
                image_bytes += size(html) if has_image and fits else 0
                parts.append(html if fits else Hidden(1, in_log_only=False))
            case lines:
                kept, used = _newest(lines, budget)
                budget -= used
                if kept:
                    parts.append(_text(kept))
                if len(kept) < len(lines):
                    parts.append(Hidden(len(lines) - len(kept), in_log_only=False))
    shown = merged(reversed(parts))
    written = (line(dim(block.where_rest(p))) if isinstance(p, Hidden) else p for p in shown)
    return "".join(written), image_bytes


def _newest(lines: list[Line], budget: int) -> tuple[list[Line], int]:
    kept: list[Line] = []
    used = 0
    for each in reversed(lines):
        for width in _WIDTHS:
            line_here = Line(clip(each.text, width), each.stderr)
            if len(line_here.text) > budget - used:
                continue  # No HTML is shorter, and it takes long to be written.
            cost = size(lines_html([line_here], _WIDTHS[0]))
            if used + cost <= budget:
                break
        else:
            break
        kept.append(line_here)
        used += cost
    return kept[::-1], used


def _text(lines: list[Line]) -> str:
    html = lines_html(lines, _WIDTHS[0])
    return html if len(lines) <= _TALL_LINES else f'<div style="{_TALL}"><div>{html}</div></div>'


def _is_image(shown: Shown) -> bool:
    """Return True for an image: a panel's size is counted without."""
    return (embed(shown.display) or "").startswith("<img ")


def _final_display(shown: Shown) -> str:
    html = embed(shown.display)
    if html is not None:
        return _display_html(html)
    if is_leftover(data := shown.display.data):
        return line(dim(f"{kind_text(data)}, shown below"))
    return _text([Line(clip(text, _WIDTHS[1]), stderr=False) for text in shown.plain.split("\n")])


def _final_error(block: Block, budget: int) -> str:
    error, part = block.group.error, block.group.part
    if not isinstance(error, Failure) or part == "same" or traceback_text(error) == block.failed:
        return ""  # One line in the title says it.
    for lines, width in _TRACEBACKS:
        html = traceback_html(traceback_text(error), lines, width)
        if size(html) <= budget:
            break
    if part == "other":
        return f'<details><summary style="cursor:pointer">traceback</summary>{html}</details>'
    return html


# --- live -------------------------------------------------------------------------------


@dataclass(slots=True)
class _LiveRoom:
    """How wide a line may be, and how many characters of figures and tables still fit in."""

    width: int
    left: int = 0


def _live(shown: Panel) -> str:
    head, foot = _head(shown) + line(dim(shown.note)), line(dim(shown.foot))
    for width in _LIVE_WIDTHS:
        html = panel(head, _live_body(shown, _LiveRoom(width)), foot)
        left = MOST_LIVE_BYTES - size(html)
        if left < 0:
            continue
        if any(isinstance(item, Shown) for block in shown.blocks for item in block.items):
            # Once more with the displays that fit: their bytes are ASCII, or too few to matter.
            fuller = panel(head, _live_body(shown, _LiveRoom(width, left)), foot)
            return fuller if size(fuller) <= MOST_LIVE_BYTES else html
        return html
    return panel(head)


def _live_body(shown: Panel, room: _LiveRoom) -> str:
    write = partial(_live_block, room=room)
    failed, others = shown.parted
    parts = [write(block, "") for block in failed]
    if shown.bars:
        parts.append(bars_html(shown.bars))
    # Lines go on coming, and would move what stands beside them.
    is_calm = all(any(isinstance(item, Shown) for item in block.items) for block in others)
    runs = tiled(others) if is_calm else ([block] for block in others)
    parts += [_side_by_side(blocks, write) for blocks in runs]
    # A row for each distinct last line: which ranks are there, and the line.
    rows = (
        [(_RANKS, bold(format_ranks(row.ranks))), (_LAST, lines_html([row.line], room.width))]
        for row in shown.rows
    )
    more = f"and {len(shown.more)} more: {name_ranks(shown.more)}" if shown.more else ""
    return "".join([*parts, table(rows), line(dim(more))])


def _live_block(block: Block, style: str, room: _LiveRoom) -> str:
    parts, group = [line(_title(block))], block.group
    for item in block.items:
        match item:
            case Hidden():
                parts.append(line(dim(block.where_rest(item))))
            case Shown():
                parts.append(_live_display(item, room))
            case lines:
                parts.append(lines_html(lines, room.width))
    if group.part == "first" and isinstance(group.error, Failure):
        text = traceback_text(group.error)
        parts.append(traceback_html(text, _LIVE_TRACEBACK_LINES, room.width))
    elif block.failed:
        parts.append(line(coloured(clip(block.failed, room.width), _COLOURS[group.shown.look])))
    return barred("".join(parts), _COLOURS[group.shown.look], style)


def _live_display(shown: Shown, room: _LiveRoom) -> str:
    html = embed(shown.display)
    if html is not None and len(html) <= room.left:
        room.left -= len(html)
        return _display_html(html)
    plain = shown.plain.split("\n")
    cut = [*plain[:_LIVE_DISPLAY_LINES], "…"] if len(plain) > _LIVE_DISPLAY_LINES else plain
    return lines_html([Line(text, stderr=False) for text in cut], room.width)


# --- which blocks of a panel stand side by side -----------------------------------------------

_WIDEST_LINE, _WIDEST_TABLE = 42, 60
_MOST_LINES = 16
_ROW = "display:flex;flex-wrap:wrap;column-gap:14px;align-items:flex-start"
# Two figures fit beside one another on a page of 700 pixels with its margins, and none is much
# larger than it was.
_FIGURE = ";flex:1 1 {}%;max-width:620px;min-width:240px;box-sizing:border-box"
_OTHER = ";flex:0 1 auto;min-width:0"


def tiled(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Yield runs of neighbours that stand side by side, and the others one by one."""
    for side_by_side, run in groupby(blocks, key=is_tile):
        found = [*run]
        if side_by_side:
            yield found
        else:
            yield from ([block] for block in found)


def is_tile(block: Block) -> bool:
    """Return True for a block that is narrow and low; failed ranks have the whole width."""
    is_calm = block.is_open and not block.failed and not block.group.has_failed
    return is_calm and bool(block.items) and all(map(_is_narrow, block.items))


def _is_narrow(item: Item) -> bool:
    match item:
        case Hidden():
            return False
        case Shown():
            # How wide a table is drawn is not known, but it is about as wide as its text.
            width = _WIDEST_LINE if embed(item.display) is None else _WIDEST_TABLE
            return _is_image(item) or _fits(item.plain.split("\n"), width)
        case lines:
            return _fits([strip(line.text) for line in lines], _WIDEST_LINE)


def _fits(rows: list[str], width: int) -> bool:
    return len(rows) <= _MOST_LINES and max(map(len, rows)) <= width


def _side_by_side(blocks: list[Block], write: Callable[[Block, str], str]) -> str:
    """Write the blocks of a run, whose figures share the width.

    Three beside one another where there is room, but two and four are two in a row.
    """
    if len(blocks) == 1:
        return write(blocks[0], "")
    tiles = []
    for block in blocks:
        has_figure = any(isinstance(item, Shown) and _is_image(item) for item in block.items)
        figure = _FIGURE.format(45 if len(blocks) in (2, 4) else 30)
        tiles.append(write(block, figure if has_figure else _OTHER))
    return f'<div style="{_ROW}">{"".join(tiles)}</div>'


# --- what is not part of the panel --------------------------------------------------------

MOST_BELOW = 32
"""Displays of a cell that are shown below its panel."""


def leftovers(
    transcript: Transcript, ranks: Collection[int] | None = None
) -> list[tuple[tuple[int, ...], Display]]:
    """Find what only the page can render, of all ranks or some, in their order, with the ranks.

    Of equal ones it is the first; a rank that shows the same twice has two.
    """
    found: dict[object, tuple[list[int], Display]] = {}
    for each in (each for each in transcript if ranks is None or each.rank in ranks):
        times: Counter[bytes] = Counter()
        for shown in each.displays:
            if is_leftover(shown.display.data):
                key = shown.content
                found.setdefault((key, times[key]), ([], shown.display))[0].append(each.rank)
                times[key] += 1
    return [(tuple(those), display) for those, display in found.values()]


def figures(transcript: Transcript) -> list[tuple[str, Display]]:
    """Find the images that are part of the panel, each with its ranks, for programs."""
    found = []
    for group in transcript.groups():
        for shown in group.displays:
            data = shown.display.data
            if _is_image(shown):
                images = {kind: data[kind] for kind in data if kind.startswith("image/")}
                found.append((name_ranks(group.ranks), shown.display._replace(data=images)))
    return found
