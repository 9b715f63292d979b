"""Processes of our own: how interpreters are started, and what is kept of one that was.

No interpreter looks into the notebook's folder for what it imports: `random.py` there is a file
of the user's, and not Python's module.  Next to nothing is imported here, because the agent has
this before it starts the fork server.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

MODULE = ("-P", "-m")
"""Options before a module to run; with `-P` the working directory is not on `sys.path`."""

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def agent_command(python: str | None, number: int = -1) -> list[str]:
    """Return the command that runs an agent; `number` is the node's, where one is known."""
    node = [] if number < 0 else ["--node", str(number)]
    return [python or sys.executable, *MODULE, "nbdist.agent", "--ticket", *node]


def safe_path(environ: Mapping[str, str], folder: str) -> str:
    """Take from PYTHONPATH what leads to this working directory: it, "", and relative entries.

    An entry that nbdist itself was imported from stays.
    """
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    unsafe = {os.path.realpath(folder)} - {_ROOT}
    return os.pathsep.join(
        each for each in entries if os.path.isabs(each) and os.path.realpath(each) not in unsafe
    )


def safe_environ(environ: Mapping[str, str], folder: str) -> dict[str, str]:
    """Make the environment of an interpreter that will have this working directory."""
    rest = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    path = safe_path(environ, folder)
    return {**rest, "PYTHONPATH": path} if path else rest


# --- a process that connects to this one ------------------------------------------------------


LAST_BYTES = 4096

LEFT = "nbdist left behind: "
"""Begins a line of a log that says what its process could not end."""


def last_lines_of(log: BinaryIO) -> list[str]:
    """Return the end of a log that is open."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_BYTES))
    return log.read().decode(errors="replace").splitlines()


class Child:
    """A command that runs here, in a session of its own; `host` is where its work is done."""

    def __init__(
        self, host: str, command: Sequence[str], log: Path, environ: Mapping[str, str] | None
    ) -> None:
        """Raises OSError where it cannot be started."""
        self.host = host
        self.command = shlex.join(command)
        self._log = log.open("w+b")
        try:
            # A session of its own: Stop signals the notebook's whole process group.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                env=environ,
                start_new_session=True,
            )
        except OSError:
            self._log.close()
            raise
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.pid} exit code {self.exit_code()}>"

    def fileno(self) -> int:
        """Return a descriptor that turns readable when it has ended."""
        return self._pidfd

    def exit_code(self) -> int | None:
        """Return how it ended; None while it runs."""
        return self._process.poll()

    def last_lines(self) -> list[str]:
        """Return the end of what it wrote to its log."""
        return last_lines_of(self._log)

    def close(self) -> None:
        """Let go of all descriptors; of stdin too, after which most of them end."""
        self._end_stdin()
        if self._process.poll() is None:
            # It outlives this process, and is not to be taken for forgotten.
            self._process.returncode = 0
        os.close(self._pidfd)
        self._log.close()

    def _end_stdin(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has not read all of it
            self._process.stdin.close()

    def _ends_in(self, timeout: float) -> bool:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True


def left_behind(lines: Sequence[str]) -> str:
    """Return what a log says last that could not be ended, "" for nothing."""
    return next((line.removeprefix(LEFT) for line in [*lines][::-1] if line.startswith(LEFT)), "")
