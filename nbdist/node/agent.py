"""The agent: keeps the workers of one machine, and ends them when its notebook ends."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import zmq
from zmq.eventloop.zmqstream import ZMQStream

from nbdist import __version__
from nbdist.node.birth import adopt_orphans
from nbdist.node.logs import drop_old_runs
from nbdist.node.outbox import Outbox
from nbdist.node.processes import Nursery, ProcessSource, Spawner
from nbdist.node.rank import Rank
from nbdist.wire.environ import torchrun_variables
from nbdist.wire.frames import down_from, to_bytes
from nbdist.wire.messages import (
    Answer,
    Call,
    Cell,
    GetStatus,
    Hello,
    Interrupt,
    Leave,
    RankStart,
    Received,
    Reply,
    Run,
    StartFailure,
    StartWorld,
    StopWorld,
    Up,
    WorkerStatus,
    WorldSpec,
    WorldStarted,
)

log = logging.getLogger("nbdist.node")

START_TIMEOUT = 180.0
"""Seconds for all workers to import, bind and meet; a spawned world on a busy disk is slow."""

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
        self._generation = 0
        self._calls: asyncio.Queue[Call] = asyncio.Queue()
        self._gone = asyncio.Event()
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
        if self._nursery:
            self._nursery.close()
        self._link.close()
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
                self._send(Answer(call.id, self._status()))
            case Call() as call:
                self._calls.put_nowait(call)
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
            self._send(Answer(call.id, reply))

    def _run(self, cell: Cell) -> None:
        for rank in cell.ranks:
            self._ranks[rank].run(cell)

    def _status(self) -> tuple[WorkerStatus, ...]:
        return tuple(rank.status() for rank in self._ranks.values())

    # --- the world's workers -----------------------------------------------------------------

    async def _start_world(self, spec: WorldSpec) -> WorldStarted | StartFailure:
        """Start all ranks at once; when one fails, end the others."""
        self._spec = spec
        self._generation += 1
        source: ProcessSource = self._spawner
        if spec.use_nursery and self._nursery:
            source = self._nursery
        logs = self._log_folder(spec)
        self._ranks = {
            number: Rank(
                self._orders(spec, number), logs / str(number) if logs else None, self._outbox.add
            )
            for number in range(spec.world_size)
        }
        starts = {asyncio.ensure_future(rank.start(source)): rank for rank in self._ranks.values()}
        done, pending = await asyncio.wait(
            starts, timeout=START_TIMEOUT, return_when=asyncio.FIRST_EXCEPTION
        )
        failed = [start for start in done if start.exception()]
        if not failed and not pending:
            pids = {number: rank.pid for number, rank in self._ranks.items()}
            return WorldStarted(
                pids, {number: str(rank.log.folder or "") for number, rank in self._ranks.items()}
            )
        late = failed or sorted(pending, key=lambda start: starts[start].rank)
        failure = self._start_failure(starts[late[0]], late[0].exception() if failed else None)
        for start in pending:
            start.cancel()
        if pending:
            await asyncio.wait(pending)
        await self._stop_ranks(grace=0.0)
        return failure

    def _orders(self, spec: WorldSpec, number: int) -> RankStart:
        token = secrets.token_hex(8)
        name = f"{self._runtime}/g{self._generation}r{number}"
        store = self._runtime / f"store{self._generation}"
        return RankStart(
            rank=number,
            local_rank=number,
            local_world_size=spec.world_size,
            world=spec,
            connection_file=f"{name}.json",
            token=token,
            store_path=str(store),
            generation=self._generation,
            environ=torchrun_variables(spec, number),
        )

    def _log_folder(self, spec: WorldSpec) -> Path | None:
        if not spec.log_dir:
            return None
        root = Path(spec.log_dir)
        drop_old_runs(root)
        return root / spec.name / f"attempt_{self._generation - 1}"

    def _start_failure(self, rank: Rank, error: BaseException | None) -> StartFailure:
        reason = str(error) if error else f"it was not ready after {START_TIMEOUT:.0f} s"
        said = rank.last_lines
        if not said and self._nursery:
            said = self._nursery.last_lines()
        return StartFailure(
            rank=rank.rank,
            host=socket.gethostname(),
            command=f"{self._spec.python if self._spec else sys.executable} -m nbdist.worker",
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
