"""What an agent shows to other processes of its user: `nbdist top` and `nbdist status`.

Through a socket of its own in the runtime folder: one question, one kind of answer, and nothing
that could change anything.  Each side makes nothing of the other's bytes but what stands here.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from nbdist.wire.frames import framed, object_from
from nbdist.wire.views import WorkerStatus

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


def connect_to(path: Path, timeout: float) -> socket.socket:
    """Connect to a socket of this user's; raises OSError where there is none.

    Whatever is done with it takes `timeout` seconds at most.
    """
    end = socket.socket(socket.AF_UNIX)
    try:
        end.settimeout(timeout)
        end.connect(os.fsencode(path))
        if user_at(end) != os.geteuid():
            raise PermissionError(f"{path} is another user's")
    except BaseException:
        end.close()
        raise
    return end


def user_at(end: socket.socket) -> int:
    """Return the user whose process has the other end, as the kernel says (unix(7))."""
    return _credentials(end)[1]


def process_at(end: socket.socket) -> int:
    """Return the process that has the other end, or listened there; 0 in another pid namespace."""
    return _credentials(end)[0]


def _credentials(end: socket.socket) -> tuple[int, int, int]:
    size = _CREDENTIALS.size
    process, user, group = _CREDENTIALS.unpack(
        end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return int(process), int(user), int(group)
