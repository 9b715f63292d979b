"""Sockets in the runtime folder at which other processes of the user are answered: door and window.

Only those of the same user are.  At the door of a world a notebook asks for it, and others ask
whose it is.  Through the agent's window others look at the workers, and can do nothing else;
however many there are, the workers are asked once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nbdist.wire.door import (
    DOOR,
    LONGEST_LINE,
    LOOK,
    WINDOW,
    Admitted,
    Attach,
    Held,
    Refused,
    Said,
    Who,
    WorldSeen,
    from_line,
    to_answer,
    to_line,
    user_at,
)
from nbdist.wire.frames import BadFrame
from nbdist.wire.spec import WorldSpec
from nbdist.wire.views import WorkerStatus

log = logging.getLogger("nbdist.agent")

MOST_CALLING = 16
"""Connections at a time; each has a descriptor."""


class Listener(ABC):
    """Has each connection answered that this user makes; `limit` bytes are a line at most."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._server: asyncio.Server | None = None
        self._calling: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Listener {self._path}, {len(self)} call>"

    def __len__(self) -> int:
        return len(self._calling)

    async def open(self) -> None:
        """Answer from now on; where there can be no socket, the world does without."""
        try:
            self._server = await asyncio.start_unix_server(
                self._serve, self._path, limit=self._limit
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

    @abstractmethod
    async def answer_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a connection until it is over.

        What BadFrame, OSError, ValueError and TimeoutError end is not worth a word.
        """

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        is_user = user_at(writer.get_extra_info("socket")) == os.geteuid()
        try:
            if is_user and len(self._calling) < MOST_CALLING:
                self._calling.add(task)
                # What does not ask as it should, or does not listen, is sent away.
                with suppress(OSError, ValueError, TimeoutError, BadFrame):
                    await self.answer_to(reader, writer)
        except Exception:
            # A fault of ours, of which the world is not to die: who asks learns no more.
            log.exception("%r cannot answer", self)
        finally:
            self._calling.discard(task)
            writer.transport.abort()


# --- the door ---------------------------------------------------------------------------------


QUESTION_TIMEOUT = 10.0
"""Seconds for a question to come."""

Admit = Callable[[Attach], Awaitable[Admitted | Refused]]


class Door(Listener):
    """Answers on a socket in the runtime folder, which only this user can open.

    `who` says whose the world is, `admit` gives it to a notebook, and `gone` is called when
    the connection of the one that was admitted last has ended.
    """

    def __init__(
        self, runtime: Path, who: Callable[[], Held], admit: Admit, gone: Callable[[int], None]
    ) -> None:
        super().__init__(runtime / DOOR, LONGEST_LINE)
        self._who, self._admit, self._gone = who, admit, gone

    def __repr__(self) -> str:
        return f"<Door {self._path}, {len(self)} ask>"

    async def answer_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one question; a notebook that was admitted stays on the line."""
        async with asyncio.timeout(QUESTION_TIMEOUT):
            asked = from_line(await reader.readline())
        answer: Said
        match asked:
            case Who():
                answer = self._who()
            case Attach():
                answer = await self._admit(asked)
            case _:
                return
        writer.write(to_line(answer))
        await writer.drain()
        if isinstance(asked, Attach) and isinstance(answer, Admitted):
            try:
                while await reader.read(LONGEST_LINE):
                    pass
            finally:
                self._gone(asked.pid)


# --- the window -------------------------------------------------------------------------------


PATIENCE = 60.0
"""Seconds that one may be open without a question, or an answer be taken in."""

FRESH = 0.4
"""Seconds for which an answer is given again."""

LONGEST_QUESTION = 64


NOTEBOOK_NAME = "JPY_SESSION_NAME"
"""Jupyter's server says here which notebook a kernel is for."""


def seen_here(
    notebook_pid: int, spec: WorldSpec | None, workers: tuple[WorkerStatus, ...]
) -> WorldSeen:
    """Describe a world whose notebook is on this machine; `spec` is None before its start."""
    notebook = os.environ.get(NOTEBOOK_NAME, "")
    seen = WorldSeen(socket.gethostname(), notebook_pid, notebook, time.monotonic())
    if spec is None:
        return seen
    backend = spec.backend or "none"
    return replace(seen, pool=spec.pool, name=spec.name, backend=backend, workers=workers)


class Window(Listener):
    """Answers on a socket in the runtime folder, which only this user can open."""

    def __init__(self, runtime: Path, look: Callable[[], Awaitable[WorldSeen]]) -> None:
        super().__init__(runtime / WINDOW, LONGEST_QUESTION)
        self._look = look
        self._answer = b""
        self._answered_at = float("-inf")
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Window {self._path}, {len(self)} look>"

    async def answer_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one question after the other."""
        while True:
            async with asyncio.timeout(PATIENCE):
                if await reader.readline() != LOOK:
                    return
                writer.write(await self._seen())
                await writer.drain()

    async def _seen(self) -> bytes:
        async with self._lock:
            if time.monotonic() - self._answered_at > FRESH:
                self._answer = to_answer(await self._look())
                self._answered_at = time.monotonic()
            return self._answer
