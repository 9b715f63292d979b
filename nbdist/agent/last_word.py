"""What the guard of an agent that was killed tells its head, in the agent's place.

The head would find out by itself, but only when the agent has not come back for the link timeout:
a connection that is lost says nothing of who was at its other end.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import zmq

from nbdist.wire.numbered import Kind, Numbered
from nbdist.wire.ticket import Ticket, come_with, endpoint, ticket_from

LONGEST_SAYING = 1000
"""Milliseconds."""


def what_to_say(identity: bytes, ticket: Ticket, address: str) -> bytes:
    """Write down for the guard who the agent is, and where the head listens."""
    return identity.hex().encode() + b" " + replace(ticket, addresses=(address,)).to_line()


def say_ended(line: bytes) -> None:
    """Tell the head that this agent has ended; nothing where that cannot be reached."""
    identity, _, written = line.partition(b" ")
    ticket = ticket_from(written)
    ended = bytes.fromhex(identity.decode())
    with suppress(zmq.ZMQError), zmq.Context() as context, context.socket(zmq.DEALER) as link:
        link.linger = LONGEST_SAYING
        come_with(link, ticket)
        link.connect(endpoint(ticket.addresses[0], ticket.port))
        link.send_multipart([Numbered().sign(Kind.ENDED), ended])
