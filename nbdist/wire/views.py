"""What can be seen of a world from outside while its ranks are busy: place, stack, status, logs.

Agents make these records; the notebook and the terminal's commands show them.  The last part is the
protocol in which other processes of the user ask a world at a socket in its runtime folder: one
question and one answer a connection, each a line of JSON that other versions of nbdist can read.
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
"""The beginning of a path in a library's folder, which is not shown."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective: number `number` of its group; `began_ns` is in nanoseconds since 1970."""

    name: str
    number: int
    is_done: bool
    began_ns: int = 0

    def __str__(self) -> str:
        return f"{self.name} #{self.number}"


@dataclass(frozen=True, slots=True)
class Begun:
    """A collective that a rank has begun in its cell: number `number` of its `group`.

    Only tensors that must be alike on all ranks of the group are described: `sizes` as in
    `[2] [3, 4]`, `dtypes` by torch's names in C++ ("Float"), `elements` as in `2 12`.
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
    """Where a rank is in its cell or script, and what tells whether it can go on.

    Made by the worker's probe, or by its agent for a worker that does not answer.
    """

    line: int = 0  # of the cell, or of the script's `file`; 0 if unknown
    operation: str = ""  # the collective that the rank waits in, "" if it does something else
    counts: Mapping[str, int] = field(default_factory=dict)  # by group: collectives begun
    moved: int = 0  # bytes that gloo's connections have carried
    in_flight: int = 0  # packets of gloo that the other end has not acknowledged
    # Connections on which packets do not arrive: pairs of addresses, the rank's own one first.
    stalled: tuple[tuple[str, str], ...] = ()
    is_calm: bool = False  # True if none of gloo's threads is running
    unfinished: int = 0  # collectives that seem to have begun and not ended
    holds_gil: bool = False  # C code holds the GIL: at most `line`, `operation`, `file` are known
    is_stopped: bool = False  # the process is stopped, as by SIGSTOP
    file: str = ""  # the name of the script, "" for a cell
    code: str = ""  # the text of `line` in the script
    begun: tuple[Begun, ...] = ()  # the last collectives, of a waiting or idle rank only
    # True if another thread or a GPU, and not only another rank, may end the rank's wait.
    has_help: bool = False
    is_cleaning_up: bool = False  # an `except` or `finally` runs because of Stop
    has_taken_sigint: bool = False  # the task has got a SIGINT, or has a handler of its own for it
    asks: bool = False  # the rank waits for input

    @property
    def is_in_code(self) -> bool:
        """Whether the rank may be in the user's code; else its task is beginning or ending."""
        known = self.line or self.file or self.operation
        return bool(known) or self.holds_gil or self.is_stopped


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One call of a stack.

    `file` is a path or `Cell In[5]`; `code` is the source of the line, "" if unknown.
    """

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def lines(self) -> list[str]:
        """The lines with which Python's tracebacks show the call."""
        where = f"  {PACKAGES.sub('', self.file)}, line {self.line}"
        if self.function != "<module>":
            where += f", in {self.function}"
        return [where, f"    {self.code}"] if self.code else [where]

    @property
    def is_cell(self) -> bool:
        """Whether the call is in a cell of the notebook."""
        return self.file.startswith("Cell In[")


@dataclass(frozen=True, slots=True)
class Stack:
    """The calls of a rank's main thread, the cell's first and the innermost last.

    `problem` says why there are no calls to show, "" if there are, or the rank runs nothing.
    """

    rank: int
    pid: int
    state: RankState
    place: Place
    frames: tuple[StackFrame, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's memory in bytes, used by all processes, and its utilisation in per cent.

    `busy` is None if the driver does not tell, as for a MIG slice.
    """

    used: int
    total: int
    busy: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources of one worker: memory in bytes (PSS), and its GPU, None if unknown."""

    memory: int
    gpu: Gpu | None = None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A row of `%dist_status`: one worker as its agent sees it."""

    rank: int
    pid: int
    host: str
    state: RankState
    busy_seconds: float  # since its task began, 0.0 if idle
    memory: int  # bytes, as PSS: of a page that n processes share 1/n
    device: str
    place: Place | None = None  # of a busy rank, or of an idle one that is stuck or stopped
    code: str = ""  # the source of the place's line
    collective: Collective | None = None  # the last one, None if unknown
    gpu: Gpu | None = None
    cpu_seconds: float = 0.0  # of all threads since the process started
    cell: int | None = None  # the execution count of a busy rank's cell
    last_line: str = ""  # the last line of output, unchanged


# --- the ends of ranks' logs ------------------------------------------------------------------

# Agents read log files for notebooks on other machines.  A notebook reads those of its own machine
# itself, since log files outlive the agent.

MOVED, ATTEMPT = "[nbdist: what stood before this line was moved to ", "attempt_"
"""The beginning of the first line of a log file whose earlier lines were moved to another file, and
the beginning of the name of a folder with the files of one start of the workers."""

BLOCK, PAGE, LONGEST = 1 << 16, 1 << 20, 1 << 14
"""Bytes that are read at once, bytes of lines that end an answer, and bytes kept of a line."""


class GetLogs(NamedTuple):
    """Read the last `most` lines of these ranks' logs; answered by a tuple of `LogTail`.

    Long lines are fewer: `PAGE` bytes end an answer.  `attempt` is None for the present start of
    the workers.  With `end`, the `start` of an earlier answer, the lines before it are read.
    """

    ranks: tuple[int, ...]
    streams: tuple[str, ...]
    most: int
    attempt: int | None = None
    end: int | None = None


class LogTail(NamedTuple):
    """Lines of a rank's log; `file` is "" if the rank has no log files.

    `start` is where the first line begins, in bytes from the beginning of the file with the earlier
    lines.  `attempts` are the starts of the workers of which there are files.  `is_cut` is True if
    the rank wrote more than its files contain.
    """

    rank: int
    stream: str
    file: str = ""
    lines: tuple[str, ...] = ()
    start: int = 0
    attempts: tuple[int, ...] = ()
    is_cut: bool = False


CUT_MARK = "cut"
"""The name of an empty file beside a log that could not be written, as on a full disk."""


def read_logs(folders_of: Mapping[int, Path | None], get: GetLogs) -> tuple[LogTail, ...]:
    """Read the requested log lines; `folders_of` has the log folder of each rank, None for none."""
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
    """Return the last lines of a log before `end`, and where the first of them begins.

    Lines of the earlier file count too.
    """
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
    """Yield the offset and bytes of each line before `end`, from the last to the first.

    Long lines lose their beginning (`LONGEST`).
    """
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
    """Return the first line of a log file that follows a full one, now named `earlier`."""
    allowed = f"NBDIST_LOG_LIMIT allows {limit >> 20} MiB"
    return f"{MOVED}{earlier.name}, in the place of what had been moved there: {allowed}]\n"


def renumbered_line(earlier: Path, rank: int) -> str:
    """Return the first line of the log file of a worker whose rank has changed."""
    return f"[nbdist: this was rank {rank} until now, and wrote to {earlier}]\n"


def earlier_file(file: Path) -> Path:
    """Return the path of the file with the lines before those of a log file."""
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
    """The values of a rank's environment variables that are secrets, judged by their names."""

    rank: int
    values: tuple[str, ...]


# --- questions of other processes to a world --------------------------------------------------

DOOR = "world.sock"
"""The name of the socket for these questions in the runtime folder."""

SOCKET = re.compile(r"notebook-[0-9]{1,10}\.sock")
"""The names that the socket of an attaching notebook may have."""

LONGEST_QUESTION, MOST_BYTES = 1 << 16, 16 << 20
"""The most bytes of a question and of an answer; an answer about 1,024 ranks has about one MB."""


@dataclass(frozen=True, slots=True)
class Describe:
    """Which world is it, and what is it doing?  Answered by `WorldInfo`."""


@dataclass(frozen=True, slots=True)
class Look:
    """What are the world and each of its ranks doing?  Answered by a complete `WorldInfo`."""


@dataclass(frozen=True, slots=True)
class Inquire:
    """What is known about these ranks, or about all ranks if `ranks` is empty?

    Answered by `Findings`: the ranks' stacks, the last `most` lines of their logs, the secrets in
    their environments, or the last tasks, which are always those of all ranks.
    """

    about: Literal["stacks", "logs", "tasks", "secrets"]
    ranks: tuple[int, ...] = ()
    most: int = 0


@dataclass(frozen=True, slots=True)
class Attach:
    """A notebook asks for the world, for as long as it keeps this connection open.

    The notebook has bound `socket` in the runtime folder, to which the agent then connects.
    Answered by `Accepted` or `Refused`.
    """

    version: str
    pid: int
    socket: str


@dataclass(frozen=True, slots=True)
class WorldInfo:
    """A world, or one machine's part of it.

    Before the first start, and for a part, there are no `workers` and no `name`.  The last four
    fields are set in the answer to `Look` only.
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
    notebook_name: str = ""  # as Jupyter's server calls it, "" if unknown
    backend: str = ""
    at: float = 0.0  # the monotonic clock, for comparing the `cpu_seconds` of two answers
    ranks: tuple[WorkerStatus, ...] = ()


class Trouble(NamedTuple):
    """A failure of a task on a rank; if `is_idle`, the rank's process died later without a task."""

    rank: int
    error: RankError
    is_idle: bool


@dataclass(frozen=True, slots=True)
class TaskSeen:
    """A task in a world of `size` ranks, and the failures of ranks in it or after it.

    `places` has where ranks were when a notebook last asked, `aborted` where ranks were that were
    released from a collective.  Their `Stack`s have no frames.
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
    """The answer to an `Inquire`; only the fields that it asked about are set.

    `last` is the task that runs or ran last, `failed` the last one in or after which a rank failed.
    """

    stacks: tuple[Stack, ...] = ()
    logs: tuple[LogTail, ...] = ()
    last: TaskSeen | None = None
    failed: TaskSeen | None = None
    secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The world belongs to the notebook that asked; `agent` and `guard` are process ids."""

    agent: int
    guard: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The notebook cannot have the world; the error to the user ends with the reason `why`."""

    why: str


Said = Describe | Look | Inquire | Attach | WorldInfo | Findings | Accepted | Refused

_KINDS: dict[str, Any] = {each.__name__: each for each in get_args(Said)}


def to_line(said: Said) -> bytes:
    """Return a question or answer as one line of JSON."""
    return json.dumps({type(said).__name__: plain(said)}).encode() + b"\n"


def from_line(line: bytes) -> Said:
    """Return the question or answer in a line of JSON; raises BadFrame for anything else."""
    try:
        ((name, values),) = json.loads(line).items()
        said: Said = built(values, _KINDS[name])
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise BadFrame(f"{type(error).__name__}: {error}"[:200]) from error
    if not fits(said, _KINDS[name]):
        raise BadFrame(f"it is no {name}")
    return said


def connect_to(path: Path, timeout: float) -> socket.socket:
    """Connect to a socket that this user's process listens on; raises OSError.

    Each later operation on the socket may take `timeout` seconds too.
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
    """Return the user id of the process at the other end, from the kernel (unix(7))."""
    return _peer(end)[1]


def process_at(end: socket.socket) -> int:
    """Return the id of the process that connected, or listened, at the other end.

    It is 0 for a process in another pid namespace.
    """
    return _peer(end)[0]


def _peer(end: socket.socket) -> tuple[int, ...]:
    return struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
