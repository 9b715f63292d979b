"""The protocol by which other processes of the user ask about a world, or attach to the world.

The processes connect to a socket in the world's runtime folder, where the agent or head answers.
A connection is for one question and one answer, each a line of JSON that other versions of nbdist
can read.  `nbdist status`, `nbdist mcp` and `%dist_attach` ask.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from nbdist.output.events import RankError
from nbdist.wire.frames import BadFrame, fits, from_plain, to_plain
from nbdist.wire.log_files import LogTail
from nbdist.wire.places import Stack
from nbdist.wire.spec import Versions
from nbdist.wire.status import WorkerStatus

QUERY_SOCKET = "world.sock"
"""The name, in the runtime folder, of the socket to which questions are sent."""

ATTACH_SOCKET_PATTERN = re.compile(r"notebook-[0-9]{1,10}\.sock")
"""The names that the socket of an attaching notebook may have."""

MAX_QUESTION_BYTES, MAX_REPLY_BYTES = 1 << 16, 16 << 20
"""The most bytes of a question and of an answer; an answer about 1,024 ranks has about one MB."""


@dataclass(frozen=True, slots=True)
class Describe:
    """Ask for the description and the present activity of the world; answered by `WorldInfo`."""


@dataclass(frozen=True, slots=True)
class DescribeRanks:
    """Ask for the activity of the world and of each rank; answered by a complete `WorldInfo`."""


@dataclass(frozen=True, slots=True)
class InspectRanks:
    """Ask about some ranks, or about all ranks if `ranks` is empty; answered by `Inspection`.

    `about` selects the ranks' stacks, at most `most` last lines of each log, the secrets in the
    ranks' environments, or the world's last tasks, for which `ranks` does not matter.  If
    `about` is "logs" and the ranks are very many, the answer lacks the logs of some.
    """

    about: Literal["stacks", "logs", "tasks", "secrets"]
    ranks: tuple[int, ...] = ()
    most: int = 0


@dataclass(frozen=True, slots=True)
class Attach:
    """Attach a notebook to the world; answered by `Accepted` or `AttachRefused`.

    The notebook has the world as long as it keeps this connection open.  The notebook has bound
    the socket with the name `socket` in the runtime folder; the agent or head connects to it.
    """

    version: str
    pid: int
    socket: str


@dataclass(frozen=True, slots=True)
class WorldInfo:
    """The description of a world, or of one machine's part of a world.

    `workers`, `pool` and `name` are not set before the first start.  `notebook_name`, `backend`,
    `at` and `ranks` are set only in the answer to `DescribeRanks`.  If a world has several
    machines, the agent of each describes its machine's part: it sets only `version` and `host`, and
    in the answer to `DescribeRanks` also `pool`, `name`, `notebook_name`, `backend`, `at` and
    `ranks`.
    """

    version: str  # the version of nbdist
    host: str
    pool: str = ""
    name: str = ""
    workers: int = 0
    state: str = ""
    cell: str = ""  # the beginning of the title of the newest running task, "" for none
    began: float = 0.0  # when the last task was sent or the world was started; seconds since 1970
    notebook: int = 0  # the process id of the notebook that has the world, 0 for none
    # When the notebook got the world, or the last notebook detached, in seconds since 1970.
    since: float = 0.0
    detach: bool = False  # whether the world outlives its notebook
    guard: int = 0  # the id of the process that exits after all others of the world
    versions: Versions = field(default_factory=dict)  # versions of Python and packages in the agent
    notebook_name: str = ""  # the notebook's name for Jupyter's server, "" if unknown
    backend: str = ""
    at: float = 0.0  # the monotonic time of the answer, to compare the `cpu_seconds` of two answers
    ranks: tuple[WorkerStatus, ...] = ()


class ReportedFailure(NamedTuple):
    """A failure of a rank during a task, or if `is_idle` is True, after the end of the task."""

    rank: int
    error: RankError
    is_idle: bool


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """A task in a world of `size` ranks, and the failures of ranks in the task or after it.

    `places` has the last known places of ranks, and `aborted` the places of ranks that were
    released from a collective.  Both have `Stack` objects without frames.
    """

    title: str
    cell: int | None
    ranks: tuple[int, ...]
    size: int
    began_ns: int
    troubles: tuple[ReportedFailure, ...]
    places: tuple[Stack, ...] = ()
    aborted: tuple[Stack, ...] = ()


@dataclass(frozen=True, slots=True)
class Inspection:
    """The answer to an `InspectRanks`; only the fields that the question is about are set.

    `last` is the task that runs or ran last, `failed` the last task in which, or after which, a
    rank failed.
    """

    stacks: tuple[Stack, ...] = ()
    logs: tuple[LogTail, ...] = ()
    last: TaskSummary | None = None
    failed: TaskSummary | None = None
    secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The answer to `Attach`: the notebook has the world now; the fields are process ids."""

    agent: int
    guard: int


@dataclass(frozen=True, slots=True)
class AttachRefused:
    """The answer to `Attach` if the notebook cannot have the world; `why` is for the user."""

    why: str


QueryMessage = (
    Describe
    | DescribeRanks
    | InspectRanks
    | Attach
    | WorldInfo
    | Inspection
    | Accepted
    | AttachRefused
)

# The name of each message in JSON.  Other versions of nbdist send and read the same names, so a
# class that was renamed keeps its earlier name here.
_MESSAGE_NAMES: dict[Any, str] = {
    **{each: each.__name__ for each in get_args(QueryMessage)},
    DescribeRanks: "Look",
    InspectRanks: "Inquire",
    Inspection: "Findings",
    AttachRefused: "Refused",
}
_MESSAGE_TYPES = {name: each for each, name in _MESSAGE_NAMES.items()}


def to_line(message: QueryMessage) -> bytes:
    """Return a question or answer as a line of JSON, for `from_line` in another process."""
    return json.dumps({_MESSAGE_NAMES[type(message)]: to_plain(message)}).encode() + b"\n"


def from_line(line: bytes) -> QueryMessage:
    """Return the question or answer in a line of JSON; raises BadFrame for anything else."""
    try:
        ((name, values),) = json.loads(line).items()
        message: QueryMessage = from_plain(values, _MESSAGE_TYPES[name])
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise BadFrame(f"{type(error).__name__}: {error}"[:200]) from error
    if not fits(message, _MESSAGE_TYPES[name]):
        raise BadFrame(f"it is no {name}")
    return message


def connect_to(path: Path, timeout: float) -> socket.socket:
    """Return a connection to the socket at `path`, on which a process of this user listens.

    Connecting, and each later operation on the connection, may take at most `timeout` seconds.
    Raises OSError, also if the process that listens belongs to another user.
    """
    end = socket.socket(socket.AF_UNIX)
    try:
        end.settimeout(timeout)
        end.connect(os.fsencode(path))
        if peer_user(end) != os.geteuid():
            raise PermissionError(f"{path} is another user's")
    except BaseException:
        end.close()
        raise
    return end


def peer_user(end: socket.socket) -> int:
    """Return the user id of the process at the other end, which Linux has recorded (unix(7))."""
    return _peer(end)[1]


def peer_process(end: socket.socket) -> int:
    """Return the id of the process that connected, or listened, at the other end.

    Returns 0 if that process is in a pid namespace that this process cannot see.
    """
    return _peer(end)[0]


def _peer(end: socket.socket) -> tuple[int, ...]:
    return struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
