"""The end of a link that another process has started: an agent, or a head, that is there."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path

from nbdist.wire.at_door import Admitted
from nbdist.wire.child import last_lines_of
from nbdist.world.registry import Asking, Found


class AttachedAgent:
    """An agent that another process has started: it is this one's while a connection lasts."""

    def __init__(self, found: Found, asking: Asking, admitted: Admitted) -> None:
        self.host = found.held.host
        self.pid = admitted.agent
        self.command = f"the agent of world {found.name}"
        self._asking = asking
        log = found.folder / "agent.log"
        self._log = (log if log.exists() else Path(os.devnull)).open("rb")  # also once it has gone
        # The guard is the last to end.
        self._guard = os.pidfd_open(admitted.guard)
        self._agent = os.pidfd_open(admitted.agent)

    def __repr__(self) -> str:
        return f"<AttachedAgent {self.pid}>"

    def fileno(self) -> int:
        return self._guard

    def exit_code(self) -> int | None:
        return None  # only a parent learns of it

    def last_lines(self) -> list[str]:
        return last_lines_of(self._log)

    def end(self, timeout: float) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._ends_in(timeout):
                return
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._agent, number)
        self._ends_in(timeout)

    def _ends_in(self, timeout: float) -> bool:
        return bool(select.select([self._guard], [], [], timeout)[0])

    def close(self) -> None:
        self._asking.close()
        self._log.close()
        os.close(self._guard)
        os.close(self._agent)
