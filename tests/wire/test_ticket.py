"""Tests of `nbdist.wire.ticket`: what an agent needs to find its world, and who is let in."""

from __future__ import annotations

import pytest

from nbdist.wire.ticket import BadTicket, KeyPair, Ticket, endpoint, ticket_from


def test_a_ticket_crosses_as_a_line() -> None:
    """It comes back as it was; its secret is in no text that people or logs see."""
    keys = KeyPair.new()
    ticket = Ticket(("10.0.0.1", "fd00::1"), 4711, keys.public, keys, link_timeout=30.0)
    line = ticket.to_line()
    assert line.count(b"\n") == 1
    assert ticket_from(line) == ticket
    assert ticket.keys.secret not in repr(ticket)
    assert KeyPair.new() != KeyPair.new()


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[1]", b"\xff", b'{"addresses": [], "port": 1}', b"hello"],
)
def test_what_is_no_ticket(line: bytes) -> None:
    """It is refused in a sentence."""
    with pytest.raises(BadTicket, match="no ticket of a world"):
        ticket_from(line)


@pytest.mark.parametrize(
    "change", [{"port": 0}, {"port": 70000}, {"addresses": ()}, {"link_timeout": 0}]
)
def test_tickets_that_lead_nowhere(change: dict[str, object]) -> None:
    """So is one that cannot lead anywhere."""
    fields = {"addresses": ("a",), "port": 1, "server_key": "x" * 40, "keys": KeyPair.new()}
    with pytest.raises(BadTicket):
        ticket_from(Ticket(**{**fields, **change}).to_line())


def test_endpoints() -> None:
    """IPv6 addresses stand in brackets."""
    assert endpoint("10.0.0.1", 7) == "tcp://10.0.0.1:7"
    assert endpoint("fd00::1", 7) == "tcp://[fd00::1]:7"
