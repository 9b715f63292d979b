"""One worker as its agent knows it: process, kernel, pipes, log, and what it is doing."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.manager import AsyncKernelManager
from zmq.eventloop.zmqstream import ZMQStream

from nbdist.errors import word_exit
from nbdist.node.deaths import OomKills, crash_text
from nbdist.node.dumps import StackFile, is_stopped
from nbdist.node.jupyter import output_from
from nbdist.node.logs import RankLog
from nbdist.node.merge import LOST_AFTER, Merger
from nbdist.node.pipes import OutputPipe
from nbdist.node.processes import ProcessSource, WorkerProcess
from nbdist.node.provisioner import WorkerSpec
from nbdist.node.tasks import TaskEnds
from nbdist.wire.looks import RankState
from nbdist.wire.messages import CONTROL_REQUEST, Cell, Place, RankStart, WorkerStatus
from nbdist.wire.outputs import RECORD, Died, Done, Output, Text
from nbdist.wire.tasks import Finished, framed, task_socket

log = logging.getLogger("nbdist.node")

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
LAST_LINES = 20
KILL_TIMEOUT = 5.0
SUBSCRIBE_TIMEOUT = 10.0
RETRY_SECONDS = 0.02
LOOK_TIMEOUT = 0.5
COUNT_AFTER = 0.05
"""Seconds into a cell: short ones do without, it takes 0.4 ms for each rank."""

Emit = Callable[[int, str, Output], None]


class Rank:
    """A worker and everything that belongs to it; `emit` takes what it shows, in order."""

    def __init__(self, orders: RankStart, log_folder: Path | None, emit: Emit) -> None:
        self.rank = orders.rank
        self.process: WorkerProcess | None = None
        self.cell: Cell | None = None
        self.log = RankLog(log_folder)
        self.stacks = StackFile(orders.stack_file)
        self.last_collective: asyncio.Task[Any] | None = None  # while it is being asked for
        self._orders = orders
        self._emit = emit
        self._merger: Merger[Output | Finished | None] = Merger(orders.token)
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._busy_since = 0.0
        self._oom_kills: OomKills | None = None
        self._counting: asyncio.TimerHandle | None = None
        self._killed = False
        self._tasks: asyncio.WriteTransport | None = None
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._pipes = (OutputPipe(self._read_stdout), OutputPipe(self._read_stderr))
        self.up = asyncio.Event()
        self._ready = asyncio.Event()
        self._manager = self._make_manager()
        self._streams: dict[str, ZMQStream] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._sockets: list[zmq.Socket[bytes]] = []  # jupyter_client's, which the streams shadow

    def __repr__(self) -> str:
        return f"<Rank {self.rank} {self.state} {self.process}>"

    @property
    def pid(self) -> int:
        """The worker's process, 0 before it has one."""
        return self.process.pid if self.process else 0

    @property
    def state(self) -> RankState:
        """What `%dist_status` shows."""
        if self.process is None or not self._ready.is_set():
            return "starting"
        if self.process.exited.done():
            return "dead"
        return "busy" if self.cell else "idle"

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The end of what the worker has written, for whoever asks why it ended."""
        text = "".join(self._last_lines)
        return tuple(text.splitlines()[-LAST_LINES:])

    # --- start ---------------------------------------------------------------------------

    async def start(self, source: ProcessSource) -> None:
        """Start the process and wait until its kernel is bound and its group formed.

        Raises ChildProcessError when it ends before.
        """
        stdout, stderr = self._pipes
        try:
            await self._manager.start_kernel(
                source=source,
                orders=self._orders,
                stdout=stdout.write_end,
                stderr=stderr.write_end,
            )
        finally:
            stdout.close_write_end()
            stderr.close_write_end()
        self.process = self._manager.provisioner.process  # type: ignore[union-attr]
        assert self.process is not None
        self.process.exited.add_done_callback(lambda _: self._ready.set())
        await self._ready.wait()
        if self.process.exited.done():
            raise ChildProcessError(f"it {word_exit(self.process.exited.result())}")
        self.process.exited.add_done_callback(self._ended)
        self._count_kills_in(0.0)
        await self._connect()

    def _make_manager(self) -> AsyncKernelManager:
        """A kernel manager whose kernel is our worker, on unix sockets."""
        file = self._orders.connection_file
        return AsyncKernelManager(
            connection_file=file,
            transport="ipc",
            ip=file.removesuffix(".json"),
            kernel_spec_manager=WorkerSpec(),
            **{f"{channel}_port": port for port, channel in enumerate(CHANNELS, start=1)},
        )

    async def _connect(self) -> None:
        """Connect to the kernel; on return no message of it can be missed."""
        subscribed = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._tasks, _ = await loop.create_unix_connection(
            lambda: TaskEnds(self._finish), task_socket(self._orders)
        )
        for channel in ("iopub", "control"):
            raw = getattr(self._manager, f"connect_{channel}")()
            raw.rcvhwm = raw.sndhwm = 0
            self._streams[channel] = ZMQStream(zmq.Socket.shadow(raw))
            self._sockets.append(raw)
        iopub = self._streams["iopub"]
        iopub.setsockopt(zmq.UNSUBSCRIBE, b"")
        status = b"kernel.%d.status" % self.rank
        record = b"kernel.%d.%s" % (self.rank, RECORD.encode())
        for topic in (b"display_data", b"comm", b"kernel.%d.e" % self.rank, record, status):
            iopub.setsockopt(zmq.SUBSCRIBE, topic)
        iopub.on_recv(lambda _: subscribed.set())
        self._streams["control"].on_recv(lambda _: None)
        deadline = time.monotonic() + SUBSCRIBE_TIMEOUT
        while not subscribed.is_set() and time.monotonic() < deadline:
            self._send("kernel_info_request", {})
            with suppress(asyncio.TimeoutError):  # subscribed after that status: ask again
                await asyncio.wait_for(subscribed.wait(), RETRY_SECONDS)
        iopub.setsockopt(zmq.UNSUBSCRIBE, status)
        self._streams["control"].on_recv(self._read_answer)
        iopub.on_recv(self._read_message)

    # --- run -----------------------------------------------------------------------------

    def run(self, cell: Cell, task: bytes) -> None:
        """Pass on the cell, as it came; outputs follow, then `Done`, or `Died`."""
        self.cell = cell
        self._busy_since = time.monotonic()
        self._count_kills_in(COUNT_AFTER)
        assert self._tasks is not None
        self._tasks.write(framed(task))

    async def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any] | None:
        """The answer of the worker's control thread; None if it gives none in time, or ends."""
        if "control" not in self._streams or self.process is None:
            return None
        number = self._send(CONTROL_REQUEST, dict(request))
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            ends = (answer, self.process.exited)
            await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            del self._answers[number]

    async def look(self) -> Place:
        """Where it is."""
        seen = await self.ask({"do": "look"}, LOOK_TIMEOUT)
        if seen is None:
            return Place(is_deaf=True, is_stopped=is_stopped(self.pid))
        return Place(**seen)

    def kill(self) -> None:
        """End the process; `Died` follows."""
        self._killed = True
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)

    def interrupt(self) -> None:
        """Send SIGINT to the worker and what it started."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)

    def status(self) -> WorkerStatus:
        """What is known of it without asking; `nbdist.node.looking` finds out the rest."""
        return WorkerStatus(
            rank=self.rank,
            pid=self.pid,
            host=socket.gethostname(),
            state=self.state,
            busy_seconds=time.monotonic() - self._busy_since if self.cell else 0.0,
            memory=0,
            device=self._orders.device,
        )

    # --- stop ----------------------------------------------------------------------------

    async def stop(self, grace: float) -> None:
        """End the worker: politely for `grace` seconds, then by SIGKILL; free all it held."""
        if self.process is not None:
            self.process.exited.remove_done_callback(self._ended)
            if grace > 0 and self.state == "idle":
                await self._manager.request_shutdown()
                await asyncio.wait([self.process.exited], timeout=grace)
            self.process.send_signal(signal.SIGKILL)
            await asyncio.wait([self.process.exited], timeout=KILL_TIMEOUT)
        for timer in (self._retry, self._counting):
            if timer is not None:
                timer.cancel()
        for pipe in self._pipes:
            pipe.close()
        if self._tasks is not None:
            self._tasks.close()
        for stream in self._streams.values():
            stream.close(linger=0)
        for raw in self._sockets:
            raw.close(linger=0)
        self.log.close()
        self.stacks.remove()
        await self._manager.cleanup_resources()

    def _count_kills_in(self, seconds: float) -> None:
        """Note how often the kernel has killed so far, to compare with after a death."""
        if self._counting is not None:
            self._counting.cancel()
        loop = asyncio.get_running_loop()
        self._counting = loop.call_later(seconds, self._count_kills)

    def _count_kills(self) -> None:
        self._oom_kills = OomKills(self.pid)

    def _ended(self, exited: asyncio.Future[int]) -> None:
        """The worker died: say first all that it said, then so."""
        for pipe in self._pipes:
            pipe.drain()
        for item in self._merger.take_all():
            self._pass_on(item)
        code = exited.result()
        found = crash_text(self.stacks, code, self.cell)
        if self._oom_kills is not None and not self._killed:
            found += self._oom_kills.text(code)
        if found:
            self._pass_on(Text("stderr", found))
        self._show(Died(code, time.time_ns(), self.pid, self.last_lines))
        self.cell = None

    # --- what the worker says -------------------------------------------------------------

    def _send(self, kind: str, content: dict[str, Any]) -> str:
        """Send a request to the worker's control thread."""
        session = self._manager.session
        message = session.msg(kind, content)
        session.send(self._streams["control"], message)
        request_id: str = message["header"]["msg_id"]
        return request_id

    def _finish(self, end: Finished) -> None:
        self._merger.receive_message(end.number, end)
        self._pipes[0].read()  # its mark is there: no other turn of the loop for it
        self._pass_on_all()

    def _read_message(self, frames: list[bytes]) -> None:
        session = self._manager.session
        _, frames = session.feed_identities(frames)
        message = session.deserialize(frames)
        number = message["metadata"].get("nbdist", {}).get("number")
        if number is not None:
            self._merger.receive_message(number, output_from(message))
            self._pass_on_all()

    def _read_answer(self, frames: list[bytes]) -> None:
        session = self._manager.session
        message = session.deserialize(session.feed_identities(frames)[1])
        answer = self._answers.get(message["parent_header"].get("msg_id", ""))
        if answer is not None and not answer.done():
            answer.set_result(message["content"])

    def _read_stdout(self, data: bytes) -> None:
        self._merger.receive_stdout(data, time.monotonic())
        if self._merger.up:
            self.up.set()
        if self._merger.ready and not self._ready.is_set():
            self._ready.set()
        self._pass_on_all()

    def _read_stderr(self, data: bytes) -> None:
        self._merger.receive_stderr(data)
        self._pass_on_all()

    def _pass_on_all(self) -> None:
        for item in self._merger.take(time.monotonic()):
            self._pass_on(item)
        if self._merger.is_waiting and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(LOST_AFTER, self._pass_on_late)

    def _pass_on_late(self) -> None:
        """Go on without a message that was lost, though the worker says nothing more."""
        self._retry = None
        self._pass_on_all()

    def _pass_on(self, item: Output | Finished | None) -> None:
        match item:
            case None:
                pass
            case Finished(cell_id=cell_id, done=done):
                if self.cell is not None and cell_id == self.cell.id:
                    self._pipes[1].read()  # it has no order with the other, but with the end
                    for text in self._merger.take_cut_off():
                        self._pass_on(text)
                    self._show(done)
                    self.cell = None
                    if self._counting is not None:
                        self._counting.cancel()
            case Text(stream, text):
                self.log.write(stream, text)
                self._last_lines.append(text[-4096:])
                self._show(item)
            case _:
                self._show(item)

    def _show(self, output: Output) -> None:
        if self._ready.is_set():
            if isinstance(output, Done | Died):
                self.log.flush()
            self._emit(self.rank, self.cell.id if self.cell else "", output)
