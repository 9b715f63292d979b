"""The agent's end of the socket by which a worker gets its tasks."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable

from nbdist.wire.tasks import Finished, FrameCutter


class TaskEnds(asyncio.Protocol):
    """Hands on what a worker says of its tasks."""

    def __init__(self, finish: Callable[[Finished], None]) -> None:
        self._finish = finish
        self._cutter = FrameCutter()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        for frame in self._cutter.feed(data):
            self._finish(pickle.loads(frame))
