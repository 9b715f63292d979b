"""Passes messages of the Debug Adapter Protocol between the notebook and workers' debuggers.

Runs in the agent.  The notebook's debugger (`nbdist.notebook.debugger`) is the client, and debugpy
in the worker (`nbdist.worker.debugging`) is the server.  The agent reads the messages only to know
whether a rank stands at a breakpoint.  Such a rank does not count as hanging, and the timeout of
its task does not include the time at the breakpoint.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from nbdist.wire.control import ControlReply, ControlRequest, Failed, StartDebugger
from nbdist.wire.messages import CloseDebuggers, FromDebugger, OpenDebugger, ToDebugger
from nbdist.wire.spec import WorkerStart

log = logging.getLogger("nbdist.agent")

START_TIMEOUT = 10.0  # seconds for a worker's debugger to end its last session, and to start
END_TIMEOUT = 5.0  # seconds for a worker's debugger to end; then the agent closes the connection
MAX_MESSAGE_BYTES = 64 << 20  # the largest message that is read from a worker's debugger
LENGTH_HEADER = "Content-Length: "


class Debuggee(Protocol):
    """The attributes of a worker that this module uses (`nbdist.agent.worker` has the class)."""

    rank: int
    start_info: WorkerStart
    debugger: DebuggerRelay | None

    async def ask(self, request: ControlRequest, timeout: float) -> ControlReply | None:
        """Return the answer of the worker's control thread, None if no answer comes in time."""


class DebuggerRelay:
    """The connection to one worker's debugger, for one session of the notebook's debugger."""

    def __init__(
        self, worker: Debuggee, session: int, path: str, send: Callable[[FromDebugger], None]
    ) -> None:
        self._worker = worker
        self.session = session
        self._path = path  # the path of the socket on which the worker's debugger is to listen
        self._send = send
        self._stopped_threads: set[int] = set()
        self._waiting: list[str] = []  # requests that came before the connection
        self._writer: asyncio.StreamWriter | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<DebuggerRelay of {self._worker} stopped {sorted(self._stopped_threads)}>"

    @property
    def is_stopped(self) -> bool:
        """Whether a thread of the rank stands at a breakpoint or after a step."""
        return bool(self._stopped_threads)

    async def run(self) -> None:
        """Start the worker's debugger, and pass on its messages until either side closes."""
        problem = ""
        try:
            problem = await self._connect_and_read()
        finally:
            if self._writer is not None:
                self._writer.close()
            self._stopped_threads.clear()
            if self._worker.debugger is self:
                self._worker.debugger = None
            self._send(FromDebugger(self._worker.rank, self.session, problem=problem))

    async def _connect_and_read(self) -> str:
        answer = await self._worker.ask(StartDebugger(self._path), START_TIMEOUT)
        if isinstance(answer, Failed):
            return answer.error
        if answer is None:
            return "it did not answer"
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=MAX_MESSAGE_BYTES)
        except OSError as error:
            return f"its debugger cannot be reached: {error}"
        self._writer = writer
        if self._is_closed:
            writer.close()
            return ""
        for text in self._waiting:
            self._write(text)
        # Such errors come if the connection is closed in the middle of a message, or if user code
        # has written something to the socket that is no message of the debugger.
        with suppress(OSError, EOFError, ValueError, TypeError, RecursionError):
            while text := await _read_message(reader):
                self._record_event(text)
                self._report(text)
        return ""

    def send(self, text: str) -> None:
        """Send a request to the worker's debugger, now or as soon as the debugger is connected."""
        if self._writer is None:
            self._waiting.append(text)
        else:
            self._write(text)

    def _write(self, text: str) -> None:
        data = text.encode()
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(f"{LENGTH_HEADER}{len(data)}\r\n\r\n".encode() + data)

    def close(self) -> None:
        """Ask the worker to end its debugger, then close the connection; a stopped rank goes on."""
        self._is_closed = True
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write_eof()
            asyncio.get_running_loop().call_later(END_TIMEOUT, self._writer.close)

    def record_interrupt(self) -> None:
        """Record that the worker got a SIGINT, so that its stopped threads have left a breakpoint.

        This method tells the notebook that the threads go on, because debugpy does not.
        """
        for thread in sorted(self._stopped_threads):
            self._stopped_threads.discard(thread)
            body = {"threadId": thread, "allThreadsContinued": False}
            self._report(json.dumps({"type": "event", "event": "continued", "body": body}))

    def _record_event(self, text: str) -> None:
        match json.loads(text):
            case {"event": "stopped", "body": {"threadId": int(thread)}}:
                self._stopped_threads.add(thread)
            case {"event": "continued", "body": {"threadId": int(thread)}}:
                self._stopped_threads.discard(thread)

    def _report(self, text: str) -> None:
        self._send(FromDebugger(self._worker.rank, self.session, text, self.is_stopped))


class DebuggerRelays:
    """Carries out the notebook's messages to workers' debuggers; a worker has at most one relay."""

    def __init__(
        self,
        alive: Callable[[Sequence[int]], Sequence[Debuggee]],
        send: Callable[[FromDebugger], None],
        spawn: Callable[[Coroutine[Any, Any, object]], None],
    ) -> None:
        self._alive, self._send, self._spawn = alive, send, spawn
        self._socket_count = itertools.count(1)

    def receive(self, message: OpenDebugger | ToDebugger | CloseDebuggers) -> None:
        """Carry out a message that opens or closes a rank's debugger, or has a request for it.

        If the rank is dead, the answer to `OpenDebugger` says so, and other messages are dropped.
        """
        match message:
            case OpenDebugger(rank, session):
                workers = self._alive([rank])
                for worker in workers:
                    self._close(worker)
                    # Each relay has a socket of its own, because the rank's earlier relay may not
                    # have connected to its socket yet.
                    path = worker.start_info.debugger_socket(next(self._socket_count))
                    worker.debugger = DebuggerRelay(worker, session, path, self._send)
                    self._spawn(worker.debugger.run())
                if not workers:
                    self._send(FromDebugger(rank, session, problem="it has no process"))
            case ToDebugger(rank, session, text):
                for worker in self._alive([rank]):
                    if worker.debugger is not None and worker.debugger.session == session:
                        worker.debugger.send(text)
            case CloseDebuggers(ranks):
                for worker in self._alive(ranks):
                    self._close(worker)

    def _close(self, worker: Debuggee) -> None:
        relay, worker.debugger = worker.debugger, None
        if relay is not None:
            relay.close()


async def _read_message(reader: asyncio.StreamReader) -> str:
    """Return the text of the next message; "" if the worker has closed the connection.

    Returns "" also for a message without a proper length.
    """
    size = 0
    while line := (await reader.readline()).decode().strip():
        if line.startswith(LENGTH_HEADER):
            size = int(line.removeprefix(LENGTH_HEADER))
    if not 0 < size <= MAX_MESSAGE_BYTES:
        return ""
    return (await reader.readexactly(size)).decode()
