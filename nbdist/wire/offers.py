"""Tickets of worlds that wait for nodes, where the user's other processes find them.

One file for each world in the user's state folder, which only the user can read: on machines
that share the home folder nobody has to carry a key.  The head writes it, `nbdist join` looks
for the one of an address.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbdist import folders
from nbdist.wire.ticket import LONGEST_TICKET, BadTicket, Ticket, ticket_from

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


def offers_folder() -> Path:
    """Return the folder of the offers."""
    return Path(folders.state_folder(), "joins")


def offer_file(place: Place) -> Path:
    """Return the file of the world at this place."""
    return offers_folder() / f"{place.host.replace(':', '_')}-{place.port}{SUFFIX}"


def write_offer(ticket: Ticket) -> Path:
    """Write the ticket where `nbdist join` finds it, in place of an old one; raises OSError."""
    path = offer_file(place_of(ticket))
    folders.make_private(path.parent)
    unfinished = path.with_suffix(f".{os.getpid()}")
    fd = folders.open_private(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
    with os.fdopen(fd, "wb") as file:
        file.write(ticket.to_line())
    unfinished.replace(path)
    return path


def find_offer(place: Place) -> Ticket | None:
    """Find the ticket of the world at this place: by the address, or else by the port alone.

    Another name or address than the one shown may lead there.
    """
    by_port = [ticket for _, ticket in _offers() if ticket.port == place.port]
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


def drop_dead_offers() -> None:
    """Remove the keys of worlds of this machine whose head was killed before it could."""
    own = {each.address for on in psutil.net_if_addrs().values() for each in on}
    for path, ticket in _offers():
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


def _offers() -> Iterator[tuple[Path, Ticket]]:
    with suppress(OSError):
        for path in sorted(offers_folder().glob(f"*{SUFFIX}")):
            with suppress(OSError, BadTicket):
                yield path, read_key_file(path)
