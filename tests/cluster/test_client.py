"""Tests of `nbdist.cluster.client`: the way to the head, and a link that is lost."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil
import pytest
import zmq.asyncio

from nbdist.cluster.client import (
    HeadEnd,
    NoWay,
    Way,
    find_way,
    first_unreached,
    read_ticket,
)
from nbdist.cluster.ticket import BadTicket, KeyPair, Ticket, listen_with
from nbdist.wire.frames import pack
from nbdist.wire.messages import Spare, Starting
from nbdist.wire.node_messages import NodeDown, Target
from nbdist.wire.transfer import Kind, Numbered
from tests.waiting import SOON, until


@contextmanager
def stdin_with(data: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A pipe as stdin that has ended after this."""
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    with open(read) as file, monkeypatch.context() as patch:
        patch.setattr("sys.stdin", file)
        yield read


def ticket(*addresses: str, port: int = 1) -> Ticket:
    """One that leads there."""
    return Ticket(addresses, port, KeyPair.new().public, KeyPair.new())


def test_the_ticket_is_the_first_line_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows stays, since the end of stdin is what ends the agent; one too early is told."""
    mine = ticket("a")
    with stdin_with(mine.to_line() + b"rest", monkeypatch) as read:
        assert read_ticket() == mine
        assert os.read(read, 9) == b"rest"
    for data in (b"", b"half a tick"):
        with stdin_with(data, monkeypatch), pytest.raises(BadTicket, match="stdin has ended"):
            read_ticket()


def test_the_first_address_that_answers() -> None:
    """Others do no harm, however quick; the own address is the one by which it was reached."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        way = find_way(ticket("127.0.0.99", "127.0.0.1", port=server.getsockname()[1]))
    assert (way.address, way.own) == ("127.0.0.1", "127.0.0.1")
    with socket.create_server(("", 0)) as server:
        way = find_way(ticket("127.0.0.2", "127.0.0.1", port=server.getsockname()[1]))
    assert way.address == "127.0.0.2"


def test_no_address_answers() -> None:
    """Each is named with its port, and why."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens there
        port = bound.getsockname()[1]
        with pytest.raises(NoWay) as caught:
            find_way(ticket("127.0.0.1", "::1", port=port))
    assert f"127.0.0.1:{port}: Connection refused" in str(caught.value)
    assert f"::1:{port}: " in str(caught.value)


def test_what_was_not_read_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the next connection; what was acknowledged is not."""
    keys, got = KeyPair.new(), list[NodeDown]()
    with open(os.devnull) as nothing, zmq.asyncio.Context() as context:
        monkeypatch.setattr("sys.stdin", nothing)
        head = context.socket(zmq.ROUTER)
        head.linger, head.router_handover = 0, True
        listen_with(head, keys)
        port = head.bind_to_random_port("tcp://127.0.0.1")
        place = Ticket(("127.0.0.1",), port, keys.public, KeyPair.new())

        async def connect_twice() -> list[bytes]:
            way = Way(place, "127.0.0.1", "127.0.0.1", 0)
            end, talk = HeadEnd(way, 1, got.append, list), Numbered()
            await end.open()
            end.send(Starting(1))
            try:
                identity, hello, _ = await head.recv_multipart()
                await head.recv_multipart()
                talk.take(hello)
                await head.send_multipart([identity, *talk.message([pack(Spare((0,)))])])
                await until(lambda: got, "the agent has read it")
                cut(port)
                _, again = await head.recv_multipart()
                assert again.startswith(Kind.AGAIN.value)
                return (await head.recv_multipart())[1:]
            finally:
                await end.close()

        with head:
            second = asyncio.run(asyncio.wait_for(connect_twice(), SOON))
    assert second[1] == pack(Starting(1))


def cut(port: int) -> None:
    """Have this process's connection to that port be lost."""
    mine = psutil.Process().net_connections("tcp")
    (fd,) = (each.fd for each in mine if each.raddr and each.raddr.port == port)
    with socket.socket(fileno=os.dup(fd)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def test_the_way_to_others() -> None:
    """A port on which nothing listens is reached; else which machine is told, where, and why."""
    with (
        socket.socket() as silent,
        socket.create_server(("127.0.0.1", 0)) as heard,
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        ExitStack() as waiting,
    ):
        silent.bind(("127.0.0.1", 0))
        here = [Target("a", *each.getsockname()) for each in (silent, heard)]
        assert asyncio.run(first_unreached(here)) == ""
        assert asyncio.run(first_unreached([])) == ""
        said = asyncio.run(first_unreached([*here, Target("b", "255.255.255.255", 9)]))
        assert said.startswith("b at 255.255.255.255:9: ")
        for each in [waiting.enter_context(socket.socket()) for _ in range(4)]:
            each.settimeout(0)
            each.connect_ex(full.getsockname())
        port = full.getsockname()[1]
        said = asyncio.run(first_unreached([Target("b", "127.0.0.1", port)], 0.2))
    assert said == f"b at 127.0.0.1:{port}: no answer within 0 s"
