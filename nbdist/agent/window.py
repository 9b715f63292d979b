"""The agent's window: through it other processes of the user look at the workers.

They can look, and nothing else; however many there are, the workers are asked once.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from nbdist.agent.listener import Listener
from nbdist.wire.door import LOOK, WINDOW, WorldSeen, to_answer
from nbdist.wire.spec import WorldSpec
from nbdist.wire.views import WorkerStatus

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
