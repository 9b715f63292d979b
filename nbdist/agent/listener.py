"""The unix sockets in the runtime folder at which an agent or head answers other processes.

Programs such as `nbdist status` and `nbdist mcp` connect to the `Listener` to ask about the world,
and notebooks to attach to it.  Workers connect to the `StoreWindow` of their agent, which passes
their store operations on to the head.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbdist import __version__
from nbdist.agent.notebook_link import NotebookLink
from nbdist.system.folders import PRIVATE_FILE
from nbdist.wire import queries, store
from nbdist.wire.frames import BadFrame, FrameCutter
from nbdist.wire.log_files import GetLogs
from nbdist.wire.messages import GetSecrets, GetStacks, OfEachRank
from nbdist.wire.spec import WorldSpec
from nbdist.wire.status import WorkerStatus
from nbdist.wire.store import MAX_STORE_BYTES

log = logging.getLogger("nbdist.agent")

MAX_QUERY_CONNECTIONS = 16  # open connections with the same kind of question, or with none yet
LINE_TIMEOUT = 10.0  # seconds for a question to arrive, and for its answer to be read
MAX_STORE_CONNECTIONS = 4096  # connections at a time to the store; a rank can have several
CONNECTION_READ_SIZE = 1 << 18
TOO_SOON = "more was asked before the answer came"
NOTEBOOK_NAME = "JPY_SESSION_NAME"  # the variable in which Jupyter's server names the notebook


def with_ranks(
    info: queries.WorldInfo, spec: WorldSpec | None, ranks: tuple[WorkerStatus, ...]
) -> queries.WorldInfo:
    """Return `info`, the description of the world, with the state of its ranks added.

    The result answers a `DescribeRanks` question.  `spec` is None if no world was started yet.
    """
    notebook = os.environ.get(NOTEBOOK_NAME, "")
    info = replace(info, notebook_name=notebook, at=time.monotonic())
    if spec is None:
        return info
    backend = spec.backend or "none"
    return replace(info, pool=spec.config.pool, name=spec.name, backend=backend, ranks=ranks)


class Door:
    """A unix socket in the runtime folder that serves other processes of this user.

    Subclasses define how a connection is served.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._server: asyncio.Server | None = None
        # By the task of a connection: the kind of its question.  None before the question has
        # arrived, and for connections to a store.
        self._connections: dict[asyncio.Task[None], type[queries.QueryMessage] | None] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}, {len(self._connections)} connections>"

    async def open(self) -> None:
        """Begin to listen, or listen again if the socket's file was removed; raises OSError."""
        if self._server is not None:
            if self.path.exists():
                return
            self._server.close()
        self._server = await asyncio.start_unix_server(
            self._serve, self.path, limit=queries.MAX_QUESTION_BYTES, backlog=MAX_STORE_CONNECTIONS
        )
        self.path.chmod(PRIVATE_FILE)

    async def close(self) -> None:
        """Close all connections, cancel their questions, and remove the socket."""
        if self._server is not None:
            self._server.close()
        await _cancel(*self._connections)
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if queries.peer_user(writer.get_extra_info("socket")) == os.geteuid():
                # Disconnect a process that sends no proper question in time, or does not read its
                # answer.  A cancellation must not leave this function: asyncio of Python 3.11 would
                # report it to the loop's exception handler, which ends this process.
                with suppress(OSError, ValueError, BadFrame, asyncio.CancelledError):
                    await self._serve_connection(task, reader, writer)
        except Exception:
            # A bug in nbdist ends only this connection, not the world.
            log.exception("%r cannot answer", self)
        finally:
            self._connections.pop(task, None)
            writer.transport.abort()

    async def _serve_connection(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer the questions of one connection, until this process or the other side closes it.

        `task` runs this method.  The method adds `task` to `_connections`, so that `close` can
        cancel `task`, or refuses the connection.  `_serve` removes `task` again.
        """
        raise NotImplementedError


Read = Callable[[OfEachRank], Awaitable[tuple[Any, ...]]]
"""Reads the stacks, secrets or logs of ranks, on all machines of the world."""

LOG_STREAMS = ("stdout", "stderr")
MAX_LOG_LINES, MAX_LINES_OF_ALL_LOGS, MAX_LOG_LINE_LENGTH = 1000, 8000, 400
"""Limits of the logs in one answer: lines of a file, lines of all files, characters of a line."""
MAX_RANKS_READ = 256  # ranks whose logs are read for one answer


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Listener(Door):
    """Answers one question on each connection.

    At most `MAX_QUERY_CONNECTIONS` connections with the same kind of question are open at a time; a
    further question of this kind gets no answer.  If `MAX_QUERY_CONNECTIONS` connections have not
    sent a question yet, the listener closes the oldest for a new connection.

    `add_ranks` adds the state of the ranks to the world's description; `read` fetches stacks, logs
    and secrets.  An agent of a world on several machines has no `link` and answers only `Describe`
    and `DescribeRanks`; the world's head answers the other questions.
    """

    def __init__(
        self,
        runtime: Path,
        add_ranks: Callable[[queries.WorldInfo], Awaitable[queries.WorldInfo]],
        link: NotebookLink | None,
        read: Read | None = None,
    ) -> None:
        super().__init__(runtime / queries.QUERY_SOCKET)
        self._add_ranks, self._link, self._read = add_ranks, link, read

    async def open(self) -> None:
        """Begin to listen, or log a warning if that fails: a world works without a listener."""
        try:
            await super().open()
        except OSError as error:
            log.warning("%s cannot be opened: %s", self.path, error)

    async def _serve_connection(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Read a question and answer it.

        A notebook that asks to attach keeps its connection open as long as it has the world.  When
        the connection closes, this method calls `NotebookLink.attach_connection_closed`.
        """
        waiting = self._connections_of(None)
        if len(waiting) >= MAX_QUERY_CONNECTIONS:
            waiting[0].cancel()
            del self._connections[waiting[0]]
        self._connections[task] = None
        async with asyncio.timeout(LINE_TIMEOUT):
            question = queries.from_line(await reader.readline())
        if len(self._connections_of(type(question))) >= MAX_QUERY_CONNECTIONS:
            return
        self._connections[task] = type(question)
        if (answer := await self._answer(question)) is None:
            return
        writer.transport.set_write_buffer_limits(0)  # so that `drain` waits for the whole answer
        writer.write(queries.to_line(answer))
        try:
            async with asyncio.timeout(LINE_TIMEOUT):
                await writer.drain()
            if isinstance(answer, queries.Accepted):
                while await reader.read(queries.MAX_QUESTION_BYTES):
                    pass
        finally:
            match question, answer:
                case queries.Attach(pid=pid), queries.Accepted() if self._link:
                    # Reached also if the notebook has ended before it got the answer.
                    self._link.attach_connection_closed(pid)

    def _connections_of(self, kind: type[queries.QueryMessage] | None) -> list[asyncio.Task[None]]:
        """Return the connections whose question is of this class, oldest first.

        With None, return the connections whose question has not arrived yet.
        """
        return [task for task, question in self._connections.items() if question is kind]

    async def _answer(self, question: queries.QueryMessage) -> queries.QueryMessage | None:
        match question:
            case queries.Describe():
                return self._describe()
            case queries.DescribeRanks():
                return await self._add_ranks(self._describe())
            case queries.InspectRanks() if self._link and self._read:
                return await self._inspect(question, self._link, self._read)
            case queries.Attach() if self._link:
                return await self._link.attach(question)
        return None

    async def _inspect(
        self, question: queries.InspectRanks, link: NotebookLink, read: Read
    ) -> queries.Inspection:
        if question.about == "tasks":
            return link.tasks
        ranks = question.ranks or tuple(link.ranks)
        if question.about == "stacks":
            return queries.Inspection(stacks=await read(GetStacks(ranks)))
        if question.about == "secrets":
            rows = await read(GetSecrets(ranks))
            return queries.Inspection(secrets=tuple({each for row in rows for each in row.values}))
        ranks = ranks[:MAX_RANKS_READ]
        share = MAX_LINES_OF_ALL_LOGS // (len(LOG_STREAMS) * max(1, len(ranks)))
        max_lines = max(1, min(question.most, MAX_LOG_LINES, share))
        return queries.Inspection(
            logs=tuple(
                each._replace(lines=tuple(line[:MAX_LOG_LINE_LENGTH] for line in each.lines))
                for each in await read(GetLogs(ranks, LOG_STREAMS, max_lines))
            )
        )

    def _describe(self) -> queries.WorldInfo:
        if self._link is None:
            return queries.WorldInfo(__version__, socket.gethostname())
        return self._link.describe()


AskStore = Callable[[store.Operation], Awaitable[store.StoreReply]]
"""Asks the head's store; raises ConnectionError if the head is lost."""


class StoreWindow(Door):
    """Passes the store operations of this machine's workers on to the head's store.

    `ask` sends the head an operation and returns the answer.  On each connection a worker must
    await the answer to an operation before the worker sends the next operation.
    """

    def __init__(self, runtime: Path, ask: AskStore) -> None:
        super().__init__(runtime / store.STORE_SOCKET)
        self._ask = ask

    async def _serve_connection(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if len(self._connections) >= MAX_STORE_CONNECTIONS:
            return
        self._connections[task] = None
        cutter = FrameCutter(MAX_STORE_BYTES)
        try:
            while data := await reader.read(CONNECTION_READ_SIZE):
                frames = [*cutter.feed(data)]
                if len(frames) > 1:
                    raise BadFrame(TOO_SOON)
                for frame in frames:
                    writer.write(await self._answer(store.operation_from(frame), reader))
        except (BadFrame, ConnectionError) as error:
            log.warning("a process of the world can ask the store no more: %s", error)

    async def _answer(self, operation: store.Operation, reader: asyncio.StreamReader) -> bytes:
        """Return the store's answer to an operation as a frame.

        Returns b"" if the worker closes its connection before the answer comes.  Raises BadFrame if
        the worker sends more before the answer comes.
        """
        answer = asyncio.ensure_future(self._ask(operation))
        extra = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answer, extra}, return_when=asyncio.FIRST_COMPLETED)
            if extra.done():
                if extra.result():
                    raise BadFrame(TOO_SOON)
                return b""
            frame = store.to_frame(answer.result())
        finally:
            await _cancel(answer, extra)
        if len(frame) > MAX_STORE_BYTES:
            problem = f"these values have more than {MAX_STORE_BYTES >> 20} MiB"
            frame = store.to_frame(store.StoreRefused(problem))
        return frame
