"""Cells marked `--setup`: run again in every new worker, with the names that came along."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from nbdist.values.shared_memory import Segment
from nbdist.wire.task import Attempt, Task
from nbdist.world.ranks import Renumbering


@dataclass(frozen=True)
class SetupCell:
    """A cell to run again; the segment holds its names, and is kept open for that."""

    task: Task
    segment: Segment | None


class Setup:
    """The set-up cells of a world, in the order in which they first ran.

    `problem` says what went wrong when they were run again, "" where nothing did.
    """

    def __init__(self) -> None:
        self.problem = ""
        self.is_replaying = False
        self._cells: dict[str, SetupCell] = {}

    def __repr__(self) -> str:
        return f"<Setup of {len(self._cells)} cells>"

    @property
    def tasks(self) -> list[Task]:
        """What is to be run in a new worker, in order."""
        return [kept.task for kept in self._cells.values()]

    @property
    def kept(self) -> tuple[tuple[str, Task], ...]:
        """The same, with their keys."""
        return tuple((key, each.task) for key, each in self._cells.items())

    def take_over(self, kept: Iterable[tuple[str, Task]]) -> None:
        """Run these too, whose names the agent holds."""
        self._cells |= {key: SetupCell(task, None) for key, task in kept}

    def keep(self, key: str, task: Task, segment: Segment | None) -> None:
        """Run this cell too from now on; in the place of the one with the same key."""
        old = self._cells.get(key)
        self._cells[key] = SetupCell(replace(task, attempt=Attempt()), segment)
        if old is not None and old.segment is not None:
            old.segment.close()

    def forget(self) -> None:
        """Run none any more."""
        for kept in self._cells.values():
            if kept.segment is not None:
                kept.segment.close()
        self._cells.clear()

    def renumber(self, ranks: Renumbering) -> None:
        """Have cells follow the ranks that they ran on; those for all are for all there are."""
        self.scale(ranks.before, ranks.after)
        if not ranks.moved:
            return  # as for a cell of ranks that there are none of now, but may be again
        everyone = tuple(range(ranks.after))
        for key, kept in [*self._cells.items()]:
            if kept.task.ranks != everyone:
                task = replace(kept.task, ranks=ranks.of(kept.task.ranks))
                self._cells[key] = replace(kept, task=task)

    def scale(self, before: int, after: int) -> None:
        """Have cells that ran on all ranks of a world run on all of them when there are more."""
        everyone = tuple(range(before))
        for key, kept in self._cells.items():
            if kept.task.ranks == everyone:
                task = replace(kept.task, ranks=tuple(range(after)))
                self._cells[key] = replace(kept, task=task)
