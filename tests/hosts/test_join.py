"""Hosts that join by themselves a world whose notebook has no way to reach the hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.world.world import World
from tests.hosts.network import Host, Network, end
from tests.hosts.worlds import Launched, has_come, has_slots, inherited, survives_an_agent
from tests.waiting import SOON, wait_until

JOIN = f"{sys.executable} -m nbdist.terminal join"
INVITATION = re.compile(r"`nbdist join (\S+)`")


class Joined(Launched):
    """Hosts without a common home, on which somebody runs the command that the notebook shows."""

    def __init__(self, network: Network, offers: Path) -> None:
        super().__init__(
            "join",
            {"launcher": "join", "layout": "2x2", "address": network.address},
            "`nbdist join .*` on a machine has it come",
        )
        self._hosts, self._offers, self._place = network.hosts[:2], offers, ""
        self.commands: list[subprocess.Popen[bytes]] = []

    def hear(self, said: str) -> None:
        found = INVITATION.search(said)
        if found and found[1] != self._place:
            self._place = found[1]
            for host in self._hosts:
                bring_key(self._offers, host)
                self._join(host)

    def _join(self, host: Host) -> None:
        """Run `nbdist join`, with the key from a file or stdin; `--index` orders the hosts."""
        number = self._hosts.index(host)
        key = ("/tmp/key", "- </tmp/key")[number]
        command = f"{JOIN} {self._place} --index {number} --key-file {key}"
        self.commands.append(host.popen(f"exec {command}", stderr=subprocess.DEVNULL))

    def come_back(self, world: World, host: Host) -> None:
        """Run the command on the host again."""
        self._join(host)
        wait_until(lambda: has_come(world), f"{host} to come again")


def bring_key(offers: Path, host: Host) -> None:
    """Copy the key to the host, as a user does, as /tmp/key."""
    (file,) = offers.iterdir()
    key = host.path("/tmp/key")
    key.touch(mode=0o600)
    key.write_bytes(file.read_bytes())


@pytest.fixture
def offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the notebook's machine that has the keys; no host shares the folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "nbdist" / "joins"


def test_joined_worlds_live_as_over_ssh(network: Network, hosts: list[Host], offers: Path) -> None:
    """The commands of the hosts end with the world, the first with 0, and the key is removed."""
    joined = Joined(network, offers)
    try:
        with inherited(joined, network) as world:
            has_slots(world)
            survives_an_agent(world, joined, network)
        assert joined.commands[0].wait(SOON) == 0
        for command in joined.commands:
            command.wait(SOON)
        assert not [*offers.iterdir()]
    finally:
        for command in joined.commands:
            end(command) if command.poll() is None else None
