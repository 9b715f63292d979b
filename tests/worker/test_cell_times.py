"""Tests of `nbdist.worker.cell_times`."""

from __future__ import annotations

import threading
import time

import pytest

from nbdist.worker import cell_times
from nbdist.worker.cell_times import CellTimes


def test_a_cell_and_its_waits() -> None:
    """Those of its thread while it runs; the next cell begins anew."""
    times, since = CellTimes(), time.time_ns()
    times.waited(since)
    with times:
        times.waited(since)
        other = threading.Thread(target=times.waited, args=(since,))
        other.start()
        other.join(5)
    times.waited(since)
    assert (times.count, len(times.waits)) == (1, 1)
    assert times.waited_ns == times.waits[0][1] - since > 0
    assert since <= times.began_ns <= times.ended_ns
    with pytest.raises(KeyboardInterrupt), times:
        raise KeyboardInterrupt
    assert (times.count, times.waited_ns) == (0, 0)
    assert times.ended_ns >= times.began_ns


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest are kept, all are counted."""
    monkeypatch.setattr(cell_times, "MOST_WAITS", 2)
    times = CellTimes()
    with times:
        for _ in range(3):
            times.waited(times.began_ns)
    assert (times.count, len(times.waits)) == (3, 2)
