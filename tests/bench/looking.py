"""Rows of what is told of ranks that are at it: `%dist_status` and `%dist_stack`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from nbdist.world.world import World
from tests.bench.harness import Figure
from tests.bench.lab import Lab

RANKS = 16
SETTLE_SECONDS = 1.0
STATUS_BUDGET, STACKS_BUDGET = 0.2, 1.0

SITUATIONS = {
    "all in a collective": "import time\nif rank == 0: time.sleep({seconds})\ndist.barrier()",
    "one holds the GIL": "import ctypes\nif rank == 1: ctypes.PyDLL(None).sleep({seconds})",
    "all in Python code": (
        "import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    ),
}


def look(lab: Lab) -> Iterator[Figure]:
    """What ranks do, asked while they do it: state of each, and stacks; n=4 and 16."""
    for ranks in (4, RANKS):
        with World(ranks, log_dir="") as world:
            for what, source in SITUATIONS.items():
                seconds = int(SETTLE_SECONDS + 1 + lab.runs)
                running = world.submit(world.task(source.format(seconds=seconds)))
                settled = time.monotonic() + SETTLE_SECONDS
                while time.monotonic() < settled:
                    world.session.receive(0.1)
                status = tuple(_timed(world.status) for _ in range(lab.runs))
                yield Figure("look", f"status, {what}, n={ranks}", "s", status, STATUS_BUDGET)
                stacks = tuple(_timed(world.stacks) for _ in range(lab.runs))
                yield Figure("look", f"stacks, {what}, n={ranks}", "s", stacks, STACKS_BUDGET)
                world.session.wait(running)


def _timed(ask: Callable[[], object]) -> float:
    asked = time.perf_counter()
    ask()
    return time.perf_counter() - asked
