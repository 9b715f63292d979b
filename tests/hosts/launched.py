"""Worlds of two workers on each of two hosts, by each launcher: what is its own in starting them.

Only for `join` something has to be done besides: what it asks the user for, on each host.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from nbdist.world.world import World
from tests.hosts.network import Host, Network, end
from tests.hosts.ray_cluster import RayCluster
from tests.hosts.slurm import Slurm
from tests.waiting import wait_until

NAMES = ("ssh", "slurm", "join", "ray")

JOIN_TIMEOUT = 60.0
INVITATION = re.compile(r"`nbdist join (\S+)`")

AT_THE_START = (
    "With `--launcher {}` machines come at the start alone: `%dist_restart` asks for all again"
)
"""What is told where none comes later, nor again."""


class Launched:
    """How worlds are started by one launcher; `options` are their arguments."""

    def __init__(self, name: str, options: Mapping[str, Any], way_back: str) -> None:
        self.name = name
        self.options = {**options, "log_dir": "", "show": False}
        self.way_back = way_back
        """What the user is told to do about a host that is lost; "" where it is tried again."""

    def __repr__(self) -> str:
        return self.name

    def hear(self, said: str) -> None:
        """Do what somebody is asked for while a world starts."""

    def start(self, **options: Any) -> World:
        """Start a world here."""
        world = World(**{**self.options, **options})
        for said in world.session.starting_texts():
            self.hear(said)
        return world

    def come_back(self, world: World, host: Host) -> None:
        """Have all four workers again after `host` was lost, by what the user was told."""
        if self.way_back:
            world.restart()
        else:
            wait_until(lambda: has_come(world), f"{host} to come by itself")

    def holds(self) -> list[str]:
        """What the launcher's own programs still keep for a world."""
        return []

    def close(self) -> None:
        """Nothing of it is needed any more."""


class Joined(Launched):
    """Hosts on which somebody runs `nbdist join`; they find the key in a home folder of all."""

    def __init__(self, network: Network) -> None:
        super().__init__(
            "join",
            {"launcher": "join", "layout": "2x2", "address": network.address},
            "`nbdist join .*` on a machine has it come",
        )
        self.hosts = network.hosts[:2]
        self.environ = {"XDG_STATE_HOME": str(network.folder / "state")}
        self._place = ""
        self._commands: list[subprocess.Popen[bytes]] = []

    def hear(self, said: str) -> None:
        found = INVITATION.search(said)
        if found and found[1] != self._place:
            self._place = found[1]
            for host in self.hosts:
                self.join(host)

    def join(self, host: Host) -> None:
        """Run on a host what the notebook shows; the first is to have the first ranks."""
        number = self.hosts.index(host)
        command = [sys.executable, "-m", "nbdist.terminal", "join", self._place]
        command += ["--index", str(number)]
        self._commands.append(host.popen(command, environ=self.environ, stderr=subprocess.DEVNULL))

    def come_back(self, world: World, host: Host) -> None:
        self.join(host)
        wait_until(lambda: has_come(world), f"{host} to come again")

    def close(self) -> None:
        """They end by themselves, with their worlds."""
        try:
            for command in self._commands:
                command.wait(JOIN_TIMEOUT)
        finally:
            for command in self._commands:
                end(command) if command.poll() is None else None


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


@contextmanager
def launched_by(
    name: str, ask: Callable[[str], Any], patch: pytest.MonkeyPatch
) -> Iterator[Launched]:
    """Have what a launcher needs, of fixtures that are asked for by name."""
    network: Network = ask("network")
    with ExitStack() as stack:
        if name == "ssh":
            ask("path")
            yield Launched(name, {"hosts": "node1:2,node2:2"}, "")
        elif name == "slurm":
            slurm: Slurm = ask("slurm")
            yield Allocated(slurm, stack.enter_context(slurm.inside("-N2")))
        elif name == "ray":
            yield OnRay(ask("cluster"))
        else:
            joined = Joined(network)
            for key, value in joined.environ.items():
                patch.setenv(key, value)
            stack.callback(joined.close)
            yield joined
