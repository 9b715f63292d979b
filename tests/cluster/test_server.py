"""Tests of `nbdist.cluster.server`: agents that are accepted, refused or lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import zmq
from zmq.utils import z85

from nbdist.cluster.launcher import agent_command
from nbdist.cluster.server import NodeServer, addresses, listen_addresses
from nbdist.cluster.ticket import KeyPair, Ticket, connect_with, endpoint
from nbdist.wire.frames import pack, unpack
from nbdist.wire.messages import AbortRanks, Shutdown, Starting
from nbdist.wire.node_messages import NodeUp
from nbdist.wire.transfer import FrameKind, Numbered
from tests.waiting import SOON, until


def connect(ticket: Ticket, identity: bytes = b"", *, again: bool = True) -> zmq.Socket[bytes]:
    """Return the socket of an agent with a ticket; by default the socket reconnects by itself."""
    link: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    link.linger = 0
    if not again:
        link.reconnect_ivl = -1
    if identity:
        link.routing_id = identity
    connect_with(link, ticket)
    link.connect(endpoint("127.0.0.1", ticket.port))
    return link


async def next_message(link: zmq.Socket[bytes]) -> bytes:
    """Return the next message that is no heartbeat."""
    while True:
        assert await asyncio.to_thread(link.poll, SOON * 1000)
        if message := link.recv_multipart()[1:]:
            return message[0]


class Opened:
    """A server that listens, its messages, and the agents that it has lost."""

    def __init__(self) -> None:
        self.said: list[NodeUp] = []
        self.who: list[bytes] = []
        self.lost: list[bytes] = []
        self.server = NodeServer(self._take, self.lost.append, len)

    def _take(self, identity: bytes, message: NodeUp) -> None:
        self.who.append(identity)
        self.said.append(message)

    @property
    def ticket(self) -> Ticket:
        return self.server.ticket(("127.0.0.1",), fork=False)


@pytest.fixture
def opened(request: pytest.FixtureRequest, runner: asyncio.Runner) -> Iterator[Opened]:
    """A server, by default at all addresses, that loses agents after 30 silent seconds."""
    addresses, seconds = getattr(request, "param", ((), 30.0))

    async def make() -> Opened:
        opened = Opened()
        opened.server.open(*addresses, link_timeout=seconds)
        return opened

    opened = runner.run(make())
    yield opened
    runner.run(opened.server.close())


PORTS = [*map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())]


@pytest.mark.parametrize("opened", [(("127.0.0.1", "127.0.0.3"), 30.0)], indirect=True)
async def test_the_server_listens_at_chosen_addresses_only(opened: Opened) -> None:
    """The port is equal at both addresses, and every user may bind it."""
    port = opened.server.port
    for number in (1, 3):
        socket.create_connection((f"127.0.0.{number}", port), SOON).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), SOON)
    assert PORTS[0] <= port <= PORTS[1]


@pytest.mark.parametrize("opened", [((), 30.0)] * 2, indirect=True, ids=["once", "and again"])
async def test_the_server_notices_messages_and_ends(opened: Opened) -> None:
    """Messages arrive both ways, and the server learns that an agent has ended.

    A second server in the same process works, too.
    """
    with connect(opened.ticket) as link:
        link.send_multipart(Numbered().message([pack(Starting(3))]))
        await until(lambda: opened.said)
        assert opened.said == [Starting(3)]
        opened.server.send(opened.who[0], Shutdown())
        assert unpack(await next_message(link)) == Shutdown()
        assert (opened.lost, opened.server.refused) == ([], 0)
        link.send_multipart([Numbered().bare_header(FrameKind.ENDED), opened.who[0]])
        await until(lambda: opened.lost)
        assert opened.lost == opened.who


async def test_no_message_is_lost_if_an_agent_reconnects(opened: Opened) -> None:
    """Both sides get each message once; an agent that was given up is told so if it reconnects."""
    ticket, talk = opened.ticket, Numbered()
    with connect(ticket, b"agent") as first:
        first.send_multipart(talk.message([pack(Starting(0))]))
        await until(lambda: opened.said)
    for rank in (1, 2):
        opened.server.send(b"agent", AbortRanks((rank,)))
    talk.message([pack(Starting(1))])  # a message that does not arrive
    with connect(ticket, b"agent") as link:
        link.send_multipart([talk.bare_header(FrameKind.AGAIN)])
        for frames in [*talk.replay()] * 2:
            link.send_multipart(frames)
        assert [await next_message(link) for _ in range(2)] == [
            pack(AbortRanks((rank,))) for rank in (1, 2)
        ]
        await until(lambda: len(opened.said) > 1)
        assert (opened.said, opened.lost) == ([Starting(0), Starting(1)], [])
    talk.read_header(bytes(Numbered().message([])[0]))
    with connect(ticket, b"another") as link:
        link.send_multipart([talk.bare_header(FrameKind.AGAIN)])
        assert await asyncio.to_thread(link.poll, SOON * 1000)
        assert link.recv().startswith(FrameKind.ENDED.value)


NULL = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""The greeting of a program that speaks ZeroMQ without encryption (RFC 23)."""


async def test_strangers_are_refused_and_counted(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    """A program without the keys is counted once; no program keeps agents from connecting.

    Few of many refusals have a line, so that no stranger can fill the log.
    """
    ticket, server = opened.ticket, opened.server
    place = ("127.0.0.1", ticket.port)
    with socket.create_connection(place), socket.create_connection(place) as half:
        half.sendall(NULL[:12])
    own, theirs = KeyPair.new(), KeyPair.new().public
    for wrong in (replace(ticket, keys=own), replace(ticket, server_key=theirs)):
        before = server.refused
        with connect(wrong, again=False) as link:
            link.send_multipart(Numbered().message([pack(Starting(1))]))
            await until(lambda before=before: server.refused > before)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 10, os.urandom(1 << 16), NULL, NULL):
        with socket.create_connection(place) as other, suppress(ConnectionError):
            other.sendall(garbage)
    await until(lambda: server.refused == 4)
    assert opened.said == []
    lines = [each.message for each in caplog.records if "refused a connection" in each.message]
    assert [line.partition(", ")[2][0] for line in lines] == ["1", "2", "4"]
    with connect(ticket) as link:
        link.send_multipart(Numbered().message([pack(Starting(3))]))
        await until(lambda: opened.said)


def unreadable(talk: Numbered) -> list[list[bytes]]:
    """Return frames that are no message, or no message of an agent to its head."""
    headers = (b"", b"x", b"?" * 17, FrameKind.MESSAGE.value)
    message = talk.message([])[0]
    bodies = ([], [b""], [b"garbage"], [pack(5)], [pack(Starting(1))] * 2, [pack(Starting(1))] * 3)
    return [*([each] for each in headers), *([message, *each] for each in bodies)]


async def test_a_sender_of_an_unreadable_message_is_given_up(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    """Unreadable messages are dropped, and another agent's messages arrive."""
    server = opened.server
    with connect(opened.ticket, b"agent") as agent:
        talk = Numbered()
        agent.send_multipart(talk.message([pack(Starting(1))]))
        await until(lambda: opened.said)
        for number, frames in enumerate(unreadable(Numbered())):
            with connect(opened.ticket, b"holder") as holder:
                holder.send_multipart(frames)
                await until(lambda number=number: server.unreadable > number)
        agent.send_multipart([b""])  # an unreadable header is ignored
        agent.send_multipart(talk.message([pack(Starting(2))]))
        await until(lambda: len(opened.said) > 1)
        assert (opened.said, opened.lost) == ([Starting(1), Starting(2)], [])
        agent.send_multipart(talk.message([b"garbage"]))
        await until(lambda: opened.lost)
        assert opened.lost == [b"agent"]
    assert any("dropped an unreadable message, 1 by now" in each.message for each in caplog.records)


class Between:
    """Passes connections on to a port, records the data, and can change a byte of the data."""

    def __init__(self, port: int) -> None:
        self.sent: list[bytearray] = []
        self.changes = False
        self._port = port
        self._tasks: list[asyncio.Task[None]] = []

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # lets transports close

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks += filter(None, [asyncio.current_task()])
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self.sent.append(kept := bytearray())
        await asyncio.gather(self._copy(reader, back, kept), self._copy(there, writer, bytearray()))

    async def _copy(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, kept: bytearray
    ) -> None:
        try:
            while data := await source.read(1 << 16):
                kept += data
                if self.changes and kept is self.sent[-1]:
                    self.changes, data = False, data[:-1] + bytes([data[-1] ^ 1])
                target.write(data)
        except ConnectionError:
            pass
        finally:
            target.close()


@pytest.mark.parametrize("opened", [((), 2.0)], indirect=True)
async def test_recorded_and_changed_data_are_refused(opened: Opened) -> None:
    """Somebody between agent and head can read no key, replay no connection, and change no byte.

    A message that was changed on its way comes again by a new connection, once signs of life are
    missing (libzmq 4.3.5).
    """
    between, talk = Between(opened.server.port), Numbered()
    async with await asyncio.start_server(between.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        ticket = opened.ticket
        with connect(replace(ticket, port=port), b"agent") as link:
            link.send_multipart(talk.message([pack(Starting(1))]))
            await until(lambda: opened.said)
            recorded = bytes(between.sent[0])
            assert len(recorded) > 300  # the agent's handshake and message
            for key in (ticket.keys.secret, ticket.keys.public):
                assert z85.decode(key.encode()) not in recorded
            with socket.create_connection(("127.0.0.1", ticket.port)) as stranger:
                stranger.sendall(recorded)
                await until(lambda: opened.server.refused)
            between.changes = True
            link.send_multipart(talk.message([pack(Starting(2))]))
            await until(lambda: len(between.sent) > 1, "it connects again")
            link.send_multipart([talk.bare_header(FrameKind.AGAIN)])
            for frames in talk.replay():
                link.send_multipart(frames)
            await until(lambda: len(opened.said) > 1)
        assert opened.said == [Starting(1), Starting(2)]
        await between.close()


@pytest.mark.world
async def test_an_agent_sends_a_false_head_nothing(opened: Opened) -> None:
    """An agent ends if the head has another key than the ticket says."""
    ticket = replace(opened.ticket, server_key=KeyPair.new().public)
    agent = await asyncio.create_subprocess_exec(*agent_command("", 0), stdin=subprocess.PIPE)
    await agent.communicate(ticket.to_line())
    assert opened.said == []


@pytest.mark.world
@pytest.mark.parametrize("opened", [((), 3600.0)], indirect=True)
async def test_the_guard_reports_a_killed_agent(opened: Opened) -> None:
    """The head learns of the death from the guard; a lost connection could come back."""
    command = (sys.executable, "-P", "-m", "nbdist.agent", "--ticket")
    agent = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE)
    agent.stdin.write(opened.ticket.to_line())
    await until(lambda: opened.said)
    os.kill(opened.said[0].pid, signal.SIGKILL)
    await until(lambda: opened.lost)
    await agent.communicate()


LOOK = "from nbdist.cluster.server import addresses; print(*addresses(None))"

MACHINE = """
set -e
ip link set lo up
ip link add docker0 type veth peer name box && ip link set box up
ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up
ip link add eth0 type veth peer name cable && ip link set cable up
ip addr add 10.1.2.3/24 dev eth0 && ip link set eth0 up
ip route add default via 10.1.2.1
"""


def test_addresses_are_the_machines_own_or_chosen() -> None:
    """Agents are given the chosen address, or else all addresses of the head's machine.

    The server listens at the chosen address only if the machine has it, otherwise at all addresses.
    """
    own = {each.address for found in psutil.net_if_addrs().values() for each in found}
    assert (found := {*addresses(None)})
    assert found <= own
    assert not [each for each in found if each.startswith("fe80")]
    assert addresses("10.9.8.7") == ("10.9.8.7",)
    assert (
        addresses("lo") == listen_addresses("lo") == listen_addresses("127.0.0.1") == ("127.0.0.1",)
    )
    for elsewhere in (None, "203.0.113.7", "gateway.example.org"):
        assert listen_addresses(elsewhere) == ()


@pytest.mark.world
def test_the_address_of_the_default_route_is_first() -> None:
    """A bridge of containers on the same machine comes later."""
    machine = ["unshare", "--net", "sh", "-c", f"{MACHINE} exec {sys.executable} -c '{LOOK}'"]
    if os.geteuid():
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("needs `ip` (iproute2)")
    shown = subprocess.run(machine, capture_output=True, text=True, timeout=SOON)
    if "Operation not permitted" in shown.stderr:
        pytest.skip("no network namespaces here")
    assert shown.stdout.split()[:2] == ["10.1.2.3", "172.17.0.1"], shown.stderr
