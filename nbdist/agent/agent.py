"""The agent: keeps the workers of one machine, and ends them when its notebook ends."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nbdist.agent.forming import Forming
from nbdist.agent.inspect import UsageWatch, consulted, stack_of, status_of
from nbdist.agent.listener import Listener, with_ranks
from nbdist.agent.notebook_link import Serving, Tether, run
from nbdist.agent.outbox import Outbox
from nbdist.agent.processes import Children, Forker
from nbdist.agent.rendezvous import AskStore, StoreWindow
from nbdist.agent.startup import ForkServerProcess, Guard
from nbdist.agent.stopping import Stopping
from nbdist.agent.worker import Emit, Worker
from nbdist.agent.worker_group import PartCalls, WorkerGroup
from nbdist.system.proc import MemoryGauge
from nbdist.wire import control
from nbdist.wire.files import GetLogs, read_logs
from nbdist.wire.messages import (
    Abort,
    Aborted,
    Answer,
    Ask,
    Consult,
    Enter,
    GetCode,
    GetStacks,
    GetStatus,
    Heal,
    Interrupt,
    Kill,
    Leave,
    LetGo,
    Locate,
    Located,
    PutCode,
    Received,
    Reply,
    Request,
    Run,
    Scale,
    Spare,
    StartWorld,
    StopWorld,
    Up,
)
from nbdist.wire.node_messages import NodeAnswer, NodeAsk, NodeDown, NodeUp
from nbdist.wire.store import Answer as StoreReply
from nbdist.wire.store import Operation
from nbdist.wire.transfer import Taken
from nbdist.wire.views import WorldInfo

if TYPE_CHECKING:
    from nbdist.cluster.client import Coming, HeadEnd
    from nbdist.cluster.transfer import Uploads

log = logging.getLogger("nbdist.agent")

LET_GO_TIMEOUT = 1.0
BIND_TIMEOUT = 60.0


class LinkEnd(Protocol):
    """The link to who an agent works for: a notebook, or the head of several agents."""

    @property
    def problem(self) -> str:
        """Why the link has ended before its time, "" where nothing was wrong."""

    async def open(self) -> None:
        """Say hello, and leave when who is at the other end has ended."""

    def send(self, message: Up) -> None:
        """Send a message."""

    async def close(self) -> None:
        """End the link; what was sent has a moment to arrive."""


class Agent:
    """Does what the notebook calls for, one call at a time, and reports as things happen.

    With `ask_store` its ranks meet in a store that this leads to, else in a file.
    """

    def __init__(
        self,
        runtime: Path,
        notebook_pid: int,
        children: Children,
        forker: Forker | None,
        ask_store: AskStore | None = None,
        coming: Coming | None = None,
        guard: Guard | None = None,
    ) -> None:
        """With `coming` it is one of several, and has a head in the notebook's place."""
        self._runtime = runtime
        self._children = children
        self._forker = forker
        self._serving = Serving(self._answer, self._send)
        self._gauge = MemoryGauge()
        self._outbox = Outbox(self._send)
        self._head: HeadEnd | None = None
        self._returns: Uploads | None = None
        emit: Emit = self._outbox.add
        if coming:
            # For worlds on several machines alone.
            from nbdist.cluster.client import HeadEnd
            from nbdist.cluster.transfer import Uploads

            self._returns = Uploads(emit, self._send_head)
            emit, ask_store = self._returns.add, self._ask_head
        self._store = StoreWindow(runtime, ask_store) if ask_store else None
        address = coming.way.own if coming else "127.0.0.1"
        self._workers = WorkerGroup(
            runtime, children, forker, emit, self._send, self._store, address
        )
        self._part = PartCalls(self._workers, address)
        self._forming = Forming({0: self._workers})
        self._usage = UsageWatch(self._gauge, self._send)
        self._stopping = Stopping(self._abort_all, lambda places: self._send(Aborted(places)))
        leave, tether = self._serving.leave, None
        self._end: LinkEnd
        if coming:
            self._end = self._head = HeadEnd(
                coming, self._workers.port, self._receive, leave, guard
            )
        else:
            self._end = tether = Tether(runtime, notebook_pid, guard, self._receive, leave)
        self._listener = Listener(runtime, self._look, tether)

    def __repr__(self) -> str:
        return f"<Agent {os.getpid()} ranks {sorted(self._workers.all)} {self._outbox}>"

    async def serve(self) -> None:
        """Work until the notebook leaves or ends, then leave nothing behind."""
        asyncio.get_running_loop().set_exception_handler(self._serving.fail)
        self._children.attach()
        if self._forker:
            self._forker.attach(self._bind_workers)
        await self._listener.open()
        if self._store:
            await self._store.open()
        await self._end.open()
        try:
            await self._serving.until_left()
        finally:
            # First: it may be importing, and this process learns of its own children at once.
            if self._forker:
                self._forker.close()
            await self._workers.stop(grace=0.0)
            self._workers.close()
            if self._store:
                await self._store.close()
            self._usage.close()
            if self._returns:
                self._returns.close()
            await self._end.close()
            await self._listener.close()
            self._children.close()

    @property
    def problem(self) -> str:
        """Why it has lost its head, "" for an agent that has not."""
        return self._end.problem

    # --- messages ------------------------------------------------------------------------

    def _send(self, message: Up) -> None:
        self._end.send(message)

    def _receive(self, message: NodeDown) -> None:
        match message:
            case NodeAsk() as of_part:
                self._serving.do(self._report_part(of_part))
            case Run() as run:
                self._run(run)
            case Ask(number, GetStatus()):
                self._serving.do(self._report_status(number))
            case Ask(number, GetStacks(ranks)):
                self._serving.do(self._report_stacks(number, ranks))
            case Ask(number, GetLogs() as get):
                self._serving.do(self._report_logs(number, get))
            case Ask(number, Consult() as consult):
                self._serving.do(self._report_answer(number, consult))
            case Ask() as ask:
                self._serving.call(ask)
            case Locate(ranks):
                self._serving.do(self._locate(ranks))
            case Abort(ranks):
                self._serving.do(self._abort(ranks))
            case Taken() as taken if self._returns:
                self._returns.taken(taken)
            case Interrupt(ranks):
                ranks = self._returns.stop(ranks) if self._returns else ranks
                for work in self._stopping.begin(self._workers.alive(ranks)):
                    self._serving.do(work)
            case Spare(ranks):
                self._stopping.spare(ranks)
            case LetGo(task_id, ranks):
                self._serving.do(self._let_go(task_id, ranks))
            case Enter(rank, reply):
                for worker in self._workers.alive([rank]):
                    worker.enter(reply)
            case Received():
                self._outbox.acknowledge()
            case Leave():
                self._serving.leave()

    async def _answer(self, request: Request) -> Reply:
        match request:
            case StartWorld(spec):
                return await self._forming.start(spec)
            case StopWorld(grace):
                await self._forming.stop(grace)
            case Heal():
                return await self._forming.heal()
            case Scale(spec, keep):
                return await self._forming.scale(spec, keep)
            case Kill(ranks, why):
                for worker in self._workers.alive(ranks):
                    worker.kill(why)
            case GetCode() | PutCode():
                return await asyncio.to_thread(self._workers.code.take, request)
        return None

    async def _ask_head(self, operation: Operation) -> StoreReply:
        assert self._head
        return await self._head.ask_store(operation)

    async def _report_part(self, ask: NodeAsk) -> None:
        self._send_head(NodeAnswer(ask.id, await self._part.answer(ask.request)))

    def _send_head(self, message: NodeUp) -> None:
        assert self._head
        self._head.send(message)

    async def _locate(self, ranks: Sequence[int]) -> None:
        alive = self._workers.alive(ranks)
        places = await asyncio.gather(*(worker.locate() for worker in alive))
        found = zip(alive, places, strict=True)
        self._send(Located({each.rank: place for each, place in found if not each.is_killed}))

    async def _report_status(self, number: int) -> None:
        workers = tuple(self._workers.all.values())
        self._send(Answer(number, await status_of(workers, self._gauge, self._usage)))

    async def _look(self, info: WorldInfo) -> WorldInfo:
        workers, fresh = tuple(self._workers.all.values()), self._usage.fresh_seconds
        rows = await status_of(workers, self._gauge, self._usage, fresh)
        return with_ranks(info, self._workers.spec, rows)

    async def _report_stacks(self, number: int, ranks: Sequence[int]) -> None:
        asked = [self._workers.all[rank] for rank in ranks if rank in self._workers.all]
        self._send(Answer(number, tuple(await asyncio.gather(*map(stack_of, asked)))))

    async def _report_logs(self, number: int, get: GetLogs) -> None:
        found = {rank: worker.log.folder for rank, worker in self._workers.all.items()}
        self._send(Answer(number, await asyncio.to_thread(read_logs, found, get)))

    async def _report_answer(self, number: int, consult: Consult) -> None:
        alive = self._workers.alive(consult.ranks)
        self._send(Answer(number, await consulted(alive, consult.question)))

    async def _abort(self, ranks: Sequence[int]) -> None:
        await self._workers.abort(ranks)

    async def _abort_all(self) -> bool:
        return await self._workers.abort(self._workers.all)

    def _bind_workers(self) -> None:
        """Have workers end with this process: without the fork server they are its children."""
        workers = self._workers.all_alive()
        log.warning("the fork server has ended; %d workers are left", len(workers))
        for worker in workers:
            self._serving.do(self._bind(worker))

    async def _bind(self, worker: Worker) -> None:
        await worker.ask(control.Bind(os.getpid()), BIND_TIMEOUT)

    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers.all_alive() if worker.state == "busy"]

    async def _let_go(self, task_id: str, ranks: Sequence[int]) -> None:
        let_go, alive = control.LetGo(task_id), self._workers.alive(ranks)
        await asyncio.gather(*(worker.ask(let_go, LET_GO_TIMEOUT) for worker in alive))

    def _run(self, run: Run) -> None:
        self._outbox.begin(run.ranks)
        if not self._usage.is_on:
            self._serving.do(self._usage.watch(self._busy))
        for rank in run.ranks:
            self._workers.all[rank].run(run)


def run_agent(
    runtime: Path,
    notebook_pid: int,
    fork_server: ForkServerProcess | None,
    *,
    coming: Coming | None = None,
    guard: Guard | None = None,
) -> str:
    """Run an agent until its world, or its head, ends; returns with nothing left behind.

    What it returns is why it ended before that, else "".
    """
    children, problems = Children(), []
    forker = Forker(runtime, children, fork_server) if fork_server else None

    async def serve() -> None:
        agent = Agent(runtime, notebook_pid, children, forker, coming=coming, guard=guard)
        await agent.serve()
        problems.append(agent.problem)

    run(runtime, serve)
    return "".join(problems)
