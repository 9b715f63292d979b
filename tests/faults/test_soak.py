"""A short soak and few random actions; `python -m tests.faults.soak` makes a long one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults.soak import soak
from tests.waiting import SOON

pytestmark = pytest.mark.own_agent

WITHOUT_PYTEST = """
import sys
sys.modules["pytest"] = None
import tests.faults.soak, tests.faults.stops
from tests.faults.actions import main
main()
"""


def test_faults_in_a_row() -> None:
    """After each of them all ranks work, who lived has its variables, and nothing grows."""
    kinds, settled, end = soak(1, 15, ranks=3)
    assert sum(kinds.values()) == 15
    assert not end.has_grown_since(settled), (settled, end)


def test_actions_in_a_row() -> None:
    """After each of them every rank has what the oracle says, and what was lost was named.

    Without pytest, which a long soak and the long list of Stops do without as well.
    """
    command = [sys.executable, "-c", WITHOUT_PYTEST, "--seed", "3", "--actions", "8"]
    subprocess.run(command, check=True, timeout=SOON)
