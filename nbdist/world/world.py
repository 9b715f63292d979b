"""The public Python interface: `World`, `nbdist.run`, `nbdist.distributed` and `nbdist.attach`.

Scripts and notebook cells use this module, on the thread that made the world.  A `World` has an
`Engine`, and calls the modules that `nbdist.world.engine` lists.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, ParamSpec, TypeVar, get_args, overload

from nbdist.config import OLD_NAMES, OPTIONS, OnFailure, Patience, WorldConfig
from nbdist.errors import NbdistError, UsageError
from nbdist.system.folders import JoinedFolder
from nbdist.topology import RankSelection
from nbdist.values.payload import Payload, check_needs, pack_names
from nbdist.wire.messages import GetStacks, GetStatus
from nbdist.wire.ops import Cleaned
from nbdist.wire.places import Stack
from nbdist.wire.status import WorkerStatus
from nbdist.wire.work import OpCall, Task, Work
from nbdist.world import dispatch, inbox, lifecycle, recovery, remote_call, restarts, value_transfer
from nbdist.world.agent_link import Link
from nbdist.world.agents import AttachedAgent, RunningWorld, find_attachable, worlds
from nbdist.world.engine import Engine
from nbdist.world.mapping import ItemMap, OnError
from nbdist.world.recovery import Following
from nbdist.world.remote_call import find_script
from nbdist.world.result import CellResult
from nbdist.world.snapshot_store import Snapshot, SnapshotStore, owner_of, root_folder
from nbdist.world.spec import takes_options
from nbdist.world.split_join import Joining
from nbdist.world.states import WorldState
from nbdist.world.task_run import TaskRun
from nbdist.world.value_transfer import Scatter

log = logging.getLogger("nbdist.world")

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class World:
    """N workers that share a process group, with their variables, until shut down.

        with World(n=4) as world:
            world.execute("x = torch.ones(1) * rank; dist.all_reduce(x)")
            print(world.gather("x"))

    Without `with`, the first call that needs the workers starts them, and they end with this
    process.  Not for use from several threads at once.

    Methods with an argument `ranks` take numbers, such as `[0, 2]` or `range(1, 3)`, or the text of
    the option `-r`, such as "0,2-3", "1:3", "::2", "-1" or "all".  Most also take `rank` for a
    single rank.  They raise BadRanks if the argument selects no rank, or a rank that is missing.

    Args:
        n: how many workers: a number, "auto" (one per GPU, or without GPUs one per core, at most
            4), "gpu" (one per GPU) or "cpu" (one per core).
        layout: nodes and workers per node: "2x4"; "4" is one node.  "1:2x4" starts with 1 node
            and adds the other when it arrives.  With `n` the world has only n of these workers.
            On one machine the nodes are simulated.
        backend: "gloo", "nccl", "cpu:gloo,cuda:nccl", or "none" for no group; by default nccl
            for GPUs beside gloo for the CPU, or gloo alone.
        gpus: the GPUs to use, as torch counts them: "0,1,3".
        share_gpus: True allows several ranks per GPU (slow; for debugging).
        name: the name in the status, and of the folder of log files: "run", or "exp/run".
        pool: the pool of the workers, which is part of their name in the status.
        env: environment variables of the workers, by name: {"SEED": "1"}.
        env_file: a `.env` file with environment variables; it is parsed, not sourced.
        debug: True is the slow debug mode: CUDA_LAUNCH_BLOCKING, TORCH_DISTRIBUTED_DEBUG=DETAIL
            and C++ stacks; collectives that do not match are named.
        python: the interpreter of the workers, which has torch and nbdist; by default
            $PYTHON_EXEC or this process's interpreter.
        wrap: a command in front of each worker's command: "nice -n 5", "apptainer exec img".
        fork: False starts each worker as a new interpreter instead of forking it from a process
            that has imported torch.
        cpus: cores for each worker; a worker has this many threads, unless OMP_NUM_THREADS is
            set.
        launcher: how machines are reached: "local", "ssh" (the default with `hosts`), "slurm"
            (the default with `salloc` and in a Slurm allocation), "join", "ray", or an entry
            point of `nbdist.launchers`.
        hosts: machines reached by ssh, and the number of workers on each: "a:4,user@b:2".
        salloc: options of Slurm's salloc, to request an allocation: "-p gpu -t 2:00:00".
        memory: memory per worker to request from Slurm or Ray: "16G".
        copy_env: environment variables to copy to other machines: "HF_*,WANDB_*".
        address: address or network interface of this machine for the other machines.
        link_timeout: seconds without a sign of life after which another machine counts as lost;
            by default 10.
        detach: True keeps the workers when this process ends; `nbdist.attach` finds them.
        sync_code: True copies the working directory to machines that do not have it, and keeps
            it up to date.
        rdzv_backend: torch's rendezvous backend: "c10d", "static", "etcd" or "etcd-v2".
        rdzv_endpoint: address of the rendezvous backend: "HOST:PORT".
        on_failure: what to do when a worker dies: "heal" restarts it and the others keep their
            variables, "restart-all" restarts all, "stop" ends all.
        hang_timeout: seconds until a running task shows which ranks wait for which.
        release: False reports deadlocked ranks but does not release them.
        log_dir: the folder of the log files, "" for none; by default $NBDIST_LOG_DIR, else
            `~/.local/state/nbdist`.
        show: False does not print the output of ranks in `execute`, `run` and `run_script`.
            Each line is printed with its ranks: `[0-3] epoch 1`.

    Raises:
        UsageError: an argument is not valid; nothing has been started.
    """

    @takes_options
    def __init__(
        self,
        n: int | str = "auto",
        *,
        layout: str | None = None,
        backend: str | None = None,
        gpus: str | None = None,
        share_gpus: bool = False,
        name: str | None = None,
        pool: str = "default",
        env: Mapping[str, str] | None = None,
        env_file: str | None = None,
        debug: bool = False,
        python: str | None = None,
        wrap: str | None = None,
        fork: bool = True,
        cpus: int | None = None,
        launcher: str | None = None,
        hosts: str | None = None,
        salloc: str | None = None,
        memory: str | None = None,
        copy_env: str | None = None,
        address: str | None = None,
        link_timeout: int | None = None,
        detach: bool = False,
        sync_code: bool = False,
        rdzv_backend: str | None = None,
        rdzv_endpoint: str | None = None,
        on_failure: OnFailure = "heal",
        hang_timeout: float = 4.0,
        release: bool = True,
        log_dir: str | None = None,
        show: bool = True,
    ) -> None:
        options = dict(locals())
        del options["self"]
        self.engine = Engine(WorldConfig(**options))

    def __repr__(self) -> str:
        return repr(self.engine).replace("Engine", "World", 1)

    @property
    def size(self) -> int:
        """The number of workers; before the start, how many there will be."""
        return self.engine.size

    @property
    def state(self) -> WorldState:
        """The state of the world, such as stopped, ready or running a cell."""
        return self.engine.state

    @property
    def pids(self) -> Mapping[int, int]:
        """The process id of each rank."""
        return self.engine.rank_table.pids

    @property
    def logs(self) -> Mapping[int, str]:
        """The folder of each rank's log files; "" for a rank without log files."""
        return self.engine.rank_table.logs

    def status(self) -> tuple[WorkerStatus, ...]:
        """Return the status of the ranks, a row for each, also while they are busy.

            [row.memory / 2**20 for row in world.status()]  # MiB by rank

        A row's `memory` is in bytes; memory that n processes share counts as 1/n for each of them.
        Its `busy_seconds` and `cpu_seconds` are in seconds.  Without workers the result is empty.
        """
        rows: tuple[WorkerStatus, ...] = inbox.ask(self.engine, GetStatus())
        return rows

    def stacks(
        self, ranks: RankSelection | None = None, *, rank: int | None = None
    ) -> tuple[Stack, ...]:
        """Return the present stack of the main thread of each rank, also while ranks are busy.

        `ranks` are by default all.  Without workers the result is empty.
        """
        on = self.engine.select_ranks(ranks, rank)
        stacks: tuple[Stack, ...] = inbox.ask(self.engine, GetStacks(on))
        return stacks

    # --- start and end --------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers and form their process group; do nothing if they are running.

        The progress of a slow start is shown on stderr, if that is a terminal.  Raises StartError
        with the last lines of the rank that failed; then no process of the world is left.
        """
        lifecycle.start(self.engine)

    def restart(self, n: int | str | None = None, keep: Sequence[str] = (), **changes: Any) -> None:
        """End all workers and start new ones, which have only the variables in `keep`.

        Without `keep` this works in every state of the world.  With `keep` the ranks must be ready
        for a task, in which they send the variables.  CUDA tensors come back on the CPU.  `changes`
        are arguments of `World` with new values; other arguments stay as they are, unless they
        contradict the new ones.
        """
        restarts.restart(self.engine, n, keep, **changes)

    @property
    def _started(self) -> Engine:
        """The engine; reading this property starts the workers if they were never started."""
        self._start_if_new()
        return self._ready

    @property
    def _ready(self) -> Engine:
        """The engine; in the subclass `PoolWorld`, reading this waits until all ranks are free."""
        return self.engine

    def _start_if_new(self) -> None:
        if self.state is WorldState.STOPPED and not self.pids:
            self.start()

    def _select(self, ranks: RankSelection | None, rank: int | None) -> tuple[int, ...]:
        """Return the ranks that the arguments select; start the workers if they were never started.

        The subclass `PoolWorld` also waits until no job runs on these ranks.
        """
        self._start_if_new()
        return self.engine.select_ranks(ranks, rank)

    def shutdown(self) -> None:
        """End all workers and their agent; log a warning if other machines have processes left."""
        if leftovers := lifecycle.shutdown(self.engine):
            log.warning("%s", leftovers)

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
        ranks: RankSelection | None = None,
        rank: int | None = None,
        names: Mapping[str, Any] | None = None,
        fetch: Sequence[str] = (),
        setup: bool = False,
    ) -> CellResult[Any]:
        """Run source code on all ranks, or on some, and wait until they have finished.

            world.execute("x = 10 * rank")
            world.execute("x + 5")[1]  # 15: the last value on rank 1
            world.execute("y = x + a", names={"a": 1}, ranks=[2], fetch=["y"])[2]  # 21

        Args:
            source: the text of a cell; magics and top-level `await` are allowed.
            ranks: by default all; see `World`.
            rank: one rank instead of `ranks`.
            names: variables that are bound on the ranks before the source runs.
            fetch: names or expressions whose values are returned.  `result[i]` is the value on rank
                i for a single name, a mapping from name to value for several.  Without `fetch`,
                `result[i]` is the last expression's value, if that value has less than 64 KiB and
                is not on a GPU.
            setup: run the source again in every new worker, with the same variables.

        Raises:
            WorkerError: the source raised on a rank; WorkerDied: a rank's process ended.
        """
        on, engine = self._select(ranks, rank), self.engine
        fetch = tuple(fetch)
        brings_small = not fetch
        task = engine.task(source, ranks=on, fetch=fetch, brings_small=brings_small)
        if names and not setup:
            check_needs(names, engine.names.namespace)
            with remote_call.sending(engine, names, task.ranks) as (payloads, parcels):
                task = replace(task, names=payloads)
                return remote_call.outcome(engine, [dispatch.submit(engine, task, shipped=parcels)])
        payload, segment = pack_names(names, engine.names.namespace)
        with ExitStack() as memory:
            if segment is not None:
                memory.callback(segment.close)
            task = replace(task, plain=payload)
            result = remote_call.run(engine, task)
            if setup:
                engine.keep_setup(source, task, segment)
                memory.pop_all()
        return result

    # A ParamSpec cannot be combined with further keyword arguments.  So if `ranks` or `rank` is
    # given, type checkers do not check the function's arguments.
    @overload
    def run(
        self, function: Callable[..., R], /, *args: Any, ranks: RankSelection, **kwargs: Any
    ) -> CellResult[R]: ...

    @overload
    def run(
        self, function: Callable[..., R], /, *args: Any, rank: int, **kwargs: Any
    ) -> CellResult[R]: ...

    @overload
    def run(
        self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> CellResult[R]: ...

    def run(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> CellResult[R]:
        """Call a function on all ranks at once; `.rank(i)` of the result is its value on rank i.

            world.run(train, model, steps=100).rank(0)
            world.run(evaluate, ranks="1:")  # on all ranks but the first
            world.run(functools.partial(shard, rank=3), rank=0)  # `shard` has its own `rank`

        The function, its arguments and the variables of `__main__` that it uses are sent to the
        workers, and usually removed there after the call.  For a name that the workers have bound,
        the function sees the workers' own value; for a name that a cell has sent to them, the
        present value of the notebook.  If the function binds variables by `global`, they stay, and
        so do the variables that were sent for the call.

        If the function stores an argument on all ranks, a later call with the same argument gets
        the stored object, with the changes of the ranks, as in a program of one process.  If only
        some of the ranks store it, a later call brings the notebook's object to all of them.

        `ranks` and `rank` select ranks as for `execute`; all other arguments are the function's.

        Raises:
            UsageError: `ranks` or `rank` is given, and the function takes an argument of this name.
            VariableNotSent: the function or a value that it needs cannot be pickled; nothing has
                run.
            WorkerError: the function raised on a rank.  If it raised ValueError,
                `except ValueError` catches the error too.  WorkerDied: a rank's process ended.
        """
        try:
            selection = remote_call.pop_selection(function, kwargs)
            on = self._select(selection.get("ranks"), selection.get("rank"))
            return remote_call.run_call(self.engine, function, args, kwargs, on)
        except Exception as error:  # noqa: BLE001 (it can be what a rank raised)
            raise error.with_traceback(None)  # noqa: B904 (it is the same error, with less to read)

    @overload
    def map(
        self,
        function: Callable[[T], R],
        items: Iterable[T],
        *,
        ranks: RankSelection | None = None,
        rank: int | None = None,
        as_completed: Literal[False] = False,
        on_error: OnError = "raise",
    ) -> list[R]: ...

    @overload
    def map(
        self,
        function: Callable[[T], R],
        items: Iterable[T],
        *,
        ranks: RankSelection | None = None,
        rank: int | None = None,
        as_completed: Literal[True],
        on_error: OnError = "raise",
    ) -> Iterator[R]: ...

    def map(
        self,
        function: Callable[[T], R],
        items: Iterable[T],
        *,
        ranks: RankSelection | None = None,
        rank: int | None = None,
        as_completed: bool = False,
        on_error: OnError = "raise",
    ) -> list[R] | Iterator[R]:
        """Call a function with each item, on whichever rank is free, and return the results.

            world.map(score, documents)  # a list, in the order of `documents`
            for value in world.map(score, documents, as_completed=True): ...  # as they come

        The function and the variables of `__main__` that it uses are sent as by `run`, before the
        items.  Each item is copied to the rank that gets it: a change that the function makes to an
        item stays there.  Short items are sent several at a time.  The function cannot use
        collectives, as the ranks work on different items.

        Args:
            function: called with one item.
            items: any iterable; it is read as ranks become free.
            ranks: by default all; see `World`.
            rank: one rank instead of `ranks`.
            as_completed: return an iterator that yields results as they come, in any order.  While
                the loop's body runs, ranks finish what they have and get no further items.  The
                body cannot use the world meanwhile.  Leaving the loop interrupts the ranks.
            on_error: "raise" ends the map with the first exception of the function.  The attribute
                `results` of the exception has the results so far, by index.  With "return" the
                exceptions stand among the results in place of values.

        Raises:
            WorkerError: the function raised, or a result cannot be pickled, or has more than 32 MiB
                and comes from another machine; the message names the item.  WorkerDied: a rank
                died, and the rank that got its item next did too.  After a single death other ranks
                run the items of the dead rank, so an item can run twice.
            UsageError: an item cannot be pickled, or has more than 32 MiB and goes to another
                machine, or a result cannot be rebuilt in this process.
        """
        chosen = self._select(ranks, rank)
        on = None if ranks is None and rank is None else chosen
        item_map = ItemMap(self.engine, function, items, on, on_error)
        return item_map.as_completed() if as_completed else item_map.results()

    def run_script(
        self,
        program: str,
        *args: object,
        module: bool = False,
        ranks: RankSelection | None = None,
        rank: int | None = None,
        max_restarts: int = 0,
    ) -> CellResult[Any]:
        """Run a script, or a module by its name, as `__main__` of the workers.

        A script that fails is run again, at most `max_restarts` times, but not after Stop or a
        SyntaxError.  Raises the errors of `execute` if the last attempt has failed.
        """
        script = find_script("module" if module else "file", program, args)
        task = self.engine.task(script, ranks=self._select(ranks, rank))
        return remote_call.run(self.engine, task, max_restarts)

    def call(
        self,
        op: str,
        ranks: RankSelection | None = None,
        *,
        rank: int | None = None,
        **arguments: Any,
    ) -> CellResult[Any]:
        """Call an op of nbdist, such as `memory.clean`, on all ranks or some.

        Ops are functions in `nbdist.worker.ops`.  `.rank(i)` of the result is the op's value on
        rank i.  Raises the errors of `execute`.
        """
        on = self._select(ranks, rank)
        return remote_call.run(self.engine, self.engine.task(OpCall(op, arguments), ranks=on))

    def gather(
        self,
        name: str | Sequence[str],
        ranks: RankSelection | None = None,
        *,
        rank: int | None = None,
        join: Joining | None = None,
        dim: int = 0,
    ) -> Any:
        """Return the value of a variable on each rank, in rank order; tensors arrive on the CPU.

            world.gather("x")  # [0, 10, 20, 30]: a list by rank
            world.gather("x", rank=2)  # 20: the value of one rank
            world.gather("x + 1", ranks=[0, 3])  # [1, 31]
            world.gather("part", join="cat")  # one tensor of the ranks' parts

        Args:
            name: a variable or an expression.  For several names a tuple is returned, with one
                result for each.
            ranks: by default all; see `World`.
            rank: return the value of this one rank instead of a list.
            join: "stack" returns one tensor or array with an additional dimension, "cat" the
                concatenated values, instead of a list.  Of values of shape (2, 3) on 4 ranks
                "stack" makes one of shape (4, 2, 3), and "cat" one of shape (8, 3).
            dim: the dimension along which the values are joined: of the same values `dim=1` makes
                the shapes (2, 4, 3) and (2, 12).

        Raises:
            UsageError: a rank has no such variable (the message says which ranks have it), or
                the values cannot be joined.
        """
        names = (name,) if isinstance(name, str) else tuple(name)
        value_transfer.check_expressions(names)  # raises before workers are started
        if join not in (None, *get_args(Joining)):
            raise UsageError(f'`join={join!r}`: use "stack" or "cat".')
        on = self._select(ranks, rank)
        engine, only = self.engine, None if rank is None else on[0]
        run_task = lambda task: remote_call.run(engine, task).by_rank  # noqa: E731
        values = value_transfer.gather(engine, names, on, run_task, rank=only, how=join, dim=dim)
        return values[0] if isinstance(name, str) else tuple(values)

    def scatter(
        self,
        name: str,
        value: Any,
        ranks: RankSelection | None = None,
        *,
        rank: int | None = None,
        dim: int | None = None,
    ) -> None:
        """Split a tensor, array, list or table, and bind a name on each rank to its own part.

            world.scatter("part", torch.zeros(10, 3))
            world.gather("len(part)")  # [3, 3, 2, 2]
            world.scatter("columns", torch.zeros(2, 8), dim=1)
            world.gather("tuple(columns.shape)", rank=0)  # (2, 2)

        Either all ranks bind the name or none, also if Ctrl-C interrupts the call.

        Args:
            name: the variable's name on the ranks.
            value: the value to split.  If its length is not divisible by the number of ranks, the
                first parts have one element more, as with torch.tensor_split.
            ranks: by default all; see `World`.  Ranks that are listed get the parts in the order
                of the list.
            rank: one rank instead of `ranks`, which gets the whole value.
            dim: the dimension along which a tensor or array is split, by default the first.

        Raises:
            UsageError: the value cannot be split, or a part cannot be pickled; nothing is
                bound.
        """
        on = self._select(ranks, rank)
        with closing(Scatter(self.engine, name, value, on, dim)) as scatter:
            for _ in scatter.packing():
                pass
            value_transfer.bind(self.engine, *scatter.tasks())

    def task(
        self,
        work: Work | str = "",
        *,
        ranks: RankSelection | None = None,
        rank: int | None = None,
        names: Payload | None = None,
        fetch: tuple[str, ...] = (),
        execution_count: int | None = None,
        key: str = "",
    ) -> Task:
        """Return a new task for `submit`, by default on all ranks.

        If `work` is a text, it is the source of a cell.  `names` are packed variables that the
        ranks bind first, and `fetch` expressions whose values are returned.  `execution_count` is
        the number of the cell, and `key` identifies the cell.
        """
        fields = {"plain": names, "fetch": fetch, "execution_count": execution_count}
        return self.engine.task(work, ranks=ranks, rank=rank, key=key, **fields)

    def submit(self, task: Task, patience: Patience | None = None) -> TaskRun:
        """Send a task to its ranks without waiting for its end; pass the returned run to `follow`.

        `patience` has timeouts for this task alone; by default the world's timeouts are used.
        Raises the errors of `nbdist.world.dispatch.submit`.
        """
        before, engine = self.engine.rank_table.everyone, self._started
        return dispatch.submit(engine, engine.with_current_ranks(task, before), patience)

    def follow(self, running: TaskRun, *, answers: bool = False) -> Following:
        """Yield output of a task until the task has ended, as `nbdist.world.recovery.follow` does.

        Errors of the task are not raised: the caller then has to check
        `nbdist.world.task_error.error_of(running)`.
        """
        return recovery.follow(self.engine, running, answers=answers)

    def catch_up(self) -> CellResult[Any] | None:
        """Wait for the tasks that were running when this world was attached; show their output.

        Returns the result of the last of these tasks, and raises the errors of `execute`.  Returns
        None if no task was running, or if an earlier call has waited for all of them.
        """
        result = None
        for running in [*self.engine.task_table.runs]:  # in the order in which the tasks were sent
            if not running.is_over:
                try:
                    result = remote_call.outcome(self.engine, [running])
                finally:
                    self.engine.connection.release_values(running)
        return result

    def interrupt(self) -> None:
        """Interrupt the ranks that run a task; do nothing if no rank runs a task."""
        recovery.interrupt_all(self.engine)

    # --- the group ------------------------------------------------------------------------

    def replace(self, ranks: RankSelection, keep: Sequence[str] = ()) -> None:
        """Restart ranks, which get the variables in `keep` back; other ranks keep all variables.

        Raises:
            WorldNotStarted: there are no workers.
            WorldBusy: a task runs on other ranks.
            WorldBroken: the ranks could not form a group; the next task tries again, and gives
                back the variables in `keep`.
            AgentLost: the agent and its workers have ended.
        """
        restarts.replace(self.engine, ranks, keep)

    def scale(self, n: int | str | None = None, *, ranks: RankSelection | None = None) -> None:
        """Change the number of workers: to 3, by "+2" or by "-1"; or keep only some `ranks`.

            world.scale(3)
            world.scale("+1")
            world.scale(ranks=[0, 2, 3])
            world.size  # 3

        Ranks that stay keep their process, their variables and their GPU, and all ranks share a
        process group of the new size.  Ranks after one that was ended get a new number: with
        `ranks=[0, 2, 3]` rank 2 is rank 1 from then on, and rank 3 is rank 2.
        DDP modules on the world's group can be used in the new group; objects made with other
        groups (FSDP2, DeviceMesh, `new_group`) raise at their next use.  New ranks run the
        set-up cells; `sync` copies variables to them.

        Raises:
            UsageError: n or ranks are not valid; nothing has changed.
            ScaleError: a new rank could not be started; the world is as before.
            WorldBroken: the ranks could not form a group; `restart` is the remedy.
        """
        restarts.scale(self._ready, n, ranks)

    def sync(
        self, names: Sequence[str], source: int = 0, ranks: RankSelection | None = None
    ) -> tuple[int, ...]:
        """Copy variables from a rank to other ranks, through the process group.

            world.execute("z = torch.ones(2)", ranks=[0])
            world.sync(["z"])  # (1, 2, 3): the ranks that had no `z`
            world.sync(["model", "optimizer"], source=1, ranks=[0])

        Returns the ranks that have received the variables.  By default the receivers are the ranks
        that lack one of the variables; `ranks` names other receivers, whatever they have.  All
        variables are copied together, so a model and its optimizer still share parameters.  CUDA
        tensors arrive on the rank's own GPU.  Raises UsageError for a name that cannot be copied.
        """
        engine = self._ready
        to = None if ranks is None else engine.select_ranks(ranks)
        return value_transfer.sync(engine, names, source, to)

    def tracked(self, name: str) -> Any:
        """Return the values that ranks have tracked under a name, as a pandas DataFrame.

        The columns are `step` and one for each rank.  If the steps have begun again, a column `run`
        numbers the runs.  In curves with very many points, neighbouring points are one row with
        their mean.

        Raises UsageError if nothing was tracked under this name, or if pandas is missing.
        """
        return self.engine.outputs.curves.table(name)

    # --- what workers have ----------------------------------------------------------------

    def clean(self, ranks: RankSelection | None = None) -> CellResult[Cleaned]:
        """Release memory that workers do not need; return each worker's bytes before and after.

            before, after = world.clean().rank(0).memory

        Releases the frames of the last exception, the results of cells (`Out`, `_`), reference
        cycles, and the GPU memory that torch caches.
        """
        return self.call("memory.clean", ranks)

    def snapshot(self, *variables: str | Sequence[str], name: str | None = None) -> Snapshot:
        """Write variables of each rank to the disk.

            world.snapshot("model", "x", name="epoch-1")
            world.restore("x", name="epoch-1").names  # ('x',)

        By default the variables that cells have bound or changed are written, under the name of the
        notebook.  Imports, and variables that cannot be pickled, are left out; but a variable that
        is named and cannot be pickled is an error.  The states of the random number generators are
        saved too.  `restore` reads the snapshot, in this world or a later one.  At least the
        notebook's 3 newest snapshots of each name are kept.  Raises UsageError if the snapshot
        cannot be written; nothing has changed then.
        """
        return value_transfer.save(self._ready, self.snapshot_store, _names_in(variables), name)

    def restore(
        self,
        *variables: str | Sequence[str],
        name: str | None = None,
        ranks: RankSelection | None = None,
        from_rank: int | None = None,
    ) -> value_transfer.Restored:
        """Bind the variables of a snapshot, by default all, on all ranks or some.

        The snapshot is by default this notebook's newest; `name` selects the newest of that name.
        With `from_rank` every rank gets the variables of that rank.  Raises UsageError if the
        snapshot is damaged or does not fit the ranks; then nothing is bound.
        """
        store, names = self.snapshot_store, _names_in(variables)
        snapshot = store.find(name)  # raises before workers are started
        engine = self._started
        to = None if ranks is None else engine.select_ranks(ranks)
        return value_transfer.restore(engine, store, snapshot, names, to, from_rank)

    @property
    def snapshot_store(self) -> SnapshotStore:
        """The store with the snapshots of this notebook and others, in the `root_folder`."""
        config = self.engine.config
        return SnapshotStore(
            root_folder(self.engine.rank_table.spec.config.log_dir or ""), owner_of(config.pool)
        )


def _names_in(given: Sequence[str | Sequence[str]]) -> list[str] | None:
    some = ([each] if isinstance(each, str) else each for each in given)
    return [*chain.from_iterable(some)] or None


# --- `nbdist.run`, `nbdist.distributed`, `nbdist.attach` ---------------------------------------


def run(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> CellResult[R]:
    """Call a function on new workers, one per GPU; the workers end with the call.

    Without GPUs there is one worker per core, at most 4.  `distributed` takes the number of workers
    and other options; with `World` the workers stay.  Raises the errors of `World.start` and
    `World.run`.
    """
    if chosen := _arguments_not_of(function, kwargs, {"ranks", "rank"}):
        raise UsageError(
            f"`nbdist.run`: all arguments are the function's, which has no `{min(chosen)}`. "
            "`with nbdist.World() as world: world.run(...)` takes `ranks` and `rank`."
        )
    if options := _arguments_not_of(function, kwargs, {*OPTIONS, *OLD_NAMES}):
        arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise UsageError(
            f"`nbdist.run`: all arguments are the function's, which has no `{min(options)}`. "
            f"`nbdist.distributed({arguments})(function)(...)` calls it on such workers."
        )
    return distributed(function)(*args, **kwargs)


def _arguments_not_of(
    function: Callable[..., Any], kwargs: Mapping[str, object], names: set[str]
) -> dict[str, object]:
    """Return the arguments in `kwargs` that have one of `names` and that the function rejects.

    The user must have meant them for nbdist.  The result is empty if the function takes any keyword
    or has no signature.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function in C may have no signature
        return {}
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return {}
    names = names - parameters.keys()
    return {name: value for name, value in kwargs.items() if name in names}


@overload
def distributed(function: Callable[P, R], /) -> Callable[P, CellResult[R]]: ...


@overload
def distributed(
    *, n: int | str = "auto", **options: Any
) -> Callable[[Callable[P, R]], Callable[P, CellResult[R]]]: ...


def distributed(function: Any = None, /, **options: Any) -> Any:
    """Decorate a function: each call of it runs on new workers, which end with the call.

        @nbdist.distributed(n=4)
        def train(model, steps): ...

        trained = train(model, 100).rank(0)

    `options` are arguments of `World`; without any, write `@nbdist.distributed`.  The attribute
    `__wrapped__` is the undecorated function.  Raises UsageError for options that are not valid.
    """
    if function is None:
        return functools.partial(distributed, **options)
    config = WorldConfig(**options)

    @functools.wraps(function)
    def on_new_workers(*args: Any, **kwargs: Any) -> CellResult[Any]:
        try:
            with World(**vars(config)) as world:
                # Not `World.run`, which takes `ranks` and `rank` for its own arguments.
                everyone = world.engine.rank_table.everyone
                return remote_call.run_call(world.engine, function, args, kwargs, everyone)
        except NbdistError as error:
            raise error.with_traceback(None)  # noqa: B904 (it is the same error, with less to read)

    return on_new_workers


def attach(name: str | None = None) -> World:
    """Take over a world that was started with `detach=True` and whose notebook has ended.

    `name` is the world's name, its pool, or the process id of its agent; by default the only
    detached world is taken.  A task that runs there goes on: `world.catch_up()` shows the output
    that was missed, and waits for the task.

    Raises:
        UsageError: there is no such world, or a notebook still uses it.
    """
    return take_over(find_attachable(worlds(), name), sys.modules["__main__"].__dict__)


def take_over(running_world: RunningWorld, namespace: dict[str, Any]) -> World:
    """Take over a running world, which has lost its notebook, and return it as a `World`.

    Its engine reads and binds variables of this notebook in `namespace`.  Raises UsageError if the
    world refuses, for example because a notebook still uses it.
    """
    try:
        folder = JoinedFolder(running_world.folder)
        link = Link(folder=folder)  # its socket is bound before the agent is asked to connect
    except OSError as error:
        raise running_world.refusal(error) from None
    try:
        attached = link.take_over(AttachedAgent(running_world, folder.socket))
        engine = Engine(attached.memory.config, attached)
        lifecycle.attach(engine, link, attached, namespace)
    except BaseException:
        link.detach()
        raise
    world = World.__new__(World)
    world.engine = engine
    return world
