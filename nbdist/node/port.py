"""A port for stores that user code or its child processes make: MASTER_PORT."""

from __future__ import annotations

import socket


class HeldPort:
    """A number that nobody else is given, and that nobody listens on until user code does.

    It is bound, and so no other program gets it; and since both sides say SO_REUSEADDR, as
    torch's TCPStore does, rank 0 can listen on it, again and again.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number = int(self._socket.getsockname()[1])

    def __repr__(self) -> str:
        return f"<HeldPort {self.number}>"

    def close(self) -> None:
        """Whoever wants it may have it."""
        self._socket.close()
