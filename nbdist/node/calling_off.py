"""While a group is formed anew: who has died cannot come, and is not waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from nbdist.node.processes import ProcessSource
from nbdist.node.rank import Rank

KILL_STEP = 0.05
"""Seconds between two looks whether a worker that is being started has a process by now."""


class CallOff:
    """Called off by the death of a rank that lived, or of one that is being started.

    `file` tells those who wait in the store.  A new rank waits there in C++: it is killed.
    """

    def __init__(self, file: Path, living: Sequence[Rank]) -> None:
        self._file = file
        self._ends = [rank.process.exited for rank in living if rank.process is not None]
        self._event = asyncio.Event()

    def __repr__(self) -> str:
        return f"<CallOff {self._file.name} {'called off' if self._event.is_set() else 'open'}>"

    def __enter__(self) -> CallOff:
        for end in self._ends:
            end.add_done_callback(self)
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            end.remove_done_callback(self)

    def __call__(self, _: object = None) -> None:
        """Nobody shall wait any more."""
        self._file.touch()
        self._event.set()

    async def start(self, rank: Rank, source: ProcessSource, timeout: float) -> str:
        """Start a worker in the place of a dead one; what kept it from starting, else ""."""
        start = asyncio.ensure_future(rank.start(source))
        over = asyncio.ensure_future(self._event.wait())
        await asyncio.wait({start, over}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        in_time = start.done()
        while not start.done():
            rank.kill()
            await asyncio.wait({start}, timeout=KILL_STEP)
        error = start.exception()
        if error is None:
            return ""
        self()
        if not isinstance(error, ChildProcessError):
            raise error
        said = "\n".join(rank.last_lines[-1:])
        why = error if in_time else "not in time"
        return f"rank {rank.rank} could not start: {why} {said}".rstrip()
