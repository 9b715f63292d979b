"""Defines a panel as data: the parts of a cell's output that are shown; limits their size.

In the notebook's process `layout` and `tabs` make panels, and `html` and `text` write panels.
Pure: no I/O here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from nbdist.output.ansi import strip
from nbdist.output.bars import BarTable
from nbdist.output.curves import Curves
from nbdist.output.events import Failure
from nbdist.output.html_parts import (
    embed,
    is_figure,
    is_page_only,
    lines_html,
    size,
    traceback_html,
)
from nbdist.output.rank_transcript import DisplayState, RichDisplay
from nbdist.output.screen import ScreenLine
from nbdist.output.transcript import AlikeRanks
from nbdist.output.wording import (
    FIGURE_LATER,
    TracebackPart,
    clip,
    in_log_only,
    lines_text,
    shorten_traceback,
    traceback_text,
)
from nbdist.words import format_ranks, in_pool, name_ranks

MARKS: dict[DisplayState, str] = {
    "waiting": "○",
    "running": "●",
    "ok": "✓",
    "failed": "✗",
    "died": "✗",
    "released": "⊘",
    "stopped": "■",
    "aborted": "∅",
}

TALL_LINES = 30
"""The most consecutive lines of a block that are visible without scrolling.

In a finished cell more lines are in a box that scrolls.  A block of a running cell has no more
lines, except for ranks that wait for input.
"""


class Hidden(NamedTuple):
    """A number of lines that the panel leaves out; a display that is too big counts as one line.

    If `in_log_only` is True, only the rank's log file has the lines.  Otherwise the notebook's
    process has kept at least some of them, and a command can show these.
    """

    lines: int
    in_log_only: bool


PanelItem: TypeAlias = list[ScreenLine] | RichDisplay | Hidden | str
"""A part of a block: lines, a display, a `Hidden`, or a remark that replaces a display."""


class PanelBlock(NamedTuple):
    """A part of a panel with the output of alike ranks, below a title.

    `words` are texts for the title beside the ranks, such as `same` or `3 lines`.  `failed` is the
    error of the ranks in one line; it is "" without an error, and if `traceback` says enough.
    `traceback` has the parts of the error's traceback that are shown.  `log` is the path of a log
    file, if known.
    """

    group: AlikeRanks
    words: tuple[str, ...]
    items: tuple[PanelItem, ...]
    failed: str
    log: str | None = None
    is_open: bool = True
    pool: str = ""
    earlier: int = 0  # how many earlier lines a live panel leaves out
    traceback: tuple[TracebackPart, ...] = ()

    @property
    def about(self) -> str:
        """The words and the number of earlier lines, for the title of the block."""
        return " · ".join([*self.words, *self.above])

    @property
    def above(self) -> list[str]:
        """The text `… 9,800 earlier` as a list, empty if `earlier` is 0."""
        return [f"… {self.earlier:,} earlier"] if self.earlier else []

    def hidden_text(self, hidden: Hidden) -> str:
        """Return a line on hidden lines: `… 9,800 lines more: %dist_output -r 3 --all`.

        The line also names the log file if it is known.  If only the log has the lines, no command
        is named.
        """
        if hidden.in_log_only:
            return in_log_only(hidden.lines, self.log)
        command = in_pool(f"%dist_output -r {format_ranks(self.group.ranks)} --all", self.pool)
        path = f", or {self.log}" if self.log else ""
        return f"… {lines_text(hidden.lines)} more: {command}{path}"


class PanelRow(NamedTuple):
    """A row of a panel's table: a line of some ranks, such as a short value or their last line.

    `sameness` says how alike these ranks are, such as `same`; it is "" if nothing says so.
    """

    ranks: tuple[int, ...]
    line: ScreenLine
    sameness: str = ""


class Panel(NamedTuple):
    """The panel of a cell: a head with ranks, time and states, then blocks, rows and so on."""

    ranks: str
    seconds: str
    # Each state that ranks have, with a text such as `✗ 1`; "failed" includes "died".
    # `final_layout` leaves this empty if all ranks have succeeded without output.
    states: tuple[tuple[DisplayState, str], ...] = ()
    pace: str = ""  # names the slowest and the fastest rank
    # The state of each rank, or of consecutive ranks in the same state, to be drawn as a square.
    # Empty if there are few ranks, and in panels with tabs.
    squares: tuple[tuple[str, DisplayState], ...] = ()
    more_squares: int = 0
    now: str = ""  # which resources the ranks use, and which rank is behind
    waits: str = ""  # which ranks wait, and where
    foot: str = ""  # when the panel was drawn, for people who see an old panel
    note: str = ""
    is_live: bool = False
    warnings: tuple[str, ...] = ()  # shown below the head
    spread: str = ""  # how far the numbers of ranks differ
    bars: BarTable | None = None  # shown after the blocks of failed ranks
    curves: Curves | None = None  # shown after the bars
    blocks: tuple[PanelBlock, ...] = ()
    rows: tuple[PanelRow, ...] = ()
    more: tuple[int, ...] = ()  # ranks whose output the panel has no room for
    folded_blocks: tuple[PanelBlock, ...] = ()  # on a page, a click on a common title shows them
    silent: tuple[int, ...] = ()  # ranks that the panel names as without output
    pool: str = ""
    tabs: str = ""  # if ranks have tabs: a name that all tabs share; else ""

    @property
    def more_text(self) -> str:
        """A text with the ranks of `more`: `and 72 more: ranks 127-198`; "" if there are none.

        Once the cell has ended, the text also names the command that shows these ranks' output.
        """
        if not self.more:
            return ""
        command = in_pool(f": %dist_output -r {format_ranks(self.more)}", self.pool)
        text = f"and {len(self.more)} more: {name_ranks(self.more)}"
        return text if self.is_live else text + command

    @property
    def failed_and_others(self) -> tuple[list[PanelBlock], list[PanelBlock]]:
        """The blocks of failed ranks, and all other blocks.

        In a panel with tabs, the first list is empty, so that the tabs of all ranks stay in rank
        order.
        """
        if self.tabs:
            return [], [*self.blocks]
        failed = [block for block in self.blocks if block.group.has_failed]
        return failed, [block for block in self.blocks if not block.group.has_failed]


def merge_hidden(items: Iterable[PanelItem]) -> list[PanelItem]:
    """Return the items, with neighbouring `Hidden` items merged to one."""
    result: list[PanelItem] = []
    for item in items:
        if isinstance(item, Hidden) and result and isinstance(before := result[-1], Hidden):
            log_only = item.in_log_only and before.in_log_only
            result[-1] = Hidden(item.lines + before.lines, log_only)
        else:
            result.append(item)
    return result


# --- limits -----------------------------------------------------------------------------

MAX_PANEL_BYTES, MAX_LIVE_PANEL_BYTES = 1_000_000, 64_000
"""About the most bytes of the panel of a finished cell, and of a running cell.

HTML and text are counted together, but without figures and curves.
"""
MAX_LIVE_FIGURES = 640_000
"""The most bytes of figures in the panel of a running cell, shared equally by its blocks."""

_MAX_BLOCKS = 400
_WIDEST, _WIDEST_LIVE, _NARROWEST = 100_000, 400, 40  # characters of a line
# The bytes that are reserved for parts of a panel that have no limit of their own.
_OF_HEAD, _OF_SQUARE, _OF_BAR, _OF_BLOCK = 4_000, 160, 1_800, 1_000
# About the bytes of the tags around consecutive lines of the same stream.
_OF_RUN = size(lines_html([ScreenLine("", stderr=False)], opens=False))
_TRACEBACKS = ((100, 1000), (24, 400), (5, 200), (1, 100))  # rows and width, tried in this order


def limit_size(shown: Panel) -> Panel:
    """Return a panel limited in bytes: long lines are cut, and older output is left out.

    Blocks beyond `_MAX_BLOCKS` are left out.  The blocks share the bytes equally, and bytes that a
    block does not use are shared by the blocks after it.
    """
    budget = (MAX_LIVE_PANEL_BYTES if shown.is_live else MAX_PANEL_BYTES) - _OF_HEAD
    budget -= _OF_SQUARE * len(shown.squares)
    if shown.bars:
        budget -= _OF_BAR * (len(shown.bars.rows) + len(shown.bars.left_bars))
    share = budget // 2 // max(1, len(shown.rows)) - _OF_RUN
    rows = []
    for row in shown.rows:
        line, used = _clip_line(row.line, share, is_live=shown.is_live)
        rows.append(row._replace(line=line))
        budget -= used + _OF_RUN
    first, blocks = len(shown.blocks), [*shown.blocks, *shown.folded_blocks]
    figure = MAX_LIVE_FIGURES // max(1, len(blocks))
    kept = blocks[:_MAX_BLOCKS]
    for done, block in enumerate(kept):
        share = budget // (len(kept) - done)
        kept[done], used = _limit_block(block, share, figure, is_live=shown.is_live)
        budget -= used
    left_out = (rank for block in blocks[_MAX_BLOCKS:] for rank in block.group.ranks)
    return shown._replace(
        rows=tuple(rows),
        blocks=tuple(kept[:first]),
        folded_blocks=tuple(kept[first:]),
        more=(*shown.more, *left_out),
    )


def _limit_block(
    block: PanelBlock, max_bytes: int, figure: int, *, is_live: bool
) -> tuple[PanelBlock, int]:
    """Return a block with only the newest output that fits in `max_bytes`, and the bytes used.

    While the cell runs, a figure is shown only if it has at most `figure` bytes.
    """
    traceback, used = _limit_traceback(block, max_bytes // 2, is_live=is_live)
    budget = max_bytes - _OF_BLOCK - used
    items: list[PanelItem] = []
    earlier = block.earlier
    for item in reversed(block.items):
        if isinstance(item, RichDisplay) and is_live and is_figure(item.display.data):
            html = embed(item.display)
            item = item if html and size(html) <= figure else FIGURE_LATER
        elif isinstance(item, RichDisplay):
            item, used = _limit_display(item, budget, is_live=is_live)
            budget -= used
        if not isinstance(item, list):
            items.append(item)
            continue
        lines, used = _newest_lines(item, budget, is_live=is_live)
        items += [lines] if lines else []
        budget -= used
        if is_live:
            earlier += len(item) - len(lines)
        elif len(lines) < len(item):
            items.append(Hidden(len(item) - len(lines), in_log_only=False))
    newest = tuple(merge_hidden(items[::-1]))
    return block._replace(items=newest, traceback=traceback, earlier=earlier), max_bytes - budget


def _limit_display(shown: RichDisplay, max_bytes: int, *, is_live: bool) -> tuple[PanelItem, int]:
    """Return a display, or an item that replaces the display, and how many bytes it takes.

    A display that has only text is replaced by lines.  In a running cell, so is a display that no
    panel can embed.  A display with more than `max_bytes` is replaced by `Hidden`, or, in a running
    cell, by the lines of its text/plain.  The bytes of figures are not counted.  Lines have 0 bytes
    here, since `_newest_lines` counts them.
    """
    html = embed(shown.display)
    is_text = html is None and (is_live or not is_page_only(shown.display.data))
    used = size(shown.plain) + (0 if html is None or is_figure(shown.display.data) else size(html))
    if used <= max_bytes and not is_text:
        return shown, used
    if is_live or is_text:
        return [ScreenLine(row, stderr=False) for row in shown.plain.split("\n")], 0
    return Hidden(1, in_log_only=False), 0


def _newest_lines(
    lines: list[ScreenLine], max_bytes: int, *, is_live: bool
) -> tuple[list[ScreenLine], int]:
    """Return the last lines that together fit in `max_bytes`, and the bytes that they need."""
    kept: list[ScreenLine] = []
    used = 0
    for each in reversed(lines):
        line, of_line = _clip_line(each, max_bytes - used, is_live=is_live)
        if kept and kept[-1].stderr == line.stderr:  # in most cases the same tags are around both
            of_line -= _OF_RUN
        if used + of_line > max_bytes:
            break
        kept.append(line)
        used += of_line
    return kept[::-1], used


def _clip_line(line: ScreenLine, max_bytes: int, *, is_live: bool) -> tuple[ScreenLine, int]:
    """Return a line clipped to a width, and the bytes that it needs in HTML and in text.

    The bytes include the tags around a line that stands alone.  If the line has more than
    `max_bytes` bytes, its colours are removed, and it is clipped more.
    """
    # A character has at least two bytes: one in HTML, and one in text.
    width = max(_NARROWEST, min(_WIDEST_LIVE if is_live else _WIDEST, max_bytes // 2))
    text = clip(line.text, width)
    while True:
        cut = line._replace(text=text)
        used = size(lines_html([cut], opens=False)) + size(text)
        if used <= max_bytes or width <= _NARROWEST:
            return cut, used
        width //= 4
        text = clip(strip(line.text), width)


def _limit_traceback(
    block: PanelBlock, max_bytes: int, *, is_live: bool
) -> tuple[tuple[TracebackPart, ...], int]:
    """Return the parts of the block's traceback, shortened to about `max_bytes`, and their bytes.

    Return no parts if there is no traceback, or if the title of the block already says enough.
    """
    error, part = block.group.error, block.group.part
    is_in_title = part == "same" or (part == "other" and is_live)
    if not isinstance(error, Failure) or is_in_title or traceback_text(error) == block.failed:
        return (), 0
    for rows, width in _TRACEBACKS[is_live:]:
        parts = shorten_traceback(traceback_text(error), rows, width)
        used = 2 * size(traceback_html(parts))  # count the traceback twice: as HTML and as text
        if used <= max_bytes:
            break
    return tuple(parts), used
