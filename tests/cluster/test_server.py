"""Tests of `nbdist.cluster.server`: who is let in, who is refused, and who has gone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from nbdist.cluster.server import HEARD, NodeServer, Refusals, addresses, listened_at
from nbdist.cluster.ticket import KeyPair, Ticket, come_with, endpoint, listen_with
from nbdist.wire.messages import Leave, Spare, Starting, down_from
from nbdist.wire.node_messages import NodeHello, NodeUp, node_bytes
from nbdist.wire.transfer import Kind, Numbered
from tests.waiting import SOON

PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def connect(ticket: Ticket, identity: bytes = b"") -> zmq.Socket[bytes]:
    """A socket of an agent that has this ticket."""
    link: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    link.linger = 0
    if identity:
        link.routing_id = identity
    come_with(link, ticket)
    link.connect(endpoint("127.0.0.1", ticket.port))
    return link


async def next_message(link: zmq.Socket[bytes]) -> bytes:
    """What comes next, but for signs of life."""
    while True:
        assert await asyncio.to_thread(link.poll, SOON * 1000)
        if message := link.recv_multipart()[1:]:
            return message[0]


async def until(is_so: Callable[[], object]) -> None:
    """Wait for something that the server notices."""
    async with asyncio.timeout(SOON):
        while not is_so():  # noqa: ASYNC110 (there is no event where a thread of libzmq acts)
            await asyncio.sleep(0.01)


def test_nobody_comes_but_where_it_listens() -> None:
    """At one address, or two, on the same port."""

    async def open_one() -> list[bool]:
        server = NodeServer(lambda _, __: None, lambda _: None, print)
        server.open("127.0.0.1", "127.0.0.3")
        try:
            return [reaches(f"127.0.0.{number}", server.port) for number in (1, 2, 3)]
        finally:
            await server.close()

    assert asyncio.run(open_one()) == [True, False, True]


def reaches(address: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((address, port), SOON).close()
    except ConnectionRefusedError:
        return False
    return True


def test_the_kernel_chooses_the_port() -> None:
    """Among those that every user can have."""

    async def open_one() -> int:
        server = NodeServer(lambda _, __: None, lambda _: None, print)
        server.open()
        try:
            return server.port
        finally:
            await server.close()

    first, last = map(int, PORTS.read_text().split())
    assert first <= asyncio.run(open_one()) <= last


def test_one_gate_after_another() -> None:
    """Agents come in at each: nothing that is left of one before stands in the way."""

    async def come_once() -> None:
        said: list[NodeUp] = []
        server = NodeServer(lambda _, message: said.append(message), lambda _: None, print)
        server.open()
        with connect(server.ticket(("127.0.0.1",), fork=True)) as link:
            try:
                link.send_multipart(Numbered().message([node_bytes(Starting(3))]))
                await until(lambda: said)
            finally:
                await server.close()

    async def come_and_come() -> None:
        for _ in range(4):
            await come_once()

    asyncio.run(come_and_come())


def test_agents_come_and_go() -> None:
    """What one sends arrives, it gets what is sent to it, and its end is noticed."""

    async def come_and_go() -> None:
        said: list[tuple[bytes, NodeUp]] = []
        lost: list[bytes] = []
        server = NodeServer(
            lambda identity, message: said.append((identity, message)), lost.append, print
        )
        server.open()
        link = connect(server.ticket(("127.0.0.1",), fork=True))
        try:
            link.send_multipart(Numbered().message([node_bytes(Starting(3))]))
            await until(lambda: said)
            identity, message = said[0]
            assert message == Starting(3)
            server.send(identity, Leave())
            assert down_from(await next_message(link)) == Leave()
            assert (lost, server.refused) == ([], 0)
            link.send_multipart([Numbered().sign(Kind.ENDED), identity])
            await until(lambda: lost)
            assert lost == [identity]
        finally:
            link.close()
            await server.close()

    asyncio.run(come_and_go())


def test_an_agent_that_connects_again() -> None:
    """Each gets once what the other has said meanwhile; one that was given up is told so."""

    async def come_again() -> None:
        said: list[NodeUp] = []
        lost: list[bytes] = []
        server = NodeServer(lambda _, message: said.append(message), lost.append, print)
        server.open()
        ticket, talk = server.ticket(("127.0.0.1",), fork=True), Numbered()
        with connect(ticket, b"agent") as first:
            first.send_multipart(talk.message([node_bytes(Starting(0))]))
            await until(lambda: said)
        try:
            for rank in (1, 2):
                server.send(b"agent", Spare((rank,)))
            talk.message([node_bytes(Starting(1))])  # of which nothing arrives
            with connect(ticket, b"agent") as link:
                link.send_multipart([talk.sign(Kind.AGAIN)])
                for frames in [*talk.again()] * 2:
                    link.send_multipart(frames)
                assert [await next_message(link) for _ in range(2)] == [
                    node_bytes(Spare((rank,))) for rank in (1, 2)
                ]
                await until(lambda: len(said) > 1)
                assert (said, lost) == ([Starting(0), Starting(1)], [])
            talk.take(bytes(Numbered().message([])[0]))
            with connect(ticket, b"another") as link:
                link.send_multipart([talk.sign(Kind.AGAIN)])
                assert await asyncio.to_thread(link.poll, SOON * 1000)
                assert link.recv().startswith(Kind.ENDED.value)
        finally:
            await server.close()

    asyncio.run(come_again())


def test_strangers_are_refused_and_counted() -> None:
    """One without the world's keys, and one that speaks no ZeroMQ: nothing of theirs arrives."""

    async def come() -> None:
        said: list[NodeUp] = []
        server = NodeServer(lambda _, message: said.append(message), lambda _: None, print)
        server.open()
        ticket = server.ticket(("127.0.0.1",), fork=True)
        links = [
            connect(replace(ticket, keys=KeyPair.new())),
            connect(replace(ticket, server_key=KeyPair.new().public)),
        ]
        try:
            for link in links:
                link.send_multipart(Numbered().message([node_bytes(Starting(1))]))
            await until(lambda: server.refused >= len(links))
            assert said == []
            assert "2 refused" in repr(server) or server.refused > 2
        finally:
            for link in links:
                link.close()
            await server.close()

    asyncio.run(come())


AGENT = """
import sys, zmq
from nbdist.wire.node_messages import node_bytes
from nbdist.wire.messages import Starting
from nbdist.wire.transfer import Numbered
from nbdist.cluster.ticket import come_with, endpoint, ticket_from
ticket = ticket_from(sys.stdin.buffer.readline())
link = zmq.Context.instance().socket(zmq.DEALER)
come_with(link, ticket)
link.connect(endpoint("127.0.0.1", ticket.port))
link.send_multipart(Numbered().message([node_bytes(Starting(1))]))
while True: link.recv()
"""


@pytest.mark.world
def test_an_agent_that_falls_silent() -> None:
    """It is missed until it is there again, and lost where that takes too long."""

    async def fall_silent() -> None:
        said: list[bytes] = []
        missed: list[set[bytes]] = []
        lost: list[bytes] = []
        server = NodeServer(lambda identity, _: said.append(identity), lost.append, missed.append)
        server.open(link_timeout=2.0)
        assert agent.stdin is not None
        try:
            agent.stdin.write(server.ticket(("127.0.0.1",), fork=True).to_line())
            agent.stdin.flush()
            await until(lambda: said)
            agent.send_signal(signal.SIGSTOP)
            await until(lambda: missed)
            agent.send_signal(signal.SIGCONT)
            await until(lambda: not missed[-1])
            assert (missed[0], lost) == ({*said}, [])
            agent.send_signal(signal.SIGSTOP)
            await until(lambda: lost)
            assert lost == said
        finally:
            await server.close()

    with subprocess.Popen([sys.executable, "-c", AGENT], stdin=subprocess.PIPE) as agent:
        try:
            asyncio.run(fall_silent())
        finally:
            agent.kill()


@pytest.mark.world
def test_an_agent_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its guard says so: a connection that is lost may come back."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def be_killed() -> None:
        said: list[NodeUp] = []
        lost: list[bytes] = []
        server = NodeServer(lambda _, message: said.append(message), lost.append, print)
        server.open(link_timeout=3600)
        assert guard.stdin is not None
        try:
            guard.stdin.write(server.ticket(("127.0.0.1",), fork=False).to_line())
            guard.stdin.flush()
            await until(lambda: said)
            assert isinstance(said[0], NodeHello)
            os.kill(said[0].pid, signal.SIGKILL)
            await until(lambda: lost)
        finally:
            await server.close()

    command = [sys.executable, "-P", "-m", "nbdist.agent", "--ticket"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as guard:
        asyncio.run(be_killed())


class Door:
    """A socket that lets in whoever has its key, and what is counted at it."""

    def __init__(self) -> None:
        self.keys = KeyPair.new()
        self.refusals = Refusals()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        listen_with(self._socket, self.keys)
        self._monitor: Any = self._socket.get_monitor_socket(HEARD)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1", min_port=0)

    def hear(self, last: int) -> int:
        """Take in all events up to this one; how many were refused by then."""
        deadline = time.monotonic() + SOON
        while time.monotonic() < deadline:
            if self._monitor.poll(100):
                event = parse_monitor_message(self._monitor.recv_multipart())
                self.refusals.take(event["event"], event["value"])
                if event["event"] == last:
                    return self.refusals.count
        raise AssertionError("it did not happen")

    def comer(self, server: str = "") -> zmq.Socket[bytes]:
        """Somebody who connects, with a key of the server's, or none."""
        comer = self._context.socket(zmq.DEALER)
        comer.linger, comer.reconnect_ivl = 0, -1
        if server:
            own = KeyPair.new()
            comer.curve_serverkey = server.encode()
            comer.curve_publickey = own.public.encode()
            comer.curve_secretkey = own.secret.encode()
        comer.connect(f"tcp://127.0.0.1:{self.port}")
        return comer

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._context.destroy(0)


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.close()


def test_one_with_the_key(door: Door) -> None:
    """It is not counted, neither when it comes nor when it goes."""
    comer = door.comer(door.keys.public)
    assert door.hear(zmq.EVENT_HANDSHAKE_SUCCEEDED) == 0
    comer.close()
    assert door.hear(zmq.EVENT_DISCONNECTED) == 0


@pytest.mark.parametrize("key", ["", KeyPair.new().public], ids=["none", "another"])
def test_one_without_it(door: Door, key: str) -> None:
    """It is counted once."""
    with door.comer(key):
        assert door.hear(zmq.EVENT_DISCONNECTED) == 1
    assert repr(door.refusals) == "<Refusals 1>"


def test_one_that_says_something_else(door: Door) -> None:
    """It is counted; one that says nothing is not, though both just end."""
    with socket.create_connection(("127.0.0.1", door.port)) as other:
        other.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        assert door.hear(zmq.EVENT_DISCONNECTED) == 1
    with socket.create_connection(("127.0.0.1", door.port)):
        pass
    assert door.hear(zmq.EVENT_DISCONNECTED) == 1


def test_the_log_cannot_be_filled() -> None:
    """Of very many, few have a line."""
    refusals, said = Refusals(), 0
    for _ in range(10_000):
        assert refusals.take(zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)
        said += refusals.is_worth_a_line
    assert said == 20 + 9


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


def test_by_what_this_machine_can_be_reached() -> None:
    """Not by what means another machine to each; an interface or an address can be chosen."""
    own = {each.address for found in psutil.net_if_addrs().values() for each in found}
    found = addresses(None)
    assert found
    assert {*found} <= own
    assert not [each for each in found if each.startswith("fe80")]
    assert addresses("10.9.8.7") == ("10.9.8.7",)
    assert addresses("lo") == ("127.0.0.1",)


def test_where_to_listen() -> None:
    """Nowhere else than at what was chosen, where that is this machine's."""
    assert listened_at(None) == ()
    assert listened_at("127.0.0.1") == ("127.0.0.1",)
    assert listened_at("lo") == ("127.0.0.1",)
    assert listened_at("203.0.113.7") == ()
    assert listened_at("gateway.example.org") == ()


@pytest.mark.world
def test_the_one_by_which_packets_leave_is_first() -> None:
    """A bridge of containers on the same machine is not."""
    machine = ["unshare", "--net", "sh", "-c", f"{MACHINE} exec {sys.executable} -c '{LOOK}'"]
    if os.geteuid():
        pytest.skip("network namespaces need root")
    shown = subprocess.run(machine, capture_output=True, text=True, timeout=SOON)
    if "Operation not permitted" in shown.stderr:
        pytest.skip("no network namespaces here")
    assert shown.stdout.split()[:2] == ["10.1.2.3", "172.17.0.1"], shown.stderr
