"""The types of the outputs of a rank, such as `Text`, `Display`, `Failure` and `Done`.

A worker's agent makes outputs, mostly from the worker's Jupyter messages and the text that the
worker writes, and sends the outputs to the notebook, whose `Transcript` collects them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from nbdist.output.mimes import WIDGET, readable_in
from nbdist.words import word_exit

StreamName = Literal["stdout", "stderr"]
MimeBundle = Mapping[str, Any]
ConnectionLoss = Literal["", "ended", "timed out"]
CommKind = Literal["comm_open", "comm_msg", "comm_close"]
COMMS: tuple[CommKind, ...] = get_args(CommKind)

_NAME_OF_A_CLASS = re.compile(r"<IPython\.(?:core\.|lib\.)?display\.\w+ object>")
_LONGEST_JSON = 2000


class Text(NamedTuple):
    """Characters that were written to a stream, control characters included."""

    stream: StreamName
    text: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """Output that was dropped because the notebook was too slow; its text is only in the log."""

    characters: int
    lines: int
    displays: int = 0

    def __add__(self, other: Skipped) -> Skipped:
        lines, displays = self.lines + other.lines, self.displays + other.displays
        return Skipped(self.characters + other.characters, lines, displays)


def plain_of(data: MimeBundle) -> str:
    """Return a text for a bundle, mostly its text/plain.

    If the text/plain is empty, or only the name of a class of IPython, return the bundle's source,
    such as Markdown.  Without such a source, return the mime types instead of an empty text.
    """
    text = text_of(data.get("text/plain", ""))
    if text and not _NAME_OF_A_CLASS.fullmatch(text):  # unlike for `display(Markdown("**done**"))`
        return text
    if source := next(readable_in(data), None):
        return text_of(data[source.kind])
    kinds = ", ".join(kind for kind in data if kind != "text/plain")
    return text or (f"<{kinds}>" if kinds else "")


def text_of(value: object) -> str:
    """Return a mime value as one string: the value is a string, lines, or JSON, cut if long."""
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
    """Return the id of the model if the display shows a widget, else ""."""
    view = display.data.get(WIDGET)
    return str(view.get("model_id", "")) if isinstance(view, Mapping) else ""


class DisplayUpdate(NamedTuple):
    """New content for every display that has this id."""

    data: MimeBundle
    metadata: MimeBundle
    display_id: str


class Clear(NamedTuple):
    """A call of `clear_output(wait)`: drop the output so far, at once or before the next output."""

    wait: bool


class Failure(NamedTuple):
    """An exception of the rank, which mostly ended the cell; `traceback` has ANSI colours.

    `kinds` are the class and its bases, as `module:qualified.name`.  `connections` is "ended" if
    the connections to other ranks were closed because collectives were aborted or a rank died, and
    "timed out" if gloo closed them after a collective's timeout.  After an error for lack of memory
    the lines of `account` say what used the memory.
    """

    name: str
    message: str
    traceback: tuple[str, ...]
    time_ns: int
    kinds: tuple[str, ...] = ()
    connections: ConnectionLoss = ""
    account: tuple[str, ...] = ()


NAME_PROBLEM, SCRIPT_FAILED, LEFT_DEBUGGER = "VariableError", "ScriptFailed", "BdbQuit"
"""Names of failures without an exception of the user's code.

A variable could not be bound or fetched, a script exited with a code that is not 0, or the user
left the debugger, which ends the task.
"""

IGNORES_STOP = "it ignored Stop"
TO_BE_RESTARTED = "its restart was requested"


class Died(NamedTuple):
    """The rank's process has exited, was killed, or was on a machine that is lost.

    `exit_code` is negative for a signal, and None if not known, as on a lost machine.  `last_lines`
    are the last lines that the process wrote.  `why` says why the agent killed the process, or that
    the machine is lost, else "".  `received_too_much` is True if gloo ended the process, since a
    message had more bytes than the rank's tensor holds.
    """

    exit_code: int | None
    time_ns: int
    pid: int = 0
    last_lines: tuple[str, ...] = ()
    why: str = ""
    received_too_much: bool = False

    @property
    def by_stop(self) -> bool:
        """Whether the agent killed the process because the process ignored Stop."""
        return self.why == IGNORES_STOP

    @property
    def by_restart(self) -> bool:
        """Whether the process was killed because the user asked for the restart of its rank."""
        return self.why == TO_BE_RESTARTED

    @property
    def end(self) -> str:
        """How the process ended, in words: `was killed by SIGKILL`."""
        if self.by_stop:
            return "ignored Stop and was killed"
        if self.exit_code is None:
            return "was lost"
        return word_exit(self.exit_code)


class Incomplete(NamedTuple):
    """Variables that may hold a part of the result of an aborted collective.

    `line` is the line of the cell that called the collective, 0 if no cell did, as in a script.

    `parts` are pairs of a part, "" for all, and the variable's name: ("gradients", "model").  The
    name is "" if no variable is known to hold the tensor.
    """

    operation: str
    line: int
    parts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The rank has finished the task after `seconds`; only late output can follow.

    `bound` are the names that the task bound.  `imported` are the names of modules, functions and
    classes among them, with the path to import each from: `numpy`, `torch.nn:Linear`, or "" if an
    import would not give the object.  `gone` are the names that the task deleted.  `values` is a
    `Payload` of the values that the notebook asked for, or of the contents of the exception.  From
    worker to agent `failure` is the error that ended the task, and `error_number` the number of the
    message with its traceback, 0 if none was sent.  `changed` names files of imported modules that
    were edited after their import.  `received` is False if the task ended before the rank had bound
    the names sent with the task.  `kept` is the size in bytes of a last value that the rank keeps,
    0 for a last value that is neither kept nor sent, and else None.  `kinds` has the kinds of
    modules, optimizers and tensors (see `nbdist.values.payload`).  `covered` are names that every
    worker defines, such as `rank`, and that the task has bound to another value.  `unfit` says why
    the agent must kill the process, or is "".  `dead` are the keys of the notebook's objects that
    have ended on the rank, and `lost` the keys of such objects that the rank had changed.  `gained`
    are the keys of objects that the rank received from another rank or read from a file.  `steps`
    counts the optimizer steps begun; `is_in_step` is True if the last step has not ended.
    `incomplete` names the variables that an aborted collective has partly written.
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
        """The bound names that are not imported: only the cell can make their values again."""
        return self.bound - self.imported.keys()


class Record(NamedTuple):
    """A formatted record of a logger in the worker; `created` is its time in seconds since 1970."""

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


class ItemsWanted(NamedTuple):
    """The rank asks for items of `World.map`; the reply has the same number.

    `outcomes` has the outcome of each item that was done since the last request.  If the outcomes
    are big, a rank sends a request before it has done all of its items.
    """

    number: int
    outcomes: tuple[ItemOutcome, ...] = ()


class ItemOutcome(NamedTuple):
    """The outcome of an item of `World.map`: its result, or the exception of the function.

    `item` counts the items from 0.  `values` is a `Payload` of the result, or of the contents of
    the exception; None if the result could not be sent.
    """

    item: int
    values: object = None
    failure: Failure | None = None


class Typed(NamedTuple):
    """The line that the user typed for a rank that waited for input; "" if the input is secret."""

    text: str


class Comm(NamedTuple):
    """A Jupyter comm message between a widget of a rank and its model on the page.

    `id` names the model; only the message that opens the model has a `target`.
    """

    kind: CommKind
    id: str
    data: MimeBundle
    metadata: MimeBundle
    buffers: tuple[bytes, ...] = ()
    target: str = ""


class TransferProgress(NamedTuple):
    """The rank has packed `done` of `total` bytes of the values that it returns."""

    done: int
    total: int


class Tracked(NamedTuple):
    """Numbers that the rank has tracked, by name: `OF_POINT` numbers for each point of a curve.

    A point is its step, the count of finite numbers merged into it, the lowest and the highest of
    them, their mean, and the count of other numbers (NaN, infinity).  The steps of names in
    `counted` are calls of `track` in the task; `counted` has the number of calls so far.
    """

    curves: Mapping[str, tuple[float, ...]]
    counted: Mapping[str, int]


class Warned(NamedTuple):
    """A warning of nbdist about the ranks of the cell, which the head of the panel shows."""

    text: str


OF_POINT = 6

MAX_STEP = 2e18
"""The largest step of `track`: a time in ns is less, and the difference of steps fits 64 bits."""

MIN_STEP_WIDTH = 1e-9
"""The least width of a point of merged steps, so that a step divided by a width is finite."""

MOVED_TYPE, RECORD_TYPE = "nbdist_moved", "nbdist_record"
TRACKED_TYPE, WARNED_TYPE = "nbdist_tracked", "nbdist_warned"
"""Types of Jupyter messages with a `TransferProgress`, a `Record`, a `Tracked` or a `Warned`."""

TOPIC = b"nbdist"
"""The topic that an agent subscribes to, and that workers give to the messages for the agent."""

Visible = Text | Skipped | Display | DisplayUpdate | Clear | Failure
"""Outputs that people see."""

RankError = Failure | Died
"""An exception, or the exit of the process, that ended a task on a rank."""

Output = (
    Visible
    | Died
    | Done
    | TransferProgress
    | Record
    | Tracked
    | Warned
    | InputRequest
    | ItemsWanted
    | Typed
    | Comm
)

OF_EACH, OF_VALUE = 100, 32
"""Characters that `size_of` adds for most outputs, and for each number or key of JSON."""

NUMBERS = frozenset((int, float, type(None)))
"""Types that JSON figures have very many of; None is a gap in a figure."""


def size_of(output: Output) -> int:
    """Return about how many characters an output has; 0 for a `Done` and other uncounted kinds."""
    match output:
        case Text(text=text):
            return len(text)
        case Display(data, metadata) | DisplayUpdate(data, metadata):
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
        case TransferProgress() | Clear():
            return OF_EACH
        case _:
            return 0


def _length(value: object) -> int:
    length, waiting = 0, [value]  # no recursion, since JSON may be nested to any depth
    while waiting:
        match waiting.pop():
            case str(text):
                length += len(text)
            case dict(mapping):
                length += OF_VALUE * len(mapping)
                waiting.extend(mapping.values())
            case list(values):
                # Figures have very many numbers, so all are counted at once.
                others = [each for each in values if type(each) not in NUMBERS]
                length += OF_VALUE * (len(values) - len(others))
                waiting.extend(others)
            case _:
                length += OF_VALUE
    return length
