"""The table of a world's tasks: those that ranks run, and the task that was sent last.

Runs in the notebook's process and does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection

from nbdist.world.task_run import TaskRun


class TaskTable:
    """The tasks in progress, and the task that was sent last.

    Several tasks can run side by side on different ranks.  `runs` has, in the order of sending, the
    task that was sent last and all tasks that ranks were still running at that time.  `last` is the
    task that was sent last.  But once set-up cells have run in new workers, `last` is again the
    task before these cells.  `failed_runs` has the tasks in which ranks died, until these ranks are
    replaced.
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
        """The tasks that at least one rank still runs, in the order of sending."""
        return [run for run in self.runs if run.unfinished]

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The ranks that run any task, sorted."""
        return tuple(sorted(rank for run in self.runs for rank in run.unfinished))

    @property
    def is_idle(self) -> bool:
        """Whether no rank runs a task."""
        return not self.unfinished

    @property
    def known_runs(self) -> list[TaskRun]:
        """The tasks that a message of the agent can be about: those in `runs`, and `last`."""
        last = self.last
        return self.runs if last is None or last in self.runs else [*self.runs, last]

    def find_run(self, task_id: str) -> TaskRun | None:
        """Return the task of `known_runs` with this id; None if there is none."""
        return next((run for run in self.known_runs if run.task.id == task_id), None)

    def run_on(self, ranks: Collection[int]) -> TaskRun | None:
        """Return the earliest task that one of these ranks runs; None if all of them are free."""
        return next((run for run in self.runs if not {*run.unfinished}.isdisjoint(ranks)), None)

    def stopped_run(self, ranks: Collection[int]) -> TaskRun | None:
        """Return the first stopped task that the next task on `ranks` has to wait for, or None.

        This is a stopped task that one of `ranks` still runs.  It can also be a stopped task that
        has ended on all its ranks, whether or not `ranks` have run it, if `recovery.follow` has not
        done the work after the task, such as healing the group.  Jobs are left out.
        """
        for run in self.known_runs:
            # The caller of a job follows the job to its end, also after Stop.
            is_left = run.stop.is_stopping and not run.is_over and not run.stop.is_of_job
            if is_left and not (run.unfinished and {*run.unfinished}.isdisjoint(ranks)):
                return run
        return None

    def add(self, running: TaskRun) -> None:
        """Add a task that is being sent; drop the tasks that no rank runs any more."""
        self.runs = [*self.unfinished_runs, running]
        self.last = running

    def forget(self) -> None:
        """Empty the table, because the workers have ended."""
        self.last, self.runs, self.failed_runs = None, [], []
