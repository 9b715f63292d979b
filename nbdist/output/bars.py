"""Lays out the progress bars of all ranks as one table that says how far the ranks are.

While a cell runs, a rank has a row for its current bar; if many ranks have a current bar, only the
slowest have rows.  The current bar is the lowest bar that the rank has drawn; it counts as current
until the rank has printed many lines below it.  A rank "has left" its earlier bars and, when the
cell has finished, also its last bar.  Ranks that have left a bar at the same position share a row.

The notebook's process draws the table in a panel.  Pure: no I/O here.
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

MAX_BAR_ROWS, SLOWEST_ROWS = 16, 6
_MAX_LEFT_LIVE = 4
_LOOK_BACK = 24
"""A bar is no longer a rank's current bar if at least this many rows of output are below it."""

_MAX_BARS_AROUND = 3
_LONGEST_NAME = 32  # characters; a longer name of a row is cut
# A rank in the same epoch as the leading rank counts as clearly behind if the leading rank is ahead
# by at least `_BEHIND`, which is a share of the whole bar if its total is known, and by more than
# the share `_BEHIND_SHARE` of the leading rank's own progress.
_BEHIND, _BEHIND_SHARE = 0.02, 0.05
# Bars of one name that began at very different times are not compared.  The times are very
# different if they are more than `_BEGAN_APART` seconds apart, and also more than the share
# `_BEGAN_APART_SHARE` of the longest elapsed time.
_BEGAN_APART, _BEGAN_APART_SHARE = 2.0, 0.25
_NUMBERS = re.compile(r"\d+")
_RATE_PARTS = re.compile(r"([\d.]+)(\D.*)")


class RankBars(NamedTuple):
    """A rank's current bar, and the bars `around` it if it is nested, the outermost first."""

    rank: int
    bar: Bar
    around: tuple[Bar, ...] = ()

    @property
    def name(self) -> str:
        """The names of the nested bars, with the amounts of outer bars: `epoch 3/10, step`."""
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
        """The progress in the outermost bar: a fraction, or an amount if no fraction is known.

        It includes the progress of the bars inside of the outermost bar, if its total is known.
        """
        share = self.bar.position
        for bar in reversed(self.around):
            whole = number_of(bar.total)
            share = bar.position + (share / whole if whole else 0.0)
        return share


class LeftBar(NamedTuple):
    """A row for a bar that `ranks` no longer draw, and that all of them left at the same position.

    In the table of a single rank (`bars_of_rank`) each bar has such a row, also a bar that the rank
    still draws.  `rate` and `other_text` summarize the bars of all `ranks`, as in `5.6 to 5.9it/s`.
    """

    ranks: tuple[int, ...]
    bar: Bar
    rate: str
    other_text: str


class BarTable(NamedTuple):
    """A table of bars: `rows` has current bars, and `left_bars` has bars that ranks have left.

    `ranks` has all ranks with a bar.  If many ranks have a current bar, only the slowest of them
    have rows, and `summary` says how far all of them are.  If a rank is clearly behind, `slowest`
    is this rank, and `behind` is a text such as `rank 2 is 20 % behind`; otherwise `slowest` is
    None and `behind` is "".  `more` is the number of bars that were left out before the first of
    `left_bars`.
    """

    ranks: tuple[int, ...]
    rows: tuple[RankBars, ...] = ()
    slowest: int | None = None
    behind: str = ""
    summary: str = ""
    left_bars: tuple[LeftBar, ...] = ()
    more: int = 0

    def share(self, bars: RankBars) -> float | None:
        """Return how much of a row's bar is drawn as filled, from 0 to 1; None if this is unknown.

        For nested bars, the progress of the outermost bar is drawn if its total is known.  If the
        names of outermost bars differ only in numbers, such as `epoch 1` and `epoch 2`, the drawn
        bar stands for all these epochs together, so a rank in an earlier epoch has a shorter filled
        part.
        """
        share = bars.bar.fraction
        if bars.around and number_of(bars.outer.total):
            share = min(1.0, bars.overall)
        epochs = sorted({each.numbers for each in self.rows})
        if share is None or self.slowest is None or len(epochs) == 1:
            return share
        return (epochs.index(bars.numbers) + share) / len(epochs)


def current_bars_of(output: RankTranscript, *, with_full: bool = True) -> RankBars | None:
    """Return a rank's current bar and the bars around it; None if the rank has no current bar.

    A rank that has failed or died has no current bar.  If `with_full` is False, a bar with output
    below it does not count once it is full or the rank no longer runs the cell.
    """
    if output.state in FAILED:
        return None
    rows_below, candidates = 0, list[tuple[int, Bar]]()
    for piece in reversed(output.pieces):
        if rows_below >= _LOOK_BACK:
            return None
        if not isinstance(piece, Screen):
            rows_below += 1
            continue
        candidates = _recent_bars(piece, piece.end + rows_below - _LOOK_BACK)
        rows_below += piece.end
        if candidates:
            break
    else:
        return None
    *above, (row, bar) = candidates
    is_over = bar.is_finished or output.state != "running"
    if is_over and not with_full and row < rows_below - 1:
        return None
    around: list[Bar] = []
    for at, outer in reversed(above):  # the bars in the rows right above
        if outer.is_finished or at != row - 1 or len(around) == _MAX_BARS_AROUND:
            break
        around.append(outer)
        row = at
    return RankBars(output.rank, bar, tuple(around[::-1]))


def _recent_bars(screen: Screen, first: int) -> list[tuple[int, Bar]]:
    """Return a pair (row, bar) for each bar of a screen from row `first` on."""
    bars = [(row, bar) for row, bar in screen.bars() if row >= first]
    if (edited := _edited_bar(screen)) and not (bars and bars[-1][0] == screen.cursor):
        bars.append((screen.cursor, edited))
    return bars


def _edited_bar(screen: Screen) -> Bar | None:
    """Return the bar in an overwritten last row; None if `Screen.bars` has it, or if there is none.

    In an overwritten row even a text such as `63 %` counts as a bar here, but not in `Screen.bars`.
    """
    if not screen.is_edited or screen.cursor != screen.end - 1:
        return None
    return next((read_bar(line.text, is_edited=True) for line in screen.lines(screen.cursor)), None)


def _all_current_bars(transcript: Transcript, *, with_full: bool = True) -> list[RankBars]:
    """Return the current bars of all ranks; [] if no rank with a current bar still runs the cell.

    `with_full` is passed to `current_bars_of`.
    """
    current_bars = (current_bars_of(each, with_full=with_full) for each in transcript)
    current = [*filter(None, current_bars)]
    return current if any(transcript[bars.rank].state == "running" for bars in current) else []


def find_left_bars(
    bars: Mapping[int, Sequence[Bar]], current: Sequence[RankBars] = ()
) -> list[LeftBar]:
    """Return the bars that no rank draws any more.

    `bars` has all bars of each rank, and `current` the bars that ranks still draw; `current` is
    empty for a finished cell.  As long as any rank draws `epoch 1`, the bars `epoch 1` of all ranks
    are left out.  Ranks whose bars stopped at the same position share a `LeftBar`.

    If a rank has drawn several bars of the same name and total, its second bar is compared only
    with the second bars of other ranks, and so on.
    """
    present = set[tuple[str, str, int]]()
    for each in current:
        times = Counter((bar.name, bar.total) for bar in bars[each.rank])
        keys = {(bar.name, bar.total) for bar in (*each.around, each.bar)}
        present |= {(*key, times[key]) for key in keys}
    by_place: dict[tuple[object, ...], dict[int, Bar]] = {}
    for rank, rank_bars in bars.items():
        times = Counter[tuple[str, str]]()
        for bar in rank_bars:
            key = bar.name, bar.total
            times[key] += 1
            if (*key, times[key]) not in present:
                position = bar.done or bar.fraction  # a bar can have a percentage only
                by_place.setdefault((*key, times[key], position, bar.is_finished), {})[rank] = bar
    return [_merge_left_bars(same) for same in by_place.values()]


def _merge_left_bars(bars: Mapping[int, Bar]) -> LeftBar:
    """Return one `LeftBar` for the bars that ranks have left at the same position."""
    first, *_ = bars.values()
    elapsed = max((bar.elapsed for bar in bars.values() if bar.elapsed is not None), default=None)
    other_text = fold_plain([bar.other_text for bar in bars.values()])
    rate = _rates([bar.rate for bar in bars.values()])
    return LeftBar(tuple(bars), first._replace(elapsed=elapsed, remaining=None), rate, other_text)


def _rates(rates: Sequence[str]) -> str:
    """Return rates as a text such as `5.6 to 5.9it/s`.

    Return "" if rates have different units, or if only some of them are known.
    """
    parts = [_RATE_PARTS.fullmatch(rate) for rate in rates]
    pairs = [(float(match[1]), match[2]) for match in parts if match]
    if len(pairs) < len(rates) or len({unit for _, unit in pairs}) > 1:
        return rates[0] if len({*rates}) == 1 else ""
    (low, unit), (high, _) = min(pairs), max(pairs)
    digits = ".3g" if high < 1000 else ".0f"
    places = max(len(format(end, digits).partition(".")[2]) for end in (low, high))
    texts = dict.fromkeys(f"{end:.{places}f}" for end in (low, high))
    return f"{' to '.join(texts)}{unit}"


def final_table(transcript: Transcript) -> BarTable | None:
    """Return the table of bars of a finished cell; None if no rank has a bar that is not erased."""
    left_bars = find_left_bars({each.rank: each.bars for each in transcript})
    return _add_left_bars(BarTable(()), left_bars, MAX_BAR_ROWS) if left_bars else None


def _add_left_bars(table: BarTable, left_bars: Sequence[LeftBar], max_rows: int) -> BarTable:
    """Return the table with the last `max_rows` left bars, and the number of earlier left bars."""
    ranks = {*table.ranks, *(rank for row in left_bars for rank in row.ranks)}
    more = max(0, len(left_bars) - max_rows)
    return table._replace(ranks=tuple(sorted(ranks)), left_bars=tuple(left_bars[more:]), more=more)


def bars_of_rank(output: RankTranscript) -> BarTable | None:
    """Return a table of all bars of one rank; None if the rank has no bars."""
    rows = [LeftBar((output.rank,), bar, bar.rate, bar.other_text) for bar in output.bars]
    return BarTable((output.rank,), left_bars=tuple(rows)) if rows else None


def bar_table(transcript: Transcript) -> BarTable | None:
    """Return the table of bars of a running cell; None if the cell has no bars."""
    bars = _all_current_bars(transcript)
    left_bars = find_left_bars({each.rank: each.bars for each in transcript}, bars)
    if not (bars or left_bars):
        return None
    table = _present_table(bars) if bars else BarTable(())
    # The table of the finished cell will have up to `MAX_BAR_ROWS` rows.  Show about as many now,
    # so that few rows appear or vanish when the cell ends.
    max_left = max(_MAX_LEFT_LIVE, MAX_BAR_ROWS - len(table.rows))
    return _add_left_bars(table, left_bars, max_left)


def _present_table(rank_bars: Sequence[RankBars]) -> BarTable:
    """Return the table of current bars; of more than `MAX_BAR_ROWS`, only the slowest have rows."""
    ranks, rows, summary = tuple(bars.rank for bars in rank_bars), [*rank_bars], ""
    if len(rank_bars) > MAX_BAR_ROWS:
        rows = sorted(rank_bars, key=lambda bars: (_progress_key(bars), bars.rank))[:SLOWEST_ROWS]
        low, middle, high = _spread(rank_bars)
        remaining = _longest_time_left(rank_bars)
        parts = [_common_name(rank_bars), f"min {low} · median {middle} · max {high}"]
        parts += [] if remaining is None else [f"ETA {clock_text(remaining)}"]
        summary = " · ".join(filter(None, [*parts, "slowest first:"]))
    slowest, behind = _slowest(rank_bars)
    return BarTable(ranks, tuple(rows), slowest, behind, summary)


def _slowest(rank_bars: Sequence[RankBars]) -> tuple[int | None, str]:
    """Return the rank that is clearly behind, and a text such as `rank 2 is 20 % behind`.

    Return None and "" if no rank is clearly behind, or if the bars cannot be compared.
    """
    low, high = min(rank_bars, key=_progress_key), max(rank_bars, key=_progress_key)
    if len({_NUMBERS.sub("#", bars.outer.name) for bars in rank_bars}) > 1:
        return None, ""
    if low.numbers != high.numbers:
        return low.rank, f"rank {low.rank} is behind"
    # The bars of different epochs may have the same name.  Bars that began at very different times
    # are most likely of different epochs, so ranks are not compared by them.
    running = [bars.outer for bars in rank_bars if not bars.outer.is_finished]
    elapsed = [bar.elapsed for bar in running if bar.elapsed is not None] or [0.0]
    longest, behind = max(elapsed), high.overall - low.overall
    if longest - min(elapsed) > max(_BEGAN_APART, _BEGAN_APART_SHARE * longest):
        return None, ""
    if behind < _BEHIND or behind <= _BEHIND_SHARE * high.overall:
        return None, ""
    return low.rank, f"rank {low.rank} is {100 * behind / high.overall:.0f} % behind"


def _progress_key(bars: RankBars) -> tuple[tuple[int, ...], float]:
    # The numbers in the name come first: `epoch 2` at 20 % is further than `epoch 1` at 80 %.
    return bars.numbers, bars.overall


def merged_line(transcript: Transcript) -> str:
    """Return a line on how far the current bars are: `[0-3] epoch 63% (47-64) 12:01<07:10`.

    If the bars have exactly two names, such as `epoch 1` and `epoch 2`, the line has a part for
    each name.  A full bar with output below it does not count.  Return "" if no bar counts.
    """
    named = dict[tuple[str, ...], list[RankBars]]()
    for bars in (rank_bars := _all_current_bars(transcript, with_full=False)):
        named.setdefault(tuple(bar.name for bar in (*bars.around, bars.bar)), []).append(bars)
    parts = named.values() if len(named) == 2 else filter(None, [rank_bars])
    return " · ".join(map(_progress_text, parts))


def _progress_text(rank_bars: Sequence[RankBars]) -> str:
    """Return a text on the progress of ranks, such as `[0-3] epoch 63% (47-64) 12:01<07:10`."""
    low, middle, high = _spread(rank_bars)
    spread = "" if low == high else f"({low.rstrip('%')}-{high.rstrip('%')})"
    elapsed = max((b.bar.elapsed for b in rank_bars if b.bar.elapsed is not None), default=None)
    times = _times_text(elapsed, _longest_time_left(rank_bars))
    parts = [f"[{format_ranks(bars.rank for bars in rank_bars)}]", _common_name(rank_bars), middle]
    return " ".join(filter(None, [*parts, spread, times]))


def _common_name(rank_bars: Sequence[RankBars]) -> str:
    """Return one name for the bars of all ranks, such as `epoch 2-3/10, step`.

    Return "" if the bars have different names, or if outer bars have different totals.
    """
    names = {bars.name for bars in rank_bars}
    if len(names) == 1:
        return names.pop()[: 2 * _LONGEST_NAME]
    inner = {bars.bar.name for bars in rank_bars}
    around = {tuple((bar.name, bar.total) for bar in bars.around) for bars in rank_bars}
    if len(around) > 1 or len(inner) > 1:
        return ""
    outer = []
    for bars in zip(*(bars.around for bars in rank_bars), strict=True):
        low, high = (pick(bars, key=lambda bar: bar.position) for pick in (min, max))
        done = low.done if low.done == high.done else f"{low.done}-{high.done}"
        outer.append(f"{low.name} {low._replace(done=done).amount}".strip())
    return ", ".join(filter(None, [*outer, inner.pop()]))


def _spread(rank_bars: Sequence[RankBars]) -> tuple[str, str, str]:
    """Return the least, the median and the greatest progress as texts such as `47%`.

    If the fraction of any bar is unknown, the texts are the amounts done.
    """
    order = sorted((bars.bar for bars in rank_bars), key=lambda bar: bar.position)
    if all(bar.fraction is not None for bar in order):
        positions = [bar.position for bar in order]
        return _percent(positions[0]), _percent(median(positions)), _percent(positions[-1])
    return order[0].done, order[len(order) // 2].done, order[-1].done


def _longest_time_left(rank_bars: Sequence[RankBars]) -> float | None:
    return max((time for b in rank_bars if (time := b.bar.time_left) is not None), default=None)


def _times_text(elapsed: float | None, remaining: float | None) -> str:
    """Return elapsed and remaining time as `00:12<00:07`, leaving out a time that is not known."""
    after = "" if remaining is None else f"<{clock_text(remaining)}"
    return f"{'' if elapsed is None else clock_text(elapsed)}{after}"


def _percent(share: float) -> str:
    """Return a share as `63%`, rounded down, so that only a finished bar is at `100%`."""
    return f"{int(100 * share + 1e-9)}%"


class _Row(NamedTuple):
    """The texts of a row; `share` is the filled share of the drawn bar, None to draw no bar."""

    ranks: Sequence[int]
    name: str
    share: float | None
    percent: str
    amount: str
    times: str
    rate: str
    other_text: str
    is_finished: bool
    is_slowest: bool = False


def _rows(shown: BarTable) -> Iterator[_Row]:
    for left_bar in shown.left_bars:
        bar = left_bar.bar
        percent = "" if bar.fraction is None or bar.is_finished else _percent(bar.fraction)
        took = whole_seconds_text(bar.elapsed) if bar.elapsed else ""
        beside = (percent, bar.amount, took, left_bar.rate, left_bar.other_text, bar.is_finished)
        yield _Row(left_bar.ranks, _shorten_name(bar.name), bar.fraction, *beside)
    for bars in shown.rows:
        bar = bars.bar
        percent = "" if bar.fraction is None else _percent(bar.fraction)
        times = _times_text(bar.elapsed, None if bar.is_finished else bar.remaining)
        beside = (percent, bar.amount, times, bar.rate, bar.other_text, bar.is_finished)
        is_slowest = bars.rank == shown.slowest
        yield _Row([bars.rank], _shorten_name(bars.name), shown.share(bars), *beside, is_slowest)


def _shorten_name(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


_ANY = "padding:0 10px 0 0;border:none;vertical-align:top;text-align:left;white-space:nowrap"
_FIXED = f"{_ANY};width:1px"  # the browser makes the cell as wide as its text, which never wraps
_SHORT_NAME = 12  # characters
_CHARACTER = 0.605  # the width of a character in em, rounded up; JupyterLab drops the unit `ch`
_NAME = (
    f"{_ANY};max-width:0;overflow:hidden;text-overflow:ellipsis;width:{{:.0f}}%;"
    f"min-width:{_CHARACTER * (_SHORT_NAME - 1):.1f}em"
)
_SLOWEST = "slowest"
# A bar's other text, and the rate before it, wrap to a line below if the page is too narrow.
_BESIDE_NAME = "display:flex;flex-wrap:wrap;column-gap:10px"
_COLUMN = "display:inline-block;min-width:{:.1f}em;text-align:{}"
_REST = "flex:1 1 {:.1f}em;min-width:0;white-space:normal;overflow-wrap:break-word"
# The width of other texts is rounded up to a multiple of this many characters, so that a text with
# one more digit seldom moves to a new line.
_REST_UNIT = 2
_FILL = "display:inline-block;vertical-align:middle;height:10px;border-radius:2px"
_TRACK = f"{_FILL};width:80px;background-color:{{}};line-height:0"
_LONGEST_REST = 120
# In characters: about the width of a drawn bar with its gaps, and of a narrow page.
_BAR_ROOM, _NARROW_PAGE = 16, 73
_BAR_WIDTH, _BAR_PARTS = 20, " ▏▎▍▌▋▊▉"


def bars_html(shown: BarTable) -> str:
    """Draw the table as HTML, below a line with the texts of `_lines_above`, if there are any."""
    rows = [*_rows(shown)]
    # Reserve a column for the word `slowest` before any rank is slow: a column that appears later
    # would move the columns behind it.
    widths = _widths(rows, has_mark=len(shown.rows) > 1)
    drawn = table((_row_html(row, widths) for row in rows), ";width:100%")
    return line(dim(" · ".join(_lines_above(shown)))) + drawn


def _lines_above(shown: BarTable) -> list[str]:
    """Return the texts above the table: how many earlier bars it lacks, and its summary, if any."""
    more = f"… {count(shown.more, 'earlier bar')}" if shown.more else ""
    return [*filter(None, [more, shown.summary])]


class _Widths(NamedTuple):
    """The width of each column behind the drawn bars, in characters; 0 for no column.

    `bar` is not a width, but 1 if bars are drawn and 0 if none are.
    """

    bar: int
    percent: int
    mark: int
    amount: int
    times: int
    rate: int
    other_text: int


def _widths(rows: Sequence[_Row], *, has_mark: bool) -> _Widths:
    """Return the widths with which the columns of all rows are aligned.

    The column of amounts has room for `500/500` if a total is 500, so that the columns do not move
    while the bars proceed.
    """
    totals = [row.amount.partition("/")[2] for row in rows]
    # Rows of several ranks may have long sets such as `{1, 2, 3}`.  Columns as wide as a long set
    # would waste room in other rows.
    own_rows = [row for row in rows if len(row.ranks) == 1]
    longest = min(_LONGEST_REST, max((len(row.other_text) for row in own_rows), default=0))
    return _Widths(
        any(row.share is not None for row in rows),
        len("100%") * any(row.percent for row in rows),
        len(_SLOWEST) * has_mark,
        max(map(len, [*(row.amount for row in rows), *(f"{each}/{each}" for each in totals)])),
        max(len(row.times) for row in rows),
        max((len(row.rate) for row in own_rows), default=0),
        -(-longest // _REST_UNIT) * _REST_UNIT,
    )


def _row_html(row: _Row, widths: _Widths) -> list[tuple[str, str]]:
    """Return the cells of a row as pairs of a style and HTML.

    On a narrow page, a long name is cut, and the row's `other_text` wraps to a line below the bar.
    """
    columns = [_drawn_bar(row)] if widths.bar else []
    columns += [
        _column(html, width, side)
        for html, width, side in (
            (row.percent, widths.percent, "right"),
            (coloured(_SLOWEST, AMBER) if row.is_slowest else "", widths.mark, "left"),
            (dim(row.amount), widths.amount, "right"),
            (dim(row.times), widths.times, "left"),
        )
        if width
    ]
    rate, other_text = dim(row.rate), clip(row.other_text, _LONGEST_REST)
    ranks = name_ranks(row.ranks)
    texts = (ranks, _SHORT_NAME * " ", row.rate)
    columns_width = _BAR_ROOM + sum(widths[:-2]) + sum(len(text) + 1 for text in texts)
    if len(row.name) > _SHORT_NAME and not other_text and columns_width <= _NARROW_PAGE:
        # The rate stays beside the bar: the name is cut if the page is too narrow for both.
        columns.append(rate)
        rate = ""
    # The spaces separate the columns on pages that drop styles, such as GitHub.
    parts = [f'<span style="white-space:nowrap">{" ".join(columns)}</span>']
    if other_text:
        is_own = len(row.ranks) == 1
        width = max(len(row.rate), widths.rate) + 1
        width += max(len(other_text), widths.other_text * is_own)
        if widths.rate:
            rate = _column(rate, widths.rate, "left")
        text_html = " ".join(filter(None, [rate, dim(other_text)]))
        parts.append(f'<span style="{_REST.format(_CHARACTER * width)}">{text_html}</span>')
    elif rate:
        parts.append(f'<span style="white-space:nowrap">{rate}</span>')
    meter = f'<div style="{_BESIDE_NAME}">{" ".join(parts)}</div>'
    return [
        (_FIXED, bold(ranks)),
        _name_cell(row.name),
        (_ANY.replace("0 10px 0 0", "0"), meter),
    ]


def _drawn_bar(row: _Row) -> str:
    """Draw a bar in the colour of its state; leave an empty place if its share is not known."""
    if row.share is None:
        return f'<span style="{_TRACK.format("transparent")}"></span>'
    colour = GREEN if row.is_finished else AMBER if row.is_slowest else BLUE
    fill = f"{_FILL};width:{100 * row.share:.0f}%;background-color:{colour}"
    track = _TRACK.format("rgba(128,128,128,0.25)")
    return f'<span style="{track}"><span style="{fill}"></span></span>'


def _column(html: str, width: int, side: str) -> str:
    return f'<span style="{_COLUMN.format(_CHARACTER * width, side)}">{html}</span>'


def _name_cell(name: str) -> tuple[str, str]:
    """Return a cell with a bar's name; a long name, which narrow pages cut, also has a tooltip."""
    if len(name) <= _SHORT_NAME:
        return _FIXED, dim(name)
    return _NAME.format(1 + 0.9 * len(name)), f'<span title="{escape(name)}">{dim(name)}</span>'


def left_bar_line(left_bar: LeftBar) -> str:
    """Return a line for a bar that ranks have left: `[0-3] epoch 0  63/63  10 s  5.8it/s`."""
    (row,) = _rows(BarTable(left_bar.ranks, left_bars=(left_bar,)))
    parts = row.name, row.percent, row.amount, row.times, row.rate, row.other_text
    return f"[{format_ranks(left_bar.ranks)}] {'  '.join(filter(None, parts))}"


def bars_text(shown: BarTable) -> list[str]:
    """Return the lines of the table as text: the texts above it, then rows with aligned columns."""
    rows = []
    for row in _rows(shown):
        whole, part = divmod(round((row.share or 0.0) * _BAR_WIDTH * 8), 8)
        blocks = ("█" * whole + _BAR_PARTS[part].strip()).ljust(_BAR_WIDTH)
        drawn = "" if row.share is None else f"|{blocks}|"
        mark = _SLOWEST if row.is_slowest else ""
        cells = (row.percent.rjust(4), mark, row.amount, row.times, row.rate, row.other_text)
        rows.append([name_ranks(row.ranks), row.name, drawn, *cells])
    columns = filter(any, zip(*rows, strict=True))
    return [*_lines_above(shown), *aligned([*zip(*columns, strict=True)])]
