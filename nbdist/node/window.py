"""The agent's window: through it other processes of the user look at the workers.

They can look, and nothing else; however many there are, the workers are asked once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from nbdist.wire.seen import LOOK, WINDOW, WorldSeen, to_answer, user_at

log = logging.getLogger("nbdist.node")

MOST_LOOKING = 16
"""Connections at a time; each has a descriptor."""

PATIENCE = 60.0
"""Seconds that one may be open without a question, or an answer be taken in."""

FRESH = 0.4
"""Seconds for which an answer is given again."""

LONGEST_QUESTION = 64


class Window:
    """Answers on a socket in the runtime folder, which only this user can open."""

    def __init__(self, runtime: Path, look: Callable[[], Awaitable[WorldSeen]]) -> None:
        self._path = runtime / WINDOW
        self._look = look
        self._server: asyncio.Server | None = None
        self._looking: set[asyncio.Task[None]] = set()
        self._answer = b""
        self._answered_at = float("-inf")
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Window {self._path}, {len(self._looking)} look>"

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
        looking = [*self._looking]
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        is_user = user_at(writer.get_extra_info("socket")) == os.geteuid()
        try:
            if is_user and len(self._looking) < MOST_LOOKING:
                self._looking.add(task)
                # What does not ask as it should, or does not listen, is sent away.
                with suppress(OSError, ValueError, TimeoutError):
                    await self._answer_to(reader, writer)
        finally:
            self._looking.discard(task)
            writer.transport.abort()

    async def _answer_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
