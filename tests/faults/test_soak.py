"""A short soak and few random actions; `python -m tests.faults.soak` makes a long one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults.soak import soak
from tests.waiting import SOON


@pytest.mark.own_agent  # whose memory is looked at
def test_faults_in_a_row() -> None:
    """After each of them all ranks work, who lived has its variables, and nothing grows."""
    kinds, settled, end = soak(1, 15)
    assert sum(kinds.values()) == 15
    assert not end.has_grown_since(settled), (settled, end)


@pytest.mark.own_agent  # in a process that is a notebook
def test_actions_in_a_row() -> None:
    """After each of them every rank has what the oracle says, and what was lost was named."""
    command = [sys.executable, "-m", "tests.faults.actions", "--seed", "3", "--actions", "8"]
    subprocess.run(command, check=True, timeout=SOON)
