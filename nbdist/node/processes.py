"""The agent's side of worker processes: forked by the nursery, or spawned.

Both sources give a `WorkerProcess`; nothing else in the house knows which it was.
"""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from collections import deque
from contextlib import suppress
from typing import Protocol

from nbdist.node import wrapping
from nbdist.node.birth import LENGTH, Exited, Forked, Imported, NurseryProcess, end_group
from nbdist.wire.messages import RankStart, WorldSpec


class WorkerProcess:
    """A running worker: the leader of a session and a process group of its own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        state = f"exited {self.exited.result()}" if self.exited.done() else "running"
        return f"<WorkerProcess {self.pid} {state}>"

    def send_signal(self, number: int) -> None:
        """Signal it and what it started; one that has just ended is no error."""
        if not self.exited.done():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def has_exited(self, exit_code: int) -> None:
        """Called once by the source that started it."""
        if not self.exited.done():
            self.exited.set_result(exit_code)


class ProcessSource(Protocol):
    """Starts worker processes."""

    async def start(self, orders: RankStart, stdout: int, stderr: int) -> WorkerProcess:
        """A new process that becomes the worker; it gets copies of the descriptors.

        Raises ChildProcessError when there is no way to start one.
        """

    def close(self) -> None:
        """End the source and every process that it started."""


class Nursery:
    """Forks workers from a process that has torch imported (`nbdist.node.nursery`)."""

    def __init__(self, started: NurseryProcess) -> None:
        self._socket, self._process, self._log = started.socket, started.popen, started.log
        self._received = b""
        self._imported: asyncio.Future[None] | None = None
        self.has_all = asyncio.Event()
        """Whether it has imported all that it does while idle: forks from then on share it."""
        self._asked: deque[asyncio.Future[WorkerProcess]] = deque()
        self._workers: dict[int, WorkerProcess] = {}

    def attach(self) -> None:
        """Listen to it on the running loop, which is there later than the process."""
        loop = asyncio.get_running_loop()
        self._imported = loop.create_future()
        loop.add_reader(self._socket, self._read)

    def last_lines(self) -> tuple[str, ...]:
        """What it said itself: why it could not import torch."""
        return tuple(self._log.read_text(errors="replace").splitlines())

    async def start(self, orders: RankStart, stdout: int, stderr: int) -> WorkerProcess:
        assert self._imported is not None
        await asyncio.shield(self._imported)
        forked: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self._asked.append(forked)
        body = pickle.dumps(orders)
        try:
            # Blocks for milliseconds at most: the nursery does nothing but read this.
            socket.send_fds(self._socket, [LENGTH.pack(len(body))], [stdout, stderr])
            self._socket.sendall(body)
        except OSError as error:
            raise ChildProcessError(f"the nursery is gone: {error}") from error
        return await forked

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()  # it ends its workers, then itself
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._lost()

    def _read(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._lost()
            return
        self._received += data
        while len(self._received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received)
            end = LENGTH.size + length
            if len(self._received) < end:
                return
            message, self._received = self._received[LENGTH.size : end], self._received[end:]
            self._take(pickle.loads(message))

    def _take(self, message: Imported | Forked | Exited) -> None:
        match message:
            case Imported(more=False):
                self.has_all.set()
            case Imported():
                assert self._imported is not None
                self._imported.set_result(None)
            case Forked(pid):
                self._workers[pid] = WorkerProcess(pid)
                asked = self._asked.popleft()
                if not asked.cancelled():
                    asked.set_result(self._workers[pid])
            case Exited(pid, exit_code):
                self._workers.pop(pid).has_exited(exit_code)

    def _lost(self) -> None:
        """The nursery has ended; its workers were killed by the kernel as it did."""
        gone = ChildProcessError("the nursery has ended")
        if self._imported is not None and not self._imported.done():
            self._imported.set_exception(gone)
            self._imported.exception()  # whoever starts a worker will meet it
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(gone)
        self._asked.clear()
        for pid, process in self._workers.items():
            end_group(pid)
            process.has_exited(-signal.SIGKILL)
        self._workers.clear()


def command_of(spec: WorldSpec, path: str | None) -> list[str]:
    """The command line of a spawned worker; what wraps it is made to die with this process.

    Raises FileNotFoundError when the wrapper is not there.
    """
    if not spec.wrap:
        return [*spec.command]
    wrapper = shutil.which(spec.wrap[0], path=path)
    if wrapper is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return [sys.executable, "-IS", wrapping.__file__, wrapper, *spec.command[1:]]


class Spawner:
    """Starts each worker as a new interpreter: slower, and free of all that fork inherits."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[WorkerProcess, subprocess.Popen[bytes]]] = {}

    async def start(self, orders: RankStart, stdout: int, stderr: int) -> WorkerProcess:
        environ = {**orders.world.environ, **orders.environ}
        try:
            child = subprocess.Popen(  # noqa: ASYNC220 (its descriptors and pid are needed at once)
                command_of(orders.world, environ.get("PATH")),
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                env=environ,
                start_new_session=True,
            )
        except OSError as error:
            raise ChildProcessError(f"{orders.world.command[0]}: {error.strerror}") from error
        process = WorkerProcess(child.pid)
        self._running[child.pid] = process, child
        pidfd = os.pidfd_open(child.pid)
        asyncio.get_running_loop().add_reader(pidfd, self._ended, child.pid, pidfd)
        assert child.stdin is not None
        try:
            with child.stdin:
                child.stdin.write(pickle.dumps(orders))
        except BrokenPipeError:
            pass  # it has ended already, which its exit code will tell
        return process

    def close(self) -> None:
        for process, child in list(self._running.values()):
            end_group(process.pid)
            child.wait()

    def _ended(self, pid: int, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        process, child = self._running.pop(pid)
        end_group(pid)
        process.has_exited(child.wait())
