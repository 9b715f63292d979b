"""What the kernel says of a process (proc(5)): its state, signals, processor time and memory.

Read by the agent of its workers, which need do nothing for it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

FRESH_SECONDS = 1.0
"""For so long a count of pages stands, and what is private is added to it and taken away."""

LARGEST_SHARE = 0.005
"""Of a core's time that counting pages may take where it is done again and again."""


# --- state and signals ----------------------------------------------------------------------


PF_EXITING = 0x4
"""In a thread's flags (include/linux/sched.h): it is being ended, and runs no more code."""


def thread_state(pid: int) -> str:
    """Return `R`: the main thread runs, `S`: sleeps, `T`: is stopped (proc(5)); `X`: has ended."""
    return _stat(pid)[0]


def is_exiting(pid: int) -> bool:
    """Say whether the kernel is taking the process down, or has, which can take long."""
    stat = _stat(pid)
    return len(stat) <= 6 or bool(int(stat[6]) & PF_EXITING)


def _stat(pid: int) -> list[str]:
    """Read the main thread's `stat` from its state on; that it has ended, if it has."""
    try:
        with open(f"/proc/{pid}/task/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(") ")[2].split()
    except OSError:
        return ["X"]


def is_stopped(pid: int) -> bool:
    """Say whether a signal such as SIGSTOP, or a debugger, has stopped the process."""
    return thread_state(pid) in "Tt"


def ignores(pid: int, number: int) -> bool:
    """Say whether the signal does nothing to the process; one that has ended ignores none."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
            found = next((line for line in status if line.startswith("SigIgn:")), "SigIgn: 0")
        return bool(int(found.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError):
        return False


# --- processor time -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Schedule:
    """Seconds that a thread has run, and has been ready to and has not; how often it has begun."""

    ran: float = 0.0
    waited: float = 0.0
    wakes: int = 0


def schedule(pid: int, tid: int | str) -> Schedule:
    """Read what the kernel has counted (sched-stats.rst); zeros where it does not, as gVisor's."""
    try:
        with open(f"/proc/{pid}/task/{tid}/schedstat", encoding="ascii") as file:
            ran, waited, wakes = map(int, file.read().split())
    except (OSError, ValueError):
        return Schedule()
    return Schedule(ran / 1e9, waited / 1e9, wakes)


class OwnTime:
    """Counts the seconds of a process from now on, without those it has waited for a processor.

    A rank that did nothing for two seconds because eight processes shared two cores has had
    half a second.  Of its threads the one that has waited longest counts: they wait for one
    another, for the GIL or for gloo's loop.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since = time.monotonic()
        self._waits = _waits(pid)

    def __repr__(self) -> str:
        return f"<OwnTime of {self._pid}: {self.seconds():.2f} s>"

    def seconds(self) -> float:
        """Count them; all that pass, where the kernel does not count how long threads wait."""
        passed, now = time.monotonic() - self._since, _waits(self._pid)
        waited = max((now[tid] - self._waits.get(tid, 0.0) for tid in now), default=0.0)
        return max(0.0, passed - waited)


def _waits(pid: int) -> dict[str, float]:
    """Read how long each thread has waited."""
    try:
        tids = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return {}  # it has ended
    return {tid: schedule(pid, tid).waited for tid in tids}


# --- memory ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Count:
    """Bytes of a process, how many of them were private, when, and how long counting took."""

    pss: int = 0
    private: int = 0
    at: float = float("-inf")
    seconds: float = 0.0


class MemoryGauge:
    """Remembers what it found of each process, for when there is no time to look again.

    Counting pages takes 6 ms for each process of 200 MB, and 15 ms more for each GB; to read
    how many pages are private takes 0.02 ms.
    """

    def __init__(self) -> None:
        self._found: dict[int, _Count] = {}
        self._counting: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<MemoryGauge of {sorted(self._found)}>"

    async def read(
        self, pids: Sequence[int], timeout: float, fresh: float = FRESH_SECONDS
    ) -> dict[int, int]:
        """Return bytes by process: PSS, in which a page that n processes share counts 1/n for each.

        Of those that take too long, or were counted less than `fresh` seconds ago, what it was
        the last time, with what is private by now; else their private pages.
        """
        known, now = list(self._found.items()), time.monotonic()
        self._found = {pid: found for pid, found in known if pid in pids}
        old = [pid for pid in pids if now - self._last(pid).at > fresh]
        if old and (self._counting is None or self._counting.done()):
            loop = asyncio.get_running_loop()
            with suppress(RuntimeError):  # no further thread can be started
                self._counting = loop.run_in_executor(None, self._count, old, now + timeout)
        if self._counting is not None:
            await asyncio.wait([self._counting], timeout=timeout)
        return {pid: self._now(pid) for pid in pids}

    @property
    def fresh_seconds(self) -> float:
        """For how long counts have to stand so that they take no more than `LARGEST_SHARE`."""
        cost = sum(found.seconds for found in [*self._found.values()])
        return max(FRESH_SECONDS, cost / LARGEST_SHARE)

    def _now(self, pid: int) -> int:
        last, private = self._last(pid), _private_memory(pid)
        return last.pss + max(private - last.private, -last.pss) if private else 0

    def _last(self, pid: int) -> _Count:
        """Return what was found last."""
        return self._found.get(pid, _Count())

    def _count(self, pids: Sequence[int], deadline: float) -> None:
        """Count in one thread of its own; those never counted come first."""
        for pid in sorted(pids, key=lambda pid: pid in self._found):
            if time.monotonic() > deadline:
                return
            began, private = time.thread_time(), _private_memory(pid)
            pss = _proportional_memory(pid) or private
            took = time.thread_time() - began
            self._found[pid] = _Count(pss, private, time.monotonic(), took)


def _proportional_memory(pid: int) -> int:
    """Read it from proc(5), smaps_rollup."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
            for line in rollup:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # it has ended, or the kernel is older than 4.14
    return 0


def _private_memory(pid: int) -> int:
    """Read the pages that belong to no file and no shared memory (proc(5), statm)."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            _, resident, shared = map(int, statm.read().split()[:3])
    except (OSError, ValueError):
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def trim_memory() -> None:
    """Give back to the machine what the C library keeps of freed memory, where it is glibc."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
