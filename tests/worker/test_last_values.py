"""Tests of `nbdist.worker.last_values`: what a rank keeps, and what it says of what is gone."""

from __future__ import annotations

import pytest

from nbdist.values.shared_memory import Segment, to_end
from nbdist.worker import last_values
from nbdist.worker.last_values import KeptValues


def segment(size: int) -> Segment:
    return to_end(Segment.filling([b"x" * size]))


def test_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many, and so many bytes, but for the newest one; memory of others is released."""
    monkeypatch.setattr(last_values, "MOST_BYTES", 1000)
    kept = KeptValues()
    for number in range(last_values.MOST + 2):
        kept.keep(str(number), segment(10))
    assert repr(kept) == "<KeptValues 16, 160 B>"
    assert kept.find("1") == last_values.REPLACED
    kept.keep("big", segment(2000))
    assert repr(kept) == "<KeptValues 1, 1.95 KiB>"
    assert kept.find("17") == last_values.REPLACED
    kept.keep("none", "cannot be sent")
    assert isinstance(kept.find("big"), Segment)
    assert kept.find("none") == "cannot be sent"
    kept.let_go("big")
    assert repr(kept) == "<KeptValues 0, 0 B>"


def test_what_was_cleaned_says_so() -> None:
    """And why there is none of a task that nobody knows."""
    kept = KeptValues()
    kept.keep("a", segment(10))
    kept.keep("b", "cannot be sent")
    kept.clean()
    assert (kept.find("a"), kept.find("b")) == (last_values.CLEANED, "cannot be sent")
    assert kept.find("c") == last_values.REPLACED
