"""How much memory workers use, told in time however many they are and however big."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

FRESH_SECONDS = 1.0
"""For so long what was found stands: who looks often is not to cost the ranks their time."""


class MemoryGauge:
    """Remembers what it found of each process, for when there is no time to look again.

    Counting pages takes 4 ms for each process of 200 MB, and more for bigger ones.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, float]] = {}
        self._counting: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<MemoryGauge of {sorted(self._found)}>"

    async def read(self, pids: Sequence[int], timeout: float) -> dict[int, int]:
        """Bytes by process: PSS, in which a page that n processes share counts 1/n for each.

        Of those that take too long what it was the last time, else their private pages.
        """
        known, now = list(self._found.items()), time.monotonic()
        self._found = {pid: found for pid, found in known if pid in pids}
        old = [pid for pid in pids if now - self._last(pid)[1] > FRESH_SECONDS]
        if old and (self._counting is None or self._counting.done()):
            loop = asyncio.get_running_loop()
            self._counting = loop.run_in_executor(None, self._count, old, now + timeout)
        if self._counting is not None:
            await asyncio.wait([self._counting], timeout=timeout)
        return {pid: self._last(pid)[0] or _private_memory(pid) for pid in pids}

    def _last(self, pid: int) -> tuple[int, float]:
        """What was found last, and when."""
        return self._found.get(pid, (0, float("-inf")))

    def _count(self, pids: Sequence[int], deadline: float) -> None:
        """In one thread of its own; those never counted come first."""
        for pid in sorted(pids, key=lambda pid: pid in self._found):
            if time.monotonic() > deadline:
                return
            self._found[pid] = _proportional_memory(pid), time.monotonic()


def _proportional_memory(pid: int) -> int:
    """From proc(5), smaps_rollup."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
            for line in rollup:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # it has ended, or the kernel is older than 4.14
    return 0


def _private_memory(pid: int) -> int:
    """Pages that belong to no file and no shared memory (proc(5), statm)."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            _, resident, shared = map(int, statm.read().split()[:3])
    except (OSError, ValueError):
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
