"""Tests of `nbdist.worker.tracking`: numbers of a rank, from the call to the messages."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch

import nbdist
from nbdist.output.curves import Curve, CurvePoint, Series
from nbdist.output.events import MAX_STEP, OF_POINT
from nbdist.worker import tracking
from nbdist.worker.tracking import MAX_POINTS_SENT, MAX_TRACKED_NAMES, track


@pytest.fixture
def sent() -> Iterator[list[dict[str, Any]]]:
    """Messages of a task in this process, as if the process was a worker."""
    found: list[dict[str, Any]] = []
    tracking.connect(found.append)
    tracking.begin_task()
    yield found
    tracking.connect(None)


def points(sent: list[dict[str, Any]], name: str) -> list[CurvePoint]:
    """Flush, and return all points of a name that were sent."""
    tracking.flush()
    flat = [number for each in sent for number in each["curves"].get(name, ())]
    return [CurvePoint(*flat[at : at + OF_POINT]) for at in range(0, len(flat), OF_POINT)]


NUMBERS = [
    (1, 1.0),
    (True, 1.0),
    (np.float32(0.5), 0.5),
    (np.array([2]), 2.0),
    (torch.tensor(3), 3.0),
    (torch.nn.Parameter(torch.tensor([4.0])), 4.0),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
]


@pytest.mark.parametrize(("value", "number"), NUMBERS)
def test_a_number_is_read_at_once(sent: list[dict[str, Any]], value: Any, number: float) -> None:
    """Numbers of Python, numpy and torch are read at once: later changes have no effect."""
    track(loss=value)
    if isinstance(value, torch.Tensor):
        value.data.zero_()
    assert points(sent, "loss") == [CurvePoint(0, 1, number, number, number, 0)]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("0.5", "a str"),
        (None, "a NoneType"),
        (1j, "a complex"),
        (torch.tensor(1j), r"a Tensor of shape \(\)"),
        (torch.ones(3), r"a Tensor of shape \(3,\)"),
        (np.ones((2, 2)), r"a ndarray of shape \(2, 2\)"),
        (torch.ones((), device="meta"), r"a Tensor of shape \(\)"),
    ],
)
def test_only_numbers_can_be_tracked(sent: list[dict[str, Any]], value: Any, what: str) -> None:
    """A value that is no number raises with a remedy, and nothing of the call is sent."""
    with pytest.raises(TypeError, match=rf"track\(loss=\.\.\.\): {what} is no number; track"):
        track(lr=0.1, loss=value)
    assert points(sent, "lr") == []


@pytest.mark.parametrize("step", [math.nan, math.inf, 1e308, -3e18, 10**400, torch.tensor(1e30)])
def test_steps_beyond_the_limit_are_refused(sent: list[dict[str, Any]], step: Any) -> None:
    """A call with a step beyond the limit raises, and sends nothing; later calls are sent."""
    with pytest.raises(ValueError, match=r"a step is a finite number from -2e\+18 to 2e\+18"):
        track(step=step, loss=1)
    track(step=MAX_STEP, loss=2)
    assert [each.mean for each in points(sent, "loss")] == [2]


def test_a_name_that_cannot_be_encoded_is_refused(sent: list[dict[str, Any]]) -> None:
    """A call with a name that cannot be encoded raises, and sends nothing."""
    with pytest.raises(ValueError, match=r"the name '\\ud800' cannot be sent as UTF-8"):
        track(**{"loss": 1, "\ud800": 1})
    track(größe=1)
    assert points(sent, "loss") == []
    assert len(points(sent, "größe")) == 1


def test_steps_with_tiny_differences_are_merged(sent: list[dict[str, Any]]) -> None:
    """Steps back and forth are merged, however small their differences are."""
    for number in range(5_000):
        track(step=(MAX_STEP, 0, 5e-324)[number % 3], loss=number)
    track(step=5e-324, loss=0)
    found = points(sent, "loss")
    assert sum(each.finite for each in found) == 5_001
    assert all(math.isfinite(each.step) for each in found)


def test_numbers_that_cannot_be_sent_fail_no_task(
    sent: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that cannot be sent are named in a line; nothing raises, even without a stderr."""

    def refuse(_: dict[str, Any]) -> None:
        raise ValueError("refused")

    tracking.connect(refuse)
    track(loss=1)
    tracking.flush()
    assert capsys.readouterr().err.startswith("track: the numbers of `loss` were not sent: ")
    monkeypatch.setattr("sys.stderr", None)
    track(loss=1)
    tracking.flush()


def test_numbers_that_are_not_finite_are_counted(sent: list[dict[str, Any]]) -> None:
    """NaN, infinite and too large numbers are counted, as JSON has no such numbers."""
    for value in (math.nan, math.inf, 10**400, 1.0):
        track(loss=value)
    assert sum(each.odd for each in points(sent, "loss")) == 3
    assert all(math.isfinite(n) for each in sent for n in each["curves"]["loss"])


def test_a_flood_is_aggregated(sent: list[dict[str, Any]]) -> None:
    """Many numbers are sent in few and small messages, which keep counts and extremes."""
    for number in range(20_000):
        track(loss=number if number != 10_000 else -1.0, lr=0.1)
        if number % 4_074 == 4_073:  # as when half a second is over
            tracking.flush()
    found = points(sent, "loss")
    assert sum(each.finite for each in found) == 20_000
    assert min(each.low for each in found) == -1
    assert max(each.high for each in found) == 19_999
    assert all(
        sum(map(len, each["curves"].values())) <= MAX_POINTS_SENT * OF_POINT for each in sent
    )
    assert len(sent) < 20
    assert sent[-1]["counted"] == {"loss": 20_000, "lr": 20_000}


@pytest.mark.parametrize(
    ("most", "cuts"),
    [(400, ((700, 2000, 1300), (1, 1999, 2000))), (2000, ((1000,) * 2, (990, 1010)))],
)
def test_equal_numbers_stay_equal(
    sent: list[dict[str, Any]], most: int, cuts: tuple[tuple[int, ...], ...]
) -> None:
    """Equal numbers give equal points on all ranks, wherever the messages of a rank end."""
    found = []
    for sizes in cuts:
        tracking.begin_task()
        sent.clear()
        tracking._due = math.inf
        series = Series(most)
        for number in range(sum(sizes)):
            track(lr=number)
            if number + 1 in accumulate(sizes):
                tracking.flush()
                tracking._due = math.inf
        for each in points(sent, "lr"):
            series.add(each)
        found.append([(each.step, each.finite, round(each.mean, 6)) for each in series])
    assert len(found[0]) > most / 8
    assert found[0] == found[1]


def test_calls_without_a_step_are_counted(sent: list[dict[str, Any]]) -> None:
    """A step that a call gives is kept; calls without a step are counted, for each name."""
    for step in (10, 20):
        track(step=step, loss=1.0)
        track(acc=0.5)
    assert [each.step for each in points(sent, "loss")] == [10, 20]
    assert [each.step for each in points(sent, "acc")] == [0, 1]
    assert sent[-1]["counted"] == {"acc": 2}


def test_steps_that_are_fractions_keep_many_points(sent: list[dict[str, Any]]) -> None:
    """Steps that are fractions, such as epochs, have many points in ascending order."""
    for number in range(3_000):
        track(step=number / 1000, loss=number)
    steps = [each.step for each in points(sent, "loss")]
    assert 100 < len(steps) == len({*steps})
    assert steps == sorted(steps)


def test_each_of_many_epochs_is_a_whole_curve(sent: list[dict[str, Any]]) -> None:
    """If the steps of each fast epoch begin at 0, each curve still goes over all of its steps."""
    tracking._due = math.inf
    for number in range(3_000):
        track(step=number % 50 * 1_000, loss=number)
    found, curve = points(sent, "loss"), Curve()
    assert len(found) <= MAX_POINTS_SENT
    assert sum(each.finite for each in found) == 3_000
    curve.add_points(0, "task", found, 1)
    for run in curve.runs.values():
        steps = [each.step for each in run[0]]
        assert (steps[0], steps[-1] > 25_000, len(steps) > 3) == (0, True, True)


def test_too_many_names_are_dropped_with_a_warning(
    sent: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Names beyond a limit are dropped with a single warning, so that they fill no memory."""
    for number in range(3 * MAX_TRACKED_NAMES):
        track(**{f"loss {number}": 1.0})
    tracking.flush()
    assert len({name for each in sent for name in each["curves"]}) == MAX_TRACKED_NAMES
    assert capsys.readouterr().err.count("track: 64 names are kept, and `loss 64` is one more") == 1


@pytest.mark.world
def test_a_process_that_is_no_worker_sends_nothing(sent: list[dict[str, Any]]) -> None:
    """A forked child of a worker sends nothing, and `track` outside of a worker does nothing."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_track_there)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert points(sent, "loss") == []
    tracking.connect(None)
    nbdist.track(loss=1.0)
    assert points(sent, "loss") == []


def _track_there() -> None:
    track(loss=1.0)
    tracking.flush()
    raise SystemExit(len(tracking._pending_calls))
