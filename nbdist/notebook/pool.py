"""The pools of a notebook: a `Pool` manages the world of one name, and `Pools` has all pools.

Runs in the notebook's process, mostly on IPython's main thread.  Commands, cells and IPython's
events call the methods.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from nbdist.config import DEFAULT_POOL, LOCAL, WorldConfig
from nbdist.errors import ForkedProcess, Interrupted, NbdistError, StartError, UsageError
from nbdist.notebook.cell_text import AUTO_NOTE, AutoMode, is_attended
from nbdist.notebook.debugger import CellDebugger
from nbdist.notebook.display import CellDisplay, has_panels, make_display
from nbdist.notebook.free_names import (
    Gathered,
    assigned_in,
    names_bound,
    names_certainly_bound,
    names_used,
)
from nbdist.notebook.idle import FinishedCells, IdleStop, IdleWatch, is_in_subshell
from nbdist.notebook.jobs import Job
from nbdist.notebook.options import NbDist, check_same, typed_options
from nbdist.notebook.outcome import Routine, Why, death_of, failure_of_start, idle_end
from nbdist.notebook.pages import Pages
from nbdist.notebook.rich_output import WidgetRelay
from nbdist.output.events import Died, RankError
from nbdist.topology import parse_ranks
from nbdist.words import count, name_ranks, one_line
from nbdist.world import dispatch, inbox, lifecycle, restarts
from nbdist.world.agent_link import Link
from nbdist.world.engine import NotebookHooks
from nbdist.world.name_table import list_names
from nbdist.world.outcome_texts import healing_text, scaled_text
from nbdist.world.recovery import record_changes
from nbdist.world.snapshot_store import SnapshotStore, owner_of, root_folder
from nbdist.world.spec import default_log_dir
from nbdist.world.states import Machines, WorldState, size_text
from nbdist.world.task_error import not_stopped
from nbdist.world.task_run import TaskRun
from nbdist.world.world import World

GROUP_IS_BROKEN = "All ranks must be free, so that they can form their process group again."
KEPT_BY_RESTART = "kept for `%dist_restart` as the next command that starts workers"


class Pool:
    """A pool, with the world in which its cells run, its past cells, and its jobs.

    Only IPython's main thread starts, heals and ends the workers.
    """

    def __init__(self, pools: Pools, name: str) -> None:
        self._pools = pools
        self.shell = pools.shell
        self.gathered = pools.gathered
        self.pages = pools.pages
        self.name = name
        self.world: World | None = None
        self.last: TaskRun | None = None  # the newest cell, also while it runs
        self.past_cells = FinishedCells()
        self.last_failure: Why | None = None  # the last failure, for `%dist_why`
        # The newest failed cell: when its failure was found, the rank that failed first, its error.
        self.failed: tuple[float, int, RankError] | None = None
        self.routine = Routine()
        self.request: dict[str, Any] = {}  # the Jupyter message of the last distributed cell
        self.shown_size = 0  # the number of workers that the user was last told
        self._displayed_in = 0  # the length of IPython's history at the last call of `display`
        # The link to the agent that `%load_ext` has started, until a world takes it over.
        self.prestarted: Link | None = None
        self._widgets: WidgetRelay | None = None
        self._idle = IdleWatch(self._notice, self._is_active)
        self._jobs: list[Job] = []  # the jobs, in the order in which they were sent
        self._is_stepping_jobs = False

    def __repr__(self) -> str:
        return f"<Pool {self.name} {self.world}>"

    @property
    def debugger(self) -> CellDebugger | None:
        """The front end's debugger over all ranks; None without a kernel that can be debugged."""
        return self._pools.debugger

    # --- the pool's state -----------------------------------------------------------------

    @property
    def has_workers(self) -> bool:
        """Whether the pool has worker processes, idle or busy."""
        return self.world is not None and self.world.state.has_workers

    @property
    def headline(self) -> str:
        """A line such as `4 workers on node01 · gloo · ready`, or how to start workers.

        The line ends with the `--name` of the world if it has one, and has `8 workers as 2x4` if
        there are several nodes.
        """
        world = self.world
        if world is None or not world.state.has_workers:
            return "no workers are running · `%%distributed -n 4` or `%dist_init -n 4` starts them"
        table, workers = world.engine.rank_table, count(world.size, "worker")
        shape = "" if table.layout.startswith("1x") else f" as {table.layout}"
        parts = [f"{self._title}{workers}{shape} on {table.machines}", table.backend]
        return " · ".join(filter(None, [*parts, world.state.value, world.engine.config.name]))

    @property
    def ready_text(self) -> str:
        """A line such as `4 workers ready · gloo`, after the pool's name if the pool is named."""
        assert self.world is not None
        workers = count(self.world.size, "worker")
        return f"{self._title}{workers} ready · {self.world.engine.rank_table.backend}"

    @property
    def own_name(self) -> str:
        """The pool's name in texts for users; "" for the default pool, which is not named."""
        return "" if self.name == DEFAULT_POOL else self.name

    @property
    def _title(self) -> str:
        return f"pool {self.own_name} · " if self.own_name else ""

    @property
    def snapshot_store(self) -> SnapshotStore:
        """The store of this pool's snapshots, which exists also before the pool has workers."""
        if self.world is not None:
            return self.world.snapshot_store
        return SnapshotStore(root_folder(default_log_dir()), owner_of(self.name))

    def log_files(self) -> dict[int, str]:
        """Return by rank the path of the rank's log file, without ranks that have no log file.

        In a world with other machines, the path begins with the machine's name: `node1:/...`.
        """
        if self.world is None:
            return {}
        table = self.world.engine.rank_table
        logs = {rank: f"{folder}/stdout.log" for rank, folder in table.logs.items() if folder}
        if not table.is_elsewhere:
            return logs
        return {rank: f"{table.machines.name(rank)}:{file}" for rank, file in logs.items()}

    def display(self, *, is_quiet: bool = False) -> CellDisplay:
        """Make a display for output of this pool below the notebook cell that runs now."""
        history: Any = getattr(self.shell, "history_manager", None)
        cells = getattr(history, "input_hist_raw", None) or [""]
        # Only the first display of a cell may replace the cell's output: a cell can have several.
        is_first, self._displayed_in = len(cells) != self._displayed_in, len(cells)
        auto = self._pools.auto
        cell = (auto.running or cells[-1]) if is_first else ""
        notes = (AUTO_NOTE,) if auto.pool else ()
        settings = self._pools.settings
        return make_display(self.shell, settings, cell, notes, self.own_name, is_quiet=is_quiet)

    # --- starting, healing and ending the workers -----------------------------------------

    def ensure(
        self,
        options: argparse.Namespace,
        display: CellDisplay,
        *,
        for_training: bool = False,
    ) -> World:
        """Return the pool's world, ready for a cell (`heal_world`); start a world if there is none.

        `options` are the options of the magic, with which a new world is started.  First waits
        until no job and no stopped cell runs on the ranks of `-r`, by default on any rank.  With
        `for_training`, new workers import in advance what DDP, FSDP2 and optimizers import.

        Raises:
            UsageError: the running world has other options.
        """
        on, ranks = None, getattr(options, "ranks", None)  # not every magic has `-r`
        if ranks and self.world is not None and self._is_active():
            on = parse_ranks(ranks, self.world.size)
        if (world := self.heal_world(display, on)) is not None:
            check_same(world, options)
            engine = world.engine
            if options.on_failure:
                engine.config = engine.config.with_changes(on_failure=options.on_failure)
            if options.detach and not engine.config.detach:
                engine.config = engine.config.with_changes(detach=True)
                engine.remember()
            return world
        world = self._make_world(typed_options(options))
        table = world.engine.rank_table
        table.spec = replace(table.spec, for_training=for_training)
        self._start(world, display)
        return world

    def heal_world(
        self, display: CellDisplay, ranks: Collection[int] | None = None
    ) -> World | None:
        """Return the world, ready for a cell on `ranks`, or None if there are no workers.

        Waits for jobs on `ranks`, by default on any rank, and for ranks that still run a cell that
        the user has stopped.  Then replaces dead workers.  Notes on the display name the ranks that
        have died since the last cell.
        """
        self.wait_for_jobs(display, ranks)
        ended, self._jobs = [each for each in self._jobs if each.has_ended], self.jobs
        for failure in filter(None, (job.pop_failure_note() for job in ended)):
            display.add_note(failure)
        if self.world is not None:
            _complete_shutdown(self.world)
            self._wait_for_stop(self.world, display, ranks)
            self._heal_between_cells(self.world, display)
        self.past_cells.finish_lines()
        self.show_late()
        for text in self.past_cells.pop_texts():
            display.add_note(text)
        if self.world is None or self.world.state is WorldState.STOPPED:
            return None
        before, self.shown_size = self.shown_size, self.world.size
        moved = self.world.engine.rank_table.pop_renumbering()
        if before != self.shown_size or moved:
            display.add_note(size_text(self.shown_size, moved))
        return self.world

    def _wait_for_stop(
        self, world: World, display: CellDisplay, among: Collection[int] | None
    ) -> None:
        """Wait for ranks that still run a cell although Stop has ended it in the notebook.

        With `among`, waits only if one of these ranks has to leave that cell, or if the process
        group is broken.  Output that comes during the wait is shown under the stopped cell by the
        next `show_late`.  Raises RanksNotStopped if ranks have not left the cell in time, and
        Interrupted if the user presses Stop during the wait.
        """
        if (running := dispatch.stopped_run(world.engine, among)) is None:
            return

        def show_wait() -> None:
            ranks = name_ranks(running.unfinished)
            display.show_status(f"waiting for {ranks} to leave the stopped cell …")

        try:
            damage = dispatch.wait_for_stop(world.engine, among, show_wait)
        except KeyboardInterrupt:
            verb = "was" if len(running.unfinished) == 1 else "were"
            again = f"{name_ranks(running.unfinished)} {verb} interrupted again"
            raise Interrupted((), f"this cell has not run; {again}") from None
        if running.unfinished:  # raise here: `dispatch.submit` would first wait once more
            raise not_stopped(running)
        self.past_cells.add_to_display(running.transcript, running.pop_outputs())
        if damage:
            display.add_note(f"the stopped cell: {damage}")
            running.transcript.warn(damage)
        self.past_cells.mark_changed(running.transcript)

    def attach(self, world: World) -> None:
        """Take over a world that already runs, and close the agent that `%load_ext` has started."""
        self._use_world(world)
        self._close_prestarted()

    def restart(
        self, changes: Mapping[str, Any], keep: Sequence[str], display: CellDisplay
    ) -> tuple[str, ...]:
        """Restart all workers with their former options and these changes.

        Returns the names of the variables that the new workers have got back.  These are the names
        in `keep`.  If the restart before this one has failed, they are the names of the variables
        that it had saved.  Without a world, starts workers and returns ().
        """
        world = self.world
        if world is None:
            self._start(self._make_world(changes), display)
            return ()
        display.show_status("restarting")
        # A start replaces this table, so the code below can tell whether workers have started.
        names = world.engine.names
        try:
            kept_names = restarts.restart(world.engine, keep=keep, **changes)
        except StartError as error:
            self.last_failure = failure_of_start(error)
            raise
        finally:  # also after an error, because the old workers may have ended by then
            if not world.state.has_workers:
                self._end_lost_jobs("its workers were ended")
                if kept := world.engine.kept.names:
                    display.add_note(f"{list_names(kept)}: {KEPT_BY_RESTART}")
            elif world.engine.names is not names:
                self._end_lost_jobs("its workers were restarted")
                self._use_world(world)
        warning = world.engine.start_notes.warning if changes else ""
        for text in filter(None, (warning, world.engine.start_notes.folder_note)):
            display.add_note(text)
        return kept_names

    def shutdown(self) -> str:
        """End the workers and the agent; return a line on the result, or "" without workers."""
        had_workers = self.has_workers
        if self.world is not None and (widgets := self.world.engine.outputs.widgets) is not None:
            widgets.end()
            self.show_late()
        self._end("its workers were shut down")
        problem = lifecycle.shutdown(self.world.engine) if self.world is not None else ""
        # Forget the world only after `lifecycle.shutdown`: if Stop interrupts the wait for the
        # workers' end, the next `%dist_shutdown` needs the world.
        self.world = None
        return (
            f"workers ended, but {problem}" if problem else "workers ended" if had_workers else ""
        )

    def close(self) -> None:
        """End the workers at once, except those of a world with `--detach`, which are detached."""
        self._end("the notebook has ended")
        world, self.world = self.world, None
        if world is not None:
            stays = world.engine.config.detach and world.state.has_workers
            if (link := world.engine.connection.detach()) is not None:
                link.detach() if stays else link.close()

    def _end(self, why: str) -> None:
        self._end_lost_jobs(why)
        if self._widgets is not None:
            self._widgets.close()
            self._widgets = None
        self._idle.stop()
        self._close_prestarted()

    def _close_prestarted(self) -> None:
        link, self.prestarted = self.prestarted, None
        if link is not None:
            link.close()

    def _make_world(self, changes: Mapping[str, Any]) -> World:
        config = self.world.engine.config if self.world else WorldConfig(pool=self.name)
        world = World(**vars(config.with_changes(**changes)))
        # In an embedded shell the user's variables are not those of the module `__main__`.
        world.engine.names.namespace = self.shell.user_ns
        if self.prestarted is not None and world.engine.config.launcher_name == LOCAL:
            world.engine.connection.adopt(self.prestarted)
            self.prestarted = None
        return world

    def _start(self, world: World, display: CellDisplay) -> None:
        if warning := world.engine.start_notes.warning:
            display.add_note(warning, stays=False)
        display.show_status(f"starting {count(world.size, 'worker')} …")
        try:
            for text in filter(None, lifecycle.starting_texts(world.engine)):
                display.show_status(text)
        except KeyboardInterrupt:
            raise Interrupted(()) from None
        except StartError as error:
            self.last_failure = failure_of_start(error)
            raise
        notes = world.engine.start_notes
        for text in (*notes.missing, notes.folder_note):
            if text:
                display.add_note(text.rstrip("."))
        self._use_world(world)

    def _use_world(self, world: World) -> None:
        if self.world is world:
            self.show_late()  # mark lost widgets in past cells before `forget` drops their displays
        self.world, self.shown_size = world, world.size
        world.engine.hooks = NotebookHooks(self._wait_until_free, self.step_jobs)
        is_page = hasattr(self.shell, "kernel") and has_panels(self.shell, self._pools.settings)
        world.engine.outputs.shows_widgets = is_page
        self.past_cells.forget()
        self._watch_while_idle()

    def note_other_values(self, read: Collection[str]) -> None:
        """Tell the user if a plain cell has read a variable that has another value on ranks.

        `read` are the names that the cell used.  Each variable is named once.  Does nothing while
        the workers are busy.
        """
        names, engine = self.world.engine.names, self.world.engine  # type: ignore[union-attr]
        notebook_names = [n for n in read if n in self.shell.user_ns and n not in self.gathered]
        shared = [
            name for name in notebook_names if names.record(name) or names.ranks_that_assigned(name)
        ]
        is_busy = not engine.task_table.is_idle or bool(self.jobs)
        if not shared or is_busy or engine.state is not WorldState.READY:
            return
        if names.objects.have_run and any(map(names.record, shared)):
            with suppress(KeyboardInterrupt):  # the cell has ended, so Stop ends only this check
                record_changes(engine, engine.rank_table.everyone)
        for name in shared:
            is_other = bool(names.ranks_that_assigned(name)) or names.is_changed(name)
            if is_other and names.is_first_notice(f"{name} here"):
                self.display().show_text(
                    f"this is the notebook's `{name}`; the ranks have another: "
                    f"`%dist_gather {name} --as {name}_ranks` brings theirs"
                )

    # --- while no cell runs ---------------------------------------------------------------

    def bind_gathered(
        self, values: Mapping[str, Any], rank_names: Sequence[str], ranks: Collection[int]
    ) -> None:
        """Bind values in the notebook that were gathered from `ranks`.

        `values` has the values by name.  Later cells do not send these values to the ranks.
        `rank_names` are the names that `ranks` also use for these variables.  From now on these
        names belong to the ranks.
        """
        self.shell.user_ns.update(values)
        self.gathered.add(values)
        if self.world is not None:
            for name in values:
                self.world.engine.names.record_gathered(name, ranks if name in rank_names else ())

    def watch_prompt(self) -> None:
        """Watch the workers while a terminal's prompt is open.

        This runs on the event loop of the prompt; each prompt of IPython has a new loop.
        """
        self._watch_while_idle()
        self._idle.update()

    def _watch_while_idle(self) -> None:
        world = self.world if self.has_workers else None
        self._idle.follow(world.engine.connection.link if world else None)

    def show_widgets(self) -> None:
        """Pass the new messages of the ranks' widgets to the page, and mark lost widgets."""
        if self.world is None or (widgets := self.world.engine.outputs.widgets) is None:
            return
        if self._widgets is None or self._widgets.widgets is not widgets:
            if self._widgets is not None:
                self._widgets.close()
            self._widgets = WidgetRelay(self.shell, widgets, self.world.engine)
        self._widgets.show()
        if widgets.ended_widgets:
            lost, widgets.ended_widgets = widgets.ended_widgets, {}
            self.past_cells.lose_widgets(lost)

    def show_late(self, *, at_once: bool = True, running: CellDisplay | None = None) -> None:
        """Add late output to the cells that it belongs to, and update widgets.

        `running` is the display of the cell that runs now.  Before the late output of other cells
        is shown, this display is paused: in a terminal it removes its progress bar, because the
        late lines are printed at the same place.
        """
        if self.world is not None:
            self.show_widgets()
            self.past_cells.receive(self.world.engine.outputs.pop_late())
            if running is not None and self.past_cells.has_changes:
                running.pause()
            self.past_cells.show(self.log_files(), at_once=at_once)

    def _notice(self) -> None:
        self.run_job_steps()
        # Programs that run notebooks drop output between cells: the next cell shows the output.
        if is_attended(self.shell):
            self.show_news()

    def _is_active(self) -> bool:
        """Return True while a job runs, or while ranks still run a cell that was stopped."""
        return bool(self.jobs) or bool(self._stopped and self._stopped.unfinished)

    @property
    def _stopped(self) -> TaskRun | None:
        """The cell that Stop has ended in the notebook although ranks still ran it.

        None if there is no such cell.
        """
        return dispatch.stopped_run(self.world.engine) if self.world else None

    def end_cell(self, running: TaskRun, display: CellDisplay) -> None:
        """Record a cell that has ended, so that later output of its ranks is added to it."""
        self.past_cells.add(running.transcript, display)
        self.show_late()
        self._idle.update()

    def show_news(self) -> None:
        """Replace workers that have died since the last cell; show their deaths and late output.

        While ranks still run a cell that the user has stopped, only redraws that cell.
        """
        world = self.world
        if world is not None and (stopped := self._stopped) is not None:
            inbox.receive_waiting(world.engine)
            self.past_cells.add_to_display(stopped.transcript, stopped.pop_outputs())
            self.past_cells.update(stopped.transcript)
            self.past_cells.show(self.log_files(), at_once=not stopped.unfinished)
        elif world is not None and world.engine.task_table.is_idle and world.state.has_workers:
            display = self.display()
            self._heal_between_cells(world, display)
            self.show_late()
            for text in () if display.can_change else self.past_cells.pop_texts():
                display.add_note(text)
            if world.engine.connection.lost is not None:
                display.add_note(str(world.engine.connection.lost))

    def _heal_between_cells(self, world: World, display: CellDisplay) -> None:
        """Replace workers that died while no cell ran, and start workers on machines that joined.

        Notes on the display say which ranks died and which machines joined.
        """
        inbox.receive_waiting(world.engine)
        if not world.engine.task_table.is_idle:
            return
        table = world.engine.rank_table
        machines, dead = table.machines, dict(table.dead)
        joined = list_names(table.joined)
        problem, kept = "", list_names(world.engine.kept.names)
        try:
            dispatch.make_whole(world.engine)
        except NbdistError as error:
            problem = f"{kept} could not be given back: {one_line(str(error))}"
        if joined and not table.joined:
            display.add_note(f"{joined} came · {scaled_text(world.engine)}")
            self.shown_size = world.size
        dead = {rank: died for rank, died in dead.items() if rank not in table.dead}
        self.note_deaths(world, display, machines, dead)
        if problem:
            display.add_note(problem)

    def note_deaths(
        self, world: World, display: CellDisplay, machines: Machines, dead: Mapping[int, Died] = {}
    ) -> None:
        """Add notes to the display that say which ranks died outside of a cell and were replaced.

        `dead` has the ranks that the caller has replaced.  Ranks that other code has replaced since
        the last call are added (`RankTable.pop_replaced`).  `machines` are the machines on which
        the ranks ran before they died.
        """
        dead = {**dead, **world.engine.rank_table.pop_replaced()}
        self.note_ends(dead, machines, display)
        if dead:
            display.add_note(healing_text(world.engine, dead).rstrip("."))
            if self.routine.hint:
                display.add_note(self.routine.hint)

    def note_ends(self, dead: Mapping[int, Died], machines: Machines, display: CellDisplay) -> None:
        """Show how ranks died outside of a cell, and keep the last of the deaths for `%dist_why`.

        `dead` has the deaths by rank, and `machines` the name of the machine of each rank.  A line
        is shown for each death in `display`, but not for deaths by a requested restart, or for
        deaths that a cell has reported.
        """
        told = self.world.engine.rank_table.told_deaths if self.world is not None else set()
        for rank, died in dead.items():
            if not (died.by_restart or died.pid in told):
                log = self.log_files().get(rank, "")
                self.last_failure = death_of(rank, machines.name(rank), died, log)
                display.add_note(f"rank {rank} {idle_end(died)}")

    # --- cells that were sent with `--no-wait` --------------------------------------------

    @property
    def jobs(self) -> list[Job]:
        """The cells in the background that have not ended; no two of them share a rank."""
        return [job for job in self._jobs if not job.has_ended]

    def begin_job(self, job: Job) -> None:
        """Let the event loop run steps of this job between cells, from now on.

        Stop between cells then interrupts the job.
        """
        self._jobs.append(job)
        job.step_others = self.step_jobs
        self._idle.update()

    def wait_for_jobs(self, display: CellDisplay, ranks: Collection[int] | None = None) -> None:
        """Wait until no job runs on `ranks`, by default on any rank.

        If the process group must be formed again, waits for all jobs.  Stop ends only the waiting,
        not the jobs.
        """
        while (job := self._job_before(ranks)) is not None:
            is_apart = ranks is not None and {*job.ranks}.isdisjoint(ranks)
            job.wait_with_status(display, f"{GROUP_IS_BROKEN} " if is_apart else "")

    def _job_before(self, ranks: Collection[int] | None) -> Job | None:
        """Return a job that must end before a task on `ranks` can be sent; None if there is none.

        `ranks` is None for all ranks.  If the process group is broken, each job must end first:
        only idle ranks can form the group again.
        """
        if self.world is not None:
            inbox.receive_waiting(self.world.engine)
            if self.world.engine.is_broken:
                ranks = None
        for job in self.jobs:
            if ranks is None or not {*job.ranks}.isdisjoint(ranks):
                return job
        return None

    def _wait_until_free(self, ranks: Collection[int]) -> None:
        """Wait for jobs on these ranks before a task is sent there (`dispatch.submit`)."""
        # The step of a job can send a task.  A wait in that step would never end, because the job
        # makes no progress until the step returns.
        if not self.jobs or any(job.is_stepping for job in self._jobs):
            return
        display = self.display()
        try:
            self.wait_for_jobs(display, ranks)
        finally:
            display.close()

    def step_jobs(self) -> None:
        """Show the new output of all jobs, while another cell runs or waits for a job."""
        if self._is_stepping_jobs or not self._jobs:
            return
        self._is_stepping_jobs = True
        # Widgets of a job are new displays, which belong below the job's cell.  Programs that run
        # notebooks drop output for other cells than the running one.
        in_its_cell = is_attended(self.shell)
        try:
            for job in self.jobs:
                job.step(in_its_cell=in_its_cell)
        finally:
            self._is_stepping_jobs = False

    def show_jobs(self) -> None:
        """Show the jobs' new output; called at the end of each notebook cell."""
        if is_in_subshell(self.shell):  # on another thread; only the main thread may run jobs
            return
        for job in self._jobs:
            job.step()
            if job.has_ended and job.pop_drawn_between():
                # Redraw the job's panel now, during a cell: nbclient, which runs notebooks as a
                # program, has ignored the updates that came between cells.
                self.past_cells.mark_changed(job.task_run.transcript)
                self.show_late()

    def run_job_steps(self) -> None:
        """Run a step of each job between cells, and let Stop interrupt jobs while no cell runs.

        Once no job runs, Stop has no effect between cells again.
        """
        if self.jobs and self._idle.loop is not None:
            self._pools.idle_stop.update(self._idle.loop)
            for job in self.jobs:
                job.step(in_its_cell=True)
        if not self.jobs:
            self._pools.idle_stop.update()

    def _end_lost_jobs(self, why: str) -> None:
        for job in self._jobs:
            job.end_as_lost(why)
        if self._jobs:
            self._pools.idle_stop.update()


def _complete_shutdown(world: World) -> None:
    """Finish a shutdown if Stop has interrupted the wait for it; do nothing in other states."""
    if world.state is WorldState.STOPPING:
        world.shutdown()


# --- all pools of a notebook ------------------------------------------------------------------


class Pools:
    """All pools of a notebook: the default pool and each pool that was named so far."""

    def __init__(self, shell: InteractiveShell, settings: NbDist) -> None:
        self._pid = os.getpid()
        self.shell = shell
        self.settings = settings
        self.auto = AutoMode()
        self.idle_stop = IdleStop(self._stop_jobs, lambda: any(each.jobs for each in self))
        self.gathered = Gathered(shell.user_ns)
        self.pages = Pages(shell)
        self.debugger: CellDebugger | None = None  # set by `nbdist.notebook.extension`
        self._pools = {DEFAULT_POOL: Pool(self, DEFAULT_POOL)}

    def __iter__(self) -> Iterator[Pool]:
        # A copy, because completion iterates on its own thread while a cell may make a pool.
        yield from [*self._pools.values()]

    @property
    def default(self) -> Pool:
        """The pool of cells without `--pool`."""
        return self._pools[DEFAULT_POOL]

    def find_or_make(self, name: str | None) -> Pool:
        """Return the pool of this name, or make it; None or "" is the default pool.

        Raises:
            UsageError: the name is not a word.
            ForkedProcess: this process was forked from the notebook's.
        """
        self.check_process("`%%distributed` and nbdist's other magics")
        name = name or DEFAULT_POOL
        if not name.replace("-", "_").isidentifier():
            raise UsageError(f"`--pool {name}`: a pool's name is a word, such as `--pool trainer`.")
        if name not in self._pools:
            self._pools[name] = Pool(self, name)
        return self._pools[name]

    def check_process(self, call: str) -> None:
        """Raise ForkedProcess, with a text that names the call, in a fork of the notebook."""
        if os.getpid() != self._pid:
            raise ForkedProcess(call)

    def find(self, name: str | None) -> Pool | None:
        """Return the pool of this name, None if there is none; any thread may call this.

        Without a `name` the pool is the default pool.  Any thread may read from the pool.
        """
        return self._pools.get(name or DEFAULT_POOL)

    def world_of(self, name: str | None) -> World | None:
        """Return the world of a pool, or None if the pool has no workers.

        `name` is the name of the pool, None for the default pool.  Any thread may call this, and
        may read from the world.
        """
        pool = self.find(name)
        return pool.world if pool and pool.has_workers else None

    def show_news(self, _info: object) -> None:
        """Call `Pool.show_news` before each cell, if a program such as papermill runs the notebook.

        In a notebook with a user, the event loop calls `Pool.show_news` between cells instead.
        """
        if not (is_attended(self.shell) or is_in_subshell(self.shell)):
            for pool in self:
                pool.show_news()

    def notice_names(self, result: ExecutionResult) -> None:
        """Record the names that a cell has bound in the notebook; IPython calls this after cells.

        Also shows new output of jobs, and notes on variables of which the ranks have another value.
        """
        prompt: Any = getattr(self.shell, "pt_app", None)  # only in a terminal
        for pool in self:
            pool.show_jobs()
            if prompt is not None:
                prompt.app.pre_run_callables.append(pool.watch_prompt)
        cell = getattr(result.info, "raw_cell", None) or ""
        bound, python = frozenset[str](), ""
        is_theirs = cell.lstrip().startswith(("%%distributed", "%%rank"))
        has_worlds = any(pool.world is not None for pool in self)
        if not is_theirs and (has_worlds or self.gathered.has_any):
            with suppress(SyntaxError):  # such a cell did not run, so it has bound no names
                python = self.shell.transform_cell(cell)
                bound = names_bound(python)
        if bound and result.success:
            # Skip names that do not exist: the cell may have deleted the name, or may not have run
            # the line that assigns it.
            self.gathered.add(name for name in assigned_in(python) if name in self.shell.user_ns)
        self.gathered.record_assigned(bound)
        for pool in self:
            if pool.world is not None:
                assigned = [name for name in bound if name not in self.gathered]
                if not is_theirs:
                    surely = names_certainly_bound(python) if python and result.success else ()
                    pool.world.engine.names.record_assigned(assigned, surely)
                if python and result.success:
                    pool.note_other_values(names_used(python))

    def do_shutdown(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Tell running cells that the kernel is about to exit, then let the kernel exit.

        A cell in a world with `--detach` then ends in the notebook, while its ranks run on.  Wraps
        the kernel's method `do_shutdown` (`original`), which runs on the kernel's control thread.
        """
        for pool in self:
            if pool.world is not None:
                pool.world.engine.connection.kernel_exiting.set()
        return original(*args, **kwargs)

    def close(self) -> None:
        """Close all pools; called when the notebook's process ends or unloads nbdist."""
        for pool in self:
            pool.close()

    def _stop_jobs(self) -> None:
        for pool in self:
            for job in pool.jobs:
                job.task_run.stop.presses += 1
            pool.run_job_steps()
