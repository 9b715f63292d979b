"""Fixtures for several hosts on one machine: network namespaces with real daemons in them.

A daemon is started when a test first asks for it, and ends with the run.  Without root, or if a
program is not installed, the tests that need it are skipped and say why.

After a test all trouble is undone (`Host.mend`), and leftovers on any host are an error of the
test: processes, ports that listen, `nbdist-*` folders, shared memory.  A module marked
`shared_world` is checked after its last test only.  A host shares programs, this repository,
`/run` and the processor with all others, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.hosts import network as networks
from tests.hosts import sshd as sshds
from tests.hosts.network import Host, Network
from tests.hosts.sshd import Sshd

NAMES = ("node1", "node2", "node3")

# A node needs as long to end its workers gently.
LEAK_TIMEOUT = 8.0
POLL_SECONDS = 0.05


@pytest.fixture(scope="session")
def network(nothing_is_left_by_all: set[str]) -> Iterator[Network]:
    """Three hosts and this machine at one switch."""
    if reason := networks.missing():
        pytest.skip(reason)
    network = Network(NAMES)
    yield network
    network.close()


@pytest.fixture(scope="session")
def sshd(network: Network) -> Iterator[Sshd]:
    """A real sshd on each host."""
    if reason := sshds.missing():
        pytest.skip(reason)
    sshd = Sshd(network)
    yield sshd
    sshd.close()


@pytest.fixture(scope="session")
def path(sshd: Sshd) -> Iterator[None]:
    """Put the ssh of a user who knows the hosts on the PATH of this process and its children."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", sshd.environ["PATH"])
        yield


@pytest.fixture(scope="module")
def hosts_of_module(network: Network) -> Iterator[list[Host]]:
    """The hosts, for a fixture of a module, which may leave nothing on them."""
    yield network.hosts
    complain(network, "the module")


@pytest.fixture
def hosts(request: pytest.FixtureRequest, hosts_of_module: list[Host]) -> Iterator[list[Host]]:
    """The hosts, on which a test may leave nothing; all trouble is undone after the test."""
    network: Network = request.getfixturevalue("network")
    yield hosts_of_module
    for host in network.everything:
        host.mend()
    if not request.node.get_closest_marker("shared_world"):
        complain(network, "the test")


def complain(network: Network, where: str, timeout: float = LEAK_TIMEOUT) -> None:
    """Fail unless everything but daemons has gone from all hosts, after some seconds at most.

    Leftovers are removed, so that the next test is not blamed for them.
    """
    deadline = time.monotonic() + timeout
    while left := network.left():
        if time.monotonic() > deadline:
            network.clean()
            lines = "".join(f"  {line}\n" for line in left)
            pytest.fail(f"left on hosts by {where}:\n{lines}", pytrace=False)
        time.sleep(POLL_SECONDS)
