"""The rank's accelerator, of whatever kind; ROCm's are `cuda` to torch.  Run with CUDA alone.

By `torch.accelerator` where torch 2.7 has the function; what is newer there (memory, random
numbers) by the device's own module, which all kinds name alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity


def graph() -> type:
    """Return its class; asked late, as `nbdist doctor` imports this with any torch."""
    return torch.cuda.CUDAGraph


def use(device: torch.device) -> None:
    """Make it this process's current one; RuntimeError where torch cannot use it."""
    torch.accelerator.set_device_index(device)


def synchronize() -> None:
    """Wait for all that runs on it; nothing but its end ends that."""
    torch.accelerator.synchronize()


def is_in_use() -> bool:
    """Return True if this process has a context; looking must not make one."""
    return bool(_module().is_initialized())


def asks_context() -> Callable[[], bool] | None:
    """Return what raises a lasting error, in any thread and at once; None if none is in use."""
    return torch.accelerator.current_stream().query if is_in_use() else None


def nccl_version() -> tuple[int, ...]:
    """Read which NCCL torch brings; makes no context."""
    return torch.cuda.nccl.version()  # type: ignore[no-untyped-call, no-any-return]


def names() -> list[str]:
    """Name those that torch can use; warns, as torch words it, why it cannot, or not well."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return []
    return [_module().get_device_name(n) for n in range(torch.accelerator.device_count())]


# --- memory, in bytes, of an accelerator in use -----------------------------------------------


def index() -> int:
    """Return the number of the current one."""
    return torch.accelerator.current_device_index()


def room() -> tuple[int, int]:
    """Return how much is free of all processes' use, and how much there is."""
    free, total = _module().mem_get_info()
    return free, total


def allocated() -> int:
    """Return what this process's tensors take; 0 if none is in use, as of the next two."""
    return int(_module().memory_allocated()) if is_in_use() else 0


def most_allocated() -> int:
    """Return what they have taken at most."""
    return int(_module().max_memory_allocated()) if is_in_use() else 0


def reserved() -> int:
    """Return that and what torch keeps for the next tensors."""
    return int(_module().memory_reserved()) if is_in_use() else 0


def release_cached() -> None:
    """Release what torch keeps for the next tensors, pinned memory of the CPU too."""
    if not is_in_use():
        return
    _module().empty_cache()
    # CUDA's alone; and what tensors were gathered through, in newer versions of torch.
    for holder, name in ((_module(), "ipc_collect"), (torch.accelerator, "empty_host_cache")):
        getattr(holder, name, lambda: None)()


def random_state() -> torch.Tensor | None:
    """Return its generator's state, None where none is in use."""
    return _module().get_rng_state() if is_in_use() else None


def set_random_state(state: torch.Tensor) -> None:
    """Go on from there, if there is an accelerator."""
    if torch.accelerator.is_available():
        _module().set_rng_state(state)


def profiled() -> list[ProfilerActivity]:
    """Return what a profile can have here; torch's own choice warns without a GPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kinds = ["CPU", *([] if found is None else [found.type.upper()])]
    return [getattr(ProfilerActivity, kind) for kind in kinds]


def _module() -> Any:
    kind = torch.accelerator.current_accelerator()
    return torch.get_device_module("cuda" if kind is None else kind)
