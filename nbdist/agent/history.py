"""The last task and the last that failed, as an agent or head sees them: for `nbdist mcp`.

The notebook keeps more of its own cells; this is there too for a world that no notebook has, and
while a cell runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from nbdist.output.events import Died, Failure
from nbdist.wire import messages
from nbdist.wire.views import Place, Stack, TaskSeen, Trouble
from nbdist.wire.work import task_from

MOST_LINES, LONGEST_LINE, LONGEST_MESSAGE = 60, 400, 2000
WITH_LINES, MOST_TROUBLES = 8, 256
"""Ranks whose lines are kept: the first to fail, of which the cause is one; and ranks at all."""


class History:
    """Takes what goes between a notebook and its ranks; `failed` is the last task that failed."""

    def __init__(self) -> None:
        self._run: messages.Run | None = None
        self._began_ns = self._size = 0
        self._places: Mapping[int, Place] = {}
        self._aborted: dict[int, Place] = {}
        self._troubles: dict[int, Trouble] = {}
        self._before: TaskSeen | None = None

    def __repr__(self) -> str:
        return f"<History, {len(self._troubles)} ranks have failed>"

    def take_down(self, message: messages.Down, size: int) -> None:
        """Note what the notebook of a world of `size` ranks sent; a task stays packed."""
        match message:
            case messages.Run():
                self._before = self.failed
                self._run, self._began_ns, self._size = message, time.time_ns(), size
                self._places, self._aborted, self._troubles = {}, {}, {}
            case messages.Abort(ranks):
                places = {rank: self._places.get(rank, Place()) for rank in ranks}
                self._aborted.update((r, place) for r, place in places.items() if place.operation)

    def take_up(self, message: messages.Up) -> None:
        """Note the failures and places that the notebook gets."""
        match message:
            case messages.Outputs(items):
                for rank, task_id, output in items:
                    if isinstance(output, Failure | Died):
                        self._take(rank, task_id, output)
            case messages.Located(places) if places:
                self._places = places
            case messages.Aborted(places):
                self._aborted.update(places)

    def _take(self, rank: int, task_id: str, error: Failure | Died) -> None:
        is_own = self._run is not None and task_id in ("", self._run.id)
        if is_own and len(self._troubles) < MOST_TROUBLES:
            trouble = trouble_of(rank, error, has_lines=len(self._troubles) < WITH_LINES)
            self._troubles.setdefault(rank, replace(trouble, is_idle=not task_id))

    @property
    def failed(self) -> TaskSeen | None:
        """The last task in which, or after which, a rank has failed."""
        return self.last if self._troubles else self._before

    @property
    def last(self) -> TaskSeen | None:
        """The task that runs, or ran last; None before the first."""
        if self._run is None:
            return None
        task = task_from(self._run.task)
        return TaskSeen(
            title=task.title[:LONGEST_LINE],
            cell=task.execution_count,
            ranks=self._run.ranks,
            size=self._size,
            began_ns=self._began_ns,
            troubles=tuple(self._troubles.values()),
            places=_as_stacks(self._places),
            aborted=_as_stacks(self._aborted),
        )


def _as_stacks(places: Mapping[int, Place]) -> tuple[Stack, ...]:
    return tuple(Stack(rank, 0, "busy", place) for rank, place in places.items())


def trouble_of(rank: int, error: Failure | Died, *, has_lines: bool) -> Trouble:
    """Keep what is said of an error, of its lines the last ones."""
    if isinstance(error, Failure):
        lines = [line for frame in error.traceback for line in frame.splitlines()]
        said = error.name, error.message[:LONGEST_MESSAGE]
        kept = Trouble(rank, error.time_ns, *said, connections=error.connections)
        lines = [*lines[-MOST_LINES:], *error.account]
    else:
        kept = Trouble(
            *(rank, error.time_ns),
            exit_code=error.exit_code,
            pid=error.pid,
            why=error.why,
            received_too_much=error.received_too_much,
        )
        lines = [*error.last_lines]
    return replace(kept, lines=tuple(line[:LONGEST_LINE] for line in lines)) if has_lines else kept
