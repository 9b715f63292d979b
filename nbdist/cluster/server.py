"""The head's server, to which all agents of a world connect: a port that accepts only their keys.

To find lost agents, the server asks Linux when the last byte of each agent has arrived. A busy
agent does not look lost, because libzmq's own threads answer for it. The head makes a `NodeServer`
for each `NodePool`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import psutil
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from nbdist.cluster.ticket import (
    BEAT_INTERVAL,
    KeyPair,
    Ticket,
    endpoint,
    listen_with,
    own_addresses,
)
from nbdist.wire.frames import BadFrame
from nbdist.wire.node_messages import NodeDown, NodeUp, node_frames, node_message_from
from nbdist.wire.spec import LINK_TIMEOUT
from nbdist.wire.transfer import Frame, FrameKind, Mismatch, Numbered

log = logging.getLogger("nbdist.cluster")

ROUNDS = 5  # rounds of the event loop for which `close` waits
LINGER = 500  # milliseconds for the last messages to reach agents after `close`
# An agent is reported as silent after this many seconds, or after half of `link_timeout` if that is
# less.
SILENT_AFTER = 2.5

TCP_INFO, LAST_RECEIVED = 11, struct.Struct("=52xI")
"""The option by which getsockopt returns a struct tcp_info (linux/tcp.h), and its layout.

Only one field is read: `tcpi_last_data_recv`, the milliseconds since the last byte has come.
"""


@dataclass(slots=True)
class _Line:
    """The head's end of the link to one agent.

    `numbered` keeps sent messages until the agent has acknowledged them. `lost_for` has the seconds
    since the connection was lost, or None while the agent is connected. Seconds in which the head's
    process was paused do not count: the agent may have reconnected during the pause, and the head
    learns this only later. `_fd` is libzmq's descriptor of the connection, and `_peer` is the
    agent's address. If another agent's connection gets the same descriptor later, its address
    differs from `_peer`.
    """

    numbered: Numbered = field(default_factory=Numbered)
    lost_for: float | None = None
    _fd: int = -1
    _peer: object = None

    def set_connection(self, frame: zmq.Frame) -> None:
        """Record that the agent is connected now, and which connection `frame` has come from."""
        self._fd, self._peer, self.lost_for = int(frame.get("__fd")), None, None
        with suppress(OSError), socket.socket(fileno=os.dup(self._fd)) as connection:
            self._peer = connection.getpeername()

    def silent_seconds(self) -> float:
        """Return the seconds since the agent's last byte, or since the connection was lost.

        Return 0.0 if the time is unknown.
        """
        if self.lost_for is not None:
            return self.lost_for
        with suppress(OSError), socket.socket(fileno=os.dup(self._fd)) as connection:
            if connection.getpeername() == self._peer:
                info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, LAST_RECEIVED.size)
                return float(LAST_RECEIVED.unpack(info)[0]) / 1000
        return 0.0


class NodeServer:
    """The head's end of the links to all agents of a world.

    An agent is known by its identity (bytes), which it keeps when it reconnects. The server calls
    `on_message` with the identity and each message of an agent, and `on_lost` when an agent has
    ended or counts as lost. While agents are silent, the server calls `on_silent` repeatedly with
    their identities. When no agent is silent any more, it calls `on_silent` once with no identity.
    """

    def __init__(
        self,
        on_message: Callable[[bytes, NodeUp], None],
        on_lost: Callable[[bytes], None],
        on_silent: Callable[[Collection[bytes]], None],
    ) -> None:
        self.port = 0
        self.link_timeout = LINK_TIMEOUT
        self.refused = 0
        """How many connections libzmq has refused, because of wrong keys or another protocol."""
        self.unreadable = 0  # how many messages with the right keys could not be read
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_silent = on_silent
        self._keys, self._agents_keys = KeyPair.new(), KeyPair.new()
        self._context = zmq.asyncio.Context()
        self._auth = AsyncioAuthenticator(self._context, log=log)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = LINGER
        self._socket.router_mandatory = self._socket.router_handover = True
        self._socket.zap_domain = b"nbdist"
        self._monitor: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._lines: dict[bytes, _Line] = {}

    def __repr__(self) -> str:
        return f"<NodeServer port {self.port}, {len(self._lines)} agents, {self.refused} refused>"

    def open(self, *addresses: str, link_timeout: float = LINK_TIMEOUT) -> None:
        """Listen on a free port at some addresses of this machine, by default at all its addresses.

        An agent counts as lost after `link_timeout` silent seconds.
        """
        self.link_timeout = link_timeout
        listen_with(self._socket, self._keys, link_timeout)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        self._auth.start()
        agents_key = self._agents_keys.public.encode()
        callbacks = SimpleNamespace(callback=lambda _domain, key: key == agents_key)
        self._auth.configure_curve_callback("nbdist", callbacks)
        first, *others = addresses or ("*",)
        host = f"[{first}]" if ":" in first else first
        self.port = self._socket.bind_to_random_port(f"tcp://{host}")
        for other in others:
            self._socket.bind(endpoint(other, self.port))
        self._tasks = [
            asyncio.create_task(work)
            for work in (self._read(), self._count_refused(), self._send_heartbeats())
        ]
        for task in self._tasks:
            task.add_done_callback(_report_fault)

    def ticket(self, addresses: tuple[str, ...], *, fork: bool) -> Ticket:
        """Return the ticket by which agents connect to this server, at these addresses.

        `fork` says whether the agents fork their workers.
        """
        keys = self._keys.public, self._agents_keys
        return Ticket(addresses, self.port, *keys, fork, self.link_timeout)

    def send(self, identity: bytes, message: NodeDown) -> None:
        """Send a message to an agent; drop the message if the agent is lost."""
        if line := self._lines.get(identity):
            self._send_frames(identity, line.numbered.message(node_frames(message)))

    async def close(self) -> None:
        """Close all connections, and stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._auth.stop()
        # The event loop stops watching the sockets only in its next rounds. Wait for this before
        # closing the sockets, because the next server's sockets may get the same descriptors.
        for _ in range(ROUNDS):
            await asyncio.sleep(0)
        self._socket.close()
        self._context.term()

    def _send_frames(self, identity: bytes, frames: Sequence[Frame]) -> None:
        sent: Any = self._socket.send_multipart([identity, *frames], zmq.DONTWAIT, copy=False)
        # The future is done at once: the socket's queue has no limit, so sending never waits.
        if sent.done() and isinstance(sent.exception(), zmq.ZMQError):
            line = self._lines.get(identity)
            if line is not None and line.lost_for is None:
                line.lost_for = 0.0

    def _drop(self, identity: bytes) -> None:
        if line := self._lines.pop(identity, None):
            self._send_frames(identity, [line.numbered.bare_header(FrameKind.ENDED)])
            self._on_lost(identity)

    async def _read(self) -> None:
        while True:
            self._handle_frames(*await self._socket.recv_multipart(copy=False))

    def _handle_frames(self, first: zmq.Frame, *frames: zmq.Frame) -> None:
        identity = first.bytes
        if (line := self._lines.get(identity)) is None:
            line = _Line()
            line.set_connection(first)
        header, *data = [each.buffer for each in frames] or [memoryview(b"")]
        try:
            kind = line.numbered.read_header(bytes(header))
        except BadFrame as error:  # only drop the message: an agent may send further ones
            self._count_unreadable(error)
            return
        except Mismatch:
            self._send_frames(identity, [line.numbered.bare_header(FrameKind.ENDED)])
            return
        match kind:
            case FrameKind.MESSAGE:
                try:
                    message = node_message_from(*data)
                except BadFrame as error:
                    self._count_unreadable(error)
                    # End the agent, because its next messages may depend on the unreadable one.
                    self._send_frames(identity, [line.numbered.bare_header(FrameKind.ENDED)])
                    if self._lines.pop(identity, None):
                        self._on_lost(identity)
                    return
                self._lines[identity] = line
                self._on_message(identity, message)
            case FrameKind.AGAIN if identity in self._lines:
                line.set_connection(first)
                for again in line.numbered.replay():
                    self._send_frames(identity, again)
            case FrameKind.ENDED if data:
                self._drop(bytes(data[0]))

    def _count_unreadable(self, error: BadFrame) -> None:
        self.unreadable += 1
        # Log message 1, 2, 4, 8 and so on, so that unreadable messages cannot fill the log.
        if self.unreadable.bit_count() == 1:
            log.warning("dropped an unreadable message, %d by now: %s", self.unreadable, error)

    async def _send_heartbeats(self) -> None:
        """Send all agents a heartbeat every `BEAT_INTERVAL` seconds; find silent and lost agents.

        libzmq reports that a connection was lost only when the head sends something over it.
        """
        silent: set[bytes] = set()
        while True:
            await asyncio.sleep(BEAT_INTERVAL)
            silent_before, silent = silent, set()
            for identity, line in [*self._lines.items()]:
                if line.lost_for is not None:
                    line.lost_for += BEAT_INTERVAL
                self._send_frames(identity, [line.numbered.bare_header(FrameKind.BEAT)])
                seconds = line.silent_seconds()
                if seconds >= self.link_timeout:
                    self._drop(identity)
                elif seconds >= min(SILENT_AFTER, self.link_timeout / 2):
                    silent.add(identity)
            if silent or silent_before:
                self._on_silent(silent)

    async def _count_refused(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            self.refused += 1
            # Log refusal 1, 2, 4, 8 and so on, so that strangers cannot fill the log.
            if self.refused.bit_count() == 1:
                name = zmq.Event(event["event"]).name
                log.warning("refused a connection, %d by now: %s", self.refused, name)


def _report_fault(task: asyncio.Task[None]) -> None:
    """Pass the error of a failed task to the event loop's handler, which ends the head."""
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": "the link to the agents has failed", "exception": error}
        task.get_loop().call_exception_handler(context)


OUTSIDE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses outside of this network, for which Linux is asked for a route; nothing is sent there.

No machine has these addresses (RFC 5737, RFC 3849).
"""


def addresses(preferred: str | None) -> tuple[str, ...]:
    """Return addresses at which other machines may reach this machine, the likeliest first.

    First come the addresses from which packets leave for other networks; others may belong to
    bridges of containers. If `preferred` is the name of a network interface, return only its
    addresses. If `preferred` is any other text, return only this text; None and "" mean all network
    interfaces. If no address is found, return 127.0.0.1.
    """
    interfaces = psutil.net_if_addrs()
    if preferred and preferred not in interfaces:
        return (preferred,)
    usable = [
        each.address.partition("%")[0]
        for name, entries in interfaces.items()
        if preferred in (None, "", name)
        for each in entries
        if each.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(each.address)
    ]
    outgoing = [_outgoing_address(*each) for each in OUTSIDE]
    ordered = sorted(usable, key=lambda text: (text not in outgoing, ":" in text))
    return tuple(ordered) or ("127.0.0.1",)


def listen_addresses(preferred: str | None) -> tuple[str, ...]:
    """Return the addresses of this machine at which the head must listen; () means all of them.

    `preferred` is the address to return, or the name of a network interface whose addresses to
    return. Returns () if `preferred` is None, "", or an address that this machine does not have.
    """
    local = addresses(preferred) if preferred else ()
    return local if own_addresses().issuperset(local) else ()


def _outgoing_address(family: socket.AddressFamily, outside: str) -> str:
    """Return the address of this machine from which packets go to `outside`; "" without a route."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((outside, 9))  # looks up the route; a UDP socket sends nothing for this
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _is_local(address: str) -> bool:
    """Return True for a loopback or link-local address, which other networks cannot reach."""
    return address.startswith(("127.", "169.254.", "fe80:")) or address == "::1"
