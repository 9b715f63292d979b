"""Tests of `nbdist.agent.debugger_relay`: the sockets between an agent and workers' debuggers."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from nbdist.agent.debugger_relay import DebuggerRelay, DebuggerRelays
from nbdist.wire.control import ControlReply, ControlRequest, Ok, StartDebugger
from nbdist.wire.messages import CloseDebuggers, FromDebugger, OpenDebugger, ToDebugger
from tests.agent.sources import worker_start
from tests.waiting import SOON, until

pytestmark = pytest.mark.unit


class LateWorker:
    """A slow worker, which answers the first request once it listens for the second one.

    As in a worker, a listener accepts one connection, and is closed before the next listener.
    """

    rank = 0

    def __init__(self, folder: Path) -> None:
        self.start_info = worker_start(folder)
        self.debugger: DebuggerRelay | None = None
        self.received: list[bytes] = []  # by all listeners together
        self._listens_twice = asyncio.Event()
        self._listener: socket.socket | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def ask(self, request: ControlRequest, timeout: float) -> ControlReply | None:
        assert isinstance(request, StartDebugger)
        if self._listener is not None:
            self._listener.close()
            self._listens_twice.set()
        self._listener = listener = socket.socket(socket.AF_UNIX)
        listener.settimeout(0)
        with suppress(FileNotFoundError):
            os.unlink(request.debugger_socket)
        listener.bind(request.debugger_socket)
        listener.listen(1)
        self._serving.add(asyncio.create_task(self._serve(listener)))
        await asyncio.wait_for(self._listens_twice.wait(), SOON)
        return Ok()

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if self._listens_twice.is_set():
            connection, _ = await loop.sock_accept(listener)
            listener.close()
            with connection:
                while data := await loop.sock_recv(connection, 1 << 16):
                    self.received.append(data)

    async def end(self) -> None:
        for each in self._serving:
            each.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()


def test_a_debugger_that_is_opened_twice_at_once_serves_the_second_session() -> None:
    """The relay of the first session does not take the connection of the second one."""

    async def open_twice(folder: Path) -> tuple[list[bytes], list[FromDebugger]]:
        worker, sent = LateWorker(folder), list[FromDebugger]()
        running = set[asyncio.Task[object]]()
        relays = DebuggerRelays(
            lambda ranks: [worker],
            sent.append,
            lambda work: running.add(asyncio.create_task(work)),
        )
        try:
            relays.receive(OpenDebugger(0, 1))
            relays.receive(OpenDebugger(0, 2))
            relays.receive(ToDebugger(0, 2, "hello"))
            await until(lambda: worker.received or any(each.session == 2 for each in sent))
            relays.receive(CloseDebuggers((0,)))
            await asyncio.wait_for(asyncio.gather(*running), SOON)
        finally:
            await worker.end()
        return worker.received, sent

    with tempfile.TemporaryDirectory(prefix="nbt-") as folder:
        received, sent = asyncio.run(open_twice(Path(folder)))
    assert received == [b"Content-Length: 5\r\n\r\nhello"]
    assert [each for each in sent if each.session == 2] == [FromDebugger(0, 2)]


def test_the_path_of_a_debugger_s_socket_is_no_longer_than_that_of_the_task_socket() -> None:
    """The folder of a world is chosen so that the path of the task socket is short enough."""
    start = worker_start(Path("/run/world"))
    assert len(start.debugger_socket(9999)) == len(start.task_socket)
