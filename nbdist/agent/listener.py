"""The socket in the runtime folder at which other processes of the user are answered.

Only those of the same user are.  They ask what the world is, look at its ranks, and a notebook asks
for the world.  However many look, the workers are asked once; and those of one kind, or that say
nothing, take no place from the others.
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

from nbdist import __version__
from nbdist.agent.notebook_link import Tether
from nbdist.wire.frames import BadFrame
from nbdist.wire.spec import WorldSpec
from nbdist.wire.views import (
    DOOR,
    LONGEST_QUESTION,
    Accepted,
    Attach,
    Describe,
    Look,
    Said,
    WorkerStatus,
    WorldInfo,
    from_line,
    to_line,
    user_at,
)

log = logging.getLogger("nbdist.agent")

MOST_CALLING = 16
"""Connections at a time of one kind; each has a descriptor."""

LINE_TIMEOUT = 10.0
"""Seconds for a question to come, and for an answer to be taken in."""

FRESH = 0.4
"""Seconds for which a look at the ranks is shown again."""

NOTEBOOK_NAME = "JPY_SESSION_NAME"
"""Jupyter's server says here which notebook a kernel is for."""


def with_ranks(
    info: WorldInfo, spec: WorldSpec | None, ranks: tuple[WorkerStatus, ...]
) -> WorldInfo:
    """Add what `Look` asks for; `spec` is None before the first start."""
    notebook = os.environ.get(NOTEBOOK_NAME, "")
    info = replace(info, notebook_name=notebook, at=time.monotonic())
    if spec is None:
        return info
    backend = spec.backend or "none"
    return replace(info, pool=spec.pool, name=spec.name, backend=backend, ranks=ranks)


class Listener:
    """Answers each connection that this user makes.

    `look` adds the ranks to what is known of the world; an agent that is a part of one has no
    `tether`, and can only be looked at.
    """

    def __init__(
        self,
        runtime: Path,
        look: Callable[[WorldInfo], Awaitable[WorldInfo]],
        tether: Tether | None,
    ) -> None:
        self._path = runtime / DOOR
        self._look, self._tether = look, tether
        self._server: asyncio.Server | None = None
        self._calling: dict[asyncio.Task[None], type[Said] | None] = {}
        self._seen: WorldInfo | None = None
        self._seen_at = float("-inf")
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Listener {self._path}, {len(self._calling)} call>"

    async def open(self) -> None:
        """Answer from now on; where there can be no socket, the world does without."""
        try:
            self._server = await asyncio.start_unix_server(
                self._serve, self._path, limit=LONGEST_QUESTION
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
            if user_at(writer.get_extra_info("socket")) == os.geteuid():
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
            question = from_line(await reader.readline())
        if len(self._of_kind(type(question))) >= MOST_CALLING:
            return
        self._calling[task] = type(question)
        answer = await self._answer_to(question)
        if answer is None:
            return
        writer.transport.set_write_buffer_limits(0)  # to wait until all of it is on its way
        writer.write(to_line(answer))
        async with asyncio.timeout(LINE_TIMEOUT):
            await writer.drain()
        if self._tether and isinstance(question, Attach) and isinstance(answer, Accepted):
            try:
                while await reader.read(LONGEST_QUESTION):
                    pass
            finally:
                self._tether.let_go_by(question.pid)

    async def _answer_to(self, question: Said) -> Said | None:
        match question:
            case Describe():
                return self._describe()
            case Look():
                async with self._lock:
                    if time.monotonic() - self._seen_at > FRESH:
                        self._seen = await self._look(self._describe())
                        self._seen_at = time.monotonic()
                    return self._seen
            case Attach() if self._tether:
                return await self._tether.admit(question)
        return None

    def _describe(self) -> WorldInfo:
        if self._tether is None:
            return WorldInfo(__version__, socket.gethostname())
        return self._tether.describe()

    def _of_kind(self, kind: type[Said] | None) -> list[asyncio.Task[None]]:
        """Return those that have asked this, or nothing yet; the first one first."""
        return [task for task, asked in self._calling.items() if asked is kind]
