"""How a process serves a notebook: calls one at a time, much else beside, until it is to leave.

An agent does, and the head of several.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from nbdist.agent.startup import end_descendants
from nbdist.system import folders
from nbdist.system.prctl import adopt_orphans
from nbdist.wire.messages import Answer, Ask, Reply, Request


class _Left(Exception):
    """Ends all tasks."""


class Serving:
    """The tasks of such a process; `answer` does what a call asks for, `send` its answer."""

    def __init__(
        self, answer: Callable[[Request], Awaitable[Reply]], send: Callable[[Answer], None]
    ) -> None:
        self._answer = answer
        self._send = send
        self._asked: asyncio.Queue[Ask] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._fault: BaseException | None = None

    def __repr__(self) -> str:
        state = "leaves" if self._gone.is_set() else "serves"
        return f"<Serving {state}, {self._asked.qsize()} calls wait>"

    async def until_left(self) -> None:
        """Work until `leave` is called; what is under way then is cancelled.

        Raises what one of the tasks has raised, or a callback of the loop's: a fault of ours,
        which ends all.  Its line is the last of the log, and the notebook shows it.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._answer_asked())
                await self._gone.wait()
                raise _Left
        except* _Left:
            pass
        except* Exception as faults:  # noqa: BLE001 (it is raised below, without its group)
            self._fault = self._fault or faults.exceptions[0]
        finally:
            self._gone.set()
        if self._fault is not None:
            raise self._fault

    def call(self, ask: Ask) -> None:
        """Do this once all calls before it have been answered."""
        self._asked.put_nowait(ask)

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside the calls, until it is to leave."""
        if self._gone.is_set():
            work.close()
        else:
            self._tasks.create_task(work)

    def leave(self) -> None:
        """End: the notebook is done with this process, or has ended."""
        self._gone.set()

    def fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End loudly, rather than go on half, after a fault of ours in a callback."""
        loop.default_exception_handler(context)
        self._fault = self._fault or context.get("exception") or RuntimeError(context["message"])
        self.leave()

    async def _answer_asked(self) -> None:
        while True:
            ask = await self._asked.get()
            self._send(Answer(ask.id, await self._answer(ask.request)))


def run(runtime: Path, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Serve until that is over; returns with nothing left behind."""
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    adopt_orphans()
    # Until the end: what cleans up after dead agents finds that this one runs.
    folders.join(runtime, folders.runtime(runtime))
    try:
        asyncio.run(serve())
    finally:
        end_descendants()
        shutil.rmtree(runtime, ignore_errors=True)
