"""The agent's side of the fork server: asks it for workers, and replaces it when it has ended."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import re
import signal
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nbdist.agent.processes import Children, WorkerProcess
from nbdist.agent.startup import (
    END_TIMEOUT,
    Fork,
    Forked,
    ForkFailed,
    ForkServerProcess,
    FromForkServer,
    Imported,
    WorkerExited,
    log_file,
    start_fork_server,
    to_frame,
)
from nbdist.system.limits import Lack, word_lack
from nbdist.wire.frames import FrameCutter
from nbdist.wire.spec import WorkerStart
from nbdist.words import word_exit

READ_SIZE = 1 << 16

IMPORT_TIMEOUT = 180.0
FORK_TIMEOUT = 20.0
"""Seconds for an answer, which comes at once but for the import of a module that is at hand."""

READ_ON_IMPORT = re.compile(
    r"(?!TORCHINDUCTOR_CACHE_DIR$)TORCH_?(DYNAMO|INDUCTOR|COMPILE|CACHING|FAKE_TENSOR|FX|LOGS)\w*|TORCH_CPP_LOG_LEVEL"
    r"|TORCH_SHOW_CPP_STACKTRACES"
)
"""Variables that torch reads when it is imported, so that a fork's own come too late.

Where the inductor has its cache is read whenever it is used, and set by torch itself in a process
that has compiled something: a notebook that has can still fork its workers.
"""


def can_fork_with(environ: Mapping[str, str]) -> bool:
    """Say whether a worker with this environment can be forked: the fork server has the agent's."""
    ours, theirs = (
        {name: value for name, value in each.items() if READ_ON_IMPORT.fullmatch(name)}
        for each in (os.environ, environ)
    )
    return ours == theirs


class ForkServerLost(ChildProcessError):
    """The fork server has ended, for whatever reason; another one can be started."""


class Forker:
    """Starts workers as forks of a process that has torch imported.

    When that ends, its workers live on, and another one is started when it is needed.
    """

    def __init__(
        self, runtime: Path, children: Children, started: ForkServerProcess | None
    ) -> None:
        self._runtime = runtime
        self._children = children
        self._server = started
        self._exit_code: int | None = None
        self._replies = FrameCutter()
        self._imported: asyncio.Future[None] | None = None
        self.has_all = asyncio.Event()
        """Whether it has imported all that it does while idle: forks from then on share it."""
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[WorkerProcess]] = {}
        self._workers: dict[int, WorkerProcess] = {}

    def __repr__(self) -> str:
        pid = self._server.popen.pid if self._server else None
        return f"<Forker {pid} {sorted(self._workers)}>"

    # --- the agent's calls ----------------------------------------------------------------

    def attach(self, on_loss: Callable[[], None] = lambda: None) -> None:
        """Listen to the fork server on the running loop, which is there later than the process.

        `on_loss` is called when its workers have become children of this process.
        """
        self._on_loss = on_loss
        if self._server is not None:
            self._listen(self._server)

    def last_lines(self) -> tuple[str, ...]:
        """Return what the fork server itself has written: why it could not import torch."""
        log = log_file(self._runtime)
        return tuple(log.read_text(errors="replace").splitlines()) if log.exists() else ()

    async def prepare(self) -> None:
        if self._server is None:
            try:
                self._server = start_fork_server(self._runtime)
            except OSError as error:
                raise Lack(word_lack(error.errno)) from error
            self._listen(self._server)
        assert self._imported is not None
        await self._wait(self._imported, IMPORT_TIMEOUT)
        self._imported.result()

    async def start(self, start: WorkerStart, stdout: int, stderr: int) -> WorkerProcess:
        await self.prepare()
        try:
            return await self._ask(start, stdout, stderr)
        except ForkServerLost:  # in this moment, or it was not noticed before
            await self.prepare()
            return await self._ask(start, stdout, stderr)

    def close(self) -> None:
        """End the fork server; its workers are expected children of this process then."""
        if self._server is not None:
            self._stop_listening(self._server)
            if self._exit_code is None:
                self._children.kill(self._server.popen.pid)
                self._server.popen.returncode = -signal.SIGKILL
            self._server = None
            self._adopt_workers()

    async def _ask(self, start: WorkerStart, stdout: int, stderr: int) -> WorkerProcess:
        if self._server is None:
            raise ForkServerLost("the fork server has ended")
        number = next(self._numbers)
        forked: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self._asked[number] = forked
        frame = to_frame(Fork(number, start))
        try:
            # Blocks only where its buffer is full, until it has imported the module at hand.
            sent = socket.send_fds(self._server.socket, [frame], [stdout, stderr])
            self._server.socket.sendall(frame[sent:])
        except ConnectionError:
            pass  # it has ended, which is noticed in a moment
        except OSError as error:
            del self._asked[number]
            raise ChildProcessError(f"its fork server cannot be asked: {error}") from error
        try:
            await self._wait(forked, FORK_TIMEOUT)
            return forked.result()
        finally:
            forked.cancel()  # where it was called off: a worker that comes later is ended

    async def _wait(self, answer: asyncio.Future[Any], timeout: float) -> None:
        """Wait for an answer; a fork server that hangs is killed, for another to take its place."""
        await asyncio.wait([answer], timeout=timeout)
        if not answer.done() and self._server is not None and self._exit_code is None:
            os.kill(self._server.popen.pid, signal.SIGKILL)
            await asyncio.wait([answer], timeout=END_TIMEOUT)
        if not answer.done():
            raise ForkServerLost("the fork server does not answer")

    # --- what it answers ------------------------------------------------------------------

    def _listen(self, server: ForkServerProcess) -> None:
        loop = asyncio.get_running_loop()
        self._imported, self._exit_code = loop.create_future(), None
        self._replies = FrameCutter()
        self.has_all.clear()
        loop.add_reader(server.socket, self._read)
        self._children.expect(server.popen.pid, self._exited)

    def _read(self) -> None:
        assert self._server is not None
        try:
            data = self._server.socket.recv(READ_SIZE)
        except ConnectionResetError:  # it has ended before it had read a request
            data = b""
        for frame in self._replies.feed(data):
            self._receive(pickle.loads(frame))
        if not data:
            # Only when no process has the other end any more: no further answer can come.
            self._stop_listening(self._server)
            self._lose()

    def _stop_listening(self, server: ForkServerProcess) -> None:
        if server.socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(server.socket)
            server.socket.close()

    def _receive(self, message: FromForkServer) -> None:
        match message:
            case Imported(more=False):
                self.has_all.set()
            case Imported():
                assert self._imported is not None
                self._imported.set_result(None)
            case Forked(number, pid):
                self._add_worker(number, pid)
            case ForkFailed(number, code):
                self._fail(number, Lack(word_lack(code)))
            case WorkerExited(number, pid, exit_code):
                if pid in self._workers:
                    self._children.forget(pid)
                    self._worker_exited(pid, exit_code)
                else:  # before it could say that it is there
                    self._fail(number, ChildProcessError(f"it {word_exit(exit_code)}"))

    def _add_worker(self, number: int, pid: int) -> None:
        process = self._workers[pid] = WorkerProcess(pid)
        self._children.expect(pid, partial(self._worker_exited, pid))
        asked = self._asked.pop(number)
        if asked.done():  # the start was called off meanwhile
            process.kill()
        else:
            asked.set_result(process)

    def _fail(self, number: int, error: ChildProcessError) -> None:
        asked = self._asked.pop(number)
        if not asked.done():
            asked.set_exception(error)

    def _worker_exited(self, pid: int, exit_code: int) -> None:
        self._workers.pop(pid).set_exited(exit_code)

    # --- its end --------------------------------------------------------------------------

    def _exited(self, exit_code: int) -> None:
        assert self._server is not None
        self._server.popen.returncode = self._exit_code = exit_code
        self._lose()

    def _lose(self) -> None:
        """Let it go, once its exit code is known and all is read that it has sent."""
        assert self._server is not None
        if self._exit_code is None or self._server.socket.fileno() >= 0:
            return
        self._server = None
        gone = ForkServerLost(f"the fork server has ended: it {word_exit(self._exit_code)}")
        assert self._imported is not None
        if not self._imported.done():
            self._imported.set_exception(gone)
            self._imported.exception()  # `prepare` raises it too, if it is called
        for number in list(self._asked):
            self._fail(number, gone)
        self._adopt_workers()
        self._on_loss()

    def _adopt_workers(self) -> None:
        """Expect their ends here: they have become this process's children."""
        for pid in list(self._workers):
            self._children.adopted(pid)
