"""What the workers of a machine use, told every few seconds while any of them runs a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nbdist.node.gpus import GpuGauge
from nbdist.system.proc import MemoryGauge
from nbdist.wire.messages import Used
from nbdist.wire.places import Gpu, Usage

if TYPE_CHECKING:
    from nbdist.agent.worker import Worker

FIRST_AFTER = 1.0
"""Seconds into a task: shorter ones cost nothing."""

EVERY = 2.0
COUNT_TIMEOUT = 1.0
FEWEST_SECONDS = 10.0
"""For so long at least a count of pages stands; what is private is read each time."""


class UsageWatch:
    """Reads it, on a timer of the agent's loop, and has it sent."""

    def __init__(self, gauge: MemoryGauge, send: Callable[[Used], None]) -> None:
        self._gauge = gauge
        self._gpus = GpuGauge()
        self._send = send
        self._reading: asyncio.Future[dict[str, Gpu]] | None = None
        self.is_on = False

    def __repr__(self) -> str:
        return f"<UsageWatch {'on' if self.is_on else 'off'}>"

    async def watch(self, busy: Callable[[], Sequence[Worker]]) -> None:
        """Tell what those use that are busy, until none is."""
        self.is_on = True
        try:
            await asyncio.sleep(FIRST_AFTER)
            while workers := busy():
                self._send(Used(await self.read(workers)))
                await asyncio.sleep(EVERY)
        finally:
            self.is_on = False

    @property
    def fresh_seconds(self) -> float:
        """For how long a count of pages stands where it is asked for again and again."""
        return max(FEWEST_SECONDS, self._gauge.fresh_seconds)

    async def read(self, workers: Sequence[Worker]) -> dict[int, Usage]:
        """Return what they use, by rank."""
        pids = {worker.rank: worker.pid for worker in workers}
        memory = await self._gauge.read([*pids.values()], COUNT_TIMEOUT, self.fresh_seconds)
        gpus = await self.gpus(workers, COUNT_TIMEOUT)
        return {rank: Usage(memory[pid], gpus.get(rank)) for rank, pid in pids.items()}

    async def gpus(self, workers: Sequence[Worker], timeout: float) -> dict[int, Gpu]:
        """Return the GPUs of those that have one of which anything is known, in time."""
        named = {worker.rank: worker.gpu for worker in workers if worker.gpu}
        if not named:
            return {}
        loop = asyncio.get_running_loop()
        if self._reading is None or self._reading.done():
            names, environ = [*named.values()], workers[0].environ
            self._reading = loop.run_in_executor(None, self._gpus.read, names, environ)
        await asyncio.wait([self._reading], timeout=timeout)
        found = self._reading.result() if self._reading.done() else {}
        return {rank: found[name] for rank, name in named.items() if name in found}

    def close(self) -> None:
        """Let go of the driver."""
        self._gpus.close()
