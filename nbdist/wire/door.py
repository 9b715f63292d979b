"""What other processes of the user ask of a world: what it is, how its ranks are, to take it over.

An agent (or the head of many) answers at one socket in the runtime folder: one question a
connection, one answer, each a line of JSON with plain values, which other versions of nbdist can
read too.  Each side makes nothing of the other's bytes but what stands here.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from nbdist.wire.frames import BadFrame, built, fits
from nbdist.wire.spec import Versions
from nbdist.wire.views import WorkerStatus

DOOR = "world.sock"
"""The socket's name in the runtime folder."""

SOCKET = re.compile(r"notebook-[0-9]{1,10}\.sock")
"""What the socket of a notebook may be called that takes a world over."""

LONGEST_QUESTION = 1 << 16

MOST_BYTES = 16 << 20
"""Of an answer: 1,024 ranks have about one."""

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Describe:
    """What is the world, and what is it doing?  Answered by `WorldInfo`."""


@dataclass(frozen=True, slots=True)
class Look:
    """The same, and what is each of its ranks doing?  Answered by `WorldInfo`."""


@dataclass(frozen=True, slots=True)
class Attach:
    """A notebook of this version wants the world, and has bound this socket in the folder.

    Answered by `Accepted` or `Refused`; it has the world for as long as the connection lasts.
    """

    version: str
    pid: int
    socket: str


@dataclass(frozen=True, slots=True)
class WorldInfo:
    """A world: `notebook` has it, a process, 0 where none does, since `since` on the clock.

    `cell` is what it runs, a line, "" for nothing; `began` when that was sent, or the world
    was started.  Before the first start there are no `workers` and no `name`, and never for an
    agent that is a part of a world.  `guard` is the process that ends last, once nothing is
    left of the world.  `versions` are those of the interpreter that the world was started with.

    The last four answer `Look` alone.  `at` is the agent's monotonic clock, in seconds, by which
    `cpu_seconds` of two answers can be compared; `notebook_name` is what Jupyter calls the
    notebook, "" where it does not say.
    """

    version: str
    host: str
    pool: str = ""
    name: str = ""
    workers: int = 0
    state: str = ""
    cell: str = ""
    began: float = 0.0
    notebook: int = 0
    since: float = 0.0
    detach: bool = False
    guard: int = 0
    versions: Versions = field(default_factory=dict)
    notebook_name: str = ""
    backend: str = ""
    at: float = 0.0
    ranks: tuple[WorkerStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The world is this notebook's; `guard` as in `WorldInfo`."""

    agent: int
    guard: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Somebody has the world, or nobody can have it now; `why` says it in a sentence."""

    why: str


Said = Describe | Look | Attach | WorldInfo | Accepted | Refused

_KINDS: dict[str, Any] = {each.__name__: each for each in get_args(Said)}


def to_line(said: Said) -> bytes:
    """Write it as one line."""
    return json.dumps({type(said).__name__: said}, default=_fields_of).encode() + b"\n"


def from_line(line: bytes) -> Said:
    """Read what was said; raises BadFrame."""
    try:
        ((name, values),) = json.loads(line).items()
        said: Said = built(values, _KINDS[name])
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise BadFrame(f"{type(error).__name__}: {error}"[:200]) from error
    if not fits(said, _KINDS[name]):
        raise BadFrame(f"it is no {name}")
    return said


def _fields_of(said: Any) -> dict[str, Any]:
    return {each.name: getattr(said, each.name) for each in fields(said)}


# --- who is there -----------------------------------------------------------------------------


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
