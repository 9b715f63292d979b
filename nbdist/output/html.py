"""Writes panels as HTML, with all parts that the layout has put into a panel.

The notebook's display calls `panel_html`, and shows `page_only_displays` below the panel.  Pure: no
I/O here.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from hashlib import blake2b
from itertools import groupby

from nbdist.output.ansi import strip
from nbdist.output.bars import bars_html
from nbdist.output.events import Display, model_of
from nbdist.output.html_parts import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    RED,
    barred,
    bold,
    coloured,
    details,
    dim,
    embed,
    is_figure,
    is_page_only,
    kind_text,
    line,
    lines_html,
    opening,
    panel,
    shown_later,
    table,
    traceback_html,
)
from nbdist.output.mimes import images_in
from nbdist.output.panel import MARKS, TALL_LINES, Hidden, Panel, PanelBlock, PanelItem
from nbdist.output.rank_transcript import FINAL_STATES, DisplayState, RichDisplay
from nbdist.output.screen import ScreenLine
from nbdist.output.transcript import Transcript
from nbdist.output.wording import clip
from nbdist.words import count, format_ranks, name_ranks

FOOT_SECONDS = 10
"""Seconds without a new drawing, as in a reloaded page, after which a panel's foot appears."""

_COLOURS: dict[DisplayState, str] = {
    "waiting": GREY,
    "running": BLUE,
    "ok": GREEN,
    "failed": RED,
    "died": RED,
    "released": AMBER,
    "stopped": GREY,
    "aborted": GREY,
}
# As wide as the triangle that opens a finished block; blocks of a running cell have no triangle.
_TITLE = "padding-left:1.1em"
_LONGEST_LAST = 80
_LONGEST_RANKS = 24  # characters of the ranks beside a line; more of them may take several lines
_HEAD, _FOOT = "display:flex;column-gap:14px", "flex:1 1 0%;min-width:0"
_SQUARE = (
    "display:inline-block;min-width:19px;border-radius:3px;margin:1px 0;padding:0 2px;"
    "text-align:center"
)
# The spaces between squares are for pages that drop styles; here they are made narrow.
_SQUARES = "color:#ffffff;font-size:10px;line-height:1.5;margin:2px 0;word-spacing:-4px"
_VALUE = "padding:1px 12px 1px 0;border:none;vertical-align:top;text-align:left;line-height:1.4"
# The reversed column scrolls the box to its end, where the newest lines are.
_TALL = "display:flex;flex-direction:column-reverse;max-height:546px;overflow:auto"


def panel_html(shown: Panel) -> str:
    """Write a panel as HTML."""
    failed, others = shown.failed_and_others
    parts = [_head(shown), line(dim(shown.waits)), line(dim(shown.spread))]
    parts += [_block(block, shown) for block in failed]
    parts += [bars_html(shown.bars) if shown.bars else "", _curves(shown)]
    if shown.tabs:
        parts.append(_tabs(others, shown.tabs))
    else:
        parts += [_side_by_side(run, shown) for run in side_by_side_runs(others)]
    parts.append(_rows(shown))
    if shown.folded_blocks:
        parts.append(_folded_blocks(shown))
    parts.append(line(dim(shown.more_text)))
    silent = f"{name_ranks(shown.silent)}: no output" if shown.silent else ""
    return panel(*parts, line(dim(silent)), line(dim(shown.note)))


def _curves(shown: Panel) -> str:
    if shown.curves is None:
        return ""
    from nbdist.output.chart import curves_html, live_curves  # most cells track nothing

    if shown.is_live:
        return live_curves(shown.curves, shown.pool)[0]
    return curves_html(shown.curves, pool=shown.pool)


def _head(shown: Panel) -> str:
    """Write `8 ranks · 12.3 s · ● 7 · ✗ 1`, and the panel's squares.

    If there are warnings, they follow below the head, which is orange instead of blue and green.
    """
    warned = "".join(line(coloured(text, AMBER)) for text in shown.warnings)
    if not shown.states:
        text = " · ".join(filter(None, [shown.ranks, shown.seconds, shown.pace]))
        return line(coloured(text, AMBER) if warned else dim(text)) + warned
    colours = {**_COLOURS, "ok": AMBER, "running": AMBER} if warned else _COLOURS
    states = [coloured(text, colours[state]) for state, text in shown.states]
    words = bold(shown.ranks), dim(shown.seconds), *states, dim(shown.pace), dim(shown.now)
    head = line(dim(" · ").join(filter(None, words)))
    if shown.foot:  # on the rest of the line, so that the foot needs no room
        foot = shown_later(shown.foot, FOOT_SECONDS)
        head = f'<div style="{_HEAD}">{head}<div style="{_FOOT}">{foot}</div></div>'
    head += warned
    if not shown.squares:
        return head
    chips = " ".join(
        f'<span style="{_SQUARE};background-color:{_COLOURS[state]}">{ranks}</span>'
        for ranks, state in shown.squares
    )
    more = dim(f" and {shown.more_squares} more") if shown.more_squares else ""
    return f'{head}<div style="{_SQUARES}">{chips}</div>{more}'


def _rows(shown: Panel) -> str:
    """Write a table of `Panel.rows`: the ranks of each row, and the line of these ranks."""
    if not shown.rows:
        return ""
    cells = []
    for row in shown.rows:
        # The line itself shows sets, so that likeness needs no words.
        text = lines_html([row.line], opens=not shown.is_live)
        ranks = name_ranks(row.ranks)
        style = _VALUE if len(ranks) > _LONGEST_RANKS else f"{_VALUE};white-space:nowrap"
        cells.append([(style, dim(ranks)), (_VALUE, text)])
    return f'<div style="max-height:560px;overflow:auto">{table(cells)}</div>'


def _folded_blocks(shown: Panel) -> str:
    """Write all blocks of `Panel.folded_blocks` below a title that opens and closes them."""
    ranks = [rank for block in shown.folded_blocks for rank in block.group.ranks]
    title = bold(count(len(ranks), "more rank"))
    about = dim(f"with output of their own: {format_ranks(ranks)}")
    blocks = "".join(_side_by_side(run, shown) for run in side_by_side_runs(shown.folded_blocks))
    return details(f"{title} {about}", blocks, GREY, is_open=False)


def _block(block: PanelBlock, shown: Panel, style: str = "") -> str:
    is_closed = shown.is_live and not block.is_open
    block, last = _with_last_line(block) if is_closed else (block, "")
    body = _body(block, is_live=shown.is_live)
    state = block.group.shown.display_state
    colour, words = _COLOURS[state], dim(block.about)
    mark = coloured(MARKS[state], colour)
    title = " ".join(filter(None, [bold(name_ranks(block.group.ranks)), mark, words]))
    if block.failed:
        title += f" {coloured(clip(block.failed, 200), colour)}"
    if shown.is_live or not body:  # a new drawing would close opened details
        title += dim(f" · {clip(last, _LONGEST_LAST)}" if last else "")
        return barred(f'<div style="{_TITLE}">{title}</div>{body}', colour, style)
    return details(title, body, colour, is_open=block.is_open, style=style)


def _with_last_line(block: PanelBlock) -> tuple[PanelBlock, str]:
    """Return a block without its first text, and the last line of that text for the title.

    A block of a running cell shows only this line if the final layout will close the block.
    """
    for index, item in enumerate(block.items):
        if isinstance(item, list):
            others = (*block.items[:index], *block.items[index + 1 :])
            return block._replace(items=others), strip(item[-1].text)
    return block, ""


def _body(block: PanelBlock, *, is_live: bool) -> str:
    """Write the output of a block, and its traceback."""
    html = ""
    for item in block.items:
        match item:
            case Hidden():
                html += line(dim(block.hidden_text(item)))
            case str():
                html += line(dim(item))
            case RichDisplay():
                html += _display(item)
            case lines:
                html += _text(lines, is_live=is_live)
    traceback = traceback_html(block.traceback)
    if traceback and block.group.part == "other":
        traceback = f"<details>{opening('traceback')}{traceback}</details>"
    return html + traceback


def _text(lines: list[ScreenLine], *, is_live: bool) -> str:
    html = lines_html(lines, opens=not is_live)
    is_tall = len(lines) > TALL_LINES and not is_live
    return f'<div style="{_TALL}"><div>{html}</div></div>' if is_tall else html


def _display(shown: RichDisplay) -> str:
    if (html := embed(shown.display)) is not None:
        return f'<div style="white-space:normal;overflow-x:auto;margin:4px 0">{html}</div>'
    return line(dim(_shown_below(shown)))


def _shown_below(shown: RichDisplay) -> str:
    return f"{kind_text(shown.display.data)}, shown below"


# --- which blocks of a panel stand side by side -----------------------------------------------

_WIDEST_LINE, _WIDEST_TABLE = 42, 60
_MAX_LINES_SIDE_BY_SIDE = 16
_ROW = "display:flex;flex-wrap:wrap;column-gap:14px;align-items:flex-start"
# Two figures fit side by side on a page of 700 pixels with its margins, and no figure is drawn much
# larger than its own size.
_FIGURE = "flex:1 1 {}%;max-width:620px;min-width:240px;box-sizing:border-box"
_OTHER = "flex:0 1 {:.1f}em;min-width:0;box-sizing:border-box"
_COLUMN_STEP = 4  # characters
_GAP = 1.2  # em between columns, with some room for rounding
_EM = 0.62  # for a character, which is 0.6 em wide in most fonts; JupyterLab allows no `ch`


def side_by_side_runs(blocks: Iterable[PanelBlock]) -> Iterator[list[PanelBlock]]:
    """Yield runs of blocks that stand side by side; a block that does not is a run of its own."""
    for side_by_side, run in groupby(blocks, key=is_tile):
        blocks_of_run = [*run]
        yield from [blocks_of_run] if side_by_side else ([block] for block in blocks_of_run)


def is_tile(block: PanelBlock) -> bool:
    """Return True for an open block with output, narrow and low, if its ranks have not failed."""
    is_calm = block.is_open and not block.failed and not block.group.has_failed
    return is_calm and bool(block.items) and all(map(_is_narrow, block.items))


def _is_narrow(item: PanelItem) -> bool:
    match item:
        case Hidden():
            return False
        case str():
            return True
        case RichDisplay() if is_figure(item.display.data):
            return True
        case RichDisplay():
            # The width of a drawn table is not known, but a table is about as wide as its text.
            is_below = embed(item.display) is None
            return is_below or _fits(item.plain.split("\n"), _WIDEST_TABLE)
        case lines:
            return _fits([strip(line.text) for line in lines], _WIDEST_LINE)


def _fits(rows: list[str], width: int) -> bool:
    return len(rows) <= _MAX_LINES_SIDE_BY_SIDE and max(map(len, rows)) <= width


def _side_by_side(blocks: list[PanelBlock], shown: Panel) -> str:
    """Write the blocks of a run in columns that are equally wide; figures share the page's width.

    A wide page has three blocks with figures in a row, or two of a run of two or four blocks.
    Blocks without figures fill a row; four such blocks stand in pairs.
    """
    if len(blocks) == 1:
        return _block(blocks[0], shown)
    items = [item for each in blocks for item in each.items]
    if any(isinstance(item, RichDisplay) and is_figure(item.display.data) for item in items):
        style = _FIGURE.format(45 if len(blocks) in (2, 4) else 30)
        # Invisible blocks fill a last row with fewer figures, so that all figures are equally wide.
        fillers = 2 * f'<div style="{style}"></div>'
    else:
        # 4 characters are for the line on the left, and the sign that opens a block.  While a cell
        # runs its lines become longer: a width in steps moves the columns less often.
        width = max(map(_characters, blocks)) + 4
        if all(isinstance(item, list) for item in items):
            width += -width % _COLUMN_STEP
        style, fillers = _OTHER.format(_EM * width), ""
    tiles = [_block(block, shown, f";{style}") for block in blocks]
    if len(tiles) == 4 and not fillers:
        pair = _OTHER.format(2 * _EM * width + _GAP)
        tiles = [
            f'<div style="{_ROW};{pair}">{a}{b}</div>'
            for a, b in zip(tiles[::2], tiles[1::2], strict=True)
        ]
    return f'<div style="{_ROW}">{"".join(tiles)}{fillers}</div>'


def _characters(block: PanelBlock) -> int:
    """Count the characters of the widest line of a block, its title included."""
    mark = MARKS[block.group.shown.display_state]
    rows = [f"{name_ranks(block.group.ranks)} {mark} {block.about}"]
    for item in block.items:
        if isinstance(item, RichDisplay):
            is_below = embed(item.display) is None
            rows += [_shown_below(item)] if is_below else item.plain.split("\n")
        elif isinstance(item, str):
            rows.append(item)
        elif isinstance(item, list):
            rows += [strip(line.text) for line in item]
    return max(map(len, rows))


# --- tabs -------------------------------------------------------------------------------

_TAB_ROW = "display:flex;flex-wrap:wrap;align-items:flex-start;container-type:inline-size"
_TAB = "order:-1;cursor:pointer;padding:1px 12px 1px 4px;border-bottom:2px solid {}"
_OPENED = "max-width:100%;min-width:0;box-sizing:border-box;display:contents"
_OUTPUT = "width:100cqw;padding:4px 0 4px 4px;box-sizing:border-box"
_BELOW_TABS = "order:-1;flex:0 0 100%;height:0"


def _tabs(blocks: list[PanelBlock], name: str) -> str:
    """Write a row of ranks; a click on a rank shows only that rank's output, below the row.

    A browser closes `<details>` when others of the same name are opened.  JupyterLab removes
    that name, and `display:contents`, from notebooks that are not trusted: then ranks open and
    close independently.
    """
    written = []
    for block in blocks:
        body = _body(block, is_live=False)
        colour = _COLOURS[state := block.group.shown.display_state]
        title = f"{bold(name_ranks(block.group.ranks))} {coloured(MARKS[state], colour)}"
        failed = coloured(clip(block.failed, 200), colour) if block.failed else ""
        about = line(" ".join(filter(None, [dim(" · ".join(block.words)), failed])))
        html = f'<summary style="{_TAB.format(colour)}">{title}</summary>'
        html += f'<div style="{_OUTPUT}">{about}{body}</div>'
        written.append((block.is_open, html))
    # The digest gives equal output an equal name, so that saved notebooks do not differ.
    digest = blake2b("".join(html for _, html in written).encode(), digest_size=6).hexdigest()
    start = f'<details name="{name}-{digest}" style="{_OPENED}"'
    tabs = "".join(f"{start}{' open' * is_open}>{html}</details>" for is_open, html in written)
    return f'<div style="{_TAB_ROW}">{tabs}<div style="{_BELOW_TABS}"></div></div>'


# --- displays outside the panel -----------------------------------------------------------

MAX_DISPLAYS_BELOW = 32
"""The most displays of a cell that are shown below its panel."""


def page_only_displays(
    transcript: Transcript, ranks: Collection[int] | None = None
) -> list[tuple[tuple[int, ...], Display]]:
    """Return the displays that only the page can render, of `ranks` or all, each with its ranks.

    Equal displays of several ranks are one; if a rank shows the same display twice, there are two.
    """
    by_content: dict[object, tuple[list[int], Display]] = {}
    for each in (each for each in transcript if ranks is None or each.rank in ranks):
        times: Counter[object] = Counter()
        for shown in each.displays:
            if is_page_only(shown.display.data):
                key = shown.content, model_of(shown.display)
                by_content.setdefault((key, times[key]), ([], shown.display))[0].append(each.rank)
                times[key] += 1
    return [(tuple(shown_by), display) for shown_by, display in by_content.values()]


def all_show_widgets(transcript: Transcript) -> bool:
    """Return True if a rank shows a widget, and so does every rank that has not ended."""
    shows = [any(model_of(shown.display) for shown in each.displays) for each in transcript]
    ended = [each.state in FINAL_STATES for each in transcript]
    return any(shows) and all(map(operator.or_, shows, ended))


def figures(transcript: Transcript) -> list[tuple[str, Display]]:
    """Return the images that a panel embeds, each with its ranks, for programs like converters."""
    result = []
    for group in transcript.groups():
        for shown in group.displays:
            data = shown.display.data
            if is_figure(data) and embed(shown.display) is not None:
                images = {mime.kind: data[mime.kind] for mime in images_in(data)}
                result.append((name_ranks(group.ranks), shown.display._replace(data=images)))
    return result
