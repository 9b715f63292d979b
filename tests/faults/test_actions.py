"""A few random actions; `python -m tests.faults.actions` makes many."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.waiting import SOON

pytestmark = pytest.mark.own_agent

WITHOUT_PYTEST = """
import sys
sys.modules["pytest"] = None
import tests.faults.stops
from tests.faults.actions import main
main()
"""


def test_ranks_agree_with_the_oracle_after_each_action() -> None:
    """After each action ranks are as the oracle says, and losses are named; nothing grows.

    The programs `actions` and `stops` run without pytest.
    """
    command = [sys.executable, "-c", WITHOUT_PYTEST, "--seed", "3", "--actions", "15"]
    subprocess.run(command, check=True, timeout=2 * SOON)
