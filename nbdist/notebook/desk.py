"""What a notebook has of nbdist: one world, the names it shipped, the last cell's output."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from nbdist import topology
from nbdist.errors import (
    Interrupted,
    UsageError,
    WorkerDied,
    WorldNotStarted,
    count,
    name_ranks,
    word_exit,
)
from nbdist.notebook.attempts import Orders, run_attempts
from nbdist.notebook.display import make_display
from nbdist.notebook.idle import IdleWatch
from nbdist.notebook.options import patience
from nbdist.notebook.routine import Routine
from nbdist.notebook.ship.ledger import Ledger
from nbdist.notebook.ship.names import names_bound
from nbdist.notebook.ship.plan import plan, push
from nbdist.notebook.source import check_source, in_notebook_lines
from nbdist.notebook.status import pool_text
from nbdist.notebook.why import Why, why_died, why_of
from nbdist.notebook.world_options import check_same, given
from nbdist.world import keeping
from nbdist.world.healing import healing_text, parse_on_failure
from nbdist.world.link import Link
from nbdist.world.restarts import parse_most
from nbdist.world.running import RunningCell
from nbdist.world.spec import Asked
from nbdist.world.starting import starting_texts
from nbdist.world.states import State
from nbdist.world.watch import Patience
from nbdist.world.world import World

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.notebook.display import CellDisplay
    from nbdist.notebook.settings import NbDist
    from nbdist.wire.messages import Cell


class Desk:
    """The notebook's side of one world; only IPython's own thread works at it."""

    def __init__(self, shell: InteractiveShell, settings: NbDist, pool: str) -> None:
        self.shell = shell
        self.settings = settings
        self.pool = pool
        self.world: World | None = None
        self.ledger = Ledger(shell.user_ns)
        self._link: Link | None = None
        self.last: RunningCell | None = None
        self._idle = IdleWatch(self._notice)
        self.why: Why | None = None
        self.routine = Routine()

    def __repr__(self) -> str:
        return f"<Desk {self.pool} {self.world} {self.ledger}>"

    # --- the world ------------------------------------------------------------------------

    def take_over(self, link: Link | None) -> None:
        """Have the agent that `%load_ext` started, for the first world."""
        self._link = link

    def init(self, options: argparse.Namespace) -> None:
        """Start workers unless they are there, and say so."""
        display = self.display()
        world = self._ensure_world(options, display)
        world.patience = patience(options, world.patience)
        display.say(ready_text(world))

    def restart(self, options: argparse.Namespace) -> None:
        """Have new workers: as the ones before but for what the options say."""
        display, old = self.display(), self.world
        keep, changes = _names(options.keep), given(options)
        if options.ranks is not None:
            if changes:
                raise UsageError("`%dist_restart -r`: only all workers together can be changed.")
            self._replace(options.ranks, keep, display)
            return
        if old is None or changes.pop("launcher", old.launcher) != old.launcher:
            world = self._renew(options, old, keep, display)
        else:
            world = old
            display.wait_for("restarting")
            self._set_policy(world, options)
            world.patience = patience(options, world.patience)
            world.restart(keep=keep, **changes)
            self.ledger.forget()
            self._watch_while_idle()
            if changes and world.warning:
                display.note(world.warning)
        self.ledger.bound_on_workers(keep, range(world.size))
        new = f"variables are new but for {', '.join(keep)}" if keep else "variables are new"
        said = [ready_text(world), new, self.routine.hint]
        display.say(" · ".join(filter(None, said)))

    def _renew(
        self,
        options: argparse.Namespace,
        old: World | None,
        keep: Sequence[str],
        display: CellDisplay,
    ) -> World:
        """Another world in the place of the old one, with its set-up cells."""
        world = self._new_world(options, old)
        kept = keeping.take(old, keep, range(old.size)) if old else {}
        if old is not None:
            world.setup, old.setup = old.setup, world.setup
            old.shutdown()
        self._start(world, display)
        error = world.setup.replay(world, range(world.size))
        keeping.give_back(world, keep, kept)
        if error:
            raise error
        return world

    def _replace(self, text: str, keep: Sequence[str], display: CellDisplay) -> None:
        """Start some ranks anew in their places."""
        if self.world is None:
            raise WorldNotStarted("`%dist_restart -r`")
        ranks = ranks_of(text, self.world)
        display.wait_for(f"restarting {name_ranks(ranks)}")
        self.world.replace(ranks, keep)
        self.ledger.forget(self.world.losses.take_replaced())
        display.say(" ".join(filter(None, [healing_text(self.world, ranks), self.routine.hint])))

    def interrupt(self) -> None:
        """Stop what the workers run: after a second Stop, which does not wait, they may."""
        running = self.last
        if self.world is None or running is None or not running.unfinished:
            self.say("no cell is running on the workers")
            return
        running.interrupt()
        self.follow(running, self.display())
        self.check_end(self.world, running, stopped=False)
        self.say(str(Interrupted(running.cell.ranks)))

    def shutdown(self) -> bool:
        """End the workers and the agent; whether there were workers."""
        world, self.world = self.world, None
        link, self._link = self._link, None
        self._idle.stop()
        self.ledger.forget()
        if link is not None:
            link.close()
        if world is None:
            return False
        was_running = world.state.has_workers
        world.shutdown()
        return was_running

    def close(self) -> None:
        """The notebook ends: end all that it started, at once."""
        self._idle.stop()
        links = [self._link, self.world.detach_link() if self.world else None]
        for link in links:
            if link is not None:
                link.close()
        self._link = self.world = None

    def _new_world(self, options: argparse.Namespace, old: World | None = None) -> World:
        asked, changes = old.asked if old else Asked(pool=self.pool), given(options)
        launcher = changes.pop("launcher", old.launcher if old else "local")
        link, self._link = self._link, None
        try:
            return World(
                **asked.but(**changes).arguments,
                launcher=launcher,
                on_failure=options.on_failure or (old.on_failure if old else "heal"),
                patience=patience(options, old.patience if old else Patience()),
                link=link,
            )
        except UsageError:
            self._link = link
            raise

    def _ensure_world(self, options: argparse.Namespace | None, display: CellDisplay) -> World:
        """The running world, or a new one; UsageError when the options describe another."""
        if self.world is not None:
            self._mend(self.world, display)
        if self.world is not None and self.world.state is not State.STOPPED:
            before, now = self.world.losses.take_size_before(), self.world.size
            if before not in (None, now):
                display.note(f"world {before} -> {now}")
            if options is not None:
                check_same(self.world, options)
                self._set_policy(self.world, options)
            return self.world
        if options is None:
            raise WorldNotStarted("The cell")
        world = self._new_world(options, self.world)
        self._start(world, display)
        return world

    def _set_policy(self, world: World, options: argparse.Namespace) -> None:
        if options.on_failure:
            world.on_failure = parse_on_failure(options.on_failure)

    def _mend(self, world: World, display: CellDisplay) -> None:
        """Replace workers that died while no cell was running, and say so."""
        world.receive_waiting()
        if not world.is_idle:
            return
        world.heal()
        replaced = world.losses.take_replaced()
        self.ledger.forget(replaced)
        dead = {rank: died for rank, died in replaced.items() if died is not None}
        for rank, died in dead.items():
            self.why = why_died(rank, world.host, died, self.log_files().get(rank, ""))
            display.note(f"rank {rank} {word_exit(died.exit_code)} while no cell was running")
        if dead:
            display.note(healing_text(world, dead).rstrip("."))
            if self.routine.hint:
                display.note(self.routine.hint)

    def _start(self, world: World, display: CellDisplay) -> None:
        self.ledger.forget()
        if world.warning:
            display.note(world.warning)
        display.wait_for(f"starting {count(world.size, 'worker')} …")
        try:
            for text in filter(None, starting_texts(world)):
                display.wait_for(text)
        except KeyboardInterrupt:
            raise Interrupted(()) from None
        for text in world.lacks:
            display.note(text.rstrip("."))
        self.world = world
        self._watch_while_idle()

    def _watch_while_idle(self) -> None:
        has_workers = self.world is not None and self.world.state.has_workers
        self._idle.follow(self.world.link if self.world and has_workers else None)

    def _notice(self) -> None:
        """A worker has died, perhaps while no cell was running: replace it, and say so."""
        world = self.world
        if world is None or not world.is_idle or not world.state.has_workers:
            return
        display = self.display()
        self._mend(world, display)
        if world.lost is not None:
            display.note(str(world.lost))

    # --- cells ----------------------------------------------------------------------------

    def run_cell(
        self,
        first_line: str,
        cell: str,
        ranks: str | None,
        options: argparse.Namespace | None = None,
    ) -> None:
        """Run a cell on the workers and show it; raises its one error when it failed."""
        python = check_source(self.shell, first_line, cell)
        most = parse_most(options.max_restarts) if options else 0
        display = self.display()
        source = in_notebook_lines(first_line, cell)
        prepared = self.prepare(source, ranks, options, display)
        assert self.world is not None
        orders = Orders(
            patience(options, self.world.patience) if options else None,
            self._cell_key(source) if options and options.setup else "",
            most,
        )
        hidden = self.shell.user_ns_hidden
        pack = partial(plan, python, self.ledger, prepared.ranks, hidden)
        run_attempts(self, prepared, pack, display, orders)

    def prepare(
        self,
        source: str,
        ranks: str | None,
        options: argparse.Namespace | None,
        display: CellDisplay,
    ) -> Cell:
        """A cell with the notebook's number for workers that are there, or are started."""
        number = self._execution_count()
        world = self._ensure_world(options, display)
        return world.cell(source, ranks=ranks_of(ranks, world), execution_count=number)

    def push(self, names: Sequence[str], ranks: str | None) -> None:
        """Bind names of the notebook on the workers, whoever owns them there."""
        if self.world is None:
            raise WorldNotStarted("`%dist_push`")
        missing = [name for name in names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(f"`%dist_push`: the notebook has no {', '.join(missing)}.")
        on = ranks_of(ranks, self.world)
        pack = partial(push, names, self.ledger, on)
        run_attempts(self, self.world.cell("", ranks=on), pack, self.display())

    def check_end(self, world: World, running: RunningCell, *, stopped: bool) -> None:
        """Forget what replaced ranks had, and raise the one error of a cell that failed."""
        self.ledger.forget(world.losses.take_replaced())
        if stopped and not running.unfinished and not running.died:
            raise Interrupted(running.cell.ranks)
        if error := running.error():
            self.why = why_of(running, error, self.log_files()) or self.why
            if self.routine.hint and isinstance(error, WorkerDied):
                error.add(f"{self.routine.hint}.")
            raise error

    def follow(self, running: RunningCell, display: CellDisplay | None) -> bool:
        """Show the cell (or not) until it ends; True when Stop ended it.

        The first Stop interrupts the ranks and waits for them, the second does not wait.
        """
        stopped = False
        try:
            for news in running:
                if display:
                    display.show(running.transcript, news, running.waits)
        except KeyboardInterrupt:
            stopped = True
            with suppress(KeyboardInterrupt):
                running.interrupt()
                for news in running:
                    if display:
                        display.show(running.transcript, news, running.waits)
        if display:
            display.end(running.transcript, self.log_files())
        return stopped

    # --- names ----------------------------------------------------------------------------

    def gather(self, expression: str, ranks: str | None, target: str) -> None:
        """Bind a list of the values of an expression on some ranks, in rank order."""
        if self.world is None:
            raise WorldNotStarted("`%dist_gather`")
        on = ranks_of(ranks, self.world)
        self.shell.user_ns[target] = self.values(self.world, expression, on)
        if target == expression:
            # The list is for the notebook: in the next cell the name means what it meant.
            self.ledger.bound_on_workers([target], on)

    def values(self, world: World, expression: str, on: Sequence[int]) -> list[Any]:
        """The values of an expression on some ranks, in rank order."""
        running = world.submit(world.cell("", ranks=on, fetch=(expression,)))
        stopped = self.follow(running, None)
        self.check_end(world, running, stopped=stopped)
        values = list(running.result())
        running.let_go()
        return values

    def notice_cell(self, raw_cell: str) -> None:
        """A cell of the notebook has run: what it bound is the notebook's."""
        if raw_cell.lstrip().startswith(("%%distributed", "%%rank")):
            return
        try:
            bound = names_bound(self.shell.transform_cell(raw_cell))
        except SyntaxError:
            return  # it bound nothing
        self.ledger.bound_in_notebook(bound)

    # --- words ----------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """One line that is not a cell's output."""
        self.display().say(text)

    def display(self) -> CellDisplay:
        """A new one, for what the cell that runs now has to show."""
        return make_display(self.shell, self.settings.display)

    def _execution_count(self) -> int:
        """The number of the cell that is running: IPython has stored its input already."""
        inputs = self.shell.history_manager.input_hist_parsed  # type: ignore[union-attr]
        return max(1, len(inputs) - 1)

    def _cell_key(self, source: str) -> str:
        """What tells a cell from others: the front end's id of it, else its source."""
        parent: Any = getattr(self.shell, "get_parent", dict)()  # a terminal's shell has none
        return str(parent.get("metadata", {}).get("cellId") or source)

    def log_files(self) -> dict[int, str]:
        """Of each rank, where there are any."""
        if self.world is None:
            return {}
        return {rank: f"{folder}/stdout.log" for rank, folder in self.world.logs.items() if folder}


def ready_text(world: World) -> str:
    """`4 workers ready · gloo`, with the pool's name where it is not the default one."""
    return f"{pool_text(world)}{count(world.size, 'worker')} ready · {world.backend}"


def ranks_of(text: str | None, world: World) -> tuple[int, ...]:
    """The ranks that `-r` selects; all where it is not given."""
    return topology.parse_ranks("all" if text is None else text, world.size)


def _names(text: str | None) -> list[str]:
    """`a,b` as a list; UsageError for what is no name."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"`--keep {text}`: names with commas between, such as `step,history`.")
    return names
