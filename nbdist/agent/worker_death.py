"""Collects why a worker has exited: a kill by the agent, lack of memory, or an error of gloo.

Runs in the agent; `nbdist.agent.worker.Worker` makes a `WorkerDeath` for its worker.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time

from nbdist.output.events import Died
from nbdist.system.limits import OomKills

COUNT_AFTER = 0.05
"""Seconds into a task until OOM kills are counted.

A count takes 0.4 ms for each rank, which would delay short tasks."""
TOO_MUCH = re.compile(r"gloo/\S*pair\.cc:\d+\] op\.preamble\.length <= op\.nbytes")
"""Matches what gloo writes when it ends a rank that has received more than fits in its tensor."""


class WorkerDeath:
    """What the agent knows about the death of a worker: facts from before, and then its `Died`."""

    def __init__(self) -> None:
        self.is_killed = False
        """Whether the agent has killed the worker, though its process may still exist."""
        self.died: Died | None = None  # the worker's last output, once the worker has exited
        self._kill_reason = ""
        self._oom_kills: OomKills | None = None  # None before the first count
        self._count_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<WorkerDeath killed={self.is_killed} {self._kill_reason!r} {self.died}>"

    def record_kill(self, why: str) -> None:
        """Record that the agent kills the worker; the first `why` that is not "" counts."""
        self.is_killed, self._kill_reason = True, self._kill_reason or why

    def count_oom_kills(self, pid: int) -> None:
        """Record how often Linux has killed a process for lack of memory so far.

        If the number is larger when the worker `pid` has died, lack of memory is the likely reason.
        """
        self._oom_kills = OomKills(pid)

    def count_oom_kills_soon(self, pid: int) -> None:
        """Count OOM kills after `COUNT_AFTER`, unless `cancel_count` is called before."""
        loop = asyncio.get_running_loop()
        self._count_timer = loop.call_later(COUNT_AFTER, self.count_oom_kills, pid)

    def cancel_count(self) -> None:
        """Cancel a count that is due; the caller does this when a task ends or the worker stops."""
        if self._count_timer is not None:
            self._count_timer.cancel()

    def oom_text(self, exit_code: int) -> str:
        """Return a line which says that memory was short; "" if another reason is more likely."""
        if self._oom_kills is None or self.is_killed:
            return ""
        return self._oom_kills.text(exit_code)

    def record_exit(self, exit_code: int, pid: int, last_lines: tuple[str, ...]) -> Died:
        """Record that the worker has exited, and return the output that says so."""
        has_aborted = exit_code == -signal.SIGABRT
        self.died = Died(
            exit_code,
            time.time_ns(),
            pid,
            last_lines,
            self._kill_reason,
            received_too_much=has_aborted and any(map(TOO_MUCH.search, last_lines)),
        )
        return self.died
