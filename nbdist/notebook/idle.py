"""Lets IPython's own thread notice what happens to the workers while no cell runs."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.world.link import Link


class IdleWatch:
    """Has the event loop that runs the notebook's cells call `notice` when a worker has died.

    A loop that runs between cells is what an ipykernel has; a terminal has none, and hears
    of it with its next cell.
    """

    def __init__(self, notice: Callable[[], None]) -> None:
        self._notice = notice
        self._link: Link | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deaths = -1

    def __repr__(self) -> str:
        return f"<IdleWatch of {self._link}>"

    def follow(self, link: Link | None) -> None:
        """Watch this link from now on, and none that was watched before."""
        if link is self._link:
            return
        self.stop()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if link is None or threading.current_thread() is not threading.main_thread():
            return
        # A descriptor of our own, which stays ours when the link is closed.
        self._link, self._loop, self._deaths = link, loop, os.dup(link.deaths)
        # In no cell's context: what is shown belongs to the cell that ran last, not to this one.
        contextvars.Context().run(loop.add_reader, self._deaths, self._wake)

    def stop(self) -> None:
        """Watch nothing."""
        if self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._deaths)
            os.close(self._deaths)
        self._link = self._loop = None

    def _wake(self) -> None:
        is_closed = False
        with suppress(BlockingIOError):  # heard already
            is_closed = os.read(self._deaths, 4096) == b""
        if is_closed:
            self.stop()
        self._notice()
