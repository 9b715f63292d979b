"""A table of progress bars, for pages and as text.  Pure."""

from __future__ import annotations

from nbdist.output.bars import BarTable, RankBars, columns
from nbdist.output.markup import AMBER, BLUE, GREEN, bold, coloured, dim, line, table
from nbdist.output.wording import clip
from nbdist.words import name_ranks

_CELL = "padding:0 10px 0 0;border:none;vertical-align:middle;text-align:left;white-space:nowrap"
_RIGHT = _CELL.replace("text-align:left", "text-align:right")
_REST = _CELL.replace("white-space:nowrap", "white-space:normal")
_FILL = "display:inline-block;vertical-align:middle;height:10px;border-radius:2px"
_TRACK = f"{_FILL};width:100px;background-color:rgba(128,128,128,0.25);line-height:0"
_LONGEST_REST = 120
_CELLS, _PARTS = 20, " ▏▎▍▌▋▊▉"


def bars_html(shown: BarTable) -> str:
    """Draw a row for each bar, below a line that says where all are if there are more."""
    rows = table(_row(shown, bars) for bars in shown.rows)
    return line(dim(shown.summary)) + rows


def _row(shown: BarTable, bars: RankBars) -> list[tuple[str, str]]:
    is_slowest = bars.rank == shown.slowest
    name, percent, amount, times, rate, rest = columns(bars)
    end = dim(clip(rest, _LONGEST_REST))
    if is_slowest:
        end = f"{end} {coloured('slowest', AMBER)}"
    return [
        (_CELL, bold(name_ranks([bars.rank]))),
        (_CELL, dim(name)),
        (_CELL, _drawn(bars, shown.share(bars), is_slowest=is_slowest)),
        (_RIGHT, percent),
        (_RIGHT, dim(amount)),
        (_CELL, dim(times)),
        (_RIGHT, dim(rate)),
        (_REST, end),
    ]


def _drawn(bars: RankBars, share: float | None, *, is_slowest: bool) -> str:
    if share is None:
        return ""
    colour = GREEN if bars.bar.is_finished else AMBER if is_slowest else BLUE
    fill = f"{_FILL};width:{100 * share:.0f}%;background-color:{colour}"
    return f'<span style="{_TRACK}"><span style="{fill}"></span></span>'


def bars_text(shown: BarTable) -> list[str]:
    """Write the same in lines of which each names its rank, its columns below one another."""
    rows = [_words(bars, shown.share(bars)) for bars in shown.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [shown.summary] if shown.summary else []
    for bars, row in zip(shown.rows, rows, strict=True):
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True) if width)
        mark = "  slowest" if bars.rank == shown.slowest else ""
        lines.append("  ".join(cells).rstrip() + mark)
    return lines


def _words(bars: RankBars, share: float | None) -> list[str]:
    name, percent, amount, times, rate, rest = columns(bars)
    drawn = "" if share is None else f"|{_blocks(share)}|"
    return [name_ranks([bars.rank]), name, drawn, percent.rjust(4), amount, times, rate, rest]


def _blocks(share: float) -> str:
    whole, part = divmod(round(share * _CELLS * 8), 8)
    return ("█" * whole + _PARTS[part].strip()).ljust(_CELLS)
