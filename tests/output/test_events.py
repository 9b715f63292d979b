"""Tests of `nbdist.output.events`: what an event says of itself."""

from __future__ import annotations

import pickle

import pytest

from nbdist.output.events import (
    IGNORES_STOP,
    Clear,
    Died,
    Display,
    Done,
    Failure,
    Output,
    Skipped,
    Text,
    Update,
    plain_of,
)


def test_text_of_displays() -> None:
    """Notebooks may hold text as a list of lines; what has none says its kind."""
    assert plain_of({"text/plain": ["a\n", "b"]}) == "a\nb"
    assert plain_of({"text/plain": "a"}) == "a"
    assert plain_of({"image/png": "x"}) == "<image/png>"
    assert plain_of({}) == plain_of({"text/plain": ""}) == ""


@pytest.mark.parametrize(
    ("died", "end"),
    [
        (Died(-9, 1), "was killed by SIGKILL"),
        (Died(3, 1), "exited with code 3"),
        (Died(-9, 1, why=IGNORES_STOP), "ignored Stop and was killed"),
        (Died(-9, 1, why="it used too much memory"), "was killed by SIGKILL"),
    ],
)
def test_ends(died: Died, end: str) -> None:
    """How a process ended, as a verb."""
    assert died.end == end
    assert died.by_stop is (died.why == IGNORES_STOP)


def test_made() -> None:
    """What was imported can be had again without the cell."""
    done = Done("ok", 1.0, frozenset({"np", "x"}), {"np": "numpy"})
    assert done.made == {"x"}


@pytest.mark.parametrize(
    "event",
    [
        Text("stderr", "\udc80"),
        Skipped(9, 3),
        Display({"text/plain": "1"}, {}, "id", is_result=True),
        Update({"text/plain": "1"}, {}, "id"),
        Clear(wait=True),
        Failure("E", "bad", ("line",), 1, ("m:E",), "ended"),
        Died(-9, 1, 4711, ("last",), "why", received_too_much=True),
        Done("error", 1.0, frozenset({"x"}), {"x": "m"}, ["opaque"], error_number=3),
    ],
)
def test_they_travel(event: Output) -> None:
    """Each is the same on the other end."""
    assert pickle.loads(pickle.dumps(event, protocol=5)) == event
