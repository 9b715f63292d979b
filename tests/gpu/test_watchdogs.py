"""torch's own watchdogs end no process, whatever a rank waits for."""

from __future__ import annotations

import sys

import pytest

from nbdist.errors import NbdistError
from nbdist.world.world import World
from tests.gpu import lab

BRIEF = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "2"}

pytestmark = [lab.NCCL, pytest.mark.shared_world(4, env=BRIEF), pytest.mark.timeout(75)]

SECONDS = 8 if lab.DEVICE == "cuda" else 3
"""Longer than any watchdog waits whose timeout is a second or two."""

CASES = {
    # The group has a timeout, which a watchdog checks.
    "a late rank": f"if rank == 1: time.sleep({SECONDS})\n"
    "dist.all_reduce(t, group=brief); t.sum().item()",
    "all ranks hold the GIL": "dist.all_reduce(t); t.sum().item()\n"
    f"ctypes.PyDLL(None).sleep({SECONDS})\n"
    "dist.all_reduce(t); t.sum().item()",
    "a rank that never comes": "if rank != 1:\n    dist.all_reduce(t, group=brief); t.sum().item()",
}


@pytest.mark.parametrize("name", CASES)
def test_no_watchdog_ends_a_process(world: World, name: str) -> None:
    """However the cell ends, all processes stay, and the group works."""
    world.execute(
        "import ctypes, time\nfrom datetime import timedelta\nt = torch.ones(8)\n"
        "brief = dist.new_group(timeout=timedelta(seconds=2)); dist.all_reduce(t, group=brief)"
    )
    before = dict(world.pids)
    try:
        world.execute(CASES[name])
    except NbdistError as error:
        sys.stdout.write(f"{error}\n")
    assert world.pids == before
    world.execute(lab.SUM)
    assert world.pids == before
