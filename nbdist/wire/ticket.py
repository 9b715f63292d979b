"""What an agent on another machine needs to find its world: addresses and keys, on its stdin.

One line, and never in an argument or a variable, which other users can read.  The keys are
CurveZMQ's (RFC 26), made anew for each world: with them both sides know one another, and what
goes between them is encrypted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import zmq

from nbdist.wire.wanted import LINK_TIMEOUT

LONGEST_TICKET = 1 << 16

BEAT_INTERVAL = 0.5
"""Seconds between two signs of life that libzmq sends, from a thread of its own."""

RECONNECT_INTERVAL = 0.2
"""Seconds between two tries of an agent to connect again."""

AGENTS_WAIT = 4
"""Times the link timeout that an agent waits for a silent head: that may be paused and go on, and
with it all machines."""


class BadTicket(ValueError):
    """Text that is no ticket; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret one, in Z85."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"<KeyPair {self.public[:8]}...>"

    @classmethod
    def new(cls) -> KeyPair:
        """Make one that nobody else has."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a world's head listens, its public key, and the keys that it lets in.

    `addresses` are tried in this order; `fork` says whether workers are to be forked;
    `link_timeout` is how many seconds the head waits for a silent agent.
    """

    addresses: tuple[str, ...]
    port: int
    server_key: str
    keys: KeyPair
    fork: bool = True
    link_timeout: float = LINK_TIMEOUT

    def to_line(self) -> bytes:
        """Write it as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"


def ticket_from(line: bytes) -> Ticket:
    """Read the line; raises BadTicket."""
    try:
        return _ticket(json.loads(line))
    except (ValueError, TypeError, KeyError) as error:
        raise BadTicket(f"that is no ticket of a world: {type(error).__name__}") from None


def _ticket(found: Mapping[str, Any]) -> Ticket:
    keys = KeyPair(str(found["keys"]["public"]), str(found["keys"]["secret"]))
    for key in (found["server_key"], keys.public, keys.secret):
        if len(key) != 40:
            raise ValueError(key)
    addresses = tuple(map(str, found["addresses"]))
    port, link_timeout = int(found["port"]), float(found["link_timeout"])
    if not addresses or not 0 < port < 1 << 16 or not 0 < link_timeout < 1 << 16:
        raise ValueError(port)
    fork = bool(found["fork"])
    return Ticket(addresses, port, str(found["server_key"]), keys, fork, link_timeout)


def endpoint(address: str, port: int) -> str:
    """Write a TCP endpoint as ZeroMQ does; IPv6 addresses in brackets."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def listen_with(socket: zmq.Socket[Any], keys: KeyPair, link_timeout: float = LINK_TIMEOUT) -> None:
    """Have a socket take connections of those alone who have the keys."""
    _beat(socket, link_timeout)
    socket.curve_server = True
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()


def come_with(socket: zmq.Socket[Any], ticket: Ticket) -> None:
    """Have a socket connect with the keys of a ticket, and again where the connection is lost."""
    _beat(socket, ticket.link_timeout)
    socket.reconnect_ivl = round(RECONNECT_INTERVAL * 1000)
    socket.curve_serverkey = ticket.server_key.encode()
    socket.curve_publickey = ticket.keys.public.encode()
    socket.curve_secretkey = ticket.keys.secret.encode()


def _beat(socket: zmq.Socket[Any], link_timeout: float) -> None:
    socket.ipv6 = True
    socket.heartbeat_ivl = round(BEAT_INTERVAL * 1000)
    # After a pause of its own libzmq looks at the clock before it reads what has come meanwhile.
    # So this is how agents miss a head; the head looks at its connections (`Gate`), and earlier.
    socket.heartbeat_timeout = round(AGENTS_WAIT * link_timeout * 1000)
    # No beat is sent, and none missed, while a message stands half in the kernel's buffer: a big
    # value is on its way when the cable is pulled.  TCP_USER_TIMEOUT is for that.
    socket.setsockopt(zmq.TCP_MAXRT, round(AGENTS_WAIT * link_timeout * 1000))
    socket.sndhwm = socket.rcvhwm = 0
