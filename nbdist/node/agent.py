"""The agent: keeps the workers of one machine, and ends them when its notebook ends."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import zmq
from zmq.eventloop.zmqstream import ZMQStream

from nbdist import __version__
from nbdist.node.birth import adopt_orphans
from nbdist.node.looking import stack_of, status_of
from nbdist.node.memory import MemoryGauge
from nbdist.node.outbox import Outbox
from nbdist.node.processes import Nursery
from nbdist.node.ranks import Ranks
from nbdist.wire.frames import down_from, to_bytes
from nbdist.wire.looks import GetStacks
from nbdist.wire.messages import (
    Answer,
    Call,
    Cell,
    Free,
    GetStatus,
    Heal,
    Hello,
    Interrupt,
    Kill,
    Leave,
    LetGo,
    Look,
    Received,
    Reply,
    Run,
    Scale,
    Seen,
    StartWorld,
    StopWorld,
    Up,
)

log = logging.getLogger("nbdist.node")

FREE_TIMEOUT = 1.0

LINK_LINGER = 500
"""Milliseconds that the last messages may take to reach the notebook."""


class Agent:
    """Does what the notebook calls for, one call at a time, and reports as things happen."""

    def __init__(self, runtime: Path, nursery: Nursery | None) -> None:
        self._runtime = runtime
        self._nursery = nursery
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: asyncio.Queue[Call] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._gauge = MemoryGauge()
        self._outbox = Outbox(self._send)
        self._ranks = Ranks(runtime, nursery, self._outbox.add, self._send)
        link: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        link.linger = LINK_LINGER
        link.sndhwm = link.rcvhwm = 0
        link.connect(f"ipc://{runtime}/notebook.sock")
        self._link = ZMQStream(link)
        self._link.on_recv(self._receive)

    def __repr__(self) -> str:
        return f"<Agent {os.getpid()} ranks {sorted(self._ranks.all)} {self._outbox}>"

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
        await self._ranks.stop(grace=0.0)
        self._ranks.close()
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
                self._run(cell, frames[0])
            case Call(_, Interrupt(ranks)) as call:
                # At once, also while another call is being answered.
                for rank in ranks:
                    self._ranks.all[rank].interrupt()
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
                    reply = await self._ranks.start(spec)
                case StopWorld(grace):
                    await self._ranks.stop(grace)
                case Heal():
                    reply = await self._ranks.heal()
                case Scale(spec):
                    reply = await self._ranks.scale(spec)
                case Kill(ranks):
                    for rank in self._ranks.living(ranks):
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
        living = self._ranks.living(ranks)
        places = await asyncio.gather(*(rank.look() for rank in living))
        found = zip(living, places, strict=True)
        self._send(Seen({rank.rank: place for rank, place in found}))

    async def _tell_status(self, number: int) -> None:
        rows = await status_of(tuple(self._ranks.all.values()), self._gauge)
        self._send(Answer(number, rows))

    async def _tell_stacks(self, number: int, ranks: Sequence[int]) -> None:
        asked = [self._ranks.all[rank] for rank in ranks if rank in self._ranks.all]
        self._send(Answer(number, tuple(await asyncio.gather(*map(stack_of, asked)))))

    async def _free(self, ranks: Sequence[int]) -> None:
        asked = (rank.ask({"do": "free"}, FREE_TIMEOUT) for rank in self._ranks.living(ranks))
        await asyncio.gather(*asked)

    async def _let_go(self, cell_id: str, ranks: Sequence[int]) -> None:
        order = {"do": "let_go", "cell": cell_id}
        await asyncio.gather(*(rank.ask(order, FREE_TIMEOUT) for rank in self._ranks.living(ranks)))

    def _run(self, cell: Cell, task: bytes) -> None:
        self._outbox.begin(cell.ranks)
        for rank in cell.ranks:
            self._ranks.all[rank].run(cell, task)


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
