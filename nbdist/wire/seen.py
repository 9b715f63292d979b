"""What an agent shows to other processes of its user: `nbdist top` and `nbdist status`.

Through a socket of its own in the runtime folder: one question, one kind of answer, and nothing
that could change anything.  Each side makes nothing of the other's bytes but what stands here.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass

from nbdist.wire.frames import framed, object_from
from nbdist.wire.places import WorkerStatus

WINDOW = "window.sock"
"""The socket's name in the runtime folder."""

LOOK = b"look\n"
"""The question; any other ends the connection."""

MOST_BYTES = 16 << 20
"""Of an answer: 1,024 ranks have less than one."""

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class WorldSeen:
    """A world and its workers, none before the first start.

    `at` is the agent's monotonic clock, in seconds, by which `cpu_seconds` of two answers can be
    compared; `notebook` is what Jupyter calls the notebook, "" where it does not say.
    """

    host: str
    notebook_pid: int
    notebook: str
    at: float
    pool: str = ""
    name: str = ""
    backend: str = ""
    workers: tuple[WorkerStatus, ...] = ()


def to_answer(seen: WorldSeen) -> bytes:
    """Pack it as one frame of a stream."""
    return framed(pickle.dumps(seen, protocol=5))


def seen_from(frame: bytes) -> WorldSeen:
    """Return what an agent has answered; raises BadFrame."""
    seen: WorldSeen = object_from(frame, WorldSeen)
    return seen


def user_at(end: socket.socket) -> int:
    """Return the user whose process has the other end, as the kernel says (unix(7))."""
    size = _CREDENTIALS.size
    _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)
