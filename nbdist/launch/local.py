"""An agent on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from nbdist.wire.interpreter import MODULE, safe_environ
from nbdist.wire.prctl import children_of
from nbdist.world.launchers import AgentProcess

LAST_BYTES = 4096


class LocalAgent:
    """An agent started here: it ends when its stdin, a pipe of ours, does."""

    def __init__(self, runtime: Path, *, fork_server: bool) -> None:
        self.host = socket.gethostname()
        self._log = (runtime / "agent.log").open("w+b")
        command = [sys.executable, *MODULE, "nbdist.node", str(runtime), str(os.getpid())]
        if not fork_server:
            command.append("--no-fork")
        self.command = " ".join(command)
        try:
            # A session of its own: Stop signals the notebook's whole process group.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                env=safe_environ(os.environ, os.getcwd()),
                start_new_session=True,
            )
        except OSError:
            self._log.close()
            raise
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    def __repr__(self) -> str:
        return f"<LocalAgent {self.pid} exit code {self.exit_code()}>"

    def fileno(self) -> int:
        return self._pidfd

    def exit_code(self) -> int | None:
        return self._process.poll()

    def last_lines(self) -> list[str]:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LAST_BYTES))
        return self._log.read().decode(errors="replace").splitlines()

    def end(self, timeout: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._ends_in(timeout):
            return
        # What was started is the agent's guard, which ends all that a killed agent has left.
        for agent in children_of(self.pid):
            with suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)
        if not self._ends_in(timeout):
            self._process.kill()
            self._ends_in(timeout)

    def _ends_in(self, timeout: float) -> bool:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        os.close(self._pidfd)
        self._log.close()


class LocalLauncher:
    """`--launcher local`, the default."""

    def launch(self, runtime: Path, *, fork_server: bool) -> list[AgentProcess]:
        return [LocalAgent(runtime, fork_server=fork_server)]
