"""The workers of one machine: started together, made whole together, ended together.

What they do together with those of other machines, `nbdist.agent.forming` asks for; on one of
several machines the head of the world asks `PartCalls`.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from nbdist.agent.code_folder import CodeFolder
from nbdist.agent.processes import Children, Forker, ProcessSource, Spawner, can_fork_with
from nbdist.agent.rendezvous import CallOff, Rendezvous, StoreWindow
from nbdist.agent.worker import Emit, Worker
from nbdist.agent.worker_output import RunFolder
from nbdist.system.limits import lack_in, word_lack_of_files
from nbdist.topology import parse_gpus, usable_cores, visible_gpus
from nbdist.wire import control
from nbdist.wire.messages import StartFailure, Starting, WorldStarted
from nbdist.wire.node_messages import CallOff as CallOffAsked
from nbdist.wire.node_messages import (
    EndRanks,
    Form,
    Formed,
    GetClock,
    GetHeld,
    Groups,
    Held,
    PartReply,
    PartRequest,
    Plan,
    Prepare,
    Reach,
    Renumber,
    StartPart,
)
from nbdist.wire.spec import WorldSpec

START_TIMEOUT = 180.0
"""Seconds for all workers to import, bind and meet; a spawned world on a busy disk is slow."""

HEAL_TIMEOUT = 30.0
"""Seconds for survivors and new workers to meet."""

HELD_TIMEOUT = 10.0
"""Seconds for a worker to say what groups it holds; they are formed without what it would say."""

SILENT = "it did not answer while the group was formed"

ABORT_TIMEOUT = 1.0
"""Seconds in which workers abort collectives, and other steps wait for that."""

HUNG_ABORT_TIMEOUT = 8.0
"""Seconds for a worker to say that an abort of nccl's hangs, for which it takes five."""

CHECK_TIMEOUT = 1.0
"""Seconds for a worker to say what its libraries lack; where it takes longer, it is not said."""


class WorkerGroup:
    """All workers that an agent has; `all` has them by number, `code` what they were sent to run.

    `emit` takes what they show, `report` how their start goes on.
    """

    def __init__(
        self,
        runtime: Path,
        children: Children,
        forker: Forker | None,
        emit: Emit,
        report: Callable[[Starting], None],
        store: StoreWindow | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        self.all: dict[int, Worker] = {}
        self.code = CodeFolder()
        self._forker = forker
        self._emit = emit
        self._report = report
        self._spawner = Spawner(children)
        self._store = store
        self._rendezvous = Rendezvous(runtime, str(store.path) if store else "", address)
        self._spec: WorldSpec | None = None
        self._run: RunFolder | None = None
        self._logs: Path | None = None
        self._aborting: set[asyncio.Task[control.Answer | None]] = set()

    def __repr__(self) -> str:
        return f"<WorkerGroup {sorted(self.all)} {self._rendezvous}>"

    @property
    def port(self) -> int:
        """The MASTER_PORT that is held on this machine."""
        return self._rendezvous.port

    @property
    def spec(self) -> WorldSpec | None:
        """What the workers have in common, None before the first start."""
        return self._spec

    def alive(self, ranks: Iterable[int]) -> list[Worker]:
        """Return those of them whose process is there and ready."""
        found = (self.all[rank] for rank in ranks if rank in self.all)
        return [worker for worker in found if worker.state in ("idle", "busy")]

    def all_alive(self) -> list[Worker]:
        """Return all whose process is there and ready."""
        return self.alive(self.all)

    # --- start and end --------------------------------------------------------------------

    async def start_part(
        self, spec: WorldSpec, ranks: Sequence[int], attempt: int
    ) -> WorldStarted | StartFailure:
        """Start these ranks at once; when one fails, or it is called off, end the others."""
        self._spec = spec = self.code.moved(spec)
        if lack := word_lack_of_files(spec.world_size):
            return _failure(spec, ranks[0], lack, ())
        self._begin(spec, attempt)
        await self._make_folder()
        self.all = {rank: self._worker(spec, rank) for rank in ranks}
        source = self._source(spec)
        if failed := await self._start_all(source):
            worker, why = failed
            lines = worker.output.last_lines or source.last_lines()
            await self.stop(grace=0.0)
            return _failure(spec, worker.rank, why, lines)
        return WorldStarted(*self._whereabouts(), await self._lacks(ranks[0]))

    def _begin(self, spec: WorldSpec, attempt: int) -> None:
        """Have a store and a log folder for this start of the world."""
        self._rendezvous.begin_world(attempt)
        self._logs = self._log_folder(spec)

    async def _make_folder(self) -> None:
        """Have the runtime folder, and the store's socket there, also where they were removed."""
        self._rendezvous.make_folder()
        if self._store is not None:
            await self._store.open()

    async def _start_all(self, source: ProcessSource) -> tuple[Worker, str] | None:
        """Return the first that could not be started, or was not ready in time, and why."""
        starts: dict[asyncio.Task[None], Worker] = {}
        try:
            async with asyncio.timeout(START_TIMEOUT), asyncio.TaskGroup() as tasks:
                for worker in self.all.values():
                    starts[tasks.create_task(worker.start(source))] = worker
                    tasks.create_task(self._report_up(worker))
        except* OSError:
            pass  # looked at below
        return _first_failed(starts)

    async def _report_up(self, worker: Worker) -> None:
        await worker.output.up.wait()
        self._report(Starting(sum(each.output.up.is_set() for each in self.all.values())))

    async def _lacks(self, rank: int) -> tuple[str, ...]:
        """Say what the libraries of the workers lack; all have the same ones."""
        answer = await self.all[rank].ask(control.Check(), CHECK_TIMEOUT)
        return answer.sentences if isinstance(answer, control.Lacks) else ()

    async def stop(self, grace: float) -> None:
        """End all workers."""
        await self.end(tuple(self.all), grace)

    async def end(self, ranks: Sequence[int], grace: float) -> None:
        """End these ranks: politely for `grace` seconds, then by force."""
        leaving = [self.all.pop(rank) for rank in sorted(ranks) if rank in self.all]
        await asyncio.gather(*(worker.stop(grace) for worker in leaving))

    async def renumber(self, became: Mapping[int, int]) -> None:
        """Call each rank by another number; itself it learns of that with the next plan.

        What it writes goes to a folder of that number, with those of all others beside it.
        """
        if self._run is not None:
            self._logs = self._run.new_attempt(self._rendezvous.attempt)
        self._have({became[rank]: worker for rank, worker in self.all.items()})
        for rank, worker in self.all.items():
            worker.renumber(rank, self._logs_of(rank))

    def _have(self, workers: Mapping[int, Worker]) -> None:
        """Have these, in the order of their numbers: what is said of all has that too."""
        self.all = dict(sorted(workers.items()))

    def close(self) -> None:
        """Let go of what is kept from world to world; the workers have been stopped."""
        self._rendezvous.close()
        self.code.close()

    # --- a new generation of the group ------------------------------------------------------

    async def held(self) -> Held:
        """Say which of its ranks live, and what groups they hold."""
        alive = self.all_alive()
        asked = (worker.ask(control.ListGroups(), HELD_TIMEOUT) for worker in alive)
        answers = zip(alive, await asyncio.gather(*asked), strict=True)
        found = {each.rank: said for each, said in answers if self.alive([each.rank])}
        return Held(
            {r: said if isinstance(said, control.HeldGroups) else None for r, said in found.items()}
        )

    async def prepare(self, spec: WorldSpec, ranks: Sequence[int]) -> str:
        """Have a source that can start these ranks; what keeps it from that, else ""."""
        await self._make_folder()
        if lack := word_lack_of_files(spec.world_size):
            return lack
        try:
            await self._source(spec).prepare()
        except ChildProcessError as error:
            return f"rank {ranks[0]} could not start: {error}"
        return ""

    async def form(self, plan: Plan, ranks: Sequence[int]) -> Formed:
        """Start those of its ranks that are missing, and have the others meet them."""
        self._spec = spec = self.code.moved(plan.spec)
        if plan.attempt != self._rendezvous.attempt:
            self._begin(spec, plan.attempt)
        await self._make_folder()
        self._rendezvous.go_on(plan.generation, plan.sized_in)
        missing = [rank for rank in ranks if rank in plan.missing]
        await self.end(missing, 0.0)
        survivors = [self.all[rank] for rank in ranks if rank in self.all]
        for worker in survivors:
            worker.sit(spec)
        new = {rank: self._worker(spec, rank, plan.groups or {}) for rank in missing}
        self._have({**self.all, **new})
        forms = {each: self._form(plan, each.rank) for each in survivors}
        problem = await self._have_meet(forms, [*new.values()], self._source(spec))
        alive = tuple(worker.rank for worker in self.alive(ranks))
        return Formed(*self._whereabouts(), alive, problem)

    async def _have_meet(
        self,
        forms: Mapping[Worker, control.Request],
        new: Sequence[Worker],
        source: ProcessSource,
    ) -> str:
        """Have survivors form their groups, and new workers join them; a problem or ""."""
        ends = [worker.process.exited for worker in forms if worker.process is not None]
        with CallOff(self._rendezvous.over_file, ends) as call_off:
            answers, starts = await asyncio.gather(
                asyncio.gather(*(call_off.ask(each, forms[each], HEAL_TIMEOUT) for each in forms)),
                asyncio.gather(*(call_off.start(each, source, HEAL_TIMEOUT) for each in new)),
            )
        silent = (each for each, said in zip(forms, answers, strict=True) if said is None)
        await asyncio.gather(*(each.end_unfit(SILENT) for each in silent))
        return problem_in(starts, answers)

    def _form(self, plan: Plan, rank: int) -> control.Request:
        """Ask for what makes a survivor's groups whole, or its world one of another size."""
        spec = plan.spec
        environ = self._rendezvous.environ_of(spec, rank, self._logs_of(rank))
        if plan.groups is not None:
            return control.Regroup(plan.generation, plan.groups, spec.seats, environ)
        size, seats, threads = spec.world_size, spec.seats, spec.threads
        return control.Resize(plan.generation, rank, size, seats, threads, plan.missing, environ)

    async def call_off(self, generation: int) -> None:
        """Have its ranks wait no longer for this generation: not all ranks will come."""
        if generation != self._rendezvous.generation:
            return
        self._rendezvous.over_file.touch()
        for worker in self.all.values():
            if worker.state == "starting":  # it waits in C++
                worker.kill()

    async def abort(self, ranks: Iterable[int]) -> bool:
        """Have these abort their collectives; say whether all have answered in time.

        One that cannot is ended, which does that too, also when it says so later.
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

    # --- what workers come from -----------------------------------------------------------

    def _source(self, spec: WorldSpec) -> ProcessSource:
        if self._forker and spec.use_fork_server and can_fork_with(spec.environ):
            return self._forker
        return self._spawner

    def _worker(self, spec: WorldSpec, rank: int, joins: Groups | None = None) -> Worker:
        """Make one that has not been started."""
        logs = self._logs_of(rank)
        return Worker(self._rendezvous.start_of(spec, rank, logs, joins), logs, self._emit)

    def _logs_of(self, rank: int) -> Path | None:
        return self._logs and self._logs / str(rank)

    def _log_folder(self, spec: WorldSpec) -> Path | None:
        if self._run:
            self._run.close()
        # Machines can have one home folder, and each numbers its starts by itself.
        name = spec.name if spec.node is None else f"{spec.name}/{socket.gethostname()}"
        self._run = RunFolder(Path(spec.log_dir).expanduser(), name) if spec.log_dir else None
        return self._run.new_attempt(self._rendezvous.attempt - 1) if self._run else None

    def _whereabouts(self) -> tuple[dict[int, int], dict[int, str]]:
        """Return process and log folder of each rank."""
        pids = {rank: worker.pid for rank, worker in self.all.items()}
        return pids, {rank: str(worker.log.folder or "") for rank, worker in self.all.items()}


def problem_in(starts: Iterable[str], answers: Iterable[control.Answer | None]) -> str:
    """Say what kept ranks from forming their groups, "" for nothing; first of all a lack."""
    found = [*starts]
    for answer in answers:
        match answer:
            case None:
                found.append("a rank did not answer")
            case control.Failed(error):
                found.append(error)
    return lack_in(found) or next(filter(None, found), "")


def _first_failed(starts: Mapping[asyncio.Task[None], Worker]) -> tuple[Worker, str] | None:
    """Find one that has failed, or else the first that was not ready in time, and why."""
    for start, worker in starts.items():
        if not start.cancelled() and (error := start.exception()):
            return worker, str(error)
    late = (worker for start, worker in starts.items() if start.cancelled())
    return next(((each, f"it was not ready after {START_TIMEOUT:.0f} s") for each in late), None)


def _failure(spec: WorldSpec, rank: int, why: str, lines: tuple[str, ...]) -> StartFailure:
    if why in lines[-1:]:  # it says all
        return StartFailure(rank, socket.gethostname(), "", why, ())
    return StartFailure(rank, socket.gethostname(), shlex.join(spec.command), why, lines)


# --- the part of one of several machines ------------------------------------------------------


class PartCalls:
    """Answers the head; `address` is that of this machine by which others reach it."""

    def __init__(self, workers: WorkerGroup, address: str) -> None:
        self._workers = workers
        self._address = address

    def __repr__(self) -> str:
        return f"<PartCalls at {self._address} of {self._workers}>"

    async def answer(self, request: PartRequest) -> PartReply:
        """Do what is asked, and return the reply."""
        match request:
            case GetClock():
                return time.time_ns()
            case Reach(targets):
                from nbdist.cluster.client import first_unreached

                return await first_unreached(targets)
            case StartPart(spec, ranks, attempt):
                return await self._workers.start_part(self._here(spec), ranks, attempt)
            case GetHeld():
                return await self._workers.held()
            case Prepare(spec, ranks):
                return await self._workers.prepare(self._here(spec), ranks)
            case Form(plan, ranks):
                return await self._workers.form(replace(plan, spec=self._here(plan.spec)), ranks)
            case CallOffAsked(generation):
                await self._workers.call_off(generation)
            case EndRanks(ranks, grace):
                await self._workers.end(ranks, grace)
            case Renumber(became):
                await self._workers.renumber(became)
        return None

    def _here(self, spec: WorldSpec) -> WorldSpec:
        return spec_here(self._workers.code.moved(spec), os.environ, interface_of(self._address))


def spec_here(spec: WorldSpec, own: Mapping[str, str], interface: str) -> WorldSpec:
    """Make of the spec that all nodes share the one for this: its environment, folder and GPUs.

    The agent runs in the interpreter that workers are to have.
    """
    environ = {**own, **spec.environ}
    cwd = spec.cwd if Path(spec.cwd).is_dir() else str(Path.home())
    here, visible = max(1, len(spec.here)), visible_gpus(environ)
    return replace(
        spec,
        environ=environ,
        cwd=cwd,
        gpus=parse_gpus(spec.gpus_asked, visible) if spec.gpus_asked else visible,
        python=sys.executable,
        threads=spec.threads or max(1, usable_cores() // here),
        interface=interface or spec.interface,
    )


def interface_of(address: str) -> str:
    """Name the network interface that has this address, "" for none."""
    for name, found in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in found):
            return name
    return ""
