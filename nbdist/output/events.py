"""What one rank shows, in the order in which it showed it; Jupyter messages become these."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from nbdist.words import word_exit

StreamName = Literal["stdout", "stderr"]
MimeBundle = Mapping[str, Any]
Connections = Literal["", "ended", "timed out"]
CommKind = Literal["comm_open", "comm_msg", "comm_close"]
COMMS: tuple[CommKind, ...] = get_args(CommKind)

_NAME_OF_A_CLASS = re.compile(r"<IPython\.(?:core\.|lib\.)?display\.\w+ object>")
_READABLE = ("text/markdown", "text/latex", "application/json", "application/geo+json")
_LONGEST_JSON = 2000


class Text(NamedTuple):
    """Characters written to a stream, with whatever control characters they hold."""

    stream: StreamName
    text: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """Text, which is only in the log, and displays that the notebook was too slow for."""

    characters: int
    lines: int
    displays: int = 0

    def __add__(self, other: Skipped) -> Skipped:
        lines, displays = self.lines + other.lines, self.displays + other.displays
        return Skipped(self.characters + other.characters, lines, displays)


def plain_of(data: MimeBundle) -> str:
    """Read its text/plain; its source where that is the name of a class, else its kinds."""
    text = text_of(data.get("text/plain", ""))
    if text and not _NAME_OF_A_CLASS.fullmatch(text):  # as for `display(Markdown("**done**"))`
        return text
    if (source := next((data[kind] for kind in _READABLE if kind in data), None)) is not None:
        return text_of(source)
    kinds = ", ".join(kind for kind in data if kind != "text/plain")
    return text or (f"<{kinds}>" if kinds else "")


def text_of(value: object) -> str:
    """Read a mime value as one string; notebooks may hold lists of lines, JSON is any object."""
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return "".join(value)
    if isinstance(value, dict | list):
        text = json.dumps(value, default=str)
        return text if len(text) <= _LONGEST_JSON else f"{text[:_LONGEST_JSON]}…"
    return str(value)


class Display(NamedTuple):
    """A figure, a table, HTML: `display(x)`, or the value of the last expression."""

    data: MimeBundle
    metadata: MimeBundle
    display_id: str | None = None
    is_result: bool = False


def model_of(display: Display) -> str:
    """Return the id of the widget's model that it shows, "" for something else."""
    view = display.data.get(WIDGET)
    return str(view.get("model_id", "")) if isinstance(view, Mapping) else ""


class Update(NamedTuple):
    """New content for every display that has this id."""

    data: MimeBundle
    metadata: MimeBundle
    display_id: str


class Clear(NamedTuple):
    """`clear_output(wait)`: forget what was shown, at once or with the next output."""

    wait: bool


class Failure(NamedTuple):
    """An exception that ended the rank's cell; `traceback` has ANSI colours.

    `kinds` are its class and its bases, as `module:qualified.name`.  The `connections` to other
    ranks have "ended", since collectives were aborted or a rank has died, or gloo closed them when
    a collective "timed out".  `account` is lines on what used the memory that was not enough.
    """

    name: str
    message: str
    traceback: tuple[str, ...]
    time_ns: int
    kinds: tuple[str, ...] = ()
    connections: Connections = ""
    account: tuple[str, ...] = ()


NAME_PROBLEM, SCRIPT_FAILED, LEFT_DEBUGGER = "VariableError", "ScriptFailed", "BdbQuit"
"""`Failure.name` where a variable could not be bound or fetched, a script ended with an exit code
that is not 0, or the user left the debugger, which ends the task."""

IGNORES_STOP = "it ignored Stop"


class Died(NamedTuple):
    """The rank's process ended.

    `exit_code` is negative for a signal, None where its machine is lost; `last_lines` are what it
    wrote last; `why` says why its agent has ended it, "" if it did not.  With `received_too_much`
    gloo did, for a message of more bytes than the rank's tensor holds.
    """

    exit_code: int | None
    time_ns: int
    pid: int = 0
    last_lines: tuple[str, ...] = ()
    why: str = ""
    received_too_much: bool = False

    @property
    def by_stop(self) -> bool:
        """Whether it was ended because Stop had no effect on it."""
        return self.why == IGNORES_STOP

    @property
    def end(self) -> str:
        """How it ended, as a verb: `was killed by SIGKILL`."""
        if self.by_stop:
            return "ignored Stop and was killed"
        if self.exit_code is None:
            return "was lost"
        return word_exit(self.exit_code)


class Incomplete(NamedTuple):
    """Variables that may hold a part of the result of an aborted collective.

    `line` is the line of the cell that called it, 0 if no cell did, such as in a script.

    `parts` are pairs of a part and the name of its variable: ("", "x"), ("gradients", "model").
    The name is "" if no variable is known to hold the tensor.
    """

    operation: str
    line: int
    parts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The rank has finished the cell, whose source ran for `seconds`; nothing of it follows.

    `bound` are the names that the cell bound, `imported` those of them that are modules or come
    from some, and from where (`numpy`, `torch.nn:Linear`, "" where it cannot be found there);
    `gone` are those that it deleted.  `values` is what it was asked to bring back, or what the
    exception has that ended it, a `Payload`.  From worker to agent `failure` is what ended it, and
    `error_number` that of the message with the traceback, 0 if none was sent.  `changed` are files
    of imported modules that were edited since.  Without `received` it was stopped before it had
    bound the names that came along.  `kept` is the bytes of the cell's last value where the rank
    keeps it, 0 of a value that does not come back, else None.  `kinds` tells modules, optimizers
    and tensors (`nbdist.values.payload`);
    `covered` are names that each worker has of itself, and that are something else now.  `unfit`
    says why the process is of no more use.  `dead` are the keys of objects that the notebook has
    sent and that have ended on the rank, `lost` those that the rank had changed, `gained`
    the keys of objects that the rank has got from another rank or from a file.  `steps` counts the
    optimizer steps that it has begun; `is_in_step` is True if the last of them has not ended.
    `incomplete` names variables into which an aborted collective has written, if any.
    """

    status: Literal["ok", "error", "aborted"]
    seconds: float
    bound: frozenset[str] = frozenset()
    imported: Mapping[str, str] = field(default_factory=dict)
    values: object = None
    failure: Failure | None = None
    error_number: int = 0
    changed: tuple[str, ...] = ()
    gone: frozenset[str] = frozenset()
    received: bool = True
    kept: int | None = None
    kinds: Mapping[str, int] = field(default_factory=dict)
    covered: frozenset[str] = frozenset()
    unfit: str = ""
    dead: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    gained: tuple[int, ...] = ()
    steps: int = 0
    is_in_step: bool = False
    incomplete: Incomplete | None = None

    @property
    def made(self) -> frozenset[str]:
        """The names that nothing but the cell can give back."""
        return self.bound - self.imported.keys()


class Record(NamedTuple):
    """What a logger of the worker has logged; `created` is seconds, all texts are formatted."""

    host: str
    local_rank: int
    rank: int
    name: str
    level: int
    level_name: str
    message: str
    created: float
    pathname: str
    line: int
    function: str
    thread: str
    pid: int
    exception: str = ""
    stack: str = ""


class InputRequest(NamedTuple):
    """The rank waits for a typed line: `input()`, `getpass()`; the reply has the same number."""

    number: int
    prompt: str
    secret: bool = False
    by_debugger: bool = False


class Typed(NamedTuple):
    """What was typed for the rank that waited for it, as it is shown: "" where it is secret."""

    text: str


class Comm(NamedTuple):
    """What a widget of a rank and its model on the page say to one another, as Jupyter has it.

    `target` is of the message that opens the model, which its `id` names.
    """

    kind: CommKind
    id: str
    data: MimeBundle
    metadata: MimeBundle
    buffers: tuple[bytes, ...] = ()
    target: str = ""


class Moved(NamedTuple):
    """Of what the rank brings back so many bytes of so many have been packed."""

    done: int
    total: int


class Tracked(NamedTuple):
    """Numbers that the rank has tracked, by name: `OF_POINT` for each point of the curve.

    These are its step, how many finite numbers it is made of, the lowest, the highest and their
    mean, and how many others (NaN, infinity).  The steps of `counted` names are calls in the task:
    it has the number of calls up to now.
    """

    curves: Mapping[str, tuple[float, ...]]
    counted: Mapping[str, int]


class Warned(NamedTuple):
    """What nbdist has found out about the ranks of the cell: the head of the panel says so."""

    text: str


OF_POINT = 6

MAX_STEP = 2e18
"""The largest step: the difference of two steps fits 64 bits, and so does a time in ns."""

MIN_STEP_WIDTH = 1e-9
"""The fewest steps that a point of merged steps covers: dividing by it never overflows."""

MOVED, RECORD = "nbdist_moved", "nbdist_record"
TRACKED, WARNED = "nbdist_tracked", "nbdist_warned"
"""The kinds of messages in which a worker sends these."""

WIDGET = "application/vnd.jupyter.widget-view+json"
"""The kind of data by which a display shows a widget, whose model the page has."""

TOPIC = b"nbdist"
"""Under which a worker publishes all that its agent waits for, whatever its sender's topic."""

Visible = Text | Skipped | Display | Update | Clear | Failure
"""What people get to see."""

RankError = Failure | Died
"""What ended a task on a rank otherwise than well."""

Output = Visible | Died | Done | Moved | Record | Tracked | Warned | InputRequest | Typed | Comm

OF_EACH, OF_VALUE = 100, 32
"""Characters that one counts for besides those that it has, and a number or key of JSON."""

NUMBERS = frozenset((int, float, type(None)))
"""By their types, which are faster to look at; None is a gap in a figure."""


def size_of(output: Output) -> int:
    """Count characters, of what can have many."""
    match output:
        case Text(text=text):
            return len(text)
        case Display(data, metadata) | Update(data, metadata):
            return OF_EACH + _length([data, metadata])
        case Record(message=message, exception=exception, stack=stack):
            return OF_EACH + len(message) + len(exception) + len(stack)
        case Failure(message=message, traceback=frames):
            return OF_EACH + len(message) + sum(map(len, frames))
        case Tracked(curves=curves):
            return OF_EACH + OF_VALUE * sum(map(len, curves.values()))
        case Comm(data=data, buffers=buffers):
            return OF_EACH + _length(data) + sum(map(len, buffers))
        case Warned(text=text):
            return OF_EACH + len(text)
        case Moved() | Clear():
            return OF_EACH
        case _:
            return 0


def _length(value: object) -> int:
    length, waiting = 0, [value]  # not by recursion: JSON can be as deep as its sender likes
    while waiting:
        match waiting.pop():
            case str(text):
                length += len(text)
            case dict(mapping):
                length += OF_VALUE * len(mapping)
                waiting.extend(mapping.values())
            case list(values):
                # Figures have very many numbers.
                others = [each for each in values if type(each) not in NUMBERS]
                length += OF_VALUE * (len(values) - len(others))
                waiting.extend(others)
            case _:
                length += OF_VALUE
    return length
