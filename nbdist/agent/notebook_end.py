"""The end of the link to the notebook, of what serves one: an agent, or the head of several."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.eventloop.zmqstream import ZMQStream

from nbdist import __version__
from nbdist.wire.messages import Down, Hello, Up, down_from, to_bytes

NOTEBOOK_SOCKET = "notebook.sock"
"""The name of the notebook's socket in the runtime folder."""

LINK_LINGER = 500
"""Milliseconds that the last messages may take to reach the notebook."""


class NotebookEnd:
    """Sends typed messages to the notebook, and hands on those that come from there.

    To be made and used where a loop runs.
    """

    def __init__(
        self, runtime: Path, receive: Callable[[Down], None], name: str = NOTEBOOK_SOCKET
    ) -> None:
        self._hand_on = receive
        link: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        link.linger = LINK_LINGER
        link.sndhwm = link.rcvhwm = 0
        link.connect(f"ipc://{runtime}/{name}")
        self._link = ZMQStream(link)
        self._link.on_recv(self._receive)

    def __repr__(self) -> str:
        return f"<NotebookEnd {'closed' if self._link.closed() else 'open'}>"

    def say_hello(self) -> None:
        """Say who this is: the first of all messages."""
        self.send(Hello(__version__, os.getpid(), socket.gethostname()))

    def send(self, message: Up) -> None:
        """Send a message, now or as soon as the notebook takes it."""
        self._link.send(to_bytes(message))

    def drain(self) -> None:
        """Hand on all that has come so far."""
        self._link.flush(zmq.POLLIN)

    def close(self) -> None:
        """End the link; what was sent has `LINK_LINGER` to arrive."""
        self._link.close()

    def _receive(self, frames: list[bytes]) -> None:
        self._hand_on(down_from(frames[0]))
