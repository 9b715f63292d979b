"""How an agent starts its fork server, and the messages between the two.

Over a socket pair, each message a pickle in a frame.  The agent sends a `Fork` with the
descriptors for stdout and stderr; the new worker answers itself, before it does anything else,
so that none can live unknown.  All else that an agent is made of is imported after this: the
start of a world waits for the fork server's import of torch, and for nothing else as long.
"""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.system.processes import MODULE
from nbdist.wire.frames import framed

if TYPE_CHECKING:
    from nbdist.wire.start import WorkerStart

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
