"""The ticket by which an agent connects to its head, and the command `nbdist join`.

An agent gets the ticket on stdin, because other users of the machine could read it in a command's
arguments. For `nbdist join` the head writes the ticket to a private file in the user's state
folder. The head, the agents and `nbdist join` use this file.
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
BEAT_INTERVAL = 0.5  # seconds between two heartbeats of libzmq, and also of `NodeServer`
RECONNECT_INTERVAL = 0.2  # seconds between two attempts of an agent to connect again


class BadTicket(ValueError):
    """Raised if no ticket has come, or if a text is no ticket; the message says which."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public and a secret key of CurveZMQ, as text in ZeroMQ's encoding Z85."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        """Make a new pair of random keys."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


@dataclass(frozen=True, slots=True)
class Ticket:
    """The addresses and keys by which an agent connects to the head of a world.

    By the keys, the head and its agents recognise each other and encrypt all messages (CurveZMQ,
    RFC 26 of ZeroMQ). `server_key` is the head's public key, and `keys` is the pair that all agents
    of the world use. `addresses` are the head's, the best one first. `fork` says whether agents
    fork their workers. After `link_timeout` silent seconds, the head counts an agent as lost.
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
    """Return the ticket in a line from `Ticket.to_line`; raises BadTicket for any other line."""
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
    """Return ZeroMQ's name for a TCP address and port, such as `tcp://[fe80::1]:4321`."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def listen_with(socket: zmq.Socket[Any], keys: KeyPair, link_timeout: float = LINK_TIMEOUT) -> None:
    """Set the options of the head's listening socket: the head's `keys`, and heartbeats.

    `NodeServer` itself checks the keys of the agents that connect.
    """
    _set_heartbeats(socket, link_timeout)
    socket.curve_server = True
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()


def connect_with(socket: zmq.Socket[Any], ticket: Ticket) -> None:
    """Set the options of an agent's socket: the ticket's keys, heartbeats, and reconnection."""
    _set_heartbeats(socket, ticket.link_timeout)
    socket.reconnect_ivl = round(RECONNECT_INTERVAL * 1000)
    socket.curve_serverkey = ticket.server_key.encode()
    socket.curve_publickey = ticket.keys.public.encode()
    socket.curve_secretkey = ticket.keys.secret.encode()


def _set_heartbeats(socket: zmq.Socket[Any], link_timeout: float) -> None:
    socket.ipv6 = True
    socket.heartbeat_ivl = round(BEAT_INTERVAL * 1000)
    # By this timeout an agent notices that its head is lost. The head finds lost agents earlier, by
    # other means (`NodeServer`). With a shorter timeout, libzmq would drop connections after each
    # pause of the head's process, because libzmq looks at the clock before it reads the heartbeats
    # that have arrived in the pause.
    socket.heartbeat_timeout = round(AGENTS_WAIT * link_timeout * 1000)
    # While a message is sent only in part, as when the cable is pulled during a big value, libzmq
    # neither sends heartbeats nor notices that they are missing. TCP_MAXRT, which is Linux's
    # TCP_USER_TIMEOUT, ends such a connection.
    socket.setsockopt(zmq.TCP_MAXRT, round(AGENTS_WAIT * link_timeout * 1000))
    socket.sndhwm = socket.rcvhwm = 0


SUFFIX = ".key"  # the end of the names of files with tickets
ADDRESS_PROBE_TIMEOUT = 1.0  # seconds for a port of this machine to answer


@dataclass(frozen=True, slots=True)
class HeadAddress:
    """The address and port of a head, as a user types them: `10.0.0.1:4321`, `[fe80::1]:4321`."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def place_of(ticket: Ticket) -> HeadAddress:
    """Return the first address of a ticket, with the port; a user types it for `nbdist join`."""
    return HeadAddress(ticket.addresses[0], ticket.port)


def place_from(text: str) -> HeadAddress:
    """Return the address in what a user has typed for `nbdist join`, HOST:PORT.

    Raises UsageError if the text is no such address.
    """
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
    """Return the folder of this user in which heads store tickets for `nbdist join`."""
    return Path(folders.state_folder(), "joins")


def join_key_file(place: HeadAddress) -> Path:
    """Return the path of the file for the ticket of the world whose head has this address."""
    return join_keys_folder() / f"{place.host.replace(':', '_')}-{place.port}{SUFFIX}"


def write_join_key(ticket: Ticket) -> Path:
    """Write a ticket to a file in which `nbdist join` finds it; return the path; raises OSError."""
    path = join_key_file(place_of(ticket))
    folders.make_private(path.parent)
    with folders.whole_file(path, folders.PRIVATE_FILE) as file:
        file.write(ticket.to_line())
    return path


def find_join_key(place: HeadAddress) -> Ticket | None:
    """Return the stored ticket of the world at this address; None if there is not exactly one.

    If no ticket has this host, only the port is compared, because the user may have typed another
    name of the host.
    """
    by_port = [ticket for _, ticket in _join_keys() if ticket.port == place.port]
    by_address = [ticket for ticket in by_port if place.host in ticket.addresses]
    tickets = by_address or by_port
    return tickets[0] if len(tickets) == 1 else None


def read_key_file(path: Path) -> Ticket:
    """Return the ticket in a file; raises BadTicket, or OSError if the file cannot be read.

    Raises PermissionError if users other than the owner and the file's group can access the file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_mode & 0o007:
            raise PermissionError(f"others can read {path}, which has a key: `chmod 600 {path}`")
        return ticket_from(file.read(LONGEST_TICKET))


def drop_dead_join_keys() -> None:
    """Remove the files with tickets of those heads that ran on this machine and have exited."""
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
    with suppress(OSError):  # only a refused connection proves that the head has exited
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


LONGEST_SAYING = 1000  # milliseconds for a guard's report to reach the head


def guard_line(identity: bytes, ticket: Ticket, address: str) -> bytes:
    """Return a line by which an agent's guard can report to the head that the agent was killed.

    The line has the `identity` by which the head knows the agent, and the ticket with the one
    `address` at which the head answers. `report_killed_agent` reads the line.
    """
    return identity.hex().encode() + b" " + replace(ticket, addresses=(address,)).to_line()


def report_killed_agent(line: bytes) -> None:
    """Report to the head that an agent was killed; the agent's guard calls this.

    `line` is from `guard_line`. If the head cannot be reached, the report is lost without an error.
    """
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
# The exit code that a shell gives to a process that SIGTERM has ended.
TERMINATED_CODE = 128 + signal.SIGTERM
JOIN_LEAVE_TIMEOUT = 25.0  # seconds for an agent (`AGENT_GRACE`) and its guard to end all processes


def join(text: str, key_file: str | None = None, node: int | None = None) -> int:
    """Carry out `nbdist join`: run an agent on this machine until its world ends.

    `text` is the address that the notebook shows. `key_file` is a file with the ticket, "-" for
    stdin. `node` is the number of this node, by default the number in an environment variable. If a
    program such as torchrun or srun runs the command several times on a node, only the process with
    local rank 0 joins. Returns an exit code; raises UsageError.
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
    # Start the agent in a new session, so that Ctrl-C does not interrupt the agent. The agent exits
    # with its workers when its stdin is closed below.
    agent = subprocess.Popen(
        agent_command("", number), stdin=subprocess.PIPE, env=environ, start_new_session=True
    )
    assert agent.stdin is not None
    try:
        with suppress(BrokenPipeError):  # the agent has exited, and has printed why
            agent.stdin.write(ticket.to_line())
            agent.stdin.flush()
        sys.stderr.write(f"nbdist: {socket.gethostname()} joins the world at {place}\n")
        code = agent.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with suppress(BrokenPipeError):
            agent.stdin.close()  # makes the agent end its workers and exit
        with suppress(subprocess.TimeoutExpired):
            agent.wait(JOIN_LEAVE_TIMEOUT)
        # The process that was started is the guard, and its child is the agent. When the guard is
        # killed, Linux sends the agent SIGTERM, and the agent exits.
        agent.kill()
        agent.wait()
    return code if code >= 0 else 1


def _find_key(place: HeadAddress, key_file: str | None) -> Ticket:
    """Return the ticket of the world at this address; raises UsageError if there is none.

    Read the ticket from `key_file` ("-" for stdin). Without `key_file`, read it from the file that
    the head has written. If there is no such file, ask the user, if stdin is a terminal.
    """
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
    """Return the numeric IP address of the head, after a test that it can be reached.

    Raises UsageError if that fails.
    """
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
"""Environment variables in which torchrun, MPI or Slurm tells a process its local rank.

Several may be set, since mpirun and torchrun can run in jobs of Slurm.
"""

NODE_NUMBERS = ("GROUP_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
"""Environment variables in which torchrun, Slurm or Kubernetes tells a process its node number."""

OF_STARTERS = (
    *("TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "PALS_", "HYDI_"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID"),
)
"""Beginnings of the names of variables that torchrun, MPI or Slurm sets for a single process.

Agents do not get them, because libraries in workers would take them for the worker's own.
"""


def node_position(environ: Mapping[str, str]) -> tuple[bool, int]:
    """Return whether this process has local rank 0 on its node, and the number of the node.

    Both are from the variables in `environ`. A process without a local rank counts as local rank 0.
    The number is -1 if it is not known.
    """
    is_leader = all(_number(environ, name) <= 0 for name in LOCAL_RANKS)
    numbers = (_number(environ, name) for name in NODE_NUMBERS)
    return is_leader, next((number for number in numbers if number >= 0), -1)


def agent_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables that would mislead an agent or its workers.

    Removes variables that a starter such as torchrun has set for this process alone, and variables
    that nbdist sets for each worker.
    """
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
