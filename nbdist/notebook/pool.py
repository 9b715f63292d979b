"""The pools of a notebook: for each its world, how that is kept alive, and its names."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from nbdist.config import DEFAULT_POOL, LOCAL, WorldConfig
from nbdist.errors import ForkedProcess, Interrupted, UsageError
from nbdist.notebook.cell_text import AUTO_NOTE, AutoMode, is_attended
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
from nbdist.notebook.options import NbDist, check_same, given
from nbdist.notebook.outcome import Routine, Why, idle_end, why_died
from nbdist.notebook.pages import Pages
from nbdist.notebook.rich_output import WidgetRelay
from nbdist.output.events import Died, RankError
from nbdist.words import count, name_ranks
from nbdist.world.link import Link
from nbdist.world.names import list_names
from nbdist.world.recovery import healing_text, note_changes, scaled_text
from nbdist.world.running import TaskRun
from nbdist.world.snapshot_store import SnapshotStore, owner_of, root_folder
from nbdist.world.spec import default_log_dir
from nbdist.world.states import Machines, State, size_text
from nbdist.world.world import World


class Pool:
    """The world that a pool's cells run in; only IPython's own thread uses it.

    `last` is the cell that ran last, `ended` are the displays of earlier ones, `why` is the
    last failure, `failed` the rank that was first in that of a cell, with its error, and when.
    `prestarted` leads to the agent that `%load_ext` has started, until the first world has it.
    """

    def __init__(self, pools: Pools, name: str) -> None:
        self._pools = pools
        self.shell = pools.shell
        self.gathered = pools.gathered
        self.pages = pools.pages
        self.name = name
        self.world: World | None = None
        self.last: TaskRun | None = None
        self.ended = FinishedCells()
        self.why: Why | None = None
        self.failed: tuple[float, int, RankError] | None = None
        self.routine = Routine()
        self.request: dict[str, Any] = {}  # by which its page has run the last cell
        self.shown_size = 0
        self._displayed_in = 0  # so many cells had been typed then
        self.prestarted: Link | None = None
        self._widgets: WidgetRelay | None = None
        self._idle = IdleWatch(self._notice, self._goes_on)
        self._job: Job | None = None

    def __repr__(self) -> str:
        return f"<Pool {self.name} {self.world}>"

    # --- what there is --------------------------------------------------------------------

    @property
    def has_workers(self) -> bool:
        """True if there are worker processes to look at or to end."""
        return self.world is not None and self.world.state.has_workers

    @property
    def headline(self) -> str:
        """`4 workers on node01 · gloo · ready`, or that there are none.

        With its `--name` where it was given one, and `8 workers as 2x4` where nodes are simulated.
        """
        world = self.world
        if world is None or not world.state.has_workers:
            return "no workers are running · `%%distributed -n 4` or `%dist_init -n 4` starts them"
        session, workers = world.session, count(world.size, "worker")
        shape = "" if session.layout.startswith("1x") else f" as {session.layout}"
        parts = [f"{self._title}{workers}{shape} on {session.machines}", session.backend]
        return " · ".join(filter(None, [*parts, world.state.value, session.config.name]))

    @property
    def ready_text(self) -> str:
        """`4 workers ready · gloo`, with the pool's name where it is not the default one."""
        assert self.world is not None
        workers = count(self.world.size, "worker")
        return f"{self._title}{workers} ready · {self.world.session.backend}"

    @property
    def own_name(self) -> str:
        """Its name; "" of the default pool, which is not named in what is shown."""
        return "" if self.name == DEFAULT_POOL else self.name

    @property
    def _title(self) -> str:
        return f"pool {self.own_name} · " if self.own_name else ""

    @property
    def snapshot_store(self) -> SnapshotStore:
        """The place of its snapshots, also before it has workers."""
        if self.world is not None:
            return self.world.snapshot_store
        return SnapshotStore(root_folder(default_log_dir()), owner_of(self.name))

    def log_files(self) -> dict[int, str]:
        """Name the log file of each rank that has one; of other machines as `node1:/...`."""
        if self.world is None:
            return {}
        session = self.world.session
        logs = {rank: f"{folder}/stdout.log" for rank, folder in session.logs.items() if folder}
        if not session.is_elsewhere:
            return logs
        return {rank: f"{session.machines.name(rank)}:{file}" for rank, file in logs.items()}

    def display(self) -> CellDisplay:
        """Make a display for what the cell that runs now has to show."""
        history: Any = getattr(self.shell, "history_manager", None)
        cells = getattr(history, "input_hist_raw", None) or [""]
        # A cell that fails and is run again has several.
        is_first, self._displayed_in = len(cells) != self._displayed_in, len(cells)
        auto = self._pools.auto
        cell = (auto.running or cells[-1]) if is_first else ""
        notes = (AUTO_NOTE,) if auto.pool else ()
        return make_display(self.shell, self._pools.settings, cell, notes, self.own_name)

    # --- life -----------------------------------------------------------------------------

    def ensure(
        self, options: argparse.Namespace, display: CellDisplay, *, for_training: bool = False
    ) -> World:
        """Return the running world, or start one; UsageError when the options describe another.

        With `for_training` new workers have what DDP, FSDP2 and optimizers import (`WorldSpec`).
        """
        if (world := self.mended(display)) is not None:
            check_same(world, options)
            world.session.on_failure = options.on_failure or world.session.on_failure
            if options.detach and not world.session.config.detach:
                world.session.config = world.session.config.but(detach=True)
                world.session.remember()
            return world
        world = self._new_world(options)
        world.session.spec = replace(world.session.spec, for_training=for_training)
        self._start(world, display)
        return world

    def mended(self, display: CellDisplay) -> World | None:
        """Mend the world for a cell, and note what was lost meanwhile; None where none runs."""
        self.wait_for_job(display)
        job, self._job = self._job, None
        if job is not None and (said := job.take_unheard()):
            display.note(said)
        if self.world is not None:
            _complete_shutdown(self.world)
            self._wait_for_stop(self.world, display)
            self._mend(self.world, display)
        self.show_late()
        for text in self.ended.take_texts():
            display.note(text)
        if self.world is None or self.world.state is State.STOPPED:
            return None
        before, self.shown_size = self.shown_size, self.world.size
        moved = self.world.session.take_moved()
        if before != self.shown_size or moved:
            display.note(size_text(self.shown_size, moved))
        return self.world

    def _wait_for_stop(self, world: World, display: CellDisplay) -> None:
        """Wait for ranks that Stop has not ended yet; show what they still did in their cell."""
        if (running := world.session.stopped_task) is None:
            return
        if running.unfinished:
            late = name_ranks(running.unfinished)
            display.wait_for(f"waiting for {late} to leave the stopped cell …")
        if damage := world.session.wait_for_stop():
            display.note(f"the stopped cell: {damage}")
            running.transcript.warn(damage)
        self.ended.again(running.transcript)

    def attach(self, world: World) -> None:
        """Take a world that was there already, and not the agent that `%load_ext` started."""
        self._started(world)
        self._close_prestarted()

    def restart(
        self, options: argparse.Namespace, keep: Sequence[str], display: CellDisplay
    ) -> None:
        """Start new workers, as the ones before but for what the options say."""
        world, changes = self.world, given(options)
        if world is None:
            self._start(self._new_world(options), display)
            return
        _complete_shutdown(world)
        display.wait_for("restarting")
        try:
            world.restart(keep=keep, **changes)
        except BaseException:  # Stop's too
            if not world.state.has_workers:
                self._lose_job("its workers were ended")
            raise
        self._lose_job("its workers were restarted")
        self._started(world)
        warning = world.session.warning if changes else ""
        for text in filter(None, (warning, world.session.folder_note)):
            display.note(text)

    def shutdown(self) -> str:
        """End the workers and the agent; say what became of them, "" where there were none."""
        had_workers = self.has_workers
        if self.world is not None and (widgets := self.world.session.widgets) is not None:
            widgets.end()
            self.show_late()
        self._end("its workers were shut down")
        left = self.world.session.shutdown() if self.world is not None else ""
        # Not before: where Stop ends the wait, the next `%dist_shutdown` has to find it.
        self.world = None
        return f"workers ended, but {left}" if left else "workers ended" if had_workers else ""

    def close(self) -> None:
        """End at once all that this pool has started, but for a world that is to stay."""
        self._end("the notebook has ended")
        world, self.world = self.world, None
        if world is not None:
            stays = world.session.config.detach and world.state.has_workers
            if (link := world.session.detach_link()) is not None:
                link.detach() if stays else link.close()

    def _end(self, why: str) -> None:
        self._lose_job(why)
        if self._widgets is not None:
            self._widgets.close()
            self._widgets = None
        self._idle.stop()
        self._close_prestarted()

    def _close_prestarted(self) -> None:
        link, self.prestarted = self.prestarted, None
        if link is not None:
            link.close()

    def _new_world(self, options: argparse.Namespace) -> World:
        config = self.world.session.config if self.world else WorldConfig(pool=self.name)
        world = World(**vars(config.but(**given(options))))
        world.session.namespace = self.shell.user_ns  # an embedded shell's is not `__main__`'s
        if self.prestarted is not None and world.session.config.launched_by == LOCAL:
            world.session.adopt(self.prestarted)
            self.prestarted = None
        return world

    def _start(self, world: World, display: CellDisplay) -> None:
        if world.session.warning:
            display.note(world.session.warning, stays=False)
        display.wait_for(f"starting {count(world.size, 'worker')} …")
        try:
            for text in filter(None, world.session.starting_texts()):
                display.wait_for(text)
        except KeyboardInterrupt:
            raise Interrupted(()) from None
        for text in (*world.session.missing, world.session.folder_note):
            if text:
                display.note(text.rstrip("."))
        self._started(world)

    def _started(self, world: World) -> None:
        if self.world is world:
            self.show_late()  # the widgets of the workers before have ended
        self.world, self.shown_size = world, world.size
        is_page = hasattr(self.shell, "kernel") and has_panels(self.shell, self._pools.settings)
        world.session.shows_widgets = is_page
        self.ended.forget()
        self._watch_while_idle()

    def say_others(self, read: Collection[str]) -> None:
        """Say which variables that a cell of the notebook has read the ranks have otherwise."""
        names, session = self.world.session.names, self.world.session  # type: ignore[union-attr]
        ours = [n for n in read if n in self.shell.user_ns and n not in self.gathered]
        known = [name for name in ours if names.record(name) or names.others_of(name)]
        if (
            not known
            or not session.is_idle
            or self.job is not None
            or session.state is not State.READY
        ):
            return
        if names.objects.have_run and any(map(names.record, known)):
            note_changes(session, session.everyone)
        for name in known:
            is_other = bool(names.others_of(name)) or names.is_changed(name)
            if is_other and names.is_first_notice(f"{name} here"):
                self.display().say(
                    f"this is the notebook's `{name}`; the ranks have another: "
                    f"`%dist_gather {name} --as {name}_ranks` brings theirs"
                )

    # --- while no cell runs ---------------------------------------------------------------

    def bind_gathered(
        self, found: Mapping[str, Any], theirs: Sequence[str], ranks: Collection[int]
    ) -> None:
        """Bind here what these ranks have, names of `theirs` under the same name."""
        self.shell.user_ns.update(found)
        self.gathered.add(found)
        if self.world is not None:
            for name in found:
                self.world.session.names.gathered(name, ranks if name in theirs else ())

    def watch_prompt(self) -> None:
        """Notice what workers do while a terminal's prompt is open; called on its loop."""
        self._watch_while_idle()
        self._idle.update()

    def _watch_while_idle(self) -> None:
        self._idle.follow(self.world.session.link if self.world and self.has_workers else None)

    def show_widgets(self) -> None:
        """Pass on to pages what the ranks' widgets have said since."""
        if self.world is None or (widgets := self.world.session.widgets) is None:
            return
        if self._widgets is None or self._widgets.widgets is not widgets:
            if self._widgets is not None:
                self._widgets.close()
            self._widgets = WidgetRelay(self.shell, widgets, self.world.session)
        self._widgets.show()
        if widgets.gone:
            gone, widgets.gone = widgets.gone, {}
            self.ended.lose_widgets(gone)

    def show_late(self, *, at_once: bool = True) -> None:
        """Show what ranks have printed after their cells, below these; and their widgets."""
        if self.world is not None:
            self.show_widgets()
            self.ended.receive(self.world.session.take_late())
            self.ended.show(self.log_files(), at_once=at_once)

    def _notice(self) -> None:
        self.take_step()
        # Programs that run notebooks drop everything that is displayed between two cells.
        if is_attended(self.shell):
            self.show_news()

    def _goes_on(self) -> bool:
        """Return True while a job runs, or ranks of a stopped cell that Stop has not ended yet."""
        return self.job is not None or bool(self._stopped and self._stopped.unfinished)

    @property
    def _stopped(self) -> TaskRun | None:
        """The cell of which ranks had not left it when Stop gave control back; None without one."""
        return self.world.session.stopped_task if self.world and self.job is None else None

    def end_cell(self, running: TaskRun, display: CellDisplay) -> None:
        """Keep a cell that has ended, and from now on show what its ranks still say."""
        self.ended.add(running.transcript, display)
        self.show_late()
        self._idle.update()

    def show_news(self) -> None:
        """Replace workers that have died since the last cell; show that, and late output."""
        world = self.world
        if world is not None and (stopped := self._stopped) is not None:
            world.session.receive_waiting()
            self.ended.update(stopped.transcript)
            self.ended.show(self.log_files(), at_once=not stopped.unfinished)
        elif world is not None and world.session.is_idle and world.state.has_workers:
            display = self.display()
            self._mend(world, display)
            self.show_late()
            if world.session.lost is not None:
                display.note(str(world.session.lost))

    def _mend(self, world: World, display: CellDisplay) -> None:
        """Replace workers that died while no cell was running, take in machines, and say so."""
        world.session.receive_waiting()
        if not world.session.is_idle:
            return
        machines, dead = world.session.machines, dict(world.session.dead)
        came = list_names(world.session.joined)
        world.session.heal()
        if came and not world.session.joined:
            display.note(f"{came} came · {scaled_text(world.session)}")
            self.shown_size = world.size
        dead = {rank: died for rank, died in dead.items() if rank not in world.session.dead}
        self.tell_of_deaths(world, display, machines, dead)

    def tell_of_deaths(
        self, world: World, display: CellDisplay, machines: Machines, dead: Mapping[int, Died] = {}
    ) -> None:
        """Say which ranks, on these machines, have died outside of a cell, and keep why."""
        dead = {**dead, **world.session.take_replaced()}
        for rank, died in dead.items():
            self.why = why_died(rank, machines.name(rank), died, self.log_files().get(rank, ""))
            display.note(f"rank {rank} {idle_end(died)}")
        if dead:
            display.note(healing_text(world.session, dead).rstrip("."))
            if self.routine.hint:
                display.note(self.routine.hint)

    # --- the cell that was sent with `--no-wait`; one at a time ---------------------------

    @property
    def job(self) -> Job | None:
        """The cell, while it runs."""
        return self._job if self._job is not None and not self._job.has_ended else None

    def begin(self, job: Job) -> None:
        """Let the event loop take its steps from now on, and Stop interrupt it."""
        self._job = job
        self._idle.update()

    def wait_for_job(self, display: CellDisplay) -> None:
        """Wait until the workers are free; Stop ends the waiting alone."""
        if (job := self.job) is not None:
            job.wait_for_turn(display)

    def show_job(self) -> None:
        """Show what it has said meanwhile, as part of the cell that runs now."""
        job = self._job
        if job is None or is_in_subshell(self.shell):  # another thread, which draws nothing
            return
        job.step()
        if job.has_ended and job.take_drawn_between():
            # nbclient gives updates between cells to no cell, so this is drawn again.
            self.ended.again(job.running.transcript)
            self.show_late()

    def take_step(self) -> None:
        """Take a step of the job, and let Stop reach it while no cell runs."""
        if (job := self.job) is not None and self._idle.loop is not None:
            self._pools.idle_stop.update(self._idle.loop)
            job.step(in_its_cell=True)
        if self.job is None:
            self._pools.idle_stop.update()

    def _lose_job(self, why: str) -> None:
        if self._job is not None:
            self._job.lose(why)
            self._pools.idle_stop.update()


def _complete_shutdown(world: World) -> None:
    """End workers whose end was being waited for when Stop came."""
    if world.state is State.STOPPING:
        world.shutdown()


# --- all pools of a notebook ------------------------------------------------------------------


class Pools:
    """Those that have been named so far, and the default one."""

    def __init__(self, shell: InteractiveShell, settings: NbDist) -> None:
        self._pid = os.getpid()
        self.shell = shell
        self.settings = settings
        self.auto = AutoMode()
        self.idle_stop = IdleStop(self._stop_jobs, lambda: any(each.job for each in self))
        self.gathered = Gathered(shell.user_ns)
        self.pages = Pages(shell)
        self._pools = {DEFAULT_POOL: Pool(self, DEFAULT_POOL)}

    def __iter__(self) -> Iterator[Pool]:
        yield from self._pools.values()

    @property
    def default(self) -> Pool:
        """The one of cells that name no pool."""
        return self._pools[DEFAULT_POOL]

    def at(self, name: str | None) -> Pool:
        """Return the pool of this name, which may be new; UsageError for what is no name."""
        if os.getpid() != self._pid:
            raise ForkedProcess("`%%distributed` and nbdist's other magics")
        name = name or DEFAULT_POOL
        if not name.replace("-", "_").isidentifier():
            raise UsageError(f"`--pool {name}`: a pool's name is a word, such as `--pool trainer`.")
        if name not in self._pools:
            self._pools[name] = Pool(self, name)
        return self._pools[name]

    def known(self, name: str | None) -> Pool | None:
        """Return the pool of this name if there is one; from any thread, to look alone."""
        return self._pools.get(name or DEFAULT_POOL)

    def world_of(self, name: str | None) -> World | None:
        """Return the world of a pool that has workers; from any thread, to look alone."""
        pool = self.known(name)
        return pool.world if pool and pool.has_workers else None

    def show_news(self, _info: object) -> None:
        """Show, first in a cell, what has not been shown since the last; called by IPython."""
        if not (is_attended(self.shell) or is_in_subshell(self.shell)):
            for pool in self:
                pool.show_news()

    def notice_names(self, result: ExecutionResult) -> None:
        """Count what a cell has bound as the notebook's; called by IPython after each."""
        prompt: Any = getattr(self.shell, "pt_app", None)  # a terminal's
        for pool in self:
            pool.show_job()
            if prompt is not None:
                prompt.app.pre_run_callables.append(pool.watch_prompt)
        cell = getattr(result.info, "raw_cell", None) or ""
        bound, python = frozenset[str](), ""
        is_theirs = cell.lstrip().startswith(("%%distributed", "%%rank"))
        has_worlds = any(pool.world is not None for pool in self)
        if not is_theirs and (has_worlds or self.gathered.has_any):
            with suppress(SyntaxError):  # it has bound nothing
                python = self.shell.transform_cell(cell)
                bound = names_bound(python)
        if bound and result.success:
            self.gathered.add(assigned_in(python))
        self.gathered.bound_in_notebook(bound)
        for pool in self:
            if pool.world is not None:
                own = [name for name in bound if name not in self.gathered]
                if not is_theirs:
                    surely = names_certainly_bound(python) if python and result.success else ()
                    pool.world.session.names.bound_in_notebook(own, surely)
                if python and result.success:
                    pool.say_others(names_used(python))

    def do_shutdown(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand around the kernel's method of this name, in its control thread.

        Cells that run are left, so that none is stopped that is to go on.
        """
        for pool in self:
            if pool.world is not None:
                pool.world.session.kernel_exiting.set()
        return original(*args, **kwargs)

    def close(self) -> None:
        """End at once all that the notebook has started; called when it ends."""
        for pool in self:
            pool.close()

    def _stop_jobs(self) -> None:
        for pool in self:
            if pool.job is not None:
                pool.job.running.stops += 1
                pool.take_step()
