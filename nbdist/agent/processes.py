"""The agent's side of worker processes: how they are started, and how it learns of their ends.

`nbdist.agent.forker` forks them, the `Spawner` here starts interpreters.  Both give a
`WorkerProcess`; nothing else in the house knows which it was.
"""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, Protocol

from nbdist.agent.startup import await_end, end_group
from nbdist.system import prctl
from nbdist.system.limits import word_lack
from nbdist.system.proc import OwnTime
from nbdist.system.processes import safe_environ
from nbdist.wire.spec import WorkerStart, WorldSpec

LONGEST_EXIT, EXIT_STEP = 10.0, 0.05
"""Seconds, however long it waited for a processor; less than a notebook waits for its agent."""

OnExit = Callable[[int], None]


class Children:
    """The agent's children: reaps each as it ends, and reports the exits that are expected.

    On the running loop, from `attach` to `close`.  Orphans of user code, which the agent
    adopts, are reaped in silence.
    """

    def __init__(self) -> None:
        self._expected: dict[int, OnExit] = {}

    def __repr__(self) -> str:
        return f"<Children {sorted(self._expected)}>"

    def attach(self) -> None:
        """Begin to reap."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def expect(self, pid: int, on_exit: OnExit) -> None:
        """Call this with the exit code, negative for a signal, when that child has ended.

        It may be one that has yet to be adopted: see `adopted`.
        """
        self._expected[pid] = on_exit
        # It may have ended before SIGCHLD had a handler.
        asyncio.get_running_loop().call_soon(self._reap)

    def forget(self, pid: int) -> None:
        """Expect it no more: its end has been reported by its parent."""
        self._expected.pop(pid, None)

    def adopted(self, pid: int) -> None:
        """Take over one whose parent has ended, so that it is a child of this process.

        If it has ended too, and the parent had reaped it, it was killed as far as is known.
        """
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            if on_exit := self._expected.pop(pid, None):
                on_exit(-signal.SIGKILL)

    def kill(self, pid: int) -> None:
        """Kill it and wait for it; its exit code is not reported."""
        self.forget(pid)
        os.kill(pid, signal.SIGKILL)
        await_end(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0))

    def close(self) -> None:
        """Kill and reap all that are expected."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        for pid in self._expected:
            end_group(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await_end(self._have_ended)

    def _have_ended(self) -> bool:
        self._reap()
        return not self._expected

    def _reap(self) -> None:
        with suppress(ChildProcessError):  # there are none
            while child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self._reap_one(child.si_pid)

    def _reap_one(self, pid: int) -> None:
        on_exit = self._expected.pop(pid, None)
        if on_exit is not None:
            # Before it is reaped: until then no other group can have its number.
            end_group(pid)
        _, status = os.waitpid(pid, 0)
        if on_exit is not None:
            on_exit(os.waitstatus_to_exitcode(status))


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

    def kill(self) -> None:
        """Kill it and what it started, also before it leads a group."""
        self.send_signal(signal.SIGKILL)
        if not self.exited.done():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def exit_within(self, seconds: float) -> None:
        """Wait for its end, at most so many seconds of its own (`OwnTime`), and `LONGEST_EXIT`."""
        loop, own = asyncio.get_running_loop(), OwnTime(self.pid)
        end = loop.time() + max(seconds, LONGEST_EXIT)
        while not self.exited.done():
            left = min(seconds - own.seconds(), end - loop.time())
            if left <= 0:
                break
            await asyncio.wait([self.exited], timeout=max(left, EXIT_STEP))

    def set_exited(self, exit_code: int) -> None:
        """Note its end; called once by the source that started it."""
        if not self.exited.done():
            self.exited.set_result(exit_code)


class ProcessSource(Protocol):
    """Starts worker processes."""

    def last_lines(self) -> tuple[str, ...]:
        """Return what the source itself has written: why it could start none."""

    async def prepare(self) -> None:
        """Be ready to start some, which can take as long as torch's import.

        Raises ChildProcessError when there is no way to be.
        """

    async def start(self, start: WorkerStart, stdout: int, stderr: int) -> WorkerProcess:
        """Start a process that becomes the worker; it gets copies of the descriptors.

        Raises ChildProcessError when there is no way to start one.
        """


class Spawner:
    """Starts each worker as a new interpreter: slower, and free of all that fork inherits."""

    def __init__(self, children: Children) -> None:
        self._children = children

    def last_lines(self) -> tuple[str, ...]:
        return ()

    async def prepare(self) -> None:
        """Do nothing: nothing has to be there."""

    async def start(self, start: WorkerStart, stdout: int, stderr: int) -> WorkerProcess:
        environ = {**start.world.environ, **start.environ}
        try:
            with _file_of(start) as stdin:
                child = subprocess.Popen(  # noqa: ASYNC220 (its pid is needed at once)
                    command_of(start.world, environ.get("PATH")),
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    env=safe_environ(environ, start.world.cwd),
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


def _file_of(start: WorkerStart) -> BinaryIO:
    """Make a file to read it from; a pipe could be full before anything is read."""
    file = os.fdopen(os.memfd_create("nbdist-start"), "w+b")
    pickle.dump(start, file)
    file.seek(0)
    return file


def command_of(spec: WorldSpec, path: str | None) -> list[str]:
    """Return the command line of a spawned worker; what wraps it is made to die with this process.

    Raises FileNotFoundError when the wrapper is not there.
    """
    if not spec.wrap:
        return [*spec.command]
    wrapper = shutil.which(spec.wrap[0], path=path)
    if wrapper is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return [sys.executable, "-IS", prctl.__file__, wrapper, *spec.command[1:]]
