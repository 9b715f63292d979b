"""Tasks for ranks, the messages of workers about their tasks, and marks in a worker's stdout.

The notebook makes tasks, and agents pass tasks on to workers.  The agent reads a worker's text from
pipes, so that it also gets the text that a worker printed just before its death.  Python's stdout
and stderr share a pipe, and keep their order there; stderr of C code and child processes has
another pipe.  Figures, errors and a task's end are numbered messages.  For each message the worker
writes a mark with the message's number to stdout, so that the agent knows after which text the
message came.

A mark is an APC escape sequence (ECMA-48 8.3.2), which terminals ignore.  A mark contains a token
that no output has by chance, and is shorter than PIPE_BUF, so Linux writes the mark in one piece.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, cast

from nbdist.output.events import Done, Failure, InputRequest, ItemsWanted
from nbdist.values.payload import Payload, Places, SegmentRef, refs_in, relocate
from nbdist.wire.frames import NO_VALUES, BadFrame, fits, object_from, unpack
from nbdist.words import error_line

ProgramKind = Literal["file", "module", "executable"]


BLANK_HEAD = re.compile(r"\A(?:[ \t\f]*\n)+")
"""Matches blank lines at the beginning of a cell, which IPython does not count as lines."""


@dataclass(frozen=True, slots=True)
class CellCode:
    """The text of a cell; "" for a task that only binds variables or fetches values.

    `file` is the file name under which ranks compile the text: the name that the notebook's front
    end expects in breakpoints and stack frames.  Without a `file`, each rank chooses a name.
    """

    text: str = ""
    file: str = ""


@dataclass(frozen=True, slots=True)
class Script:
    """A script, module or executable that a rank runs in place of a cell: `train.py`, `pkg.mod`."""

    kind: ProgramKind
    name: str  # exactly the text that the user wrote
    args: tuple[str, ...] = ()
    file: str = ""  # the path on the notebook's machine; "" for a program without a file
    root: str = ""  # the folder of the script's own code
    local_rank: bool = False  # if True, the first argument is `--local-rank=N`
    # The path of `file` relative to the notebook's folder, which other machines may have elsewhere;
    # "" for a file outside of that folder.
    near: str = ""
    op: ClassVar[str] = "run.script"

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the op that runs the script."""
        return {"program": self}


class OpCall(NamedTuple):
    """A call of an op on the ranks; `op` has the names of a module and of a function in it.

    `snapshot.write` is `write` in `nbdist.worker.ops.snapshot`.  Plugins and `nbdist.tools` give
    names to their own modules by entry points, so `timeline` is `nbdist.tools.timeline_op`.  A name
    without a dot names both the module and the function.  The arguments are plain data, and values
    of the user are in a `Payload`.
    """

    op: str
    arguments: Mapping[str, Any] = NO_VALUES


Work = CellCode | Script | OpCall


class Surroundings(NamedTuple):
    """Changes in the notebook's process that ranks repeat before a task.

    These are all changes since the world started or was attached.  `folder` is the notebook's
    current folder, `first` the folder in the world's `WorldSpec`.  `sys_path` is None if it has not
    changed.  `environ` has the changed environment variables that ranks follow, with None for a
    removed variable.
    """

    folder: str
    first: str
    sys_path: tuple[str, ...] | None = None
    environ: Mapping[str, str | None] = NO_VALUES


@dataclass(frozen=True, slots=True)
class Attempt:
    """The number of an attempt of a task, 0 for the first attempt.

    `most` is how often the task may be sent again after a failure (`--max-restarts`).
    """

    number: int = 0
    most: int = 0


@dataclass(frozen=True, slots=True)
class Task:
    """Work that the notebook sends to some ranks at once."""

    id: str
    ranks: tuple[int, ...]
    work: Work = CellCode()
    # By rank: the notebook's variables, which the rank binds before the work, and changes of
    # objects that the rank already has (`nbdist.values.linked`).
    names: Mapping[int, Payload] = field(default_factory=dict)
    # A pickled mapping of variables to bind on all ranks, as plain copies: later changes in the
    # notebook do not reach the ranks.
    plain: Payload | None = None
    fetch: tuple[str, ...] = ()  # expressions, whose values ranks return in `Done.values`
    attempt: Attempt = Attempt()
    # The lowest level of the records that the ranks' `logging` sends to the notebook; None if no
    # records are sent.
    log_level: int | None = None
    # By new rank: the names to import before the work, because other ranks, or the rank's earlier
    # process, have imported them.  Each name has its import path (`Done.imported`).
    imports: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    # By rank: keys of objects that no longer exist in the notebook.
    forget: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    # By rank: variables that the notebook has deleted.
    deleted: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    execution_count: int | None = None  # the cell's number, as in `Cell In[5]` of tracebacks
    key: str = ""  # the front end's id of the cell, "" for none
    # If True, the cell's last value is returned; a big value stays on the rank, which keeps the
    # value under the task's id for a later request.
    keeps: bool = False
    brings_small: bool = False  # if True, the cell's last value is returned only if it is small
    around: Surroundings | None = None  # None if nothing has changed

    @property
    def source(self) -> str:
        """A cell's text without leading blank lines, as IPython counts lines; "" for other work."""
        return BLANK_HEAD.sub("", self.work.text) if isinstance(self.work, CellCode) else ""

    @property
    def script(self) -> Script | None:
        """The script that the task runs; None if the task runs a cell or an op."""
        return self.work if isinstance(self.work, Script) else None

    @property
    def title(self) -> str:
        """A cell's first line that is no magic, a script with its arguments, or an op's name."""
        match self.work:
            case CellCode(text):
                lines = (line.strip() for line in text.splitlines())
                return next((line for line in lines if line and not line.startswith("# %")), "")
            case Script(name=name, args=args):
                return " ".join([name, *args])
            case OpCall(op):
                return op

    @property
    def segments(self) -> tuple[SegmentRef, ...]:
        """The segments of shared memory to which the task refers."""
        given = self.work.arguments if isinstance(self.work, OpCall) else None
        return refs_in((self.names, self.plain, given))

    def moved(self, places: Places) -> Task:
        """Return the task with references to the copies in `places` in place of its segments.

        With these references, workers on the machine that has the copies can open them.
        """
        work = self.work
        if isinstance(work, OpCall):
            work = work._replace(arguments=relocate(work.arguments, places))
        names, plain = relocate(self.names, places), relocate(self.plain, places)
        return replace(self, names=names, plain=plain, work=work)

    def __reduce__(self) -> tuple[type[Task], tuple[Any, ...]]:
        # This takes only a fraction of the time of the `__getstate__` that dataclasses have.
        return Task, _fields_of_task(self)


_fields_of_task = attrgetter(*(each.name for each in fields(Task)))


def task_from(frame: bytes) -> Task:
    """Return the task from the bytes that the notebook has packed."""
    task: Task = unpack(frame)
    return task


class InputReply(NamedTuple):
    """Agent to worker: the reply to the `InputRequest`, `CatchUp` or `ItemsWanted` of this number.

    For an `InputRequest`, `text` is the typed line, or None for the end of input.  For
    `ItemsWanted`, `items` has the next items of `World.map` as pairs of index and payload, and
    `text` is "", or None if the rank gets no further items.  For both, `problem` says why nobody
    can answer the request, or is "".  For a `CatchUp`, only `number` is set.
    """

    number: int
    text: str | None = None
    problem: str = ""
    items: tuple[tuple[int, Payload], ...] = ()


@dataclass(frozen=True, slots=True)
class SigintSent:
    """Agent to worker: before this message, the agent has sent the worker a SIGINT.

    The SIGINT is for a task that was sent earlier.  If the worker has already finished that task,
    it drops the SIGINT, which would otherwise interrupt a later task.
    """


def failure_in_words(name: str, message: str) -> Failure:
    """Return a `Failure` whose traceback is a single line, for an error without calls to show."""
    return Failure(name, message, (error_line(name, message),), time.time_ns())


MAX_ITEM_BYTES = 32 << 20
"""The most bytes of an item of `World.map`, or of its result, if messages carry it to another
machine; on one machine, big values go through shared memory."""

MAX_TASK_MESSAGE_BYTES = 64 << 20
"""The most bytes of a worker's message about a task; big values go through shared memory."""


class Finished(NamedTuple):
    """Worker to agent: a task has finished; `number` is in the mark of this message."""

    number: int
    task_id: str
    done: Done


class CatchUp(NamedTuple):
    """Worker to agent: the worker waits until the agent has read all output before a mark.

    `number` is the number in the mark.  The agent answers by an `InputReply`; by then none of the
    worker's earlier output is left in a pipe.
    """

    number: int


TaskMessage = Finished | InputRequest | ItemsWanted | CatchUp
"""A message of a worker about its task; `number` is the number in the message's mark."""


def said_from(frame: bytes) -> TaskMessage:
    """Return a worker's message about its task; raises BadFrame if the frame is no such message."""
    message: TaskMessage = object_from(frame, TaskMessage, Payload)
    returned: list[object] = []
    if isinstance(message, Finished):
        returned = [message.done.values]
    elif isinstance(message, ItemsWanted):
        returned = [outcome.values for outcome in message.outcomes]
    if not all(fits(each, Payload | None) for each in returned):
        raise BadFrame("what it brings back is no payload")
    return message


# --- marks ------------------------------------------------------------------------------------

Mark = int | Literal["up", "ready", "stdout", "stderr"]
"""The value of a mark.

An int is the number of a message.  `up` says that the worker's kernel has bound its sockets, and
`ready` that the group is formed too.  `stdout` and `stderr` name the stream of the text after the
mark.
"""


def mark(token: str, value: Mark) -> bytes:
    """Return a mark with this token and value, as the bytes that a worker writes to stdout."""
    return f"\x1b_{token};{value}\x1b\\".encode()


def mark_pattern(token: str) -> re.Pattern[bytes]:
    """Return a pattern that finds marks with this token; group 1 is the value."""
    return re.compile(rb"\x1b_" + token.encode() + rb";([a-z]{1,6}|[0-9]{1,18})\x1b\\")


LONGEST_MARK = 80
"""The most bytes of a mark.

So an incomplete mark is in the last LONGEST_MARK bytes that were read."""


def cut_off_pattern(token: str) -> re.Pattern[bytes]:
    """Return a pattern that finds an incomplete mark at the end of the bytes of a read.

    The rest of the mark comes with the next read.
    """
    start = f"_{token};"
    begun = "".join(f"(?:{letter}" for letter in start)
    return re.compile(rf"\x1b{begun}[a-z0-9]{{0,18}}\x1b?{')?' * len(start)}\Z".encode())


def mark_value(text: bytes) -> Mark:
    """Return the value of a mark from group 1 of `mark_pattern`."""
    return int(text) if text.isdigit() else cast("Mark", text.decode())
