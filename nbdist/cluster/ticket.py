"""What an agent on another machine needs to find its world: addresses and keys, on its stdin.

One line, and never in an argument or a variable, which other users can read.  The keys are
CurveZMQ's (RFC 26), made anew for each world: with them both sides know one another, and what
goes between them is encrypted.

For `nbdist join` the head writes a ticket into a file of the user's state folder, which only the
user can read: on machines that share the home folder nobody has to carry a key.  And the guard of
an agent that was killed says so to the head with it, which would find out only when the agent has
not come back for the link timeout.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import zmq

from nbdist.system import folders
from nbdist.wire.spec import LINK_TIMEOUT
from nbdist.wire.transfer import Kind, Numbered

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
    # So this is how agents miss a head; the head looks at its connections (`NodeServer`), earlier.
    socket.heartbeat_timeout = round(AGENTS_WAIT * link_timeout * 1000)
    # No beat is sent, and none missed, while a message stands half in the kernel's buffer: a big
    # value is on its way when the cable is pulled.  TCP_USER_TIMEOUT is for that.
    socket.setsockopt(zmq.TCP_MAXRT, round(AGENTS_WAIT * link_timeout * 1000))
    socket.sndhwm = socket.rcvhwm = 0


SUFFIX = ".key"

LOOK_TIMEOUT = 1.0
"""Seconds for an address of this machine to answer."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a head listens, as it is typed: `10.0.0.1:4321`, `[fe80::1]:4321`."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def place_of(ticket: Ticket) -> Place:
    """Return the place that is typed for a ticket: the first of its addresses."""
    return Place(ticket.addresses[0], ticket.port)


def place_from(text: str) -> Place:
    """Read a place; raises ValueError."""
    host, sign, port = text.strip().rpartition(":")
    if host[:1] + host[-1:] == "[]":
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("write an IPv6 address in brackets, [fe80::1]:4321")
    if not sign or not host or not port.isascii() or not port.isdigit() or len(port) > 5:
        raise ValueError("it is HOST:PORT, as shown by the notebook")
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"there is no port {port}")
    return Place(host, int(port))


def join_keys_folder() -> Path:
    """Return the folder of the keys."""
    return Path(folders.state_folder(), "joins")


def join_key_file(place: Place) -> Path:
    """Return the file of the world at this place."""
    return join_keys_folder() / f"{place.host.replace(':', '_')}-{place.port}{SUFFIX}"


def write_join_key(ticket: Ticket) -> Path:
    """Write the ticket where `nbdist join` finds it, in place of an old one; raises OSError."""
    path = join_key_file(place_of(ticket))
    folders.make_private(path.parent)
    unfinished = path.with_suffix(f".{os.getpid()}")
    fd = folders.open_private(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
    with os.fdopen(fd, "wb") as file:
        file.write(ticket.to_line())
    unfinished.replace(path)
    return path


def find_join_key(place: Place) -> Ticket | None:
    """Find the ticket of the world at this place: by the address, or else by the port alone.

    Another name or address than the one shown may lead there.
    """
    by_port = [ticket for _, ticket in _join_keys() if ticket.port == place.port]
    by_address = [ticket for ticket in by_port if place.host in ticket.addresses]
    found = by_address or by_port
    return found[0] if len(found) == 1 else None


def read_key_file(path: Path) -> Ticket:
    """Read a ticket from a file that others cannot read.

    Raises OSError, PermissionError for one that others can read, and BadTicket.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_mode & 0o007:
            raise PermissionError(f"others can read {path}, which has a key: `chmod 600 {path}`")
        return ticket_from(file.read(LONGEST_TICKET))


def drop_dead_join_keys() -> None:
    """Remove the keys of worlds of this machine whose head was killed before it could."""
    own = {each.address for on in psutil.net_if_addrs().values() for each in on}
    for path, ticket in _join_keys():
        if own.issuperset(ticket.addresses) and not any(
            _is_heard_at(address, ticket.port) for address in ticket.addresses
        ):
            path.unlink(missing_ok=True)


def _is_heard_at(address: str, port: int) -> bool:
    """Say whether somebody listens at this address of this machine."""
    try:
        socket.create_connection((address, port), LOOK_TIMEOUT).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True  # nobody knows
    return True


def _join_keys() -> Iterator[tuple[Path, Ticket]]:
    with suppress(OSError):
        for path in sorted(join_keys_folder().glob(f"*{SUFFIX}")):
            with suppress(OSError, BadTicket):
                yield path, read_key_file(path)


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
