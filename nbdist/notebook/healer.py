"""Makes the workers of a pool ready for the next cell, and shows what has happened to them.

Runs in the notebook's process, on IPython's main thread.  Each `Pool` owns a `Healer`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from nbdist.errors import Interrupted, NbdistError
from nbdist.notebook.display import CellDisplay
from nbdist.notebook.jobs import PoolJobs
from nbdist.notebook.late_output import LateOutput
from nbdist.notebook.outcome import Failures
from nbdist.words import name_ranks, one_line
from nbdist.world import dispatch, inbox
from nbdist.world.engine import Engine
from nbdist.world.name_table import list_names
from nbdist.world.outcome_texts import scaled_text
from nbdist.world.states import WorldState, size_text
from nbdist.world.task_error import not_stopped
from nbdist.world.task_run import TaskRun
from nbdist.world.world import World


class Healer:
    """Replaces workers of a pool that have died outside of a cell, and tells the user.

    `Pool.ensure` and `PoolWorld` call `make_ready` before each cell and call.  The event loop calls
    `show_news` between cells.
    """

    def __init__(
        self,
        jobs: PoolJobs,
        late: LateOutput,
        failures: Failures,
        make_display: Callable[[], CellDisplay],
        find_world: Callable[[], World | None],
    ) -> None:
        """Belong to the pool that has these objects.

        `make_display` returns a display below the notebook cell that runs now.  `find_world`
        returns the pool's present world, or None if the pool has no world.
        """
        # The number of workers that the user was last told; other code sets it too, such as
        # `%dist_scale`.
        self.shown_size = 0
        self._jobs = jobs
        self._late = late
        self._failures = failures
        self._make_display = make_display
        self._find_world = find_world

    def __repr__(self) -> str:
        return f"<Healer of {self._find_world()}>"

    def make_ready(
        self, display: CellDisplay, ranks: Collection[int] | None = None
    ) -> World | None:
        """Return the world, ready for a cell on `ranks`, or None if there are no workers.

        Waits for jobs on `ranks`, by default on any rank, and for ranks that still run a cell that
        the user has stopped.  Then replaces dead workers.  Notes on the display name the ranks that
        have died since the last cell.
        """
        self._jobs.wait(display, ranks)
        for failure in self._jobs.pop_failure_notes():
            display.add_note(failure)
        if (world := self._find_world()) is not None:
            _complete_shutdown(world)
            self._wait_for_stop(world.engine, display, ranks)
            self._heal_between_cells(world.engine, display)
        self._late.cells.finish_lines()
        self._late.show()
        for text in self._late.cells.pop_texts():
            display.add_note(text)
        world = self._find_world()  # find it again: a job's callback may have started another world
        if world is None or world.state is WorldState.STOPPED:
            return None
        before, self.shown_size = self.shown_size, world.size
        moved = world.engine.rank_table.pop_renumbering()
        if before != self.shown_size or moved:
            display.add_note(size_text(self.shown_size, moved))
        return world

    def _wait_for_stop(
        self, engine: Engine, display: CellDisplay, among: Collection[int] | None
    ) -> None:
        """Wait for ranks that still run a cell although Stop has ended it in the notebook.

        With `among`, waits only if one of these ranks has to leave that cell, or if the process
        group is broken.  Output that comes during the wait is shown under the stopped cell by the
        next `LateOutput.show`.  Raises RanksNotStopped if ranks have not left the cell in time, and
        Interrupted if the user presses Stop during the wait.
        """
        if (running := dispatch.stopped_run(engine, among)) is None:
            return

        def show_wait() -> None:
            ranks = name_ranks(running.unfinished)
            display.show_status(f"waiting for {ranks} to leave the stopped cell …")

        try:
            damage = dispatch.wait_for_stop(engine, among, show_wait)
        except KeyboardInterrupt:
            verb = "was" if len(running.unfinished) == 1 else "were"
            again = f"{name_ranks(running.unfinished)} {verb} interrupted again"
            raise Interrupted((), f"this cell has not run; {again}") from None
        if running.unfinished:  # raise here: `dispatch.submit` would first wait once more
            raise not_stopped(running)
        self._late.cells.add_to_display(running.transcript, running.pop_outputs())
        if damage:
            display.add_note(f"the stopped cell: {damage}")
            running.transcript.warn(damage)
        self._late.cells.mark_changed(running.transcript)

    @property
    def is_active(self) -> bool:
        """Whether a job runs, or ranks still run a cell that was stopped."""
        return bool(self._jobs.running or ((stopped := self._stopped) and stopped.unfinished))

    @property
    def _stopped(self) -> TaskRun | None:
        """The cell that Stop has ended in the notebook although ranks still ran it.

        None if there is no such cell.
        """
        world = self._find_world()
        return dispatch.stopped_run(world.engine) if world else None

    def show_news(self) -> None:
        """Replace workers that have died since the last cell; show their deaths and late output.

        While ranks still run a cell that the user has stopped, only redraws that cell.
        """
        world = self._find_world()
        if world is not None and (stopped := self._stopped) is not None:
            self._late.show_stopped(world, stopped)
        elif world is not None and world.engine.task_table.is_idle and world.state.has_workers:
            display = self._make_display()
            self._heal_between_cells(world.engine, display)
            self._late.show()
            for text in () if display.can_change else self._late.cells.pop_texts():
                display.add_note(text)
            if world.engine.connection.lost is not None:
                display.add_note(str(world.engine.connection.lost))

    def _heal_between_cells(self, engine: Engine, display: CellDisplay) -> None:
        """Replace workers that died while no cell ran, and start workers on machines that joined.

        Notes on the display say which ranks died and which machines joined.
        """
        inbox.receive_waiting(engine)
        if not engine.task_table.is_idle:
            return
        table = engine.rank_table
        machines, dead = table.machines, dict(table.dead)
        joined = list_names(table.joined)
        problem, kept = "", list_names(engine.kept.names)
        try:
            dispatch.make_whole(engine)
        except NbdistError as error:
            problem = f"{kept} could not be given back: {one_line(str(error))}"
        if joined and not table.joined:
            display.add_note(f"{joined} came · {scaled_text(engine)}")
            self.shown_size = engine.size
        dead = {rank: died for rank, died in dead.items() if rank not in table.dead}
        self._failures.note_deaths(engine, display, machines, dead)
        if problem:
            display.add_note(problem)


def _complete_shutdown(world: World) -> None:
    """Finish a shutdown if Stop has interrupted the wait for it; do nothing in other states."""
    if world.state is WorldState.STOPPING:
        world.shutdown()
