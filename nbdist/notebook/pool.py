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
from nbdist.errors import ForkedProcess, Interrupted, StartError, UsageError
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
from nbdist.notebook.healer import Healer
from nbdist.notebook.idle import IdleStop, IdleWatch, is_in_subshell
from nbdist.notebook.jobs import PoolJobs
from nbdist.notebook.late_output import LateOutput
from nbdist.notebook.options import NbDist, check_same, typed_options
from nbdist.notebook.outcome import Failures, Routine
from nbdist.notebook.pages import Pages
from nbdist.topology import parse_ranks
from nbdist.words import count
from nbdist.world import lifecycle, restarts
from nbdist.world.agent_link import Link
from nbdist.world.engine import Engine, NotebookHooks
from nbdist.world.name_table import list_names
from nbdist.world.recovery import record_changes
from nbdist.world.snapshot_store import SnapshotStore, owner_of, root_folder
from nbdist.world.spec import default_log_dir
from nbdist.world.states import WorldState
from nbdist.world.task_run import TaskRun
from nbdist.world.world import World

KEPT_BY_RESTART = "kept for `%dist_restart` as the next command that starts workers"
SETUP_LEFT_OUT = "cells with `--setup` have not run in the new workers: run them again"


class Pool:
    """A pool, with the world in which its cells run: starts, restarts and ends the workers.

    The pool owns a `PoolJobs`, a `LateOutput`, a `Failures` and a `Healer`.  Callers talk to these
    objects.  Only IPython's main thread starts, heals and ends the workers.
    """

    def __init__(self, pools: Pools, name: str) -> None:
        self._pools = pools
        self.shell = pools.shell
        self.gathered = pools.gathered
        self.pages = pools.pages
        self.name = name
        self.world: World | None = None
        self.last: TaskRun | None = None  # the newest run of a cell, or of some magics
        # The Jupyter message that last ran a cell on ranks, or showed its output (`%dist_output`).
        self.request: dict[str, Any] = {}
        self._displayed_in = 0  # the length of IPython's history at the last call of `display`
        # The link to the agent that `%load_ext` has started; None once a world uses this agent.
        self.prestarted: Link | None = None
        self.routine = Routine()
        self.failures = Failures(self.routine)
        self._idle = IdleWatch(self._notice, lambda: self.healer.is_active)
        self.late = LateOutput(self.shell, self._find_world)
        self.jobs = PoolJobs(
            self.late,
            self._idle,
            pools.idle_stop,
            self.display,
            shell=self.shell,
            find_world=self._find_world,
        )
        self.healer = Healer(self.jobs, self.late, self.failures, self.display, self._find_world)

    def __repr__(self) -> str:
        return f"<Pool {self.name} {self.world}>"

    def _find_world(self) -> World | None:
        return self.world

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
    def ready_text(self) -> str:
        """A line such as `4 workers ready · gloo`, after the pool's name if the pool is named."""
        assert self.world is not None
        workers = count(self.world.size, "worker")
        return f"{self.title}{workers} ready · {self.world.engine.rank_table.backend}"

    @property
    def own_name(self) -> str:
        """The pool's name in texts for users; "" for the default pool, which is not named."""
        return "" if self.name == DEFAULT_POOL else self.name

    @property
    def title(self) -> str:
        """The start of lines about the pool: `pool trainer · `; "" for the default pool."""
        return f"pool {self.own_name} · " if self.own_name else ""

    @property
    def snapshot_store(self) -> SnapshotStore:
        """The store of this pool's snapshots, which exists also before the pool has workers."""
        if self.world is not None:
            return self.world.snapshot_store
        return SnapshotStore(root_folder(default_log_dir()), owner_of(self.name))

    def display(self, *, is_quiet: bool = False) -> CellDisplay:
        """Make a display for output of this pool below the notebook cell that runs now."""
        history: Any = getattr(self.shell, "history_manager", None)
        cells = getattr(history, "input_hist_raw", None) or [""]
        # A cell can have several displays: only the first may replace the cell's output.
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
        """Return the pool's world, ready for a cell (`Healer`); start a world if there is none.

        `options` are the options of the magic, with which a new world is started.  First waits
        until no job and no stopped cell runs on the ranks of `-r`, by default on any rank.  With
        `for_training`, new workers import in advance what DDP, FSDP2 and optimizers import.

        Raises:
            UsageError: the running world has other options.
        """
        on, ranks = None, getattr(options, "ranks", None)  # not every magic has `-r`
        if ranks and self.world is not None and self.healer.is_active:
            on = parse_ranks(ranks, self.world.size)
        if (world := self.healer.make_ready(display, on)) is not None:
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
            self.failures.record_start(error)
            raise
        finally:  # also after an error, because the old workers may have ended by then
            if not world.state.has_workers:
                self.jobs.end_as_lost("its workers were ended")
                if kept := world.engine.kept.names:
                    display.add_note(f"{list_names(kept)}: {KEPT_BY_RESTART}")
            elif world.engine.names is not names:
                self.jobs.end_as_lost("its workers were restarted")
                self._use_world(world)
        warning = world.engine.start_notes.warning if changes else ""
        for text in filter(None, (warning, world.engine.start_notes.folder_note)):
            display.add_note(text)
        return kept_names

    def shutdown(self) -> str:
        """End the workers and the agent; return a line on the result, or "" without workers."""
        had_workers = self.has_workers
        self.late.end_widgets()
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
        self.jobs.end_as_lost(why)
        self.late.close()
        self._idle.stop()
        self._close_prestarted()

    def _close_prestarted(self) -> None:
        link, self.prestarted = self.prestarted, None
        if link is not None:
            link.close()

    def _make_world(self, changes: Mapping[str, Any]) -> World:
        """Return a new world, without workers yet, with the former options and these changes.

        It has neither the set-up cells nor the kept variables of an earlier world: only `restart`
        runs the same cells and binds the same variables in new workers.
        """
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
            self.failures.record_start(error)
            raise
        notes = world.engine.start_notes
        left_out = SETUP_LEFT_OUT if self.world and self.world.engine.setup.tasks else ""
        for text in (*notes.missing, notes.folder_note, left_out):
            if text:
                display.add_note(text.rstrip("."))
        self._use_world(world)

    def _use_world(self, world: World) -> None:
        if self.world is world:
            self.late.show()  # mark lost widgets in past cells before `forget` drops their displays
        self.world, self.healer.shown_size = world, world.size
        jobs = self.jobs
        world.engine.hooks = NotebookHooks(jobs.wait_until_free, jobs.step_beside_cell)
        is_page = hasattr(self.shell, "kernel") and has_panels(self.shell, self._pools.settings)
        world.engine.outputs.shows_widgets = is_page
        self.late.cells.forget()
        self._watch_while_idle()

    # --- while no cell runs ---------------------------------------------------------------

    def watch_prompt(self) -> None:
        """Watch the workers while a terminal's prompt is open.

        This runs on the event loop of the prompt; each prompt of IPython has a new loop.
        """
        self._watch_while_idle()
        self._idle.update()

    def _watch_while_idle(self) -> None:
        world = self.world if self.has_workers else None
        self._idle.follow(world.engine.connection.link if world else None)

    def _notice(self) -> None:
        self.jobs.step_between_cells()
        # Programs that run notebooks drop output between cells: the next cell shows the output.
        if is_attended(self.shell):
            self.healer.show_news()

    def end_cell(self, running: TaskRun, display: CellDisplay) -> None:
        """Record a cell that has ended, so that later output of its ranks is added to it."""
        self.late.cells.add(running.transcript, display)
        self.late.show()
        self._idle.update()


# --- all pools of a notebook ------------------------------------------------------------------


class Pools:
    """All pools of a notebook: the default pool and each pool that was named so far."""

    def __init__(self, shell: InteractiveShell, settings: NbDist) -> None:
        self._pid = os.getpid()
        self.shell = shell
        self.settings = settings
        self.auto = AutoMode()
        self.idle_stop = IdleStop(self._stop_jobs, lambda: any(each.jobs.running for each in self))
        self.gathered = Gathered(shell.user_ns)
        self.pages = Pages(shell)
        self.debugger: CellDebugger | None = None  # set by `nbdist.notebook.extension`
        self._pools = {DEFAULT_POOL: Pool(self, DEFAULT_POOL)}

    def __iter__(self) -> Iterator[Pool]:
        # A copy, because the kernel's control thread may iterate while a cell makes a pool.
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
        """Call `Healer.show_news` before each cell, if a program runs the notebook (papermill).

        In a notebook with a user, the event loop calls `Healer.show_news` between cells instead.
        """
        if not (is_attended(self.shell) or is_in_subshell(self.shell)):
            for pool in self:
                pool.healer.show_news()

    def notice_names(self, result: ExecutionResult) -> None:
        """Record the names that a cell has bound in the notebook; IPython calls this after cells.

        Also shows new output of jobs, and notes on variables of which the ranks have another value.
        """
        prompt: Any = getattr(self.shell, "pt_app", None)  # only in a terminal
        for pool in self:
            pool.jobs.show_output()
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
                    _note_other_values(pool, pool.world.engine, names_used(python))

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
            pool.jobs.interrupt()


def _note_other_values(pool: Pool, engine: Engine, read: Collection[str]) -> None:
    """Tell the user if a plain cell has read a variable that has another value on ranks.

    `read` are the names that the cell used.  Each variable is named once.  Does nothing while
    the workers are busy.
    """
    names, user_ns = engine.names, pool.shell.user_ns
    notebook_names = [name for name in read if name in user_ns and name not in pool.gathered]
    shared = [
        name for name in notebook_names if names.record(name) or names.ranks_that_assigned(name)
    ]
    is_busy = not engine.task_table.is_idle or bool(pool.jobs.running)
    if not shared or is_busy or engine.state is not WorldState.READY:
        return
    if names.objects.have_run and any(map(names.record, shared)):
        with suppress(KeyboardInterrupt):  # the cell has ended, so Stop ends only this check
            record_changes(engine, engine.rank_table.everyone)
    for name in shared:
        is_other = bool(names.ranks_that_assigned(name)) or names.is_changed(name)
        if is_other and names.is_first_notice(f"{name} here"):
            pool.display().show_text(
                f"this is the notebook's `{name}`; the ranks have another: "
                f"`%dist_gather {name} --as {name}_ranks` brings theirs"
            )
