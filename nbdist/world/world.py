"""World: N workers as one, the public face of a session; and the public functions beside it.

On the notebook's thread, or that of a script.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain
from typing import Any, ParamSpec, TypeVar, get_args, overload

from nbdist.config import OPTIONS, Patience, WorldConfig
from nbdist.errors import NbdistError, UsageError
from nbdist.system.folders import JoinedFolder
from nbdist.values.payload import Payload, check_needs, pack_names
from nbdist.wire.messages import GetStacks, GetStatus
from nbdist.wire.ops import Cleaned
from nbdist.wire.views import Stack, WorkerStatus
from nbdist.wire.work import Call, Task, Work
from nbdist.world import calling, exchange
from nbdist.world.agents import AttachedAgent, Found, to_attach, worlds
from nbdist.world.calling import find_script
from nbdist.world.exchange import Scatter
from nbdist.world.link import Link
from nbdist.world.parts import Joining
from nbdist.world.recovery import Following
from nbdist.world.result import CellResult
from nbdist.world.running import TaskRun
from nbdist.world.session import Session
from nbdist.world.snapshot_store import Snapshot, SnapshotStore, owner_of, root_folder
from nbdist.world.spec import takes_options
from nbdist.world.states import State

log = logging.getLogger("nbdist.world")

P = ParamSpec("P")
R = TypeVar("R")


class World:
    """N workers that share one process group, with their variables, until shut down.

        with World(n=4) as world:
            world.execute("x = torch.ones(1) * rank; dist.all_reduce(x)")
            print(world.gather("x"))

    Without `with`, the first call that needs the workers starts them, and they end with this
    process.  Not for use from several threads at once.

    Raises:
        UsageError: before anything is started, for arguments that cannot be.
    """

    @takes_options(WorldConfig)
    def __init__(self, config: WorldConfig) -> None:
        """Work out what the workers have in common, with nothing started.

        Args:
        """
        self.session = Session(config)

    def __repr__(self) -> str:
        return repr(self.session).replace("Session", "World", 1)

    @property
    def size(self) -> int:
        """How many workers there are, or will be once it is started."""
        return self.session.size

    @property
    def state(self) -> State:
        """What it is doing: stopped, ready, running a task, ..."""
        return self.session.state

    @property
    def pids(self) -> Mapping[int, int]:
        """The process of each rank."""
        return self.session.pids

    @property
    def logs(self) -> Mapping[int, str]:
        """The folder of each rank's log files, "" for none."""
        return self.session.logs

    def status(self) -> tuple[WorkerStatus, ...]:
        """Return one row per rank, from the agent; answers while ranks are busy."""
        rows: tuple[WorkerStatus, ...] = self.session.ask(GetStatus())
        return rows

    def stacks(self, ranks: Sequence[int] | None = None) -> tuple[Stack, ...]:
        """Return where the main thread of each rank is, now; answers whatever they are doing."""
        on = self.session.everyone if ranks is None else tuple(ranks)
        stacks: tuple[Stack, ...] = self.session.ask(GetStacks(on))
        return stacks

    # --- start and end --------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers and form their group; does nothing when they are there.

        A slow start is shown on stderr, if that is a terminal.  Raises StartError with the rank's
        last lines; nothing of the world is left then.
        """
        self.session.start()

    def restart(self, n: int | str | None = None, keep: Sequence[str] = (), **changes: Any) -> None:
        """End all workers and start new ones, out of every state; only `keep` outlives that.

        Each rank has to be ready to give these variables away; CUDA tensors come back on the CPU.
        `changes` are arguments of `World` that describe the workers; the others stay as they are.
        """
        self.session.restart(n, keep, **changes)

    @property
    def _started(self) -> Session:
        """Its session, with workers; one that was shut down stays so until `start`."""
        if self.state is State.STOPPED and not self.pids:
            self.start()
        return self.session

    def shutdown(self) -> None:
        """End all workers and their agent; a warning says what is left of them elsewhere."""
        if left := self.session.shutdown():
            log.warning("%s", left)

    def __enter__(self) -> World:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # --- run something --------------------------------------------------------------------

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
            fetch: names (or expressions) whose values come back: `result[i]` is the value on rank i
                when there is one, else a mapping.  Without `fetch` it is the value of the last
                expression, if that is small: less than 64 KiB, and not on a GPU.
            setup: run it again in every new worker, with the same names.

        Raises:
            WorkerError: the source raised on a rank; WorkerDied: a rank's process ended.
        """
        session = self._started
        fetch = tuple(fetch)
        task = session.task(source, ranks=ranks, fetch=fetch, brings_small=not fetch)
        if names and not setup:
            check_needs(names, session.namespace)
            with calling.sending(session, names, task.ranks) as (payloads, parcels):
                task = replace(task, names=payloads)
                return calling.outcome(session, [session.submit(task, shipped=parcels)])
        payload, segment = pack_names(names, session.namespace)
        with ExitStack() as memory:
            if segment is not None:
                memory.callback(segment.close)
            task = replace(task, plain=payload)
            result = calling.run(session, task)
            if setup:
                session.keep_setup(source, task, segment)
                memory.pop_all()
        return result

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> CellResult[R]:
        """Call a function on all ranks at once: `.rank(i)` is what it returned there.

        It, its arguments and the names of `__main__` that it uses are sent, and are gone from the
        workers afterwards; it finds names that the workers have bound as they are there.  What it
        binds by `global` stays.

        Raises:
            VariableNotSent: something of it cannot be pickled; nothing has run.
            WorkerError: it raised on a rank; `except ValueError` catches it too, where that
                is what it raised.  WorkerDied: a rank's process ended.
        """
        try:
            return calling.run_call(self._started, function, args, kwargs)
        except Exception as error:  # noqa: BLE001 (it can be what a rank raised)
            raise error.with_traceback(None)  # noqa: B904 (it is the same error, with less to read)

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
        task = self._started.task(script, ranks=ranks)
        return calling.run(self.session, task, max_restarts)

    def call(
        self, op: str, ranks: Sequence[int] | None = None, **arguments: Any
    ) -> CellResult[Any]:
        """Call an op of nbdist, such as `clean`, on all ranks or some: see `nbdist.worker.ops`.

        `.rank(i)` is what it returned there.  Raises as `execute` does.
        """
        return calling.run(self._started, self.session.task(Call(op, arguments), ranks=ranks))

    def gather(
        self,
        name: str | Sequence[str],
        ranks: Sequence[int] | None = None,
        *,
        rank: int | None = None,
        join: Joining | None = None,
        dim: int = 0,
    ) -> Any:
        """Return the value of a name on each rank, in rank order; tensors arrive on the CPU.

        Args:
            name: or an expression; of several a tuple comes, with what is said here of each.
            ranks: by default all.
            rank: the value of one rank instead of a list.
            join: "stack" for one tensor or array with a dimension more, "cat" for the values
                end to end, in place of a list.
            dim: along which dimension.

        Raises:
            UsageError: a rank has no such name, with who has it; or they do not fit together.
        """
        names = (name,) if isinstance(name, str) else tuple(name)
        exchange.check_expressions(names)  # before workers are started for it
        if join not in (None, *get_args(Joining)):
            raise UsageError(f'`join={join!r}`: use "stack" or "cat".')
        session, asked = self._started, ranks if rank is None else (rank,)
        bring = lambda task: calling.run(session, task).by_rank  # noqa: E731
        values = exchange.gather(session, names, asked, bring, rank=rank, how=join, dim=dim)
        return values[0] if isinstance(name, str) else tuple(values)

    def scatter(
        self,
        name: str,
        value: Any,
        ranks: Sequence[int] | None = None,
        *,
        dim: int | None = None,
    ) -> None:
        """Bind a name on each rank to its own part of a value: tensor, array, list, table.

        On all of them or on none, also where Ctrl-C comes in the middle.

        Args:
            name: what the parts are called there.
            value: as long as there are elements; where parts cannot be equal, the first ones
                have one more, as with torch.tensor_split.
            ranks: by default all.
            dim: the dimension of a tensor or array that is cut, by default the first.

        Raises:
            UsageError: it cannot be cut, or an element cannot be pickled; nothing is bound.
        """
        with closing(Scatter(self._started, name, value, ranks, dim)) as scatter:
            for _ in scatter.packing():
                pass
            exchange.bind(self.session, *scatter.tasks())

    def task(
        self,
        work: Work | str = "",
        *,
        ranks: Sequence[int] | None = None,
        names: Payload | None = None,
        fetch: tuple[str, ...] = (),
        execution_count: int | None = None,
        key: str = "",
    ) -> Task:
        """Make a task to `submit`, on all ranks by default; a text is a cell's source."""
        fields = {"plain": names, "fetch": fetch, "execution_count": execution_count}
        return self.session.task(work, ranks=ranks, key=key, **fields)

    def submit(self, task: Task, patience: Patience | None = None) -> TaskRun:
        """Send a task to all of its ranks at once, and `follow` what is returned.

        `patience` is for this task alone, the world's own by default.  Raises as `Session.submit`.
        """
        before, session = self.session.everyone, self._started
        return session.submit(session.of_those_there(task, before), patience)

    def follow(self, running: TaskRun, *, answers: bool = False) -> Following:
        """Yield output until the task has ended, as `Session.follow`; then ask for `error()`."""
        return self.session.follow(running, answers=answers)

    def catch_up(self) -> CellResult[Any] | None:
        """Show and await what ran when it was attached to, as `execute`; None where nothing did."""
        running = self.session.running
        if running is None or running.is_over:
            return None
        try:
            return calling.outcome(self.session, [running])
        finally:
            self.session.release_values(running)

    def interrupt(self) -> None:
        """Send SIGINT to the ranks that run a task; does nothing when none does."""
        self.session.interrupt()

    # --- the group ------------------------------------------------------------------------

    def replace(self, ranks: Sequence[int], keep: Sequence[str] = ()) -> None:
        """Restart these ranks with the variables of `keep`; the other ranks keep theirs.

        Raises WorldNotStarted, and WorldBusy while a task runs on others.
        """
        self.session.replace(ranks, keep)

    def scale(self, n: int | str | None = None, *, ranks: Sequence[int] | None = None) -> None:
        """Change the number of workers: 3, or "+2", or "-1"; or keep only these ranks.

        The others keep process and variables, and all share a group of the new size.  They
        keep their ranks too, but where one before them was ended: with `ranks=[0, 2, 3]` rank
        2 is rank 1 from then on, and 3 is 2; where there are GPUs, each keeps its own.
        DDP modules on the world's group go on in it; what was made with other groups (FSDP2,
        DeviceMesh, `new_group`) raises at its next use.  New ranks run the set-up cells;
        `sync` copies to them.  When more cannot be had, the world is as before.

        Raises:
            UsageError: n cannot be; nothing has changed.
            ScaleError: a new rank did not start.
            WorldBroken: the ranks do not meet; `restart` is the way out.
        """
        self.session.scale(n, ranks)

    def sync(
        self, names: Sequence[str], source: int = 0, ranks: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Copy names from one rank to others, through the group; which ranks have got them.

        By default to those that lack one of the names; with `ranks` to these, which may have
        other values.  They arrive together: a model and its optimizer share parameters.
        CUDA tensors arrive on the rank's own GPU.  UsageError for a name that cannot be copied.
        """
        return exchange.sync(self.session, names, source, ranks)

    def tracked(self, name: str) -> Any:
        """Return what ranks have tracked under a name, as a pandas DataFrame: a column for each.

        Its rows are steps.  Where a step has gone back there is a column `run`; of curves that
        have very many points neighbours are one, and this is their mean.

        Raises UsageError where nothing was tracked under this name, or pandas is missing.
        """
        return self.session.curves.table(name)

    # --- what workers have ----------------------------------------------------------------

    def clean(self, ranks: Sequence[int] | None = None) -> CellResult[Cleaned]:
        """Release memory that workers do not need; return how much they had and have.

        That of the last exception's frames, of what cells have shown (`Out`, `_`), of cycles, and
        the GPU memory that torch keeps for the next tensors.
        """
        return self.call("memory.clean", ranks)

    def snapshot(self, *variables: str | Sequence[str], name: str | None = None) -> Snapshot:
        """Write variables of each rank to the disk: `world.snapshot("model", "step", name="a")`.

        By default all that cells have bound, under the name of the notebook.  With the random
        states, for `restore` in this world or a later one.  The notebook's 3 newest of a name are
        kept.  Raises UsageError where it cannot be written, with nothing changed.
        """
        return exchange.save(self.session, self.snapshot_store, _names_in(variables), name)

    def restore(
        self,
        *variables: str | Sequence[str],
        name: str | None = None,
        ranks: Sequence[int] | None = None,
        from_rank: int | None = None,
    ) -> exchange.Restored:
        """Bind what a snapshot has, by default all of it, on all ranks or some.

        By default this notebook's newest, or the newest of a `name`.  With `from_rank` every
        rank gets the variables of that one.  Raises UsageError for a snapshot that is damaged
        or of another size, with nothing bound.
        """
        store, wanted = self.snapshot_store, _names_in(variables)
        found = store.find(name)  # before workers are started for it
        return exchange.restore(self._started, store, found, wanted, ranks, from_rank)

    @property
    def snapshot_store(self) -> SnapshotStore:
        """Where its snapshots lie."""
        config = self.session.config
        return SnapshotStore(
            root_folder(self.session.spec.config.log_dir or ""), owner_of(config.pool)
        )


def _names_in(given: Sequence[str | Sequence[str]]) -> list[str] | None:
    some = ([each] if isinstance(each, str) else each for each in given)
    return [*chain.from_iterable(some)] or None


# --- `nbdist.run`, `nbdist.distributed`, `nbdist.attach` ---------------------------------------


def run(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> CellResult[R]:
    """Call a function on new workers, one per GPU; they end with the call.

    Without GPUs one per core, at most 4.  `distributed` says how many, and more; with
    `World` they stay.  Raises what `World.start` and `World.run` raise.
    """
    if options := _options_of_world(function, kwargs):
        said = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise UsageError(
            f"`nbdist.run`: all arguments are the function's, which has no `{min(options)}`. "
            f"`nbdist.distributed({said})(function)(...)` calls it on such workers."
        )
    return distributed(function)(*args, **kwargs)


def _options_of_world(
    function: Callable[..., Any], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments that are options of `World` and not arguments of the function."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of one in C
        return {}
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return {}
    return {n: value for n, value in kwargs.items() if n in OPTIONS and n not in parameters}


@overload
def distributed(function: Callable[P, R], /) -> Callable[P, CellResult[R]]: ...


@overload
def distributed(
    *, n: int | str = "auto", **options: Any
) -> Callable[[Callable[P, R]], Callable[P, CellResult[R]]]: ...


def distributed(function: Any = None, /, **options: Any) -> Any:
    """Decorate a function: each call of it is made on new workers, which end with it.

        @nbdist.distributed(n=4)
        def train(model, steps): ...

        trained = train(model, 100).rank(0)

    `options` are those of `World`; without any, `@nbdist.distributed` will do.  The function
    itself is its `__wrapped__`.  Raises UsageError for options that can never be.
    """
    if function is None:
        return functools.partial(distributed, **options)
    config = WorldConfig(**options)

    @functools.wraps(function)
    def on_new_workers(*args: Any, **kwargs: Any) -> CellResult[Any]:
        try:
            with World(**vars(config)) as world:
                return world.run(function, *args, **kwargs)
        except NbdistError as error:
            raise error.with_traceback(None)  # noqa: B904 (it is the same error, with less to read)

    return on_new_workers


def attach(name: str | None = None) -> World:
    """Take over a world that was started with `detach=True` and whose process has gone.

    By its name, its pool's, or the number of its agent's process; without, the only one that
    is detached.  What it runs goes on: `world.catch_up()` shows what was missed, and waits.

    Raises:
        UsageError: there is no such world, or a notebook still uses it.
    """
    return take_over(to_attach(worlds(), name), sys.modules["__main__"].__dict__)


def take_over(found: Found, namespace: dict[str, Any]) -> World:
    """Take this one over, with its names in this namespace; raises UsageError as `attach` does."""
    try:
        folder = JoinedFolder(found.folder)
        link = Link(folder=folder)  # its socket is bound before the agent is asked to connect
    except OSError as error:
        raise found.refusal(error) from None
    try:
        there = link.take_over(AttachedAgent(found, folder.socket))
        session = Session(there.memory.config, there)
        session.attach(link, there, namespace)
    except BaseException:
        link.detach()
        raise
    world = World.__new__(World)
    world.session = session
    return world
