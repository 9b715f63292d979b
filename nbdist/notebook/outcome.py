"""The result of a cell: its last value on each rank, and the text of `%dist_why` on a failure.

Runs in the notebook's process.  `cells.py` makes the values, and `Pool` owns the `Failures` of its
ranks and the `Routine` of snapshots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from IPython.lib.pretty import RepresentationPrinter

from nbdist.errors import AgentLost, NbdistError, StartError, ValueLost, WorkerError
from nbdist.notebook.display import CellDisplay, CommandOutput
from nbdist.output.ansi import strip
from nbdist.output.events import Died, RankError
from nbdist.output.html_parts import LINES, RED, barred, bold, dim, line, panel, traceback_html
from nbdist.output.screen import ScreenLine
from nbdist.output.transcript import later_errors_text
from nbdist.output.wording import body_text, error_text, fold_ranks, shorten_traceback
from nbdist.values.payload import open_payload
from nbdist.values.pickling import unpickle
from nbdist.wire.ops import Brought
from nbdist.wire.work import OpCall, Task
from nbdist.words import one_line, size_text
from nbdist.world.engine import Engine
from nbdist.world.name_table import list_names
from nbdist.world.outcome_texts import healing_text
from nbdist.world.snapshot_store import Snapshot
from nbdist.world.states import Machines
from nbdist.world.task_error import error_of
from nbdist.world.task_run import TaskRun

# Fetches a cell's last values on the given ranks.
FetchValues = Callable[[tuple[int, ...]], Mapping[int, Any]]


class LastValues(Mapping[int, Any]):
    """The last values of a cell by rank; a value that is still on its rank is fetched on access.

    `values` and `items` fetch all missing values together.  A value that has arrived is kept.
    """

    def __init__(self, values: Mapping[int, Any], fetch: FetchValues) -> None:
        """Take over `values`, with an `Elsewhere` for each value that is not in the notebook.

        `values` has the values by rank.  `fetch` gets the missing values of some ranks, or raises
        an error that says why it cannot.
        """
        self._values = dict(sorted(values.items()))
        self._fetch = fetch

    def __repr__(self) -> str:
        return repr(self._values)

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:  # noqa: FBT001
        printer.text("{...}") if cycle else printer.pretty(self._values)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)

    def __getitem__(self, rank: int) -> Any:
        self._fetch_missing([rank])
        return self._values[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def values(self) -> ValuesView[Any]:
        """Fetch all missing values, then return the values."""
        self._fetch_missing(self._values)
        return super().values()

    def items(self) -> ItemsView[int, Any]:
        """Fetch all missing values, then return pairs of rank and value."""
        self._fetch_missing(self._values)
        return super().items()

    def _fetch_missing(self, ranks: Iterable[int]) -> None:
        missing = tuple(each for each in ranks if isinstance(self._values[each], Elsewhere))
        if missing:
            self._values.update(self._fetch(missing))


class Elsewhere(str):
    """A text that is shown, without quotes, in place of a value that is not in the notebook."""

    __slots__ = ()
    __repr__ = str.__str__

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:  # noqa: FBT001
        printer.text(str(self))


def last_values(
    engine: Engine, running: TaskRun, fetch: Callable[[Task], Mapping[int, Brought]]
) -> LastValues:
    """Return the last value of a cell that has ended, for each rank that succeeded.

    Small values have arrived with the message by which each rank reports that its cell has ended.
    Bigger values are fetched when they are accessed, by a task that `fetch` runs.
    """
    values: dict[int, Any] = {}
    unread: dict[int, str] = {}
    for track in running.transcript:
        if (done := track.done) is None or done.status != "ok":
            continue
        if done.kept is not None:
            size = f"{size_text(done.kept)}, " if done.kept else ""
            values[track.rank] = Elsewhere(f"<{size}still on the rank>")
            continue
        try:
            values[track.rank] = running.value(done)
        except Exception as error:  # noqa: BLE001 (unpickling runs code of any class)
            problem = one_line(f"{type(error).__name__}: {error}")
            unread[track.rank] = f"cannot be read in the notebook: {problem}"
            values[track.rank] = Elsewhere(f"<{unread[track.rank]}>")
    return LastValues(values, partial(_fetch_values, engine, running, fetch, unread))


def _fetch_values(
    engine: Engine,
    running: TaskRun,
    fetch: Callable[[Task], Mapping[int, Brought]],
    unread: Mapping[int, str],
    ranks: tuple[int, ...],
) -> dict[int, Any]:
    if problem := next((unread[rank] for rank in ranks if rank in unread), ""):
        raise ValueLost((rank for rank in ranks if unread.get(rank) == problem), problem)
    pids = engine.rank_table.pids
    if new := [rank for rank in ranks if pids.get(rank) != running.members.pids.get(rank)]:
        raise ValueLost(new, "is gone with its worker")
    task = engine.task(OpCall("values.last_value", {"of": running.task.id}), ranks=ranks)
    answers = fetch(task)
    packed = {rank: each.packed for rank, each in answers.items() if each.packed is not None}
    try:
        if lacking := {rank: each.problem for rank, each in answers.items() if each.problem}:
            problem, lack = next(iter(fold_ranks(lacking).items()))
            raise ValueLost(lack, problem)
        return {
            rank: unpickle(open_payload(each), engine.names.namespace)
            for rank, each in packed.items()
        }
    finally:
        engine.connection.release_lent_values(task, packed)
        engine.connection.release_lent_values(running.task, packed)


# --- the last failures ----------------------------------------------------------------------------

TRACEBACK_LINES, MAX_TRACEBACK_WIDTH = 1000, 2000
SHOWN_LAST_LINES = 20


class Failures:
    """The newest failures of a pool's ranks, for `%dist_why` and `%dist_debug`.

    Each `Pool` owns a `Failures`.  `cells.py` records the failures of cells.  Commands and the
    pool's `Healer` let it record and show the deaths outside of cells.
    """

    def __init__(self, routine: Routine) -> None:
        """`routine` has the newest snapshot, which notes on deaths tell the user to restore."""
        self.last: Why | None = None  # the last failure
        # Of the newest failed task: when that was found, the rank that failed first, and its error.
        self.first_error: tuple[float, int, RankError] | None = None
        self._routine = routine

    def __repr__(self) -> str:
        return f"<Failures {self.last.title if self.last else 'none'}>"

    def record_first_error(self, rank: int, error: RankError) -> None:
        """Record that a cell has failed now, and which rank failed first with which error."""
        self.first_error = time.monotonic(), rank, error

    def record_cell(self, engine: Engine, running: TaskRun) -> None:
        """Record why a cell failed, if ranks failed or the agent was lost."""
        if error := error_of(running):
            self.last = failure_of(running, error, engine.rank_table.log_files) or self.last

    def record_start(self, error: StartError) -> None:
        """Record why workers could not start."""
        self.last = failure_of_start(error)

    def note_deaths(
        self,
        engine: Engine,
        display: CellDisplay,
        machines: Machines,
        dead: Mapping[int, Died] = {},
    ) -> None:
        """Add notes to the display that say which ranks died outside of a cell and were replaced.

        `dead` has the ranks that the caller has replaced.  Ranks that other code has replaced since
        the last call are added (`RankTable.pop_replaced`).  `machines` are the machines on which
        the ranks ran before they died.
        """
        dead = {**dead, **engine.rank_table.pop_replaced()}
        self.note_ends(engine, display, machines, dead)
        if dead:
            display.add_note(healing_text(engine, dead).rstrip("."))
            if self._routine.hint:
                display.add_note(self._routine.hint)

    def note_ends(
        self, engine: Engine, display: CellDisplay, machines: Machines, dead: Mapping[int, Died]
    ) -> None:
        """Show how ranks died outside of a cell, and keep the last of the deaths for `%dist_why`.

        `dead` has the deaths by rank, and `machines` the name of the machine of each rank.  A line
        is shown for each death in `display`, but not for deaths by a requested restart, or for
        deaths that a cell has reported.
        """
        table = engine.rank_table
        for rank, died in dead.items():
            if not (died.by_restart or died.pid in table.told_deaths):
                log = table.log_files.get(rank, "")
                self.last = death_of(rank, machines.name(rank), died, log)
                display.add_note(f"rank {rank} {idle_end(died)}")


@dataclass(frozen=True, slots=True)
class Why:
    """A failure of a rank, of its agent or of a start, as `%dist_why` shows it.

    `title` has the time and the error, and names the rank if a rank has failed.  `body` is the
    traceback, or the last lines of output, or "".  `followed` are lines on failures of other ranks,
    and `log` is the path of the rank's log file, or "".
    """

    title: str
    body: str = ""
    followed: tuple[str, ...] = ()
    log: str = ""

    @property
    def shown(self) -> CommandOutput:
        """The failure as an output, for pages and for terminals."""
        log = f"all of its lines: {self.log}" if self.log else ""
        text = "\n".join(filter(None, [self.title, strip(self.body), *self.followed, log]))
        body = (
            traceback_html(shorten_traceback(self.body, TRACEBACK_LINES, MAX_TRACEBACK_WIDTH))
            if self.body
            else ""
        )
        lines_below = "".join(line(dim(text)) for text in (*self.followed, log))
        box = barred(body + lines_below, RED, f";{LINES}") if body or lines_below else ""
        return CommandOutput(panel(line(bold(self.title)), box), text)


def failure_of(running: TaskRun, error: NbdistError, logs: Mapping[int, str]) -> Why | None:
    """Return why a cell failed, if ranks failed or the agent was lost; None for other errors.

    `logs` has the paths of log files by rank.  If the agent was lost, the failure has only a title.
    """
    if isinstance(error, AgentLost):
        return Why(f"{_clock(time.time())} · {error}")
    if not isinstance(error, WorkerError):
        return None
    rank, errors = error.rank, running.transcript.errors
    first = errors[rank]
    where = f"rank {rank} on {error.host} (pid {error.pid})"
    number = running.task.execution_count
    when = f"{running.clock.seconds_until(first.time_ns):.1f} s into "
    when += f"Cell In[{number}]" if number else "the cell"
    title = f"{_clock(first.time_ns / 1e9)} · {where} · {when} · {error_text(first)}"
    # A lost machine cannot send the rank's last lines of output, so `first` may lack them.  Pass
    # the lines that the notebook has received before.
    tail = running.transcript[rank].tail(SHOWN_LAST_LINES)
    body = body_text(first, (each.text for each in tail if isinstance(each, ScreenLine)))
    return Why(title, body, tuple(later_errors_text(errors, rank)), logs.get(rank, ""))


def failure_of_start(error: StartError) -> Why:
    """Return why workers could not start, with the last lines of the process that failed."""
    return Why(f"{_clock(time.time())} · {str(error).splitlines()[0]}", "\n".join(error.log_lines))


def death_of(rank: int, host: str, died: Died, log: str) -> Why:
    """Return the failure of a rank that died while it ran no cell, for `%dist_why`.

    `log` is the path of the rank's log file, "" if it has none.
    """
    who = f"rank {rank} on {host}" + (f" (pid {died.pid})" if died.pid else "")
    end = f"the process {idle_end(died)}"
    return Why(f"{_clock(died.time_ns / 1e9)} · {who} · {end}", body_text(died), (), log)


def idle_end(died: Died) -> str:
    """Return a text on how a rank's process ended while no cell was running, and why if known.

    If Stop has killed the process, the text leaves out when and why, which the user knows.
    """
    if died.by_stop:
        return died.end
    why = f": {died.why}" if died.why else ""
    return f"{died.end} while no cell was running{why}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


# --- automatic snapshots --------------------------------------------------------------------------


@dataclass
class Routine:
    """A pool's plan for automatic snapshots, as `%dist_snapshot --every` has set it.

    `every` is the number of successful cells after which a snapshot is due; 0 for no automatic
    snapshots.  `selection` has the variables to save, None for all, and the name of the snapshots,
    None for the default name.  `cells` is the number of cells that `is_due` has counted since
    `--every` was set.  `newest` is the pool's newest snapshot, None if none was saved.
    """

    every: int = 0
    selection: tuple[tuple[str, ...] | None, str | None] = (None, None)
    cells: int = 0
    newest: Snapshot | None = field(default=None, repr=False)

    def is_due(self) -> bool:
        """Count a cell that succeeded; return True if the caller should take a snapshot now."""
        self.cells += bool(self.every)
        return bool(self.every) and self.cells % self.every == 0

    @property
    def hint(self) -> str:
        """A line on how to restore the newest snapshot; "" if there is none."""
        newest = self.newest
        if newest is None or not newest.folder.exists():
            return ""
        what = list_names(newest.names)
        return f"`%dist_restore --name {newest.name}` restores {what} of {newest.clock}"
