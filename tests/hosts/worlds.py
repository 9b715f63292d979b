"""Worlds on the hosts: how worlds of each launcher start, live and end, and cells for them.

`tests/hosts/test_membership.py` tests what cells do there, and failures, over ssh.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

import nbdist
from nbdist.config import Patience
from nbdist.errors import WorkerDied
from nbdist.system.processes import agent_command
from nbdist.world import dispatch, inbox
from nbdist.world.agents import RunningWorld, worlds
from nbdist.world.world import World
from tests.hosts.conftest import complain
from tests.hosts.network import Host, Network
from tests.waiting import SOON, once, wait_until

AGENT_ARGUMENTS = agent_command("")[1:]

LINK_TIMEOUT = 3
"""Seconds, unless a test has its own: many tests wait for the loss of a machine."""

FOREVER = """
import time, torch, torch.distributed as dist
dist.all_reduce(torch.ones(1))
open({begun!r}, "w").close()
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
"""

SUM = "import torch, torch.distributed as dist\ntotal = torch.ones(1)\ndist.all_reduce(total)"


def new_world(hosts: str | None = "node1:2,node2:2", **options: Any) -> World:
    """Start a world on the named hosts, or as other options say."""
    options = {"link_timeout": LINK_TIMEOUT, **options}
    world = World(hosts=hosts, log_dir="", show=False, **options)
    world.start()
    return world


WRAPPER = """#!/bin/sh
export PYTHONPATH={folder}
exec {python} "$@"
"""


def wrapped(host: Host, file: str = "", text: str = "") -> str:
    """Make an interpreter of the host that finds a given file first, and return its path."""
    folder = "/tmp/python"
    host.run(f"rm -rf {folder} && mkdir {folder}")
    if file:
        path = host.path(f"{folder}/{file}")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    host.path(f"{folder}/run").write_text(WRAPPER.format(folder=folder, python=sys.executable))
    host.run(f"chmod +x {folder}/run")
    return f"{folder}/run"


def agent_on(host: Host) -> int:
    """Return the process id of the agent on the host, 0 for none.

    Processes above the agent that name its command are ignored (a shell, srun, a process between
    Ray's actor and the agent), and so is a child that has not become another program yet.
    """
    agents = {pid for pid, line in host.processes().items() if line.split()[1:5] == AGENT_ARGUMENTS}
    for pid in agents:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).ppid() not in agents:
                return pid
    return 0


def check_whole(world: World, size: int = 4) -> None:
    """Assert that the group of all ranks works."""
    world.execute(SUM)
    assert [float(each) for each in world.gather("total")] == [float(size)] * size


def lose(world: World, network: Network, do: Callable[[], object]) -> str:
    """Call `do` while all ranks are in the middle of collectives; return the cell's error."""
    begun = network.folder / "begun"
    begun.unlink(missing_ok=True)
    engine = world.engine
    with once(begun.exists, do, "the ranks have met"):
        task = engine.task(FOREVER.format(begun=str(begun)))
        # The timeout's error names a survivor that waits.
        running = dispatch.submit(engine, task, Patience(timeout=SOON))
        dispatch.wait(engine, running)
    with pytest.raises(WorkerDied) as caught:
        dispatch.check(engine, running)
    return str(caught.value)


def has_come(world: World) -> bool:
    """Whether a machine has come that could be taken in."""
    inbox.receive(world.engine, 0.1)
    return bool(world.engine.rank_table.joined)


def ours_on(host: Host) -> list[str]:
    """Return leftovers of worlds on the host, except sshd, which ends some time later."""
    return [line for line in host.left() if "nbdist" in line and "sshd: " not in line]


# --- worlds of two workers on each of two hosts, by any launcher ------------------------------


class Launched:
    """A launcher as tests use it; `options` are the arguments of its worlds.

    `rejoin_hint` is the advice of the message about a lost host, "" if the host is tried again;
    `holds` lists what the launcher's own programs still keep for a world.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        rejoin_hint: str = "",
        holds: Callable[[], list[str]] = list,
    ) -> None:
        self.name, self.rejoin_hint, self.holds = name, rejoin_hint, holds
        self.options = {**options, "log_dir": "", "show": False, "link_timeout": LINK_TIMEOUT}

    def hear(self, said: str) -> None:
        """Follow the instructions that are shown while a world starts."""

    def come_back(self, world: World, host: Host) -> None:
        """Get all four workers again after `host` was lost, as the message advised."""
        world.restart()


def allocated(name: str, holds: Callable[[], list[str]]) -> Launched:
    """Return a launcher that starts machines only at the start of a world."""
    rejoin_hint = f"With `--launcher {name}` .*`%dist_restart` asks for all again"
    options = {"layout": "2x2"} | ({"launcher": name} if name != "slurm" else {})
    return Launched(name, options, rejoin_hint, holds)


def is_clean(launched: Launched, network: Network) -> None:
    """Assert that nothing is left on any host, nor in the launcher's own programs."""
    complain(network, launched.name)
    wait_until(lambda: not launched.holds(), f"{launched.name} has let go of the world")


NOTEBOOK = """
import sys
from nbdist import World
from nbdist.world import lifecycle
world = World(**{options})
for said in lifecycle.starting_texts(world.engine):
    if said:
        print(said, flush=True)
world.execute("import torch, torch.distributed as dist; dist.barrier(); kept = rank + 10")
print("up", flush=True)
world.execute('''
import os, time
while True:
    is_open = torch.tensor(float(os.path.exists({gate!r})))
    dist.all_reduce(is_open, dist.ReduceOp.MIN)
    if is_open:
        break
    time.sleep(0.05)
''')
"""


@contextmanager
def other_notebook(launched: Launched, gate: str, **options: object) -> Iterator[None]:
    """Run a notebook whose ranks are in the middle of a cell, and kill the notebook in the end."""
    source = NOTEBOOK.format(options={**launched.options, **options}, gate=gate)
    command = [sys.executable, "-c", source]
    notebook = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert notebook.stdout is not None
        with notebook.stdout:
            for line in notebook.stdout:
                if line == "up\n":
                    break
                launched.hear(line)
            else:
                pytest.fail("it did not start")
            yield
    finally:
        notebook.kill()
        notebook.wait()


def named(name: str) -> list[RunningWorld]:
    """The worlds of this machine that have this name."""
    return [each for each in worlds() if each.info.name == name]


@contextmanager
def inherited(launched: Launched, network: Network) -> Iterator[World]:
    """A world that has outlived its notebook and leaves nothing behind.

    The running cell went on when the notebook was killed, and its variables are there.
    """
    name = f"left-{launched.name}-{os.getpid()}"
    gate = network.folder / f"gate-{launched.name}"
    with other_notebook(launched, str(gate), name=name, detach=True):
        wait_until(lambda: named(name)[0].info.state == "busy", "it runs")
    wait_until(lambda: named(name)[0].is_detached, "its notebook is gone")
    with nbdist.attach(name) as world:
        gate.touch()
        world.catch_up()
        assert world.gather("kept") == KEPT
        check_whole(world)
        yield world
    assert named(name) == []
    is_clean(launched, network)


VARIABLES = ["RANK", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"]
PLACES = ["node1", "node1", "node2", "node2"]
KEPT = [10, 11, 12, 13]


def has_slots(world: World) -> None:
    """Assert that ranks are on the named hosts, with torchrun's variables.

    Ranks have none of the notebook's variables, only their node's.
    """
    world.execute("import os, socket")
    assert world.gather("socket.gethostname()") == PLACES
    assert world.gather(f"[os.environ[name] for name in {VARIABLES}]") == [
        [str(rank), str(rank % 2), str(rank // 2), "2", "2"] for rank in range(4)
    ]
    assert len({*world.gather("os.environ['MASTER_ADDR']")}) == 1
    assert world.gather("os.environ.get('PYTEST_CURRENT_TEST')") == [None] * 4


def survives_an_agent(world: World, launched: Launched, network: Network) -> None:
    """Kill an agent: the other ranks go on, and a message says how to get the lost ranks back."""
    world.execute("kept = rank + 10")
    host = network.hosts[1]
    said = lose(world, network, lambda: os.kill(agent_on(host), signal.SIGKILL))
    assert said.startswith("rank 2 on node2 ")
    told = rf"now 2 workers; the other ranks keep their variables\. ?{launched.rejoin_hint}"
    # A host that is tried again by itself may be back before the others have a group.
    is_back = not launched.rejoin_hint and world.size == 4
    assert re.search("Ranks 2-3 were restarted and their var" if is_back else told, said), said
    assert world.gather("globals().get('kept')") == KEPT[:2] + [None] * (world.size - 2)
    if launched.rejoin_hint:
        launched.come_back(world, host)
    else:
        wait_until(lambda: has_come(world), f"{host} to come by itself")
    check_whole(world)
    assert world.gather("__import__('socket').gethostname()") == PLACES
