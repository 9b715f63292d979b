"""A short soak; `python -m tests.faults.soak --faults 200` is the long one."""

from __future__ import annotations

import pytest

from tests.faults.soak import soak


@pytest.mark.own_agent  # whose idle imports are no growth
def test_faults_in_a_row() -> None:
    """After each of them all ranks work, who lived has its variables, and nothing grows."""
    kinds, settled, end = soak(1, 15)
    assert sum(kinds.values()) == 15
    assert not end.has_grown_since(settled), (settled, end)
