"""Curves of ranks held against one another: median, band, ranks that leave it; as text.  Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import NamedTuple

from nbdist.output.curves import MOST_NAMES, Curve, Curves, Point, Run, Series
from nbdist.output.wording import ranks_text
from nbdist.words import aligned, count, name_ranks, one_line

LONGEST_NAME = 60  # characters of one that are shown

ROWS = 8  # of a table of the steps of a curve

MOST_COLUMNS, FEWEST_COLUMNS, COLUMNS_OF_ALL = 480, 96, 16_000
"""Of what is drawn and judged, for each rank and for all of them."""


FAR, FAR_SHARE, LONG = 6.0, 0.08, 3
"""A rank is far from the others if its distance from the median is `FAR` times the usual one and
`FAR_SHARE` of the median's range, in `LONG` columns in a row."""

FEWEST_RANKS = 3  # of which one can be unlike the others


class Far(NamedTuple):
    """A rank that has left the band: at which step, whether it is back, its number and theirs."""

    rank: int
    step: float
    is_back: bool
    mean: float
    median: float


@dataclass(frozen=True)
class Bands:
    """A run of all ranks in columns of steps; None where there is nothing, or nothing finite.

    Of the ranks that are not `far`, `low` and `high` are the lowest and highest rank, `bottom` and
    `top` the extremes of all steps of a column.  `odd` are ranks with NaN or infinity, and the
    first step of these.
    """

    steps: list[float]
    means: Mapping[int, list[float | None]]
    medians: list[float | None]
    low: list[float | None]
    high: list[float | None]
    bottom: list[float | None]
    top: list[float | None]
    far: tuple[Far, ...]
    odd: Mapping[int, float]

    @property
    def has_numbers(self) -> bool:
        """Whether any rank has a finite number."""
        return any(each is not None for each in self.medians)


def bands_of(run: Run) -> Bands:
    """Hold the ranks of a run against one another."""
    most = max(FEWEST_COLUMNS, min(MOST_COLUMNS, COLUMNS_OF_ALL // len(run)))
    begin = min(each.columns[0][0] for each in run.values())
    end = max(each.last_step for each in run.values())
    columns = min(most, max(map(len, run.values())))
    width = (end - begin) / max(1, columns - 1) or 1.0
    steps = [begin + at * width for at in range(columns)]
    spread = {rank: _columns(series, begin, width, columns) for rank, series in run.items()}
    means = {rank: [each and each.mean for each in found] for rank, found in spread.items()}
    medians = [_median(at) for at in zip(*means.values(), strict=True)]
    far = tuple(_far(means, medians, steps)) if len(run) >= FEWEST_RANKS else ()
    away = {each.rank for each in far}
    near = [found for rank, found in spread.items() if rank not in away]
    at_once = [[each for each in at if each is not None] for at in zip(*near, strict=True)]
    odd = {
        rank: next(point.step for point in run[rank] if point.odd)
        for rank in sorted(run)
        if any(run[rank].columns[-1])
    }
    return Bands(
        steps,
        means,
        medians,
        [min((each.mean for each in at), default=None) for at in at_once],
        [max((each.mean for each in at), default=None) for at in at_once],
        [min((each.low for each in at), default=None) for at in at_once],
        [max((each.high for each in at), default=None) for at in at_once],
        far,
        odd,
    )


def _columns(series: Series, begin: float, width: float, columns: int) -> list[Point | None]:
    """Spread a rank's points over the columns; between two points it is what both lead to."""
    found: list[Point | None] = [None] * columns
    point: Point | None
    for point in series:
        at = min(columns - 1, round((point.step - begin) / width))
        before = found[at]
        found[at] = point if before is None else before + point
    last: int | None = None
    for at, point in enumerate(found):
        if point is None:
            continue
        if not point.finite:
            found[at], last = None, None
            continue
        if last is not None and (start := found[last]) is not None:
            for between in range(last + 1, at):
                share = (between - last) / (at - last)
                ends = zip(start, point, strict=True)
                found[between] = Point(*(a * (1 - share) + b * share for a, b in ends))
        last = at
    return found


def _median(numbers: Iterable[float | None]) -> float | None:
    found = [each for each in numbers if each is not None]
    return median(found) if found else None


def _far(
    means: Mapping[int, list[float | None]],
    medians: Sequence[float | None],
    steps: Sequence[float],
) -> Iterator[Far]:
    """Find the ranks that are away from the others for longer than by chance."""
    middle = [each for each in medians if each is not None]
    least = FAR_SHARE * (max(middle) - min(middle)) if middle else 0.0
    bounds = [_bound(at, least) for at in zip(medians, *means.values(), strict=True)]
    for rank in sorted(means):
        away = [
            mean is not None and at is not None and bound is not None and abs(mean - at) > bound
            for mean, at, bound in zip(means[rank], medians, bounds, strict=True)
        ]
        known = [at for at, mean in enumerate(means[rank]) if mean is not None]
        runs = [(is_away, [*at]) for is_away, at in groupby(known, key=away.__getitem__)]
        stretches = [at for is_away, at in runs if is_away and len(at) >= LONG]
        if stretches:
            first, last = stretches[-1][0], stretches[-1][-1]
            theirs, own = medians[last], means[rank][last]
            assert theirs is not None
            assert own is not None
            yield Far(rank, steps[first], last != known[-1], own, theirs)


def _bound(at: Sequence[float | None], least: float) -> float | None:
    """Say how far from the median is far, where there are enough ranks to tell."""
    middle, *means = at
    found = [abs(mean - middle) for mean in means if mean is not None and middle is not None]
    if middle is None or len(found) < FEWEST_RANKS:
        return None
    return max(FAR * median(found), least, abs(middle) / 100, 1e-12)


# --- as text ------------------------------------------------------------------------------------


def number_text(number: float | None) -> str:
    """Write four digits: `0.1234`, `1.5e-05`, `12,345`."""
    if number is None:
        return "-"
    return f"{number:,.0f}" if 1e4 <= abs(number) < 1e9 else f"{number:.4g}"


def step_text(step: float) -> str:
    """Write a step, which is rarely a fraction."""
    return f"{round(step):,}" if abs(step - round(step)) < 1e-6 or step > 100 else f"{step:.4g}"


def shown_name(name: str) -> str:
    """Return a name in one line that is not too long."""
    return one_line(name, LONGEST_NAME) or "(no name)"


def is_same(low: float | None, high: float | None) -> bool:
    """Return True for numbers that differ in nothing but how their means were rounded."""
    return low == high or (low is not None and high is not None and math.isclose(low, high))


def headline(name: str, run: Run, bands: Bands) -> str:
    """Say how far it has come: `loss 0.12 · step 99 · 4 ranks 0.11 to 0.13`."""
    known = [at for at, each in enumerate(bands.medians) if each is not None]
    if not known:
        return f"{shown_name(name)} · {ranks_text(run)}"
    last = known[-1]
    whole = [at for at in known if all(means[at] is not None for means in bands.means.values())]
    # The others have come as far, and will be heard of soon.
    if whole and whole[-1] >= last * 3 / 4 and not bands.odd:
        last = whole[-1]
    # The last column's step is its first one.
    is_end = last == len(bands.steps) - 1
    step = max(series.last_step for series in run.values()) if is_end else bands.steps[last]
    there = [rank for rank, means in bands.means.items() if means[last] is not None]
    ranks = ranks_text(run) if len(there) == len(run) else f"{len(there)} of {len(run)} ranks"
    low, high = bands.low[last], bands.high[last]
    if len(there) > 1:
        spread = f"{number_text(low)} to {number_text(high)}"
        ranks += " equal" if is_same(low, high) else f" {spread}"
    number = number_text(bands.medians[last])
    return f"{shown_name(name)} {number} · step {step_text(step)} · {ranks}"


def remarks(bands: Bands) -> list[str]:
    """Say which ranks have left the band, and which have numbers that are none."""
    found = []
    for far in bands.far:
        when = f"from step {step_text(far.step)} on"
        if far.is_back:
            when = f"at step {step_text(far.step)}, and came back"
        numbers = f"{number_text(far.mean)}, the others {number_text(far.median)}"
        found.append(f"rank {far.rank} left the band {when}: {numbers}")
    ranks: dict[float, list[int]] = {}
    for rank, step in bands.odd.items():
        ranks.setdefault(step, []).append(rank)
    for step, those in sorted(ranks.items()):
        found.append(f"{name_ranks(those)}: NaN or infinity from step {step_text(step)} on")
    return found


def curves_text(curves: Curves, names: Sequence[str] = ()) -> str:
    """Write a table of each curve's last run."""
    chosen = [*names] or [*curves.by_name]
    parts = [_table(name, curves.by_name[name]) for name in chosen]
    return "\n".join([*parts, *([left_out] if (left_out := more_text(curves)) else [])])


def more_text(curves: Curves) -> str:
    """Say which names were left out, "" for none."""
    if not curves.more:
        return ""
    return (
        f"{MOST_NAMES} names are kept; left out: {', '.join(map(shown_name, [*curves.more][:6]))}"
    )


def _table(name: str, curve: Curve) -> str:
    run, bands = curve.last, bands_of(curve.last)
    far = [each.rank for each in bands.far]
    rows = [("step", "median", "lowest", "highest", *(f"rank {rank}" for rank in far))]
    last = len(bands.steps) - 1 if {*bands.low, *bands.high} != {bands.medians[-1]} else 0
    for at in sorted({round(last * number / (ROWS - 1)) for number in range(ROWS)}):
        numbers = bands.medians[at], bands.low[at], bands.high[at]
        others = (bands.means[rank][at] for rank in far)
        rows.append((step_text(bands.steps[at]), *map(number_text, (*numbers, *others))))
    earlier = count(len(curve.runs) - 1, "earlier run") if len(curve.runs) > 1 else ""
    head = " · ".join(filter(None, [headline(name, run, bands), earlier]))
    return "\n".join([head, *remarks(bands), *(aligned(rows) if last else ())])
