"""Figures, their statistics, and the table; no measuring here."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTHS = (9, 48, 9, 9, 9, 5, 8, 6)
TITLES = ("row", "what", "median", "min", "max", "unit", "budget", "ratio")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: what several runs gave."""

    row: str
    what: str
    unit: str
    values: tuple[float, ...]
    budget: float | None = None
    busy: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def ratio(self) -> float | None:
        return None if self.budget is None else self.median / self.budget

    @property
    def remark(self) -> str:
        missed = self.ratio is not None and self.ratio > 1
        return " ".join(filter(None, ["miss" if missed else "", "busy" if self.busy else ""]))


def percentile(values: Sequence[float], percent: int) -> float:
    """A value that so many percent of the others do not exceed, interpolated."""
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def header(runs: int) -> str:
    """Where and under which load the figures were taken, and the titles of the table."""
    loads = " ".join(f"{load:.2f}" for load in os.getloadavg())
    where = f"Python {platform.python_version()}, {os.cpu_count()} cores, {runs} runs"
    titles = _columns(TITLES)
    return f"{where}, load average {loads}\n{titles}\n{'-' * len(titles)}"


def line(figure: Figure) -> str:
    """The figure as a line of the table."""
    budget = "-" if figure.budget is None else _short(figure.budget)
    ratio = "-" if figure.ratio is None else f"{figure.ratio:.2f}"
    spread = [_short(value) for value in (figure.median, min(figure.values), max(figure.values))]
    cells = (figure.row, figure.what, *spread, figure.unit, budget, ratio)
    return f"{_columns(cells)}  {figure.remark}".rstrip()


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _columns(cells: Iterable[str]) -> str:
    padded = [
        cell.ljust(width) if index in (0, 1, 5) else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    ]
    return " ".join(padded)
