"""What the agent and the nursery say to one another, over a socket pair.

The agent sends a `RankStart` with the descriptors for stdout and stderr; the nursery
answers in the order of asking.  Each message is a pickle after its length.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LENGTH = struct.Struct("!I")
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Imported:
    """Nursery to agent, first: it has imported torch and can fork.

    Again when there is nothing `more` that it would import while it is idle.
    """

    more: bool = True


@dataclass(frozen=True, slots=True)
class Forked:
    """Nursery to agent: the worker that was asked for, in the order of asking."""

    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """Nursery to agent: a worker ended; the code is negative for a signal."""

    pid: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class NurseryProcess:
    """A nursery that has been started, and the agent's end of the socket pair."""

    popen: subprocess.Popen[bytes]
    socket: socket.socket
    log: Path


def start_nursery(runtime: Path) -> NurseryProcess:
    """Start it, and return while it imports.

    All that the agent is made of is imported after this: the start of a world waits for
    the nursery's import of torch, and for nothing else as long.
    """
    ours, theirs = socket.socketpair()
    log = runtime / "nursery.log"
    with theirs, log.open("wb") as said:
        popen = subprocess.Popen(
            [sys.executable, "-m", "nbdist.node.nursery", str(theirs.fileno()), str(runtime)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    return NurseryProcess(popen, ours, log)


def adopt_orphans() -> None:
    """Have processes whose parents end become children of this one, so that it can end them."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_group(pid: int) -> None:
    """Kill the process group that a worker leads: itself and what it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
