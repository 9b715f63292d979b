"""Turns the reports of ranks into results, exceptions, status tables and log records.

Runs in the notebook's process.  `TaskRun` makes the results, `nbdist.world.task_error` makes the
exceptions, `nbdist.world.inbox` passes on the log records, and the notebook's magics show tables.
"""

from __future__ import annotations

import logging
import re
import socket
import sys
import traceback
from collections import abc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nbdist.errors import NoValue, UsageError, WorkerError, bare, rebuild
from nbdist.output.ansi import strip
from nbdist.output.events import RankError, Record
from nbdist.output.transcript import Transcript
from nbdist.output.wording import clip
from nbdist.values.payload import Payload, open_payload
from nbdist.values.pickling import unpickle
from nbdist.wire.log_files import LogTail
from nbdist.wire.status import Gpu, Usage, WorkerStatus
from nbdist.wire.work import CellCode, Task
from nbdist.words import name_ranks, size_range, size_text
from nbdist.world.hangs import Who, doing_of

if TYPE_CHECKING:
    from IPython.lib.pretty import RepresentationPrinter

Names = dict[str, Any]  # the namespace of `__main__`, where unpickled values find their classes


@dataclass(frozen=True)
class Contents:
    """The arguments and attributes of an exception of a rank.

    `whole` is the exception itself, if the rank has sent it and this process can unpickle it.
    """

    args: tuple[Any, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    whole: object = None

    @classmethod
    def read(cls, packed: object, names: Names) -> Contents:
        """Unpickle what a rank has sent, and leave out attributes that cannot be unpickled.

        Returns empty `Contents` if `packed` is no `Payload`.
        """
        if not isinstance(packed, Payload):
            return cls()
        args, attributes, whole = unpickle(open_payload(packed), names)
        values = {name: _read(each, names) for name, each in attributes.items()}
        readable = {name: value for name, value in values.items() if value is not _UNREAD}
        return cls(tuple(_read(each, names) for each in args), readable, _read(whole, names))


_UNREAD = type("_Unread", (), {"__repr__": lambda _: "<not sent>"})()
"""The placeholder for a part of an exception that was not sent, or cannot be read here."""


def _read(frames: Sequence[bytes] | None, names: Names) -> Any:
    try:
        return unpickle(frames, names) if frames else _UNREAD
    except Exception:  # noqa: BLE001 (a class can raise anything while it is rebuilt)
        return _UNREAD


def as_raised(
    error: WorkerError, kinds: Iterable[str], contents: Contents | None = None
) -> WorkerError:
    """Return `error` as an instance of the rank's exception class too, if that is possible.

    Then `except ValueError` catches the result if the rank has raised ValueError.  `kinds` are the
    exception's class and its bases, as `module:qualified.name`; the first of them that was imported
    here and can be used is taken.  If no class can derive from both, return `error` itself, and set
    `error.original` to a copy of the rank's exception, if one can be made.
    """
    contents = contents or Contents()
    for original in map(_imported_class, kinds):
        if original is Exception:
            break
        if original is None or issubclass(original, BaseExceptionGroup):
            continue
        if (both := _as_both(error, original, contents)) is not None:
            return both
        error.original = _copy_of_original(error, original, contents)
        if error.original is not None:
            break
    return error


def raised(error: WorkerError) -> BaseException:
    """Return the exception to raise for an error: the error itself if it has no `original`.

    If it has, return `original`, with the error's text as a note.
    """
    if (original := error.original) is None:
        return error
    # The exception's class may refuse to have attributes set.
    attributes: dict[str, Any] = object.__getattribute__(original, "__dict__")
    attributes["__notes__"] = [str(error), *getattr(error, "__notes__", ())]
    return original


def _imported_class(name: str) -> type[Exception] | None:
    """Return the exception class `module:qualified.name`; None if it was not imported here."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, type) and issubclass(value, Exception) else None


def _as_both(
    error: WorkerError, original: type[Exception], contents: Contents
) -> WorkerError | None:
    """Return the error as an instance of `original` too; None if no class can derive from both."""
    kind, text = type(error), str(error)
    namespace = {
        "__module__": kind.__module__,
        # The methods of the other class may need attributes that only its constructor sets.
        "__setattr__": Exception.__setattr__,
        **{name: getattr(object, name) for name in ("__eq__", "__hash__", "__getattribute__")},
        "__str__": lambda _: text,
        "__repr__": lambda _: f"{kind.__name__}({text!r})",
        "__bool__": lambda _: True,
        "__reduce__": lambda _: (rebuild, (kind, (text,)), {**vars(error)}),
        **vars(error),  # the other class may have properties of these names
    }
    try:
        both: type[WorkerError] = type(kind.__name__, (kind, original), namespace)
        # Do not call the constructor, which may need arguments that are not known.
        made = bare(both, text)
    except Exception:  # noqa: BLE001 (a metaclass, or `__init_subclass__`, can raise anything)
        return None
    _fill(made, contents, vars(error))
    return made


def _copy_of_original(
    error: WorkerError, original: type[Exception], contents: Contents
) -> Exception | None:
    """Return a copy of the rank's exception, with the error's attributes; None if impossible."""
    try:
        whole = contents.whole
        made = whole if isinstance(whole, original) else bare(original, *contents.args)
    except Exception:  # noqa: BLE001 (a user's class can raise anything while it is made)
        return None
    # The exception's class may refuse to have attributes set.
    attributes: dict[str, Any] = object.__getattribute__(made, "__dict__")
    _fill(made, contents, {})
    attributes |= {
        k: v for k, v in vars(error).items() if k not in attributes and not hasattr(original, k)
    }
    attributes["_render_traceback_"] = error._render_traceback_
    return made


def _fill(made: BaseException, contents: Contents, overrides: Mapping[str, Any]) -> None:
    """Set the arguments and attributes of an exception; those in `overrides` take precedence."""
    BaseException.args.__set__(made, contents.args)  # type: ignore[attr-defined]
    attributes: dict[str, Any] = object.__getattribute__(made, "__dict__")
    for name, value in contents.attributes.items():
        if name in overrides:
            continue
        try:
            Exception.__setattr__(made, name, value)
        except (AttributeError, TypeError):  # the class has a property of this name
            attributes[name] = value
    attributes |= overrides


LONGEST_REPR = 2000  # characters of the values in a `repr`

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class CellResult(Generic[R_co]):
    r"""The values that ranks have sent back: `result[1]`, `items()`.

    A mapping from rank to value, but iteration yields the values, in rank order.  Reading values
    raises UsageError if the task returns no values.  Failed ranks have no value; they are in
    `errors`.

        result = world.execute("print('hello')\nrank + 5")
        result[1], result.stdout[1]  # (6, 'hello\n')
        result.ok  # True
        list(result)  # [5, 6, 7, 8]

    The task ran for `seconds` seconds.  `hosts` has the machine of each rank, and the rank's number
    on that machine.
    """

    task: Task
    transcript: Transcript
    seconds: float
    errors: Mapping[int, RankError]
    by_rank: Mapping[int, R_co] = field(default_factory=dict)
    hosts: Mapping[int, tuple[str, int]] = field(default_factory=dict)

    def __repr__(self) -> str:
        values = f": {self.by_rank!r}" if self._has_values else ""
        return f"<{self._title}{clip(values, LONGEST_REPR)}>"

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:  # noqa: FBT001
        """Show each value as a notebook shows it; IPython calls this for a cell's last value."""
        printer.text(f"<{self._title}")
        if self._has_values and not cycle:
            printer.text(":")
            printer.break_()
            printer.pretty(self.by_rank)
        printer.text(">")

    @property
    def _title(self) -> str:
        failed = f"failed on {name_ranks(self.errors)}" if self.errors else "ok"
        return f"CellResult of {name_ranks(self.task.ranks)}, {failed}"

    @property
    def _has_values(self) -> bool:
        return bool(self.by_rank and self._were_asked_for)

    @property
    def _were_asked_for(self) -> bool:
        task = self.task
        if task.brings_small:  # the values are None if the source does not end with an expression
            return any(value is not None for value in self.by_rank.values())
        return bool(task.keeps or task.fetch or not isinstance(task.work, CellCode))

    def _check_values(self) -> None:
        """Raise UsageError if a rank's value was not sent back, or if the task has no values."""
        remedy = '`world.execute("x = 1", fetch=("x",))`, or `world.gather("x")`.'
        ended_well = (track.rank for track in self.transcript if track.state == "ok")
        if missing := [rank for rank in ended_well if rank not in self.by_rank]:
            raise UsageError(
                f"the last value of {name_ranks(missing)} did not come back: it is large (64 KiB "
                f"or more), on a GPU, or cannot be sent. Ask for it by name: {remedy}"
            )
        if not self._were_asked_for:
            raise UsageError(
                "this result has no values, as the source does not end with a value and no names "
                f"were given: {remedy}"
            )

    @property
    def ok(self) -> bool:
        """Whether no rank failed."""
        return not self.errors

    def rank(self, number: int) -> R_co:
        """Return the value of a rank, as `result[number]`; raises UsageError if there is none."""
        return self[number]

    def index(self, hostname: str, local_rank: int) -> R_co:
        """Return the value of a machine's local rank; `localhost` is this machine.

        Raises UsageError if there is no such value.
        """
        machine = socket.gethostname() if hostname == "localhost" else hostname
        for rank, value in self.items():
            if self.hosts.get(rank) == (machine, local_rank):
                return value
        hosts = ", ".join(f"{host} {number}" for host, number in self.hosts.values())
        raise UsageError(f"No result of local rank {local_rank} on {hostname}; there are {hosts}.")

    def __iter__(self) -> Iterator[R_co]:
        return iter(self.values())

    def __len__(self) -> int:
        return len(self.by_rank)

    def __getitem__(self, rank: int) -> R_co:
        if rank not in self.by_rank or not self._were_asked_for:
            self._check_values()
            raise NoValue(rank, self.by_rank)
        return self.by_rank[rank]

    def keys(self) -> abc.KeysView[int]:
        """Return the ranks in `by_rank`, which has the values; unlike `values`, raises no error."""
        return self.by_rank.keys()

    def values(self) -> abc.ValuesView[R_co]:
        """Return the values in rank order, without those of ranks that failed.

        Raises UsageError if the value of a rank that ended well is missing, or if the task returns
        no values.
        """
        self._check_values()
        return self.by_rank.values()

    def items(self) -> abc.ItemsView[int, R_co]:
        """Return ranks and values; raises UsageError as `values` does."""
        self._check_values()
        return self.by_rank.items()

    @property
    def stdout(self) -> dict[int, str]:
        """By rank, the last lines of stdout as a terminal shows them, without colours.

        At most 10,000 lines of a rank are kept.
        """
        return {track.rank: track.written() for track in self.transcript}

    @property
    def stderr(self) -> dict[int, str]:
        """By rank, the last lines of stderr, as `stdout` has those of stdout."""
        return {track.rank: track.written(stderr=True) for track in self.transcript}


# --- the status of workers, in a line and as a table ------------------------------------------

GIB = 2**30


def usage_text(used: Collection[Usage]) -> str:
    """Write `cpu 2.1-2.4 GiB · gpu 61/80 GiB · 97 %` of all ranks; "" if nothing is known."""
    memory = [each.memory for each in used if each.memory]
    parts = [f"cpu {size_range(memory)}"] if memory else []
    if gpus := [each.gpu for each in used if each.gpu]:
        parts.append(f"gpu {_gpus_text(gpus, ' · ')}")
    return " · ".join(parts)


def _gpus_text(gpus: Collection[Gpu], between: str = " ") -> str:
    """Write `61/80 GiB 97 %`, `3.5-12/80 GiB`: used and total memory, and how busy GPUs are."""
    used, total = ([getattr(gpu, name) / GIB for gpu in gpus] for name in ("used", "total"))
    busy = [gpu.busy for gpu in gpus if gpu.busy is not None]
    return f"{_range(used)}/{_range(total)} GiB" + (f"{between}{_range(busy)} %" if busy else "")


def _range(numbers: Collection[float]) -> str:
    low, high = (f"{x:.0f}" if x >= 10 else f"{x:.2g}" for x in (min(numbers), max(numbers)))
    return high if low == high else f"{low}-{high}"


ALWAYS = {"rank", "state", "pid", "device", "memory"}
"""Columns of the status that are shown even if they are empty for all ranks."""


def rows(
    workers: Sequence[WorkerStatus],
    cpu: Mapping[int, float] | None = None,
    lines: Mapping[int, str] | None = None,
) -> list[tuple[str, ...]]:
    """Return a row of headings and a row for each rank, as texts; no rows without workers.

    Columns that are empty for all ranks are left out, except for the columns in `ALWAYS`.  `cpu`
    has by rank the use in per cent of a core, `lines` the last line that the rank printed.
    """
    cpu, lines = cpu or {}, lines or {}
    has_several = len({each.host for each in workers}) > 1
    are_side_by_side = len({each.cell for each in workers if each.cell is not None}) > 1
    table = [
        {
            "rank": str(each.rank),
            "host": each.host if has_several else "",
            "state": f"busy {each.busy_seconds:.0f} s" if each.state == "busy" else each.state,
            "cell": f"[{each.cell}]" if are_side_by_side and each.cell is not None else "",
            "pid": str(each.pid),
            "device": each.device,
            "memory": size_text(each.memory),
            "cpu": f"{cpu[each.rank]:.0f} %" if each.rank in cpu else "",
            "gpu": _gpus_text([each.gpu]) if each.gpu else "",
            "where": doing_of([each.rank], each.place, each.code) if each.place else "",
            "last collective": f"{last}, {'done' if last.is_done else 'not done'}"
            if (last := each.collective)
            else "",
            "last line": lines.get(each.rank, ""),
        }
        for each in workers
    ]
    if not table:
        return []
    shown = [each for each in table[0] if each in ALWAYS or any(row[each] for row in table)]
    return [tuple(shown), *(tuple(row[each] for each in shown) for row in table)]


def log_lines(log: LogTail, pattern: re.Pattern[str] | None) -> list[str]:
    """Return the lines of a log that match the pattern (None: all lines), without colours.

    If a progress bar has overwritten a line again and again, only the last text counts.
    """
    lines = (strip(line).rstrip("\r").rpartition("\r")[2] for line in log.lines)
    return [line for line in lines if pattern is None or pattern.search(line)]


def logs_text(logs: Iterable[LogTail], who: Who = name_ranks) -> list[str]:
    """Return the lines of logs, below headings such as `── ranks 0-1 (same) · stderr ──`.

    Equal logs of several ranks are written once.  Empty logs are left out.
    """
    same: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for each in logs:
        if each.lines:
            same.setdefault((each.stream, each.lines), []).append(each.rank)
    text = list[str]()
    for (stream, lines), ranks in same.items():
        kind = " (same)" if len(ranks) > 1 else ""
        kind += " · stderr" if stream == "stderr" else ""
        text += [f"── {who(ranks)}{kind} ──", *lines]
    return text


# --- log records of workers -------------------------------------------------------------------

# A record of local rank 0 on node1 goes to the logger `nbdist.node1.0` of this process.  The user
# can set handlers and levels on this logger, on `nbdist` and on the root logger.  If output is
# shown, handlers of the root logger that write to stdout or stderr are skipped, such as the handler
# of `logging.basicConfig`.  They would print the record a second time, without its rank.


def wanted_level(*, is_shown: bool) -> int | None:
    """Return the lowest level of log records that workers should send to this process.

    Returns None if this process has no handler for them; then the worker's own logging prints its
    records.  `is_shown` is True if the notebook shows the output of ranks.
    """
    loggers = [logging.getLogger("nbdist")]
    for name, each in [*logging.Logger.manager.loggerDict.items()]:
        # A logger that has neither a level nor handlers behaves like its parent.
        if name.startswith("nbdist.") and isinstance(each, logging.Logger):
            loggers += [each] if each.handlers or each.level else []
    listening = (each for each in loggers if any(_handlers(each, is_shown)))
    return min((each.getEffectiveLevel() for each in listening), default=None)


def hand_over(record: Record, *, is_shown: bool) -> None:
    """Pass a worker's log record to the handlers of this process.

    `is_shown` is True if the notebook shows the output of ranks.
    """
    logger = logging.getLogger(f"nbdist.{record.host}.{record.local_rank}")
    handlers = [*_handlers(logger, is_shown)]
    if not logger.isEnabledFor(record.level) or not handlers:
        return
    try:
        logged = as_logged(record)
        if logger.filter(logged):
            for handler in handlers:
                if logged.levelno >= handler.level:
                    handler.handle(logged)
    except Exception:  # noqa: BLE001 (a user's handler or filter can raise anything)
        # As logging does, print the error and go on: the cell has not caused the error.
        if logging.raiseExceptions:
            traceback.print_exc(file=sys.stderr)


def _handlers(logger: logging.Logger, is_shown: bool) -> Iterator[logging.Handler]:  # noqa: FBT001
    """Yield the handlers of a logger and its parents, as logging finds them.

    `is_shown` is True if the notebook shows the output of ranks.  Then handlers of the root logger
    that write to stdout or stderr are left out.
    """
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    each: logging.Logger | None = logger
    while each is not None:
        for handler in each.handlers:
            console = getattr(handler, "console", None)  # the handler of the `rich` package has it
            stream = getattr(handler, "stream", getattr(console, "file", None))
            writes_here = stream is not None and any(stream is own_stream for own_stream in streams)
            if not (each.parent is None and is_shown and writes_here):
                yield handler
        each = each.parent if each.propagate else None


def as_logged(record: Record) -> logging.LogRecord:
    """Return the record as a `LogRecord`, with the worker's `host`, `rank` and `local_rank`."""
    logged = logging.getLogRecordFactory()(
        *(record.name, record.level, record.pathname, record.line, record.message),
        *(None, None, record.function, record.stack or None),
    )
    vars(logged).update(
        {name: getattr(record, name) for name in ("created", "host", "rank", "local_rank")},
        levelname=record.level_name,
        msecs=record.created % 1 * 1000,
        threadName=record.thread,
        process=record.pid,
        processName=f"rank{record.rank}",
        exc_text=record.exception or None,
    )
    return logged
