"""Keeps the numbers that ranks have passed to `track`, as curves with a bounded number of points.

The notebook's process keeps `Curves` for each cell, and for the whole world over all cells.
`nbdist.output.chart` draws them.  Pure: no I/O here.
"""

from __future__ import annotations

import functools
import math
import operator
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from nbdist.errors import UsageError
from nbdist.output.events import MIN_STEP_WIDTH, OF_POINT, Tracked
from nbdist.words import one_line

MAX_POINTS, MIN_POINTS, POINTS_OF_ALL = 2_000, 100, 100_000
"""Limits on the points that are kept of a curve, in each run.

A rank keeps at most `MAX_POINTS`.  Many ranks share `POINTS_OF_ALL` equally, but each of them may
keep `MIN_POINTS`.
"""

MAX_CURVE_NAMES, MAX_RUNS = 64, 8

# For each name, `Curves` keeps at which step of the curve a task began, for so many newest tasks.
MAX_TASKS_SIDE_BY_SIDE = 64


class Series:
    """The points of one rank's curve in one run, in rising order of their steps.

    If there are more than `max_points` points, neighbouring points are merged.  From then on a
    point covers `wide` steps and begins at a multiple of `wide`, so that the points of different
    ranks can be compared.  `columns` has an array for each field of `CurvePoint`.
    """

    def __init__(self, max_points: int) -> None:
        self.columns = tuple(array("d") for _ in range(OF_POINT))
        self.wide = 0.0  # steps that a point covers; 0 as long as all points have had room
        self.odd: Odd | None = None
        self._most = max_points

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> Iterator[CurvePoint]:
        return map(CurvePoint, *self.columns)

    @property
    def last_step(self) -> float:
        """The step of the last point."""
        return self.columns[0][-1]

    def step_from(self, step: float) -> float:
        """Return the step of the first point at or after `step`, or else of the last point."""
        steps = self.columns[0]
        return steps[min(bisect_left(steps, step), len(steps) - 1)]

    def finite_until(self, step: float) -> CurvePoint:
        """Return the last finite point up to `step`, or else the first finite point after `step`.

        A point is finite if any of its numbers is finite.  The series must have such a point.
        """
        finite = self.columns[1]
        end = bisect_right(self.columns[0], step)
        indexes = (at for at in chain(reversed(range(end)), range(end, len(self))) if finite[at])
        return self._point(next(indexes))

    def end_of(self, point: CurvePoint) -> float:
        """Return the step before which a point ends, which is the step of the next point.

        The last point has no next point.  So assume one step for each number that was merged into
        it.
        """
        at = bisect_right(self.columns[0], point.step)
        return self.columns[0][at] if at < len(self) else point.step + point.finite + point.odd

    def merge_points(self, begin: float, end: float) -> CurvePoint:
        """Return one point for all points from step `begin` up to but not including step `end`.

        The first point at or after step `begin` is included, even if it begins at `end` or later.

        Before ranks are compared, the points of each rank are merged over the same steps, since a
        worker that sends its numbers late has merged more steps into a point than other workers.
        """
        first = bisect_left(self.columns[0], begin)
        points = map(self._point, range(first, max(first + 1, bisect_left(self.columns[0], end))))
        return functools.reduce(operator.add, points)

    def _point(self, at: int) -> CurvePoint:
        return CurvePoint(*(column[at] for column in self.columns))

    def add(self, point: CurvePoint) -> None:
        """Add a point, whose step must not be below the last point's step.

        A point with the last point's step, or in the same range of `wide` steps, is merged into the
        last point.  If there are more than `max_points` afterwards, neighbours are merged.
        """
        if point.odd:
            # A worker begins a new point at its first odd number (NaN or infinity), so `point.step`
            # is in most cases the step of that number.
            step, numbers, goes_on = self.odd or (point.step, 0, True)
            self.odd = Odd(step, numbers + point.odd, goes_on and not point.finite)
        elif self.odd and self.odd.goes_on:
            self.odd = self.odd._replace(goes_on=False)
        self._append(point)

    def _append(self, point: CurvePoint) -> None:
        if self.wide:
            point = point._replace(step=math.floor(point.step / self.wide) * self.wide)
        if len(self) and point.step <= self.last_step:
            last = CurvePoint(*(column.pop() for column in self.columns))
            point = last + point
        for column, value in zip(self.columns, point, strict=True):
            column.append(value)
        if len(self) > self._most:
            self._widen()

    def _widen(self) -> None:
        """Merge neighbouring points until at most about half of the allowed points are left."""
        span = self.last_step - self.columns[0][0]
        least = max(MIN_STEP_WIDTH, span / self._most)
        self.wide = self.wide or 2.0 ** math.ceil(math.log2(least))
        while len(self) > self._most // 2 + 1:
            self.wide *= 2
            points = [*self]
            for column in self.columns:
                del column[:]
            for point in points:
                self._append(point)


class Odd(NamedTuple):
    """The odd numbers in a rank's run: those that are NaN or infinite.

    `step` is the step of the first odd number, and `numbers` the count of all.  `goes_on` is True
    as long as no finite number has come after the first odd number.
    """

    step: float
    numbers: float
    goes_on: bool


class CurvePoint(NamedTuple):
    """Consecutive numbers of a rank, merged to one point that begins at `step`.

    `finite` is the count of finite numbers; `low`, `high` and `mean` are of the finite numbers.
    `odd` is the count of the other numbers, which are NaN or infinite.
    """

    step: float
    finite: float
    low: float
    high: float
    mean: float
    odd: float

    def __add__(self, other: object) -> CurvePoint:
        assert isinstance(other, CurvePoint)
        if not self.finite or not other.finite:
            kept = self if self.finite else other
            return kept._replace(step=self.step, odd=self.odd + other.odd)
        total = self.finite + other.finite
        mean = self.mean * (self.finite / total) + other.mean * (other.finite / total)
        low, high = min(self.low, other.low), max(self.high, other.high)
        return CurvePoint(self.step, total, low, high, mean, self.odd + other.odd)


RunSeries = dict[int, Series]
"""The series of one run, by rank; a rank begins a new run if it tracks a step below its last."""


class Curve:
    """The numbers of ranks under one name, in the newest `MAX_RUNS` runs.

    A rank begins a new run if it tracks a step below its last step.
    """

    def __init__(self) -> None:
        self.runs: dict[int, RunSeries] = {}
        self._current_runs: dict[int, int] = {}  # by rank: the number of its current run
        self._last_task = ("", 0)  # the last task's id, and the newest run when the task began

    @property
    def last(self) -> RunSeries:
        """The newest run."""
        return self.runs[max(self.runs)]

    def add_points(self, rank: int, task_id: str, points: Iterable[CurvePoint], ranks: int) -> None:
        """Add new points of a rank to its current run; a lower step than before begins another run.

        A rank's very first points belong to the run that was the newest when the task began, since
        other ranks may already have begun newer runs in this task.  Each rank keeps fewer points if
        there are very many `ranks` in all.
        """
        if task_id != self._last_task[0]:
            self._last_task = task_id, max(self.runs, default=0)
        max_points = min(MAX_POINTS, max(MIN_POINTS, POINTS_OF_ALL // max(1, ranks)))
        at = self._current_runs.setdefault(rank, self._last_task[1])
        for point in points:
            series = self.runs.get(at, {}).get(rank)
            if series is not None and point.step < series.last_step:
                at, series = at + 1, None
            if series is None:
                series = self.runs.setdefault(at, {}).setdefault(rank, Series(max_points))
                while len(self.runs) > MAX_RUNS:
                    del self.runs[min(self.runs)]
            series.add(point)
        self._current_runs[rank] = at


class Curves:
    """The curves of up to `MAX_CURVE_NAMES` names.

    `more` has all further names; their numbers are dropped.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Curve] = {}
        self.more: dict[str, None] = {}
        self.version = 0
        # By name: the ids of the last tasks that tracked the name without a step, and the step on
        # the curve with which each of these tasks began.
        self._first_steps: dict[str, dict[str, int]] = {}
        self._step_counts: dict[str, int] = {}  # by name: the number of steps counted in all tasks
        self.drawn = 0.0, -1, "", ""  # cache: time of the next drawing, version, HTML, text

    @property
    def has_odd_numbers(self) -> bool:
        """Whether a rank has NaN or infinity in the newest run of a curve."""
        runs = (each.last for each in self.by_name.values())
        return any(series.odd for run in runs for series in run.values())

    def with_continued_steps(self, task_id: str, tracked: Tracked) -> Tracked:
        """Return `tracked`, but with counted steps that continue the steps of earlier tasks.

        If a cell calls `track` without a step, the calls are counted as steps, from 0 in each task.
        A curve over several tasks must not begin at 0 again, so the number of steps in earlier
        tasks is added.
        """
        curves = dict(tracked.curves)
        for name, counted in tracked.counted.items():
            firsts = self._first_steps.setdefault(name, {})
            if task_id not in firsts and (task_id or not firsts):
                firsts[task_id] = self._step_counts.get(name, 0)
                if len(firsts) > MAX_TASKS_SIDE_BY_SIDE:
                    del firsts[next(iter(firsts))]
            # A thread that tracks numbers after its task has the task id "".  The thread's steps
            # continue the steps of the name's last task.
            first = firsts[task_id] if task_id in firsts else [*firsts.values()][-1]
            self._step_counts[name] = max(self._step_counts.get(name, 0), first + counted)
            moved = array("d", curves.get(name, ()))
            for at in range(0, len(moved), OF_POINT):
                moved[at] += first
            curves[name] = tuple(moved)
        return tracked._replace(curves=curves)

    def add(self, rank: int, task_id: str, tracked: Tracked, ranks: int) -> None:
        """Add the numbers that a rank, of `ranks` ranks in all, has tracked in a task."""
        self.version += 1
        for name, flat in tracked.curves.items():
            if name not in self.by_name and len(self.by_name) >= MAX_CURVE_NAMES:
                self.more.setdefault(name)
                continue
            points = (CurvePoint(*flat[at : at + OF_POINT]) for at in range(0, len(flat), OF_POINT))
            self.by_name.setdefault(name, Curve()).add_points(rank, task_id, points, ranks)

    def find_curve(self, name: str) -> Curve:
        """Return the curve of a name; raise UsageError if nothing was tracked under the name."""
        if name in self.by_name:
            return self.by_name[name]
        names = ", ".join(f"`{one_line(each, 60)}`" for each in [*self.by_name][:8])
        hint = f"Tracked: {names}." if names else "Nothing was tracked."
        raise UsageError(
            f"no numbers of `{one_line(name, 60)}`. {hint} "
            "`track(loss=loss)` in a cell tracks a number of each rank."
        )

    def table(self, name: str) -> Any:
        """Return the curve of a name as a pandas DataFrame with a row for each step of each run.

        Each rank has a column.  Steps that were merged into one point share a row, which has the
        mean of their finite numbers.  Raises UsageError if the name has no curve, or if pandas is
        not installed.
        """
        curve = self.find_curve(name)
        try:
            import pandas
        except ImportError:
            raise UsageError(
                "`world.tracked`: a table needs pandas: `%pip install pandas`. "
                "`%dist_plot` shows the numbers without it."
            ) from None
        rows: dict[tuple[int, float], dict[str, float]] = {}
        ranks = sorted({rank for run in curve.runs.values() for rank in run})
        for number, run in enumerate(curve.runs.values()):
            for rank, series in run.items():
                for point in series:
                    mean = point.mean if point.finite else math.nan
                    rows.setdefault((number, point.step), {})[f"rank {rank}"] = mean
        order = sorted(rows)
        run_column = {} if len(curve.runs) == 1 else {"run": [run for run, _ in order]}
        steps = [int(step) if step.is_integer() else step for _, step in order]
        columns = [f"rank {rank}" for rank in ranks]
        numbers = {each: [rows[at].get(each, math.nan) for at in order] for each in columns}
        return pandas.DataFrame({**run_column, "step": steps, **numbers})
