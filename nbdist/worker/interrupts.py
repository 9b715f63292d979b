"""SIGINT in a worker: for the cell that runs, or for one that is on its way; else for nobody.

Stop can come so soon that the cell has reached the worker's socket and has not been read.  Were
it ignored then, the cell would run on, and the worker be killed for not having stopped.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


class Interrupts:
    """All of it runs on the main thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, has_more: Callable[[], bool]) -> None:
        """`has_more` says whether a cell has been read that has not begun."""
        self._loop = loop
        self._has_more = has_more
        self._is_kept = False
        self.end()

    def __repr__(self) -> str:
        return f"<Interrupts {'one kept' if self._is_kept else 'none'}>"

    def begin(self) -> None:
        """From now on they are for this cell; KeyboardInterrupt where one came before it."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_kept:
            self._is_kept = False
            raise KeyboardInterrupt

    def end(self) -> None:
        """The cell is over."""
        signal.signal(signal.SIGINT, self._keep)

    def _keep(self, *_: object) -> None:
        self._is_kept = True
        # In the turn after the next: what arrived before the signal has been read by then.
        self._loop.call_soon_threadsafe(self._loop.call_soon, self._forget)

    def _forget(self) -> None:
        self._is_kept = self._is_kept and self._has_more()
