"""What the workers of a machine use: read of the kernel and of NVIDIA's driver.

It is told every few seconds while any of them runs a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nbdist.system.proc import MemoryGauge
from nbdist.wire.messages import Used
from nbdist.wire.views import Gpu, Usage

if TYPE_CHECKING:
    from nbdist.agent.worker import Worker


class GpuGauge:
    """Reads GPUs by the names that CUDA_VISIBLE_DEVICES has for them."""

    def __init__(self) -> None:
        self._nvml: ModuleType | None = None
        self._is_open: bool | None = None
        self._handles: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<GpuGauge {sorted(self._handles)}>"

    def read(self, names: Iterable[str], environ: Mapping[str, str]) -> dict[str, Gpu]:
        """Return what is known of these; takes a millisecond each, and the first time more."""
        wanted = sorted({*names})
        if not wanted or not self._open():
            return {}
        found = {}
        for name in wanted:
            try:
                found[name] = self._gpu(self._handle(name, environ))
            except (self._nvml.NVMLError, LookupError):  # type: ignore[union-attr]
                continue
        return found

    def close(self) -> None:
        """Let go of the driver."""
        if self._is_open and self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._is_open = False

    def _open(self) -> bool:
        if self._is_open is None:
            self._is_open = False
            try:
                import pynvml
            except ImportError:
                return False
            self._nvml = pynvml
            try:
                pynvml.nvmlInit()
                self._is_open = True
            except pynvml.NVMLError:
                pass  # there is no driver
        return self._is_open

    def _handle(self, name: str, environ: Mapping[str, str]) -> Any:
        """Find the device; LookupError where it is not known which one CUDA means."""
        if name not in self._handles:
            self._handles[name] = self._find(name, environ)
        return self._handles[name]

    def _find(self, name: str, environ: Mapping[str, str]) -> Any:
        nvml: Any = self._nvml
        if name.startswith("MIG-"):
            return nvml.nvmlDeviceGetHandleByUUID(name)
        every = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        if not name.isdigit():  # the beginning of an UUID is enough for CUDA
            return next(
                (each for each in every if _text(nvml.nvmlDeviceGetUUID(each)).startswith(name)),
                None,
            ) or _unknown(name)
        # CUDA counts the fastest first, unless told otherwise; the driver by their places.
        in_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        if in_order or len({_text(nvml.nvmlDeviceGetName(each)) for each in every}) == 1:
            return every[int(name)]
        return _unknown(name)

    def _gpu(self, handle: Any) -> Gpu:
        nvml: Any = self._nvml
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        try:
            busy = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except nvml.NVMLError:  # a slice of a GPU counts no time
            busy = None
        return Gpu(int(memory.used), int(memory.total), busy)


def _text(said: str | bytes) -> str:
    return said.decode() if isinstance(said, bytes) else said


def _unknown(name: str) -> Any:
    raise LookupError(name)


# --- telling it -------------------------------------------------------------------------------


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
