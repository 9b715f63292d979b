"""Runs an executable that writes where this worker does."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

import psutil

STOP_GRACE = 1.0
"""Seconds that it has to end after SIGINT, less than this worker itself has."""


def run_executable(file: str, argv: Sequence[str]) -> int:
    """Wait for its end; the exit code, as `subprocess` has it.

    KeyboardInterrupt ends it and all that it has started, politely first: SIGINT went to all
    of this process group already.  Raises OSError when it cannot be run.
    """
    before = _group()
    child = subprocess.Popen(argv, executable=file, stdin=subprocess.DEVNULL)
    try:
        return child.wait()
    except BaseException:  # Stop too: nothing that it has started is left
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(timeout=STOP_GRACE)
        for pid in _group() - before:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()
        raise


def _group() -> set[int]:
    """The processes of this worker's group, itself included."""
    own, found = os.getpgrp(), set()
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == own:
                found.add(pid)
    return found
