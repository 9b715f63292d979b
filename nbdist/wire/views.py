"""What can be seen of a world from outside while ranks run anything: place, stack, status, logs.

And what other processes of the user ask of a world, at one socket in the runtime folder: one
question a connection, one answer, each a line of JSON that other versions of nbdist can read, too.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain, product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from nbdist.output.events import RankError
from nbdist.wire.frames import BadFrame, built, fits, plain
from nbdist.wire.spec import Versions

RankState = Literal["starting", "idle", "busy", "dead"]

PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/|^.*/lib/python3\.\d+/(?=[^/]+)")
"""What stands before a library's own path."""


@dataclass(frozen=True, slots=True)
class Collective:
    """`number` counts the collectives of its group."""

    name: str
    number: int
    is_done: bool
    began_ns: int = 0

    def __str__(self) -> str:
        return f"{self.name} #{self.number}"


@dataclass(frozen=True, slots=True)
class Begun:
    """A collective that a rank has begun in its cell: the one with this `number` of its `group`.

    `sizes`, `dtypes` (torch's in C++: "Float") and `elements`, which counts them, are of the
    tensors of which all ranks of the group have to have the same: `[2] [3, 4]`, `2 12`.
    """

    group: str
    number: int
    name: str
    sizes: str = ""
    dtypes: str = ""
    elements: str = ""
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank that runs a cell is.

    `line` of the cell, or of a script's `file` with its text in `code`, 0 where unknown;
    `operation` is the collective it waits for, "" if it does something else; `counts` has by group
    how many collectives it has begun, `moved` the bytes that its connections have carried,
    `in_flight` the packets that have yet to arrive; `stalled` the pairs of addresses, the own one
    first, between which none of these arrives.  `is_calm`: none of gloo's threads has anything to
    do.  `unfinished` counts collectives that seem to have begun and not ended.  `holds_gil`: C code
    does, so nothing more is known, unless the line is.  `is_stopped`: by SIGSTOP or such.  `begun`
    are a waiting or idle rank's last collectives; `has_help`: another thread or a GPU may act for
    it.  `is_cleaning_up`: an `except` or `finally` runs because of Stop.  `has_taken_sigint`: the
    code has got a SIGINT since it began, and is not stuck in C code.  `asks`: for typed input.
    """

    line: int = 0
    operation: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    moved: int = 0
    in_flight: int = 0
    stalled: tuple[tuple[str, str], ...] = ()
    is_calm: bool = False
    unfinished: int = 0
    holds_gil: bool = False
    is_stopped: bool = False
    file: str = ""
    code: str = ""
    begun: tuple[Begun, ...] = ()
    has_help: bool = False
    is_cleaning_up: bool = False
    has_taken_sigint: bool = False
    asks: bool = False

    @property
    def is_in_code(self) -> bool:
        """Whether it is, or may be, in what it was given to run; else it reports its end."""
        known = self.line or self.file or self.operation
        return bool(known) or self.holds_gil or self.is_stopped


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One call; `file` as people know it (`Cell In[5]`), `code` the line's source if known."""

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def lines(self) -> list[str]:
        """As Python's tracebacks show a call."""
        where = f"  {PACKAGES.sub('', self.file)}, line {self.line}"
        if self.function != "<module>":
            where += f", in {self.function}"
        return [where, f"    {self.code}"] if self.code else [where]

    @property
    def is_cell(self) -> bool:
        """Whether it is in a cell of the notebook."""
        return self.file.startswith("Cell In[")


@dataclass(frozen=True, slots=True)
class Stack:
    """The main thread's calls from the cell inwards, innermost last; or a busy rank's `problem`."""

    rank: int
    pid: int
    state: RankState
    place: Place
    frames: tuple[StackFrame, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's memory in bytes, of all processes, and per cent of the time that it is at work."""

    used: int
    total: int
    busy: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What one worker uses: memory in bytes (PSS), and its GPU where that can be read."""

    memory: int
    gpu: Gpu | None = None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as its agent sees it; memory in bytes (PSS: shared pages count in part).

    A busy one has a `place` and its line's `code`, and its `cell`'s number; `collective` is its
    last, None if unknown; `cpu_seconds` are of all of its threads, `last_line` is as written.
    """

    rank: int
    pid: int
    host: str
    state: RankState
    busy_seconds: float
    memory: int
    device: str
    place: Place | None = None
    code: str = ""
    collective: Collective | None = None
    gpu: Gpu | None = None
    cpu_seconds: float = 0.0
    cell: int | None = None
    last_line: str = ""


# --- the ends of ranks' logs ------------------------------------------------------------------

# Agents read them for notebooks on other machines; a notebook reads those of its own machine, which
# outlive the agent.

MOVED, ATTEMPT = "[nbdist: what stood before this line was moved to ", "attempt_"
"""Begin the first line of a file whose earlier lines are in another, and the name of a folder with
the files of one start of the workers."""

BLOCK, PAGE, LONGEST = 1 << 16, 1 << 20, 1 << 14
"""Bytes that are read at once, that are enough for one answer, and of a line that are shown."""


class GetLogs(NamedTuple):
    """Read the last `most` lines of these ranks' logs, fewer long ones; a tuple of `LogTail`.

    `attempt` is None for the present one; `end` is where an earlier answer began, or None.
    """

    ranks: tuple[int, ...]
    streams: tuple[str, ...]
    most: int
    attempt: int | None = None
    end: int | None = None


class LogTail(NamedTuple):
    """Lines of a rank's log, the first of which begins at `start`; without files `file` is "".

    Bytes count from where the file with the earlier lines begins.  `attempts` are the starts of
    the workers that there are files of.  With `is_cut` the rank wrote more than its files have.
    """

    rank: int
    stream: str
    file: str = ""
    lines: tuple[str, ...] = ()
    start: int = 0
    attempts: tuple[int, ...] = ()
    is_cut: bool = False


CUT_MARK = "cut"
"""An empty file beside a rank's log, once that could not be written, such as on a full disk."""


def read_logs(folders_of: Mapping[int, Path | None], get: GetLogs) -> tuple[LogTail, ...]:
    """Read what is asked for of ranks with these folders."""
    found = []
    for rank, stream in product([rank for rank in get.ranks if rank in folders_of], get.streams):
        if (folder := folders_of[rank]) is None:
            found.append(LogTail(rank, stream))
            continue
        run = folder.parent.parent  # with a folder for each attempt
        names = (each.name for each in run.glob(f"{ATTEMPT}*"))
        attempts = tuple(sorted(int(name.removeprefix(ATTEMPT)) for name in names))
        if get.attempt is not None:
            folder = run / f"{ATTEMPT}{get.attempt}" / folder.name
        file = folder / f"{stream}.log"
        lines, start = last_lines(file, get.most, get.end)
        is_cut = (folder / CUT_MARK).exists()
        found.append(LogTail(rank, stream, str(file), tuple(lines), start, attempts, is_cut))
    return tuple(found)


def last_lines(file: Path, most: int, end: int | None = None) -> tuple[list[str], int]:
    """Read the last lines of a log before `end`, and say where the first of them begins."""
    earlier = earlier_file(file)
    moved = earlier.stat().st_size if earlier.exists() else 0
    own = _backwards(file, None if end is None else end - moved)
    found: list[str] = []
    start = size = 0
    for at, line in chain(((moved + at, line) for at, line in own), _backwards(earlier, end)):
        start = at
        if moved and at >= moved and line.startswith(MOVED.encode()):
            continue
        found.append(line.decode("utf-8", "replace"))
        size += len(line)
        if len(found) == most or size > PAGE:
            break
    return found[::-1], start


def _backwards(file: Path, end: int | None) -> Iterator[tuple[int, bytes]]:
    """Read lines from the last to the first, long ones cut at their beginning; and their places."""
    with suppress(FileNotFoundError), file.open("rb") as opened:
        position = opened.seek(0, os.SEEK_END)
        position = position if end is None else max(0, min(position, end))
        rest, is_last = b"", True
        while position > 0:
            size = min(BLOCK, position)
            position -= size
            opened.seek(position)
            lines = (opened.read(size) + rest).split(b"\n")
            starts = accumulate((len(each) + 1 for each in lines), initial=position)
            found = [*zip(starts, lines, strict=False)]
            if is_last and len(found) > 1 and not lines[-1]:
                found.pop()  # the file ends with a newline
            is_last = False
            yield from reversed(found[1:])
            rest = lines[0][-LONGEST:]
        if rest or not is_last:
            yield 0, rest


def moved_line(earlier: Path, limit: int) -> str:
    """Write the first line of a file that was begun because the one before was full."""
    allowed = f"NBDIST_LOG_LIMIT allows {limit >> 20} MiB"
    return f"{MOVED}{earlier.name}, in the place of what had been moved there: {allowed}]\n"


def renumbered_line(earlier: Path, rank: int) -> str:
    """Write the first line of a file of what was another rank before."""
    return f"[nbdist: this was rank {rank} until now, and wrote to {earlier}]\n"


def earlier_file(file: Path) -> Path:
    """Name the file that has what was said before a log file begins."""
    return file.with_name(f"{file.name}.1")


# --- calls in a worker's memory ---------------------------------------------------------------

LARGEST = 4096
"""No offset is as large; what is read may come from a cell that wrote into the file."""


class CallLayout(NamedTuple):
    """Where a worker's memory has the calls of its main thread, which its agent reads there.

    Addresses of the `thread`'s state and of two types; all else are offsets in bytes.  The state
    has the innermost `call`, or, unless `holder` is 0, a pointer there to what has it.  A call has
    its `code`, the `previous` one, the `instruction` that it is at, and by its `owner` whether it
    is one of Python code.  A code object ends with its `instructions`.  The letters of an `ascii`
    text begin elsewhere than those of any `other`.
    """

    thread: int
    code_type: int
    text_type: int
    holder: int
    call: int
    code: int
    previous: int
    instruction: int
    owner: int
    file: int
    name: int
    first_line: int
    lines: int
    instructions: int
    ascii: int
    other: int

    def line(self) -> bytes:
        """Write it as one line of text."""
        return " ".join(map(str, self)).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> CallLayout:
        """Read such a line; raises ValueError where it is none."""
        thread, code_type, text_type, *offsets = map(int, line.split())
        if len(offsets) != len(cls._fields) - 3 or not all(0 <= n < LARGEST for n in offsets):
            raise ValueError("these are not the offsets of calls")
        return cls(thread, code_type, text_type, *offsets)


class RankSecrets(NamedTuple):
    """The values of a rank's environment variables whose names say that they are secrets."""

    rank: int
    values: tuple[str, ...]


# --- what other processes ask of a world ------------------------------------------------------

DOOR = "world.sock"
"""The socket's name in the runtime folder."""

SOCKET = re.compile(r"notebook-[0-9]{1,10}\.sock")
"""What the socket of a notebook may be called that takes a world over."""

LONGEST_QUESTION, MOST_BYTES = 1 << 16, 16 << 20
"""Of an answer: 1,024 ranks have about one MB."""


@dataclass(frozen=True, slots=True)
class Describe:
    """What is the world, and what is it doing?  Answered by `WorldInfo`."""


@dataclass(frozen=True, slots=True)
class Look:
    """The same, and what is each of its ranks doing?  Answered by `WorldInfo`."""


@dataclass(frozen=True, slots=True)
class Inquire:
    """More of these ranks, or all where there are none named.  Answered by `Findings`.

    `about` their stacks, the last `most` lines of their logs, the tasks that run and failed, or the
    secrets in their environment.
    """

    about: Literal["stacks", "logs", "tasks", "secrets"]
    ranks: tuple[int, ...] = ()
    most: int = 0


@dataclass(frozen=True, slots=True)
class Attach:
    """A notebook, which has bound this socket, wants the world while this connection lasts."""

    version: str
    pid: int
    socket: str


@dataclass(frozen=True, slots=True)
class WorldInfo:
    """A world: the process `notebook` has it, 0 for none, since `since` on the clock.

    `cell` is the line that it runs, "" for nothing; `began` is when that was sent, or the world was
    started.  Before the first start, and for a part of a world, there are no `workers` and no
    `name`.  `guard` is the process that ends last.  `versions` are those of its interpreter.

    The last four answer `Look` alone.  `at` is the agent's monotonic clock, in seconds, by which
    `cpu_seconds` of two answers can be compared; `notebook_name` is Jupyter's, "" for none.
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


class Trouble(NamedTuple):
    """How a task ended on a rank, with its last lines; or, if `is_idle`, its process later."""

    rank: int
    error: RankError
    is_idle: bool


@dataclass(frozen=True, slots=True)
class TaskSeen:
    """A task of these ranks, in a world of `size`, and how ranks failed in it or after it.

    `places` are where ranks were when a notebook asked last, `aborted` those that were released
    from a collective.
    """

    title: str
    cell: int | None
    ranks: tuple[int, ...]
    size: int
    began_ns: int
    troubles: tuple[Trouble, ...]
    places: tuple[Stack, ...] = ()
    aborted: tuple[Stack, ...] = ()


@dataclass(frozen=True, slots=True)
class Findings:
    """What an `Inquire` asked for; the last task, and the last one that failed, if there is any."""

    stacks: tuple[Stack, ...] = ()
    logs: tuple[LogTail, ...] = ()
    last: TaskSeen | None = None
    failed: TaskSeen | None = None
    secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The world is this notebook's; `guard` as in `WorldInfo`."""

    agent: int
    guard: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Another notebook has the world, or none can have it now; `why` says it in a sentence."""

    why: str


Said = Describe | Look | Inquire | Attach | WorldInfo | Findings | Accepted | Refused

_KINDS: dict[str, Any] = {each.__name__: each for each in get_args(Said)}


def to_line(said: Said) -> bytes:
    """Write it as one line."""
    return json.dumps({type(said).__name__: plain(said)}).encode() + b"\n"


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


def connect_to(path: Path, timeout: float) -> socket.socket:
    """Connect to a socket of this user's, for at most `timeout` seconds a use; raises OSError."""
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
    return _peer(end)[1]


def process_at(end: socket.socket) -> int:
    """Return the process that has the other end, or listened there; 0 in another pid namespace."""
    return _peer(end)[0]


def _peer(end: socket.socket) -> tuple[int, ...]:
    return struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
