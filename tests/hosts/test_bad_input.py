"""What cannot work on other hosts: one clear line with the remedy, soon, and nothing is left."""

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
    """The first line of what is said where a world does not start on these hosts."""
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


def test_no_agent_there(tmp_path: Path) -> None:
    """What ssh, or the interpreter there, says, and what to do about it."""
    config = WorldConfig(hosts=",".join(REASONS), python="/usr/bin/python3")
    for process in SshLauncher().launch(config, TICKET, tmp_path).processes:
        assert select.select([process], [], [], SOON)[0] == [process]
        said = why_refused(process.host, process.last_lines(), process.command)
        assert said.startswith(REASONS[process.host])
        process.end(0.0)
        process.close()


def test_another_torch(hosts: list[Host]) -> None:
    """Both versions are named, and nothing is started."""
    python = wrapped(hosts[1], "torch-2.3.1.dist-info/METADATA", "Name: torch\nVersion: 2.3.1\n")
    said = refused("node2:1", python=python)
    assert said.startswith("the workers could not start: node2 has torch 2.3.1, the notebook ")
    assert "`pip install torch==" in said


def test_a_host_that_does_not_reach_the_notebook(hosts: list[Host], network: Network) -> None:
    """Each address of the notebook's is named, with the port."""
    for address in (network.address, network.address6):
        hosts[1].block_to(address)
    said = refused("node2:1", address=network.address)
    where = f"node2 cannot reach the notebook's machine at {network.address}:"
    assert said.startswith(f"the agent on node2 could not start: {where}")
    assert ": no answer within 5 s" in said


def test_hosts_that_do_not_reach_one_another(hosts: list[Host]) -> None:
    """Which one, the other's address and port, before a rank waits for the group."""
    hosts[0].block_to(hosts[1].address)
    said = refused("node1:1,node2:1")
    where = f"node1 cannot reach node2 at {hosts[1].address}:"
    assert said.startswith(f"the workers could not start: {where}")
    assert ": no answer within 4 s; gloo and nccl connect all machines" in said
