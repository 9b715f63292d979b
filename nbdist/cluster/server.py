"""The head's server for agents of other machines: one port that accepts only this world's keys.

libzmq's own threads send heartbeats, so a busy interpreter does not look dead; the kernel knows
when the last byte came. libzmq's monitor reports connections that were refused.
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
from nbdist.wire.transfer import Frame, Kind, Mismatch, Numbered

log = logging.getLogger("nbdist.cluster")

ROUNDS = 5  # rounds of the event loop until nothing waits for closed sockets
LINGER = 500  # milliseconds for the last messages to reach agents
SILENT_AFTER = 2.5  # seconds of silence until the notebook is told, at most half the timeout

TCP_INFO, LAST_RECEIVED = 11, struct.Struct("=52xI")
"""`tcpi_last_data_recv` of tcp_info (linux/tcp.h): milliseconds since the last byte has come."""


@dataclass(slots=True)
class _Line:
    """The link to one agent: its numbered messages, and the descriptor of its connection.

    The descriptor belongs to libzmq, and may be another connection's once this one is closed.
    `lost_for` are the seconds since the connection was lost; they are counted while this process
    runs, because after a pause it has not yet read which agents have come back.
    """

    talk: Numbered = field(default_factory=Numbered)
    lost_for: float | None = None
    _fd: int = -1
    _peer: object = None

    def comes_by(self, frame: zmq.Frame) -> None:
        """Remember the connection by which a frame has come."""
        self._fd, self._peer, self.lost_for = int(frame.get("__fd")), None, None
        with suppress(OSError), socket.socket(fileno=os.dup(self._fd)) as found:
            self._peer = found.getpeername()

    def silence(self) -> float:
        """Return the seconds since the last byte has come; 0.0 if the connection is just closed."""
        if self.lost_for is not None:
            return self.lost_for
        with suppress(OSError), socket.socket(fileno=os.dup(self._fd)) as found:
            if found.getpeername() == self._peer:
                info = found.getsockopt(socket.IPPROTO_TCP, TCP_INFO, LAST_RECEIVED.size)
                return float(LAST_RECEIVED.unpack(info)[0]) / 1000
        return 0.0


class NodeServer:
    """The head's side of the links to all agents.  An agent that reconnects keeps its identity.

    `receive` is called with each message of an agent, `lose` when an agent has ended or was silent
    for `link_timeout` seconds, and `miss` repeatedly with all agents that are silent.
    """

    def __init__(
        self,
        receive: Callable[[bytes, NodeUp], None],
        lose: Callable[[bytes], None],
        miss: Callable[[Collection[bytes]], None],
    ) -> None:
        self.port = 0
        self.link_timeout = LINK_TIMEOUT
        self.refused = 0
        """How many connections had wrong keys."""
        self.unreadable = 0  # messages with the right keys
        self._receive = receive
        self._lose = lose
        self._miss = miss
        self._own, self._theirs = KeyPair.new(), KeyPair.new()
        self._context = zmq.asyncio.Context()
        self._auth = AsyncioAuthenticator(self._context, log=log)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = LINGER
        self._socket.router_mandatory = self._socket.router_handover = True
        self._socket.zap_domain = b"nbdist"
        self._monitor: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._known: dict[bytes, _Line] = {}

    def __repr__(self) -> str:
        return f"<NodeServer port {self.port}, {len(self._known)} agents, {self.refused} refused>"

    def open(self, *addresses: str, link_timeout: float = LINK_TIMEOUT) -> None:
        """Listen from now on, at these addresses or at all, on a port that the kernel chooses."""
        self.link_timeout = link_timeout
        listen_with(self._socket, self._own, link_timeout)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        self._auth.start()
        let_in = self._theirs.public.encode()
        knows = SimpleNamespace(callback=lambda _domain, key: key == let_in)
        self._auth.configure_curve_callback("nbdist", knows)
        first, *others = addresses or ("*",)
        place = f"[{first}]" if ":" in first else first
        self.port = self._socket.bind_to_random_port(f"tcp://{place}")
        for other in others:
            self._socket.bind(endpoint(other, self.port))
        self._tasks = [
            asyncio.create_task(work) for work in (self._read(), self._watch(), self._beat())
        ]
        for task in self._tasks:
            task.add_done_callback(_report_fault)

    def ticket(self, addresses: tuple[str, ...], *, fork: bool) -> Ticket:
        """Return what an agent needs to connect."""
        keys = self._own.public, self._theirs
        return Ticket(addresses, self.port, *keys, fork, self.link_timeout)

    def send(self, identity: bytes, message: NodeDown) -> None:
        """Send a message to one agent; drop it if the agent is lost."""
        if line := self._known.get(identity):
            self._send_frames(identity, line.talk.message(node_frames(message)))

    async def close(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._auth.stop()
        # Tasks that waited for these sockets remove their descriptors from the loop in its next
        # rounds. The next server's sockets could have the same descriptors by then.
        for _ in range(ROUNDS):
            await asyncio.sleep(0)
        self._socket.close()
        self._context.term()

    def _send_frames(self, identity: bytes, frames: Sequence[Frame]) -> None:
        sent: Any = self._socket.send_multipart([identity, *frames], zmq.DONTWAIT, copy=False)
        # The future is done at once: without a high-water mark nothing has to wait.
        if sent.done() and isinstance(sent.exception(), zmq.ZMQError):
            line = self._known.get(identity)
            if line is not None and line.lost_for is None:
                line.lost_for = 0.0

    def _drop(self, identity: bytes) -> None:
        if line := self._known.pop(identity, None):
            self._send_frames(identity, [line.talk.sign(Kind.ENDED)])
            self._lose(identity)

    async def _read(self) -> None:
        while True:
            self._take(*await self._socket.recv_multipart(copy=False))

    def _take(self, first: zmq.Frame, *frames: zmq.Frame) -> None:
        identity = first.bytes
        if (line := self._known.get(identity)) is None:
            line = _Line()
            line.comes_by(first)
        header, *data = [each.buffer for each in frames] or [memoryview(b"")]
        try:
            kind = line.talk.take(bytes(header))
        except BadFrame as error:  # the next message of a known agent is read all the same
            self._note_unreadable(error)
            return
        except Mismatch:
            self._send_frames(identity, [line.talk.sign(Kind.ENDED)])
            return
        match kind:
            case Kind.MESSAGE:
                try:
                    message = node_message_from(*data)
                except BadFrame as error:
                    self._note_unreadable(error)
                    # Later messages of this agent would be wrong without it, so the agent has to
                    # leave.
                    self._send_frames(identity, [line.talk.sign(Kind.ENDED)])
                    if self._known.pop(identity, None):
                        self._lose(identity)
                    return
                self._known[identity] = line
                self._receive(identity, message)
            case Kind.AGAIN if identity in self._known:
                line.comes_by(first)
                for again in line.talk.again():
                    self._send_frames(identity, again)
            case Kind.ENDED if data:
                self._drop(bytes(data[0]))

    def _note_unreadable(self, error: BadFrame) -> None:
        self.unreadable += 1
        # One line for the first, the second, the fourth, so that messages cannot fill the log.
        if self.unreadable.bit_count() == 1:
            log.warning("dropped an unreadable message, %d by now: %s", self.unreadable, error)

    async def _beat(self) -> None:
        """Send heartbeats, and find lost agents: libzmq reports a loss only to a sender."""
        silent: set[bytes] = set()
        while True:
            await asyncio.sleep(BEAT_INTERVAL)
            before, silent = silent, set()
            for identity, line in [*self._known.items()]:
                if line.lost_for is not None:
                    line.lost_for += BEAT_INTERVAL
                self._send_frames(identity, [line.talk.sign(Kind.BEAT)])
                seconds = line.silence()
                if seconds >= self.link_timeout:
                    self._drop(identity)
                elif seconds >= min(SILENT_AFTER, self.link_timeout / 2):
                    silent.add(identity)
            if silent or before:
                self._miss(silent)

    async def _watch(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            self.refused += 1
            # One line for the first, the second, the fourth, so that strangers cannot fill the log.
            if self.refused.bit_count() == 1:
                name = zmq.Event(event["event"]).name
                log.warning("refused a connection, %d by now: %s", self.refused, name)


def _report_fault(task: asyncio.Task[None]) -> None:
    """Let the loop's handler end the head: without this task it would wait for ever."""
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": "the link to the agents has failed", "exception": error}
        task.get_loop().call_exception_handler(context)


OUTSIDE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses that no machine has (RFC 5737, RFC 3849); nothing is sent to them."""


def addresses(asked: str | None) -> tuple[str, ...]:
    """Return addresses of this machine, the likeliest first; `asked` is one, or an interface.

    The likeliest is that of packets to other networks: others may be bridges of containers, by
    which no other machine can be reached.
    """
    found = psutil.net_if_addrs()
    if asked and asked not in found:
        return (asked,)
    usable = [
        each.address.partition("%")[0]
        for name, on in found.items()
        if asked in (None, "", name)
        for each in on
        if each.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(each.address)
    ]
    leaving = [_leaving(*each) for each in OUTSIDE]
    ordered = sorted(usable, key=lambda text: (text not in leaving, ":" in text))
    return tuple(ordered) or ("127.0.0.1",)


def listened_at(asked: str | None) -> tuple[str, ...]:
    """Return the addresses to listen at: those asked for if this machine has them; () for all."""
    found = addresses(asked) if asked else ()
    return found if own_addresses().issuperset(found) else ()


def _leaving(family: socket.AddressFamily, outside: str) -> str:
    """Return this machine's address for packets to that address; "" if there is no route."""
    with socket.socket(family, socket.SOCK_DGRAM) as tried:
        try:
            tried.connect((outside, 9))  # only looks up the route: UDP sends nothing here
        except OSError:
            return ""
        return str(tried.getsockname()[0])


def _is_local(address: str) -> bool:
    """Return True if an address reaches only this machine, or needs an interface too."""
    return address.startswith(("127.", "169.254.", "fe80:")) or address == "::1"
