"""The history of a world's tasks: set-up cells for new workers, and past tasks for an export.

Runs in the notebook's process.  `Engine` has one `Setup` and one `TaskHistory`.
`nbdist.world.recovery` runs the set-up cells, and adds tasks that have ended.  `TaskHistory` has a
limited size.  It keeps texts and names, and of the values of variables only small ones, such as
numbers and short texts.  `Setup` also keeps the values of the variables that were sent with set-up
cells.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from nbdist.output.rank_transcript import RichDisplay
from nbdist.values.payload import Segment
from nbdist.wire.work import Attempt, CellCode, OpCall, Task
from nbdist.wire.world_facts import Renumbering
from nbdist.world.name_table import Sent
from nbdist.world.sent_objects import Parcel
from nbdist.world.task_run import TaskRun

ANY = -1
"""A key in `Task.names` of a set-up cell, in place of a rank: for names that each new rank gets."""


class Setup:
    """The `--setup` cells of a world, which new workers run too.

    `tasks` has the cells by their keys.  `problem` is a sentence about a cell that failed in new
    workers, "" for none.  `is_replaying` is True while new workers run the cells.
    """

    def __init__(self) -> None:
        self.problem = ""
        self.is_replaying = False
        self.tasks: dict[str, Task] = {}
        self._parcels: dict[str, Parcel] = {}
        self._segments: dict[str, Segment] = {}  # by a cell's key: shared memory of its variables

    def keep(
        self, key: str, task: Task, segment: Segment | None, parcel: Parcel | None = None
    ) -> None:
        """Keep a cell for new workers, in place of an earlier cell with the same key.

        `segment` has the values of the variables that were sent with the cell; it is closed once
        the cell is dropped.  `parcel` records the names and objects that each new worker gets.
        """
        self.tasks[key] = replace(task, attempt=Attempt())
        self._parcels.pop(key, None)
        if parcel is not None:
            self._parcels[key] = parcel
        if (old := self._segments.pop(key, None)) is not None:
            old.close()
        if segment is not None:
            self._segments[key] = segment

    def task_for(self, key: str, ranks: tuple[int, ...]) -> tuple[Task, dict[int, Parcel]]:
        """Return a task that runs a set-up cell on new `ranks`, and the parcel of each rank."""
        task = self.tasks[key]
        names = dict.fromkeys(ranks, task.names[ANY]) if ANY in task.names else {}
        parcel = self._parcels.get(key)
        parcels = {} if parcel is None else dict.fromkeys(ranks, parcel)
        return replace(task, id=uuid.uuid4().hex, ranks=ranks, names=names), parcels

    def forget(self) -> None:
        """Forget all set-up cells, and close their shared memory."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._parcels.clear()
        self.tasks.clear()

    def renumber(self, ranks: Renumbering) -> None:
        """Change the ranks on which set-up cells run, after ranks have got new numbers.

        A cell for all ranks becomes a cell for all ranks of the new size.
        """
        for key, task in self.tasks.items():
            if task.ranks == tuple(range(ranks.before)):
                self.tasks[key] = replace(task, ranks=tuple(range(ranks.after)))
            elif ranks.moved:  # if no rank has moved, keep lost ranks, which may come back
                self.tasks[key] = replace(task, ranks=ranks.of(task.ranks))


MAX_TASKS, MAX_SENT_NAMES = 2_000, 10_000
MAX_HISTORY_LENGTH = 8_000_000  # characters in the texts of all tasks together

TaskKind = Literal["cell", "push", "script", "call"]
Status = Literal["ok", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class PastTask:
    """A task that has ended, with the names that it has bound.

    `text` is a cell's source, a script's name and arguments, or an op's name.  `number` is 5 for
    the notebook's cell `In [5]`.  `on_all` is True if the task ran on all ranks.  `made` are the
    names that the task bound and did not import.  `shows_value` is True if the value of the last
    line was displayed, and `draws` is True if an image was displayed.  `error` is the class name of
    the exception that ended the task, if any.

    An entry can be for several `runs` of a cell.  All runs of all tasks are numbered; `first` and
    `last` are the numbers of the first and the last run that this entry is for.
    """

    kind: TaskKind
    text: str
    number: int | None
    ranks: tuple[int, ...]
    on_all: bool
    status: Status
    made: frozenset[str]
    shows_value: bool
    draws: bool
    first: int
    last: int
    runs: int = 1
    error: str = ""


@dataclass(frozen=True, slots=True)
class SentName:
    """A variable of the notebook that was sent to ranks with a task; `task` is the run's number."""

    task: int
    name: str
    shipped: Sent


class TaskHistory:
    """The tasks that have ended since the start of the workers.

    If there are too many tasks, or their texts are too long, the oldest tasks are dropped.
    `forgotten` counts tasks that were dropped, or that ran before this notebook took the world
    over.  `gathered` has expressions that were gathered, and `sent` has variables of the notebook
    that were sent.
    """

    def __init__(self) -> None:
        self.forgotten = 0
        self.gathered: dict[str, None] = {}
        self.sent: deque[SentName] = deque(maxlen=MAX_SENT_NAMES)
        self._tasks: dict[str, PastTask] = {}
        self._characters = 0
        self._count = 0

    @property
    def tasks(self) -> list[PastTask]:
        """The tasks that are kept, in the order in which they first ran."""
        return sorted(self._tasks.values(), key=lambda each: each.first)

    def add(self, running: TaskRun) -> None:
        """Add a task that has ended, and record the variables that were sent with it.

        A task for which `_entry_of` returns None gets no entry.  A successful run of a cell
        replaces the entries of earlier runs of the cell.  A failed run replaces only the entry of
        earlier failed runs.
        """
        self._count += 1
        now = self._count
        for name, shipped in running.shipped_names().items():
            self.sent.append(SentName(now, name, shipped))
        task = _entry_of(running, now)
        if task is None:
            match running.task.work:
                case OpCall("values.gather", {"expressions": asked}):
                    if len(self.gathered) < MAX_TASKS:
                        self.gathered.update(dict.fromkeys(map(str, asked)))
            return
        key = running.task.key or f"task {now}"
        failed = f"failed {key}"
        if task.status == "ok":
            self._drop(failed)
        else:
            key = failed
        if earlier := self._drop(key):
            task = replace(task, first=earlier.first, runs=earlier.runs + 1)
        self._tasks[key] = task
        self._characters += len(task.text)
        while len(self._tasks) > MAX_TASKS or self._characters > MAX_HISTORY_LENGTH:
            self._drop(next(iter(self._tasks)))
            self.forgotten += 1

    def renumber(self, ranks: Renumbering) -> None:
        """Update the ranks of tasks after a renumbering; drop tasks whose ranks are all gone."""
        if ranks.moved or len(ranks.became) < ranks.before:
            now = {
                key: replace(task, ranks=ranks.of(task.ranks)) for key, task in self._tasks.items()
            }
            self._tasks = {key: task for key, task in now.items() if task.ranks}
            self._characters = sum(len(task.text) for task in self._tasks.values())

    def has_cell(self, task: Task) -> bool:
        """Return True if the history has a cell with this task's source or key."""
        same = (each.text == task.source for each in self._tasks.values() if each.kind == "cell")
        return task.key in self._tasks or any(same)

    def sent_before(self, task: int) -> Mapping[str, SentName]:
        """Return, by name, the variables that were sent with the run number `task` or earlier runs.

        If a variable was sent several times, the last record is returned.
        """
        return {each.name: each for each in self.sent if each.task <= task}

    def _drop(self, key: str) -> PastTask | None:
        task = self._tasks.pop(key, None)
        self._characters -= len(task.text) if task else 0
        return task


def _entry_of(running: TaskRun, now: int) -> PastTask | None:
    """Return the entry of a task that has ended; `now` is the number of this run.

    Returns None for a task without a text, and for an op that has bound no name, except a push.
    """
    task = running.task
    kind: TaskKind
    match task.work:
        case CellCode():
            kind, text = "cell", task.source
        case OpCall(text):
            kind = "push" if text == "values.bind_pushed" else "call"
        case script:
            kind, text = "script", " ".join([script.name, *script.args])
    if not text.strip() or (kind == "call" and not running.made):
        return None
    cause = running.transcript.root_cause()
    status: Status = "ok"
    if any(each.state != "ok" for each in running.transcript):
        status = "interrupted" if running.stop.was_pressed else "failed"
    return PastTask(
        kind=kind,
        text=text,
        number=task.execution_count,
        ranks=task.ranks,
        on_all=len(task.ranks) == running.members.size,
        status=status,
        made=running.made,
        shows_value=running.shows_value,
        draws=any(
            isinstance(piece, RichDisplay)
            and any(kind.startswith("image/") for kind in piece.display.data)
            for each in running.transcript
            for piece in each.pieces
        ),
        first=now,
        last=now,
        error=getattr(cause[1], "name", "") if cause else "",
    )
