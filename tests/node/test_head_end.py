"""Tests of `nbdist.node.head_end`: the ticket, and the way to the head."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nbdist.node.head_end import interface_of, read_ticket
from nbdist.node.reaching import NoWay, find_way
from nbdist.wire.ticket import BadTicket, KeyPair, Ticket


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
    """What follows stays, since the end of stdin is what ends the agent."""
    mine = ticket("a")
    with stdin_with(mine.to_line() + b"rest", monkeypatch) as read:
        assert read_ticket() == mine
        assert os.read(read, 9) == b"rest"


@pytest.mark.parametrize("data", [b"", b"half a tick"])
def test_no_ticket(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is said, where it ends before there is one."""
    with stdin_with(data, monkeypatch), pytest.raises(BadTicket, match="stdin has ended"):
        read_ticket()


def test_the_first_address_that_answers() -> None:
    """Others do no harm; the own address is the one by which it was reached."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        way = find_way(ticket("127.0.0.99", "127.0.0.1", port=server.getsockname()[1]))
    assert (way.address, way.own) == ("127.0.0.1", "127.0.0.1")


def test_an_earlier_address_is_taken_where_several_answer() -> None:
    """However quick the others are."""
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


def test_the_interface_of_an_address() -> None:
    """Gloo wants its name."""
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") == ""
