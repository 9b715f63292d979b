"""Worlds on several hosts, from their start to their end: sizes, slow lines, killed notebooks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from nbdist.errors import AgentLost, WorkerError
from nbdist.world.world import World
from tests.hosts.network import Host, wait_for
from tests.hosts.worlds import check_whole
from tests.waiting import SOON

Launch = Callable[..., World]

DELAY, LOSS = 0.025, 0.01
"""Seconds each way, and the share of packets that are lost: a slow line."""

LOST_SECONDS = 2.0
"""In which all packets of one host to another are lost; less than a sign of life may take."""


def test_a_slow_line_that_loses_packets(hosts: list[Host], launch: Launch) -> None:
    """50 ms there and back, one packet of a hundred lost: nothing is declared dead."""
    for host in hosts[:2]:
        host.slow(delay=DELAY, loss=LOSS)
    world = launch(hosts="node1:1,node2:1")
    pids = dict(world.session.pids)
    for _ in range(5):
        check_whole(world, 2)
    with pytest.raises(WorkerError, match="bad shard"):
        world.execute("if rank: raise ValueError('bad shard')\ndist.barrier()")
    begun = time.monotonic()
    wait_for(lambda: time.monotonic() > begun + 4, "longer than a sign of life may take", 10)
    check_whole(world, 2)
    assert world.session.pids == pids


def test_what_is_on_its_way_when_a_rank_has_finished(hosts: list[Host], launch: Launch) -> None:
    """Who waits for it does not wait in vain, though packets have to be sent again and again."""
    world = launch(hosts="node1:1,node2:1")
    send = "t = torch.ones(1)\ndist.send(t, 1) if rank == 0 else dist.recv(t, 0)"
    world.execute(send)
    hosts[1].block_from(hosts[0].address)
    again = threading.Timer(LOST_SECONDS, hosts[1].mend)
    again.start()
    try:
        world.execute(send)
    finally:
        again.join()
    with pytest.raises(WorkerError, match=r"rank 1 waits in recv.*rank 0 finished"):
        world.execute("if rank: dist.recv(t, 0)")
    check_whole(world, 2)


@pytest.mark.parametrize("whose", ["the head", "its guard"])
def test_a_head_that_is_killed(hosts: list[Host], launch: Launch, whose: str) -> None:
    """Nothing is left of it on any host, and the notebook is told."""
    world = launch(hosts="node1:1,node2:1")
    guard = psutil.Process(world.session.link.agents[0].pid)
    (head,) = (each for each in guard.children() if "nbdist.head" in each.cmdline())
    (head if whose == "the head" else guard).kill()
    with pytest.raises(AgentLost):
        world.execute("import time\ntime.sleep(99)")
    wait_for(lambda: not hosts[0].left(), "node1 has ended its agent")


def test_looking_from_a_terminal(launch: Launch) -> None:
    """`nbdist status` on the notebook's machine knows the ranks of all."""
    launch(hosts="node1:1,node2:1", name="far")
    command = [sys.executable, "-m", "nbdist.terminal", "status"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=SOON).stdout
    _, found, ours = shown.partition("far")
    assert found
    # Other tests may have worlds of their own.
    rows = [line.split()[0] for line in ours.splitlines() if "idle" in line]
    assert rows[:2] == ["0", "1"]
