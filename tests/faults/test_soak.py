"""A short soak and few random actions; `python -m tests.faults.soak` makes a long one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nbdist.agent.fork_server import IMPORTED_WHEN_IDLE
from nbdist.world.world import World
from tests.faults.soak import Holdings, soak, wait_for_imports
from tests.waiting import SOON

WITHOUT_PYTEST = """
import sys
sys.modules["pytest"] = None
import tests.faults.actions, tests.faults.soak, tests.faults.stops
"""


def test_they_need_no_pytest() -> None:
    """The long soak, random actions and the long list of Stops run where there is none."""
    subprocess.run([sys.executable, "-c", WITHOUT_PYTEST], check=True)


@pytest.mark.own_agent
def test_idle_imports_are_no_growth(idle_imports: None) -> None:
    """What the fork server has after they were waited for is what it has for good."""
    with World(1, log_dir="") as world:
        wait_for_imports(world)
        before = Holdings.now(world)
        world.replace([0])
        last = f"{IMPORTED_WHEN_IDLE[-1]!r} in __import__('sys').modules"
        assert world.gather(last) == [True]
        assert not Holdings.now(world).has_grown_since(before)


@pytest.mark.own_agent  # whose idle imports are no growth
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
