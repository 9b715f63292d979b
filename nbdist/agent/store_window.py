"""The socket at which an agent's workers ask the store in which their groups meet.

It passes on what they ask, to a store that is kept here, or to where all nodes' ranks meet.
What is no operation ends the connection that it came by, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

from nbdist.wire.door import user_at
from nbdist.wire.frames import BadFrame, FrameCutter
from nbdist.wire.store import (
    MOST_BYTES,
    SOCKET,
    Answer,
    Operation,
    Refused,
    operation_from,
    to_frame,
)

log = logging.getLogger("nbdist.agent")

MOST_ASKING = 4096
"""Connections at a time; each has a descriptor.  A rank has one for each thread that asks."""

PRIVATE_SOCKET = 0o600

AskStore = Callable[[Operation], Awaitable[Answer]]
"""Raises ConnectionError where nobody is there any more who could answer."""


class StoreWindow:
    """Answers on a socket in the runtime folder, which only this user can open."""

    def __init__(self, runtime: Path, ask: AskStore) -> None:
        self.path = runtime / SOCKET
        self._ask = ask
        self._server: asyncio.Server | None = None
        self._asking: set[_Asking] = set()

    def __repr__(self) -> str:
        return f"<StoreWindow {self.path}, {len(self._asking)} connections>"

    async def open(self) -> None:
        """Answer from now on; anew where the socket has been removed.  Raises OSError.

        A cleaner of /tmp does that; who is connected stays so.
        """
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
    """One connection: who has it asks one thing at a time."""

    def __init__(self, ask: AskStore, all_asking: set[_Asking]) -> None:
        self._ask = ask
        self._all = all_asking
        self._cutter = FrameCutter(MOST_BYTES)
        self._work: asyncio.Task[None] | None = None
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it; called by asyncio."""
        self._transport = cast("asyncio.WriteTransport", transport)
        is_user = user_at(transport.get_extra_info("socket")) == os.geteuid()
        if not is_user or len(self._all) >= MOST_ASKING:
            self._transport.abort()
            return
        self._all.add(self)

    def data_received(self, data: bytes) -> None:
        """Take it; called by asyncio."""
        try:
            for frame in self._cutter.feed(data):
                if self._work is not None:
                    raise BadFrame("more was asked before the answer came")
                operation = operation_from(frame)
                self._work = asyncio.get_running_loop().create_task(self._answer(operation))
        except BadFrame as error:
            log.warning("a process of the world asked the store what cannot be read: %s", error)
            self.end()

    def connection_lost(self, _: Exception | None) -> None:
        """Take it; called by asyncio."""
        self.end()

    def end(self) -> asyncio.Task[None] | None:
        """End the connection; what it waits for, if there is anything, ends in the next turn."""
        self._all.discard(self)
        self._transport.abort()
        if self._work is not None:
            self._work.cancel()
        return self._work

    async def _answer(self, operation: Operation) -> None:
        try:
            frame = to_frame(await self._ask(operation))
        except ConnectionError as error:
            log.warning("the store cannot be asked any more: %s", error)
            self._work = None
            self.end()
            return
        if len(frame) > MOST_BYTES:
            frame = to_frame(Refused(f"these values have more than {MOST_BYTES >> 20} MiB"))
        self._work = None
        self._transport.write(frame)
