"""Compares the curves of ranks, and draws them: a median, a band, and ranks outside the band.

The band lies between the lowest and the highest of the ranks that are not far from the others.  In
the notebook's process `html` shows the curves as small pictures, and `text` shows tables of
numbers.  Pure, but for the clock in `live_curves`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, zip_longest
from statistics import median, median_high, median_low
from typing import NamedTuple

from nbdist.output.axes import DECADE, LABEL_WIDTH, MAX_STEP_TICKS, Axis, with_axes
from nbdist.output.curves import MAX_CURVE_NAMES, Curve, CurvePoint, Curves, Odd, RunSeries, Series
from nbdist.output.events import Display
from nbdist.output.html_parts import AMBER, BLUE, RED, bold, coloured, dim, embed, line, size
from nbdist.output.wording import ranks_text
from nbdist.words import aligned, count, in_pool, name_ranks, one_line

MAX_CHART_NAME_LENGTH = 60  # characters

TABLE_STEPS = 8  # the most steps in the table of a curve

MAX_COLUMNS, MIN_COLUMNS, COLUMNS_OF_ALL = 240, 96, 16_000
"""Limits on the number of columns into which the steps of a curve are divided.

With few ranks there are at most `MAX_COLUMNS` columns.  With many ranks the limit is lower, so that
all ranks together have about `COLUMNS_OF_ALL` numbers, but it is never below `MIN_COLUMNS`.
"""


FAR, FAR_SHARE, FAR_COLUMNS = 6.0, 0.08, 3
"""The limits from which a rank counts as far from the other ranks.

A rank is far if its distance from the median of all ranks exceeds three bounds in `FAR_COLUMNS`
columns in a row.  The bounds are `FAR` times the median distance of all ranks, the share
`FAR_SHARE` of the range of the median over all columns, and 1 % of the median.
"""

MIN_RANKS = 3  # with fewer ranks, no rank is called far from the others


class Far(NamedTuple):
    """A rank that was outside the band from `step` to `until`; `is_back` is True if it came back.

    If the rank left the band several times, the steps are of the last time.  `mean` is the rank's
    number at the step `until`, and `median` the median of the other ranks there; ranks that are far
    too count only if there are no others.  `is_exact` is False if the first step outside is known
    only roughly, since a point can hold several steps.
    """

    rank: int
    step: float
    is_exact: bool
    until: float
    is_back: bool
    mean: float
    median: float


@dataclass(frozen=True)
class Bands:
    """The numbers of all ranks in a run, compared column by column.

    A column holds one or more consecutive steps.  A number is None if the column has no finite
    number, and none could be interpolated from the columns around it.  The band spans the ranks
    that are not far from the others, or all ranks if each is far.
    """

    steps: list[float]
    means: Mapping[int, list[float | None]]  # by rank: the mean of its numbers in each column
    medians: list[float | None]  # the medians of the means of all ranks
    low: list[float | None]  # the lowest mean of a rank in the band
    high: list[float | None]  # the highest mean of a rank in the band
    bottom: list[float | None]  # the lowest of all numbers of the ranks in the band
    top: list[float | None]  # the highest of all numbers of the ranks in the band
    far_ranks: tuple[Far, ...]  # the ranks that were far from the others
    odd: Mapping[int, Odd]  # by rank: its NaN and infinite numbers

    @property
    def has_numbers(self) -> bool:
        """Whether any rank has a finite number."""
        return any(each is not None for each in self.medians)


def bands_of(run: RunSeries) -> Bands:
    """Return the curves of all ranks in a run, compared in common columns of steps."""
    max_columns = max(MIN_COLUMNS, min(MAX_COLUMNS, COLUMNS_OF_ALL // len(run)))
    begin = min(each.columns[0][0] for each in run.values())
    end = max(each.last_step for each in run.values())
    columns = min(max_columns, max(map(len, run.values())))
    width = (end - begin) / max(1, columns - 1) or 1.0
    steps = [begin + at * width for at in range(columns)]
    if all(float.is_integer(step) for series in run.values() for step in series.columns[0]):
        steps = [*map(float, map(round, steps))]
    spread = {rank: _columns(series, begin, width, columns) for rank, series in run.items()}
    means = {rank: [each and each.mean for each in points] for rank, points in spread.items()}
    medians = [_median(at) for at in zip(*means.values(), strict=True)]
    far_ranks = tuple(_find_far_ranks(run, spread, medians)) if len(run) >= MIN_RANKS else ()
    away = {each.rank for each in far_ranks}
    # If every rank is far from the others at some step, no rank is left for the band.  Then the
    # band has all ranks.
    near = [points for rank, points in spread.items() if rank not in away] or [*spread.values()]
    at_once = [[each for each in at if each is not None] for at in zip(*near, strict=True)]
    odd = {rank: numbers for rank in sorted(run) if (numbers := run[rank].odd)}
    return Bands(
        steps,
        means,
        medians,
        [min((each.mean for each in at), default=None) for at in at_once],
        [max((each.mean for each in at), default=None) for at in at_once],
        [min((each.low for each in at), default=None) for at in at_once],
        [max((each.high for each in at), default=None) for at in at_once],
        far_ranks,
        odd,
    )


def _columns(series: Series, begin: float, width: float, columns: int) -> list[CurvePoint | None]:
    """Divide a rank's points into columns of `width` steps; return one point or None for each.

    The first column is around step `begin`.  The points in a column are merged.  If the nearest
    columns with points, on both sides of an empty column, have finite numbers, the empty column
    gets an interpolated point.  Other empty columns, and columns with only NaN or infinity, are
    None.
    """
    by_column: list[CurvePoint | None] = [None] * columns
    point: CurvePoint | None
    for point in series:
        at = min(columns - 1, round((point.step - begin) / width))
        before = by_column[at]
        by_column[at] = point if before is None else before + point
    last: int | None = None
    for at, point in enumerate(by_column):
        if point is None:
            continue
        if not point.finite:
            by_column[at], last = None, None
            continue
        if last is not None and (start := by_column[last]) is not None:
            for between in range(last + 1, at):
                share = (between - last) / (at - last)
                pairs = zip(start, point, strict=True)
                by_column[between] = CurvePoint(*(a * (1 - share) + b * share for a, b in pairs))
        last = at
    return by_column


def _median(numbers: Iterable[float | None]) -> float | None:
    values = [each for each in numbers if each is not None]
    if not values:
        return None
    low, high = median_low(values), median_high(values)
    return low if low == high else low / 2 + high / 2  # low + high could overflow


def _find_far_ranks(
    run: RunSeries,
    spread: Mapping[int, Sequence[CurvePoint | None]],
    medians: Sequence[float | None],
) -> Iterator[Far]:
    """Yield the ranks that were far from the others in at least `FAR_COLUMNS` columns in a row."""
    means = {rank: [each and each.mean for each in points] for rank, points in spread.items()}
    stretches = dict(_find_stretches(means, medians))
    for rank, (away, is_back) in stretches.items():
        first, last = spread[rank][away[0]], spread[rank][away[-1]]
        assert first is not None
        assert last is not None
        others = {other: by_column[away[-1]] for other, by_column in means.items() if other != rank}
        near = [mean for other, mean in others.items() if other not in stretches]
        # If all other ranks that have a number here are far too, take the median of these ranks.
        if (others_median := _median(near)) is None:
            others_median = _median(others.values())
        assert others_median is not None
        step, newest = run[rank].step_from(first.step), run[rank].finite_until(last.step)
        is_exact = step == first.step and first.finite + first.odd == 1
        yield Far(rank, step, is_exact, newest.step, is_back, newest.mean, others_median)


def _find_stretches(
    means: Mapping[int, Sequence[float | None]], medians: Sequence[float | None]
) -> Iterator[tuple[int, tuple[list[int], bool]]]:
    """Yield (rank, (columns, is_back)) for each rank that was far from the others.

    `means` has by rank the rank's number in each column, and `medians` the median in each column.
    `columns` are the last consecutive columns in which the rank was far.  `is_back` is True if the
    rank has numbers in later columns, so that it has come back.
    """
    middle = [each for each in medians if each is not None]
    least = FAR_SHARE * (max(middle) - min(middle)) if middle else 0.0
    bounds = [_bound(at, least) for at in zip(medians, *means.values(), strict=True)]
    for rank in sorted(means):
        away = [
            mean is not None and at is not None and bound is not None and abs(mean - at) > bound
            for mean, at, bound in zip(means[rank], medians, bounds, strict=True)
        ]
        columns = [at for at, mean in enumerate(means[rank]) if mean is not None]
        runs = [(is_away, [*at]) for is_away, at in groupby(columns, key=away.__getitem__)]
        long = [at for is_away, at in runs if is_away and len(at) >= FAR_COLUMNS]
        if long:
            yield rank, (long[-1], long[-1][-1] != columns[-1])


def _bound(at: Sequence[float | None], least: float) -> float | None:
    """Return the distance from the median above which a rank is far in a column.

    `at` has the median of the column, then the numbers of the ranks.  The result is at least
    `least`.  Return None if fewer than `MIN_RANKS` ranks have a number.
    """
    middle, *means = at
    distances = [abs(mean - middle) for mean in means if mean is not None and middle is not None]
    if middle is None or len(distances) < MIN_RANKS:
        return None
    return max(FAR * median(distances), least, abs(middle) / 100, 1e-12)


# --- as text ------------------------------------------------------------------------------------


def number_text(number: float | None) -> str:
    """Return a number as `0.1234` or `1.5e-05`, from 1e4 to 1e9 as `12,345`; write `-` for None."""
    if number is None:
        return "-"
    return f"{number:,.0f}" if 1e4 <= abs(number) < 1e9 else f"{number:.4g}"


def step_text(step: float) -> str:
    """Return a step rounded, as `1,200`; a step up to 100 has its fraction, as `0.25`."""
    return f"{round(step):,}" if abs(step - round(step)) < 1e-6 or step > 100 else f"{step:.4g}"


def shown_name(name: str) -> str:
    """Return a name's first line, cut to `MAX_CHART_NAME_LENGTH`; "(no name)" for a blank name."""
    return one_line(name, MAX_CHART_NAME_LENGTH) or "(no name)"


def is_same(low: float | None, high: float | None) -> bool:
    """Return True if two numbers are equal except for rounding errors, or if both are None."""
    return low == high or (low is not None and high is not None and math.isclose(low, high))


def headline(name: str, curve: Curve, bands: Bands) -> str:
    """Return a curve's newest numbers: `loss median 0.12 · step 99 · 0.11 to 0.13 on 4 ranks`.

    The line is about the newest run, and only says how many earlier runs there are.  In most cases
    the numbers are those of the last step that all ranks have tracked.  If one rank is much further
    than another, or if a rank has NaN or infinity, the numbers are those of the last step that any
    rank has tracked.  If several steps were merged into one point, the line says that the number is
    a mean.  If no number is finite, the line has only the name and the ranks.
    """
    run, earlier = curve.last, len(curve.runs) - 1
    end_of_line = f" · {count(earlier, 'earlier run')}" if earlier else ""
    columns = [at for at, each in enumerate(bands.medians) if each is not None]
    if not columns:
        return f"{shown_name(name)} · {ranks_text(run)}{end_of_line}"
    last = columns[-1]
    whole = [at for at in columns if all(means[at] is not None for means in bands.means.values())]
    # A rank that lacks the newest numbers has most likely made these steps, and will send their
    # numbers soon.  So take the last step that all ranks have.
    if whole and whole[-1] >= last * 3 / 4 and not bands.odd:
        last = whole[-1]
    end = math.inf
    if last < len(bands.steps) - 1:
        end = (bands.steps[last] + bands.steps[last + 1]) / 2
    # The line is about all ranks that have a number in this column, also ranks outside the band.
    compared = [run[rank] for rank, means in bands.means.items() if means[last] is not None]
    points = [series.finite_until(end) for series in compared]
    step = min(point.step for point in points)
    # A point may hold several steps.  Compare all ranks over the steps of all these points.
    stop = max(series.end_of(point) for series, point in zip(compared, points, strict=True))
    points = [series.merge_points(step, stop) for series in compared]
    means, merged_count = [each.mean for each in points], max(each.finite for each in points)
    when = f"step {step_text(step)}"
    if merged_count > 1:
        when = f"mean of {merged_count:,.0f} from {when} on"
    ranks = ranks_text(run) if len(compared) == len(run) else f"{len(compared)} of {len(run)} ranks"
    middle = number_text(_median(means))
    if len(compared) > 1:
        low, high = min(means), max(means)
        equal = " equal" if len(compared) == len(run) else ", equal"
        range_text = f"{number_text(low)} to {number_text(high)}"
        if is_same(low, high):
            ranks += equal
        else:
            middle, ranks = f"median {middle}", f"{range_text} on {ranks}"
    return f"{shown_name(name)} {middle} · {when} · {ranks}{end_of_line}"


def remarks(bands: Bands) -> list[str]:
    """Return a line for each rank that was far from the others, then lines on NaN or infinity.

    The band, which a far rank has left, spans the other ranks (`Bands`).  Ranks with the same count
    and first step of NaN or infinite numbers share a line.
    """
    lines = []
    for each in bands.far_ranks:
        begin = f"from {'' if each.is_exact else 'about '}step {step_text(each.step)}"
        when = (
            f"{begin} to {step_text(each.until)}, and came back" if each.is_back else f"{begin} on"
        )
        has = "had" if each.is_back else "has"
        numbers = f"at step {step_text(each.until)} it {has} {number_text(each.mean)}"
        others = f"beside a median of {number_text(each.median)} on the others"
        lines.append(f"rank {each.rank} left the band {when}: {numbers}, {others}")
    ranks: dict[Odd, list[int]] = {}
    for rank, odd in bands.odd.items():
        ranks.setdefault(odd, []).append(rank)
    return lines + [f"{name_ranks(of)}: {odd_text(odd)}" for odd, of in sorted(ranks.items())]


def odd_text(odd: Odd) -> str:
    """Return a text on a rank's NaN and infinite numbers: `NaN or infinity from step 12 on`."""
    step = step_text(odd.step)
    if odd.numbers == 1:
        return f"NaN or infinity at step {step} only"
    if odd.goes_on:
        return f"NaN or infinity from step {step} on"
    return f"NaN or infinity first at step {step}, {odd.numbers:,.0f} numbers in all"


def curves_text(curves: Curves, names: Sequence[str] = ()) -> str:
    """Return the last run of each curve, or only of the curves `names`, as lines and tables.

    A curve with a single step, or whose numbers are all equal, has no table.  Below the curves is
    the line of `more_text`, if any.
    """
    chosen = [*names] or [*curves.by_name]
    parts = [_table(name, curves.by_name[name]) for name in chosen]
    return "\n".join([*parts, *([left_out] if (left_out := more_text(curves)) else [])])


def more_text(curves: Curves) -> str:
    """Return a line on names without a curve, since there are too many; "" if all have a curve."""
    if not curves.more:
        return ""
    names = [*map(shown_name, curves.more)]
    names[6:] = [f"and {len(names) - 6} more"] * (len(names) > 6)
    return f"{MAX_CURVE_NAMES} names are kept; left out: {', '.join(names)}"


def _table(name: str, curve: Curve) -> str:
    run, bands = curve.last, bands_of(curve.last)
    far_ranks = [each.rank for each in bands.far_ranks]
    # The lowest and the highest number leave out far ranks, which have columns of their own, so the
    # titles say `others'`.  If every rank is far, no rank is left out, and the titles do not say
    # this.
    others = "others' " if 0 < len(far_ranks) < len(run) else ""
    columns = f"{others}lowest", f"{others}highest", *(f"rank {rank}" for rank in far_ranks)
    rows = [("step", "median", *columns)]
    last = len(bands.steps) - 1 if {*bands.low, *bands.high} != {bands.medians[-1]} else 0
    for at in sorted({round(last * number / (TABLE_STEPS - 1)) for number in range(TABLE_STEPS)}):
        numbers = bands.medians[at], bands.low[at], bands.high[at]
        away = (bands.means[rank][at] for rank in far_ranks)
        rows.append((step_text(bands.steps[at]), *map(number_text, (*numbers, *away))))
    head = headline(name, curve, bands)
    return "\n".join([head, *remarks(bands), *(aligned(rows) if last else ())])


# --- as a picture, with words in HTML around it --------------------------------------------------

CHART_WIDTH, CHART_HEIGHT = 480, 140  # the size of a picture, in pixels of a page
EDGE = 2  # pixels above the highest and below the lowest number, for the width of lines
SCALE = 2  # units of a picture's coordinates in one pixel

CHART_REDRAW_INTERVAL, SHARE = 0.5, 20
"""Limits on how often the curves of a running cell are drawn again.

Two drawings begin at least `CHART_REDRAW_INTERVAL` seconds apart.  If drawing is slow, they are
further apart, so that drawing takes at most about 1/`SHARE` of the time.
"""

MAX_PICTURES, MAX_CHART_BYTES, MAX_LIVE_CHART_BYTES = 6, 300_000, 40_000

GRID = "rgba(134,142,150,0.27)"
EXTREMES, BAND = "rgba(47,127,230,0.14)", "rgba(47,127,230,0.3)"
FAR_COLOURS = ("#e67700", "#be4bdb", "#0ca678", "#f76707")

LARGEST_NUMBER = 8e307  # no axis goes beyond: differences of larger numbers could be infinite

Values = Sequence[float | None]
"""The numbers of a curve, one for each step; None is a gap in the curve."""

_TILES = "display:flex;flex-wrap:wrap;column-gap:14px;align-items:flex-end;margin:4px 0"
_TILE = (
    f"flex:1 1 40%;max-width:{CHART_WIDTH + 8 * LABEL_WIDTH}px;min-width:240px;"
    "box-sizing:border-box;margin:2px 0"
)


def live_curves(curves: Curves, pool: str = "") -> tuple[str, str]:
    """Return the curves of a running cell as HTML and as text.

    If the last drawing is recent, or if no numbers have come since, return it again, since drawing
    takes long.  `pool` is the pool that a command in the HTML names, "" for the default pool.
    """
    begun = time.monotonic()
    due, version, html, text = curves.drawn
    if version != curves.version and begun >= due:
        html = curves_html(curves, max_bytes=MAX_LIVE_CHART_BYTES, pool=pool)
        text = curves_text(curves)
        now = time.monotonic()
        due = max(begun + CHART_REDRAW_INTERVAL, now + SHARE * (now - begun))
        curves.drawn = due, curves.version, html, text
    return html, text


def curves_html(
    curves: Curves, names: Sequence[str] = (), max_bytes: int = MAX_CHART_BYTES, pool: str = ""
) -> str:
    """Return the curves `names`, or all curves, as HTML of at most about `max_bytes` bytes.

    A picture that would exceed `max_bytes` is left out, but not the numbers of its curve.  After
    `MAX_PICTURES` curves the HTML only says how many names are left out, and which command shows
    them.  The command has the option `--pool` unless `pool` is "".
    """
    chosen, tiles = [*names] or [*curves.by_name], list[str]()
    for name in chosen[:MAX_PICTURES]:
        tiles.append(tile := _tile(name, curves.by_name[name], max_bytes))
        max_bytes -= size(tile)
    shows_one = in_pool("`%dist_plot NAME` shows one", pool)
    more = [f"{count(len(chosen) - MAX_PICTURES, 'more name')}: {shows_one}"]
    notes = [*(more if len(chosen) > MAX_PICTURES else ()), more_text(curves)]
    foot = line(dim(" · ".join(filter(None, notes))))
    return f'<div style="{_TILES}">{"".join(tiles)}</div>{foot}'


def _tile(name: str, curve: Curve, max_bytes: int) -> str:
    """Return a curve as HTML: its newest numbers and remarks, and its picture if there is one.

    The picture is left out if it has more than `max_bytes` bytes.  A curve with a single step, or
    without finite numbers, has no picture.
    """
    bands = bands_of(curve.last)
    title, text = shown_name(name), headline(name, curve, bands)
    newest, step, *ranks = text.removeprefix(title).split(" · ")
    frame = frame_of(bands) if bands.has_numbers and len(bands.steps) > 1 else None
    if frame is not None and frame.down_axis.is_log:
        ranks.append("log scale")
    # The ranks are on a second line: a single line would wrap, and move the picture, as soon as its
    # numbers become longer.
    head = line(bold(title) + dim(f"{newest} · {step}"))
    head += line(dim(" · ".join(ranks))) if ranks else ""
    colours = FAR_COLOURS[: len(bands.far_ranks)]
    for text, colour in zip_longest(remarks(bands), colours, fillvalue=AMBER):
        head += line(coloured(text, colour))
    if frame is None:
        return f'<div style="{_TILE}">{head}</div>'
    drawn = picture(bands, frame)
    shown = embed(Display({"image/svg+xml": drawn}, {"width": CHART_WIDTH, "height": CHART_HEIGHT}))
    if shown is None or size(shown) > max_bytes:
        return f'<div style="{_TILE}">{head}</div>'
    drawn = with_axes(shown, frame.down_axis, frame.across_axis, EDGE / CHART_HEIGHT)
    return f'<div style="{_TILE}">{head}{drawn}</div>'


def frame_of(bands: Bands) -> ChartRange:
    """Return the axes of a picture, with room for the band and for far ranks near the band.

    A rank that is further away than about the height of the band is drawn at the edge.  The axis of
    the numbers is logarithmic if all numbers are positive and the highest is at least ten times the
    lowest.
    """
    band = [each for each in (*bands.low, *bands.high) if each is not None]
    far = [
        each
        for far_rank in bands.far_ranks
        for each in bands.means[far_rank.rank]
        if each is not None
    ]
    low, high = min(band), max(band)
    lowest, highest = min([low, *far]), max([high, *far])
    is_whole = all(map(float.is_integer, bands.steps))
    steps = Axis(bands.steps[0], bands.steps[-1], max_ticks=MAX_STEP_TICKS, is_whole=is_whole)
    if lowest > 0 and highest / DECADE >= lowest:
        factor = max(DECADE, high / low)
        low, high = max(lowest, low / factor), min(highest, high * factor, LARGEST_NUMBER)
        return ChartRange(steps, Axis(low, high, is_log=True))
    room = (high - low) or abs(high) / 10 or 1.0
    low, high = max(lowest, low - room), min(highest, high + room)
    if high == low:
        low, high = low - room / 2, high + room / 2
    return ChartRange(steps, Axis(max(low, -LARGEST_NUMBER), min(high, LARGEST_NUMBER)))


class ChartRange(NamedTuple):
    """The axes of a picture: `across_axis` for the steps, and `down_axis` for the numbers."""

    across_axis: Axis
    down_axis: Axis

    def across(self, step: float) -> int:
        """Return the horizontal position of a step, in units of the picture."""
        return round(self.across_axis.share(step) * SCALE * CHART_WIDTH)

    def down(self, value: float) -> int:
        """Return a number's vertical position, limited to the edges, in units of the picture."""
        share = 1 - self.down_axis.share(value)
        return EDGE * SCALE + round(share * SCALE * (CHART_HEIGHT - 2 * EDGE))

    def parts(self, steps: Sequence[float], values: Values) -> Iterator[list[tuple[int, int]]]:
        """Yield the parts of a curve between its gaps, each as a list of points in the picture."""
        points = list[tuple[int, int]]()
        for step, value in zip(steps, values, strict=True):
            if value is not None:
                points.append((self.across(step), self.down(value)))
            elif points:
                yield points
                points = []
        if points:
            yield points

    def curve(self, steps: Sequence[float], values: Values, colour: str, width: int) -> str:
        """Return SVG that draws a curve as a line, interrupted at each step whose value is None."""
        return _stroke("".join(map(_path, self.parts(steps, values))), colour, width)

    def band(self, steps: Sequence[float], low: Values, high: Values, colour: str) -> str:
        """Return SVG that fills the area between two curves, `low` and `high`."""
        edges = zip(self.parts(steps, low), self.parts(steps, high), strict=True)
        areas = (_path(bottom + top[::-1]) for bottom, top in edges)
        return f'<path d="{"".join(areas)}" fill="{colour}"/>'

    def marks(self, steps: Iterable[float], colour: str) -> str:
        """Return SVG that draws a short vertical mark at the lower edge for each of these steps."""
        path = (f"M{self.across(step)} {SCALE * CHART_HEIGHT}v{-8 * SCALE}" for step in steps)
        return _stroke("".join(path), colour, 4 * SCALE)


def picture(bands: Bands, frame: ChartRange) -> str:
    """Draw one run of a curve as SVG: the median of all ranks, the band, and the first far ranks.

    The picture shows a far rank for each of `FAR_COLOURS`, and marks the steps at which ranks have
    NaN or infinity for the first time.  The page may be light or dark: the colours of the picture
    are visible on both.  All text is HTML beside the picture (`with_axes`), since only HTML has the
    page's own colour of text.
    """
    width, height, steps = CHART_WIDTH * SCALE, CHART_HEIGHT * SCALE, bands.steps
    grid = [f"M0 {at}h{width}" for at in (0, height)]
    grid += [f"M0 {frame.down(number)}h{width}" for number, _ in frame.down_axis.ticks]
    grid += [f"M{frame.across(step)} 0v{height}" for step, _ in frame.across_axis.ticks]
    lines = zip(FAR_COLOURS, bands.far_ranks, strict=False)
    shapes = [
        _stroke("".join(grid), GRID, 1),
        frame.band(steps, bands.bottom, bands.top, EXTREMES),
        frame.band(steps, bands.low, bands.high, BAND),
        frame.curve(steps, bands.medians, BLUE, 2 * SCALE),
        *(frame.curve(steps, bands.means[each.rank], colour, 2 * SCALE) for colour, each in lines),
        frame.marks((each.step for each in bands.odd.values()), RED),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{CHART_WIDTH}" height="{CHART_HEIGHT}" '
        f'viewBox="0 0 {width} {height}" fill="none" stroke-linejoin="round">'
        f"{''.join(shapes)}</svg>"
    )


def _stroke(path: str, colour: str, width: int) -> str:
    return f'<path d="{path}" stroke="{colour}" stroke-width="{width}"/>'


def _path(points: Sequence[tuple[int, int]]) -> str:
    """Return an SVG path through points, as relative moves, which are short.

    A single point becomes a line of one unit, since a line without length would be invisible.
    """
    (x, y), *others = points
    moves = [f"{c - a} {d - b}" for (a, b), (c, d) in pairwise(points)]
    return f"M{x} {y}l{' '.join(moves) if others else '1 0'}"
