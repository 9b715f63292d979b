"""Rows of the Python API: what a program waits for each time it asks something of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from nbdist.world.world import World
from tests.bench.harness import Figure, percentile
from tests.bench.lab import Lab

SIZES = (4, 16)
ROUNDS, WARM_UP = 30, 5
BUDGETS = {"execute": 10.0, "run": 4.0, "gather": 4.0, "status": 10.0}
"""Milliseconds, at n=4."""


def one() -> int:
    """What is called."""
    return 1


def calls(lab: Lab) -> Iterator[Figure]:
    """`execute("pass")`, `run(f)`, `gather("x")` and `status()` of ranks that do nothing else."""
    for ranks in SIZES:
        with World(ranks, log_dir="") as world:
            world.execute("x = 1")
            asks: dict[str, Callable[[], object]] = {
                "execute": lambda world=world: world.execute("pass"),
                "run": lambda world=world: world.run(one),
                "gather": lambda world=world: world.gather("x"),
                "status": lambda world=world: world.status(),
            }
            for name, ask in asks.items():
                values = tuple(_median(ask) for _ in range(lab.runs))
                budget = BUDGETS[name] if ranks == SIZES[0] else None
                yield Figure("calls", f"{name}, n={ranks}, p50", "ms", values, budget)


def _median(ask: Callable[[], object]) -> float:
    for _ in range(WARM_UP):
        ask()
    return percentile([_timed(ask) for _ in range(ROUNDS)], 50)


def _timed(ask: Callable[[], object]) -> float:
    started = time.perf_counter()
    ask()
    return 1000 * (time.perf_counter() - started)
