"""Tests of `nbdist.cluster.client`: the ticket on stdin, and routes to the head and to machines."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from nbdist.cluster.client import NoWay, find_route, first_unreached, read_ticket
from nbdist.cluster.ticket import BadTicket, KeyPair, Ticket
from nbdist.wire.node_messages import ProbeTarget


def ticket(*addresses: str, port: int = 1) -> Ticket:
    """Return a ticket of a head that has these addresses."""
    return Ticket(addresses, port, KeyPair.new().public, KeyPair.new())


def test_the_ticket_is_the_first_line_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later data stays in stdin, whose end ends the agent; an end within the line is an error."""
    mine = ticket("a")
    for data in (mine.to_line() + b"rest", b"", b"half a tick"):
        read, write = os.pipe()
        os.write(write, data)
        os.close(write)
        with open(read) as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            if data.endswith(b"rest"):
                assert read_ticket() == mine
                assert os.read(read, 9) == b"rest"
            else:
                with pytest.raises(BadTicket, match="stdin has ended"):
                    read_ticket()


def test_the_first_address_that_answers_is_chosen() -> None:
    """An address that refuses is skipped; if no address answers, the error names each, and why."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        way = find_route(ticket("127.0.0.99", "127.0.0.1", port=server.getsockname()[1]))
    assert (way.address, way.local_address) == ("127.0.0.1", "127.0.0.1")
    with socket.create_server(("", 0)) as server:
        way = find_route(ticket("127.0.0.2", "127.0.0.1", port=server.getsockname()[1]))
    assert way.address == "127.0.0.2"
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # no process listens at that port
        port = bound.getsockname()[1]
        with pytest.raises(NoWay) as caught:
            find_route(ticket("127.0.0.1", "::1", port=port))
    assert f"127.0.0.1:{port}: Connection refused" in str(caught.value)
    assert f"::1:{port}: " in str(caught.value)


@contextmanager
def full_port() -> Iterator[int]:
    """A port of this machine that does not answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as waiting:
        for each in [waiting.enter_context(socket.socket()) for _ in range(4)]:
            each.settimeout(0)
            each.connect_ex(full.getsockname())
        yield full.getsockname()[1]


def test_a_machine_out_of_reach_is_named() -> None:
    """A machine that accepts or refuses is in reach; another one is named, with the reason."""
    with socket.socket() as silent, socket.create_server(("127.0.0.1", 0)) as heard:
        silent.bind(("127.0.0.1", 0))
        here = [ProbeTarget("a", *each.getsockname()) for each in (silent, heard)]
        assert asyncio.run(first_unreached(here)) == ""
        assert asyncio.run(first_unreached([])) == ""
        said = asyncio.run(first_unreached([*here, ProbeTarget("b", "255.255.255.255", 9)]))
        assert said.startswith("b at 255.255.255.255:9: ")
    with full_port() as port:
        said = asyncio.run(first_unreached([ProbeTarget("b", "127.0.0.1", port)], 0.2))
    assert said == f"b at 127.0.0.1:{port}: no answer within 0 s"
