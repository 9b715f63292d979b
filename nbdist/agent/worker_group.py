"""The workers of one machine, and the store by which the workers of a world find one another.

Runs in the agent.  `WorkerGroup` starts workers, lets them form their groups, and stops workers, as
`nbdist.agent.group_formation` requests.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from nbdist.agent.code_folder import CodeFolder
from nbdist.agent.listener import StoreWindow
from nbdist.agent.processes import Children, Forker, ProcessSource, Spawner, can_fork_with
from nbdist.agent.worker import Emit, Worker
from nbdist.agent.worker_output import RunFolder
from nbdist.system import folders
from nbdist.system.limits import Lack, lack_in, word_lack_of_files
from nbdist.topology import parse_gpus, usable_cores, visible_gpus
from nbdist.wire import control, node_messages
from nbdist.wire.messages import StartFailure, Starting
from nbdist.wire.node_messages import Form, Formed, Groups, LiveRanks
from nbdist.wire.spec import WorkerStart, WorldSpec, cancel_file, torchrun_variables

GROUP_START_TIMEOUT = (
    180.0  # seconds to start all workers and form their group; with a busy disk this takes long
)
GROUP_HEAL_TIMEOUT = 30.0  # seconds for survivors and new workers to form their groups
SURVIVOR_GRACE = 1.0  # extra seconds for survivors, so that the error names a late new worker first
HELD_TIMEOUT = 10.0  # seconds for a worker to list its groups; a slower worker's groups are ignored

SILENT = "it did not answer while the group was formed"
ABORT_ANSWER_TIMEOUT = 1.0  # seconds for which `abort` waits for the workers' answers
HUNG_ABORT_TIMEOUT = 75.0  # seconds for a worker to abort its collectives; nccl may take 60 s
CHECK_TIMEOUT = 1.0  # seconds for a worker to say what its libraries lack; no later answer counts


class WorkerGroup:
    """The workers of this agent, and what all of them share.

    `all` has the workers by rank, and `code` keeps their copy of the notebook's files, if any.
    `emit` is called with each output of a worker.  While the world starts, `report` is called with
    the number of workers whose kernels have started (`Starting`).
    """

    def __init__(
        self,
        runtime: Path,
        children: Children,
        forker: Forker | None,
        emit: Emit,
        report: Callable[[Starting], None],
        store: StoreWindow | None = None,
        port: HeldPort | None = None,
    ) -> None:
        self.all: dict[int, Worker] = {}
        self.code = CodeFolder()
        self._forker = forker
        self._emit = emit
        self._report = report
        self._spawner = Spawner(children)
        self._store = store
        self._rendezvous = Rendezvous(runtime, port or HeldPort(), str(store.path) if store else "")
        self.spec: WorldSpec | None = None
        """The world's spec, adapted to this machine; None before the first start."""
        self._run_folder: RunFolder | None = None
        self._log_folder: Path | None = None
        self._aborting: set[asyncio.Task[control.ControlReply | None]] = set()

    def alive(self, ranks: Iterable[int] | None = None) -> list[Worker]:
        """Return the live workers of `ranks`: those that are idle or busy, not starting or dead.

        By default, return all live workers.
        """
        numbers = self.all if ranks is None else ranks
        workers = (self.all[rank] for rank in numbers if rank in self.all)
        return [worker for worker in workers if worker.state in ("idle", "busy")]

    async def ask(
        self, ranks: Iterable[int], request: control.ControlRequest, timeout: float
    ) -> dict[Worker, control.ControlReply | None]:
        """Send a request to all live workers of `ranks` at once; return their answers by worker.

        The answer of a worker that does not answer within `timeout` seconds is None.
        """
        alive = self.alive(ranks)
        answers = await asyncio.gather(*(worker.ask(request, timeout) for worker in alive))
        return dict(zip(alive, answers, strict=True))

    async def execute(self, request: node_messages.PartRequest[Any]) -> Any:
        """Carry out a request of `nbdist.agent.group_formation` and return the answer."""
        match request:
            case node_messages.StartPart(spec, ranks, attempt):
                return await self._start(self._adapt_spec(spec), ranks, attempt)
            case node_messages.GetHeld():
                answers = await self.ask(self.all, control.ListGroups(), HELD_TIMEOUT)
                groups = {
                    each.rank: answer if isinstance(answer, control.HeldGroups) else None
                    for each, answer in answers.items()
                }
                return LiveRanks({rank: groups[rank] for rank in groups if self.alive([rank])})
            case node_messages.Prepare(spec, ranks):
                return await self._prepare(self._adapt_spec(spec), ranks)
            case node_messages.Form(spec):
                return await self._form(replace(request, spec=self._adapt_spec(spec)))
            case node_messages.CallOff(generation) if generation == self._rendezvous.generation:
                self._rendezvous.cancel_file.touch()
                for worker in self.all.values():
                    # Kill workers that are starting, because they do not look for the file in their
                    # first wait.
                    if worker.state == "starting":
                        worker.kill()
            case node_messages.EndRanks(ranks, grace, _):
                await self._stop_ranks(ranks, grace)
            case node_messages.Renumber(new_ranks):
                if self._run_folder is not None:
                    self._log_folder = self._run_folder.new_attempt(self._rendezvous.attempt)
                self.all = dict(sorted((new_ranks[rank], each) for rank, each in self.all.items()))
                for rank, worker in self.all.items():
                    worker.renumber(rank, self._logs_of(rank))
        return None

    def _adapt_spec(self, spec: WorldSpec) -> WorldSpec:
        """Return the world's spec with the settings of this node.

        If this node has a copy of the notebook's folder, workers use the copy.  In a world of
        several nodes, the environment, GPUs and threads are also adapted (`adapt_spec`).
        """
        spec = self.code.with_folder(spec)
        if spec.node is None:
            return spec
        return adapt_spec(spec, os.environ, interface_of(self._rendezvous.port.address))

    async def _start(
        self, spec: WorldSpec, ranks: Sequence[int], attempt: int
    ) -> Formed | StartFailure:
        self.spec = spec
        if lack := word_lack_of_files(spec.world_size):
            return _failure(spec, ranks[0], lack, ())
        self._begin_attempt(spec, attempt)
        await self._make_folder()
        self.all = {rank: self._make_worker(spec, rank) for rank in ranks}
        if failed := await self._start_all():
            worker, why = failed
            lines = worker.output.last_lines or worker.source.last_lines()
            await self.stop(grace=0.0)
            return _failure(spec, worker.rank, str(why), lines)
        # Ask only one rank what its libraries lack, because all ranks of a machine have the same.
        checked = await self.all[ranks[0]].ask(control.Check(), CHECK_TIMEOUT)
        missing = checked if isinstance(checked, tuple) else ()
        return Formed(*self._pids_and_logs(), tuple(ranks), missing=missing)

    def _begin_attempt(self, spec: WorldSpec, attempt: int) -> None:
        """Make a new store and a new log folder for a start of the world.

        `attempt` is the number of the start, from 1.  There is no log folder if the world has no
        logs.
        """
        self._rendezvous.begin_world(attempt)
        if self._run_folder:
            self._run_folder.close()
        # Machines may share a home folder, so each machine has its own folder for logs there.
        name = spec.name if spec.node is None else f"{spec.name}/{socket.gethostname()}"
        folder = spec.config.log_dir
        self._run_folder = RunFolder(Path(folder).expanduser(), name) if folder else None
        self._log_folder = self._run_folder.new_attempt(attempt - 1) if self._run_folder else None

    async def _make_folder(self) -> None:
        """Restore the runtime folder, and the store's socket in it, if they were removed."""
        self._rendezvous.make_folder()
        if self._store is not None:
            await self._store.open()

    async def _start_all(self) -> tuple[Worker, OSError] | None:
        """Start all workers; return None, or the worker that has most likely failed first, and why.

        If a worker fails, workers that are not ready yet are killed.
        """
        workers = self.all.values()
        reports = [asyncio.create_task(self._report_progress(each)) for each in workers]
        try:
            with FormingCanceller(self._rendezvous.cancel_file) as call_off:
                starts = (call_off.start(each, GROUP_START_TIMEOUT) for each in workers)
                await asyncio.gather(*starts)
        finally:
            for each in reports:
                each.cancel()
        return next(iter(call_off.failures), None)

    async def _report_progress(self, worker: Worker) -> None:
        await worker.output.up.wait()
        self._report(Starting(sum(each.output.up.is_set() for each in self.all.values())))

    async def stop(self, grace: float) -> None:
        """Stop all workers: idle workers have `grace` seconds to exit, others are killed."""
        await self._stop_ranks(tuple(self.all), grace)

    async def _stop_ranks(self, ranks: Sequence[int], grace: float) -> None:
        workers = [self.all.pop(rank) for rank in sorted(ranks) if rank in self.all]
        await asyncio.gather(*(worker.stop(grace) for worker in workers))

    def close(self) -> None:
        """Close the store, the port and the code folder, after the workers have been stopped."""
        self._rendezvous.close()
        self.code.close()

    async def _prepare(self, spec: WorldSpec, ranks: Sequence[int]) -> str:
        await self._make_folder()
        if lack := word_lack_of_files(spec.world_size):
            return lack
        try:
            await self._source(spec).prepare()
        except ChildProcessError as error:
            return f"rank {ranks[0]} could not start: {error}"
        return ""

    async def _form(self, plan: Form) -> Formed:
        self.spec = spec = plan.spec
        ranks = plan.ranks
        if plan.attempt != self._rendezvous.attempt:
            self._begin_attempt(spec, plan.attempt)
        await self._make_folder()
        self._rendezvous.generation, self._rendezvous.sized_in = plan.generation, plan.sized_in
        missing = [rank for rank in ranks if rank in plan.missing]
        await self._stop_ranks(missing, 0.0)
        survivors = [self.all[rank] for rank in ranks if rank in self.all]
        for worker in survivors:
            worker.set_world(spec)
        new = {rank: self._make_worker(spec, rank, plan.groups or {}) for rank in missing}
        # Sort the workers by rank, because reports about all workers follow the order of this dict.
        self.all = dict(sorted({**self.all, **new}.items()))
        forms = {each: self._form_request(plan, each.rank) for each in survivors}
        problem = await self._form_groups(forms, [*new.values()])
        alive = tuple(worker.rank for worker in self.alive(ranks))
        return Formed(*self._pids_and_logs(), alive, problem)

    async def _form_groups(
        self, forms: Mapping[Worker, control.ControlRequest], new: Sequence[Worker]
    ) -> str:
        """Make survivors and new workers form their groups together.

        `forms` has the request to each survivor; the workers in `new` are started.  Returns "", or
        why the groups could not be formed.  Survivors that do not answer are killed.
        """
        exits = [worker.process.exited for worker in forms if worker.process is not None]
        survivor_timeout = GROUP_HEAL_TIMEOUT + SURVIVOR_GRACE
        with FormingCanceller(self._rendezvous.cancel_file, exits) as call_off:
            answers, _ = await asyncio.gather(
                asyncio.gather(
                    *(call_off.ask(each, forms[each], survivor_timeout) for each in forms)
                ),
                asyncio.gather(*(call_off.start(each, GROUP_HEAL_TIMEOUT) for each in new)),
            )
        silent = (each for each, answer in zip(forms, answers, strict=True) if answer is None)
        await asyncio.gather(*(each.kill_unfit(SILENT) for each in silent))
        return problem_in((_word_failed(*each) for each in call_off.failures), answers)

    def _form_request(self, plan: Form, rank: int) -> control.ControlRequest:
        """Return the request for a survivor: reconnect its groups, or form a new default group.

        `plan.groups` has the groups to reconnect, or is None if a new default group is needed, for
        example because the world gets another size.
        """
        spec = plan.spec
        environ = self._rendezvous.environ_of(spec, rank, self._logs_of(rank))
        if plan.groups is not None:
            return control.Regroup(plan.generation, plan.groups, spec, environ)
        return control.Resize(plan.generation, rank, spec, plan.missing, environ)

    async def abort(self, ranks: Iterable[int]) -> bool:
        """Make the live `ranks` abort their collectives; return True if all have answered in time.

        The ranks have `ABORT_ANSWER_TIMEOUT` to answer.  A worker is killed if it answers, even
        later, that it cannot take part in its group any more.
        """
        queries = {
            asyncio.create_task(each.ask_or_kill(control.AbortCollectives(), HUNG_ABORT_TIMEOUT))
            for each in self.alive(ranks)
        }
        self._aborting |= queries
        for each in queries:
            each.add_done_callback(self._aborting.discard)
        if queries:
            await asyncio.wait(queries, timeout=ABORT_ANSWER_TIMEOUT)
        return all(each.done() and each.result() is not None for each in queries)

    async def abort_except_other_tasks(self, task_ids: Collection[str]) -> bool:
        """Call `abort` for all ranks that run one of these tasks or no task; return its result."""
        others = {rank for rank, each in self.all.items() if each.task.id not in ("", *task_ids)}
        return await self.abort(self.all.keys() - others)

    def _source(self, spec: WorldSpec) -> ProcessSource:
        if self._forker and spec.config.fork and can_fork_with(spec.environ):
            return self._forker
        return self._spawner

    def _make_worker(self, spec: WorldSpec, rank: int, joins: Groups | None = None) -> Worker:
        logs = self._logs_of(rank)
        start = self._rendezvous.make_start(spec, rank, logs, joins)
        return Worker(start, self._source(spec), logs, self._emit)

    def _logs_of(self, rank: int) -> Path | None:
        return self._log_folder and self._log_folder / str(rank)

    def _pids_and_logs(self) -> tuple[dict[int, int], dict[int, str]]:
        pids = {rank: worker.pid for rank, worker in self.all.items()}
        return pids, {rank: str(worker.log.folder or "") for rank, worker in self.all.items()}


def adapt_spec(spec: WorldSpec, agent_environ: Mapping[str, str], interface: str) -> WorldSpec:
    """Return the world's spec with the environment, Python, GPUs and so on of this node.

    The variables of the spec are added to `agent_environ`, the environment of this node's agent.
    If this node lacks the working folder of the spec, its workers use the home folder.  `interface`
    is the network interface by which this node reaches the other nodes; "" if unknown.
    """
    environ = {**agent_environ, **spec.environ}
    cwd = spec.cwd if Path(spec.cwd).is_dir() else str(Path.home())
    worker_count, visible = max(1, len(spec.here)), visible_gpus(environ)
    return replace(
        spec,
        environ=environ,
        cwd=cwd,
        gpus=parse_gpus(spec.config.gpus, visible) if spec.config.gpus else visible,
        python=sys.executable,
        threads=spec.threads or max(1, usable_cores() // worker_count),
        interface=interface or spec.interface,
    )


def interface_of(address: str) -> str:
    """Return the name of the network interface that has this address; "" if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return ""


def problem_in(starts: Iterable[str], answers: Iterable[control.ControlReply | None]) -> str:
    """Return why ranks could not form their groups; "" if all ranks have formed them.

    `starts` says why new workers did not start, and `answers` has the answers of the survivors.  A
    reached limit of processes or threads is returned before any other reason.
    """
    problems = [*starts]
    for answer in answers:
        if answer is None or isinstance(answer, control.Failed):
            problems.append(answer.error if answer else "a rank did not answer")
    return lack_in(problems) or next(filter(None, problems), "")


def _was_killed(worker: Worker) -> bool:
    """Return True if a signal has ended the worker, and the agent has not sent the signal."""
    process = worker.process
    if process is None or not process.exited.done() or worker.death.is_killed:
        return False
    return process.exited.result() < 0


def _word_failed(worker: Worker, error: OSError) -> str:
    last = "" if isinstance(error, Lack) else "\n".join(worker.output.last_lines[-1:])
    return f"rank {worker.rank} could not start: {error} {last}".rstrip()


def _failure(spec: WorldSpec, rank: int, why: str, lines: tuple[str, ...]) -> StartFailure:
    if why in lines[-1:]:  # the worker has written the reason, so its command would explain no more
        return StartFailure(rank, socket.gethostname(), "", why, ())
    return StartFailure(rank, socket.gethostname(), shlex.join(spec.command), why, lines)


# --- rendezvous -------------------------------------------------------------------------------

ASKS_ONCE = {"GLOO_ENABLE_STORE_V2_API": "1"}
"""The environment variable that makes gloo ask the store for the addresses of all ranks at once.

For a group of 32 ranks on 2 cores that takes 64 requests instead of 2,080, and 90 ms instead of
350 (torch 2.13)."""

CALLED_OFF_GRACE = 3.0  # seconds for a rank to answer after the forming was called off
KILL_STEP = 0.05  # seconds between attempts to kill a worker that is still starting


class HeldPort:
    """A free port for MASTER_PORT, which is reserved because user code may make a store there.

    This process binds the port, so that Linux gives the port to no other program that asks for a
    free port.  Rank 0 can still listen there, because this socket and torch's TCPStore both set
    SO_REUSEADDR.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address = address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, 0))
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Release the port to other programs."""
        self._socket.close()


class Rendezvous:
    """The store, port and files by which ranks form their group, and the group's generation.

    `attempt` counts the starts of the world.  `generation` counts the attempts to form its group
    since the last start, and `sized_in` is the generation in which the group was last made as a new
    group, as when its size changes.  `store_socket` is the path of the socket by which ranks reach
    the head's store; if it is "", the store is a file in memory.  With `--rdzv-backend`, ranks use
    the store of torch's rendezvous instead.
    """

    def __init__(self, runtime: Path, port: HeldPort, store_socket: str) -> None:
        self._store_socket = store_socket
        self.attempt = self.generation = self.sized_in = 0
        self._runtime = runtime
        self.port = port
        self._cancel_path = runtime / "world0"
        self._store = -1

    def begin_world(self, attempt: int) -> None:
        """Make a new, empty store, and begin again at generation 1."""
        self._drop_store()
        self.attempt = attempt
        self.generation = self.sized_in = 1
        self._cancel_path = self._runtime / f"world{attempt}"
        # The file has no name, because programs that clean /tmp would remove a named file.
        self._store = os.memfd_create(f"nbdist-store{self.attempt}")

    def make_folder(self) -> None:
        """Make the runtime folder if it is gone.

        Raises PermissionError if the path exists and is not a folder that only this user can open.
        """
        try:
            self._runtime.mkdir(mode=folders.PRIVATE_FOLDER)
        except FileExistsError:
            folders.check_private(self._runtime)
        else:
            folders.claim(self._runtime)

    def close(self) -> None:
        """Release the port and the store, after the workers have been stopped."""
        self.port.close()
        self._drop_store()

    def _drop_store(self) -> None:
        if self._store >= 0:
            os.close(self._store)
        self._store = -1

    @property
    def cancel_file(self) -> Path:
        """The file that the agent makes so that ranks stop forming the group of this generation."""
        return cancel_file(self._cancel_path, self.generation)

    def make_start(
        self, spec: WorldSpec, rank: int, log_folder: Path | None, joins: Groups | None = None
    ) -> WorkerStart:
        """Return the message that tells a new worker all that it needs to start.

        `joins` has the ranks of each group of a running world besides the world's own, by the
        group's name; the new worker joins those groups to which its rank belongs.  At the start of
        the world, `joins` is None.
        """
        return WorkerStart(
            rank=rank,
            world=spec,
            connection_file=f"{self._name_of(rank)}.json",
            token=secrets.token_hex(8),
            store_path=f"/proc/{os.getpid()}/fd/{self._store}",
            cancel_path=str(self._cancel_path),
            generation=self.generation,
            environ=self.environ_of(spec, rank, log_folder),
            joins=joins,
            gpus=spec.gpus_of(rank),
            sized_in=self.sized_in,
            store_socket=self._store_socket,
        )

    def environ_of(self, spec: WorldSpec, rank: int, log_folder: Path | None) -> Mapping[str, str]:
        """Return the environment variables that nbdist sets for a rank, such as RANK.

        `log_folder` is the folder for the rank's log files, None if there are none.
        """
        in_logs = log_folder and str(log_folder / "error.json")
        error_file = in_logs or f"{self._name_of(rank)}.error.json"
        variables = torchrun_variables(spec, rank, self.port.number, error_file)
        return {**variables, **ASKS_ONCE} if self._store_socket else variables

    def _name_of(self, rank: int) -> str:
        return f"{self._runtime}/a{self.attempt}g{self.generation}r{rank}"


class FormingCanceller:
    """Makes all workers stop forming their group when one of them cannot take part.

    A survivor cannot take part if it exits or does not form its groups, a new worker cannot if it
    does not start.  `exits` has a future for each survivor, which is done when the survivor exits.
    To call the forming off, this object makes the file `file`.  Survivors that wait for others look
    for the file and give up.  New workers that are not ready yet are killed, because they do not
    look for the file in their first wait.
    """

    def __init__(self, file: Path, exits: Sequence[asyncio.Future[int]] = ()) -> None:
        self._failures: list[tuple[Worker, OSError]] = []
        self._file = file
        self._exits = exits
        self._event = asyncio.Event()

    def __enter__(self) -> FormingCanceller:
        for future in self._exits:
            future.add_done_callback(self._call_off)
        return self

    def __exit__(self, *_: object) -> None:
        for future in self._exits:
            future.remove_done_callback(self._call_off)

    @property
    def failures(self) -> list[tuple[Worker, OSError]]:
        """The new workers that have failed, and their errors; the likeliest culprit comes first.

        Workers that a signal has ended come before others, and each kind is sorted by rank: if a
        worker dies, another one may fail because it has lost the connection.  The agent can notice
        both at once, and Linux does not tell which process exited first.
        """
        return sorted(self._failures, key=lambda each: (not _was_killed(each[0]), each[0].rank))

    async def ask(
        self, worker: Worker, request: control.ControlRequest, timeout: float
    ) -> control.ControlReply | None:
        """Send a survivor the request to form its groups, and return its answer.

        If the survivor fails, or does not answer within `timeout` seconds, the forming is called
        off for all workers.  Returns None if the survivor does not answer soon after that, either.
        """
        answer = asyncio.ensure_future(worker.ask_or_kill(request, timeout + CALLED_OFF_GRACE))
        await asyncio.wait({answer}, timeout=timeout)
        if not (answer.done() and isinstance(answer.result(), control.Ok)):
            self._call_off()
        return await answer

    async def start(self, worker: Worker, timeout: float) -> None:
        """Start a worker, and wait until it is ready or has failed (`failures`).

        A worker that is not ready within `timeout` seconds is killed, and counts as failed.  If a
        worker fails, the forming is called off for all workers.  Other workers that are not ready
        yet are then killed, too, but do not count as failed.
        """
        start = asyncio.ensure_future(worker.start())
        event = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({start, event}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            in_time, is_off = start.done(), self._event.is_set()
            while not start.done():
                worker.kill()
                if worker.process is None:
                    start.cancel()  # there is no process yet, and a fork may take very long
                await asyncio.wait({start}, timeout=KILL_STEP)
        finally:
            event.cancel()
            start.cancel()
        error = TimeoutError() if start.cancelled() else start.exception()
        if error is None or (is_off and not in_time):
            return
        self._call_off()
        if not isinstance(error, OSError):
            raise error
        if not in_time:
            error = TimeoutError(f"it was not ready after {timeout:.0f} s")
        self._failures.append((worker, error))

    def _call_off(self, _: object = None) -> None:
        self._file.touch()
        self._event.set()
