"""A host that is lost while a big value is on its way, in worlds of each test's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nbdist.errors import WorkerDied
from nbdist.world.world import World
from tests.hosts.memory import LIMIT, SIZE, begun
from tests.hosts.network import Host

Launch = Callable[..., World]


def test_on_the_way_there(launch: Launch, hosts: list[Host]) -> None:
    """The host's ranks count as dead, and the others end the task: nobody waits for more."""
    world = launch()
    hosts[1].limit(LIMIT)
    watch = begun(hosts, hosts[1].link_down)
    with pytest.raises(WorkerDied, match="node2"):
        world.execute("done = True", names={"big": torch.ones(SIZE // 4)})
    watch.join()


def test_on_the_way_back(launch: Launch, hosts: list[Host]) -> None:
    """What has come is no value; the notebook is told which host is lost."""
    world = launch()
    world.execute(f"import torch\nmine = torch.ones({SIZE // 4})")
    hosts[1].limit(LIMIT)
    watch = begun(hosts, hosts[1].link_down)
    with pytest.raises(WorkerDied, match="node2"):
        world.gather("mine", ranks=[2])
    watch.join()
