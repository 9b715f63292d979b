"""The protocol in which other processes of the user ask a world what it does, or for the world.

They connect to a socket in the world's runtime folder, which its agent or head answers: one
question and one answer a connection, each a line of JSON that other versions of nbdist can read.
`nbdist status`, `nbdist mcp` and `%dist_attach` ask.
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
"""The name of the socket for the questions in the runtime folder."""

ATTACH_SOCKET_PATTERN = re.compile(r"notebook-[0-9]{1,10}\.sock")
"""The names that the socket of an attaching notebook may have."""

MAX_QUESTION_BYTES, MAX_REPLY_BYTES = 1 << 16, 16 << 20
"""The most bytes of a question and of an answer; an answer about 1,024 ranks has about one MB."""


@dataclass(frozen=True, slots=True)
class Describe:
    """Ask for the world's description and its present activity; answered by `WorldInfo`."""


@dataclass(frozen=True, slots=True)
class DescribeRanks:
    """Ask for the activity of the world and of each rank; answered by a complete `WorldInfo`."""


@dataclass(frozen=True, slots=True)
class InspectRanks:
    """Ask about some ranks, or about all ranks if `ranks` is empty; answered by `Inspection`.

    `about` selects the ranks' stacks, the last `most` lines of their logs, the secrets in their
    environments, or the last tasks.  Tasks are returned for all ranks.
    """

    about: Literal["stacks", "logs", "tasks", "secrets"]
    ranks: tuple[int, ...] = ()
    most: int = 0


@dataclass(frozen=True, slots=True)
class Attach:
    """A notebook asks for the world, for as long as it keeps this connection open.

    The notebook has bound `socket` in the runtime folder, to which the agent then connects.
    Answered by `Accepted` or `AttachRefused`.
    """

    version: str
    pid: int
    socket: str


@dataclass(frozen=True, slots=True)
class WorldInfo:
    """The description of a world, or of one machine's part of a world.

    Before the first start, and for a part, there are no `workers` and no `name`.  The last four
    fields are set in the answer to `DescribeRanks` only.
    """

    version: str  # of nbdist
    host: str
    pool: str = ""
    name: str = ""
    workers: int = 0
    state: str = ""
    cell: str = ""  # the title of the running task, "" for none
    began: float = 0.0  # when the last task was sent or the world was started, since 1970
    notebook: int = 0  # the process id of the notebook that has the world, 0 for none
    since: float = 0.0  # when that notebook attached or the last one detached, since 1970
    detach: bool = False  # whether the world outlives its notebook
    guard: int = 0  # the process that ends after all others of the world
    versions: Versions = field(default_factory=dict)  # of the agent's interpreter
    notebook_name: str = ""  # its name for Jupyter's server, "" if unknown
    backend: str = ""
    at: float = 0.0  # the monotonic clock, for comparing the `cpu_seconds` of two answers
    ranks: tuple[WorkerStatus, ...] = ()


class ReportedFailure(NamedTuple):
    """A failure of a task on a rank; if `is_idle`, the rank's process died later without a task."""

    rank: int
    error: RankError
    is_idle: bool


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """A task in a world of `size` ranks, and the failures of ranks in it or after it.

    `places` has the places of ranks when a notebook last asked for them, `aborted` the places of
    ranks that were released from a collective.  Both are `Stack`s without frames.
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
    """The answer to an `InspectRanks`; only the fields about which it asked are set.

    `last` is the task that runs or ran last, `failed` the last task in or after which a rank
    failed.
    """

    stacks: tuple[Stack, ...] = ()
    logs: tuple[LogTail, ...] = ()
    last: TaskSummary | None = None
    failed: TaskSummary | None = None
    secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The world belongs to the notebook that asked; `agent` and `guard` are process ids."""

    agent: int
    guard: int


@dataclass(frozen=True, slots=True)
class AttachRefused:
    """The notebook cannot have the world; the error to the user ends with the reason `why`."""

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

# Other versions of nbdist know messages by these names, which differ from some names of classes.
_MESSAGE_NAMES: dict[Any, str] = {
    **{each: each.__name__ for each in get_args(QueryMessage)},
    DescribeRanks: "Look",
    InspectRanks: "Inquire",
    Inspection: "Findings",
    AttachRefused: "Refused",
}
_MESSAGE_TYPES = {name: each for each, name in _MESSAGE_NAMES.items()}


def to_line(message: QueryMessage) -> bytes:
    """Return a question or answer as one line of JSON."""
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
    """Connect to a socket that this user's process listens on; raises OSError.

    Each later operation on the socket may take `timeout` seconds too.
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
    """Return the user id of the process at the other end, from the kernel (unix(7))."""
    return _peer(end)[1]


def peer_process(end: socket.socket) -> int:
    """Return the id of the process that connected, or listened, at the other end.

    It is 0 for a process in another pid namespace.
    """
    return _peer(end)[0]


def _peer(end: socket.socket) -> tuple[int, ...]:
    return struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
