"""The types of the outputs of a rank, such as `Text`, `Display`, `Failure` and `Done`.

The agent of a machine makes most outputs, from the Jupyter messages of its workers and from the
text that they print.  The agent sends them to the notebook, whose `Transcript` collects them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
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
    """The amount of output that an agent or head dropped, since too much waited for the notebook.

    Dropped text is still in the rank's log file, if there is one.  `displays` counts dropped
    displays, errors and messages of widgets, which are lost.
    """

    characters: int
    lines: int
    displays: int = 0

    def __add__(self, other: Skipped) -> Skipped:
        lines, displays = self.lines + other.lines, self.displays + other.displays
        return Skipped(self.characters + other.characters, lines, displays)


def plain_of(data: MimeBundle) -> str:
    """Return the text that stands for a display in a terminal, in most cases its text/plain.

    The text/plain of `display(Markdown(x))` only names the class.  In this case, or if text/plain
    is empty, return the display's source, such as the Markdown text.  If there is no source that
    people can read, return text/plain, or the display's mime types if text/plain is empty.
    """
    text = text_of(data.get("text/plain", ""))
    # The text of `display(Markdown(x))` only names the class, so the source is returned instead.
    if text and not _NAME_OF_A_CLASS.fullmatch(text):
        return text
    if source := next(readable_in(data), None):
        return text_of(data[source.kind])
    kinds = ", ".join(kind for kind in data if kind != "text/plain")
    return text or (f"<{kinds}>" if kinds else "")


def text_of(value: object) -> str:
    """Return the content of one mime type as a string.

    A list of lines is joined.  Other JSON is written as text, and cut if it is long.
    """
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return "".join(value)
    if isinstance(value, dict | list):
        text = json.dumps(value, default=str)
        return text if len(text) <= _LONGEST_JSON else f"{text[:_LONGEST_JSON]}…"
    return str(value)


class Display(NamedTuple):
    """Rich output, such as a figure or a table, of `display(x)` or of a cell's last expression.

    `data` has the content by mime type.  `is_result` is True for the value of a last expression.
    `display_id` is None for a display that cannot be updated later.
    """

    data: MimeBundle
    metadata: MimeBundle
    display_id: str | None = None
    is_result: bool = False


def model_of(display: Display) -> str:
    """Return the id of the model of the widget that a display shows; "" if it shows no widget."""
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
    """An exception that was raised on the rank, and that has in most cases ended the cell there.

    `traceback` may have ANSI colours.  `kinds` names the exception's class and its base classes,
    each as `module:qualified.name`; it may be empty for errors that nbdist itself reports.  The
    lines of `account` advise how to repair the error, or, if memory ran out, say what used it; most
    errors have none.

    `connections` tells whether the exception was raised because the rank's connections were closed.
    It is "ended" if an abort or another rank closed them, "timed out" if gloo closed them because a
    collective took too long or a machine could not be reached, and "" for all other exceptions.
    """

    name: str
    message: str
    traceback: tuple[str, ...]
    time_ns: int
    kinds: tuple[str, ...] = ()
    connections: ConnectionLoss = ""
    account: tuple[str, ...] = ()


NAME_PROBLEM, SCRIPT_FAILED, LEFT_DEBUGGER = "VariableError", "ScriptFailed", "BdbQuit"
"""The `Failure.name` of three kinds of failures that nbdist reports in its own words.

In this order: a variable could not be bound or fetched; a script exited with a code that is not 0;
the user left the debugger, which ends the task.
"""

IGNORES_STOP = "it ignored Stop"
TO_BE_RESTARTED = "its restart was requested"


class Died(NamedTuple):
    """The rank's process has exited, was killed, or was on a machine that is lost.

    `exit_code` is negative for a signal, and None if not known, as on a lost machine.  `last_lines`
    are the last lines that the process wrote.  `why` says why the agent killed the process, or that
    the machine is lost; in other cases it is "".  `received_too_much` is True if gloo ended the
    process because another rank sent more bytes than the tensor of this rank holds.
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

    `operation` is the collective, or `backward` or `wait`.  `line` is the line of the cell that led
    to it; it is 0 if no line of a cell did so, as in a script.  Each pair in `parts` names what the
    collective was writing: ("gradients", "model") are the gradients of the variable `model`, and
    ("", "x") is the variable `x`.  The second text is "" if no variable is known to hold the
    tensor.
    """

    operation: str
    line: int
    parts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The rank has finished the task after `seconds`; only late output can follow.

    The agent reads `failure`, `error_number` and `unfit`; the notebook does not.
    """

    status: Literal["ok", "error", "aborted"]
    seconds: float
    bound: frozenset[str] = frozenset()  # the names that the task has bound
    # By bound name: the import path of a module, function or class, such as `numpy` or
    # `torch.nn:Linear`.  The path is "" if an import would not give the same object.  Functions and
    # classes that cells have defined are left out.
    imported: Mapping[str, str] = field(default_factory=dict)
    # A `Payload` of the values that the notebook asked for.  If the task failed, a `Payload` of the
    # arguments and attributes of the exception.
    values: object = None
    failure: Failure | None = None  # the error that ended the task
    error_number: int = 0  # the number of the message with the traceback, 0 if none was sent
    changed: tuple[str, ...] = ()  # files of imported modules, edited since their import
    gone: frozenset[str] = frozenset()  # the names that the task has deleted
    received: bool = True  # False if the task ended before the names sent with it were bound
    # The size in bytes of the cell's last value, if the rank keeps the value instead of sending it.
    # 0 if the rank neither sends nor keeps the value.  None if the value was sent, is None, or was
    # not wanted.
    kept: int | None = None
    # By name of a bound variable: whether its value is a module, an optimizer or a tensor, as one
    # of the numbers `MODULE`, `OPTIMIZER` and so on of `nbdist.values.payload`.
    kinds: Mapping[str, int] = field(default_factory=dict)
    # Names such as `rank`, which each worker defines, and to which the task gave another value.
    covered: frozenset[str] = frozenset()
    unfit: str = ""  # the reason why the agent must kill the process
    dead: tuple[int, ...] = ()  # keys of notebook objects whose counterparts no longer exist here
    lost: tuple[int, ...] = ()  # keys of counterparts that this rank changed before they ended
    gained: tuple[int, ...] = ()  # keys of objects that came from another rank or from a file
    steps: int = 0  # optimizer steps that have begun
    is_in_step: bool = False  # True if the last step has not ended
    incomplete: Incomplete | None = None  # variables that an aborted collective wrote in part
    # If the task has succeeded: ranks that did not run the task, although they are members of a
    # group in which the task has called a collective.
    outside: tuple[int, ...] = ()

    @property
    def made(self) -> frozenset[str]:
        """The bound names that are not in `imported`: only the cell can make their values again."""
        return self.bound - self.imported.keys()

    def __reduce__(self) -> tuple[type[Done], tuple[Any, ...]]:
        # Pickling by this method is faster than by the `__getstate__` of a dataclass with slots.
        return Done, _fields_of_done(self)


_fields_of_done = attrgetter(*(each.name for each in fields(Done)))


class Record(NamedTuple):
    """A record of Python's `logging` in a worker; `created` is its time in seconds since 1970.

    `exception` and `stack` are texts, "" if the record has none.
    """

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
    """The rank waits for a line that the user types, as in `input()` or `getpass()`.

    The reply to the rank has the same `number`.
    """

    number: int
    prompt: str
    secret: bool = False
    by_debugger: bool = False


class ItemsWanted(NamedTuple):
    """The rank asks for more items of `World.map`; the reply has the same `number`.

    `outcomes` has the outcome of each item that was done since the last request.  If the outcomes
    are big, a rank sends a request before it has done all of its items.
    """

    number: int
    outcomes: tuple[ItemOutcome, ...] = ()


class ItemOutcome(NamedTuple):
    """The outcome of an item of `World.map`: its result, or the exception of the function.

    `item` is the index of the item, from 0.  `failure` is None if the function has returned, and
    its result could be sent.  `values` is a `Payload` of the result, or of the exception's
    arguments and attributes; it is None if the result could not be sent.
    """

    item: int
    values: object = None
    failure: Failure | None = None


class Typed(NamedTuple):
    """The line that the user typed for a rank that waited for input; "" if the input is secret."""

    text: str


class Comm(NamedTuple):
    """A Jupyter comm message between a widget of a rank and its model on the page.

    `id` names the model.  Only the first message, which opens the model, has a `target`.
    """

    kind: CommKind
    id: str
    data: MimeBundle
    metadata: MimeBundle
    buffers: tuple[bytes, ...] = ()
    target: str = ""


class TransferProgress(NamedTuple):
    """How far values of the rank's task are packed or sent: `done` of `total` bytes."""

    done: int
    total: int


class Tracked(NamedTuple):
    """Numbers that the rank has passed to `track`, as points of curves.

    `curves` has the points of each name as a flat tuple, `OF_POINT` numbers for each point: the
    step, the count of finite numbers merged into the point, their lowest, their highest, their
    mean, and the count of other numbers (NaN, infinity).

    If a name was tracked without a step, the steps count its calls in the task, and `counted` has
    the number of calls so far.
    """

    curves: Mapping[str, tuple[float, ...]]
    counted: Mapping[str, int]


class Warned(NamedTuple):
    """A warning of nbdist about the ranks of the cell, which the head of the panel shows."""

    text: str


OF_POINT = 6

MAX_STEP = 2e18
"""The largest step that `track` accepts.

A time in nanoseconds since 1970 is smaller, so it can be a step.  The difference of two steps fits
in 64 bits.
"""

MIN_STEP_WIDTH = 1e-9
"""The least width of a merged point in steps; a step divided by much less could be infinite."""

MOVED_TYPE, RECORD_TYPE = "nbdist_moved", "nbdist_record"
TRACKED_TYPE, WARNED_TYPE = "nbdist_tracked", "nbdist_warned"
"""The types of Jupyter messages with a `TransferProgress`, `Record`, `Tracked` or `Warned`."""

TOPIC = b"nbdist"
"""The ZeroMQ topic of messages from workers to their agent, which subscribes to it."""

Visible = Text | Skipped | Display | DisplayUpdate | Clear | Failure
"""Outputs that change what a panel shows as printed lines, displays or an error."""

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
"""The types of numbers in JSON; `size_of` counts all numbers in a list at once.

Counting them one by one would be slow, since the JSON of a figure has very many.  None counts as a
number, since it is a gap in a curve.
"""


def size_of(output: Output) -> int:
    """Return about how many characters an output has, to bound the memory of queued outputs.

    Return 0 for most outputs that are never dropped, such as `Done`.
    """
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
    length, waiting = 0, [value]  # no recursion: deeply nested JSON would exceed Python's limit
    while waiting:
        match waiting.pop():
            case str(text):
                length += len(text)
            case dict(mapping):
                length += OF_VALUE * len(mapping)
                waiting.extend(mapping.values())
            case list(values):
                # Count the numbers of a list at once: the loop would be slow for a figure's many
                # numbers.
                others = [each for each in values if type(each) not in NUMBERS]
                length += OF_VALUE * (len(values) - len(others))
                waiting.extend(others)
            case _:
                length += OF_VALUE
    return length
