"""What ranks are to do and what they say of it: tasks, and marks in a worker's stdout.

A worker writes text to its stdout, a pipe that the agent reads: what it wrote before it died is
there, and C code, child processes and Python share one order.  Figures and errors travel over
iopub; the worker first writes a mark with the message's number where it belongs in the text.

A mark is an APC escape sequence (ECMA-48 8.3.2), which terminals ignore, with a token that no
output has by chance.  It is shorter than PIPE_BUF: the kernel writes it in one piece.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, cast

from nbdist.output.events import Done, Failure, InputRequest
from nbdist.values.payload import Payload, Places, SegmentRef, moved, refs_in
from nbdist.wire.frames import NOTHING, BadFrame, fits, object_from, unpack
from nbdist.words import error_line

Kind = Literal["file", "module", "executable"]


BLANK_HEAD = re.compile(r"\A(?:[ \t\f]*\n)+")
"""Blank lines at the beginning of a cell: IPython drops them, and counts from the next."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a cell holds; "" where names are only bound, or values asked for."""

    text: str = ""


@dataclass(frozen=True, slots=True)
class Script:
    """A script, module or executable; `name` is how it was called: `train.py`, `pkg.mod`.

    `file` is where the notebook has found it ("" for a module that is no file), `near` where it
    lies below the notebook's folder ("" outside of it), which other machines can have elsewhere.
    `root` is the folder of the script's own code; with `local_rank` it gets `--local-rank=N` first.
    """

    kind: Kind
    name: str
    args: tuple[str, ...] = ()
    file: str = ""
    root: str = ""
    local_rank: bool = False
    near: str = ""
    op: ClassVar[str] = "run.script"

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What that gets."""
        return {"program": self}


class Call(NamedTuple):
    """Call `snapshot.write` or another op; `arguments` are plain data, the user's a `Payload`."""

    op: str
    arguments: Mapping[str, Any] = NOTHING


Work = Source | Script | Call


class Surroundings(NamedTuple):
    """What has changed around the notebook since the start: its `folder`, which was `first`.

    `sys_path` is None where it is the same; `environ` has None for variables that were removed.
    """

    folder: str
    first: str
    sys_path: tuple[str, ...] | None = None
    environ: Mapping[str, str | None] = NOTHING


@dataclass(frozen=True, slots=True)
class Attempt:
    """How often the same has been run before, and how often it may be run again in all."""

    number: int = 0
    most: int = 0


@dataclass(frozen=True, slots=True)
class Task:
    """Work for some ranks at once.

    `names` has by rank what the notebook sends it: variables to bind first, and changes of objects
    (`nbdist.values.linked`).  `plain` is a pickled mapping to bind instead.  `forget` has by rank
    the keys of objects that have ended in the notebook, `deleted` variables that it has deleted.
    The values of the expressions in `fetch`, or what an op returns, become `Done.values`.
    From `log_level` on the notebook handles records of the ranks' `logging`, None for none.
    `imports` has for new ranks what others have imported, as `Done.imported`.  By
    `execution_count` tracebacks say `Cell In[5]`; `key` is the front end's id of the cell, "" for
    none.  With `keeps` the last value comes back, or stays there under the task's `id` where it is
    big; with `brings_small` it comes back only if it is small.  `around` is None where nothing has
    changed around the notebook.
    """

    id: str
    ranks: tuple[int, ...]
    work: Work = Source()
    names: Mapping[int, Payload] = field(default_factory=dict)
    plain: Payload | None = None
    fetch: tuple[str, ...] = ()
    attempt: Attempt = Attempt()
    log_level: int | None = None
    imports: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    forget: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    deleted: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    execution_count: int | None = None
    key: str = ""
    keeps: bool = False
    brings_small: bool = False
    around: Surroundings | None = None

    @property
    def source(self) -> str:
        """The text of a cell, "" where it is none; its lines are counted as IPython does."""
        return BLANK_HEAD.sub("", self.work.text) if isinstance(self.work, Source) else ""

    @property
    def script(self) -> Script | None:
        """The script, where it is one."""
        return self.work if isinstance(self.work, Script) else None

    @property
    def title(self) -> str:
        """The first line of it that says something; a script's name, an op's."""
        match self.work:
            case Source(text):
                lines = (line.strip() for line in text.splitlines())
                return next((line for line in lines if line and not line.startswith("# %")), "")
            case Script(name=name, args=args):
                return " ".join([name, *args])
            case Call(op):
                return op

    @property
    def segments(self) -> tuple[SegmentRef, ...]:
        """The shared memory that has its big values."""
        given = self.work.arguments if isinstance(self.work, Call) else None
        return refs_in((self.names, self.plain, given))

    def moved(self, places: Places) -> Task:
        """Return it for workers for whom that memory is in these places."""
        work = self.work
        if isinstance(work, Call):
            work = work._replace(arguments=moved(work.arguments, places))
        names, plain = moved(self.names, places), moved(self.plain, places)
        return replace(self, names=names, plain=plain, work=work)


def task_from(frame: bytes) -> Task:
    """Unpack a task."""
    task: Task = unpack(frame)
    return task


class InputReply(NamedTuple):
    """What was typed for this `InputRequest`, None for the end of input; or why there is none."""

    number: int
    text: str | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SigintSent:
    """SIGINT was sent before this, and is for no task that comes after it."""


@dataclass(frozen=True, slots=True)
class CommSent:
    """What a page says to a widget went by the kernel's own channel before the next task."""


def failure_in_words(name: str, message: str) -> Failure:
    """Return a failure from outside the cell's code, as one line."""
    return Failure(name, message, (error_line(name, message),), time.time_ns())


MOST_BYTES = 64 << 20
"""Of what a worker says of a task; what it brings back goes through shared memory."""


class Finished(NamedTuple):
    """Worker to agent: the end of a task, and its number among the messages with marks."""

    number: int
    task_id: str
    done: Done


class CatchUp(NamedTuple):
    """Worker to agent: an `InputReply` is wanted once all has been taken in that came before."""

    number: int


Said = Finished | InputRequest | CatchUp
"""What a worker says of its tasks, by its number among what has marks."""


def said_from(frame: bytes) -> Said:
    """Return what a worker has said of its task; raises BadFrame."""
    said: Said = object_from(frame, Said, Payload)
    if isinstance(said, Finished) and not fits(said.done.values, Payload | None):
        raise BadFrame("what it brings back is no payload")
    return said


# --- marks ------------------------------------------------------------------------------------

Mark = int | Literal["up", "ready", "stdout", "stderr"]
"""A message's number; or `up`: the worker's kernel is bound; `ready`: and its group formed; or
the stream that the text which follows belongs to."""


def mark(token: str, value: Mark) -> bytes:
    """Make the bytes to write to stdout."""
    return f"\x1b_{token};{value}\x1b\\".encode()


def mark_pattern(token: str) -> re.Pattern[bytes]:
    """Make a pattern that finds marks; group 1 is the value."""
    return re.compile(rb"\x1b_" + token.encode() + rb";([a-z]{1,6}|[0-9]{1,18})\x1b\\")


LONGEST_MARK = 80
"""Bytes; what is held back at most of a read that ends in the middle of a mark."""


def cut_off_pattern(token: str) -> re.Pattern[bytes]:
    """Make a pattern that finds the beginning of a mark at the end of a read."""
    start = f"_{token};"
    begun = "".join(f"(?:{letter}" for letter in start)
    return re.compile(rf"\x1b{begun}[a-z0-9]{{0,18}}\x1b?{')?' * len(start)}\Z".encode())


def mark_value(text: bytes) -> Mark:
    """Read the value of a mark from what `mark_pattern` found."""
    return int(text) if text.isdigit() else cast("Mark", text.decode())
