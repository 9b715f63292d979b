"""Rows of `track`: what a call costs a rank, and what a flood of them costs the notebook."""

from __future__ import annotations

import time
from collections.abc import Iterator

from nbdist.output.bands import curves_text
from nbdist.output.chart import curves_html
from nbdist.world.world import World
from tests.bench.harness import Figure
from tests.bench.lab import Lab

RANKS, CALLS, FLOOD = 4, 50_000, 10_000_000
CALL_BUDGET, NOTEBOOK_BUDGET, PICTURE_BUDGET = 5.0, 5.0, 0.05

LOOP = """
import time
value = {value}
begun = time.thread_time()
for _ in range({calls}): track(loss=value)
took = (time.thread_time() - begun) / {calls} * 1e6
"""

KINDS = {"a float": "0.5", "a tensor": "torch.tensor(0.5)"}


def track(lab: Lab) -> Iterator[Figure]:
    """A call of `track` on a rank, ten million of them from four, and a picture of these."""
    with World(RANKS, log_dir="") as world:
        for what, value in KINDS.items():
            took: list[float] = []
            for _ in range(lab.runs):
                world.execute(LOOP.format(value=value, calls=CALLS))
                took += world.gather("took")
            yield Figure("track", f"track({what}), CPU of a rank", "us", (*took,), CALL_BUDGET)
        begun = time.process_time()
        world.execute(LOOP.format(value="0.5", calls=FLOOD // RANKS))
        seconds = time.process_time() - begun
        what = f"{FLOOD:,} points from {RANKS} ranks, CPU of the notebook"
        yield Figure("track", what, "s", (seconds,), NOTEBOOK_BUDGET)
        curves, took = world.session.curves, []
        for draw in (curves_html, curves_text):
            begun = time.process_time()
            draw(curves)
            took.append(time.process_time() - begun)
        yield Figure("track", "their picture, and their table", "s", (*took,), PICTURE_BUDGET)
