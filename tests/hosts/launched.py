"""Worlds of two workers on each of two hosts, by each launcher: how they start, and live.

Only for `join` something has to be done besides: what it asks the user for, on each host.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import nbdist
from nbdist.cluster.ticket import read_key_file
from nbdist.errors import ScaleError, UsageError, WorkerDied, WorkerError
from nbdist.world.agents import Found, worlds
from nbdist.world.world import World
from tests.hosts.conftest import complain
from tests.hosts.network import Host, Network, end
from tests.hosts.ray_cluster import RayCluster
from tests.hosts.slurm import Slurm
from tests.hosts.worlds import LINK_TIMEOUT, TRAIN, agent_on, check_whole, lose
from tests.traces import shows
from tests.waiting import SOON, wait_until

JOIN = f"{sys.executable} -m nbdist.terminal join"
INVITATION = re.compile(r"`nbdist join (\S+)`")


class Launched:
    """How worlds are started by one launcher; `options` are their arguments."""

    def __init__(self, name: str, options: Mapping[str, Any], way_back: str) -> None:
        self.name = name
        self.options = {**options, "log_dir": "", "show": False, "link_timeout": LINK_TIMEOUT}
        self.way_back = way_back
        """What the user is told to do about a host that is lost; "" where it is tried again."""

    def __repr__(self) -> str:
        return self.name

    def hear(self, said: str) -> None:
        """Do what somebody is asked for while a world starts."""

    def come_back(self, world: World, host: Host) -> None:
        """Have all four workers again after `host` was lost, by what the user was told."""
        if self.way_back:
            world.restart()
        else:
            wait_until(lambda: has_come(world), f"{host} to come by itself")

    def holds(self) -> list[str]:
        """What the launcher's own programs still keep for a world."""
        return []


class Joined(Launched):
    """Hosts on which somebody runs `nbdist join`; they have no home folder in common."""

    def __init__(self, network: Network, offers: Path) -> None:
        super().__init__(
            "join",
            {"launcher": "join", "layout": "2x2", "address": network.address},
            "`nbdist join .*` on a machine has it come",
        )
        self.hosts = network.hosts[:2]
        self.offers = offers
        """Where the notebook's machine has keys."""
        self._place = ""
        self._commands: list[subprocess.Popen[bytes]] = []

    def hear(self, said: str) -> None:
        found = INVITATION.search(said)
        if found and found[1] != self._place:
            self._place = found[1]
            for host in self.hosts:
                bring_key(self.offers, host)
                self.join(host)

    def join(self, host: Host) -> None:
        """Run on a host what the notebook shows, with the key from a file, or from stdin.

        The first is to have the first ranks.
        """
        number = self.hosts.index(host)
        key = ("/tmp/key", "- </tmp/key")[number]
        command = f"{JOIN} {self._place} --index {number} --key-file {key}"
        self._commands.append(host.popen(f"exec {command}", stderr=subprocess.DEVNULL))

    def come_back(self, world: World, host: Host) -> None:
        self.has_no_secret_in_sight()
        self.join(host)
        wait_until(lambda: has_come(world), f"{host} to come again")

    def has_no_secret_in_sight(self) -> None:
        """The key is in no argument and in no environment."""
        secret = read_key_file(next(self.offers.iterdir())).keys.secret
        for host in self.hosts:
            found = [shows(pid, secret) for pid in host.processes()]
            assert "" in found
            assert not any(found)

    def close(self) -> None:
        """They end by themselves, with their worlds."""
        try:
            assert self._commands[0].wait(SOON) == 0
            for command in self._commands:
                command.wait(SOON)
            assert not [*self.offers.iterdir()]
        finally:
            for command in self._commands:
                end(command) if command.poll() is None else None


def bring_key(offers: Path, host: Host) -> None:
    """Copy the key to the host, as a user does, as /tmp/key."""
    (file,) = offers.iterdir()
    key = host.path("/tmp/key")
    key.touch(mode=0o600)
    key.write_bytes(file.read_bytes())


class Allocated(Launched):
    """An allocation of Slurm's, which is found by the environment."""

    def __init__(self, slurm: Slurm, job: int) -> None:
        super().__init__(
            "slurm",
            {"layout": "2x2"},
            "With `--launcher slurm` .*`%dist_restart` asks for all again",
        )
        self._slurm, self._job = slurm, job

    def holds(self) -> list[str]:
        asked = ("squeue", "--steps", "--noheader", "--format=%i", f"--jobs={self._job}")
        return self._slurm.run(*asked).stdout.split()


class OnRay(Launched):
    """Nodes of a Ray cluster."""

    def __init__(self, cluster: RayCluster) -> None:
        super().__init__(
            "ray",
            {"launcher": "ray", "layout": "2x2"},
            "With `--launcher ray` .*`%dist_restart` asks for all again",
        )
        self._cluster = cluster

    def holds(self) -> list[str]:
        return [each for host in self._cluster.hosts for each in self._cluster.actors(host)]


def has_come(world: World) -> bool:
    """Whether a machine has come that could be taken in."""
    world.session.receive(0.1)
    return bool(world.session.have_come)


def ours_on(host: Host) -> list[str]:
    """What is there of a world; daemons take their time to find that nobody is there any more."""
    return [line for line in host.left() if "nbdist" in line and "sshd: " not in line]


def is_clean(launched: Launched, network: Network) -> None:
    """Nothing is left on any host, nor where the launcher keeps its books."""
    complain(network, launched.name)
    wait_until(lambda: not launched.holds(), f"{launched.name} has let go of the world")


# --- notebooks that are killed ------------------------------------------------------------------

NOTEBOOK = """
import sys
from nbdist import World
world = World(**{options})
for said in world.session.starting_texts():
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
    """Have a notebook whose ranks are in the middle of a cell, and kill it."""
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


def named(name: str) -> list[Found]:
    """The worlds of this machine that have this name."""
    return [each for each in worlds() if each.info.name == name]


@contextmanager
def inherited(launched: Launched, network: Network) -> Iterator[World]:
    """A world that has outlived its notebook; after it nothing is left.

    The cell that ran went on when the notebook was killed, and all that it has left is there.
    """
    name, gate = f"left-{launched}-{os.getpid()}", network.folder / f"gate-{launched}"
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


# --- what each launcher has to do ---------------------------------------------------------------

SEAT = ["RANK", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]

WHERE = "__import__('socket').gethostname()"
PLACES = ["node1", "node1", "node2", "node2"]
KEPT = [10, 11, 12, 13]


def trains(world: World) -> None:
    """A step of training works on the hosts that were named; all ranks have the same weights."""
    world.execute(TRAIN)
    assert world.gather("where") == PLACES
    assert len({float(each) for each in world.gather("weight")}) == 1


def has_torchruns_variables(world: World) -> None:
    """Ranks, seats, and where user code's own group can meet; only the node's own environment."""
    world.execute(f"import os\nseat = [os.environ[name] for name in {SEAT}]")
    master = world.gather("seat")[0][-1]
    assert world.gather("seat") == [
        [str(rank), str(rank % 2), str(rank // 2), "2", "2", master] for rank in range(4)
    ]
    assert world.gather("os.environ.get('PYTEST_CURRENT_TEST')") == [None] * 4


def can_be_scaled(world: World) -> None:
    """Fewer, and as many again; what the hosts have no room for is refused in a line."""
    world.scale(1)
    check_whole(world, 1)
    world.scale(4)
    check_whole(world)
    assert world.gather(WHERE) == PLACES
    assert world.gather("globals().get('kept')") == [10, None, None, None]
    with pytest.raises((ScaleError, UsageError), match=r"room for 4|4 .* have room") as refused:
        world.scale(6)
    assert "\n" not in str(refused.value)
    check_whole(world)


def survives_an_agent(world: World, launched: Launched, network: Network) -> None:
    """The others go on without its ranks, and the user is told how to have them back."""
    world.execute("kept = rank + 10")
    host = network.hosts[1]
    said = lose(world, network, lambda: os.kill(agent_on(host), signal.SIGKILL))
    assert said.startswith("rank 2 on node2 ")
    told = rf"now 2 workers; the other ranks keep their variables\. ?{launched.way_back}"
    # A host that is tried again by itself may be back before the others have a group.
    is_back = not launched.way_back and world.size == 4
    assert re.search("Ranks 2-3 were restarted and their var" if is_back else told, said), said
    assert world.gather("globals().get('kept')") == KEPT[:2] + [None] * (world.size - 2)
    launched.come_back(world, host)
    check_whole(world)
    assert world.gather(WHERE) == PLACES


def survives_a_link(world: World, network: Network) -> None:
    """In the middle of a collective: the others are freed, and nothing stays on that host."""
    world.execute("kept = rank + 10")
    host = network.hosts[1]
    said = lose(world, network, host.link_down)
    assert re.search("rank 2 on node2 .*was lost", said)
    check_whole(world, 2)
    assert world.gather("kept") == KEPT[:2]
    # With the cable still out: what was started there has found out by itself.
    wait_until(lambda: not ours_on(host), "node2 to be empty")
    host.link_up()


def lives(launched: Launched, network: Network) -> None:
    """All that can be another matter with each launcher, in one world, from its start to its end.

    `tests/hosts/test_worlds.py` has all that cells do, and what goes wrong in them, over ssh.
    """
    with inherited(launched, network) as world:
        trains(world)
        has_torchruns_variables(world)
        with pytest.raises(WorkerError, match=r"rank 3.*ValueError: bad shard"):
            world.execute("if rank == 3: raise ValueError('bad shard')\ndist.barrier()")
        with pytest.raises(WorkerDied, match=r"rank 1 on node1 .*SIGKILL"):
            world.execute("import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
        assert world.gather("globals().get('kept')") == [10, None, 12, 13]
        can_be_scaled(world)
        survives_an_agent(world, launched, network)
        survives_a_link(world, network)
