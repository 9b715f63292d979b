"""The table of a world's tasks: those that ranks run, and the task that was sent last.

Runs in the notebook's process and does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection

from nbdist.world.task_run import TaskRun


class TaskTable:
    """The tasks in progress, and the task that was sent last.

    Several tasks can run side by side on different ranks.  `last` is the task that was sent last.
    `runs` has this task and the tasks that ranks still ran when it was sent, in the order of
    sending.  `failed_runs` has the tasks in which ranks died that were not replaced yet.
    """

    def __init__(self) -> None:
        self.last: TaskRun | None = None
        self.runs: list[TaskRun] = []
        self.failed_runs: list[TaskRun] = []
        self.is_reading_items = False  # True while the user's iterable gives items of `World.map`

    def __repr__(self) -> str:
        return f"<TaskTable {self.unfinished_runs}>"

    @property
    def unfinished_runs(self) -> list[TaskRun]:
        """The tasks that ranks run, in the order of sending."""
        return [run for run in self.runs if run.unfinished]

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The ranks that run a task."""
        return tuple(sorted(rank for run in self.runs for rank in run.unfinished))

    @property
    def is_idle(self) -> bool:
        """Whether no rank runs a task."""
        return not self.unfinished

    @property
    def known_runs(self) -> list[TaskRun]:
        """The tasks that messages can be about: tasks in progress, and the task sent last."""
        last = self.last
        return self.runs if last is None or last in self.runs else [*self.runs, last]

    def find_run(self, task_id: str) -> TaskRun | None:
        """Return the task with this id, if a rank has not finished it or it was sent last."""
        return next((run for run in self.known_runs if run.task.id == task_id), None)

    def run_on(self, ranks: Collection[int]) -> TaskRun | None:
        """Return the earliest task that one of these ranks runs; None if all of them are free."""
        return next((run for run in self.runs if not {*run.unfinished}.isdisjoint(ranks)), None)

    def stopped_run(self, ranks: Collection[int]) -> TaskRun | None:
        """Return a stopped task that `ranks` still run, or that has not been completed; or None.

        A task that all its ranks have ended is returned whatever the `ranks`: `follow` still has to
        complete it, for example by healing the group.
        """
        for run in self.known_runs:
            # A job has a caller that waits for the job's end, also after Stop.
            is_left = run.stop.is_stopping and not run.is_over and not run.is_job
            if is_left and not (run.unfinished and {*run.unfinished}.isdisjoint(ranks)):
                return run
        return None

    def add(self, running: TaskRun) -> None:
        """Add a task that is being sent, and drop the tasks that all their ranks have finished."""
        self.runs = [*self.unfinished_runs, running]
        self.last = running

    def forget(self) -> None:
        """Forget the tasks of workers that have ended, and which of them was the last."""
        self.last, self.runs, self.failed_runs = None, [], []
