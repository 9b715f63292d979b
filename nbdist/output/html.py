"""Writes panels as HTML, with all parts that the layout has put into a panel.

In the notebook's process `PanelDisplay` calls `panel_html`.  Displays that a panel cannot embed
(`page_only_displays`) are shown below the panel.  Pure: no I/O here.
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
"""The seconds without a new drawing after which a panel's foot says when it was last updated.

The foot is for people who have reloaded the page while the cell runs: from then on the page gets no
new drawings.
"""

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
# The padding is about as wide as the triangle in the title of a finished block.  The blocks of a
# running cell have no triangle, and their titles must not move when the cell ends.
_TITLE = "padding-left:1.1em"
_LONGEST_LAST = 80
_LONGEST_RANKS = 24  # characters of the ranks beside a line; a longer text may wrap
_HEAD, _FOOT = "display:flex;column-gap:14px", "flex:1 1 0%;min-width:0"
_SQUARE = (
    "display:inline-block;min-width:19px;border-radius:3px;margin:1px 0;padding:0 2px;"
    "text-align:center"
)
# Spaces separate the squares on pages that drop styles.  On other pages this style makes the spaces
# narrow.
_SQUARES = "color:#ffffff;font-size:10px;line-height:1.5;margin:2px 0;word-spacing:-4px"
_VALUE = "padding:1px 12px 1px 0;border:none;vertical-align:top;text-align:left;line-height:1.4"
# A browser scrolls a reversed column to its end, where the newest lines are.
_TALL = "display:flex;flex-direction:column-reverse;max-height:546px;overflow:auto"


def panel_html(shown: Panel) -> str:
    """Return a panel as HTML; blocks of failed ranks come first, unless each rank has a tab."""
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
    from nbdist.output.chart import curves_html, live_curves  # late, since few cells track numbers

    if shown.is_live:
        return live_curves(shown.curves, shown.pool)[0]
    return curves_html(shown.curves, pool=shown.pool)


def _head(shown: Panel) -> str:
    """Return the head of a panel, `8 ranks · 12.3 s · ● 7 · ✗ 1`, and its squares.

    If there are warnings, they are shown below the head, and running and successful ranks are
    amber in the head, instead of blue and green.
    """
    warned = "".join(line(coloured(text, AMBER)) for text in shown.warnings)
    if not shown.states:
        text = " · ".join(filter(None, [shown.ranks, shown.seconds, shown.pace]))
        return line(coloured(text, AMBER) if warned else dim(text)) + warned
    colours = {**_COLOURS, "ok": AMBER, "running": AMBER} if warned else _COLOURS
    states = [coloured(text, colours[state]) for state, text in shown.states]
    words = bold(shown.ranks), dim(shown.seconds), *states, dim(shown.pace), dim(shown.now)
    head = line(dim(" · ").join(filter(None, words)))
    if shown.foot:  # on the same line, so that the panel does not grow when the foot appears
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
    """Return a table of `Panel.rows`: the ranks of each row, and the line of these ranks."""
    if not shown.rows:
        return ""
    cells = []
    for row in shown.rows:
        # Leave out `row.sameness`, such as `same except for {…}`: the sets in the line already show
        # which numbers differ between the ranks.
        text = lines_html([row.line], opens=not shown.is_live)
        ranks = name_ranks(row.ranks)
        style = _VALUE if len(ranks) > _LONGEST_RANKS else f"{_VALUE};white-space:nowrap"
        cells.append([(style, dim(ranks)), (_VALUE, text)])
    return f'<div style="max-height:560px;overflow:auto">{table(cells)}</div>'


def _folded_blocks(shown: Panel) -> str:
    """Return the blocks of `Panel.folded_blocks` below a common title; a click on it opens them."""
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
    if shown.is_live or not body:  # no `<details>` while live: each new drawing would close them
        title += dim(f" · {clip(last, _LONGEST_LAST)}" if last else "")
        return barred(f'<div style="{_TITLE}">{title}</div>{body}', colour, style)
    return details(title, body, colour, is_open=block.is_open, style=style)


def _with_last_line(block: PanelBlock) -> tuple[PanelBlock, str]:
    """Return a block without its first list of lines, and the text of the last of these lines.

    The text has no colours; it is "" for a block without lines.  While a cell runs, a block that
    will be closed at the end shows only this text, beside its title.  So the block does not shrink
    when the cell ends.
    """
    for index, item in enumerate(block.items):
        if isinstance(item, list):
            others = (*block.items[:index], *block.items[index + 1 :])
            return block._replace(items=others), strip(item[-1].text)
    return block, ""


def _body(block: PanelBlock, *, is_live: bool) -> str:
    """Return HTML with the output of a block, then its traceback if it has one."""
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
# With these widths two figures fit side by side on a page that is 700 pixels wide.
_FIGURE = "flex:1 1 {}%;max-width:620px;min-width:240px;box-sizing:border-box"
_OTHER = "flex:0 1 {:.1f}em;min-width:0;box-sizing:border-box"
_COLUMN_STEP = 4  # characters
_GAP = 1.2  # em between columns, with some room for rounding
_EM = 0.62  # the width of a character in em, rounded up; JupyterLab drops the unit `ch`


def side_by_side_runs(blocks: Iterable[PanelBlock]) -> Iterator[list[PanelBlock]]:
    """Yield lists of blocks: neighbours that can stand side by side, and each other block alone."""
    for side_by_side, run in groupby(blocks, key=is_tile):
        blocks_of_run = [*run]
        yield from [blocks_of_run] if side_by_side else ([block] for block in blocks_of_run)


def is_tile(block: PanelBlock) -> bool:
    """Return True if a block can be shown beside other blocks.

    The block must be open, and its output must be small, such as a figure or a few short lines.
    Its ranks must not have failed.
    """
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
            # The width of a table on the page is not known, but is about that of its text/plain.
            is_below = embed(item.display) is None
            return is_below or _fits(item.plain.split("\n"), _WIDEST_TABLE)
        case lines:
            return _fits([strip(line.text) for line in lines], _WIDEST_LINE)


def _fits(rows: list[str], width: int) -> bool:
    return len(rows) <= _MAX_LINES_SIDE_BY_SIDE and max(map(len, rows)) <= width


def _side_by_side(blocks: list[PanelBlock], shown: Panel) -> str:
    """Return HTML with the blocks side by side, in columns that are about equally wide.

    A single block is returned as it is.  If any block has a figure, the columns share the width of
    the page.  A wide page has two columns for two or four blocks, and three columns for other
    numbers of blocks.  Without figures a column is about as wide as the widest line, and a row has
    as many columns as fit; four blocks stand in one row, or in two rows of two blocks.
    """
    if len(blocks) == 1:
        return _block(blocks[0], shown)
    items = [item for each in blocks for item in each.items]
    if any(isinstance(item, RichDisplay) and is_figure(item.display.data) for item in items):
        style = _FIGURE.format(45 if len(blocks) in (2, 4) else 30)
        # The last row may have fewer figures, which would then be wider: invisible blocks fill it.
        fillers = 2 * f'<div style="{style}"></div>'
    else:
        # The line on the left and the triangle in the title take up to 4 characters.  While a cell
        # runs, its lines become longer: round up their width, so that columns seldom move.
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
    """Return the length of the longest line of a block, including its title."""
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
    """Return a row of ranks; a click on a rank shows only that rank's output, below the row.

    The ranks are `<details>` with a common name, of which a browser keeps only one open.
    JupyterLab removes the name, and `display:contents`, from notebooks that are not trusted; then
    people open and close each rank by itself.
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
    # `name` has the number of the cell, but an older panel on the page may have the same number.
    # The digest tells the two apart if their tabs differ; a random text would change the saved
    # notebook in each run.
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
    """Return the displays that only the page can render, each with the ranks that show it.

    A display that several ranks show is returned once, or twice if any rank shows it twice.  If
    `ranks` is given, look only at displays of these ranks.
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
    """Return True if some rank shows a widget, and every rank that still runs shows one too."""
    shows = [any(model_of(shown.display) for shown in each.displays) for each in transcript]
    ended = [each.state in FINAL_STATES for each in transcript]
    return any(shows) and all(map(operator.or_, shows, ended))


def figures(transcript: Transcript) -> list[tuple[str, Display]]:
    """Return the images that a panel can embed, each as a pair: its ranks in words, and a display.

    A saved notebook also has the images as separate outputs, for converters and other programs that
    do not read the panel.
    """
    result = []
    for group in transcript.groups():
        for shown in group.displays:
            data = shown.display.data
            if is_figure(data) and embed(shown.display) is not None:
                images = {mime.kind: data[mime.kind] for mime in images_in(data)}
                result.append((name_ranks(group.ranks), shown.display._replace(data=images)))
    return result
