"""What stays when the agent is killed: the process above it, which then ends all that is left.

The process that a launcher starts forks the agent in its first milliseconds, before
anything is imported, and waits for its end.  As a child subreaper it becomes the parent of
what the agent leaves behind, workers and what they started included, wherever these
have gone; of a guard that is killed the agent gets a SIGTERM, and ends in order.  An agent
that hangs when its notebook has ended is killed.
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

from nbdist.wire.prctl import adopt_orphans, children_of, signal_on_parents_end

END_TIMEOUT, END_STEP = 5.0, 0.005
"""Seconds for killed processes to be gone, and between two looks."""

AGENT_GRACE = 5.0
"""Seconds for an agent to end by itself when its notebook has."""


def go_below_guard(runtime: Path, notebook: int) -> None:
    """Fork: the parent becomes the guard and never returns, the child is to be the agent.

    Raises OSError where there can be no further process.
    """
    guard = os.getpid()
    adopt_orphans()
    agent = os.fork()
    if agent:
        _watch(agent, runtime, notebook)
    if not signal_on_parents_end(signal.SIGTERM, guard):
        sys.exit(1)


def end_group(pid: int) -> None:
    """Kill the process group that a worker leads: itself and what it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_descendants() -> None:
    """Kill and reap all that descends from this process, which adopts orphans."""
    await_end(_end_children)


def await_end(have_ended: Callable[[], bool]) -> None:
    """Look until killed processes have ended, `END_TIMEOUT` seconds at most."""
    deadline = time.monotonic() + END_TIMEOUT
    while not have_ended() and time.monotonic() < deadline:
        time.sleep(END_STEP)


def _end_children() -> bool:
    """Reap those that have ended, and kill the others, whose own become this one's children."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    for child in children_of(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)
    return False


def _watch(agent: int, runtime: Path, notebook: int) -> NoReturn:
    """Wait for the agent, end what it has left, and end as it did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(agent, signal.SIGTERM))
    status = _wait_for(agent, notebook)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_descendants()
    shutil.rmtree(runtime, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the agent has left one, if any
        with suppress(OSError):  # it is so already for SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _wait_for(agent: int, notebook: int) -> int:
    """Return the agent's status; kill it where it hangs `AGENT_GRACE` after its notebook's end."""
    ended, ends = os.pidfd_open(agent), select.poll()
    ends.register(ended, select.POLLIN)
    ends.register(sys.stdin, 0)  # a pipe's hang-up
    try:
        ends.register(os.pidfd_open(notebook), select.POLLIN)
        ends.poll()
    except ProcessLookupError:
        pass  # it has ended already
    if not select.select([ended], [], [], AGENT_GRACE)[0]:
        os.kill(agent, signal.SIGKILL)
    return os.waitpid(agent, 0)[1]
