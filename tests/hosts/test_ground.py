"""The ground itself: hosts that are apart, real daemons on them, and a look that finds leaks."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.hosts.conftest import complain
from tests.hosts.network import Host, Network, end
from tests.waiting import wait_until

PORT = 5000
SERVER = f"import http.server as h; h.test(h.SimpleHTTPRequestHandler, port={PORT}, bind='::')"


@contextmanager
def serving(host: Host) -> Iterator[None]:
    """Something listens on the host, for both kinds of addresses."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    options = "import socket as s; h.HTTPServer.address_family = s.AF_INET6; "
    lines = SERVER.replace("h.test", f"{options}h.test")
    server = host.popen(["python", "-c", lines], **quiet)
    try:
        wait_until(lambda: PORT in host.listening(), "the server listens")
        yield
    finally:
        end(server)


def connect(address: str, timeout: float = 5.0) -> float:
    """Seconds until a connection is there: one round trip."""
    began = time.monotonic()
    socket.create_connection((address, PORT), timeout).close()
    return time.monotonic() - began


def connects(address: str) -> bool:
    """Whether it comes to be."""
    try:
        connect(address, 0.5)
    except OSError:
        return False
    return True


def connects_from(host: Host, address: str) -> bool:
    """The same from another host."""
    lines = f"import socket; socket.create_connection(({address!r}, {PORT}), 2)"
    return host.run(["python", "-c", lines], check=False).returncode == 0


def test_hosts_share_nothing(hosts: list[Host]) -> None:
    """Not their names, loopback, temporary files, shared memory or home folders."""
    first, second, _ = hosts
    assert [host.run("hostname").stdout for host in hosts] == ["node1\n", "node2\n", "node3\n"]
    with serving(second):
        assert not connects_from(first, "127.0.0.1")
    for folder in ("/tmp", "/dev/shm", "~", "/etc"):
        first.run(f"touch {folder}/mine")
        assert second.run(f"ls {folder}/mine", check=False).returncode != 0
        first.run(f"rm {folder}/mine")


def test_a_slow_link(hosts: list[Host]) -> None:
    """The delay is there in each direction, large messages pass whole, and it goes again."""
    host = hosts[0]
    with serving(host):
        host.slow(delay=0.05, loss=0)
        connect(host.address)  # the first asks who has the address
        assert connect(host.address) >= 0.1
        host.path("/root/large").write_bytes(bytes(range(256)) * 20_000)
        with urllib.request.urlopen(f"http://{host.address}:{PORT}/large") as reply:
            assert reply.read() == host.path("/root/large").read_bytes()
        host.fast()
        assert min(connect(host.address) for _ in range(5)) < 0.1


def test_a_link_that_loses(hosts: list[Host]) -> None:
    """One that loses everything lets nothing pass; one that loses a third, some."""
    with serving(hosts[0]):
        hosts[0].slow(delay=0, loss=1)
        assert not connects(hosts[0].address)
        hosts[0].slow(delay=0, loss=0.3)
        seen: set[bool] = set()
        for _ in range(30):
            seen.add(connects(hosts[0].address))
            if len(seen) == 2:
                break
        assert seen == {True, False}


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
