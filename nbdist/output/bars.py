"""The progress bars of all ranks as one table: how far each rank is, and which one is behind.

While a cell runs, each rank has a row for its current bar.  A bar is "left" if its rank goes on to
something else: ranks that left a bar at the same place share a row.  In a finished cell all bars
are left.  The notebook's process draws the table in a panel.  Pure: no I/O here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import median
from typing import NamedTuple

from nbdist.output.fingerprint import Bar, clock_text, number_of, read_bar
from nbdist.output.html_parts import AMBER, BLUE, GREEN, bold, coloured, dim, line, table
from nbdist.output.rank_transcript import FAILED, RankTranscript
from nbdist.output.screen import Screen
from nbdist.output.transcript import Transcript, fold_plain
from nbdist.output.wording import clip, whole_seconds_text
from nbdist.words import aligned, count, format_ranks, name_ranks

MOST_ROWS, SLOWEST_ROWS = 16, 6
_MOST_LEFT_LIVE = 4
_LOOK_BACK = 24
"""An unfinished bar with more lines below it counts as left."""

_MOST_AROUND = 3
_LONGEST_NAME = 32  # so that the percentage fits on a page of 700 pixels
# A rank is behind if the first rank leads by such a share of the whole, and of its own progress.
_BEHIND, _BEHIND_SHARE = 0.02, 0.05
# Bars are not compared if they began further apart: in seconds, and as a share of their time.
_BEGAN_APART, _BEGAN_APART_SHARE = 2.0, 0.25
_NUMBERS = re.compile(r"\d+")
_RATE = re.compile(r"([\d.]+)(\D.*)")


class RankBars(NamedTuple):
    """The innermost bar of a rank, and those around it, outermost first."""

    rank: int
    bar: Bar
    around: tuple[Bar, ...] = ()

    @property
    def name(self) -> str:
        """The names of all its bars: `epoch 3/10, step`."""
        names = [f"{bar.name} {bar.amount}".strip() for bar in self.around]
        return ", ".join(filter(None, [*names, self.bar.name]))

    @property
    def outer(self) -> Bar:
        return self.around[0] if self.around else self.bar

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in the name of the outermost bar, such as 3 of `epoch 3`."""
        return tuple(map(int, _NUMBERS.findall(self.outer.name)))

    @property
    def overall(self) -> float:
        """The progress in the outermost bar, with the progress of the bars inside it."""
        share = self.bar.position
        for bar in reversed(self.around):
            whole = number_of(bar.total)
            share = bar.position + (share / whole if whole else 0.0)
        return share


class LeftBar(NamedTuple):
    """A bar that some ranks have left at the same place; `rate` and `rest` merge those of all."""

    ranks: tuple[int, ...]
    bar: Bar
    rate: str
    rest: str


class BarTable(NamedTuple):
    """The bars of some ranks: `rows` for current bars, and `left` for bars that ranks have left.

    Of many ranks only the slowest have rows, and `summary` says how far all are.  `more` counts
    earlier left bars without a row.  `behind` says how far the slowest rank is behind the first.
    """

    ranks: tuple[int, ...]
    rows: tuple[RankBars, ...] = ()
    slowest: int | None = None
    behind: str = ""
    summary: str = ""
    left: tuple[LeftBar, ...] = ()
    more: int = 0

    def share(self, bars: RankBars) -> float | None:
        """Return the share of a row's bar that is drawn: a longer bar means more progress.

        With bars around it, the share is of the outermost bar.  If ranks are in different epochs,
        the share counts the epochs too, so that ranks in an earlier epoch have shorter bars.
        """
        share = bars.bar.fraction
        if bars.around and number_of(bars.outer.total):
            share = min(1.0, bars.overall)
        epochs = sorted({each.numbers for each in self.rows})
        if share is None or self.slowest is None or len(epochs) == 1:
            return share
        return (epochs.index(bars.numbers) + share) / len(epochs)


def bars_of(said: RankTranscript) -> RankBars | None:
    """Return the current bar of a rank: unfinished, or finished with nothing below; else None."""
    screen = said.pieces[-1] if said.pieces else None
    if said.state in FAILED or not isinstance(screen, Screen):
        return None
    found = [(row, bar) for row, bar in screen.bars() if row >= screen.end - _LOOK_BACK]
    if (edited := _edited_bar(screen)) and not (found and found[-1][0] == screen.cursor):
        found.append((screen.cursor, edited))
    if not found:
        return None
    *above, (row, bar) = found
    is_over = bar.is_finished or said.state != "running"
    if is_over and row < screen.end - 1:
        return None
    around: list[Bar] = []
    for at, outer in reversed(above):  # the bars in the rows right above
        if outer.is_finished or at != row - 1 or len(around) == _MOST_AROUND:
            break
        around.append(outer)
        row = at
    return RankBars(said.rank, bar, tuple(around[::-1]))


def _edited_bar(screen: Screen) -> Bar | None:
    """Parse the last row as a bar if the program writes over it, such as `63 %`; else None."""
    if not screen.is_edited or screen.cursor != screen.end - 1:
        return None
    return next((read_bar(line.text, is_edited=True) for line in screen.lines(screen.cursor)), None)


def _bars_of_all(transcript: Transcript) -> list[RankBars]:
    """Return the current bars of all ranks; none if no running rank has one."""
    found = [bars for each in transcript if (bars := bars_of(each))]
    return found if any(transcript[bars.rank].state == "running" for bars in found) else []


def bars_left(bars: Mapping[int, Sequence[Bar]], at: Sequence[RankBars] = ()) -> list[LeftBar]:
    """Make rows for the bars of these ranks, in order, without bars that are current in `at`.

    If a rank has several bars of the same name and total, its second one is matched with the second
    one of other ranks, and so on.
    """
    present = {(bar.name, bar.total) for each in at for bar in (*each.around, each.bar)}
    found: dict[tuple[object, ...], dict[int, Bar]] = {}
    for rank, own in bars.items():
        times = Counter[tuple[str, str]]()
        for bar in own:
            key = bar.name, bar.total
            times[key] += 1
            if key not in present:
                amount = (bar.done, bar.is_finished)
                found.setdefault((*key, times[key], *amount), {})[rank] = bar
    return [_left_bar(same) for same in found.values()]


def _left_bar(bars: Mapping[int, Bar]) -> LeftBar:
    """Merge the bars that ranks have left at the same place."""
    first, *_ = bars.values()
    elapsed = max((bar.elapsed for bar in bars.values() if bar.elapsed is not None), default=None)
    rest = fold_plain([bar.rest for bar in bars.values()])
    rate = _rates([bar.rate for bar in bars.values()])
    return LeftBar(tuple(bars), first._replace(elapsed=elapsed, remaining=None), rate, rest)


def _rates(rates: Sequence[str]) -> str:
    """Write `5.8it/s`, or `5.6 to 5.9it/s`; "" if ranks have other units, or none."""
    parts = [_RATE.fullmatch(rate) for rate in rates]
    known = [(float(found[1]), found[2]) for found in parts if found]
    if len(known) < len(rates) or len({unit for _, unit in known}) > 1:
        return rates[0] if len({*rates}) == 1 else ""
    (low, unit), (high, _) = min(known), max(known)
    digits = ".3g" if high < 1000 else ".0f"
    places = max(len(format(end, digits).partition(".")[2]) for end in (low, high))
    ends = dict.fromkeys(f"{end:.{places}f}" for end in (low, high))
    return f"{' to '.join(ends)}{unit}"


def final_table(transcript: Transcript) -> BarTable | None:
    """Lay out the bars of a finished cell; None if it had none."""
    left = bars_left({said.rank: said.bars for said in transcript})
    return _with_left(BarTable(()), left, MOST_ROWS) if left else None


def _with_left(table: BarTable, left: Sequence[LeftBar], most: int) -> BarTable:
    """Add the last `most` rows of left bars to a table, and count the earlier ones."""
    ranks = {*table.ranks, *(rank for row in left for rank in row.ranks)}
    more = max(0, len(left) - most)
    return table._replace(ranks=tuple(sorted(ranks)), left=tuple(left[more:]), more=more)


def bars_of_rank(said: RankTranscript) -> BarTable | None:
    """Lay out all bars of one rank; None if it has none."""
    rows = [LeftBar((said.rank,), bar, bar.rate, bar.rest) for bar in said.bars]
    return BarTable((said.rank,), left=tuple(rows)) if rows else None


def bar_table(transcript: Transcript) -> BarTable | None:
    """Lay out the bars of a running cell; None if it has none."""
    found = _bars_of_all(transcript)
    left = bars_left({said.rank: said.bars for said in transcript}, found)
    if not (found or left):
        return None
    return _with_left(_present_table(found) if found else BarTable(()), left, _MOST_LEFT_LIVE)


def _present_table(found: Sequence[RankBars]) -> BarTable:
    """Lay out the current bars of ranks."""
    ranks, rows, summary = tuple(bars.rank for bars in found), [*found], ""
    if len(found) > MOST_ROWS:
        rows = sorted(found, key=lambda bars: (_way(bars), bars.rank))[:SLOWEST_ROWS]
        low, middle, high = _spread(found)
        left = _longest_left(found)
        parts = [_common_name(found), f"min {low} · median {middle} · max {high}"]
        parts += [] if left is None else [f"ETA {clock_text(left)}"]
        summary = " · ".join(filter(None, [*parts, "slowest first:"]))
    slowest, behind = _slowest(found)
    return BarTable(ranks, tuple(rows), slowest, behind, summary)


def _slowest(found: Sequence[RankBars]) -> tuple[int | None, str]:
    """Return the rank that is clearly behind, and `rank 2 is 20 % behind`; else None and ""."""
    low, high = min(found, key=_way), max(found, key=_way)
    if len({_NUMBERS.sub("#", bars.outer.name) for bars in found}) > 1:
        return None, ""
    if low.numbers != high.numbers:
        return low.rank, f"rank {low.rank} is behind"
    # Each epoch may have its own bar, with the same name: bars that began at other times differ.
    running = [bars.outer for bars in found if not bars.outer.is_finished]
    elapsed = [bar.elapsed for bar in running if bar.elapsed is not None] or [0.0]
    longest, behind = max(elapsed), high.overall - low.overall
    if longest - min(elapsed) > max(_BEGAN_APART, _BEGAN_APART_SHARE * longest):
        return None, ""
    if behind < _BEHIND or behind <= _BEHIND_SHARE * high.overall:
        return None, ""
    return low.rank, f"rank {low.rank} is {100 * behind / high.overall:.0f} % behind"


def _way(bars: RankBars) -> tuple[tuple[int, ...], float]:
    # `epoch 2` at 20 % is further than `epoch 1` at 80 %.
    return bars.numbers, bars.overall


def merged_line(transcript: Transcript) -> str:
    """Say how far all ranks are: `[0-3] epoch 63% (47-64) 12:01<07:10`; "" without bars.

    If some ranks are already at the bar of the next epoch, both bars are on the line.
    """
    named = dict[tuple[str, ...], list[RankBars]]()
    for bars in (found := _bars_of_all(transcript)):
        named.setdefault(tuple(bar.name for bar in (*bars.around, bars.bar)), []).append(bars)
    parts = named.values() if len(named) == 2 else filter(None, [found])
    return " · ".join(map(_merged, parts))


def _merged(found: Sequence[RankBars]) -> str:
    """Say how far the ranks of these bars are."""
    low, middle, high = _spread(found)
    spread = "" if low == high else f"({low.rstrip('%')}-{high.rstrip('%')})"
    elapsed = max((b.bar.elapsed for b in found if b.bar.elapsed is not None), default=None)
    times = _times_text(elapsed, _longest_left(found))
    parts = [f"[{format_ranks(bars.rank for bars in found)}]", _common_name(found), middle]
    return " ".join(filter(None, [*parts, spread, times]))


def _common_name(found: Sequence[RankBars]) -> str:
    """Return the name that all bars share, such as `epoch 2-3/10, step`; "" if they differ."""
    names = {bars.name for bars in found}
    if len(names) == 1:
        return names.pop()[: 2 * _LONGEST_NAME]
    inner = {bars.bar.name for bars in found}
    around = {tuple((bar.name, bar.total) for bar in bars.around) for bars in found}
    if len(around) > 1 or len(inner) > 1:
        return ""
    outer = []
    for bars in zip(*(bars.around for bars in found), strict=True):
        low, high = (pick(bars, key=lambda bar: bar.position) for pick in (min, max))
        done = low.done if low.done == high.done else f"{low.done}-{high.done}"
        outer.append(f"{low.name} {low._replace(done=done).amount}".strip())
    return ", ".join(filter(None, [*outer, inner.pop()]))


def _spread(found: Sequence[RankBars]) -> tuple[str, str, str]:
    """Return the progress of the last, the middle and the first rank, as texts."""
    order = sorted((bars.bar for bars in found), key=lambda bar: bar.position)
    if all(bar.fraction is not None for bar in order):
        ways = [bar.position for bar in order]
        return _percent(ways[0]), _percent(median(ways)), _percent(ways[-1])
    return order[0].done, order[len(order) // 2].done, order[-1].done


def _longest_left(found: Sequence[RankBars]) -> float | None:
    return max((left for bars in found if (left := bars.bar.left) is not None), default=None)


def _times_text(elapsed: float | None, remaining: float | None) -> str:
    """Write `00:12<00:07`, without the times that are not known."""
    after = "" if remaining is None else f"<{clock_text(remaining)}"
    return f"{'' if elapsed is None else clock_text(elapsed)}{after}"


def _percent(share: float) -> str:
    """Write `63%`, rounded down: only a finished bar is at 100%."""
    return f"{int(100 * share + 1e-9)}%"


class _Row(NamedTuple):
    """The cells of a row: `share` is the part of the bar that is filled, None for no drawn bar."""

    ranks: Sequence[int]
    name: str
    share: float | None
    percent: str
    amount: str
    times: str
    rate: str
    rest: str
    is_finished: bool
    is_slowest: bool = False


def _rows(shown: BarTable) -> Iterator[_Row]:
    for left in shown.left:
        bar = left.bar
        percent = "" if bar.fraction is None or bar.is_finished else _percent(bar.fraction)
        took = whole_seconds_text(bar.elapsed) if bar.elapsed else ""
        beside = (percent, bar.amount, took, left.rate, left.rest, bar.is_finished)
        yield _Row(left.ranks, _short(bar.name), bar.fraction, *beside)
    for bars in shown.rows:
        bar = bars.bar
        percent = "" if bar.fraction is None else _percent(bar.fraction)
        times = _times_text(bar.elapsed, None if bar.is_finished else bar.remaining)
        beside = (percent, bar.amount, times, bar.rate, bar.rest, bar.is_finished)
        is_slowest = bars.rank == shown.slowest
        yield _Row([bars.rank], _short(bars.name), shown.share(bars), *beside, is_slowest)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


_ANY = "padding:0 10px 0 0;border:none;vertical-align:middle;text-align:left;white-space:nowrap"
_CELL = f"{_ANY};width:1px"  # as wide as its text, since text never wraps
_RIGHT = _CELL.replace("text-align:left", "text-align:right")
_REST = f"{_ANY};max-width:0;overflow:hidden;text-overflow:ellipsis"  # all room that is left
_SHORT_NAME = 12  # characters
_NAME = f"{_REST};width:{{:.0f}}%;min-width:{0.62 * _SHORT_NAME:.1f}em"
_SLOWEST = "slowest"
_MARK = f"{_CELL};min-width:{0.62 * len(_SLOWEST):.1f}em"
_FILL = "display:inline-block;vertical-align:middle;height:10px;border-radius:2px"
_TRACK = f"{_FILL};width:100px;background-color:rgba(128,128,128,0.25);line-height:0"
_LONGEST_REST = 120
_CELLS, _PARTS = 20, " ▏▎▍▌▋▊▉"


def bars_html(shown: BarTable) -> str:
    """Draw the table as HTML, below a line for bars and ranks that have no row."""
    # The mark of the slowest rank has room from the start, so that columns do not move later.
    has_mark = len(shown.rows) > 1
    rows = table((_row_html(row, has_mark=has_mark) for row in _rows(shown)), ";width:100%")
    return line(dim(" · ".join(_above(shown)))) + rows


def _above(shown: BarTable) -> list[str]:
    """Return texts for the line above the table: earlier bars without a row, and the summary."""
    more = f"… {count(shown.more, 'earlier bar')}" if shown.more else ""
    return [*filter(None, [more, shown.summary])]


def _row_html(row: _Row, *, has_mark: bool) -> list[tuple[str, str]]:
    """Write the cells of a row; those on the right are cut if the page is too narrow."""
    drawn = ""
    if row.share is not None:
        colour = GREEN if row.is_finished else AMBER if row.is_slowest else BLUE
        fill = f"{_FILL};width:{100 * row.share:.0f}%;background-color:{colour}"
        drawn = f'<span style="{_TRACK}"><span style="{fill}"></span></span>'
    mark = coloured(_SLOWEST, AMBER) if row.is_slowest else ""
    return [
        (_CELL, bold(name_ranks(row.ranks))),
        (_name_style(row.name), _cut(row.name)),
        (_CELL, drawn),
        (_RIGHT, row.percent),
        *([(_MARK, mark)] if has_mark else ()),
        (_RIGHT, dim(row.amount)),
        (_CELL, dim(row.times)),
        # On the left: a range above, such as `15.4 to 16.6it/s`, moves no rate to the page's edge.
        (_CELL, dim(row.rate)),
        (_REST, _cut(clip(row.rest, _LONGEST_REST))),
    ]


def _name_style(name: str) -> str:
    """Return the style of a name: a longer name has the room that it needs on a wide page only."""
    return _CELL if len(name) <= _SHORT_NAME else _NAME.format(1 + 0.9 * len(name))


def _cut(text: str) -> str:
    """Write text of a cell that may be too narrow for it; the mouse over the text shows all."""
    return (
        f'<span title="{escape(text)}">{dim(text)}</span>' if len(text) > _SHORT_NAME else dim(text)
    )


def left_line(left: LeftBar) -> str:
    """Write a left bar as one line of text: `[0-3] epoch 0  63/63  10 s  5.8it/s`."""
    (row,) = _rows(BarTable(left.ranks, left=(left,)))
    parts = row.name, row.percent, row.amount, row.times, row.rate, row.rest
    return f"[{format_ranks(left.ranks)}] {'  '.join(filter(None, parts))}"


def bars_text(shown: BarTable) -> list[str]:
    """Write the table as lines of text with aligned columns; each line begins with its ranks."""
    rows = []
    for row in _rows(shown):
        whole, part = divmod(round((row.share or 0.0) * _CELLS * 8), 8)
        blocks = ("█" * whole + _PARTS[part].strip()).ljust(_CELLS)
        drawn = "" if row.share is None else f"|{blocks}|"
        mark = _SLOWEST if row.is_slowest else ""
        cells = (row.percent.rjust(4), mark, row.amount, row.times, row.rate, row.rest)
        rows.append([name_ranks(row.ranks), row.name, drawn, *cells])
    columns = filter(any, zip(*rows, strict=True))
    return [*_above(shown), *aligned([*zip(*columns, strict=True)])]
