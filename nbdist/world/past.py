"""What the workers of a world have run: cells to run again, and all of them for `%dist_export`.

`recovery.follow` adds to the one `Past` of `Workers`, which is bounded and keeps no values.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from nbdist.output.rank_transcript import Shown
from nbdist.values.payload import Segment
from nbdist.wire.work import Attempt, Call, Source, Task
from nbdist.world.names import Sent
from nbdist.world.running import TaskRun
from nbdist.world.sent_objects import Parcel
from nbdist.world.states import Renumbering

ANY = -1
"""The number under which a set-up cell has what goes to each new rank."""


class Setup:
    """The `--setup` cells in their order; `problem` says what went wrong in new workers, or ""."""

    def __init__(self) -> None:
        self.problem = ""
        self.is_replaying = False
        self.tasks: dict[str, Task] = {}
        self._parcels: dict[str, Parcel] = {}
        self._segments: dict[str, Segment] = {}  # with the names of a cell, open as long as it is

    def keep(
        self, key: str, task: Task, segment: Segment | None, parcel: Parcel | None = None
    ) -> None:
        """Run this cell too from now on, in place of the one with the same key."""
        self.tasks[key] = replace(task, attempt=Attempt())
        self._parcels.pop(key, None)
        if parcel is not None:
            self._parcels[key] = parcel
        if (old := self._segments.pop(key, None)) is not None:
            old.close()
        if segment is not None:
            self._segments[key] = segment

    def on(self, key: str, ranks: tuple[int, ...]) -> tuple[Task, dict[int, Parcel]]:
        """Return a cell for new workers, and by rank what they get with it."""
        task = self.tasks[key]
        names = dict.fromkeys(ranks, task.names[ANY]) if ANY in task.names else {}
        parcel = self._parcels.get(key)
        parcels = {} if parcel is None else dict.fromkeys(ranks, parcel)
        return replace(task, id=uuid.uuid4().hex, ranks=ranks, names=names), parcels

    def forget(self) -> None:
        """Run none any more."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self.tasks.clear()

    def renumber(self, ranks: Renumbering) -> None:
        """Move the ranks of cells along; a cell for all ranks is for all that there are now."""
        for key, task in self.tasks.items():
            if task.ranks == tuple(range(ranks.before)):
                self.tasks[key] = replace(task, ranks=tuple(range(ranks.after)))
            elif ranks.moved:  # else there may be ranks again of which there are none now
                self.tasks[key] = replace(task, ranks=ranks.of(task.ranks))


MOST_TASKS, MOST_SENT = 2_000, 10_000
MOST_CHARACTERS = 8_000_000  # of all texts

Kind = Literal["cell", "push", "script", "call"]
Status = Literal["ok", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class PastTask:
    """A task that has ended: what it was, and what it has left on its ranks.

    `text` is a cell's source, a script's name and arguments, or an op's name.  `first` and
    `last` number all tasks: a cell that was run again (`runs`) has its last form, and both.
    `number` is the notebook's, `In [5]`; `made` what it bound and did not import.  `shows_value`:
    its last line's value was shown; `draws`: figures were; `on_all`: it ran on all ranks.
    """

    kind: Kind
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
    """A name of the notebook that went to workers with the task of this number."""

    task: int
    name: str
    shipped: Sent


class Past:
    """The tasks that made what is there; `forgotten` counts others, `gathered` names went home."""

    def __init__(self) -> None:
        self.forgotten = 0
        self.gathered: dict[str, None] = {}
        self.sent: deque[SentName] = deque(maxlen=MOST_SENT)
        self._tasks: dict[str, PastTask] = {}
        self._characters = 0
        self._count = 0

    @property
    def tasks(self) -> list[PastTask]:
        """All that are kept, in the order in which they first ran."""
        return sorted(self._tasks.values(), key=lambda each: each.first)

    def add(self, running: TaskRun) -> None:
        """Keep a task that has ended, in place of an earlier run of the cell that ended alike."""
        self._count += 1
        now = self._count
        for name, shipped in running.shipped_names().items():
            self.sent.append(SentName(now, name, shipped))
        task = _past(running, now)
        if task is None:
            match running.task.work:
                case Call("values.gather", {"expressions": asked}):
                    if len(self.gathered) < MOST_TASKS:
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
        while len(self._tasks) > MOST_TASKS or self._characters > MOST_CHARACTERS:
            self._drop(next(iter(self._tasks)))
            self.forgotten += 1

    def renumber(self, ranks: Renumbering) -> None:
        """Move the ranks of tasks along; drop tasks that ran on none that is left."""
        if ranks.moved:
            now = {
                key: replace(task, ranks=ranks.of(task.ranks)) for key, task in self._tasks.items()
            }
            self._tasks = {key: task for key, task in now.items() if task.ranks}
            self._characters = sum(len(task.text) for task in self._tasks.values())

    def knows(self, task: Task) -> bool:
        """Return True if this cell has run before, as a set-up cell has where a rank is new."""
        same = (each.text == task.source for each in self._tasks.values() if each.kind == "cell")
        return task.key in self._tasks or any(same)

    def sent_before(self, task: int) -> Mapping[str, SentName]:
        """Return how each name of the notebook was last sent, up to this task."""
        return {each.name: each for each in self.sent if each.task <= task}

    def _drop(self, key: str) -> PastTask | None:
        task = self._tasks.pop(key, None)
        self._characters -= len(task.text) if task else 0
        return task


def _past(running: TaskRun, now: int) -> PastTask | None:
    """Note what a task was, and what became of it; None for what leaves nothing on the workers."""
    task = running.task
    kind: Kind
    match task.work:
        case Source():
            kind, text = "cell", task.source
        case Call(text):
            kind = "push" if text == "values.bind_pushed" else "call"
        case script:
            kind, text = "script", " ".join([script.name, *script.args])
    if not text.strip() or (kind == "call" and not running.made):
        return None
    cause = running.transcript.root_cause()
    status: Status = "ok"
    if any(each.state != "ok" for each in running.transcript):
        status = "interrupted" if running.stops else "failed"
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
            isinstance(piece, Shown)
            and any(kind.startswith("image/") for kind in piece.display.data)
            for each in running.transcript
            for piece in each.pieces
        ),
        first=now,
        last=now,
        error=getattr(cause[1], "name", "") if cause else "",
    )
