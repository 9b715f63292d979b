"""The progress bars of all ranks as one table: how far each rank is, and which is behind.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from statistics import median
from typing import NamedTuple

from nbdist.output.fingerprint import BAR_SIGNS, Bar, clock_text, number_of, read_bar
from nbdist.output.rank_transcript import FAILED, RankTranscript
from nbdist.output.screen import Line, Screen
from nbdist.output.transcript import Transcript
from nbdist.output.wording import (
    AMBER,
    BLUE,
    GREEN,
    bold,
    clip,
    coloured,
    dim,
    fold_ranks,
    line,
    table,
)
from nbdist.words import aligned, format_ranks, name_ranks

MOST_ROWS, SLOWEST_ROWS = 16, 6
_LOOK_BACK = 24
"""Lines below an unfinished bar, after which it counts as left."""

_MOST_AROUND, _MOST_BESIDE = 3, 4
_LONGEST_NAME = 40
# A rank is behind that is so far from the first, in parts of the whole and of the way so far.
_BEHIND, _BEHIND_SHARE = 0.02, 0.05
# Bars that began so many seconds apart, or such a part of their time, are not the same.
_BEGAN_APART, _BEGAN_APART_SHARE = 2.0, 0.25
_NUMBERS = re.compile(r"\d+")


class RankBars(NamedTuple):
    """The innermost bar of a rank, those around it, outermost first, and its last line of text."""

    rank: int
    bar: Bar
    around: tuple[Bar, ...] = ()
    line: Line | None = None

    @property
    def name(self) -> str:
        """What it is for: `epoch 3/10, step`."""
        names = [f"{bar.name} {bar.amount}".strip() for bar in self.around]
        return ", ".join(filter(None, [*names, self.bar.name]))

    @property
    def outer(self) -> Bar:
        return self.around[0] if self.around else self.bar

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in its name: of `epoch 3` the 3."""
        return tuple(map(int, _NUMBERS.findall(self.outer.name)))

    @property
    def overall(self) -> float:
        """How far it is in the outermost bar."""
        share = self.bar.position
        for bar in reversed(self.around):
            whole = number_of(bar.total)
            share = bar.position + (share / whole if whole else 0.0)
        return share


class BarTable(NamedTuple):
    """A row for each of the ranks, of many the slowest; `summary` says where all are.

    `behind` says how far the slowest is; `beside` are last lines of text, each with its ranks.
    """

    ranks: tuple[int, ...]
    rows: tuple[RankBars, ...]
    slowest: int | None = None
    behind: str = ""
    summary: str = ""
    beside: tuple[tuple[Line, tuple[int, ...]], ...] = ()

    def share(self, bars: RankBars) -> float | None:
        """Return how much of its bar is drawn, or of the one around it: the longer, the further.

        Of ranks in other epochs those in the first ones come first, whatever their bars say.
        """
        share = bars.bar.fraction
        if bars.around and number_of(bars.outer.total):
            share = min(1.0, bars.overall)
        epochs = sorted({each.numbers for each in self.rows})
        if share is None or self.slowest is None or len(epochs) == 1:
            return share
        return (epochs.index(bars.numbers) + share) / len(epochs)


def bars_of(said: RankTranscript) -> RankBars | None:
    """Find the bar that a rank is at: its last line, or an unfinished one not far above it."""
    if said.state in FAILED:
        return None
    tail = said.tail(_LOOK_BACK)
    read = [_read(item, said, is_last=item is tail[-1]) for item in tail]
    last = next((index for index in reversed(range(len(read))) if read[index]), None)
    if last is None or (bar := read[last]) is None:
        return None
    is_over = bar.is_finished or said.state != "running"
    if is_over and last < len(read) - 1:
        return None
    above = reversed(read[max(0, last - _MOST_AROUND) : last])
    around = [bar for bar in takewhile(lambda bar: bar and not bar.is_finished, above) if bar]
    lines = (item for item, found in zip(tail, read, strict=True) if found is None)
    texts = [item for item in lines if isinstance(item, Line) and item.text]
    return RankBars(said.rank, bar, tuple(around[::-1]), texts[-1] if texts else None)


def _read(item: object, said: RankTranscript, *, is_last: bool) -> Bar | None:
    if not isinstance(item, Line):
        return None
    piece = said.pieces[-1]
    if is_last:
        return read_bar(item.text, is_edited=isinstance(piece, Screen) and piece.is_edited)
    # There may be thousands of these, and reading one takes a while.
    return read_bar(item.text) if any(sign in item.text for sign in BAR_SIGNS) else None


def _bars_of_all(transcript: Transcript) -> list[RankBars]:
    """Find the bars of the ranks that are at one; none where no rank that runs is."""
    found = [bars for each in transcript if (bars := bars_of(each))]
    return found if any(transcript[bars.rank].state == "running" for bars in found) else []


def bar_table(transcript: Transcript) -> BarTable | None:
    """Lay out the bars of the ranks that are at one; None where no rank that runs is."""
    if not (found := _bars_of_all(transcript)):
        return None
    ranks, rows, summary = tuple(bars.rank for bars in found), found, ""
    if len(found) > MOST_ROWS:
        rows = sorted(found, key=lambda bars: (_way(bars), bars.rank))[:SLOWEST_ROWS]
        low, middle, high = _spread(found)
        left = _longest_left(found)
        parts = [_common_name(found), f"min {low} · median {middle} · max {high}"]
        parts += [] if left is None else [f"ETA {clock_text(left)}"]
        summary = " · ".join(filter(None, [*parts, "slowest first:"]))
    said = fold_ranks({bars.rank: bars.line for bars in found if bars.line})
    beside = [(text, tuple(of)) for text, of in said.items()][:_MOST_BESIDE]
    slowest, behind = _slowest(found)
    return BarTable(ranks, tuple(rows), slowest, behind, summary, tuple(beside))


def _slowest(found: Sequence[RankBars]) -> tuple[int | None, str]:
    """Find the rank that is clearly behind the first: `rank 2 is 20 % behind`; else None and ""."""
    low, high = min(found, key=_way), max(found, key=_way)
    if len({_NUMBERS.sub("#", bars.outer.name) for bars in found}) > 1:
        return None, ""
    if low.numbers != high.numbers:
        return low.rank, f"rank {low.rank} is behind"
    # Each epoch can have a bar of its own: those that began at other times are not the same.
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
    """Say in one line where all ranks are: `[0-3] epoch 63% (47-64) 12:01<07:10`; "" of none."""
    if not (found := _bars_of_all(transcript)):
        return ""
    low, middle, high = _spread(found)
    spread = "" if low == high else f"({low.rstrip('%')}-{high.rstrip('%')})"
    elapsed = max((b.bar.elapsed for b in found if b.bar.elapsed is not None), default=None)
    times = _times_text(elapsed, _longest_left(found))
    parts = [f"[{format_ranks(bars.rank for bars in found)}]", _common_name(found), middle]
    return " ".join(filter(None, [*parts, spread, times]))


def _common_name(found: Sequence[RankBars]) -> str:
    """Return the name that all bars have, as `epoch 2-3/10, step`; "" where they differ."""
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
    """Say how far the last, the middle and the first are."""
    order = sorted((bars.bar for bars in found), key=lambda bar: bar.position)
    if all(bar.fraction is not None for bar in order):
        ways = [bar.position for bar in order]
        return _percent(ways[0]), _percent(median(ways)), _percent(ways[-1])
    return order[0].done, order[len(order) // 2].done, order[-1].done


def _longest_left(found: Sequence[RankBars]) -> float | None:
    return max((left for bars in found if (left := bars.bar.left) is not None), default=None)


def _times_text(elapsed: float | None, remaining: float | None) -> str:
    """Write `00:12<00:07`, or what is known of it."""
    after = "" if remaining is None else f"<{clock_text(remaining)}"
    return f"{'' if elapsed is None else clock_text(elapsed)}{after}"


def _percent(share: float) -> str:
    """Write `63%`; 100% only of what is done."""
    return f"{int(100 * share + 1e-9)}%"


def _columns(bars: RankBars) -> tuple[str, str, str, str, str, str]:
    """Return the cells of a row beside the bar: name, per cent, amount, times, rate, the rest."""
    bar, name = bars.bar, bars.name
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 1]}…"
    percent = "" if bar.fraction is None else _percent(bar.fraction)
    times = _times_text(bar.elapsed, None if bar.is_finished else bar.remaining)
    return name, percent, bar.amount, times, bar.rate, bar.rest


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
    is_slowest, share, drawn = bars.rank == shown.slowest, shown.share(bars), ""
    name, percent, amount, times, rate, rest = _columns(bars)
    if share is not None:
        colour = GREEN if bars.bar.is_finished else AMBER if is_slowest else BLUE
        fill = f"{_FILL};width:{100 * share:.0f}%;background-color:{colour}"
        drawn = f'<span style="{_TRACK}"><span style="{fill}"></span></span>'
    slowest = f" {coloured('slowest', AMBER)}" if is_slowest else ""
    return [
        (_CELL, bold(name_ranks([bars.rank]))),
        (_CELL, dim(name)),
        (_CELL, drawn),
        (_RIGHT, percent),
        (_RIGHT, dim(amount)),
        (_CELL, dim(times)),
        (_RIGHT, dim(rate)),
        (_REST, dim(clip(rest, _LONGEST_REST)) + slowest),
    ]


def bars_text(shown: BarTable) -> list[str]:
    """Write the same in lines of which each names its rank, its columns below one another."""
    rows = []
    for bars in shown.rows:
        name, percent, *others = _columns(bars)
        share = shown.share(bars)
        whole, part = divmod(round((share or 0.0) * _CELLS * 8), 8)
        blocks = ("█" * whole + _PARTS[part].strip()).ljust(_CELLS)
        drawn = "" if share is None else f"|{blocks}|"
        rows.append([name_ranks([bars.rank]), name, drawn, percent.rjust(4), *others])
    columns = filter(any, zip(*rows, strict=True))
    lines = aligned([*zip(*columns, strict=True)])
    marks = ("  slowest" if bars.rank == shown.slowest else "" for bars in shown.rows)
    summary = [shown.summary] if shown.summary else []
    return [*summary, *map("".join, zip(lines, marks, strict=True))]
