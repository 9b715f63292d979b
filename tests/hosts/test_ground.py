"""The ground itself: hosts that are apart, and a look that finds leaks."""

from __future__ import annotations

import pytest

from tests.hosts.conftest import complain
from tests.hosts.network import Host, Network
from tests.waiting import wait_until

PORT = 5000
SERVER = f"import http.server as h; h.test(h.SimpleHTTPRequestHandler, port={PORT})"


def test_hosts_share_nothing(hosts: list[Host]) -> None:
    """Not their names, temporary files, shared memory or home folders."""
    first, second, _ = hosts
    assert [host.run("hostname").stdout for host in hosts] == ["node1\n", "node2\n", "node3\n"]
    for folder in ("/tmp", "/dev/shm", "~", "/etc"):
        first.run(f"touch {folder}/mine")
        assert second.run(f"ls {folder}/mine", check=False).returncode != 0
        first.run(f"rm {folder}/mine")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("setsid sleep 100 >/dev/null 2>&1 &", "node2: process"),
        (f'setsid python -c "{SERVER}" >/dev/null 2>&1 &', f"node2: port {PORT}"),
        ("mkdir /tmp/nbdist-left", "node2: folder nbdist-left"),
        ("touch /dev/shm/left", "node2: /dev/shm/left"),
    ],
)
def test_what_is_left_is_told(line: str, told: str, hosts: list[Host], network: Network) -> None:
    """And ended: a process that has left its session, a port, a folder, shared memory."""
    assert network.left() == []
    hosts[1].run(line)
    wait_until(lambda: told in str(network.left()), told)
    with pytest.raises(pytest.fail.Exception, match=told):
        complain(network, "the test", timeout=0)
    wait_until(lambda: not network.left(), "it is ended")
