"""The agent: keeps the workers of one machine, and ends them when its notebook ends."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
from zmq.eventloop.zmqstream import ZMQStream

from nbdist import __version__, folders
from nbdist.node.forker import Forker
from nbdist.node.guard import end_descendants
from nbdist.node.inspect import consulted, stack_of, status_of
from nbdist.node.outbox import Outbox
from nbdist.node.proc import MemoryGauge
from nbdist.node.processes import Children
from nbdist.node.stopping import Stopping
from nbdist.node.usage_watch import UsageWatch
from nbdist.node.window import Window
from nbdist.node.worker import Worker
from nbdist.node.worker_group import WorkerGroup
from nbdist.wire import control
from nbdist.wire.messages import (
    Abort,
    Aborted,
    Answer,
    Ask,
    Consult,
    Enter,
    GetStacks,
    GetStatus,
    Heal,
    Hello,
    Interrupt,
    Kill,
    Leave,
    LetGo,
    Locate,
    Located,
    Received,
    Reply,
    Run,
    Scale,
    StartWorld,
    StopWorld,
    Up,
    down_from,
    to_bytes,
)
from nbdist.wire.prctl import adopt_orphans
from nbdist.wire.seen import WorldSeen

log = logging.getLogger("nbdist.node")

LET_GO_TIMEOUT = 1.0
BIND_TIMEOUT = 60.0

NOTEBOOK_NAME = "JPY_SESSION_NAME"
"""Jupyter's server says here which notebook a kernel is for."""

LINK_LINGER = 500
"""Milliseconds that the last messages may take to reach the notebook."""


class _Left(Exception):
    """Ends the agent's tasks."""


class Agent:
    """Does what the notebook calls for, one call at a time, and reports as things happen."""

    def __init__(
        self, runtime: Path, notebook_pid: int, children: Children, forker: Forker | None
    ) -> None:
        self._runtime = runtime
        self._children = children
        self._forker = forker
        self._asked: asyncio.Queue[Ask] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._gauge = MemoryGauge()
        self._outbox = Outbox(self._send)
        self._workers = WorkerGroup(runtime, children, forker, self._outbox.add, self._send)
        self._usage = UsageWatch(self._gauge, self._send)
        self._notebook_pid = notebook_pid
        self._window = Window(runtime, self._seen)
        self._stopping = Stopping(self._abort_all, lambda places: self._send(Aborted(places)))
        link: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        link.linger = LINK_LINGER
        link.sndhwm = link.rcvhwm = 0
        link.connect(f"ipc://{runtime}/notebook.sock")
        self._link = ZMQStream(link)
        self._link.on_recv(self._receive)

    def __repr__(self) -> str:
        return f"<Agent {os.getpid()} ranks {sorted(self._workers.all)} {self._outbox}>"

    async def serve(self) -> None:
        """Work until the notebook leaves or ends, then leave nothing behind."""
        self._children.attach()
        if self._forker:
            self._forker.attach(self._bind_workers)
        await self._window.open()
        self._send(Hello(__version__, os.getpid(), socket.gethostname()))
        try:
            # What one of them raises is a fault of ours, ends all, and goes to the agent's log.
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._answer_asked())
                await self._gone.wait()
                raise _Left
        except* _Left:
            pass
        finally:
            self._gone.set()
            await self._window.close()
            # First: it may be importing, and this process learns of its own children at once.
            if self._forker:
                self._forker.close()
            await self._workers.stop(grace=0.0)
            self._workers.close()
            self._usage.close()
            self._link.close()
            self._children.close()

    def leave(self) -> None:
        """End: the notebook is done with this agent, or has ended."""
        self._gone.set()

    def leave_at(self, end: int) -> None:
        """Leave as soon as this descriptor turns readable."""
        loop = asyncio.get_running_loop()

        def leave() -> None:
            loop.remove_reader(end)
            self.leave()

        loop.add_reader(end, leave)

    def fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End loudly, rather than go on half, after a fault of ours in a callback."""
        loop.default_exception_handler(context)
        self.leave()

    # --- messages ------------------------------------------------------------------------

    def _send(self, message: Up) -> None:
        self._link.send(to_bytes(message))

    def _receive(self, frames: list[bytes]) -> None:
        match down_from(frames[0]):
            case Run() as run:
                self._run(run)
            case Ask(number, GetStatus()):
                self._do(self._report_status(number))
            case Ask(number, GetStacks(ranks)):
                self._do(self._report_stacks(number, ranks))
            case Ask(number, Consult() as consult):
                self._do(self._report_answer(number, consult))
            case Ask() as ask:
                self._asked.put_nowait(ask)
            case Locate(ranks):
                self._do(self._locate(ranks))
            case Abort(ranks):
                self._do(self._abort(ranks))
            case Interrupt(ranks):
                for work in self._stopping.begin(self._workers.alive(ranks)):
                    self._do(work)
            case LetGo(task_id, ranks):
                self._do(self._let_go(task_id, ranks))
            case Enter(rank, reply):
                for worker in self._workers.alive([rank]):
                    worker.enter(reply)
            case Received():
                self._outbox.acknowledge()
            case Leave():
                self.leave()

    async def _answer_asked(self) -> None:
        while True:
            ask = await self._asked.get()
            reply: Reply = None
            match ask.request:
                case StartWorld(spec):
                    reply = await self._workers.start(spec)
                case StopWorld(grace):
                    await self._workers.stop(grace)
                case Heal():
                    reply = await self._workers.heal()
                case Scale(spec):
                    reply = await self._workers.scale(spec)
                case Kill(ranks):
                    for worker in self._workers.alive(ranks):
                        worker.kill()
            self._send(Answer(ask.id, reply))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside the calls, until the notebook leaves."""
        if self._gone.is_set():
            work.close()
        else:
            self._tasks.create_task(work)

    async def _locate(self, ranks: Sequence[int]) -> None:
        alive = self._workers.alive(ranks)
        places = await asyncio.gather(*(worker.locate() for worker in alive))
        found = zip(alive, places, strict=True)
        self._send(Located({worker.rank: place for worker, place in found}))

    async def _report_status(self, number: int) -> None:
        workers = tuple(self._workers.all.values())
        self._send(Answer(number, await status_of(workers, self._gauge, self._usage)))

    async def _seen(self) -> WorldSeen:
        notebook = os.environ.get(NOTEBOOK_NAME, "")
        seen = WorldSeen(socket.gethostname(), self._notebook_pid, notebook, time.monotonic())
        if (spec := self._workers.spec) is None:
            return seen
        workers, fresh = tuple(self._workers.all.values()), self._usage.fresh_seconds
        rows = await status_of(workers, self._gauge, self._usage, fresh)
        backend = spec.backend or "none"
        return replace(seen, pool=spec.pool, name=spec.name, backend=backend, workers=rows)

    async def _report_stacks(self, number: int, ranks: Sequence[int]) -> None:
        asked = [self._workers.all[rank] for rank in ranks if rank in self._workers.all]
        self._send(Answer(number, tuple(await asyncio.gather(*map(stack_of, asked)))))

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
            self._do(self._bind(worker))

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
            self._do(self._usage.watch(self._busy))
        for rank in run.ranks:
            self._workers.all[rank].run(run)


def run_agent(runtime: Path, notebook_pid: int, children: Children, forker: Forker | None) -> None:
    """Run an agent until its notebook ends; returns with nothing left behind."""
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    adopt_orphans()
    # Until the end: what cleans up after dead agents finds that this one runs.
    folders.join(runtime, folders.runtime(runtime))
    try:
        asyncio.run(_serve(runtime, notebook_pid, children, forker))
    finally:
        end_descendants()
        shutil.rmtree(runtime, ignore_errors=True)


async def _serve(
    runtime: Path, notebook_pid: int, children: Children, forker: Forker | None
) -> None:
    agent = Agent(runtime, notebook_pid, children, forker)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(agent.fail)
    loop.add_signal_handler(signal.SIGTERM, agent.leave)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    # Either may come first; a pipe's other end can live on in a child of the notebook.
    agent.leave_at(sys.stdin.fileno())
    try:
        notebook = os.pidfd_open(notebook_pid)
    except ProcessLookupError:
        agent.leave()
    else:
        agent.leave_at(notebook)
    await agent.serve()
