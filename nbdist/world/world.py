"""World: N workers as one."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from nbdist.errors import (
    AgentLost,
    NbdistError,
    StartError,
)
from nbdist.wire.cleaned import CLEAN, Cleaned
from nbdist.wire.looks import GetStacks, Stack
from nbdist.wire.messages import (
    DEFAULT_POOL,
    Cell,
    GetStatus,
    Request,
    StartFailure,
    StartWorld,
    StopWorld,
    WorkerStatus,
    WorldStarted,
)
from nbdist.wire.payload import Payload, pack_names
from nbdist.world import calling, healing, keeping, scaling, snapshots, syncing
from nbdist.world.launcher import find_launcher
from nbdist.world.link import Link
from nbdist.world.losses import Losses
from nbdist.world.records import wanted_level
from nbdist.world.refusal import refusal
from nbdist.world.result import CellResult
from nbdist.world.running import News, RunningCell
from nbdist.world.scripts import find_script, run_script
from nbdist.world.shelf import Shelf, Snapshot, root_folder
from nbdist.world.spec import Asked
from nbdist.world.starting import show_on_terminal, starting_texts
from nbdist.world.states import Event, State
from nbdist.world.watch import Patience
from nbdist.world.workers import Workers

P = ParamSpec("P")
R = TypeVar("R")

STOP_GRACE = 2.0
"""Seconds that idle workers have to run their exit handlers."""

RESTART_GRACE = 0.3
STATUS_TIMEOUT = 5.0


class World(Workers):
    """N workers that share one process group, with their variables, until shut down.

        with World(n=4) as world:
            world.execute("x = torch.ones(1) * rank; dist.all_reduce(x)")
            print(world.gather("x"))

    Not for use from several threads at once.

    Args:
        n: how many workers: a number, `"auto"` (one per visible GPU; without any one per
            core, at most 4), `"gpu"` or `"cpu"` (one per core).
        backend: torch's name, `"none"` for no process group; by default nccl for GPUs
            beside gloo for the CPU, or gloo alone.
        gpus: the GPUs to use, as torch counts them: `"0,1,3"`.
        share_gpus: let several ranks of nccl have one GPU: to practise on, slow.
        pool: tells worlds of one notebook apart; torchrun's role of the workers.
        name: shown in `%dist_status`, and the name of the log folder, such as `"exp/run"`.
        layout: nodes and workers on each instead of `n`: `"2x4"`; here such nodes are simulated.
        env: variables of the workers' environment besides those of this process.
        env_file: a `.env` file with more of them; it is parsed, not sourced.
        copy_env: which variables other hosts get too, `"HF_*,WANDB_*"`; here workers have all.
        debug: have torch and CUDA check and tell all they can; slow.
        python: the interpreter of the workers; by default `$PYTHON_EXEC`, else this one.
        wrap: what stands before each worker's command: `"nice -n 5"`.
        cpus: cores for each worker; here as many threads.
        memory: for each worker, `"16G"`, for launchers that can see to it; the local one cannot.
        launcher: how agents are started, a name of the entry points `nbdist.launchers`.
        nursery: fork workers from a process that has torch imported; else spawn each.
        log_dir: where log files go, "" for none; by default `$NBDIST_LOG_DIR`, else
            `~/.local/state/nbdist`.
        on_failure: what the death of a worker leads to: `"heal"` replaces it, and the others
            keep their variables; `"restart-all"` starts all anew, as torchrun does; `"stop"`
            ends all.
        patience: when to say that ranks wait for one another, and whether to free them.
        show: write what ranks say in `execute` and `run` to stdout, a line at a time with its
            ranks: `[0-3] epoch 1`.

    Raises:
        UsageError: before anything is started, for arguments that cannot be.
    """

    def __init__(
        self,
        n: int | str = "auto",
        *,
        backend: str | None = None,
        gpus: str | None = None,
        name: str | None = None,
        pool: str = DEFAULT_POOL,
        layout: str | None = None,
        env: Mapping[str, str] | None = None,
        env_file: str | None = None,
        copy_env: str = "",
        debug: bool = False,
        python: str | None = None,
        wrap: str | None = None,
        cpus: int | str | None = None,
        memory: str | None = None,
        share_gpus: bool = False,
        launcher: str = "local",
        nursery: bool = True,
        log_dir: str | None = None,
        on_failure: str = "heal",
        patience: Patience | None = None,
        show: bool = True,
        link: Link | None = None,
    ) -> None:
        workers = (n, backend, gpus, name, pool, log_dir, nursery, layout)
        start = (env or {}, env_file, copy_env, debug, python, wrap, cpus, memory)
        super().__init__(Asked(*workers, *start, share_gpus=share_gpus), link)
        self.namespace: dict[str, Any] = sys.modules["__main__"].__dict__
        self.launcher = launcher
        self.on_failure = healing.parse_on_failure(on_failure)
        self.patience = patience or Patience()
        self.shows = show

    def __repr__(self) -> str:
        cell = f" {self.running}" if self.running and self.running.unfinished else ""
        return f"<World {self.size} ranks, {self.state.value}{cell}>"

    # --- life -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers and form their group; does nothing when they are there.

        Where it takes long it says so on stderr, if that is a terminal.  Raises StartError with
        the rank's last lines; nothing of the world is left then.
        """
        show_on_terminal(starting_texts(self))

    def starting(self) -> Iterator[int]:
        """The same, but says several times a second how many workers are up so far."""
        if self.state not in (State.STOPPED, State.LOST):
            return
        self.advance(Event.START)
        self.lost, self.losses = None, Losses()
        try:
            if self._link is None or not self._link.is_up:
                self._link = Link(find_launcher(self.launcher), nursery=self._spec.use_nursery)
                self._link.open()
            started = yield from self._link.calling(StartWorld(self._spec))
        except BaseException:  # Stop too: whatever has been started is ended
            self.advance(Event.START_FAILED)
            self.close_link()
            raise
        if isinstance(started, StartFailure):
            self.advance(Event.START_FAILED)
            self.close_link()
            raise StartError(
                started.rank, started.host, started.command, started.reason, started.last_lines
            )
        assert isinstance(started, WorldStarted)
        self.pids, self.logs, self.lacks = started.pids, started.logs, started.lacks
        self.host = self._link.agents[0].host
        self.advance(Event.STARTED)

    def restart(self, n: int | str | None = None, keep: Sequence[str] = (), **changes: Any) -> None:
        """End all workers and start new ones, out of every state; variables are lost.

        But for those named in `keep`, which each rank has to be ready to give away; CUDA
        tensors come back on the CPU.  `changes` are arguments of `World` that describe the
        workers; the others stay as they are.
        """
        kept = keeping.take(self, keep, range(self.size))
        # The notebook's environment, path and folder may have changed meanwhile.
        before, size = self.asked, self.size
        self.configure(before.but(**changes if n is None else {"n": n, **changes}))
        self.setup.scale(size, self.size)
        try:
            self.restart_workers()
        except StartError:
            self.setup.scale(self.size, size)
            self.configure(before)
            raise
        error = self.setup.replay(self, range(self.size))
        keeping.give_back(self, keep, kept)
        if error:
            raise error

    def restart_workers(self) -> None:
        """End all workers and start as many, without set-up cells."""
        if self._link is not None and self._link.is_up and self.state.has_workers:
            self.advance(Event.STOP)
            with suppress(AgentLost):  # then its workers are gone too
                self._link.call(StopWorld(RESTART_GRACE))
            self.advance(Event.STOPPED)
        self.drop_outputs()
        self.start()

    def shutdown(self) -> None:
        """End all workers and their agent; nothing of them is left."""
        self.setup.forget()
        self.advance(Event.STOP)
        if self._link is not None and self._link.is_up:
            with suppress(AgentLost, StartError):  # ended before, which is what is wanted
                self._link.call(StopWorld(STOP_GRACE))
        self.close_link()
        self.advance(Event.STOPPED)

    def __enter__(self) -> World:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    # --- cells ----------------------------------------------------------------------------

    def heal(self) -> None:
        """Do about deaths and broken collectives what `on_failure` says; nothing if all is well.

        Where it cannot be done the state stays BROKEN, and `problem` says why.
        """
        healing.heal(self)

    def replace(self, ranks: Sequence[int], keep: Sequence[str] = ()) -> None:
        """Start these ranks anew, in place; the others keep their variables.

        What `keep` names they keep too.  Raises WorldNotStarted, and WorldBusy while a cell
        runs.
        """
        self.receive_waiting()
        if self.state not in (State.READY, State.BROKEN):
            self._check_ready()
        kept = keeping.take(self, keep, ranks)
        healing.replace(self, ranks)
        keeping.give_back(self, keep, kept)

    def scale(self, n: int | str) -> None:
        """Have more workers, or fewer: 3, or "+2", or "-1".

        The others keep process, variables and rank, and all share a group of the new size.
        DDP modules on the world's group go on in it; what was made with other groups (FSDP2,
        DeviceMesh, `new_group`) raises at its next use.  New ranks run the set-up cells;
        `sync` copies to them.  When more cannot be had, the world is as before.

        Raises:
            UsageError: n cannot be; nothing has changed.
            NotScaled: a new rank did not start.
            WorldBroken: the ranks do not meet; `restart` is the way out.
        """
        scaling.scale(self, n)

    def sync(
        self, names: Sequence[str], source: int = 0, ranks: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Copy names from one rank to others, through the group; which ranks have got them.

        By default to those that lack one of the names; with `ranks` to these, which may have
        other values.  They arrive together: a model and its optimizer share parameters.
        CUDA tensors arrive on the rank's own GPU.  UsageError for a name that cannot be copied.
        """
        return syncing.sync(self, names, source, ranks)

    def submit(self, cell: Cell, patience: Patience | None = None) -> RunningCell:
        """Send a cell to all of its ranks at once; iterate over what is returned.

        `patience` is for this cell alone, the world's own by default.

        Raises what keeps it from running, with nothing sent: WorldNotStarted, WorldBusy,
        WorkerDied, AgentLost.
        """
        self.receive_waiting()
        if self.is_idle:
            self.heal()
        self._check_ready()
        return self.send(cell, patience)

    def send(self, cell: Cell, patience: Patience | None = None) -> RunningCell:
        """Send a cell to its ranks, which are ready."""
        cell = replace(cell, log_level=wanted_level())
        running = RunningCell(self, cell, patience or self.patience)
        self.advance(Event.CELL)
        self.running = running
        self.link.run(cell)
        return running

    def stream(self, cell: Cell) -> Iterator[News]:
        """What ranks show, by rank, as it comes, until the cell has ended."""
        yield from self.submit(cell)

    def execute(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        names: Mapping[str, Any] | None = None,
        fetch: Sequence[str] = (),
        setup: bool = False,
    ) -> CellResult[Any]:
        """Run source on all ranks, or some, and wait for it.

        Args:
            source: what a cell could hold, magics and top-level `await` included.
            ranks: by default all.
            names: bound on the ranks first.
            fetch: names (or expressions) whose values come back: `result.rank(i)` is the
                value when there is one, else a mapping.
            setup: run it again in every new worker, with the same names.

        Raises:
            WorkerError: the source raised on a rank; WorkerDied: a rank's process ended.
        """
        payload, segment = pack_names(names, self.namespace)
        cell = self.cell(source, ranks=ranks, names=payload, fetch=tuple(fetch))
        try:
            result = calling.outcome(self.submit(cell), shows=self.shows)
            if setup:
                self.setup.keep(source, cell, segment)
                segment = None
        finally:
            if segment is not None:
                segment.close()
        return result

    def run_script(
        self,
        program: str,
        *args: object,
        module: bool = False,
        ranks: Sequence[int] | None = None,
        max_restarts: int = 0,
    ) -> CellResult[Any]:
        """Run a script, or a module by its name, in the workers' own `__main__`.

        Raises as `execute` does; where it fails it is run again `max_restarts` times before.
        """
        script = find_script("module" if module else "file", program, args)
        return run_script(self, script, ranks, max_restarts)

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> CellResult[R]:
        """Call a function on all ranks at once: `.rank(i)` is what it returned there.

        It, its arguments and the names of `__main__` that it uses travel to the workers, and
        are gone from there afterwards; names that the workers have bound themselves it finds
        as they are there.  What it binds by `global` stays.

        Raises:
            UnshippableName: something of it cannot be pickled; nothing has run.
            WorkerError: it raised on a rank; `except ValueError` catches it too, where that
                is what it raised.  WorkerDied: a rank's process ended.
        """
        try:
            return calling.run_call(self, function, args, kwargs)
        except NbdistError as error:
            raise error.with_traceback(None)  # noqa: B904 (it is the same error, with less to read)

    def clean(self, ranks: Sequence[int] | None = None) -> CellResult[Cleaned]:
        """Have workers let go of memory that nobody needs; says how much they had and have.

        Of the last exception and what its frames hold, of what cells have shown (`Out`, `_`),
        of cycles, and of the GPU memory that torch keeps for the next tensors.
        """
        return self.execute("", ranks=ranks, fetch=(CLEAN,))

    def gather(self, name: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """The value of a name on each rank, in rank order; tensors arrive on the CPU."""
        result = self.execute("", ranks=ranks, fetch=(name,))
        return list(result)

    def snapshot(self, name: str, names: Sequence[str] | None = None) -> Snapshot:
        """Write these names of each rank, by default all that cells have bound, to the disk.

        With the random states, for `restore` in this world or a later one.  The 3 newest of
        a name are kept.  Raises UsageError where it cannot be written, with nothing changed.
        """
        return snapshots.take(self, self.shelf, name, names)

    def restore(
        self,
        name: str | None = None,
        names: Sequence[str] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        from_rank: int | None = None,
    ) -> snapshots.Restored:
        """Bind what a snapshot has, by default all of the newest one, on all ranks or some.

        With `from_rank` every rank gets the variables of that one.  Raises UsageError for a
        snapshot that is damaged or of another size, with nothing bound.
        """
        return snapshots.restore(self, self.shelf, name, names, ranks, from_rank)

    @property
    def shelf(self) -> Shelf:
        """Where its snapshots lie."""
        return Shelf(root_folder(self._spec.log_dir))

    def cell(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        names: Payload | None = None,
        fetch: tuple[str, ...] = (),
        execution_count: int | None = None,
    ) -> Cell:
        """A cell for this world, on all of its ranks by default."""
        on = tuple(range(self.size)) if ranks is None else tuple(ranks)
        return Cell(uuid.uuid4().hex, source, on, names, fetch, execution_count)

    def interrupt(self) -> None:
        """Send SIGINT to the ranks that run a cell; does nothing when none does."""
        if self.running is not None and self.running.unfinished:
            self.running.interrupt()

    def status(self) -> tuple[WorkerStatus, ...]:
        """One row per rank, from the agent; answers while ranks are busy."""
        rows: tuple[WorkerStatus, ...] = self._ask(GetStatus())
        return rows

    def stacks(self, ranks: Sequence[int] | None = None) -> tuple[Stack, ...]:
        """Where the main thread of each rank is, now; answers whatever they are doing."""
        on = tuple(range(self.size)) if ranks is None else tuple(ranks)
        stacks: tuple[Stack, ...] = self._ask(GetStacks(on))
        return stacks

    def _ask(self, request: Request) -> Any:
        """The agent's rows on its ranks; none where there are no workers."""
        if not self.state.has_workers:
            return ()
        self.receive_waiting()
        if not self.state.has_workers:
            return ()
        try:
            return self.link.call(request, timeout=STATUS_TIMEOUT)
        except AgentLost as lost:
            self.take_loss(lost)
            return ()

    # --- inside ---------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if error := refusal(self):
            raise error
