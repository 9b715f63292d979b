"""What stays when the agent is killed: the process above it, which then ends all that is left.

The process that a launcher starts forks the agent in its first milliseconds, before
anything is imported, and waits for its end.  As a child subreaper it becomes the parent of
whatever the agent leaves behind, workers and what they started included, wherever these
have gone; of a guard that is killed the agent hears by SIGTERM, and ends in order.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from nbdist.wire.prctl import adopt_orphans, signal_on_parents_end

END_TIMEOUT, END_STEP = 5.0, 0.005
"""Seconds for killed processes to be gone, and between two looks."""


def go_below_guard(runtime: Path) -> None:
    """Fork: the parent becomes the guard and never returns, the child is to be the agent.

    Raises OSError where there can be no further process.
    """
    guard = os.getpid()
    adopt_orphans()
    agent = os.fork()
    if agent:
        _watch(agent, runtime)
    if not signal_on_parents_end(signal.SIGTERM, guard):
        sys.exit(1)


def end_group(pid: int) -> None:
    """Kill the process group that a worker leads: itself and what it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_descendants() -> None:
    """Kill and reap all that descends from this process, which adopts orphans."""
    deadline = time.monotonic() + END_TIMEOUT
    while _has_children() and time.monotonic() < deadline:
        import psutil  # rarely needed, and the guard has next to nothing else

        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(END_STEP)


def _has_children() -> bool:
    """Reaps those that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _watch(agent: int, runtime: Path) -> NoReturn:
    """Wait for the agent, end what it has left, and end as it did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(agent, signal.SIGTERM))
    pid = 0
    while pid != agent:
        pid, status = os.waitpid(-1, 0)
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
