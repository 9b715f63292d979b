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


def test_actions_in_a_row() -> None:
    """After each every rank has what the oracle says, what was lost was named, and nothing grows.

    Without pytest, which many actions and the long list of Stops do without as well.
    """
    command = [sys.executable, "-c", WITHOUT_PYTEST, "--seed", "3", "--actions", "15"]
    subprocess.run(command, check=True, timeout=2 * SOON)
