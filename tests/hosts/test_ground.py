"""The fixtures of hosts themselves: the check after each test finds leftovers."""

from __future__ import annotations

import pytest

from tests.hosts.conftest import complain
from tests.hosts.network import Host, Network
from tests.waiting import wait_until

PORT = 5000
SERVER = f"import http.server as h; h.test(h.SimpleHTTPRequestHandler, port={PORT})"

LEFT = {
    "setsid sleep 100 >/dev/null 2>&1 &": "node2: process",
    f'setsid python -c "{SERVER}" >/dev/null 2>&1 &': f"node2: port {PORT}",
    "mkdir /tmp/nbdist-left": "node2: folder nbdist-left",
    "touch /dev/shm/left": "node2: /dev/shm/left",
}
"""Commands that leave something on a host, and how the leftover is reported."""


def test_leftovers_are_reported_and_removed(hosts: list[Host], network: Network) -> None:
    """Stray processes, ports, folders and shared memory are reported and then removed."""
    assert network.left() == []
    for line in LEFT:
        hosts[1].run(line)
    wait_until(lambda: all(told in str(network.left()) for told in LEFT.values()), "all is told")
    with pytest.raises(pytest.fail.Exception, match=rf"port {PORT}(?s:.)*nbdist-left"):
        complain(network, "the test", timeout=0)
    wait_until(lambda: not network.left(), "it is ended")
