"""How a cell ended: its last value on each rank, and what `%dist_why` shows of a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from IPython.lib.pretty import RepresentationPrinter

from nbdist.errors import AgentLost, NbdistError, ValueLost, WorkerError
from nbdist.notebook.display import Shown
from nbdist.output.ansi import strip
from nbdist.output.events import Died
from nbdist.output.screen import Line
from nbdist.output.transcript import followed_text
from nbdist.output.wording import (
    LINES,
    RED,
    barred,
    body_text,
    bold,
    dim,
    error_text,
    fold_ranks,
    line,
    panel,
    traceback_html,
)
from nbdist.values.payload import open_payload
from nbdist.values.pickling import unpickle
from nbdist.wire.ops import Brought
from nbdist.wire.work import Call, Task
from nbdist.words import one_line, size_text
from nbdist.world.names import list_names
from nbdist.world.running import TaskRun
from nbdist.world.session import Session
from nbdist.world.snapshot_store import Snapshot

Bring = Callable[[tuple[int, ...]], Mapping[int, Any]]  # brings the values of these ranks


class LastValues(Mapping[int, Any]):
    """By rank; each is brought once, and all that are missing together where all are wanted."""

    def __init__(self, values: Mapping[int, Any], bring: Bring) -> None:
        """Takes `Elsewhere` for those that are not here."""
        self._values = dict(sorted(values.items()))
        self._bring = bring

    def __repr__(self) -> str:
        return repr(self._values)

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:  # noqa: FBT001
        printer.text("{...}") if cycle else printer.pretty(self._values)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)

    def __getitem__(self, rank: int) -> Any:
        self._want([rank])
        return self._values[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def values(self) -> ValuesView[Any]:
        """Bring them all."""
        self._want(self._values)
        return super().values()

    def items(self) -> ItemsView[int, Any]:
        """Bring them all."""
        self._want(self._values)
        return super().items()

    def _want(self, ranks: Iterable[int]) -> None:
        missing = tuple(each for each in ranks if isinstance(self._values[each], Elsewhere))
        if missing:
            self._values.update(self._bring(missing))


class Elsewhere(str):
    """Shown as it is, without quotes, in place of a value that is not here."""

    __slots__ = ()
    __repr__ = str.__str__

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:  # noqa: FBT001
        printer.text(str(self))


def last_values(
    session: Session, running: TaskRun, bring: Callable[[Task], Mapping[int, Brought]]
) -> LastValues:
    """Read those that came along with the end of a cell; `bring` runs a task for the others."""
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
        except Exception as error:  # noqa: BLE001 (a class can raise anything while it is rebuilt)
            said = one_line(f"{type(error).__name__}: {error}")
            unread[track.rank] = f"cannot be read in the notebook: {said}"
            values[track.rank] = Elsewhere(f"<{unread[track.rank]}>")
    return LastValues(values, partial(_brought, session, running, bring, unread))


def _brought(
    session: Session,
    running: TaskRun,
    bring: Callable[[Task], Mapping[int, Brought]],
    unread: Mapping[int, str],
    ranks: tuple[int, ...],
) -> dict[int, Any]:
    if problem := next((unread[rank] for rank in ranks if rank in unread), ""):
        raise ValueLost((rank for rank in ranks if unread.get(rank) == problem), problem)
    pids = session.pids
    if new := [rank for rank in ranks if pids.get(rank) != running.members.pids.get(rank)]:
        raise ValueLost(new, "is gone with its worker")
    task = session.task(Call("values.last_value", {"of": running.task.id}), ranks=ranks)
    found = bring(task)
    packed = {rank: each.packed for rank, each in found.items() if each.packed is not None}
    try:
        if lacking := {rank: each.problem for rank, each in found.items() if each.problem}:
            problem, lack = next(iter(fold_ranks(lacking).items()))
            raise ValueLost(lack, problem)
        return {
            rank: unpickle(open_payload(each), session.namespace) for rank, each in packed.items()
        }
    finally:
        session.let_go_of(task, packed)
        session.let_go_of(running.task, packed)


# --- the last failure, with all that is known of it -----------------------------------------------

TRACEBACK_LINES, WIDTH = 1000, 2000
LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class Why:
    """One failure: `title` says who, when and what; `body` is a traceback, or last lines."""

    title: str
    body: str = ""
    followed: tuple[str, ...] = ()
    log: str = ""

    @property
    def shown(self) -> Shown:
        """As text, and for a page."""
        log = f"all of its lines: {self.log}" if self.log else ""
        text = "\n".join(filter(None, [self.title, strip(self.body), *self.followed, log]))
        body = traceback_html(self.body, TRACEBACK_LINES, WIDTH) if self.body else ""
        ends = "".join(line(dim(text)) for text in (*self.followed, log))
        box = barred(body + ends, RED, f";{LINES}") if body or ends else ""
        return Shown(panel(line(bold(self.title)), box), text)


def why_of(running: TaskRun, error: NbdistError, logs: Mapping[int, str]) -> Why | None:
    """Find why a cell failed; None where no rank did."""
    if isinstance(error, AgentLost):
        return Why(f"{_clock(time.time())} · {error}")
    if not isinstance(error, WorkerError):
        return None
    rank, errors = error.rank, running.transcript.errors
    first = errors[rank]
    where = f"rank {rank} on {error.host} (pid {error.pid})"
    number = running.task.execution_count
    when = f"{running.seconds_until(first.time_ns):.1f} s into "
    when += f"Cell In[{number}]" if number else "the cell"
    title = f"{_clock(first.time_ns / 1e9)} · {where} · {when} · {error_text(first)}"
    # A lost machine sends no last lines: those that were shown count.
    tail = running.transcript[rank].tail(LAST_LINES)
    body = body_text(first, (each.text for each in tail if isinstance(each, Line)))
    return Why(title, body, tuple(followed_text(errors, rank)), logs.get(rank, ""))


def why_died(rank: int, host: str, died: Died, log: str) -> Why:
    """Word why a rank was replaced that ran no cell."""
    who = f"rank {rank} on {host}" + (f" (pid {died.pid})" if died.pid else "")
    end = f"the process {idle_end(died)}"
    return Why(f"{_clock(died.time_ns / 1e9)} · {who} · {end}", body_text(died), (), log)


def idle_end(died: Died) -> str:
    """Word how a process ended whose rank ran no cell, or one that was stopped before."""
    if died.by_stop:
        return died.end
    why = f": {died.why}" if died.why else ""
    return f"{died.end} while no cell was running{why}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


# --- what a notebook does about snapshots by itself ---------------------------------------------


@dataclass
class Routine:
    """What `--every` has set up, and the newest snapshot of this notebook's session."""

    every: int = 0
    wanted: tuple[tuple[str, ...] | None, str | None] = (None, None)  # variables, name
    cells: int = 0
    newest: Snapshot | None = field(default=None, repr=False)

    def is_due(self) -> bool:
        """Count a cell that succeeded; return True if a snapshot is to be taken after it."""
        self.cells += bool(self.every)
        return bool(self.every) and self.cells % self.every == 0

    @property
    def hint(self) -> str:
        """How to bring back what was lost; "" where there is nothing to bring."""
        newest = self.newest
        if newest is None or not newest.folder.exists():
            return ""
        what = list_names(newest.names)
        return f"`%dist_restore --name {newest.name}` restores {what} of {newest.clock}"
