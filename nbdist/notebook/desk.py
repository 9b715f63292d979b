"""What a notebook has of nbdist: one world, the names it shipped, the last cell's output."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from nbdist import topology
from nbdist.errors import Interrupted, UsageError, WorldChanged, WorldNotStarted, count, word_exit
from nbdist.notebook.display import make_display
from nbdist.notebook.draw import whole_text
from nbdist.notebook.ship.ledger import Ledger
from nbdist.notebook.ship.names import names_bound
from nbdist.notebook.ship.plan import Shipment, plan, push
from nbdist.notebook.source import check_source, in_notebook_lines
from nbdist.notebook.status import headline, owners_text, rows, status_html, status_text
from nbdist.world.launcher import find_launcher
from nbdist.world.link import Link
from nbdist.world.running import RunningCell
from nbdist.world.states import State
from nbdist.world.world import World

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.notebook.display import CellDisplay
    from nbdist.notebook.settings import NbDist
    from nbdist.wire.messages import Cell

LINES_AGAIN = 1000
"""Lines that `%dist_output -r 3` shows without `--all`."""

WORLD_OPTIONS = ("backend", "gpus", "name", "launcher")


class Desk:
    """The notebook's side of one world; only IPython's own thread works at it."""

    def __init__(self, shell: InteractiveShell, settings: NbDist) -> None:
        self.shell = shell
        self.settings = settings
        self.world: World | None = None
        self.ledger = Ledger(shell.user_ns)
        self._link: Link | None = None
        self._last: RunningCell | None = None

    def __repr__(self) -> str:
        return f"<Desk {self.world} {self.ledger}>"

    # --- the world ------------------------------------------------------------------------

    def prestart(self) -> None:
        """Start an agent, which has its nursery import torch meanwhile."""
        self._link = Link(find_launcher("local"))
        self._link.open()

    def init(self, options: argparse.Namespace) -> None:
        """Start workers unless they are there, and say so."""
        display = self._display()
        world = self._ensure_world(options, display)
        display.say(f"{count(world.size, 'worker')} ready · {world.backend}")

    def restart(self, options: argparse.Namespace) -> None:
        """Have new workers: as the ones before but for what the options say."""
        display, old = self._display(), self.world
        changed = options.no_nursery or any(getattr(options, name) for name in WORLD_OPTIONS)
        if old is None or changed:
            world = self._new_world(options, old)
            if old is not None:
                old.shutdown()
            self._start(world, display)
        else:
            world = old
            self.ledger.forget()
            display.wait_for("restarting")
            world.restart(options.workers)
        display.say(f"{count(world.size, 'worker')} ready · {world.backend} · variables are new")

    def shutdown(self) -> bool:
        """End the workers and the agent; whether there were workers."""
        world, self.world = self.world, None
        link, self._link = self._link, None
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
        links = [self._link, self.world.detach_link() if self.world else None]
        for link in links:
            if link is not None:
                link.close()
        self._link = self.world = None

    def _new_world(self, options: argparse.Namespace, old: World | None = None) -> World:
        size = options.workers or (old.size if old else "auto")
        link, self._link = self._link, None
        try:
            return World(
                size,
                backend=options.backend,
                gpus=options.gpus,
                name=options.name,
                launcher=options.launcher or "local",
                nursery=not options.no_nursery,
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
            if options is not None:
                self._check_same(self.world, options)
            return self.world
        if options is None:
            raise WorldNotStarted("The cell")
        world = self._new_world(options)
        self._start(world, display)
        return world

    def _mend(self, world: World, display: CellDisplay) -> None:
        """Replace workers that died while no cell was running, and say so."""
        world.receive_waiting()
        if not world.is_idle:
            return
        world.heal()
        for rank, died in world.take_replaced().items():
            self.ledger.forget([rank])
            display.note(
                f"rank {rank} {word_exit(died.exit_code)} while no cell was running: "
                "it was replaced, its variables are lost"
            )

    def _start(self, world: World, display: CellDisplay) -> None:
        self.ledger.forget()
        if world.warning:
            display.note(world.warning)
        display.wait_for(f"starting {count(world.size, 'worker')} …")
        try:
            world.start()
        except KeyboardInterrupt:
            raise Interrupted(()) from None
        self.world = world

    def _check_same(self, world: World, options: argparse.Namespace) -> None:
        """What a cell's options say of the world has to be true of the one that runs."""
        if options.workers:
            asked = world.resolve(options.workers)
            if asked != world.size:
                raise WorldChanged(world.size, asked)
        for name in WORLD_OPTIONS:
            asked_for, has = getattr(options, name), getattr(world, name, None)
            if asked_for and asked_for != has:
                raise UsageError(
                    f"The running workers have --{name} {has}, not {asked_for}. "
                    f"`%dist_restart --{name} {asked_for}` starts new ones."
                )

    # --- cells ----------------------------------------------------------------------------

    def run_cell(
        self,
        first_line: str,
        cell: str,
        ranks: str | None,
        options: argparse.Namespace | None = None,
    ) -> None:
        """Run a cell on the workers and show it; raises its one error when it failed."""
        number = self._execution_count()
        python = check_source(self.shell, first_line, cell)
        display = self._display()
        world = self._ensure_world(options, display)
        on = _ranks(ranks, world)
        source = in_notebook_lines(first_line, cell)
        shipment = plan(python, self.ledger, on, self.shell.user_ns_hidden)
        self._run(world.cell(source, ranks=on, execution_count=number), shipment, display)

    def push(self, names: Sequence[str], ranks: str | None) -> None:
        """Bind names of the notebook on the workers, whoever owns them there."""
        if self.world is None:
            raise WorldNotStarted("`%dist_push`")
        missing = [name for name in names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(f"`%dist_push`: the notebook has no {', '.join(missing)}.")
        on = _ranks(ranks, self.world)
        self._run(self.world.cell("", ranks=on), push(names, self.ledger, on), self._display())

    def _run(self, cell: Cell, shipment: Shipment | None, display: CellDisplay) -> None:
        assert self.world is not None
        for notice in shipment.notices if shipment else ():
            display.note(notice)
        if shipment and shipment.names:
            cell = replace(cell, names=shipment.payload)
        try:
            running = self._last = self.world.submit(cell)
            stopped = self._follow(running, display)
        finally:
            if shipment and shipment.segment:
                shipment.segment.close()
        if shipment:
            self.ledger.shipped(shipment.records, running.ranks_with_names)
        self.ledger.bound_on_workers(running.bound, cell.ranks)
        self._check_end(self.world, running, stopped=stopped)

    def _check_end(self, world: World, running: RunningCell, *, stopped: bool) -> None:
        """Forget what replaced ranks had, and raise the one error of a cell that failed."""
        self.ledger.forget(world.take_replaced())
        if stopped and not running.unfinished and not running.died:
            raise Interrupted(running.cell.ranks)
        if error := running.error():
            raise error

    def _follow(self, running: RunningCell, display: CellDisplay | None) -> bool:
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
            display.end(running.transcript, self._log_files())
        return stopped

    def show_again(self, ranks: str | None, *, everything: bool) -> None:
        """The last cell's panel once more; or some ranks' own lines, or all lines there are."""
        if self._last is None or self.world is None:
            raise UsageError("No distributed cell has run yet, so there is no output to show.")
        transcript = self._last.transcript
        if ranks is None and not everything:
            self._display().end(transcript, self._log_files())
            return
        on = [rank for rank in _ranks(ranks, self.world) if rank in transcript.ranks]
        text = whole_text(transcript, on)
        if not everything:
            text = "\n".join(text.splitlines()[-LINES_AGAIN:])
        html = f'<pre style="font-family:monospace;white-space:pre-wrap">{escape(text)}</pre>'
        self._display().show_table(html, text)

    # --- names ----------------------------------------------------------------------------

    def gather(self, expression: str, ranks: str | None, target: str) -> None:
        """Bind a list of the values of an expression on some ranks, in rank order."""
        if self.world is None:
            raise WorldNotStarted("`%dist_gather`")
        on = _ranks(ranks, self.world)
        running = self.world.submit(self.world.cell("", ranks=on, fetch=(expression,)))
        stopped = self._follow(running, None)
        self._check_end(self.world, running, stopped=stopped)
        self.shell.user_ns[target] = list(running.result())
        if target == expression:
            # The list is for the notebook: in the next cell the name means what it meant.
            self.ledger.bound_on_workers([target], on)

    def notice_cell(self, raw_cell: str) -> None:
        """A cell of the notebook has run: what it bound is the notebook's."""
        if raw_cell.lstrip().startswith(("%%distributed", "%%rank")):
            return
        try:
            bound = names_bound(self.shell.transform_cell(raw_cell))
        except SyntaxError:
            return  # it bound nothing
        self.ledger.bound_in_notebook(bound)

    def show_status(self, *, with_owners: bool) -> None:
        """The table of `%dist_status`, and who owns which name."""
        workers = self.world.status() if self.world is not None else ()
        head, table = headline(self.world), rows(workers)
        text, html = status_text(head, table), status_html(head, table)
        if with_owners:
            owners = owners_text(self.ledger.owners())
            text += f"\n{owners}"
            html += f'<pre style="font-family:monospace">{escape(owners)}</pre>'
        self._display().show_table(html, text)

    # --- words ----------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """One line that is not a cell's output."""
        self._display().say(text)

    def _display(self) -> CellDisplay:
        return make_display(self.shell, self.settings.display)

    def _execution_count(self) -> int:
        """The number of the cell that is running: IPython has stored its input already."""
        inputs = self.shell.history_manager.input_hist_parsed  # type: ignore[union-attr]
        return max(1, len(inputs) - 1)

    def _log_files(self) -> dict[int, str]:
        if self.world is None:
            return {}
        return {rank: f"{folder}/stdout.log" for rank, folder in self.world.logs.items() if folder}


def _ranks(text: str | None, world: World) -> tuple[int, ...]:
    """The ranks that `-r` selects; all where it is not given."""
    return topology.parse_ranks("all" if text is None else text, world.size)
