"""What a world's link leads to: this machine's agent, or the head of agents on several."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from nbdist.wire.cgroups import OomKills
from nbdist.wire.child import Child
from nbdist.wire.interpreter import MODULE, safe_environ
from nbdist.wire.prctl import children_of
from nbdist.world.launchers import AGENT


class AgentProcess(Child):
    """A process that connects to `runtime / "notebook.sock"`.

    It ends when its stdin, a pipe of ours, does.  `module` is what it runs, of
    `nbdist.world.launchers`.
    """

    def __init__(self, runtime: Path, module: str = AGENT, *, fork_server: bool = True) -> None:
        command = [sys.executable, *MODULE, module, str(runtime), str(os.getpid())]
        if not fork_server:
            command.append("--no-fork")
        environ = safe_environ(os.environ, os.getcwd())
        super().__init__(socket.gethostname(), command, runtime / "agent.log", environ)
        self._oom_kills = OomKills(self.pid)

    def last_lines(self) -> list[str]:
        """Return the end of its log; where the kernel has killed it for its memory, that too."""
        return [*super().last_lines(), *self._oom_kills.text(self.exit_code() or 0).splitlines()]

    def end(self, timeout: float) -> None:
        """Have it end; by force, a step at a time, each `timeout` seconds after the one before.

        `fileno` stays valid.
        """
        self._end_stdin()
        if self._ends_in(timeout):
            return
        # What was started is the agent's guard, which ends all that a killed agent has left.
        for agent in children_of(self.pid):
            with suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)
        if not self._ends_in(timeout):
            self._process.kill()
            self._ends_in(timeout)
