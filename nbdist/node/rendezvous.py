"""Where ranks meet to form a group, and what ends their wait where one of them cannot come."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

from nbdist.node.limits import Lack
from nbdist.node.processes import ProcessSource
from nbdist.node.worker import Worker

KILL_STEP = 0.05
"""Seconds between two looks whether a worker that is being started has a process by now."""


class HeldPort:
    """MASTER_PORT: for stores that user code or its child processes make.

    It is bound, and so no other program gets it; and since both sides say SO_REUSEADDR, as
    torch's TCPStore does, rank 0 can listen on it, again and again.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number = int(self._socket.getsockname()[1])

    def __repr__(self) -> str:
        return f"<HeldPort {self.number}>"

    def close(self) -> None:
        """Let other programs have it."""
        self._socket.close()


class CallOff:
    """Calls the forming of a group off when one that is to take part has died.

    That is a worker which lived (`ends`, by their exit codes), or one that is being started.
    `file` is for those that wait in the store.  A new one waits there in C++: it is killed.
    """

    def __init__(self, file: Path, ends: Sequence[asyncio.Future[int]]) -> None:
        self._file = file
        self._ends = ends
        self._event = asyncio.Event()

    def __repr__(self) -> str:
        return f"<CallOff {self._file.name} {'called off' if self._event.is_set() else 'open'}>"

    def __enter__(self) -> CallOff:
        for end in self._ends:
            end.add_done_callback(self._call_off)
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            end.remove_done_callback(self._call_off)

    async def start(self, worker: Worker, source: ProcessSource, timeout: float) -> str:
        """Start a worker in the place of a dead one; return what kept it from that, else ""."""
        start = asyncio.ensure_future(worker.start(source))
        over = asyncio.ensure_future(self._event.wait())
        await asyncio.wait({start, over}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        in_time = start.done()
        while not start.done():
            worker.kill()
            await asyncio.wait({start}, timeout=KILL_STEP)
        error = start.exception()
        if error is None:
            return ""
        self._call_off()
        if not isinstance(error, ChildProcessError):
            raise error
        last = "" if isinstance(error, Lack) else "\n".join(worker.output.last_lines[-1:])
        why = error if in_time else "not in time"
        return f"rank {worker.rank} could not start: {why} {last}".rstrip()

    def _call_off(self, _: object = None) -> None:
        self._file.touch()
        self._event.set()
