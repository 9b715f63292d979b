"""What other processes of the user ask of a world: whose it is, to take it over, how it is.

Its door and its window are sockets in the runtime folder, at which an agent (or the head of many)
answers.  At the door lines of JSON with plain values are said, which other versions of nbdist can
read too.  At the window there is one question, of `nbdist top` and `nbdist status`, one kind of
answer, and nothing that could change anything.  Each side makes nothing of the other's bytes but
what stands here.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import struct
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from nbdist.wire.frames import BadFrame, fits, framed, object_from
from nbdist.wire.spec import Versions
from nbdist.wire.views import WorkerStatus

# --- the door ---------------------------------------------------------------------------------


DOOR = "door.sock"
"""The socket's name in the runtime folder."""

SOCKET = re.compile(r"notebook-[0-9]{1,10}\.sock")
"""What the socket of a notebook may be called that takes a world over."""

LONGEST_LINE = 1 << 16


@dataclass(frozen=True, slots=True)
class Who:
    """Whose world is it, and what is it doing?  Answered by `Held`."""


@dataclass(frozen=True, slots=True)
class Attach:
    """A notebook of this version wants the world, and has bound this socket in the folder.

    Answered by `Admitted` or `Refused`; it has the world for as long as the connection lasts.
    """

    version: str
    pid: int
    socket: str


@dataclass(frozen=True, slots=True)
class Held:
    """A world: `notebook` has it, a process, 0 where none does, since `since` on the clock.

    `cell` is what it runs, a line, "" for nothing; `began` when that was sent, or the world
    was started.  Before the first start there are no `workers` and no `name`.  `guard` is the
    process that ends last, once nothing is left of the world.  `versions` are those of the
    interpreter that the world was started with.
    """

    version: str
    host: str
    pool: str
    name: str
    workers: int
    state: str
    cell: str
    began: float
    notebook: int
    since: float
    detach: bool
    guard: int
    versions: Versions = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The world is this notebook's; `guard` as in `Held`."""

    agent: int
    guard: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Somebody has the world, or nobody can have it now; `why` says it in a sentence."""

    why: str


Said = Who | Attach | Held | Admitted | Refused

_KINDS: dict[str, Any] = {each.__name__: each for each in (Who, Attach, Held, Admitted, Refused)}


def to_line(said: Said) -> bytes:
    """Write it as one line."""
    return json.dumps({type(said).__name__: asdict(said)}).encode() + b"\n"


def from_line(line: bytes) -> Said:
    """Read what was said; raises BadFrame."""
    try:
        ((name, values),) = json.loads(line).items()
        # Another version may say more.
        known = {each.name for each in fields(_KINDS[name])}
        said: Said = _KINDS[name](**{key: values[key] for key in known & values.keys()})
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadFrame(f"{type(error).__name__}: {error}"[:200]) from error
    if not fits(said, type(said)):
        raise BadFrame(f"it is no {name}")
    return said


# --- the window -------------------------------------------------------------------------------


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
