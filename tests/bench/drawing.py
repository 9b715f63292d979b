"""A row of text: what a flood of it costs a real page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import WebSocket

from tests.bench.harness import Figure
from tests.bench.lab import Lab
from tests.browser.conftest import Notebook, in_folder, jupyterlab

PAGE_RANKS = (8, 64)
FLOOD_SECONDS = 10.0
FLOOD_LINES = 1_000
WALL_BUDGET = 1.2 * FLOOD_SECONDS
MEGABYTES_BUDGETS = {8: 0.6, 64: 1.6}
BLOCKED_BUDGET = 100.0

START = "%load_ext nbdist\n%dist_init -n {ranks}"
FLOOD = f"""%%distributed
import time
start = time.monotonic()
for number in range({FLOOD_LINES}):
    print(f"\\x1b[32mstep\\x1b[0m {{number}} of rank \\x1b[1m{{rank}}\\x1b[0m")
    time.sleep(max(0.0, start + number * {FLOOD_SECONDS / FLOOD_LINES} - time.monotonic()))"""

# The longest time in which the page could do nothing else, in milliseconds.
WATCH = """() => {
    window.nbdistBlocked = 0;
    new PerformanceObserver(list => {
        for (const task of list.getEntries())
            window.nbdistBlocked = Math.max(window.nbdistBlocked, task.duration);
    }).observe({type: "longtask"});
}"""


class Traffic:
    """Counts the bytes that a page gets over web sockets."""

    def __init__(self) -> None:
        self.bytes = 0

    def listen(self, socket: WebSocket) -> None:
        """Count what this one brings."""
        socket.on("framereceived", self._count)

    def _count(self, payload: bytes | str) -> None:
        self.bytes += len(payload)


def page(lab: Lab) -> Iterator[Figure]:
    """Ranks print 1,000 lines each in 10 s: time, traffic, and how long the page stands still."""
    for ranks in PAGE_RANKS:
        with lab.new_folder() as folder, _page(folder, ranks) as (notebook, traffic):
            runs = [_run(notebook, traffic) for _ in range(lab.runs)]
        wall, megabytes, blocked = zip(*runs, strict=True)
        what = f"{ranks} ranks x {FLOOD_LINES:,} lines in {FLOOD_SECONDS:.0f} s"
        yield Figure("page", f"{what}: wall", "s", wall, WALL_BUDGET)
        yield Figure("page", f"{what}: web socket", "MB", megabytes, MEGABYTES_BUDGETS[ranks])
        yield Figure("page", f"{what}: page blocked", "ms", blocked, BLOCKED_BUDGET)


@contextmanager
def _page(folder: Path, ranks: int) -> Iterator[tuple[Notebook, Traffic]]:
    runtime = folder / "run"
    runtime.mkdir(mode=0o700)
    own = {"XDG_RUNTIME_DIR": str(runtime), "NBDIST_LOG_DIR": ""}
    with jupyterlab(folder, **own) as all_of_it, in_folder(all_of_it, "flood") as lab:
        lab.write("flood.ipynb", [START.format(ranks=ranks), FLOOD])
        notebook, traffic = lab.open("flood.ipynb"), Traffic()
        notebook.page.on("websocket", traffic.listen)
        notebook.page.reload()
        notebook.wait_until_ready()
        _run_cell(notebook, 0)
        yield notebook, traffic


def _run(notebook: Notebook, traffic: Traffic) -> tuple[float, float, float]:
    notebook.page.evaluate(WATCH)
    before, begun = traffic.bytes, time.monotonic()
    _run_cell(notebook, 1)
    seconds = time.monotonic() - begun
    blocked = notebook.page.evaluate("window.nbdistBlocked")
    return seconds, (traffic.bytes - before) / 1e6, blocked


def _run_cell(notebook: Notebook, index: int) -> None:
    notebook.start(index)
    notebook.ended()
