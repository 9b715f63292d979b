"""A socket in the runtime folder at which other processes of the user are answered."""

from __future__ import annotations

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from nbdist.wire.door import user_at
from nbdist.wire.frames import BadFrame

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
