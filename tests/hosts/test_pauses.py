"""Cables that are out and networks that stand still for a while: what is kept, and said."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from nbdist.world.running import RunningTask
from nbdist.world.world import World
from tests.hosts.network import Host
from tests.hosts.worlds import check_whole, new_world

pytestmark = pytest.mark.shared_world

PAUSE = 4.0
"""Seconds in which TCP sends what was lost again, and libzmq's signs of life are missed."""

RETRIES = "/proc/sys/net/ipv4/tcp_retries2"


@pytest.fixture(scope="module")
def started(path: None, hosts_of_module: list[Host]) -> Iterator[World]:
    """Two workers on each of two hosts; machines are lost after as long as users have it."""
    with new_world(link_timeout=None) as world:
        yield world


@pytest.fixture
def world(started: World, hosts: list[Host]) -> Iterator[World]:
    """It, with a group whose connections are made; no test may lose a rank."""
    check_whole(started)
    pids = dict(started.pids)
    yield started
    hosts[1].mend()
    check_whole(started)
    assert started.pids == pids


def until_stalled(
    world: World, source: str = "dist.all_reduce(torch.ones(1))", ends: str = "node1 and node2"
) -> RunningTask:
    """Run a cell until it says that the network between these is."""
    running = world.session.submit(world.session.task(source))
    for _ in world.session.follow(running):
        if re.search(f"the network between {ends} is stalled", running.waits):
            return running
    pytest.fail(f"the cell has ended: {running.error()}")


def test_a_cable_that_is_out_for_a_while(world: World, hosts: list[Host]) -> None:
    """No rank loses anything; `tests/cluster/test_nodes.py` has heads and agents that stop."""
    world.execute("kept = rank")
    hosts[1].link_down()
    time.sleep(PAUSE)
    hosts[1].link_up()
    check_whole(world)
    assert world.gather("kept") == [0, 1, 2, 3]


@pytest.mark.parametrize("sender", [0, 2])
def test_a_network_that_is_stalled(sender: int, world: World, hosts: list[Host]) -> None:
    """It is named in the running cell, which goes on once it is back, whichever end has sent."""
    here, there = (hosts[1], hosts[0]) if sender else (hosts[0], hosts[1])
    there.block_from(here.address)
    receiver = 2 - sender
    source = f"t = torch.ones(1)\nif rank == {sender}: dist.send(t, {receiver})"
    source += f"\nif rank == {receiver}: dist.recv(t, {sender})"
    running = until_stalled(world, source, f".*{here.name}.*")
    there.mend()
    world.session.wait(running)
    assert running.error() is None


def test_stop_where_the_network_is_stalled(world: World, hosts: list[Host]) -> None:
    """Control is given back, and nothing is lost."""
    hosts[1].block_from(hosts[0].address)
    running = until_stalled(world)
    world.session.interrupt()
    world.session.wait(running)
    assert not running.unfinished


def test_a_network_that_does_not_come_back(world: World, hosts: list[Host]) -> None:
    """TCP says when it gives up, after seconds here and minutes elsewhere; then it is over."""
    for host in hosts[:2]:
        host.run(f"echo 4 >{RETRIES}")
    try:
        hosts[1].block_from(hosts[0].address)
        running = until_stalled(world)
        for _ in world.session.follow(running):
            if running.transcript.errors:
                hosts[1].mend()
        assert "Connection timed out" in str(running.error())
    finally:
        for host in hosts[:2]:
            host.run(f"echo 15 >{RETRIES}")
