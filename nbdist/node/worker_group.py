"""The workers of one machine: started together, made whole together, ended together."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nbdist import folders
from nbdist.node.forker import Forker, can_fork_with
from nbdist.node.limits import lack_in, word_lack_of_files
from nbdist.node.processes import Children, ProcessSource, Spawner
from nbdist.node.rendezvous import CallOff, HeldPort
from nbdist.node.worker import Emit, Worker
from nbdist.node.worker_logs import RunFolder
from nbdist.topology import gpus_of
from nbdist.wire import control
from nbdist.wire.messages import Healed, StartFailure, Starting, WorldStarted
from nbdist.wire.start import WorkerStart, WorldSpec, over_file
from nbdist.wire.worker_environ import torchrun_variables

START_TIMEOUT = 180.0
"""Seconds for all workers to import, bind and meet; a spawned world on a busy disk is slow."""

HEAL_TIMEOUT = 30.0
"""Seconds for survivors and new workers to meet."""

HEAL_TRIES = 3
"""As many times as further workers may die while that is under way."""

ABORT_TIMEOUT = 1.0

CHECK_TIMEOUT = 1.0
"""Seconds for a worker to say what its libraries lack; where it takes longer, it is not said."""

NO_FILES = "no file can be opened any more, so the process is replaced"

LEAVE_GRACE = 0.5
"""Seconds that ranks have to run their exit handlers when the world is to have fewer."""


Groups = Mapping[str, tuple[int, ...]]
"""The ranks of each group besides the world's own, by its name."""


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
        self._runtime = runtime
        self._forker = forker
        self._emit = emit
        self._report = report
        self._spawner = Spawner(children)
        self._port = HeldPort()
        self._spec: WorldSpec | None = None
        self._attempt = self._generation = self._sized_in = 0
        self._run: RunFolder | None = None
        self._logs: Path | None = None
        self._store = -1

    def __repr__(self) -> str:
        return f"<WorkerGroup {sorted(self.all)} generation {self._generation}>"

    def close(self) -> None:
        """Let go of what is kept from world to world; the workers have been stopped."""
        self._port.close()
        self._drop_store()

    def alive(self, ranks: Iterable[int]) -> list[Worker]:
        """Return those of them whose process is there and ready."""
        found = (self.all[rank] for rank in ranks if rank in self.all)
        return [worker for worker in found if worker.state in ("idle", "busy")]

    def all_alive(self) -> list[Worker]:
        """Return all whose process is there and ready."""
        return self.alive(self.all)

    async def start(self, spec: WorldSpec) -> WorldStarted | StartFailure:
        """Start all ranks at once; when one fails, end the others."""
        self._spec = spec
        if lack := word_lack_of_files(spec.world_size):
            return StartFailure(0, socket.gethostname(), shlex.join(spec.command), lack, ())
        self._attempt += 1
        self._generation = self._sized_in = 1
        source = self._source()
        self._make_folder()
        # A file without a name: the world must outlive a cleaner of /tmp.
        self._drop_store()
        self._store = os.memfd_create(f"nbdist-store{self._attempt}")
        self._logs = self._log_folder(spec)
        self.all = {number: self._worker(spec, number) for number in range(spec.world_size)}
        starts: dict[asyncio.Task[None], Worker] = {}
        try:
            async with asyncio.timeout(START_TIMEOUT), asyncio.TaskGroup() as tasks:
                for worker in self.all.values():
                    starts[tasks.create_task(worker.start(source))] = worker
                    tasks.create_task(self._report_up(worker))
        except (ExceptionGroup, TimeoutError):
            failure = self._start_failure(starts)
            await self.stop(grace=0.0)
            return failure
        return WorldStarted(*self._whereabouts(), await self._lacks())

    async def _lacks(self) -> tuple[str, ...]:
        """Say what the libraries of the workers lack; all have the same ones."""
        answer = await self.all[0].ask(control.Check(), CHECK_TIMEOUT)
        return answer.sentences if isinstance(answer, control.Lacks) else ()

    async def _report_up(self, worker: Worker) -> None:
        await worker.output.up.wait()
        self._report(Starting(sum(each.output.up.is_set() for each in self.all.values())))

    async def heal(self) -> Healed:
        """Give all workers a group again, also where more of them die meanwhile."""
        assert self._spec is not None
        ranks = range(self._spec.world_size)
        for _ in range(HEAL_TRIES):
            problem = await self._form_anew(self._spec)
            if not problem or len(self.alive(ranks)) == len(ranks):
                break
        return Healed(*self._whereabouts(), problem)

    async def scale(self, spec: WorldSpec) -> Healed:
        """Have as many workers as the spec says, or, where more cannot be had, as before."""
        assert self._spec is not None
        size = self._spec.world_size
        if spec.world_size > size and (
            problem := word_lack_of_files(spec.world_size) or await self._prepare(size)
        ):
            return Healed(*self._whereabouts(), not_scaled=problem)
        before, self._spec = self._spec, spec
        await self._end_from(spec.world_size, LEAVE_GRACE)
        healed = await self.heal()
        if not healed.problem or spec.world_size < before.world_size:
            return healed
        self._spec = before
        await self._end_from(before.world_size, 0.0)
        return replace(await self.heal(), not_scaled=healed.problem)

    async def _end_from(self, first: int, grace: float) -> None:
        """End the ranks from this one on."""
        leaving = [self.all.pop(number) for number in sorted(self.all) if number >= first]
        await asyncio.gather(*(worker.stop(grace) for worker in leaving))

    async def _form_anew(self, spec: WorldSpec) -> str:
        """Start those that are missing, and form a new generation of the group; a problem or ""."""
        missing = [number for number in range(spec.world_size) if self._has_lost(number)]
        self._make_folder()
        # Before the survivors wait for those that are to come.
        if missing and (problem := await self._prepare(missing[0])):
            return problem
        self._generation += 1
        alive = self.alive(range(spec.world_size))
        ended = [self.all[number] for number in missing if number in self.all]
        await asyncio.gather(*(worker.stop(0.0) for worker in ended))
        sizes, groups = await self._groups(alive)
        # Where all have a group of that size it is made whole, with what was made from it.
        if is_other := any(size != spec.world_size for size in sizes):
            self._sized_in, groups = self._generation, {}
        new = [self._worker(spec, number, groups) for number in missing]
        self.all.update({worker.rank: worker for worker in new})
        forms: dict[Worker, control.Request]
        forms = dict.fromkeys(alive, control.Regroup(self._generation, groups))
        if is_other:
            forms = {each: self._resize(spec, each.rank, missing) for each in alive}
        ends = [worker.process.exited for worker in alive if worker.process is not None]
        with CallOff(over_file(self._over(), self._generation), ends) as call_off:
            source = self._source()
            answers, starts = await asyncio.gather(
                asyncio.gather(
                    *(self._have_formed(worker, form) for worker, form in forms.items())
                ),
                asyncio.gather(*(call_off.start(worker, source, HEAL_TIMEOUT) for worker in new)),
            )
        found = [*filter(None, [*starts, *map(_problem_in, answers)])]
        return lack_in(found) or next(iter(found), "")

    async def _prepare(self, rank: int) -> str:
        """Have a source that can start this rank; what keeps it from that, else ""."""
        try:
            await self._source().prepare()
        except ChildProcessError as error:
            return f"rank {rank} could not start: {error}"
        return ""

    def _make_folder(self) -> None:
        """Make the runtime folder again, where it was removed.

        Raises PermissionError where another user has made one of that name since.
        """
        try:
            self._runtime.mkdir(mode=folders.PRIVATE_FOLDER)
        except FileExistsError:
            folders.check_private(self._runtime)
        else:
            folders.claim(self._runtime, folders.runtime(self._runtime))

    def _drop_store(self) -> None:
        if self._store >= 0:
            os.close(self._store)
        self._store = -1

    def _has_lost(self, number: int) -> bool:
        """Say whether no worker of this rank is alive."""
        return not self.alive([number])

    def _resize(self, spec: WorldSpec, rank: int, newcomers: Sequence[int]) -> control.Resize:
        environ, new = self._start_of(spec, rank).environ, tuple(newcomers)
        return control.Resize(self._generation, spec.world_size, spec.threads, new, environ)

    async def _have_formed(self, worker: Worker, form: control.Request) -> control.Answer | None:
        """Return its answer; one that cannot take part is ended, to be replaced."""
        answer = await worker.ask(form, HEAL_TIMEOUT)
        await self.end_unfit(worker, answer)
        return answer

    async def abort(self, ranks: Iterable[int]) -> bool:
        """Have these abort their collectives; say whether all have answered.

        One that cannot is ended, which does that too.
        """
        return all(await asyncio.gather(*map(self._abort_one, self.alive(ranks))))

    async def _abort_one(self, worker: Worker) -> bool:
        answer = await worker.ask(control.Abort(), ABORT_TIMEOUT)
        await self.end_unfit(worker, answer)
        return answer is not None

    async def end_unfit(self, worker: Worker, answer: control.Answer | None) -> None:
        """End a rank that has answered that only another process could do what it was asked."""
        if isinstance(answer, control.Failed) and answer.unfit and worker.process is not None:
            worker.say(f"{NO_FILES}: {answer.error}\n")
            worker.kill()
            await asyncio.wait([worker.process.exited], timeout=HEAL_TIMEOUT)

    async def _groups(self, alive: Sequence[Worker]) -> tuple[set[int], Groups]:
        """Return the size of the survivors' group, and the ranks of all others that they hold."""
        answers = await asyncio.gather(
            *(worker.ask(control.ListGroups(), HEAL_TIMEOUT) for worker in alive)
        )
        held = [answer for answer in answers if isinstance(answer, control.HeldGroups)]
        members: dict[str, tuple[int, ...]] = {}
        for each in held:
            members.update(each.members)
        return {each.world_size for each in held}, members

    def _source(self) -> ProcessSource:
        spec = self._spec
        if spec and spec.use_fork_server and self._forker and can_fork_with(spec.environ):
            return self._forker
        return self._spawner

    def _whereabouts(self) -> tuple[dict[int, int], dict[int, str]]:
        """Return process and log folder of each rank."""
        pids = {rank: worker.pid for rank, worker in self.all.items()}
        return pids, {rank: str(worker.log.folder or "") for rank, worker in self.all.items()}

    def _worker(self, spec: WorldSpec, number: int, joins: Groups | None = None) -> Worker:
        """Make one that has not been started."""
        return Worker(self._start_of(spec, number, joins), self._logs_of(number), self._emit)

    def _logs_of(self, number: int) -> Path | None:
        return self._logs and self._logs / str(number)

    def _start_of(self, spec: WorldSpec, number: int, joins: Groups | None = None) -> WorkerStart:
        token = secrets.token_hex(8)
        name = f"{self._runtime}/a{self._attempt}g{self._generation}r{number}"
        seat, logs = spec.seat(number), self._logs_of(number)
        error_file = str(logs / "error.json") if logs else f"{name}.error.json"
        return WorkerStart(
            rank=number,
            local_rank=seat.local_rank,
            local_world_size=seat.local_world_size,
            world=spec,
            connection_file=f"{name}.json",
            token=token,
            store_path=f"/proc/{os.getpid()}/fd/{self._store}",
            over_path=str(self._over()),
            generation=self._generation,
            environ=torchrun_variables(spec, number, self._port.number, error_file),
            joins=joins,
            gpus=gpus_of(seat, spec.gpus, spec.per_node),
            sized_in=self._sized_in,
        )

    def _over(self) -> Path:
        return self._runtime / f"world{self._attempt}"

    def _log_folder(self, spec: WorldSpec) -> Path | None:
        before, self._run = self._run, None
        if before:
            before.close()
        if not spec.log_dir:
            return None
        self._run = RunFolder(Path(spec.log_dir), spec.name)
        return self._run.new_attempt(self._attempt - 1)

    def _start_failure(self, starts: Mapping[asyncio.Task[None], Worker]) -> StartFailure:
        """Word that of one that has failed, or else of the first that was not ready in time."""
        late = [start for start in starts if start.cancelled()]
        failed = [start for start in starts if not start.cancelled() and start.exception()]
        first = (failed or late)[0]
        worker = starts[first]
        error = first.exception() if failed else None
        reason = str(error) if error else f"it was not ready after {START_TIMEOUT:.0f} s"
        said = worker.output.last_lines
        if not said and self._forker and self._source() is self._forker:
            said = self._forker.last_lines()
        return StartFailure(
            rank=worker.rank,
            host=socket.gethostname(),
            command=shlex.join(self._spec.command) if self._spec else "",
            reason=reason,
            last_lines=said,
        )

    async def stop(self, grace: float) -> None:
        workers, self.all = self.all, {}
        if workers:
            await asyncio.gather(*(worker.stop(grace) for worker in workers.values()))


def _problem_in(answer: control.Answer | None) -> str:
    """Say what kept a rank from forming its groups, "" for nothing."""
    match answer:
        case None:
            return "a rank did not answer"
        case control.Failed(error):
            return error
    return ""
