"""The workers of one machine: started together, made whole together, ended together."""

from __future__ import annotations

import asyncio
import shlex
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nbdist.node.forker import Forker, can_fork_with
from nbdist.node.limits import lack_in, word_lack_of_files
from nbdist.node.processes import Children, ProcessSource, Spawner
from nbdist.node.rendezvous import CallOff, Groups, Rendezvous
from nbdist.node.worker import Emit, Worker
from nbdist.node.worker_logs import RunFolder
from nbdist.wire import control
from nbdist.wire.messages import Healed, StartFailure, Starting, WorldStarted
from nbdist.wire.start import WorldSpec

START_TIMEOUT = 180.0
"""Seconds for all workers to import, bind and meet; a spawned world on a busy disk is slow."""

HEAL_TIMEOUT = 30.0
"""Seconds for survivors and new workers to meet."""

HEAL_TRIES = 3
"""As many times as further workers may die while that is under way."""

ABORT_TIMEOUT = 1.0

CHECK_TIMEOUT = 1.0
"""Seconds for a worker to say what its libraries lack; where it takes longer, it is not said."""

LEAVE_GRACE = 0.5
"""Seconds that ranks have to run their exit handlers when the world is to have fewer."""


class WorkerGroup:
    """All workers that an agent has; `all` has them by number.

    `emit` takes what they show, `report` how their start goes on.
    """

    def __init__(
        self,
        runtime: Path,
        children: Children,
        forker: Forker | None,
        emit: Emit,
        report: Callable[[Starting], None],
    ) -> None:
        self.all: dict[int, Worker] = {}
        self._forker = forker
        self._emit = emit
        self._report = report
        self._spawner = Spawner(children)
        self._rendezvous = Rendezvous(runtime)
        self._spec: WorldSpec | None = None
        self._run: RunFolder | None = None
        self._logs: Path | None = None

    def __repr__(self) -> str:
        return f"<WorkerGroup {sorted(self.all)} {self._rendezvous}>"

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

    # --- start and stop -------------------------------------------------------------------

    async def start(self, spec: WorldSpec) -> WorldStarted | StartFailure:
        """Start all ranks at once; when one fails, end the others."""
        self._spec = spec
        if lack := word_lack_of_files(spec.world_size):
            return _failure(spec, 0, lack, ())
        self._rendezvous.begin_world()
        self._logs = self._log_folder(spec)
        self.all = {rank: self._worker(spec, rank) for rank in range(spec.world_size)}
        source = self._source(spec)
        if failed := await self._start_all(source):
            worker, why = failed
            lines = worker.output.last_lines or source.last_lines()
            await self.stop(grace=0.0)
            return _failure(spec, worker.rank, why, lines)
        return WorldStarted(*self._whereabouts(), await self._lacks())

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

    async def _lacks(self) -> tuple[str, ...]:
        """Say what the libraries of the workers lack; all have the same ones."""
        answer = await self.all[0].ask(control.Check(), CHECK_TIMEOUT)
        return answer.sentences if isinstance(answer, control.Lacks) else ()

    async def stop(self, grace: float) -> None:
        """End all workers."""
        await self._end_from(0, grace)

    async def _end_from(self, first: int, grace: float) -> None:
        """End the ranks from this one on."""
        leaving = [self.all.pop(rank) for rank in sorted(self.all) if rank >= first]
        await asyncio.gather(*(worker.stop(grace) for worker in leaving))

    def close(self) -> None:
        """Let go of what is kept from world to world; the workers have been stopped."""
        self._rendezvous.close()

    # --- heal and scale -------------------------------------------------------------------

    async def heal(self) -> Healed:
        """Give all workers a group again, also where more of them die meanwhile."""
        assert self._spec is not None
        everybody = range(self._spec.world_size)
        for _ in range(HEAL_TRIES):
            problem = await self._form_anew(self._spec)
            if not problem or len(self.alive(everybody)) == len(everybody):
                break
        return Healed(*self._whereabouts(), problem)

    async def scale(self, spec: WorldSpec) -> Healed:
        """Have as many workers as the spec says, or, where more cannot be had, as before."""
        assert self._spec is not None
        before, size = self._spec, self._spec.world_size
        if spec.world_size > size and (
            problem := word_lack_of_files(spec.world_size) or await self._prepare(size)
        ):
            return Healed(*self._whereabouts(), not_scaled=problem)
        healed = await self._scale_to(spec, LEAVE_GRACE)
        if not healed.problem or spec.world_size < size:
            return healed
        return replace(await self._scale_to(before, 0.0), not_scaled=healed.problem)

    async def _scale_to(self, spec: WorldSpec, grace: float) -> Healed:
        self._spec = spec
        await self._end_from(spec.world_size, grace)
        return await self.heal()

    async def _form_anew(self, spec: WorldSpec) -> str:
        """Start those that are missing, and form a new generation of the group; a problem or ""."""
        everybody = range(spec.world_size)
        missing = [rank for rank in everybody if not self.alive([rank])]
        self._rendezvous.make_folder()
        # Before the survivors wait for those that are to come.
        if missing and (problem := await self._prepare(missing[0])):
            return problem
        self._rendezvous.generation += 1
        survivors = self.alive(everybody)
        ended = [self.all[rank] for rank in missing if rank in self.all]
        await asyncio.gather(*(worker.stop(0.0) for worker in ended))
        groups = groups_to_keep(await _held_by(survivors), spec.world_size)
        if groups is None:
            self._rendezvous.resize()
        new = {rank: self._worker(spec, rank, groups or {}) for rank in missing}
        self.all.update(new)
        forms = {each: self._form(spec, each.rank, groups, missing) for each in survivors}
        return await self._have_meet(forms, [*new.values()], self._source(spec))

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
                asyncio.gather(*(each.ask_or_end(forms[each], HEAL_TIMEOUT) for each in forms)),
                asyncio.gather(*(call_off.start(each, source, HEAL_TIMEOUT) for each in new)),
            )
        return problem_in(starts, answers)

    def _form(
        self, spec: WorldSpec, rank: int, groups: Groups | None, newcomers: Sequence[int]
    ) -> control.Request:
        """Ask for what makes a survivor's groups whole, or its world one of another size."""
        generation = self._rendezvous.generation
        if groups is not None:
            return control.Regroup(generation, groups)
        environ = self._rendezvous.environ_of(spec, rank, self._logs_of(rank))
        return control.Resize(generation, spec.world_size, spec.threads, tuple(newcomers), environ)

    async def abort(self, ranks: Iterable[int]) -> bool:
        """Have these abort their collectives; say whether all have answered.

        One that cannot is ended, which does that too.
        """
        asked = (each.ask_or_end(control.Abort(), ABORT_TIMEOUT) for each in self.alive(ranks))
        return None not in await asyncio.gather(*asked)

    # --- what workers come from -----------------------------------------------------------

    async def _prepare(self, rank: int) -> str:
        """Have a source that can start this rank; what keeps it from that, else ""."""
        assert self._spec is not None
        try:
            await self._source(self._spec).prepare()
        except ChildProcessError as error:
            return f"rank {rank} could not start: {error}"
        return ""

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
        self._run = RunFolder(Path(spec.log_dir), spec.name) if spec.log_dir else None
        return self._run.new_attempt(self._rendezvous.attempt - 1) if self._run else None

    def _whereabouts(self) -> tuple[dict[int, int], dict[int, str]]:
        """Return process and log folder of each rank."""
        pids = {rank: worker.pid for rank, worker in self.all.items()}
        return pids, {rank: str(worker.log.folder or "") for rank, worker in self.all.items()}


async def _held_by(workers: Sequence[Worker]) -> list[control.HeldGroups]:
    asked = (worker.ask(control.ListGroups(), HEAL_TIMEOUT) for worker in workers)
    answers = await asyncio.gather(*asked)
    return [answer for answer in answers if isinstance(answer, control.HeldGroups)]


def groups_to_keep(held: Sequence[control.HeldGroups], world_size: int) -> Groups | None:
    """Choose the groups to be made whole, with what was made from them: all that survivors hold.

    None where the world's own is of another size, or there is none, and a new one is made.
    """
    if any(each.world_size != world_size for each in held):
        return None
    return {name: ranks for each in held for name, ranks in each.members.items()}


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
    return StartFailure(rank, socket.gethostname(), shlex.join(spec.command), why, lines)
