"""The first milliseconds of an agent's process, and a head's: below a guard, beside a fork server.

The process that a launcher starts forks the agent before anything else is imported, and waits for
its end: this is the guard, which stays when the agent is killed, and then ends all that is left.
As a child subreaper it becomes the parent of what the agent leaves behind, workers and what they
started included, wherever these have gone; of a guard that is killed the agent gets a SIGTERM, and
ends in order.  An agent that hangs when its notebook has ended is killed, unless it has said that
it stays.

What is imported here each of them has before it forks.  All else that an agent is made of is
imported once the fork server is started: the start of a world waits for the fork server's import
of torch, and for nothing else as long.  With that it speaks over a socket pair, each message a
pickle in a frame.  The agent sends a `Fork` with the descriptors for stdout and stderr; the new
worker answers itself, before it does anything else, so that none can live unknown.
"""

from __future__ import annotations

import os
import pickle
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nbdist.system.limits import raise_file_limit, word_lack
from nbdist.system.prctl import adopt_orphans, children_of, cpu_seconds, signal_on_parents_end
from nbdist.system.processes import MODULE
from nbdist.wire.frames import framed

if TYPE_CHECKING:
    from nbdist.wire.spec import WorkerStart

END_TIMEOUT, END_STEP = 5.0, 0.005
"""Seconds for killed processes to be gone, and between two looks."""

AGENT_GRACE, AGENT_GRACES = 5.0, 6
"""Seconds for an agent to end by itself when its notebook has; so often while it works on."""

AT_WORK = 0.01
"""The share of a core from which on it does: it may still import, beside others on busy cores."""

STAYS, LEAVES = b"s", b"l"
"""What an agent tells its guard."""

LONGEST_TOLD = 1 << 16
"""Bytes; a pipe holds no more."""


class Guard:
    """The guard as the agent has it."""

    def __init__(self, end: int) -> None:
        self.pid = os.getppid()
        self._end = end

    def __repr__(self) -> str:
        return f"<Guard {self.pid}>"

    def tell(self, *, stays: bool) -> None:
        """Say whether this process is to be left alone when its notebook has ended."""
        with suppress(BrokenPipeError):  # it is being killed, and this process is told so
            os.write(self._end, STAYS if stays else LEAVES)

    def tell_last_word(self, line: bytes) -> None:
        """Leave what is to be said to the head where this process is killed: `last_word`."""
        with suppress(BrokenPipeError):
            os.write(self._end, line)


def go_below_guard(runtime: Path, notebook: int | None, grace: float = 0.0) -> Guard:
    """Fork: the parent becomes the guard and never returns, the child is to be the agent.

    What that leaves behind has `grace` seconds to end by itself, as its stdin has, and as many
    after a SIGTERM; for these the agent itself may wait.
    Raises OSError where there can be no further process.
    """
    guard = os.getpid()
    adopt_orphans()
    told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    agent = os.fork()
    if agent:
        os.close(tell)
        _watch(agent, runtime, notebook, told, grace)
    os.close(told)
    if not signal_on_parents_end(signal.SIGTERM, guard):
        sys.exit(1)
    return Guard(tell)


def end_group(pid: int) -> None:
    """Kill the process group that a worker leads: itself and what it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_descendants() -> None:
    """Kill and reap all that descends from this process, which adopts orphans."""
    await_end(_end_children)


def await_end(have_ended: Callable[[], bool], timeout: float = END_TIMEOUT) -> None:
    """Look until processes have ended, so many seconds at most."""
    deadline = time.monotonic() + timeout
    while not have_ended() and time.monotonic() < deadline:
        time.sleep(END_STEP)


def _reap_children() -> bool:
    """Reap those that have ended; say whether these were all."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _ask_children_to_end() -> None:
    for child in children_of(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGTERM)


def _end_children() -> bool:
    """Reap those that have ended, and kill the others, whose own become this one's children."""
    if _reap_children():
        return True
    for child in children_of(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)
    return False


def _watch(agent: int, runtime: Path, notebook: int | None, told: int, grace: float) -> NoReturn:
    """Wait for the agent, end what it has left, and end as it did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(agent, signal.SIGTERM))
    status, last_word = _wait_for(agent, notebook, told, AGENT_GRACE + 2 * grace)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if grace:
        await_end(_reap_children, grace)
        _ask_children_to_end()
        await_end(_reap_children, grace)
    end_descendants()
    shutil.rmtree(runtime, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        _say(last_word)
        _drop_code()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the agent has left one, if any
        with suppress(OSError):  # it is so already for SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _say(last_word: bytes) -> None:
    """Have the head of a killed agent know."""
    if last_word.endswith(b"\n"):
        from nbdist.cluster.ticket import say_ended

        say_ended(last_word)


def _drop_code() -> None:
    """Remove the notebook's files that a killed agent has left in this machine's /tmp."""
    # Not at the top: there the agent imports next to nothing.
    import tempfile

    from nbdist.agent.code_folder import drop_dead

    with suppress(OSError):
        drop_dead(Path(tempfile.gettempdir()))


def _wait_for(agent: int, notebook: int | None, told: int, grace: float) -> tuple[int, bytes]:
    """Return the agent's status and what it has told; kill it where it hangs after its notebook.

    But not one that stays, as it has said.
    """
    ended, ends = os.pidfd_open(agent), select.poll()
    ends.register(ended, select.POLLIN)
    ends.register(sys.stdin, 0)  # a pipe's hang-up
    try:
        if notebook is not None:
            ends.register(os.pidfd_open(notebook), select.POLLIN)
        ends.poll()
    except ProcessLookupError:
        pass  # it has ended already
    said = _told(told)
    if said[-1:] != STAYS and not _ends(agent, ended, grace):
        os.kill(agent, signal.SIGKILL)
    return os.waitpid(agent, 0)[1], said


def _ends(agent: int, ended: int, grace: float) -> bool:
    """Wait for its end; not for one that does nothing meanwhile, and not for ever."""
    for _ in range(AGENT_GRACES):
        before = cpu_seconds(agent)
        if select.select([ended], [], [], grace)[0]:
            return True
        if cpu_seconds(agent) - before < AT_WORK * grace:
            break
    return False


def _told(told: int) -> bytes:
    """Return what the agent has told; the last is what holds."""
    try:
        return os.read(told, LONGEST_TOLD)
    except BlockingIOError:
        return b""


# --- the fork server --------------------------------------------------------------------------


DESCRIPTORS = 2
"""That come with each `Fork`: the worker's stdout and stderr."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Agent to fork server: fork a worker; what answers it bears the same number."""

    number: int
    start: WorkerStart


@dataclass(frozen=True, slots=True)
class Imported:
    """Fork server to agent, first: it has imported torch and can fork.

    Again when there is nothing `more` that it would import while it is idle.
    """

    more: bool = True


@dataclass(frozen=True, slots=True)
class Forked:
    """Worker to agent, over the fork server's socket: it is the one that was asked for."""

    number: int
    pid: int


@dataclass(frozen=True, slots=True)
class ForkFailed:
    """Fork server to agent: there is no further process, for this errno."""

    number: int
    errno: int


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """Fork server to agent: a worker has ended; the code is negative for a signal."""

    number: int
    pid: int
    exit_code: int


FromForkServer = Imported | Forked | ForkFailed | WorkerExited


def to_frame(message: Fork | FromForkServer) -> bytes:
    """Return the bytes to send."""
    return framed(pickle.dumps(message))


@dataclass(frozen=True, slots=True)
class ForkServerProcess:
    """A fork server that has been started, and the agent's end of the socket pair."""

    popen: subprocess.Popen[bytes]
    socket: socket.socket


def log_file(runtime: Path) -> Path:
    """Name what the fork server itself writes to: why it could not import torch."""
    return runtime / "fork_server.log"


def start_fork_server(runtime: Path) -> ForkServerProcess:
    """Start it, and return while it imports; raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs, log_file(runtime).open("wb") as log:
        end = theirs.fileno()
        popen = subprocess.Popen(
            [sys.executable, *MODULE, "nbdist.agent.fork_server", str(end), str(runtime)],
            pass_fds=[end],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return ForkServerProcess(popen, ours)


# --- the beginning --------------------------------------------------------------------------


def begin(
    runtime: Path, notebook_pid: int | None, *, fork_server: bool, grace: float = 0.0
) -> tuple[Guard, ForkServerProcess | None]:
    """Go on below a guard, as `go_below_guard` says, beside a fork server where there is to be one.

    Ends with one line where the machine has no room for these processes.
    """
    raise_file_limit()
    try:
        guard = go_below_guard(runtime, notebook_pid, grace)
        return guard, start_fork_server(runtime) if fork_server else None
    except OSError as error:
        sys.exit(f"nbdist: {word_lack(error.errno)}")
