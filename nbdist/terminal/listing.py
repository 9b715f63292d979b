"""`nbdist ps` and `nbdist kill`: the worlds of this user, and the end of one."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import ExitStack, suppress

from nbdist.errors import UsageError
from nbdist.world.agents import Found, worlds

KILL_TIMEOUT = 10.0
"""Seconds for an agent to end in order, and again after it was killed for what is left."""

HEADINGS = ("name", "pool", "ranks", "state", "cell", "since", "notebook", "process")

LONGEST = {"cell": 40}


def show_worlds() -> int:
    """Print all worlds, a line each; 1 where there is none."""
    found = worlds()
    if not found:
        sys.stdout.write("none of your worlds is running on this machine\n")
        return 1
    rows = [HEADINGS, *(row_of(each) for each in found)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEADINGS))]
    for row in rows:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    return 0


def row_of(found: Found) -> tuple[str, ...]:
    """Write what is said of one world, as `HEADINGS`."""
    held = found.held
    notebook = f"detached since {_clock(held.since)}" if found.is_detached else str(held.notebook)
    cell = held.cell[: LONGEST["cell"]]
    state = (held.name, held.pool, str(held.workers), held.state, cell, _clock(held.began))
    return (*state, notebook, str(found.agent))


def kill_world(name: str) -> int:
    """End a world and all that belongs to it; UsageError where none, or several, are called so."""
    called = [each for each in worlds() if each.is_called(name)]
    if not called:
        raise UsageError(
            f"`nbdist kill {name}`: none of your worlds on this machine has this name."
        )
    if len(called) > 1:
        processes = ", ".join(str(each.agent) for each in called)
        raise UsageError(
            f"`nbdist kill {name}`: {len(called)} worlds have this name. "
            f"Use the number of its process: {processes}."
        )
    (found,) = called
    is_over = end(found.agent, found.held.guard)
    said = "ended" if is_over else "does not end"
    sys.stdout.write(f"{found.name} {said}\n")
    return 0 if is_over else 1


def end(agent: int, guard: int) -> bool:
    """Have an agent end with all that is its own, by force if need be; say whether all has."""
    with ExitStack() as stack:
        try:
            process, last = (_opened(stack, pid) for pid in (agent, guard))
        except ProcessLookupError:
            return True
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, number)
            # The guard ends once nothing is left.
            if select.select([last], [], [], KILL_TIMEOUT)[0]:
                return True
    return False


def _opened(stack: ExitStack, pid: int) -> int:
    process = os.pidfd_open(pid)
    stack.callback(os.close, process)
    return process


def _clock(seconds: float) -> str:
    """Write a time of today as `14:05`, else with its day."""
    at = time.localtime(seconds)
    is_today = at[:3] == time.localtime()[:3]
    return time.strftime("%H:%M" if is_today else "%d %b %H:%M", at)
