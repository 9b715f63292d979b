"""What stays when the agent is killed: the process above it, which then ends all that is left.

The process that a launcher starts forks the agent in its first milliseconds, before
anything is imported, and waits for its end.  As a child subreaper it becomes the parent of
what the agent leaves behind, workers and what they started included, wherever these
have gone; of a guard that is killed the agent gets a SIGTERM, and ends in order.  An agent
that hangs when its notebook has ended is killed, unless it has said that it stays.
"""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from nbdist.system.prctl import adopt_orphans, children_of, cpu_seconds, signal_on_parents_end

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
