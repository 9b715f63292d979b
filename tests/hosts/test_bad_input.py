"""Worlds that cannot start on other hosts: one clear line with the remedy, and no leftovers."""

from __future__ import annotations

import select
from pathlib import Path

import pytest

from nbdist.cluster.launcher import SshLauncher, why_refused
from nbdist.cluster.ticket import KeyPair, Ticket
from nbdist.config import WorldConfig
from nbdist.errors import StartError
from tests.hosts.network import Host, Network
from tests.hosts.worlds import new_world, wrapped
from tests.waiting import SOON

pytestmark = pytest.mark.usefixtures("path", "hosts")

TICKET = Ticket(("127.0.0.1",), 1, "x" * 40, KeyPair.new(), fork=False)


def refused(hosts: str, **options: object) -> str:
    """Start a world that must fail on these hosts; return the first line of the error."""
    with pytest.raises(StartError) as found:
        new_world(hosts, fork=False, **options)
    return str(found.value).splitlines()[0]


REASONS = {
    "no-host": "the name no-host cannot be resolved: an address, or a `HostName` in ~/",
    "node2-refused": "it refused the login (publickey): `ssh node2-refused true` has ",
    "node2-changed": "its host key is not the one that ssh knows: `ssh node2-changed` ",
    "node2-closed": "ssh cannot reach ",
    "node2": "the interpreter there has no nbdist: `pip install nbdist==",
}


def test_a_line_says_why_an_agent_cannot_start(tmp_path: Path) -> None:
    """A line has the reason of ssh or of the host's interpreter, and the remedy."""
    config = WorldConfig(hosts=",".join(REASONS), python="/usr/bin/python3")
    for process in SshLauncher().launch(config, TICKET, tmp_path).processes:
        assert select.select([process], [], [], SOON)[0] == [process]
        said = why_refused(process.host, process.last_lines(), process.command)
        assert said.startswith(REASONS[process.host])
        process.end(0.0)
        process.close()


def test_a_host_with_another_torch_is_refused(hosts: list[Host]) -> None:
    """The error names the host's torch, the notebook's, and the remedy."""
    python = wrapped(hosts[1], "torch-2.3.1.dist-info/METADATA", "Name: torch\nVersion: 2.3.1\n")
    said = refused("node2:1", python=python)
    assert said.startswith("the workers could not start: node2 has torch 2.3.1, the notebook ")
    assert "`pip install torch==" in said


def test_a_host_cut_off_from_the_notebook_is_named(hosts: list[Host], network: Network) -> None:
    """The error names the host, the notebook's address, and how long no answer came."""
    for address in (network.address, network.address6):
        hosts[1].block_to(address)
    said = refused("node2:1", address=network.address)
    where = f"node2 cannot reach the notebook's machine at {network.address}:"
    assert said.startswith(f"the agent on node2 could not start: {where}")
    assert ": no answer within 5 s" in said


def test_hosts_that_cannot_reach_one_another_are_named(hosts: list[Host]) -> None:
    """The error names both hosts and the second's address, before a rank waits for the group."""
    hosts[0].block_to(hosts[1].address)
    said = refused("node1:1,node2:1")
    where = f"node1 cannot reach node2 at {hosts[1].address}:"
    assert said.startswith(f"the workers could not start: {where}")
    assert ": no answer within 4 s; gloo and nccl connect all machines" in said
