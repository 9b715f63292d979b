"""The ground itself: hosts that are apart, and a look that finds leaks."""

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
"""What is done on a host, and what is told of it."""


def test_what_is_left_is_told(hosts: list[Host], network: Network) -> None:
    """And ended: processes that have left their session, a port, a folder, shared memory."""
    assert network.left() == []
    for line in LEFT:
        hosts[1].run(line)
    wait_until(lambda: all(told in str(network.left()) for told in LEFT.values()), "all is told")
    with pytest.raises(pytest.fail.Exception, match=rf"port {PORT}(?s:.)*nbdist-left"):
        complain(network, "the test", timeout=0)
    wait_until(lambda: not network.left(), "it is ended")
