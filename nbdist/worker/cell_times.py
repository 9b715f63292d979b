"""When this worker's last cell ran, and when its main thread waited for other ranks meanwhile.

`WorkerKernel` begins and ends a cell, the wait for every operation notes itself
(`nbdist.worker.group.gloo.wait`), and `nbdist.tools.timeline_op` reads it.
"""

from __future__ import annotations

import threading
import time
from collections import deque

MOST_WAITS = 4_000
"""Kept one by one, the newest; all are counted."""


class CellTimes:
    """The last cell's, script's or call's; nanoseconds on the clock that all ranks here have."""

    def __init__(self) -> None:
        self.began_ns = self.ended_ns = 0
        self.waits: deque[tuple[int, int]] = deque(maxlen=MOST_WAITS)
        self.count = self.waited_ns = 0
        self._ident = 0

    def __repr__(self) -> str:
        return f"<CellTimes {self.count} waits, {self.waited_ns / 1e9:.3f} s>"

    def __enter__(self) -> None:
        """Have what runs inside be the last cell, on this thread.

        Not a generator's: contextlib sets attributes of what is raised, which a user's class
        can refuse.
        """
        self.waits.clear()
        self.count = self.waited_ns = self.ended_ns = 0
        self._ident = threading.get_ident()
        self.began_ns = time.time_ns()

    def __exit__(self, *_: object) -> None:
        self.ended_ns = time.time_ns()
        self._ident = 0

    def waited(self, since_ns: int) -> None:
        """Note a wait that ends now; of another thread than the cell's not."""
        if threading.get_ident() == self._ident:
            now = time.time_ns()
            self.waits.append((since_ns, now))
            self.count += 1
            self.waited_ns += now - since_ns


CELL_TIMES = CellTimes()
"""The worker's: there is one main thread."""
