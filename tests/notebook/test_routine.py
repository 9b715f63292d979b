"""Tests of `nbdist.notebook.routine`: which cell is followed by a snapshot, and what is said."""

from __future__ import annotations

from pathlib import Path

from nbdist.notebook.routine import Routine
from nbdist.world.snapshot_store import Part, Snapshot


def test_every_third_cell():
    """Counted from the one that set it up; never where nothing did."""
    assert [Routine().is_due() for _ in range(3)] == [False] * 3
    routine = Routine(every=3)
    assert [routine.is_due() for _ in range(7)] == [False, False, True, False, False, True, False]


def test_a_hint_while_the_snapshot_is_there(tmp_path: Path):
    """How what was lost is brought back; nothing once the folder is gone."""
    routine = Routine()
    assert routine.hint == ""
    part = Part(("model", "x"), (), 10, "")
    routine.newest = Snapshot("epoch-3", "20200101-120000", tmp_path, 0.0, {0: part})
    assert routine.hint.startswith("`%dist_restore --name epoch-3` restores model and x of 19")
    routine.newest = Snapshot("epoch-3", "20200101-120000", tmp_path / "gone", 0.0, {0: part})
    assert routine.hint == ""
