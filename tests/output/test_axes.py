"""Tests of `nbdist.output.axes`: places of numbers on an axis, its ticks and their labels."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from nbdist.output.axes import MAX_AXIS_TICKS, MAX_STEP_TICKS, Axis, with_axes
from tests.output.lab import Panel

FINITE = some.floats(-8e307, 8e307)
POSITIVE = some.floats(5e-324, 8e306)


@given(some.tuples(FINITE, FINITE).map(sorted), some.sampled_from([MAX_AXIS_TICKS, MAX_STEP_TICKS]))
def test_ticks_of_a_linear_axis_are_true(ends: list[float], most: int) -> None:
    """Ticks are few, rise, are on the axis, and have labels that name their numbers."""
    check(Axis(ends[0], ends[1], max_ticks=most))


@given(some.tuples(POSITIVE, POSITIVE).map(sorted).filter(lambda ends: ends[1] >= 10 * ends[0]))
def test_ticks_of_a_logarithmic_axis_are_true(ends: list[float]) -> None:
    """Ticks of a logarithmic axis are true, too, also for the largest and smallest numbers."""
    check(Axis(ends[0], ends[1], is_log=True))


def check(axis: Axis) -> None:
    marks = [mark for mark, _ in axis.ticks]
    assert len(marks) <= axis.max_ticks
    assert all(axis.low <= mark <= axis.high for mark in marks)
    shares = [0.0, *map(axis.share, marks), 1.0]
    assert all(before <= after for before, after in pairwise(shares))
    gap = min((after - before for before, after in pairwise(marks)), default=math.inf)
    for mark, text in axis.ticks:
        assert float(text.replace(",", "")) == pytest.approx(mark, rel=1e-6, abs=gap / 1000)
        assert len(text) <= 14


@pytest.mark.parametrize(
    ("axis", "labels"),
    [
        (Axis(0.5, 3), "0.5 1.0 1.5 2.0 2.5 3.0"),
        (Axis(-3, 7), "-2 0 2 4 6"),
        (Axis(12345, 98765), "20,000 40,000 60,000 80,000"),
        (Axis(1e-6, 3e-6), "1e-6 1.5e-6 2e-6 2.5e-6 3e-6"),
        (Axis(0, 2, max_ticks=MAX_STEP_TICKS), "0 0.5 1.0 1.5 2.0"),
        (Axis(0, 2, is_whole=True), "0 1 2"),
        (Axis(0, 199, max_ticks=MAX_STEP_TICKS), "0 50 100 150"),
        (Axis(0.05, 3, is_log=True), "0.05 0.1 0.2 0.5 1 2"),
        (Axis(1e-12, 1, is_log=True), "1e-12 1e-9 1e-6 0.001 1"),
        (Axis(1.0, 1.0 + 1e-12), ""),
    ],
)
def test_ticks_are_round_numbers(axis: Axis, labels: str) -> None:
    """The ticks of usual axes are the round numbers that a reader expects."""
    assert " ".join(text for _, text in axis.ticks) == labels


def test_labels_are_at_their_ticks() -> None:
    """The spaces around the labels of an axis are in proportion to the distances of its ticks."""
    html = with_axes("<img>", Axis(0, 10, max_ticks=3), Axis(0, 8, max_ticks=3), 0.0)
    beside, below = (re.findall(r"flex:([\d.]+) 1 0", part) for part in html.split("<img>"))
    assert beside == ["0.0000", "0.5000", "0.5000", "0.0000"]
    assert below == ["0.0000", "0.6250", "0.3750"]
    assert Panel(html.replace("<img>", "")).lines == ["10", "5", "0", "step", "0", "5"]
