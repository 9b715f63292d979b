"""Worlds on the hosts, over ssh, and what their cells run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest

from nbdist.config import Patience
from nbdist.errors import WorkerDied
from nbdist.system.processes import agent_command
from nbdist.world.world import World
from tests.hosts.network import Host, Network
from tests.waiting import SOON, once

AGENT_ARGUMENTS = agent_command("")[1:]

LINK_TIMEOUT = 3
"""Seconds, where a test does not say otherwise: many wait for the loss of a machine."""

FOREVER = """
import torch, torch.distributed as dist
dist.all_reduce(torch.ones(1))
open({begun!r}, "w").close()
while True: dist.all_reduce(torch.ones(1))
"""

SUM = "import torch, torch.distributed as dist\ntotal = torch.ones(1)\ndist.all_reduce(total)"


def new_world(hosts: str | None = "node1:2,node2:2", **options: Any) -> World:
    """Workers on these hosts, or where else the options say."""
    options = {"link_timeout": LINK_TIMEOUT, **options}
    world = World(hosts=hosts, log_dir="", show=False, **options)
    world.start()
    return world


def agent_on(host: Host) -> int:
    """The process of the agent there, 0 for none.

    Not what stands above it and names its command (a shell, srun, what Ray's actor has between),
    which there is for a while before the agent; nor a child that has not become another program.
    """
    agents = {pid for pid, line in host.processes().items() if line.split()[1:5] == AGENT_ARGUMENTS}
    for pid in agents:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).ppid() not in agents:
                return pid
    return 0


def check_whole(world: World, size: int = 4) -> None:
    """The group of all ranks works."""
    world.execute(SUM)
    assert [float(each) for each in world.gather("total")] == [float(size)] * size


def lose(world: World, network: Network, do: Callable[[], object]) -> str:
    """Do this to a machine while all ranks are in the middle of collectives: what is said then."""
    begun = network.folder / "begun"
    begun.unlink(missing_ok=True)
    session = world.session
    with once(begun.exists, do, "the ranks have met"):
        task = session.task(FOREVER.format(begun=str(begun)))
        running = session.submit(task, Patience(timeout=SOON))  # a survivor that waits is named
        session.wait(running)
    with pytest.raises(WorkerDied) as caught:
        session.check(running)
    return str(caught.value)


def has_come(world: World) -> bool:
    """Whether a machine has come that could be taken in."""
    world.session.receive(0.1)
    return bool(world.session.have_come)


def ours_on(host: Host) -> list[str]:
    """What is there of a world; daemons take their time to find that nobody is there any more."""
    return [line for line in host.left() if "nbdist" in line and "sshd: " not in line]
