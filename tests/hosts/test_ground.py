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
from tests.hosts.sshd import Sshd
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


def test_hosts_reach_one_another(hosts: list[Host], network: Network) -> None:
    """Over IPv4, over IPv6 and by name; this machine reaches them, and they reach it."""
    with serving(hosts[1]):
        places = (hosts[1].address, hosts[1].address6, "node2")
        assert [connects_from(hosts[0], place) for place in places] == [True] * 3
        assert connects(hosts[1].address)
        assert connects(hosts[1].address6)
    with socket.create_server((network.address, PORT)):
        assert connects_from(hosts[0], network.address)


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


def test_blocked_ports(hosts: list[Host], network: Network) -> None:
    """One port, all that come in, or one of another machine."""
    with serving(hosts[0]):
        hosts[0].block_port(PORT)
        assert not connects(hosts[0].address)
        assert not connects(hosts[0].address6)
        hosts[0].mend()
        connect(hosts[0].address)
        hosts[0].block_port()
        assert not connects(hosts[0].address)
        with socket.create_server((network.address, PORT)):
            assert connects_from(hosts[0], network.address)
            hosts[0].block_port_of(network.address, PORT)
            assert not connects_from(hosts[0], network.address)


def test_a_clock_of_its_own(hosts: list[Host]) -> None:
    """All programs of the host see it; monotonic clocks are as they were."""
    hosts[0].set_clock(-3600.5)
    lines = "import time, datetime; print(time.time(), datetime.datetime.now().timestamp())"
    for seen in hosts[0].run(["python", "-c", lines]).stdout.split():
        assert -3601 < float(seen) - time.time() < -3590
    assert abs(float(hosts[1].run("date +%s").stdout) - time.time()) < 10
    monotonic = float(hosts[0].run(["python", "-c", "import time; print(time.monotonic())"]).stdout)
    assert abs(monotonic - time.monotonic()) < 10


def test_ssh_by_alias(hosts: list[Host], sshd: Sshd) -> None:
    """From this machine and between hosts, over IPv6, and through one connection for several."""
    for alias, name in (("node1", "node1"), ("node2-v6", "node2"), ("node3-shared", "node3")):
        assert sshd.ssh(alias, "hostname").stdout.strip() == name
    assert hosts[0].run(["ssh", "node2", "hostname"]).stdout == "node2\n"


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
