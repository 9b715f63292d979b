"""The sockets in the runtime folder at which an agent answers processes of the user.

At one, others look at the world, or a notebook asks for it; at the other workers ask the store.
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
from typing import cast

from nbdist import __version__
from nbdist.agent.notebook_link import Tether
from nbdist.wire import store, views
from nbdist.wire.frames import BadFrame, FrameCutter
from nbdist.wire.spec import WorldSpec
from nbdist.wire.store import MOST_BYTES

log = logging.getLogger("nbdist.agent")

MOST_CALLING = 16  # connections at a time of one kind; each has a descriptor
LINE_TIMEOUT = 10.0  # seconds for a question to come, and for an answer to be taken in
FRESH = 0.4  # seconds for which a look at the ranks is shown again
NOTEBOOK_NAME = "JPY_SESSION_NAME"  # Jupyter's server says here which notebook a kernel is for


def with_ranks(
    info: views.WorldInfo, spec: WorldSpec | None, ranks: tuple[views.WorkerStatus, ...]
) -> views.WorldInfo:
    """Add what `Look` asks for; `spec` is None before the first start."""
    notebook = os.environ.get(NOTEBOOK_NAME, "")
    info = replace(info, notebook_name=notebook, at=time.monotonic())
    if spec is None:
        return info
    backend = spec.backend or "none"
    return replace(info, pool=spec.config.pool, name=spec.name, backend=backend, ranks=ranks)


class Listener:
    """Answers each connection that this user makes, `MOST_CALLING` of one kind at a time.

    `look` adds the ranks to what is known of the world; an agent that is a part of one has no
    `tether`, and can only be looked at.
    """

    def __init__(
        self,
        runtime: Path,
        look: Callable[[views.WorldInfo], Awaitable[views.WorldInfo]],
        tether: Tether | None,
    ) -> None:
        self._path = runtime / views.DOOR
        self._look, self._tether = look, tether
        self._server: asyncio.Server | None = None
        self._calling: dict[asyncio.Task[None], type[views.Said] | None] = {}
        self._seen: views.WorldInfo | None = None
        self._seen_at = float("-inf")
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Listener {self._path}, {len(self._calling)} call>"

    async def open(self) -> None:
        """Answer from now on; where there can be no socket, the world does without."""
        try:
            self._server = await asyncio.start_unix_server(
                self._serve, self._path, limit=views.LONGEST_QUESTION
            )
        except OSError as error:
            log.warning("%s cannot be opened: %s", self._path, error)

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        calling = [*self._calling]
        for task in calling:
            task.cancel()
        await asyncio.gather(*calling, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if views.user_at(writer.get_extra_info("socket")) == os.geteuid():
                # What does not ask as it should, or does not listen, is sent away.  To asyncio's
                # streams a task that was cancelled is a fault, and a fault ends the agent.
                with suppress(OSError, ValueError, BadFrame, asyncio.CancelledError):
                    await self._answer(task, reader, writer)
        except Exception:
            # A fault of ours, of which the world is not to die: who asks learns no more.
            log.exception("%r cannot answer", self)
        finally:
            self._calling.pop(task, None)
            writer.transport.abort()

    async def _answer(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one question; a notebook that was accepted stays on the line."""
        silent = self._of_kind(None)
        if len(silent) >= MOST_CALLING:
            silent[0].cancel()
            del self._calling[silent[0]]
        self._calling[task] = None
        async with asyncio.timeout(LINE_TIMEOUT):
            question = views.from_line(await reader.readline())
        if len(self._of_kind(type(question))) >= MOST_CALLING:
            return
        self._calling[task] = type(question)
        answer = await self._answer_to(question)
        if answer is None:
            return
        writer.transport.set_write_buffer_limits(0)  # to wait until all of it is on its way
        writer.write(views.to_line(answer))
        async with asyncio.timeout(LINE_TIMEOUT):
            await writer.drain()
        match question, answer:
            case views.Attach(pid=pid), views.Accepted() if self._tether:
                try:
                    while await reader.read(views.LONGEST_QUESTION):
                        pass
                finally:
                    self._tether.let_go_by(pid)

    async def _answer_to(self, question: views.Said) -> views.Said | None:
        match question:
            case views.Describe():
                return self._describe()
            case views.Look():
                async with self._lock:
                    if time.monotonic() - self._seen_at > FRESH:
                        self._seen = await self._look(self._describe())
                        self._seen_at = time.monotonic()
                    return self._seen
            case views.Attach() if self._tether:
                return await self._tether.admit(question)
        return None

    def _describe(self) -> views.WorldInfo:
        if self._tether is None:
            return views.WorldInfo(__version__, socket.gethostname())
        return self._tether.describe()

    def _of_kind(self, kind: type[views.Said] | None) -> list[asyncio.Task[None]]:
        """Return those that have asked this, or nothing yet; the first one first."""
        return [task for task, asked in self._calling.items() if asked is kind]


# --- the store that is asked ------------------------------------------------------------------

MOST_ASKING = 4096  # connections at a time, each with a descriptor; a rank has one for each thread

PRIVATE_SOCKET = 0o600

AskStore = Callable[[store.Operation], Awaitable[store.Answer]]
"""Raises ConnectionError where the head is lost."""


class StoreWindow:
    """Has `ask` answer operations on a socket in the runtime folder, for this user alone."""

    def __init__(self, runtime: Path, ask: AskStore) -> None:
        self.path = runtime / store.SOCKET
        self._ask = ask
        self._server: asyncio.Server | None = None
        self._asking: set[_Asking] = set()

    def __repr__(self) -> str:
        return f"<StoreWindow {self.path}, {len(self._asking)} connections>"

    async def open(self) -> None:
        """Answer from now on, on a new socket if the old was removed; raises OSError."""
        if self._server is not None and self.path.exists():
            return
        if self._server is not None:
            self._server.close()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _Asking(self._ask, self._asking), self.path, backlog=MOST_ASKING
        )
        self.path.chmod(PRIVATE_SOCKET)

    async def close(self) -> None:
        """End all connections, and what is asked by them."""
        if self._server is not None:
            self._server.close()
        works = [asking.end() for asking in [*self._asking]]
        await asyncio.gather(*filter(None, works), return_exceptions=True)
        self.path.unlink(missing_ok=True)


class _Asking(asyncio.Protocol):
    """One connection, for one operation at a time; what is none ends it."""

    def __init__(self, ask: AskStore, all_asking: set[_Asking]) -> None:
        self._ask = ask
        self._all = all_asking
        self._cutter = FrameCutter(MOST_BYTES)
        self._work: asyncio.Task[None] | None = None
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        is_user = views.user_at(transport.get_extra_info("socket")) == os.geteuid()
        if not is_user or len(self._all) >= MOST_ASKING:
            self._transport.abort()
            return
        self._all.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._cutter.feed(data):
                if self._work is not None:
                    raise BadFrame("more was asked before the answer came")
                operation = store.operation_from(frame)
                self._work = asyncio.get_running_loop().create_task(self._answer(operation))
        except BadFrame as error:
            log.warning("a process of the world asked the store what cannot be read: %s", error)
            self.end()

    def connection_lost(self, _: Exception | None) -> None:
        self.end()

    def end(self) -> asyncio.Task[None] | None:
        """End the connection; what it waits for, if there is anything, ends in the next turn."""
        self._all.discard(self)
        self._transport.abort()
        if self._work is not None:
            self._work.cancel()
        return self._work

    async def _answer(self, operation: store.Operation) -> None:
        try:
            frame = store.to_frame(await self._ask(operation))
        except ConnectionError as error:
            log.warning("the store cannot be asked any more: %s", error)
            self._work = None
            self.end()
            return
        if len(frame) > MOST_BYTES:
            problem = f"these values have more than {MOST_BYTES >> 20} MiB"
            frame = store.to_frame(store.Refused(problem))
        self._work = None
        self._transport.write(frame)
