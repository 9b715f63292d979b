"""What one rank shows, in the order in which it showed it, as frozen dataclasses.

A raw Jupyter message lives for one line in `nbdist.agent`, then it is one of these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nbdist.words import word_exit

StreamName = Literal["stdout", "stderr"]
MimeBundle = Mapping[str, Any]
Connections = Literal["", "ended", "timed out"]

_NAME_OF_A_CLASS = re.compile(r"<IPython\.(?:core\.|lib\.)?display\.\w+ object>")
_READABLE = ("text/markdown", "text/latex", "application/json", "application/geo+json")
_LONGEST_JSON = 2000


@dataclass(frozen=True, slots=True)
class Text:
    """Characters written to a stream, with whatever control characters they hold."""

    stream: StreamName
    text: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """Text and displays that were not sent because the notebook could not keep up.

    The text is in the rank's log file all the same.
    """

    characters: int
    lines: int
    displays: int = 0

    def __add__(self, other: Skipped) -> Skipped:
        lines, displays = self.lines + other.lines, self.displays + other.displays
        return Skipped(self.characters + other.characters, lines, displays)


def plain_of(data: MimeBundle) -> str:
    """Read its text/plain; its source where that says less, else what kinds of data it has.

    For `display(Markdown("**done**"))` IPython's text/plain is the name of a class.
    """
    text = text_of(data.get("text/plain", ""))
    if text and not _NAME_OF_A_CLASS.fullmatch(text):
        return text
    for kind in _READABLE:
        if kind in data:
            return text_of(data[kind])
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


@dataclass(frozen=True, slots=True)
class Display:
    """A figure, a table, HTML: `display(x)`, or the value of the last expression."""

    data: MimeBundle
    metadata: MimeBundle
    display_id: str | None = None
    is_result: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """New content for every display that has this id."""

    data: MimeBundle
    metadata: MimeBundle
    display_id: str


@dataclass(frozen=True, slots=True)
class Clear:
    """`clear_output(wait)`: forget what was shown, at once or with the next output."""

    wait: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended the rank's cell; `traceback` has ANSI colours.

    `kinds` are its class and those that this is derived from, as `module:qualified.name`.
    `connections` is what it says of those to other ranks: that they "ended", since collectives
    were aborted or a rank has died, that gloo closed them when a collective "timed out", or
    nothing.  `account` is lines on what the memory is used for that was not enough.
    """

    name: str
    message: str
    traceback: tuple[str, ...]
    time_ns: int
    kinds: tuple[str, ...] = ()
    connections: Connections = ""
    account: tuple[str, ...] = ()


NAME_PROBLEM = "VariableError"
"""`Failure.name` where a name that came along could not be bound, or one not be fetched."""

SCRIPT_FAILED = "ScriptFailed"
"""The same where a script or executable ended with an exit code that is not 0."""


LEFT_DEBUGGER = "BdbQuit"
"""The same where somebody left the debugger, which ends the task."""


IGNORES_STOP = "it ignored Stop"


@dataclass(frozen=True, slots=True)
class Died:
    """The rank's process ended.

    `exit_code` is negative for a signal, as in `subprocess`, and None where its machine is lost,
    and nothing more is known of it; `last_lines` is the end of all
    that it has written; `why` says why its agent has ended it, "" if it did not.  With
    `received_too_much` gloo did, for a message of more bytes than the rank's tensor holds.
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


@dataclass(frozen=True, slots=True)
class Done:
    """The rank has finished the cell; nothing of it follows.

    `bound` are the names that the cell bound in the rank, `imported` those of them that
    stand for modules or come from some, with where they do (`numpy`, `torch.nn:Linear`, ""
    where it cannot be found there); `values` is what the cell was asked to bring back, or
    what the exception has that ended it, a `Payload`, `seconds` how long its source ran.  From
    worker to agent it says by `failure` what ended it, and by `error_number` that of the error
    message that has the same with its traceback, 0 if none was sent.  `changed` are files of
    modules that the rank has imported, and that were edited since.  `gone` are names that the
    cell has deleted; without `received` it was stopped before it had bound those that came along.
    `kept` is how many bytes the cell's last value takes, where the rank has kept it for the
    notebook, None where not.  `kinds` says of those of `bound` that are modules, optimizers or
    tensors which they are (`nbdist.values.payload`), and `covered` are those that every worker has
    of itself, and that are something else now.  `unfit` says why the process is of no more use.
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

    @property
    def made(self) -> frozenset[str]:
        """The names that nothing but the cell can give back."""
        return self.bound - self.imported.keys()


@dataclass(frozen=True, slots=True)
class Record:
    """What a logger of the worker has logged, its text formatted there.

    `created` is seconds on the clock; `exception` and `stack` are texts, "" for none.
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


@dataclass(frozen=True, slots=True)
class InputRequest:
    """The rank waits for a line that somebody types: `input()`, `getpass()`, a debugger.

    `number` is its place among what the rank has shown, by which the reply finds it; of a
    `secret` one nothing is shown.
    """

    number: int
    prompt: str
    secret: bool = False
    by_debugger: bool = False


@dataclass(frozen=True, slots=True)
class Typed:
    """What was typed for the rank that waited for it, as it is shown: "" where it is secret."""

    text: str


@dataclass(frozen=True, slots=True)
class Moved:
    """Of what the rank brings back so many bytes of so many have been packed."""

    done: int
    total: int


MOVED = "nbdist_moved"
"""The kind of message in which a worker says so."""

RECORD = "nbdist_record"
"""The kind of message in which a worker sends one."""

TOPIC = b"nbdist"
"""Under which a worker publishes all that its agent waits for, whatever its sender's topic."""

Visible = Text | Skipped | Display | Update | Clear | Failure
"""What people get to see."""

RankError = Failure | Died
"""What ended a task on a rank otherwise than well."""

Output = Visible | Died | Done | Moved | Record | InputRequest | Typed

OF_EACH, OF_VALUE = 100, 32
"""Characters that one counts for besides those that it has, and a number or key of JSON."""


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
        case Moved() | Clear():
            return OF_EACH
        case _:
            return 0


_NUMBERS = (int, float)
"""Of which figures have very many."""


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
                others = [each for each in values if not isinstance(each, _NUMBERS)]
                length += OF_VALUE * (len(values) - len(others))
                waiting.extend(others)
            case _:
                length += OF_VALUE
    return length
