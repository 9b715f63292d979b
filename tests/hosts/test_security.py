"""Who has no key is kept out of a world on several hosts, and what is secret shows nowhere."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import zmq

from nbdist.cluster.launcher import agent_command
from nbdist.cluster.ticket import KeyPair, Ticket, listen_with, ticket_from
from nbdist.wire.messages import GetRefused
from nbdist.world.world import World
from tests.hosts.network import Host, Network
from tests.hosts.worlds import LINK_TIMEOUT, SUM, check_whole
from tests.traces import shows
from tests.waiting import SOON, wait_until

READ_SIZE = 1 << 16

LAUNCHER = """
import dataclasses, os
from nbdist.cluster.launcher import SshLauncher

class SpyLauncher:
    def launch(self, wanted, ticket, folder):
        place, address, port = os.environ["NBDIST_TEST_SPY"].split(",")
        with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(ticket.to_line())
        ticket = dataclasses.replace(ticket, addresses=(address,), port=int(port))
        return SshLauncher().launch(wanted, ticket, folder)
"""
"""ssh's, but that agents are sent to the spy, who is told where the head is."""


def install(folder: Path) -> None:
    """Have `--launcher spy` where this folder is on the path."""
    (folder / "spy_launcher.py").write_text(LAUNCHER)
    metadata = folder / "spy_launcher-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: spy_launcher\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[nbdist.launchers]\nspy = spy_launcher:SpyLauncher\n"
    )


class Spy:
    """Passes each connection on to the head, and keeps what agents have sent; in threads."""

    def __init__(self, folder: Path, address: str) -> None:
        self.sent: list[bytearray] = []
        """By agents, in each connection."""
        self.changes = False
        """Whether the next bytes of an agent get one wrong."""
        self._place = folder / "ticket"
        self._listener = socket.create_server((address, 0))
        self.environ = f"{self._place},{address},{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def ticket(self) -> Ticket:
        """What agents really need."""
        return ticket_from(self._place.read_bytes())

    def close(self) -> None:
        """End all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._open):
            each.close()

    def _start(self, work: Callable[..., None], *what: object) -> None:
        self._threads.append(threading.Thread(target=work, args=what))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                agent, _ = self._listener.accept()
                head = socket.create_connection(("127.0.0.1", self.ticket.port))
                self._open += [agent, head]
                self.sent.append(bytearray())
                self._start(self._pass_on, agent, head, self.sent[-1])
                self._start(self._pass_on, head, agent, None)

    def _pass_on(
        self, source: socket.socket, target: socket.socket, kept: bytearray | None
    ) -> None:
        with suppress(OSError):
            while data := source.recv(READ_SIZE):
                if kept is not None:
                    kept += data
                    if self.changes:
                        self.changes = False
                        data = data[:-1] + bytes([data[-1] ^ 1])
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


pytestmark = pytest.mark.shared_world

FORGED = """
import os, pickle, sys, time, zmq

class Bomb:
    def __reduce__(self):
        return os.system, ("touch " + sys.argv[2],)

link = zmq.Context().socket(zmq.DEALER)
link.linger, link.reconnect_ivl = 0, -1
for name, value in zip(("curve_serverkey", "curve_publickey", "curve_secretkey"), sys.argv[3:]):
    setattr(link, name, value.encode())
link.connect(sys.argv[1])
for _ in range(20):
    link.send(pickle.dumps(Bomb()))
answers = link.poll(3000)
print("answered" if answers else "nothing", flush=True)
os._exit(0)
"""

RAW = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3) as stranger:
    stranger.sendall(sys.stdin.buffer.read())
    try:
        while stranger.recv(65536):
            pass
    except OSError:
        pass
"""

SCAN = """
import socket, sys
for port in range(1, 65536):
    with socket.socket() as stranger:
        if stranger.connect_ex((sys.argv[1], port)) == 0:
            print(port)
"""

LOCAL = """
import sys
from nbdist import World
with World(2, log_dir="") as world:
    world.execute("import torch.distributed as dist; dist.barrier()")
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def spy(network: Network, tmp_path_factory: pytest.TempPathFactory, path: None) -> Iterator[Spy]:
    folder = tmp_path_factory.mktemp("spy")
    install(folder)
    spy = Spy(folder, network.address)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        before = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{before}" if before else str(folder))
        patch.setenv("NBDIST_TEST_SPY", spy.environ)
        yield spy
    spy.close()


@pytest.fixture(scope="module")
def world(hosts_of_module: list[Host], spy: Spy) -> Iterator[World]:
    """Two hosts with a worker each, whose agents' bytes pass by the spy."""
    options = {"launcher": "spy", "link_timeout": LINK_TIMEOUT, "log_dir": "", "show": False}
    with World(hosts="node1:1,node2:1", **options) as world:
        assert refused(world) == 0
        yield world


def runtime(world: World) -> Path:
    """The folder of the head."""
    return Path(world.session.link.address.removeprefix("ipc://")).parent


def refused(world: World) -> int:
    """How many connections the head has refused; its log counts them too."""
    said = re.findall(
        r"refused a connection, (\d+) by now", (runtime(world) / "agent.log").read_text()
    )
    refused: int = world.session.ask(GetRefused())
    assert refused >= max(map(int, said), default=0)
    return refused


def say(host: Host, place: str, what: bytes) -> None:
    """Have a stranger on this host say this to the head, until the head ends it."""
    host.path("/tmp/said").write_bytes(what)
    host.run(f"{sys.executable} -c '{RAW}' {place} < /tmp/said")


def goes_on(world: World, kept: int) -> None:
    """The world works, and no rank of it is another one."""
    check_whole(world, 2)
    assert world.gather("kept") == [kept] * 2


# --- strangers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("has", ["another server's key", "the server's key"])
def test_a_stranger_with_no_right_key(
    world: World, spy: Spy, network: Network, hosts: list[Host], tmp_path: Path, has: str
) -> None:
    """It is refused and counted, nothing that it sends is read, and the world goes on."""
    world.execute("kept = 1")
    before, own = refused(world), KeyPair.new()
    server = spy.ticket.server_key if has == "the server's key" else KeyPair.new().public
    keys = [server, own.public, own.secret]
    bomb = tmp_path / "bomb"
    place = f"tcp://{network.address}:{spy.ticket.port}"
    done = hosts[2].run([sys.executable, "-c", FORGED, place, str(bomb), *keys])
    assert done.stdout.strip() == "nothing"
    wait_until(lambda: refused(world) > before, "it was not counted")
    assert not bomb.exists()
    goes_on(world, 1)


def test_a_stranger_with_no_key(
    world: World, spy: Spy, network: Network, hosts: list[Host]
) -> None:
    """Who speaks ZeroMQ without encryption is refused and counted."""
    world.execute("kept = 4")
    before = refused(world)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    hello = b"\x05READY" + b"\x0bSocket-Type" + b"\0\0\0\x06DEALER"
    forged = b"\x04" + bytes([len(hello)]) + hello + b"\0\x05hello"
    say(hosts[2], f"{network.address} {spy.ticket.port}", greeting + forged)
    wait_until(lambda: refused(world) > before, "it was not counted")
    goes_on(world, 4)


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n" * 100, os.urandom(1 << 16), b"\xff" + bytes(8) + b"\x7f\x03"],
    ids=["HTTP", "random", "half a greeting"],
)
def test_garbage(
    world: World, spy: Spy, network: Network, hosts: list[Host], garbage: bytes
) -> None:
    """It ends its own connection; the world goes on."""
    world.execute("kept = 2")
    with socket.create_connection((network.address, spy.ticket.port), timeout=3) as stranger:
        stranger.sendall(garbage)
        goes_on(world, 2)


def test_a_replay(world: World, spy: Spy, network: Network, hosts: list[Host]) -> None:
    """What an agent has sent in its connection is worth nothing in another one."""
    world.execute("kept = 3")
    before = refused(world)
    recorded = max(spy.sent, key=len)
    assert len(recorded) > 2_000  # its handshake, and what it has said
    say(hosts[2], f"{network.address} {spy.ticket.port}", bytes(recorded))
    wait_until(lambda: refused(world) > before, "it was not counted")
    goes_on(world, 3)


def test_a_false_head(network: Network, hosts: list[Host]) -> None:
    """An agent tells it nothing, having another key than the ticket says, and ends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.ROUTER) as false:
        false.linger = 0
        listen_with(false, KeyPair.new())
        port = false.bind_to_random_port(f"tcp://{network.address}", min_port=0)
        ticket = Ticket((network.address,), port, KeyPair.new().public, KeyPair.new(), fork=False)
        with hosts[2].popen(agent_command("", 0), stdin=subprocess.PIPE) as agent:
            assert agent.stdin is not None
            agent.stdin.write(ticket.to_line())
            agent.stdin.flush()
            agent.wait(SOON)
        assert not false.poll(0)
    context.term()


# --- what is secret -------------------------------------------------------------------------------


def test_no_secret_is_to_be_seen(world: World, spy: Spy, hosts: list[Host]) -> None:
    """Not in a command line, an environment, a log, or any other file of the world."""
    keys = (spy.ticket.keys.secret, spy.ticket.keys.public)
    found = [shows(pid, key) for pid in psutil.pids() for key in keys]
    assert found.count("") > 20
    assert not any(found)
    far = (folder for host in hosts for folder in host.path("/tmp").glob("nbdist-*"))
    folders = [runtime(world), *far]
    assert len(folders) > 2
    files = [each for folder in folders for each in folder.rglob("*") if each.is_file()]
    assert runtime(world) / "agent.log" in files
    for file in files:
        assert not any(key in file.read_bytes() for key in map(str.encode, keys)), file
    assert not any(key.encode() in sent for key in keys for sent in spy.sent)


def test_folders_are_private(world: World) -> None:
    """Those of the head and of all agents, and the sockets in them."""
    world.execute(
        "import os\n"
        "folder = os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE'])\n"
        "modes = os.stat(folder).st_mode & 0o777, os.stat(folder).st_uid == os.getuid()"
    )
    assert world.gather("modes") == [(0o700, True)] * 2
    assert runtime(world).stat().st_mode & 0o777 == 0o700


def test_where_gloo_listens(world: World, hosts: list[Host]) -> None:
    """On the one address by which the agent has reached the head, and nothing else does."""
    world.execute(
        "import psutil\n"
        "found = [each.laddr.ip for each in psutil.Process().net_connections('tcp')\n"
        "         if each.status == psutil.CONN_LISTEN]"
    )
    assert world.gather("found") == [[hosts[0].address], [hosts[1].address]]


# --- somebody on the way ------------------------------------------------------------------------


def test_a_byte_that_is_changed_on_the_way(world: World, spy: Spy) -> None:
    """It ends the connection, and nobody takes it for what was sent: that comes by another one."""
    world.execute("kept = rank")
    before, connections = refused(world), len(spy.sent)
    spy.changes = True
    world.execute(SUM)
    wait_until(lambda: len(spy.sent) > connections, "an agent has connected again")
    assert world.gather("(kept, float(total))") == [(0, 2.0), (1, 2.0)]
    sys.stdout.write(f"{refused(world) - before} more refused\n")


# --- a world on one machine ---------------------------------------------------------------------


def test_a_scan_of_a_local_world(world: World, hosts: list[Host]) -> None:
    """From another host no port is open that was not before; what listens does so on loopback."""
    host, stranger = hosts[0], hosts[1]

    def listening() -> set[str]:
        return {line.split()[3] for line in host.run("ss -Hltn").stdout.splitlines()}

    before = listening()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with host.popen([sys.executable, "-c", LOCAL], **pipes) as notebook:
        assert notebook.stdout is not None
        assert notebook.stdout.readline() == b"ready\n"
        new = listening() - before
        scan = stranger.run([sys.executable, "-c", SCAN, host.address], timeout=SOON)
        notebook.communicate()
    found = set(scan.stdout.split())
    assert found
    assert found <= {each.rpartition(":")[2] for each in before}
    assert len(new) == 2  # gloo's, one for each rank
    assert all(each.startswith("127.0.0.1:") for each in new)
