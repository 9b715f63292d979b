"""The door of a world: at which a notebook asks for it, and others ask whose it is.

Only processes of the same user are answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from nbdist.agent.listener import Listener
from nbdist.wire.door import (
    DOOR,
    LONGEST_LINE,
    Admitted,
    Attach,
    Held,
    Refused,
    Said,
    Who,
    from_line,
    to_line,
)

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
