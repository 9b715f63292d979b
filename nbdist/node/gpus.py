"""What GPUs are used for, from NVIDIA's driver: memory, and the time in which they are at work.

By `nvidia-ml-py`, the extra `gpu`; without it, or without a driver, nothing is known.  Makes no
CUDA context.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from nbdist.wire.places import Gpu


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
