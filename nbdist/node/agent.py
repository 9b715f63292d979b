"""The agent: keeps the workers of one machine, and ends them when its notebook ends."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import zmq
from zmq.eventloop.zmqstream import ZMQStream

from nbdist import __version__
from nbdist.layout import gpus_of
from nbdist.node.birth import adopt_orphans
from nbdist.node.calling_off import CallOff
from nbdist.node.logs import attempt_folder, drop_old_runs
from nbdist.node.looking import stack_of, status_of
from nbdist.node.memory import MemoryGauge
from nbdist.node.outbox import Outbox
from nbdist.node.port import HeldPort
from nbdist.node.processes import Nursery, ProcessSource, Spawner
from nbdist.node.rank import Rank
from nbdist.wire.environ import torchrun_variables
from nbdist.wire.frames import down_from, to_bytes
from nbdist.wire.looks import GetStacks
from nbdist.wire.messages import (
    Answer,
    Call,
    Cell,
    Free,
    GetStatus,
    Heal,
    Healed,
    Hello,
    Interrupt,
    Kill,
    Leave,
    LetGo,
    LivingGroups,
    Look,
    RankStart,
    Received,
    Reply,
    Run,
    Scale,
    Seen,
    StartFailure,
    Starting,
    StartWorld,
    StopWorld,
    Up,
    WorldSpec,
    WorldStarted,
    over_file,
)

log = logging.getLogger("nbdist.node")

START_TIMEOUT = 180.0
"""Seconds for all workers to import, bind and meet; a spawned world on a busy disk is slow."""

HEAL_TIMEOUT = 30.0
"""Seconds for survivors and new workers to meet."""

HEAL_TRIES = 3
"""As many times as further workers may die while that is under way."""

LEAVE_GRACE = 0.5
"""Seconds that ranks have to run their exit handlers when the world is to have fewer."""

FREE_TIMEOUT = 1.0

LINK_LINGER = 500
"""Milliseconds that the last messages may take to reach the notebook."""


class Agent:
    """Does what the notebook calls for, one call at a time, and reports as things happen."""

    def __init__(self, runtime: Path, nursery: Nursery | None) -> None:
        self._runtime = runtime
        self._nursery = nursery
        self._spawner = Spawner()
        self._ranks: dict[int, Rank] = {}
        self._spec: WorldSpec | None = None
        self._attempt = self._generation = self._born = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: asyncio.Queue[Call] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._gauge = MemoryGauge()
        self._port = HeldPort()
        self._logs: Path | None = None
        self._outbox = Outbox(self._send)
        link: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        link.linger = LINK_LINGER
        link.sndhwm = link.rcvhwm = 0
        link.connect(f"ipc://{runtime}/notebook.sock")
        self._link = ZMQStream(link)
        self._link.on_recv(self._receive)

    def __repr__(self) -> str:
        return f"<Agent {os.getpid()} ranks {sorted(self._ranks)} {self._outbox}>"

    async def serve(self) -> None:
        """Work until the notebook leaves or ends, then leave nothing behind."""
        if self._nursery:
            self._nursery.attach()
        self._send(Hello(__version__, os.getpid(), socket.gethostname()))
        answering = asyncio.ensure_future(self._answer_calls())
        await asyncio.wait(
            [answering, asyncio.ensure_future(self._gone.wait())],
            return_when=asyncio.FIRST_COMPLETED,
        )
        answering.cancel()
        await asyncio.wait([answering])
        await self._stop_ranks(grace=0.0)
        self._spawner.close()
        self._port.close()
        self._link.close()
        # Before the nursery ends: if this process is killed now, the nursery removes it.
        shutil.rmtree(self._runtime, ignore_errors=True)
        if self._nursery:
            self._nursery.close()
        if not answering.cancelled():
            answering.result()  # a fault of ours: its traceback goes to the agent's log

    def leave(self) -> None:
        """The notebook is done with this agent, or is no more."""
        self._gone.set()

    def fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A fault of ours in a callback: end loudly rather than go on half."""
        loop.default_exception_handler(context)
        self.leave()

    # --- messages ------------------------------------------------------------------------

    def _send(self, message: Up) -> None:
        self._link.send(to_bytes(message))

    def _receive(self, frames: list[bytes]) -> None:
        match down_from(frames[0]):
            case Run(cell):
                self._run(cell)
            case Call(_, Interrupt(ranks)) as call:
                # At once, also while another call is being answered.
                for rank in ranks:
                    self._ranks[rank].interrupt()
                self._send(Answer(call.id, None))
            case Call(_, GetStatus()) as call:
                self._do(self._tell_status(call.id))
            case Call(_, GetStacks(ranks)) as call:
                self._do(self._tell_stacks(call.id, ranks))
            case Call() as call:
                self._calls.put_nowait(call)
            case Look(ranks):
                self._do(self._look(ranks))
            case Free(ranks):
                self._do(self._free(ranks))
            case LetGo(cell_id, ranks):
                self._do(self._let_go(cell_id, ranks))
            case Received():
                self._outbox.acknowledge()
            case Leave():
                self.leave()

    async def _answer_calls(self) -> None:
        while True:
            call = await self._calls.get()
            reply: Reply = None
            match call.request:
                case StartWorld(spec):
                    reply = await self._start_world(spec)
                case StopWorld(grace):
                    await self._stop_ranks(grace)
                case Heal():
                    reply = await self._heal()
                case Scale(spec):
                    reply = await self._scale(spec)
                case Kill(ranks):
                    for rank in self._living(ranks):
                        rank.kill()
            self._send(Answer(call.id, reply))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside the calls; what it raises ends the agent, as any fault of ours."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

    async def _look(self, ranks: Sequence[int]) -> None:
        living = self._living(ranks)
        places = await asyncio.gather(*(rank.look() for rank in living))
        found = zip(living, places, strict=True)
        self._send(Seen({rank.rank: place for rank, place in found}))

    async def _tell_status(self, number: int) -> None:
        rows = await status_of(tuple(self._ranks.values()), self._gauge)
        self._send(Answer(number, rows))

    async def _tell_stacks(self, number: int, ranks: Sequence[int]) -> None:
        asked = [self._ranks[rank] for rank in ranks if rank in self._ranks]
        self._send(Answer(number, tuple(await asyncio.gather(*map(stack_of, asked)))))

    async def _free(self, ranks: Sequence[int]) -> None:
        asked = (rank.ask({"do": "free"}, FREE_TIMEOUT) for rank in self._living(ranks))
        await asyncio.gather(*asked)

    async def _let_go(self, cell_id: str, ranks: Sequence[int]) -> None:
        order = {"do": "let_go", "cell": cell_id}
        await asyncio.gather(*(rank.ask(order, FREE_TIMEOUT) for rank in self._living(ranks)))

    def _living(self, ranks: Iterable[int]) -> list[Rank]:
        found = (self._ranks[rank] for rank in ranks if rank in self._ranks)
        return [rank for rank in found if rank.state in ("idle", "busy")]

    def _run(self, cell: Cell) -> None:
        for rank in cell.ranks:
            self._ranks[rank].run(cell)

    # --- the world's workers -----------------------------------------------------------------

    async def _start_world(self, spec: WorldSpec) -> WorldStarted | StartFailure:
        """Start all ranks at once; when one fails, end the others."""
        self._spec = spec
        self._attempt += 1
        self._generation = self._born = 1
        source = self._source()
        self._logs = self._log_folder(spec)
        self._ranks = {number: self._rank(spec, number) for number in range(spec.world_size)}
        starts = {asyncio.ensure_future(rank.start(source)): rank for rank in self._ranks.values()}
        telling = [asyncio.ensure_future(self._tell_up(rank)) for rank in self._ranks.values()]
        done, pending = await asyncio.wait(
            starts, timeout=START_TIMEOUT, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in telling:
            task.cancel()
        failed = [start for start in done if start.exception()]
        if not failed and not pending:
            return WorldStarted(*self._whereabouts())
        late = failed or sorted(pending, key=lambda start: starts[start].rank)
        failure = self._start_failure(starts[late[0]], late[0].exception() if failed else None)
        for start in pending:
            start.cancel()
        if pending:
            await asyncio.wait(pending)
        await self._stop_ranks(grace=0.0)
        return failure

    async def _tell_up(self, rank: Rank) -> None:
        await rank.up.wait()
        self._send(Starting(sum(each.up.is_set() for each in self._ranks.values())))

    async def _heal(self) -> Healed:
        """Give all workers a group again, also where more of them die meanwhile."""
        assert self._spec is not None
        everybody = range(self._spec.world_size)
        for _ in range(HEAL_TRIES):
            problem = await self._form_anew(self._spec)
            if not problem or len(self._living(everybody)) == len(everybody):
                break
        return Healed(*self._whereabouts(), problem)

    async def _scale(self, spec: WorldSpec) -> Healed:
        """Have as many workers as the spec says, or, where more cannot be had, as before."""
        assert self._spec is not None
        before, self._spec = self._spec, spec
        await self._end_from(spec.world_size, LEAVE_GRACE)
        healed = await self._heal()
        if not healed.problem or spec.world_size < before.world_size:
            return healed
        self._spec = before
        await self._end_from(before.world_size, 0.0)
        return replace(await self._heal(), not_scaled=healed.problem)

    async def _end_from(self, first: int, grace: float) -> None:
        """End the ranks from this one on."""
        leaving = [self._ranks.pop(number) for number in sorted(self._ranks) if number >= first]
        await asyncio.gather(*(rank.stop(grace) for rank in leaving))

    async def _form_anew(self, spec: WorldSpec) -> str:
        """Start those that are missing, and form a new generation of the group; a problem or ""."""
        self._generation += 1
        living = self._living(range(spec.world_size))
        missing = [number for number in range(spec.world_size) if self._has_lost(number)]
        ended = [self._ranks[number] for number in missing if number in self._ranks]
        await asyncio.gather(*(rank.stop(0.0) for rank in ended))
        sizes, groups = await self._groups(living)
        # Where all have a group of that size it is made whole, with what was made from it.
        if is_other := any(size != spec.world_size for size in sizes):
            self._born, groups = self._generation, LivingGroups({})
        new = [self._rank(spec, number, groups) for number in missing]
        self._ranks.update({rank.rank: rank for rank in new})
        form = {"do": "form", "generation": self._generation, **asdict(groups)}
        if is_other:
            form |= {"do": "scale", "world_size": spec.world_size, "threads": spec.threads}
            form |= {"newcomers": missing}
        with CallOff(over_file(self._store(), self._generation), living) as call_off:
            source = self._source()
            answers, starts = await asyncio.gather(
                asyncio.gather(
                    *(rank.ask(self._form_for(rank, form), HEAL_TIMEOUT) for rank in living)
                ),
                asyncio.gather(*(call_off.start(rank, source, HEAL_TIMEOUT) for rank in new)),
            )
        problems = [
            a.get("error", "") if a is not None else "a rank did not answer" for a in answers
        ]
        return next(filter(None, [*starts, *problems]), "")

    def _has_lost(self, number: int) -> bool:
        """Whether there is no living worker of this rank."""
        return not self._living([number])

    def _form_for(self, rank: Rank, form: Mapping[str, Any]) -> dict[str, Any]:
        """With what differs from rank to rank."""
        assert self._spec is not None
        return {**form, "environ": dict(self._orders(self._spec, rank.rank).environ)}

    async def _groups(self, living: Sequence[Rank]) -> tuple[set[int], LivingGroups]:
        """Of how many ranks the survivors' group is, and all others that they hold."""
        answers = await asyncio.gather(
            *(rank.ask({"do": "living"}, HEAL_TIMEOUT) for rank in living)
        )
        members: dict[str, tuple[int, ...]] = {}
        for answer in filter(None, answers):
            members.update({name: tuple(ranks) for name, ranks in answer["members"].items()})
        return {answer["world_size"] for answer in filter(None, answers)}, LivingGroups(members)

    def _source(self) -> ProcessSource:
        if self._spec and self._spec.use_nursery and self._nursery:
            return self._nursery
        return self._spawner

    def _whereabouts(self) -> tuple[dict[int, int], dict[int, str]]:
        """Process and log folder of each rank."""
        pids = {number: rank.pid for number, rank in self._ranks.items()}
        return pids, {number: str(rank.log.folder or "") for number, rank in self._ranks.items()}

    def _rank(self, spec: WorldSpec, number: int, living: LivingGroups | None = None) -> Rank:
        """One that has not been started."""
        return Rank(self._orders(spec, number, living), self._logs_of(number), self._outbox.add)

    def _logs_of(self, number: int) -> Path | None:
        return self._logs and self._logs / str(number)

    def _orders(
        self, spec: WorldSpec, number: int, living: LivingGroups | None = None
    ) -> RankStart:
        token = secrets.token_hex(8)
        name = f"{self._runtime}/a{self._attempt}g{self._generation}r{number}"
        seat, logs = spec.seat(number), self._logs_of(number)
        error_file = str(logs / "error.json") if logs else f"{name}.error.json"
        return RankStart(
            rank=number,
            local_rank=seat.local_rank,
            local_world_size=seat.local_world_size,
            world=spec,
            connection_file=f"{name}.json",
            token=token,
            store_path=str(self._store()),
            generation=self._generation,
            environ=torchrun_variables(spec, number, self._port.number, error_file),
            living=living,
            gpus=gpus_of(seat, spec.gpus, spec.per_node),
            born=self._born,
        )

    def _store(self) -> Path:
        return self._runtime / f"store{self._attempt}"

    def _log_folder(self, spec: WorldSpec) -> Path | None:
        if not spec.log_dir:
            return None
        root = Path(spec.log_dir)
        drop_old_runs(root)
        return attempt_folder(root / spec.name, self._attempt - 1)

    def _start_failure(self, rank: Rank, error: BaseException | None) -> StartFailure:
        reason = str(error) if error else f"it was not ready after {START_TIMEOUT:.0f} s"
        said = rank.last_lines
        if not said and self._nursery and self._source() is self._nursery:
            said = self._nursery.last_lines()
        return StartFailure(
            rank=rank.rank,
            host=socket.gethostname(),
            command=shlex.join(self._spec.command) if self._spec else "",
            reason=reason,
            last_lines=said,
        )

    async def _stop_ranks(self, grace: float) -> None:
        ranks, self._ranks = self._ranks, {}
        if ranks:
            await asyncio.gather(*(rank.stop(grace) for rank in ranks.values()))


def run_agent(runtime: Path, notebook_pid: int, nursery: Nursery | None) -> None:
    """Run an agent until its notebook ends; returns with nothing left behind."""
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    adopt_orphans()
    lock = (runtime / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # whoever cleans up after dead agents sees that this one lives
    try:
        asyncio.run(_serve(runtime, notebook_pid, nursery))
    finally:
        end_descendants()
        shutil.rmtree(runtime, ignore_errors=True)


async def _serve(runtime: Path, notebook_pid: int, nursery: Nursery | None) -> None:
    agent = Agent(runtime, nursery)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(agent.fail)
    loop.add_signal_handler(signal.SIGTERM, agent.leave)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    # Either may come first; a pipe's other end can live on in a child of the notebook.
    loop.add_reader(sys.stdin.fileno(), agent.leave)
    try:
        notebook = os.pidfd_open(notebook_pid)
    except ProcessLookupError:
        agent.leave()
    else:
        loop.add_reader(notebook, agent.leave)
    await agent.serve()


def end_descendants() -> None:
    """Kill whatever user code started that outlived its worker."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=2.0)
