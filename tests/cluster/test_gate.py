"""Tests of `nbdist.cluster.gate`: who is let in, who is refused, and who has gone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from nbdist.cluster.gate import Gate
from nbdist.wire.many import NodeHello, NodeUp, node_bytes
from nbdist.wire.messages import Leave, Spare, Starting, down_from
from nbdist.wire.numbered import Kind, Numbered
from nbdist.wire.ticket import KeyPair, Ticket, come_with, endpoint
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
    """Wait for something that the gate notices."""
    async with asyncio.timeout(SOON):
        while not is_so():  # noqa: ASYNC110 (there is no event where a thread of libzmq acts)
            await asyncio.sleep(0.01)


def test_nobody_comes_but_where_it_listens() -> None:
    """At one address, or two, on the same port."""

    async def open_one() -> list[bool]:
        gate = Gate(lambda _, __: None, lambda _: None, print)
        gate.open("127.0.0.1", "127.0.0.3")
        try:
            return [reaches(f"127.0.0.{number}", gate.port) for number in (1, 2, 3)]
        finally:
            await gate.close()

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
        gate = Gate(lambda _, __: None, lambda _: None, print)
        gate.open()
        try:
            return gate.port
        finally:
            await gate.close()

    first, last = map(int, PORTS.read_text().split())
    assert first <= asyncio.run(open_one()) <= last


def test_one_gate_after_another() -> None:
    """Agents come in at each: nothing that is left of one before stands in the way."""

    async def come_once() -> None:
        said: list[NodeUp] = []
        gate = Gate(lambda _, message: said.append(message), lambda _: None, print)
        gate.open()
        with connect(gate.ticket(("127.0.0.1",), fork=True)) as link:
            try:
                link.send_multipart(Numbered().message([node_bytes(Starting(3))]))
                await until(lambda: said)
            finally:
                await gate.close()

    async def come_and_come() -> None:
        for _ in range(4):
            await come_once()

    asyncio.run(come_and_come())


def test_agents_come_and_go() -> None:
    """What one sends arrives, it gets what is sent to it, and its end is noticed."""

    async def come_and_go() -> None:
        said: list[tuple[bytes, NodeUp]] = []
        lost: list[bytes] = []
        gate = Gate(lambda identity, message: said.append((identity, message)), lost.append, print)
        gate.open()
        link = connect(gate.ticket(("127.0.0.1",), fork=True))
        try:
            link.send_multipart(Numbered().message([node_bytes(Starting(3))]))
            await until(lambda: said)
            identity, message = said[0]
            assert message == Starting(3)
            gate.send(identity, Leave())
            assert down_from(await next_message(link)) == Leave()
            assert (lost, gate.refused) == ([], 0)
            link.send_multipart([Numbered().sign(Kind.ENDED), identity])
            await until(lambda: lost)
            assert lost == [identity]
        finally:
            link.close()
            await gate.close()

    asyncio.run(come_and_go())


def test_an_agent_that_connects_again() -> None:
    """Each gets once what the other has said meanwhile; one that was given up is told so."""

    async def come_again() -> None:
        said: list[NodeUp] = []
        lost: list[bytes] = []
        gate = Gate(lambda _, message: said.append(message), lost.append, print)
        gate.open()
        ticket, talk = gate.ticket(("127.0.0.1",), fork=True), Numbered()
        with connect(ticket, b"agent") as first:
            first.send_multipart(talk.message([node_bytes(Starting(0))]))
            await until(lambda: said)
        try:
            for rank in (1, 2):
                gate.send(b"agent", Spare((rank,)))
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
            await gate.close()

    asyncio.run(come_again())


def test_strangers_are_refused_and_counted() -> None:
    """One without the world's keys, and one that speaks no ZeroMQ: nothing of theirs arrives."""

    async def come() -> None:
        said: list[NodeUp] = []
        gate = Gate(lambda _, message: said.append(message), lambda _: None, print)
        gate.open()
        ticket = gate.ticket(("127.0.0.1",), fork=True)
        links = [
            connect(replace(ticket, keys=KeyPair.new())),
            connect(replace(ticket, server_key=KeyPair.new().public)),
        ]
        try:
            for link in links:
                link.send_multipart(Numbered().message([node_bytes(Starting(1))]))
            await until(lambda: gate.refused >= len(links))
            assert said == []
            assert "2 refused" in repr(gate) or gate.refused > 2
        finally:
            for link in links:
                link.close()
            await gate.close()

    asyncio.run(come())


AGENT = """
import sys, zmq
from nbdist.wire.many import node_bytes
from nbdist.wire.messages import Starting
from nbdist.wire.numbered import Numbered
from nbdist.wire.ticket import come_with, endpoint, ticket_from
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
        gate = Gate(lambda identity, _: said.append(identity), lost.append, missed.append)
        gate.open(link_timeout=2.0)
        assert agent.stdin is not None
        try:
            agent.stdin.write(gate.ticket(("127.0.0.1",), fork=True).to_line())
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
            await gate.close()

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
        gate = Gate(lambda _, message: said.append(message), lost.append, print)
        gate.open(link_timeout=3600)
        assert guard.stdin is not None
        try:
            guard.stdin.write(gate.ticket(("127.0.0.1",), fork=False).to_line())
            guard.stdin.flush()
            await until(lambda: said)
            assert isinstance(said[0], NodeHello)
            os.kill(said[0].pid, signal.SIGKILL)
            await until(lambda: lost)
        finally:
            await gate.close()

    command = [sys.executable, "-P", "-m", "nbdist.agent", "--ticket"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as guard:
        asyncio.run(be_killed())
