"""How a machine joins a world: the ticket by which an agent connects, and `nbdist join`.

A ticket goes to an agent's stdin, since other users of a machine can read commands' arguments.  For
`nbdist join` the head writes the ticket to a private file in the user's state folder.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import zmq

from nbdist.errors import UsageError
from nbdist.system import folders
from nbdist.system.processes import agent_command, safe_environ
from nbdist.wire.frames import fits, from_plain
from nbdist.wire.spec import AGENTS_WAIT, LINK_TIMEOUT, NBDIST_DECIDES
from nbdist.wire.transfer import FrameKind, Numbered

LONGEST_TICKET = 1 << 16
KEY_LENGTH = 40  # characters of a key in Z85
BEAT_INTERVAL = 0.5  # seconds between two heartbeats of libzmq, or of `NodeServer`
RECONNECT_INTERVAL = 0.2  # seconds between an agent's tries to connect again


class BadTicket(ValueError):
    """No ticket was received, or a text is none; the message says why."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret key, in Z85."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        """Make a random pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a world's head listens, its public key, and its agents' keys (RFC 26 of ZeroMQ).

    Each `NodeServer` makes new keys, by which head and agents recognise each other and encrypt all
    messages.  Agents prefer the first of the `addresses`.  `fork` says whether workers are forked;
    `link_timeout` is how many seconds the head waits for a silent agent.
    """

    addresses: tuple[str, ...]
    port: int
    server_key: str
    keys: KeyPair
    fork: bool = True
    link_timeout: float = LINK_TIMEOUT

    def to_line(self) -> bytes:
        """Return the ticket as a line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"


def ticket_from(line: bytes) -> Ticket:
    """Read a ticket from its line; raises BadTicket."""
    try:
        ticket: Ticket = from_plain(json.loads(line), Ticket)
    except (ValueError, TypeError) as error:
        raise BadTicket(f"that is no ticket of a world: {type(error).__name__}") from None
    if fits(ticket, Ticket):
        keys = ticket.server_key, ticket.keys.public, ticket.keys.secret
        is_place = ticket.addresses and 0 < ticket.port < 1 << 16
        has_keys = all(len(key) == KEY_LENGTH for key in keys)
        if is_place and has_keys and 0 < ticket.link_timeout < 1 << 16:
            return ticket
    raise BadTicket("that is no ticket of a world")


def endpoint(address: str, port: int) -> str:
    """Return a TCP endpoint as ZeroMQ writes it, with IPv6 addresses in brackets."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def listen_with(socket: zmq.Socket[Any], keys: KeyPair, link_timeout: float = LINK_TIMEOUT) -> None:
    """Encrypt a listening socket with its own `keys`; `NodeServer` checks the keys of clients."""
    _set_heartbeats(socket, link_timeout)
    socket.curve_server = True
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()


def connect_with(socket: zmq.Socket[Any], ticket: Ticket) -> None:
    """Set a socket's options to connect with a ticket's keys, and to reconnect after a loss."""
    _set_heartbeats(socket, ticket.link_timeout)
    socket.reconnect_ivl = round(RECONNECT_INTERVAL * 1000)
    socket.curve_serverkey = ticket.server_key.encode()
    socket.curve_publickey = ticket.keys.public.encode()
    socket.curve_secretkey = ticket.keys.secret.encode()


def _set_heartbeats(socket: zmq.Socket[Any], link_timeout: float) -> None:
    socket.ipv6 = True
    socket.heartbeat_ivl = round(BEAT_INTERVAL * 1000)
    # After a pause of its process, libzmq looks at the clock before it reads what has arrived, and
    # would take live machines for lost.  So only agents notice a loss by these heartbeats; the head
    # checks its connections itself (`NodeServer`), and earlier.
    socket.heartbeat_timeout = round(AGENTS_WAIT * link_timeout * 1000)
    # While a message is only partly sent, as when the cable is pulled during a big value, libzmq
    # neither sends nor misses heartbeats.  TCP_MAXRT (TCP_USER_TIMEOUT) ends such a connection.
    socket.setsockopt(zmq.TCP_MAXRT, round(AGENTS_WAIT * link_timeout * 1000))
    socket.sndhwm = socket.rcvhwm = 0


SUFFIX = ".key"
ADDRESS_PROBE_TIMEOUT = 1.0  # seconds for an address of this machine to answer


@dataclass(frozen=True, slots=True)
class HeadAddress:
    """Where a head listens, as the user types it: `10.0.0.1:4321`, `[fe80::1]:4321`."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def place_of(ticket: Ticket) -> HeadAddress:
    """Return the address that a user types for a ticket: the ticket's first, with the port."""
    return HeadAddress(ticket.addresses[0], ticket.port)


def place_from(text: str) -> HeadAddress:
    """Read the address that a user has typed for `nbdist join`; raises UsageError."""
    host, colon, port = text.strip().rpartition(":")
    in_brackets = host[:1] + host[-1:] == "[]"
    if ":" in host and not in_brackets:
        why = "write an IPv6 address in brackets, [fe80::1]:4321"
    elif not (colon and host.strip("[]") and re.fullmatch("[0-9]{1,5}", port)):
        why = "it is HOST:PORT, as shown by the notebook"
    elif not 0 < int(port) < 1 << 16:
        why = f"there is no port {port}"
    else:
        return HeadAddress(host[1:-1] if in_brackets else host, int(port))
    raise UsageError(f"`nbdist join {text}`: {why}.")


def join_keys_folder() -> Path:
    """Return the folder of the files that `nbdist join` looks for."""
    return Path(folders.state_folder(), "joins")


def join_key_file(place: HeadAddress) -> Path:
    """Return the path of the file for the ticket of the world at this address."""
    return join_keys_folder() / f"{place.host.replace(':', '_')}-{place.port}{SUFFIX}"


def write_join_key(ticket: Ticket) -> Path:
    """Write a ticket to its file for `nbdist join`, and return the path; raises OSError."""
    path = join_key_file(place_of(ticket))
    folders.make_private(path.parent)
    with folders.whole_file(path, folders.PRIVATE_FILE) as file:
        file.write(ticket.to_line())
    return path


def find_join_key(place: HeadAddress) -> Ticket | None:
    """Return the only ticket for this address and port, else the only one for the port, or None."""
    by_port = [ticket for _, ticket in _join_keys() if ticket.port == place.port]
    by_address = [ticket for ticket in by_port if place.host in ticket.addresses]
    tickets = by_address or by_port
    return tickets[0] if len(tickets) == 1 else None


def read_key_file(path: Path) -> Ticket:
    """Read a ticket from a file.

    Raises OSError, PermissionError if users outside of the file's group have access, and BadTicket.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_mode & 0o007:
            raise PermissionError(f"others can read {path}, which has a key: `chmod 600 {path}`")
        return ticket_from(file.read(LONGEST_TICKET))


def drop_dead_join_keys() -> None:
    """Remove the ticket files of heads that were on this machine and listen no more."""
    local_addresses = own_addresses()
    for path, ticket in _join_keys():
        if local_addresses.issuperset(ticket.addresses) and not any(
            _is_alive(address, ticket.port) for address in ticket.addresses
        ):
            path.unlink(missing_ok=True)


def own_addresses() -> set[str]:
    """Return the addresses of all network interfaces of this machine."""
    return {each.address for entries in psutil.net_if_addrs().values() for each in entries}


def _is_alive(address: str, port: int) -> bool:
    with suppress(OSError):  # other errors prove nothing: count as alive
        try:
            socket.create_connection((address, port), ADDRESS_PROBE_TIMEOUT).close()
        except ConnectionRefusedError:
            return False
    return True


def _join_keys() -> Iterator[tuple[Path, Ticket]]:
    with suppress(OSError):
        for path in sorted(join_keys_folder().glob(f"*{SUFFIX}")):
            with suppress(OSError, BadTicket):
                yield path, read_key_file(path)


LONGEST_SAYING = 1000  # milliseconds for the report to reach the head


def guard_line(identity: bytes, ticket: Ticket, address: str) -> bytes:
    """Return a line for an agent's guard: the agent's identity, and where the head listens."""
    return identity.hex().encode() + b" " + replace(ticket, addresses=(address,)).to_line()


def report_killed_agent(line: bytes) -> None:
    """Report to the head, if it can be reached, that an agent was killed; its guard calls this."""
    identity, _, written = line.partition(b" ")
    ticket = ticket_from(written)
    ended = bytes.fromhex(identity.decode())
    with suppress(zmq.ZMQError), zmq.Context() as context, context.socket(zmq.DEALER) as link:
        link.linger = LONGEST_SAYING
        connect_with(link, ticket)
        link.connect(endpoint(ticket.addresses[0], ticket.port))
        link.send_multipart([Numbered().bare_header(FrameKind.ENDED), ended])


# --- the command nbdist join ------------------------------------------------------------------

JOIN_REACH_TIMEOUT = 5.0  # seconds for the head's machine to answer
# The exit code of a shell for a process that SIGTERM has ended.
TERMINATED_CODE = 128 + signal.SIGTERM
JOIN_LEAVE_TIMEOUT = 25.0  # seconds for an agent (`AGENT_GRACE`) and its guard to end all processes


def join(text: str, key_file: str | None = None, node: int | None = None) -> int:
    """Run an agent here until its world ends; return an exit code; raises UsageError.

    `text` is the address that the notebook shows.  If a program such as torchrun or srun runs the
    command several times on a node, local rank 0 joins, and the other processes exit.
    """
    place = place_from(text)
    is_leader, node_number = node_position(os.environ)
    if not is_leader:
        sys.stderr.write("nbdist: one `nbdist join` per node: local rank 0 joins, this one ends\n")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run_agent(place, key_file, node_number if node is None else node)
    except KeyboardInterrupt:
        return TERMINATED_CODE


def _run_agent(place: HeadAddress, key_file: str | None, number: int) -> int:
    address = _resolve(place)
    ticket = replace(_find_key(place, key_file), addresses=(address,), port=place.port)
    environ = safe_environ(agent_environ(os.environ), folders.current_folder())
    # In a new session the agent gets no Ctrl-C: it exits with its workers when its stdin is closed.
    agent = subprocess.Popen(
        agent_command("", number), stdin=subprocess.PIPE, env=environ, start_new_session=True
    )
    assert agent.stdin is not None
    try:
        with suppress(BrokenPipeError):  # the agent has printed why it ended
            agent.stdin.write(ticket.to_line())
            agent.stdin.flush()
        sys.stderr.write(f"nbdist: {socket.gethostname()} joins the world at {place}\n")
        code = agent.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with suppress(BrokenPipeError):
            agent.stdin.close()  # the agent then exits without leftovers
        with suppress(subprocess.TimeoutExpired):
            agent.wait(JOIN_LEAVE_TIMEOUT)
        agent.kill()  # kills the guard; the agent below then gets SIGTERM, and exits
        agent.wait()
    return code if code >= 0 else 1


def _find_key(place: HeadAddress, key_file: str | None) -> Ticket:
    """Return the ticket of the world at this address; raises UsageError if none is found."""
    try:
        if key_file == "-":
            return ticket_from(sys.stdin.buffer.readline())
        if key_file is not None:
            return read_key_file(Path(key_file))
        if ticket := find_join_key(place):
            return ticket
        if sys.stdin.isatty():
            return ticket_from(getpass.getpass(f"Key of the world at {place}: ").encode())
    except BadTicket as error:
        raise UsageError(f"`nbdist join {place}`: {error}.") from None
    except OSError as error:
        raise UsageError(f"`--key-file {key_file}`: {error.strerror or error}.") from None
    raise UsageError(
        f"`nbdist join {place}`: {join_keys_folder()} has no key for it. Where the home folder is "
        "not the notebook's, copy the file of that address from there: `--key-file FILE`, or "
        "`--key-file -` for stdin."
    )


def _resolve(place: HeadAddress) -> str:
    """Return the numeric form of the address if it answers; raises UsageError if it does not."""
    try:
        with socket.create_connection((place.host, place.port), JOIN_REACH_TIMEOUT) as connection:
            return socket.getnameinfo(connection.getpeername(), socket.NI_NUMERICHOST)[0]
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise UsageError(
            f"`nbdist join {place}`: no world waits there ({why}): it has ended, or the address "
            f"is wrong. The notebook shows the address while it waits for machines."
        ) from None


LOCAL_RANKS = (
    *("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID"),
    "SLURM_LOCALID",
)
NODE_NUMBERS = ("GROUP_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
"""Variables in which torchrun, MPI, Slurm and Kubernetes number a node's processes, and nodes.

Several may be set: mpirun and torchrun run in jobs of Slurm.
"""

OF_STARTERS = (
    *("TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "PALS_", "HYDI_"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID"),
)
"""Beginnings of variables that are for this process alone, and would mislead workers."""


def node_position(environ: Mapping[str, str]) -> tuple[bool, int]:
    """Return whether this process is the first on its node, and the node's number, or -1."""
    is_leader = all(_number(environ, name) <= 0 for name in LOCAL_RANKS)
    numbers = (_number(environ, name) for name in NODE_NUMBERS)
    return is_leader, next((number for number in numbers if number >= 0), -1)


def agent_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for an agent, without variables that are for this process alone."""
    removed = set(NBDIST_DECIDES)
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("OMP_NUM_THREADS") == "1":
        removed.add("OMP_NUM_THREADS")  # set to 1 by torchrun, unless the user has set a number
    return {
        name: value
        for name, value in environ.items()
        if name not in removed and not name.startswith(OF_STARTERS)
    }


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
