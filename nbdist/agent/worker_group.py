"""The workers of one machine, and the store by which they find one another.

Runs in the agent.  `WorkerGroup` carries out the requests of `nbdist.agent.forming`: starts
workers, has them form their groups, and stops them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from nbdist.wire.messages import StartFailure, Starting, WorldStarted
from nbdist.wire.node_messages import Form, Formed, Groups, Held
from nbdist.wire.spec import WorkerStart, WorldSpec, cancel_file, torchrun_variables

START_TIMEOUT = 180.0  # seconds to start all workers and form their group; a busy disk is slow
HEAL_TIMEOUT = 30.0  # seconds for survivors and new workers to form their groups
HELD_TIMEOUT = 10.0  # seconds for a worker to list its groups; a silent worker's are ignored

SILENT = "it did not answer while the group was formed"
ABORT_TIMEOUT = 1.0  # seconds for which `abort` waits for the workers' answers
HUNG_ABORT_TIMEOUT = 75.0  # seconds for a worker to answer; it waits 60 for an abort of nccl
CHECK_TIMEOUT = 1.0  # seconds for a worker to say what its libraries lack; else nothing is reported


class WorkerGroup:
    """All workers of an agent: `all` has them by rank, `code` is the copy of the notebook's files.

    `emit` gets the workers' outputs, `report` the progress of their start.
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
        self._run: RunFolder | None = None
        self._logs: Path | None = None
        self._aborting: set[asyncio.Task[control.Answer | None]] = set()

    def alive(self, ranks: Iterable[int] | None = None) -> list[Worker]:
        """Return the workers of these ranks, or all, that have started and not exited."""
        asked = self.all if ranks is None else ranks
        found = (self.all[rank] for rank in asked if rank in self.all)
        return [worker for worker in found if worker.state in ("idle", "busy")]

    async def ask(
        self, ranks: Iterable[int], request: control.Request, timeout: float
    ) -> dict[Worker, control.Answer | None]:
        """Ask the live workers of these ranks, all at once; None stands for no answer in time."""
        alive = self.alive(ranks)
        answers = await asyncio.gather(*(worker.ask(request, timeout) for worker in alive))
        return dict(zip(alive, answers, strict=True))

    async def do(self, request: node_messages.PartRequest[Any]) -> Any:
        """Carry out a request of `nbdist.agent.forming` to this machine; return its answer."""
        match request:
            case node_messages.StartPart(spec, ranks, attempt):
                return await self._start(self._here(spec), ranks, attempt)
            case node_messages.GetHeld():
                asked = await self.ask(self.all, control.ListGroups(), HELD_TIMEOUT)
                held = {
                    each.rank: said if isinstance(said, control.HeldGroups) else None
                    for each, said in asked.items()
                }
                return Held({rank: held[rank] for rank in held if self.alive([rank])})
            case node_messages.Prepare(spec, ranks):
                return await self._prepare(self._here(spec), ranks)
            case node_messages.Form(spec):
                return await self._form(replace(request, spec=self._here(spec)))
            case node_messages.CallOff(generation) if generation == self._rendezvous.generation:
                self._rendezvous.cancel_file.touch()
                for worker in self.all.values():
                    # A worker that starts waits for the others in C++ code: only a kill ends that.
                    if worker.state == "starting":
                        worker.kill()
            case node_messages.EndRanks(ranks, grace, _):
                await self._end(ranks, grace)
            case node_messages.Renumber(became):
                if self._run is not None:
                    self._logs = self._run.new_attempt(self._rendezvous.attempt)
                self.all = dict(sorted((became[rank], each) for rank, each in self.all.items()))
                for rank, worker in self.all.items():
                    worker.renumber(rank, self._logs_of(rank))
        return None

    def _here(self, spec: WorldSpec) -> WorldSpec:
        """Adapt the spec that all nodes share to this node."""
        spec = self.code.moved(spec)
        if spec.node is None:
            return spec
        return spec_here(spec, os.environ, interface_of(self._rendezvous.port.address))

    async def _start(
        self, spec: WorldSpec, ranks: Sequence[int], attempt: int
    ) -> WorldStarted | StartFailure:
        self.spec = spec
        if lack := word_lack_of_files(spec.world_size):
            return _failure(spec, ranks[0], lack, ())
        self._begin(spec, attempt)
        await self._make_folder()
        self.all = {rank: self._worker(spec, rank) for rank in ranks}
        if failed := await self._start_all():
            worker, why = failed
            lines = worker.output.last_lines or worker.source.last_lines()
            await self.stop(grace=0.0)
            return _failure(spec, worker.rank, str(why), lines)
        # One rank is enough, because all ranks of a machine have the same libraries.
        checked = await self.all[ranks[0]].ask(control.Check(), CHECK_TIMEOUT)
        missing = checked if isinstance(checked, tuple) else ()
        return WorldStarted(*self._whereabouts(), missing)

    def _begin(self, spec: WorldSpec, attempt: int) -> None:
        """Make a new store and a new log folder for this start of the world."""
        self._rendezvous.begin_world(attempt)
        if self._run:
            self._run.close()
        # Machines may share a home folder, and each of them numbers its starts by itself.
        name = spec.name if spec.node is None else f"{spec.name}/{socket.gethostname()}"
        folder = spec.config.log_dir
        self._run = RunFolder(Path(folder).expanduser(), name) if folder else None
        self._logs = self._run.new_attempt(attempt - 1) if self._run else None

    async def _make_folder(self) -> None:
        """Make the runtime folder and the store's socket in it again if they were removed."""
        self._rendezvous.make_folder()
        if self._store is not None:
            await self._store.open()

    async def _start_all(self) -> tuple[Worker, OSError] | None:
        """Start all workers; return the first that did not become ready, and why, or None."""
        workers = self.all.values()
        reports = [asyncio.create_task(self._report_up(each)) for each in workers]
        try:
            with CallOff(self._rendezvous.cancel_file) as call_off:
                starts = (call_off.start(each, START_TIMEOUT) for each in workers)
                errors = await asyncio.gather(*starts)
        finally:
            for each in reports:
                each.cancel()
        failed = zip(workers, errors, strict=True)
        return next(((worker, error) for worker, error in failed if error), None)

    async def _report_up(self, worker: Worker) -> None:
        await worker.output.up.wait()
        self._report(Starting(sum(each.output.up.is_set() for each in self.all.values())))

    async def stop(self, grace: float) -> None:
        """Stop all workers as `Worker.stop` does."""
        await self._end(tuple(self.all), grace)

    async def _end(self, ranks: Sequence[int], grace: float) -> None:
        leaving = [self.all.pop(rank) for rank in sorted(ranks) if rank in self.all]
        await asyncio.gather(*(worker.stop(grace) for worker in leaving))

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
            self._begin(spec, plan.attempt)
        await self._make_folder()
        self._rendezvous.generation, self._rendezvous.sized_in = plan.generation, plan.sized_in
        missing = [rank for rank in ranks if rank in plan.missing]
        await self._end(missing, 0.0)
        survivors = [self.all[rank] for rank in ranks if rank in self.all]
        for worker in survivors:
            worker.sit(spec)
        new = {rank: self._worker(spec, rank, plan.groups or {}) for rank in missing}
        # In the order of ranks, because reports about all workers follow the order of this dict.
        self.all = dict(sorted({**self.all, **new}.items()))
        forms = {each: self._request_of(plan, each.rank) for each in survivors}
        problem = await self._have_meet(forms, [*new.values()])
        alive = tuple(worker.rank for worker in self.alive(ranks))
        return Formed(*self._whereabouts(), alive, problem)

    async def _have_meet(
        self, forms: Mapping[Worker, control.Request], new: Sequence[Worker]
    ) -> str:
        """Have survivors form their groups, and start new workers, all at once.

        Returns what prevented the group, or "".  Survivors that do not answer are killed.
        """
        ends = [worker.process.exited for worker in forms if worker.process is not None]
        with CallOff(self._rendezvous.cancel_file, ends) as call_off:
            answers, errors = await asyncio.gather(
                asyncio.gather(*(call_off.ask(each, forms[each], HEAL_TIMEOUT) for each in forms)),
                asyncio.gather(*(call_off.start(each, HEAL_TIMEOUT) for each in new)),
            )
        silent = (each for each, said in zip(forms, answers, strict=True) if said is None)
        await asyncio.gather(*(each.end_unfit(SILENT) for each in silent))
        failed = ((each, error) for each, error in zip(new, errors, strict=True) if error)
        return problem_in((_word_failed(*each) for each in failed), answers)

    def _request_of(self, plan: Form, rank: int) -> control.Request:
        """Return the request by which a survivor reconnects its groups, or joins another size."""
        spec = plan.spec
        environ = self._rendezvous.environ_of(spec, rank, self._logs_of(rank))
        if plan.groups is not None:
            return control.Regroup(plan.generation, plan.groups, spec, environ)
        return control.Resize(plan.generation, rank, spec, plan.missing, environ)

    async def abort(self, ranks: Iterable[int]) -> bool:
        """Abort the collectives of these ranks; return True if all answer within `ABORT_TIMEOUT`.

        A worker that answers that it cannot abort is killed, also if it answers later.
        """
        asked = {
            asyncio.create_task(each.ask_or_end(control.Abort(), HUNG_ABORT_TIMEOUT))
            for each in self.alive(ranks)
        }
        self._aborting |= asked
        for each in asked:
            each.add_done_callback(self._aborting.discard)
        if asked:
            await asyncio.wait(asked, timeout=ABORT_TIMEOUT)
        return all(each.done() and each.result() is not None for each in asked)

    def _source(self, spec: WorldSpec) -> ProcessSource:
        if self._forker and spec.config.fork and can_fork_with(spec.environ):
            return self._forker
        return self._spawner

    def _worker(self, spec: WorldSpec, rank: int, joins: Groups | None = None) -> Worker:
        logs = self._logs_of(rank)
        start = self._rendezvous.start_of(spec, rank, logs, joins)
        return Worker(start, self._source(spec), logs, self._emit)

    def _logs_of(self, rank: int) -> Path | None:
        return self._logs and self._logs / str(rank)

    def _whereabouts(self) -> tuple[dict[int, int], dict[int, str]]:
        pids = {rank: worker.pid for rank, worker in self.all.items()}
        return pids, {rank: str(worker.log.folder or "") for rank, worker in self.all.items()}


def spec_here(spec: WorldSpec, own: Mapping[str, str], interface: str) -> WorldSpec:
    """Return the spec with this node's environment, folder, interpreter, GPUs and threads.

    `own` is the agent's environment, `interface` the network interface that reaches the others.
    """
    environ = {**own, **spec.environ}
    cwd = spec.cwd if Path(spec.cwd).is_dir() else str(Path.home())
    here, visible = max(1, len(spec.here)), visible_gpus(environ)
    return replace(
        spec,
        environ=environ,
        cwd=cwd,
        gpus=parse_gpus(spec.config.gpus, visible) if spec.config.gpus else visible,
        python=sys.executable,
        threads=spec.threads or max(1, usable_cores() // here),
        interface=interface or spec.interface,
    )


def interface_of(address: str) -> str:
    """Return the name of the network interface that has this address, or ""."""
    for name, found in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in found):
            return name
    return ""


def problem_in(starts: Iterable[str], answers: Iterable[control.Answer | None]) -> str:
    """Return what kept ranks from forming their groups, or ""; a reached limit comes first.

    `starts` are the problems of new workers, `answers` those of survivors.
    """
    found = [*starts]
    for answer in answers:
        if answer is None or isinstance(answer, control.Failed):
            found.append(answer.error if answer else "a rank did not answer")
    return lack_in(found) or next(filter(None, found), "")


def _word_failed(worker: Worker, error: OSError) -> str:
    last = "" if isinstance(error, Lack) else "\n".join(worker.output.last_lines[-1:])
    return f"rank {worker.rank} could not start: {error} {last}".rstrip()


def _failure(spec: WorldSpec, rank: int, why: str, lines: tuple[str, ...]) -> StartFailure:
    if why in lines[-1:]:  # the last line is the reason: neither command nor lines add to it
        return StartFailure(rank, socket.gethostname(), "", why, ())
    return StartFailure(rank, socket.gethostname(), shlex.join(spec.command), why, lines)


# --- rendezvous -------------------------------------------------------------------------------

ASKS_ONCE = {"GLOO_ENABLE_STORE_V2_API": "1"}
"""Makes gloo ask the store for the addresses of all ranks at once.

For a group of 32 ranks on 2 cores that takes 64 requests instead of 2,080, and 90 ms instead of
350 (torch 2.13)."""

CALLED_OFF_GRACE = 3.0  # seconds for a rank to answer after the forming was called off
KILL_STEP = 0.05  # seconds between attempts to kill a worker that is still starting


class HeldPort:
    """The port of MASTER_PORT, reserved for stores that user code or its child processes make.

    The port is bound here, so no other program gets it.  Rank 0 can still listen on it, again and
    again, because both sides set SO_REUSEADDR, as torch's TCPStore does.
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

    `attempt` counts the starts of a world, `generation` the formings of its group.  `sized_in` is
    the generation in which the group got its present size.  Without a `store_socket` the store is
    a file.
    """

    def __init__(self, runtime: Path, port: HeldPort, store_socket: str) -> None:
        self._store_socket = store_socket
        self.attempt = self.generation = self.sized_in = 0
        self._runtime = runtime
        self.port = port
        self._over = runtime / "world0"
        self._store = -1

    def begin_world(self, attempt: int) -> None:
        """Make a new store, for the first generation of a group."""
        self._drop_store()
        self.attempt = attempt
        self.generation = self.sized_in = 1
        self._over = self._runtime / f"world{attempt}"
        # A file without a name, because programs that clean /tmp would remove a named file.
        self._store = os.memfd_create(f"nbdist-store{self.attempt}")

    def make_folder(self) -> None:
        """Make the runtime folder if it was removed; PermissionError if it is another user's."""
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
        """The file that is created to call off the forming of this generation."""
        return cancel_file(self._over, self.generation)

    def start_of(
        self, spec: WorldSpec, rank: int, log_folder: Path | None, joins: Groups | None = None
    ) -> WorkerStart:
        """Return what a worker starts with.

        `joins` are the groups, besides the world's, that a replaced or added worker joins.
        """
        return WorkerStart(
            rank=rank,
            world=spec,
            connection_file=f"{self._name_of(rank)}.json",
            token=secrets.token_hex(8),
            store_path=f"/proc/{os.getpid()}/fd/{self._store}",
            cancel_path=str(self._over),
            generation=self.generation,
            environ=self.environ_of(spec, rank, log_folder),
            joins=joins,
            gpus=spec.gpus_of(rank),
            sized_in=self.sized_in,
            store_socket=self._store_socket,
        )

    def environ_of(self, spec: WorldSpec, rank: int, log_folder: Path | None) -> Mapping[str, str]:
        """Return the environment variables that are the rank's own."""
        in_logs = log_folder and str(log_folder / "error.json")
        error_file = in_logs or f"{self._name_of(rank)}.error.json"
        variables = torchrun_variables(spec, rank, self.port.number, error_file)
        return {**variables, **ASKS_ONCE} if self._store_socket else variables

    def _name_of(self, rank: int) -> str:
        return f"{self._runtime}/a{self.attempt}g{self.generation}r{rank}"


class CallOff:
    """Calls off the forming of a group when a worker cannot take part.

    The reasons are a survivor that exits (`ends`) or does not form its groups, and a new worker
    that does not start.  Survivors that wait for others in the store see `file` and give up.  A new
    worker waits there in C++ code, so it is killed.
    """

    def __init__(self, file: Path, ends: Sequence[asyncio.Future[int]] = ()) -> None:
        self._file = file
        self._ends = ends
        self._event = asyncio.Event()

    def __enter__(self) -> CallOff:
        for end in self._ends:
            end.add_done_callback(self._call_off)
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            end.remove_done_callback(self._call_off)

    async def ask(
        self, worker: Worker, request: control.Request, timeout: float
    ) -> control.Answer | None:
        """Ask a survivor to form its groups; return its answer.

        If it fails, or gives no answer within `timeout`, the forming is called off.
        """
        asked = asyncio.ensure_future(worker.ask_or_end(request, timeout + CALLED_OFF_GRACE))
        await asyncio.wait({asked}, timeout=timeout)
        if not (asked.done() and isinstance(asked.result(), control.Ok)):
            self._call_off()
        return await asked

    async def start(self, worker: Worker, timeout: float) -> OSError | None:
        """Start a worker; return why it failed, and call off the forming then.

        Returns None on success, and if the forming was called off because of another worker.
        """
        start = asyncio.ensure_future(worker.start())
        over = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({start, over}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            in_time, is_off = start.done(), self._event.is_set()
            while not start.done():
                worker.kill()
                if worker.process is None:
                    start.cancel()  # it waits for the fork server, which may have more time
                await asyncio.wait({start}, timeout=KILL_STEP)
        finally:
            over.cancel()
            start.cancel()
        error = TimeoutError() if start.cancelled() else start.exception()
        if error is None or (is_off and not in_time):
            return None
        self._call_off()
        if not isinstance(error, OSError):
            raise error
        return error if in_time else TimeoutError(f"it was not ready after {timeout:.0f} s")

    def _call_off(self, _: object = None) -> None:
        self._file.touch()
        self._event.set()
