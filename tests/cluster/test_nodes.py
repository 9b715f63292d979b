"""Tests of `nbdist.cluster.nodes`: agents that come, or do not, and what to do for the others."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import psutil
import pytest

from nbdist.cluster.nodes import Awaited
from nbdist.errors import StartError, WorkerDied
from nbdist.world.world import World
from tests.waiting import wait_until

pytestmark = pytest.mark.own_agent

BARRIERS = "import torch.distributed as dist\nwhile True: dist.barrier()"


def test_an_agent_that_cannot_start(launchers: None) -> None:
    """Which one, its command, how it ended and what it wrote; and nothing of the others is left."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    world = World(layout="2x1", launcher="here", log_dir="", python="/bin/false")
    either = r"the agent on node([01]) .*exited with code 1.*`/bin/false .*--ticket --node \1`"
    with pytest.raises(StartError, match=either):
        world.start()
    world.shutdown()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


SLOW = """#!/bin/sh
case "$*" in *"--node 1"*) sleep 3;; esac
exec {python} "$@"
"""
"""An interpreter that is longer about it on the second machine than others are waited for."""


def test_all_are_waited_for(launchers: None, tmp_path: Path) -> None:
    """Where nobody has said that fewer will do; the head's port goes with the world."""
    python = tmp_path / "slow"
    python.write_text(SLOW.format(python=sys.executable))
    python.chmod(0o755)
    with World(launcher="here", python=str(python), log_dir="", show=False) as world:
        world.start()
        assert {row.host for row in world.status()} == {"node0", "node1"}
        head = world.session.link.agent.pid
        pids = {child.pid for child in psutil.Process(head).children(recursive=True)}
        listening = [
            each.laddr.port
            for each in psutil.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.pid in pids
        ]
        assert listening
    for port in listening:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_machine_that_cannot_come_back(launchers: None) -> None:
    """What has it back is told, and does it, though there are as many as there have to be."""
    with World(layout="1:2x1", launcher="here", log_dir="", show=False) as world:
        world.start()
        wait_until(lambda: has_ranks(world, 2), "the second machine is there")
        everyone = psutil.Process(world.session.link.agent.pid).children(recursive=True)
        guard, agent = (each for each in everyone if each.cmdline()[-2:] == ["--node", "1"])
        assert agent.ppid() == guard.pid
        agent.kill()
        asks = r"`--launcher here` machines come at the start alone: `%dist_restart` asks for all"
        with pytest.raises(WorkerDied, match=f"now 1 worker; .* With {asks}"):
            world.execute(BARRIERS)
        world.execute("pass")
        world.restart()
        wait_until(lambda: has_ranks(world, 2), "it is back")


def has_ranks(world: World, number: int) -> bool:
    """Whether there are so many, once who has come is taken in."""
    world.execute("pass")
    return world.size == number


JOIN, RUN = "nbdist join a:1", "run `nbdist join a:1` on each machine · "


@pytest.mark.parametrize(
    ("awaited", "room", "is_enough", "will_do", "said"),
    [
        (Awaited(2), {}, False, False, "0 of 2 nodes"),
        (Awaited(2), {"a": 4, "b": 2}, True, False, "2 of 2 nodes: a (4), b (2)"),
        (Awaited(2, least=1), {}, False, False, "0 of 2 nodes"),
        (Awaited(2, least=1), {"a": 4}, False, True, "1 of 2 nodes: a (4)"),
        (Awaited(1, 8), {"a": 4}, True, False, "1 of 1 node: a (4)"),
        (Awaited(2, None, JOIN), {}, False, False, f"{RUN}0 of 2 nodes"),
        (Awaited(2, None, JOIN, least=1), {"a": 4}, False, False, f"{RUN}1 of 2 nodes: a (4)"),
        (Awaited(2, None, JOIN), {"a": 4, "b": 4}, True, False, "2 of 2 nodes: a (4), b (4)"),
        (Awaited(1, 6, JOIN), {"a": 4}, False, False, f"{RUN}4 of 6 workers: a (4)"),
        (Awaited(1, 6, JOIN), {"a": 4, "b": 2}, True, False, "6 of 6 workers: a (4), b (2)"),
    ],
)
def test_who_has_come(
    awaited: Awaited, room: dict[str, int], *, is_enough: bool, will_do: bool, said: str
) -> None:
    """The command stands there as long as somebody has to run it; fewer do where that was said."""
    found = awaited.have_come(room), awaited.will_do(room), awaited.text(room)
    assert found == (is_enough, will_do, said)
