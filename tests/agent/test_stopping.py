"""Which ranks Stop kills: those that will provably not leave what they run."""

from __future__ import annotations

import pytest

from nbdist.agent.stopping import ABORTS, C_GRACE, IGNORES_GRACE, Sight, is_stuck
from nbdist.wire.views import Place

LONG = 60.0
IN_PYTHON = Place(line=3)
IN_C = Place(line=3, holds_gil=True)
WAITS = Place(line=3, operation="all_reduce")


WAITED_FOR = [
    Sight(Place(), LONG),
    Sight(Place(), LONG, again=True),
    Sight(IN_PYTHON, LONG),
    Sight(Place(line=3, is_cleaning_up=True), LONG, is_asleep=True),
    Sight(Place(line=3, has_taken_sigint=True), LONG, is_asleep=True),
    Sight(IN_PYTHON, C_GRACE - 0.1, is_asleep=True),
    Sight(IN_C, C_GRACE - 0.1),
    Sight(WAITS, LONG),
    Sight(WAITS, LONG, aborts=ABORTS - 1, aborted_for=LONG),
    Sight(WAITS, LONG, aborts=ABORTS, aborted_for=IGNORES_GRACE - 0.1),
    Sight(IN_PYTHON, IGNORES_GRACE - 0.1, ignores=True),
    Sight(IN_PYTHON, IGNORES_GRACE - 0.1, again=True),
    Sight(IN_C, LONG, is_spared=True),
    Sight(IN_PYTHON, LONG, ignores=True, is_spared=True),
]
"""A rank that reports its end, computes, cleans up, has caught KeyboardInterrupt, or is spared."""

KILLED = [
    Sight(IN_C, C_GRACE),
    Sight(Place(is_stopped=True, holds_gil=True), C_GRACE),
    Sight(IN_PYTHON, C_GRACE, is_asleep=True),
    Sight(Place(file="train.py"), C_GRACE, is_asleep=True),
    Sight(IN_PYTHON, IGNORES_GRACE, ignores=True),
    Sight(IN_PYTHON, IGNORES_GRACE, again=True),
    Sight(Place(line=3, is_cleaning_up=True), IGNORES_GRACE, again=True),
    Sight(Place(line=3, has_taken_sigint=True), IGNORES_GRACE, is_asleep=True, again=True),
    Sight(WAITS, LONG, aborts=ABORTS, aborted_for=IGNORES_GRACE),
]
"""One in C code, that ignores it, that no abort brings back, or after a second Stop."""


@pytest.mark.parametrize("sight", [*WAITED_FOR, *KILLED], ids=repr)
def test_who_is_killed(sight: Sight) -> None:
    """Nobody else is."""
    assert is_stuck(sight) == (sight in KILLED)
