"""Where agents of other machines come in: one port, and nobody without this world's keys.

CurveZMQ lets both sides know one another and encrypts all.  libzmq's own threads send signs of
life and miss them, so that a busy interpreter at either end is not taken for a dead one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from nbdist.head.refusals import HEARD, Refusals
from nbdist.wire.many import NodeDown, NodeUp, node_frames, node_up_from
from nbdist.wire.ticket import BEAT_INTERVAL, KeyPair, Ticket, endpoint, listen_with

log = logging.getLogger("nbdist.head")

ROUNDS = 5
"""Of the event loop until nothing waits any more for sockets that are to be closed."""

LINGER = 500
"""Milliseconds that the last messages may take to reach agents."""


class _OneKey:
    """Knows the one public key that is let in; zmq.auth asks it."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Say whether this key is let in."""
        return key == self._key


class Gate:
    """The head's side of the links to all agents.

    `receive` gets what an agent says, by the identity of its connection, and `lose` is called
    with that when nothing can be sent there any more.  `refused` counts who had no right key,
    and bytes that were not from who they seemed to be.
    """

    def __init__(
        self, receive: Callable[[bytes, NodeUp], None], lose: Callable[[bytes], None]
    ) -> None:
        self.port = 0
        self._refusals = Refusals()
        self._receive = receive
        self._lose = lose
        self._own, self._theirs = KeyPair.new(), KeyPair.new()
        self._context = zmq.asyncio.Context()
        self._auth = AsyncioAuthenticator(self._context, log=log)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = LINGER
        self._socket.router_mandatory = True
        self._socket.zap_domain = b"nbdist"
        listen_with(self._socket, self._own)
        self._monitor: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._known: set[bytes] = set()

    def __repr__(self) -> str:
        return f"<Gate port {self.port}, {len(self._known)} agents, {self.refused} refused>"

    @property
    def refused(self) -> int:
        """How many were."""
        return self._refusals.count

    def open(self, *addresses: str) -> None:
        """Listen from now on, at these or at all, on a port that the kernel chooses."""
        self._monitor = self._socket.get_monitor_socket(HEARD)
        self._auth.start()
        self._auth.configure_curve_callback("nbdist", _OneKey(self._theirs.public))
        first, *others = addresses or ("*",)
        place = f"[{first}]" if ":" in first else first
        self.port = self._socket.bind_to_random_port(f"tcp://{place}")
        for other in others:
            self._socket.bind(endpoint(other, self.port))
        self._tasks = [
            asyncio.create_task(work) for work in (self._read(), self._watch(), self._beat())
        ]

    def ticket(self, addresses: tuple[str, ...], *, fork: bool) -> Ticket:
        """Make what an agent needs to come in."""
        return Ticket(addresses, self.port, self._own.public, self._theirs, fork)

    def send(self, identity: bytes, message: NodeDown) -> None:
        """Send a message to one agent; it is lost where the agent is."""
        self._send_frames([identity, *node_frames(message)])

    def forget(self, identity: bytes) -> None:
        """Look after this one no more."""
        self._known.discard(identity)

    async def close(self) -> None:
        """Let go of all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._auth.stop()
        # What waited for these sockets takes its leave of the loop in the next rounds, by
        # descriptors that the sockets of the next gate could have by then.
        for _ in range(ROUNDS):
            await asyncio.sleep(0)
        self._socket.close()
        self._context.term()

    def _send_frames(self, frames: list[bytes | memoryview]) -> None:
        sent: Any = self._socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
        # It is done at once: there is no mark above which it would have to wait.
        if sent.done() and isinstance(sent.exception(), zmq.ZMQError):
            self._drop(bytes(frames[0]))

    def _drop(self, identity: bytes) -> None:
        if identity in self._known:
            self._known.discard(identity)
            self._lose(identity)

    async def _read(self) -> None:
        while True:
            first, frame, *data = await self._socket.recv_multipart(copy=False)
            self._known.add(identity := first.bytes)
            self._receive(identity, node_up_from(frame.bytes, *(each.buffer for each in data)))

    async def _beat(self) -> None:
        """Find who has gone: libzmq notices it, but says so only to who sends there."""
        while True:
            await asyncio.sleep(BEAT_INTERVAL)
            for identity in [*self._known]:
                self._send_frames([identity, b""])

    async def _watch(self) -> None:
        """Count those who are refused."""
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            refusals = self._refusals
            if refusals.take(event["event"], event["value"]) and refusals.is_worth_a_line:
                name = zmq.Event(event["event"]).name
                log.warning("refused a connection, %d by now: %s", refusals.count, name)
