"""Hosts that come by themselves, to a world whose notebook has no way to reach them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from nbdist.cluster.ticket import KeyPair, Ticket, write_join_key
from tests.hosts.launched import JOIN, Joined, bring_key, lives
from tests.hosts.network import Host, Network


@pytest.fixture
def offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the notebook's machine has keys; no host has that folder for its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "nbdist" / "joins"


def test_a_world(network: Network, hosts: list[Host], offers: Path) -> None:
    """It lives as over ssh."""
    joined = Joined(network, offers)
    lives(joined, network)
    joined.close()


def test_who_cannot_come_is_told_in_a_line(
    network: Network, hosts: list[Host], offers: Path
) -> None:
    """No key, a blocked port, a stale place, no network: which place, why, and what to do."""
    with socket.create_server((network.address, 0)) as world:
        port = world.getsockname()[1]
        place = f"{network.address}:{port}"
        write_join_key(Ticket((network.address,), port, KeyPair.new().public, KeyPair.new()))
        bring_key(offers, hosts[0])
        assert "has no key for it. Where the home folder is not" in refused(hosts[1], place)
        hosts[0].block_port_of(network.address, port)
        told = refused(hosts[0], f"{place} --key-file /tmp/key")
        assert "no world waits there (no answer)" in told
        hosts[0].mend()
    assert "no world waits there (Connection refused)" in refused(hosts[0], place)
    hosts[0].link_down()
    assert "no world waits there (" in refused(hosts[0], place)


def refused(host: Host, words: str) -> str:
    """The last line that the command says where it cannot join."""
    process = host.run(f"{JOIN} {words}", check=False)
    assert process.returncode in (1, 2)
    return process.stderr.splitlines()[-1]
