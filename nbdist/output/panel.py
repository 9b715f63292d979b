"""A panel as data: the parts of a cell's output that are shown, and the limits of their size.

`layout` and `tabs` make panels; `html` and `text` write panels.  Pure: no I/O here.
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
"""The most lines seen at once of a finished block, and shown at all of a running cell's block."""


class Hidden(NamedTuple):
    """A number of lines that are left out; `in_log_only` if the notebook lacks these lines."""

    lines: int
    in_log_only: bool


PanelItem: TypeAlias = list[ScreenLine] | RichDisplay | Hidden | str
"""Lines, a display, lines that are left out, or a remark instead of a display."""


class PanelBlock(NamedTuple):
    """The output of alike ranks, below a title with `words`; `failed` is an error in one line.

    `traceback` has the parts of the error's traceback that are shown.
    """

    group: AlikeRanks
    words: tuple[str, ...]
    items: tuple[PanelItem, ...]
    failed: str
    log: str | None = None
    is_open: bool = True
    pool: str = ""
    earlier: int = 0  # lines that a live panel does not show
    traceback: tuple[TracebackPart, ...] = ()

    @property
    def about(self) -> str:
        """The text behind the ranks in the title of the block."""
        return " · ".join([*self.words, *self.above])

    @property
    def above(self) -> list[str]:
        """The text `… 9,800 earlier` as a list, empty if `earlier` is 0."""
        return [f"… {self.earlier:,} earlier"] if self.earlier else []

    def hidden_text(self, hidden: Hidden) -> str:
        """Say `… 9,800 lines more: %dist_output -r 3 --all, or logs/rank3.log`, or only the log."""
        if hidden.in_log_only:
            return in_log_only(hidden.lines, self.log)
        command = in_pool(f"%dist_output -r {format_ranks(self.group.ranks)} --all", self.pool)
        path = f", or {self.log}" if self.log else ""
        return f"… {lines_text(hidden.lines)} more: {command}{path}"


class PanelRow(NamedTuple):
    """A line of some ranks in a panel's table, such as a short value, or the ranks' last line."""

    ranks: tuple[int, ...]
    line: ScreenLine
    sameness: str = ""


class Panel(NamedTuple):
    """The panel of a cell: a head with ranks, time and states, then blocks, rows and lesser parts.

    `squares` have the state of each rank, or of each run of ranks, if there are many ranks.
    `warnings` are shown below the head.  `now` says what resources the ranks use and which rank is
    behind, `waits` which ranks wait where, and `spread` how far the numbers of ranks differ.
    `bars` and then `curves` come after the blocks of failed ranks.  The ranks of `more` have
    neither a block nor a row.  A title opens all `folded_blocks`.  `silent` are ranks without
    output.  `foot` is a hint for people who see an old panel.  Without `states` there is no output.
    """

    ranks: str
    seconds: str
    states: tuple[tuple[DisplayState, str], ...] = ()
    pace: str = ""
    squares: tuple[tuple[str, DisplayState], ...] = ()
    more_squares: int = 0
    now: str = ""
    waits: str = ""
    foot: str = ""
    note: str = ""
    is_live: bool = False
    warnings: tuple[str, ...] = ()
    spread: str = ""
    bars: BarTable | None = None
    curves: Curves | None = None
    blocks: tuple[PanelBlock, ...] = ()
    rows: tuple[PanelRow, ...] = ()
    more: tuple[int, ...] = ()
    folded_blocks: tuple[PanelBlock, ...] = ()
    silent: tuple[int, ...] = ()
    pool: str = ""
    tabs: str = ""  # a unique name if the page shows one block at a time, else ""

    @property
    def more_text(self) -> str:
        """Say `and 72 more: ranks 127-198`, with a command if not live; "" if `more` is empty."""
        if not self.more:
            return ""
        command = in_pool(f": %dist_output -r {format_ranks(self.more)}", self.pool)
        text = f"and {len(self.more)} more: {name_ranks(self.more)}"
        return text if self.is_live else text + command

    @property
    def failed_and_others(self) -> tuple[list[PanelBlock], list[PanelBlock]]:
        """The blocks of failed ranks, and all others; with tabs, all are others, in rank order."""
        if self.tabs:
            return [], [*self.blocks]
        failed = [block for block in self.blocks if block.group.has_failed]
        return failed, [block for block in self.blocks if not block.group.has_failed]


def merge_hidden(items: Iterable[PanelItem]) -> list[PanelItem]:
    """Merge neighbouring `Hidden` items to one, and keep all other items."""
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
"""About the most bytes of a finished panel, and of a running cell's, as HTML and text together.

The bytes of figures and curves are not counted.
"""
MAX_LIVE_FIGURES = 640_000
"""The most bytes of figures in the panel of a running cell; each block has an equal share."""

_MAX_BLOCKS = 400
_WIDEST, _WIDEST_LIVE, _NARROWEST = 100_000, 400, 40  # characters of a line
# Bytes of the tags and texts of parts that have no limit of their own.
_OF_HEAD, _OF_SQUARE, _OF_BAR, _OF_BLOCK = 4_000, 160, 1_800, 1_000
# Bytes of the tags around a run of lines of the same stream.
_OF_RUN = size(lines_html([ScreenLine("", stderr=False)], opens=False))
_TRACEBACKS = ((100, 1000), (24, 400), (5, 200), (1, 100))  # rows, and their width


def limit_size(shown: Panel) -> Panel:
    """Limit a panel's bytes: cut long lines, and leave out older output, and blocks after many.

    Each block may use an equal share of the bytes that earlier blocks have not used.
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
    """Return a block with its newest output, limited to `max_bytes` bytes, and the block's bytes.

    While the cell runs, a figure is shown if it has at most `figure` bytes.
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
    """Return a display, or another item if the display has too many bytes, and the item's bytes.

    A display that has only text becomes lines, with 0 bytes since `_newest_lines` counts the lines.
    A display with too many bytes becomes `Hidden`, or in a running cell its lines of text/plain.
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
    """Return as many of the last lines as `max_bytes` bytes hold, and their bytes."""
    kept: list[ScreenLine] = []
    used = 0
    for each in reversed(lines):
        line, of_line = _clip_line(each, max_bytes - used, is_live=is_live)
        if kept and kept[-1].stderr == line.stderr:  # the line is in the run of the line below
            of_line -= _OF_RUN
        if used + of_line > max_bytes:
            break
        kept.append(line)
        used += of_line
    return kept[::-1], used


def _clip_line(line: ScreenLine, max_bytes: int, *, is_live: bool) -> tuple[ScreenLine, int]:
    """Clip a line to a width; if the line has too many bytes, drop colours and clip the line more.

    Return the line, and the bytes that it has as a run of its own.
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
    """Return the parts of the block's traceback, in `max_bytes` bytes if possible, and their bytes.

    Return no parts without a traceback, or if the block's title says all that a panel shows of it.
    """
    error, part = block.group.error, block.group.part
    is_in_title = part == "same" or (part == "other" and is_live)
    if not isinstance(error, Failure) or is_in_title or traceback_text(error) == block.failed:
        return (), 0
    for rows, width in _TRACEBACKS[is_live:]:
        parts = shorten_traceback(traceback_text(error), rows, width)
        used = 2 * size(traceback_html(parts))  # as HTML and as text
        if used <= max_bytes:
            break
    return tuple(parts), used
