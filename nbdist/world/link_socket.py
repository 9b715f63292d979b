"""The socket of a link, through which the notebook's process and its agent exchange messages.

Runs in the notebook's process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import zmq

from nbdist.system.wake_pipe import WakePipe
from nbdist.wire import messages
from nbdist.wire.frames import pack, unpack
from nbdist.wire.messages import BatchAcknowledged


class LinkSocket:
    """A socket to which an agent or head connects, with the messages that wait to be sent.

    Any thread may call `send` and `wake`.  The consumer of the agent's events calls `acknowledge`.
    Only the link's thread calls `wait`, `receive` and `send_waiting`.  `close` is called by the
    link's owner when the link's thread has ended.
    """

    def __init__(self, address: str) -> None:
        """Bind the socket, so that an agent that is started afterwards can connect at once."""
        self.address = address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        # With a ZAP domain, libzmq accepts only new versions of its protocol.  With version 1.0,
        # any process that connects and sends a byte would count as a second peer, and this socket
        # would send every other message to that process.
        self._socket.zap_domain = b"nbdist"
        self._socket.bind(address)
        self._wake_pipe = WakePipe()
        self._waiting: deque[messages.Down] = deque()
        self._last_acknowledged: BatchAcknowledged | None = None
        self._is_detachable = False  # True once the world could be left to another notebook
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_pipe.fileno(), zmq.POLLIN)

    def __repr__(self) -> str:
        return f"<LinkSocket {self.address} {len(self._waiting)} messages waiting>"

    def send(self, message: messages.Down) -> None:
        """Have the link's thread send a message."""
        self._is_detachable |= isinstance(message, messages.HandoverState)
        self._waiting.append(message)
        self.wake()

    def acknowledge(self, batch: BatchAcknowledged) -> None:
        """Acknowledge a batch of outputs; a second call for the same batch does nothing.

        The consumer repeats a call that Stop has interrupted.  Usually the acknowledgement is sent
        when the link's thread next sends or receives a message, because the agent can send several
        batches without an acknowledgement.  It is sent at once if other messages wait, or if the
        world can be detached: the next notebook gets all batches that were not acknowledged.
        """
        if batch is not self._last_acknowledged:
            self._last_acknowledged = batch
            self._waiting.append(batch)
        if len(self._waiting) > 1 or self._is_detachable:
            self.wake()

    def wake(self) -> None:
        """Make the current or the next `wait` return; any thread may call this."""
        self._wake_pipe.wake()

    def wait(self, descriptor: int) -> bool:
        """Wait until a message arrives, `send` or `wake` is called, or `descriptor` is readable.

        Returns True if `descriptor` is readable.
        """
        self._poller.register(descriptor, zmq.POLLIN)
        ready = dict(self._poller.poll())
        if self._wake_pipe.fileno() in ready:
            self._wake_pipe.clear()
        return descriptor in ready

    def receive(self) -> Iterator[messages.Up]:
        """Yield the messages that have arrived, without waiting."""
        with suppress(zmq.Again):
            while True:
                yield unpack(self._socket.recv(zmq.NOBLOCK))

    def send_waiting(self) -> None:
        """Send the messages that wait, in the order of the calls of `send` and `acknowledge`.

        Call this only once the agent has sent its first message: without an agent that is
        connected, a message would be lost.
        """
        with suppress(zmq.Again):  # the agent has just ended
            while self._waiting:
                self._socket.send(pack(self._waiting.popleft()), zmq.NOBLOCK)

    def close(self, linger: int) -> None:
        """Close the socket; messages that are being sent have `linger` milliseconds to arrive."""
        self._socket.close(linger)
        self._context.term()
        self._wake_pipe.close()
