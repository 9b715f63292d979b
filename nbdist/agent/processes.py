"""How the agent starts worker processes, and notices that worker processes have exited.

A `Forker` lets the fork server fork workers; a `Spawner` starts new interpreters.  `Children` reaps
all child processes of the agent.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nbdist.agent import fork_server
from nbdist.system import processes
from nbdist.system.folders import current_folder
from nbdist.system.limits import Lack, word_lack, word_start_error
from nbdist.system.processes import (
    EXIT_TIMEOUT,
    OwnTime,
    kill_adopted,
    kill_group,
    poll_until,
    safe_environ,
)
from nbdist.wire.frames import FrameCutter, framed, pack, unpack
from nbdist.wire.spec import WorkerStart, WorldSpec
from nbdist.words import word_exit

LONGEST_EXIT, EXIT_STEP = 10.0, 0.05
"""The most seconds of `WorkerProcess.exit_within`, and the fewest between two of its checks.

A caller can give more than `LONGEST_EXIT`.  The notebook waits longer than `LONGEST_EXIT` for its
agent, which waits for the workers."""

OnExit = Callable[[int], None]


class Children:
    """Reaps all children of the agent, adopted orphans too, and reports exits of expected children.

    `before_reap` is called before children are reaped.  The `Forker` uses `before_reap` to read the
    fork server's messages, so that a worker that has exited right after its fork is expected.
    """

    def __init__(self) -> None:
        self._expected: dict[int, OnExit] = {}
        self.before_reap: Callable[[], None] = lambda: None

    def attach(self) -> None:
        """Reap children on each SIGCHLD from now on; must be called in the running event loop."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def expect(self, pid: int, on_exit: OnExit) -> None:
        """Call `on_exit` with the exit code of the child `pid` when the child has exited.

        The code is negative if a signal ended the child.  Before the call, the child's process
        group and programs that the child has left behind are killed (`kill_adopted`).
        """
        self._expected[pid] = on_exit
        # The child may have exited before SIGCHLD had a handler.
        asyncio.get_running_loop().call_soon(self._reap)

    def close(self) -> None:
        """Kill and reap all expected children; waits at most `EXIT_TIMEOUT` seconds."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        for pid in self._expected:
            kill_group(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

        def have_exited() -> bool:
            self._reap()
            return not self._expected

        poll_until(have_exited)

    def _reap(self) -> None:
        self.before_reap()
        with suppress(ChildProcessError):  # raised if this process has no children
            while child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = child.si_pid
                if on_exit := self._expected.pop(pid, None):
                    # Kill before the child is reaped: after that, another group may get its number.
                    kill_group(pid)
                    kill_adopted(pid)
                exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if on_exit:
                    on_exit(exit_code)


class WorkerProcess:
    """The process of a worker, which leads a session and a process group of Linux.

    The future `exited` gets the exit code.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        state = f"exited {self.exited.result()}" if self.exited.done() else "running"
        return f"<WorkerProcess {self.pid} {state}>"

    def send_signal(self, number: int) -> None:
        """Signal the worker's process group; does nothing if the worker has exited."""
        if not self.exited.done():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill the worker's process group, and the worker even if it does not lead a group yet."""
        if not self.exited.done():
            kill_group(self.pid)
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def exit_within(self, seconds: float) -> None:
        """Wait until the worker exits, but at most `seconds` of the worker's own time.

        Own time leaves out waits for a processor (`OwnTime`).  So on a busy machine this method can
        take longer than `seconds`, until about `LONGEST_EXIT` seconds have passed if that is more.
        """
        loop, own_time = asyncio.get_running_loop(), OwnTime(self.pid)
        deadline = loop.time() + max(seconds, LONGEST_EXIT)
        while not self.exited.done():
            remaining = min(seconds - own_time.seconds(), deadline - loop.time())
            if remaining <= 0:
                break
            await asyncio.wait([self.exited], timeout=max(remaining, EXIT_STEP))

    def set_exited(self, exit_code: int) -> None:
        """Record the exit code; `Children` calls this."""
        if not self.exited.done():
            self.exited.set_result(exit_code)


class Spawner:
    """Starts each worker as a new interpreter; slower than a fork, but no state is inherited."""

    def __init__(self, children: Children) -> None:
        self._children = children

    def last_lines(self) -> tuple[str, ...]:
        """Return no lines: there is no fork server that could have written why a start failed."""
        return ()

    async def prepare(self) -> None:
        """Do nothing, because a spawned worker needs no other process."""

    async def start(self, start: WorkerStart, stdout: int, stderr: int) -> WorkerProcess:
        """Start a worker whose stdout and stderr are copies of the descriptors `stdout`, `stderr`.

        Raises ChildProcessError if the process cannot be started.
        """
        environ = {**start.world.environ, **start.environ}
        try:
            with os.fdopen(os.memfd_create("nbdist-start"), "w+b") as stdin:
                pickle.dump(start, stdin)  # a pipe could fill up before the worker reads from it
                stdin.seek(0)
                child = subprocess.Popen(  # noqa: ASYNC220 (its pid is needed at once)
                    command_of(start.world, environ.get("PATH")),
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    env=safe_environ(environ, start.world.cwd),
                    cwd=current_folder(),
                    start_new_session=True,
                )
        except OSError as error:
            why = word_lack(error.errno)
            raise ChildProcessError(f"{start.world.command[0]}: {why}") from error
        process = WorkerProcess(child.pid)

        def on_exit(exit_code: int) -> None:
            child.returncode = exit_code
            process.set_exited(exit_code)

        self._children.expect(child.pid, on_exit)
        return process


def command_of(spec: WorldSpec, path: str | None) -> list[str]:
    """Return the command line of a spawned worker.

    If the world has the option `--wrap`, the command runs `nbdist.system.processes` as a script.
    The script becomes the wrapper, which Linux kills when the agent exits.  Raises
    FileNotFoundError if the wrapper is not in `path`, a list of folders as in PATH.
    """
    if not spec.wrap:
        return [*spec.command]
    wrapper = shutil.which(spec.wrap[0], path=path)
    if wrapper is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return [sys.executable, "-IS", processes.__file__, wrapper, *spec.command[1:]]


# --- forked workers ---------------------------------------------------------------------------

FORK_SERVER_IMPORT_TIMEOUT = 150.0  # seconds for the fork server to import torch
FORK_TIMEOUT = 20.0  # seconds for a fork, if it waits for at most one import

READ_ON_IMPORT = re.compile(
    r"(?!TORCHINDUCTOR_CACHE_DIR$)TORCH_?(DYNAMO|INDUCTOR|COMPILE|CACHING|FAKE_TENSOR|FX|LOGS)\w*|TORCH_CPP_LOG_LEVEL"
    r"|TORCH_SHOW_CPP_STACKTRACES"
)
"""Matches environment variables that torch reads only while it is imported.

A forked worker cannot set them, because the fork server has imported torch already.
TORCHINDUCTOR_CACHE_DIR does not match, because torch reads this variable at each use.  torch itself
sets it in a notebook that has compiled something, and this must not prevent forks.
"""


def can_fork_with(environ: Mapping[str, str]) -> bool:
    """Return True if a forked worker can have the environment variables `environ`.

    The variables that torch reads when it is imported (`READ_ON_IMPORT`) must be the same in this
    process, from which the fork server has inherited its environment.
    """
    names = filter(READ_ON_IMPORT.fullmatch, {*os.environ, *environ})
    return all(os.environ.get(name) == environ.get(name) for name in names)


class ForkServerLost(ChildProcessError):
    """The fork server has exited or does not answer; `Forker.prepare` can start a new one."""


class Forker:
    """Starts workers by the fork server, a process that has imported torch and is forked.

    If the fork server has exited, `prepare` starts a new one.
    """

    def __init__(
        self, runtime: Path, children: Children, started: fork_server.ForkServerProcess
    ) -> None:
        self._runtime = runtime
        self._children = children
        self._server: fork_server.ForkServerProcess | None = started
        self._replies = FrameCutter()
        self._imported: asyncio.Future[None]
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[WorkerProcess]] = {}

    def attach(self) -> None:
        """Begin to read the fork server's messages; must be called in the running event loop."""
        if self._server is not None:
            self._listen(self._server)

    def last_lines(self) -> tuple[str, ...]:
        """Return the lines that the fork server has written, such as the error of an import."""
        log = self._runtime / fork_server.LOG
        return tuple(log.read_text(errors="replace").splitlines()) if log.exists() else ()

    async def prepare(self) -> None:
        """Wait until a fork server has imported torch, and start one if necessary.

        Raises ChildProcessError if the fork server cannot be started, exits, or does not answer.
        """
        if self._server is None:
            try:
                self._server = fork_server.start_fork_server(self._runtime)
            except OSError as error:
                raise Lack(word_start_error(error)) from error
            self._listen(self._server)
        imported = self._imported
        await self._wait(imported, FORK_SERVER_IMPORT_TIMEOUT, lambda: not imported.done())
        imported.result()

    async def start(self, start: WorkerStart, stdout: int, stderr: int) -> WorkerProcess:
        """Fork a process that becomes the worker; arguments and errors are as in `Spawner.start`.

        If the fork server is lost, tries once more with a new fork server.
        """
        await self.prepare()
        try:
            return await self._request_fork(start, stdout, stderr)
        except ForkServerLost:
            await self.prepare()
            return await self._request_fork(start, stdout, stderr)

    def close(self) -> None:
        """Kill the fork server; `Children` reaps it."""
        if self._server is not None:
            self._stop_listening(self._server)
            self._kill(self._server)

    async def _request_fork(self, start: WorkerStart, stdout: int, stderr: int) -> WorkerProcess:
        if self._server is None:
            raise ForkServerLost("the fork server has ended")
        number = next(self._numbers)
        forked: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self._pending[number] = forked
        frame = framed(pack(fork_server.Fork(number, start)))
        try:
            if self._server.socket.fileno() >= 0:  # if closed, `_fail_pending` fails the request
                # These calls wait only if the socket's buffer is full, and then only until the fork
                # server reads again, for example after an import.
                sent = socket.send_fds(self._server.socket, [frame], [stdout, stderr])
                self._server.socket.sendall(frame[sent:])
        except ConnectionError:
            pass  # the fork server has exited, and `_fail_pending` fails this request soon
        except OSError as error:
            del self._pending[number]
            raise ChildProcessError(f"its fork server cannot be asked: {error}") from error
        timeout = FORK_SERVER_IMPORT_TIMEOUT if start.world.for_training else FORK_TIMEOUT
        try:
            await self._wait(forked, timeout, lambda: number in self._pending)
        except asyncio.CancelledError:  # the caller has given up, so nobody else kills the worker
            if forked.done() and forked.exception() is None:
                forked.result().kill()
            raise
        finally:
            forked.cancel()  # `_add_worker` kills a worker that is forked after this
        return forked.result()

    async def _wait(
        self, answer: asyncio.Future[Any], timeout: float, is_open: Callable[[], bool]
    ) -> None:
        """Wait for the fork server's answer; kill the fork server if it does not answer in time.

        If `is_open` returns True after `timeout` seconds, the answer is missing and the fork server
        is killed, even if this method has been cancelled.  Later requests then get a new fork
        server.  Raises ForkServerLost if there is no answer `EXIT_TIMEOUT` seconds after `timeout`.
        """
        server = self._server

        def kill_if_open() -> None:
            if server is not None and is_open():
                self._kill(server)

        timer = asyncio.get_running_loop().call_later(timeout, kill_if_open)
        await asyncio.wait([answer], timeout=timeout + EXIT_TIMEOUT)
        if not answer.done():
            raise ForkServerLost("the fork server does not answer")
        timer.cancel()

    def _kill(self, server: fork_server.ForkServerProcess) -> None:
        if server.popen.returncode is None:  # not reaped yet, so the pid is still its own
            os.kill(server.popen.pid, signal.SIGKILL)

    def _listen(self, server: fork_server.ForkServerProcess) -> None:
        loop = asyncio.get_running_loop()
        self._imported, self._replies = loop.create_future(), FrameCutter()
        loop.add_reader(server.socket, self._read, server)
        self._children.expect(server.popen.pid, partial(self._server_exited, server))
        # A worker may exit right after its fork.  Read the fork server's `Forked` message before
        # children are reaped, so that `Children` expects the worker and reports its exit.
        self._children.before_reap = partial(self._read, server)

    def _read(self, server: fork_server.ForkServerProcess) -> None:
        try:
            data = server.socket.recv(fork_server.REQUEST_READ_SIZE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:  # the fork server exited before it had read a request
            data = b""
        for frame in self._replies.feed(data):
            self._receive(unpack(frame))
        if not data:
            # The other end of the socket is closed, so no further answer can come.
            self._stop_listening(server)
            self._fail_pending(server)

    def _stop_listening(self, server: fork_server.ForkServerProcess) -> None:
        if server.socket.fileno() >= 0:
            self._children.before_reap = lambda: None
            asyncio.get_running_loop().remove_reader(server.socket)
            server.socket.close()

    def _receive(self, message: fork_server.FromForkServer) -> None:
        match message:
            case fork_server.Imported():
                self._imported.set_result(None)
            case fork_server.Forked(number, pid):
                self._add_worker(number, pid)
            case fork_server.ForkFailed(number, code):
                self._fail_request(number, Lack(word_lack(code)))

    def _add_worker(self, number: int, pid: int) -> None:
        process = WorkerProcess(pid)
        self._children.expect(pid, process.set_exited)
        future = self._pending.pop(number)
        if future.done():  # the caller has given up meanwhile
            process.kill()
        else:
            future.set_result(process)

    def _fail_request(self, number: int, error: ChildProcessError) -> None:
        future = self._pending.pop(number)
        if not future.done():
            future.set_exception(error)

    def _server_exited(self, server: fork_server.ForkServerProcess, exit_code: int) -> None:
        server.popen.returncode = exit_code
        self._fail_pending(server)

    def _fail_pending(self, server: fork_server.ForkServerProcess) -> None:
        """Fail all pending requests, once the fork server has exited and its answers are read."""
        code = server.popen.returncode
        if code is None or server.socket.fileno() >= 0:
            return
        self._server = None
        error = ForkServerLost(f"the fork server has ended: it {word_exit(code)}")
        if not self._imported.done():
            self._imported.set_exception(error)
            self._imported.exception()  # avoids asyncio's warning if nobody calls `prepare`
        for number in list(self._pending):
            self._fail_request(number, error)


ProcessSource = Spawner | Forker
