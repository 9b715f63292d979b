"""Functions for the rank's accelerator, of any kind that torch supports; tried with CUDA only.

Code that runs in workers uses them. Functions that torch 2.7 has in `torch.accelerator` are called
there. Functions for memory and random numbers are called in the module of the device, such as
`torch.cuda`; they have the same names for all kinds of devices. `graph` and `nccl_version` are for
CUDA only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity


def graph() -> type:
    """Return torch's class of CUDA graphs.

    The class is looked up only by this call: `nbdist doctor` imports this file with any version of
    torch, and not every version has the class.
    """
    return torch.cuda.CUDAGraph


def use(device: torch.device) -> None:
    """Make `device` the calling thread's current one; raise RuntimeError if torch cannot use it."""
    torch.accelerator.set_device_index(device)


def synchronize() -> None:
    """Wait until the accelerator has done this process's work; Stop does not end this wait."""
    torch.accelerator.synchronize()


def is_in_use() -> bool:
    """Return True if this process uses the accelerator, that is, has a context on it.

    The call itself makes no context.
    """
    return bool(_module().is_initialized())


def error_probe() -> Callable[[], bool] | None:
    """Return a function that checks the GPU for an error, or None if no accelerator is in use.

    The function raises RuntimeError if the GPU has failed in such a way that this process cannot
    use it any more. Any thread may call the function; its return value says nothing about errors.
    """
    return torch.accelerator.current_stream().query if is_in_use() else None


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that torch uses; this makes no context."""
    return torch.cuda.nccl.version()  # type: ignore[no-untyped-call, no-any-return]


def names() -> list[str]:
    """Return the names of all accelerators that torch can use.

    While torch looks for accelerators, it prints a warning for each that it cannot use or does not
    fully support.
    """
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return []
    return [_module().get_device_name(n) for n in range(torch.accelerator.device_count())]


# --- memory in bytes, random numbers and the profiler -----------------------------------------


def index() -> int:
    """Return the number of the current accelerator."""
    return torch.accelerator.current_device_index()


def room() -> tuple[int, int]:
    """Return (free, total) memory of the accelerator in bytes.

    Memory is free if neither this process nor any other process uses it.
    """
    free, total = _module().mem_get_info()
    return free, total


def allocated() -> int:
    """Return the bytes of this process's tensors; 0 if the accelerator is not in use."""
    return int(_module().memory_allocated()) if is_in_use() else 0


def peak_allocated() -> int:
    """Return the most bytes that `allocated` has reached; 0 if the accelerator is not in use."""
    return int(_module().max_memory_allocated()) if is_in_use() else 0


def reserved() -> int:
    """Return the bytes of tensors and of torch's cache; 0 if the accelerator is not in use."""
    return int(_module().memory_reserved()) if is_in_use() else 0


def release_cached() -> None:
    """Release memory that torch caches for later tensors; in newer torch also pinned memory."""
    if not is_in_use():
        return
    _module().empty_cache()
    # Only CUDA has `ipc_collect`, and only newer versions of torch have `empty_host_cache`.
    for holder, name in ((_module(), "ipc_collect"), (torch.accelerator, "empty_host_cache")):
        getattr(holder, name, lambda: None)()


def random_state() -> torch.Tensor | None:
    """Return the state of the random generator; None if the accelerator is not in use."""
    return _module().get_rng_state() if is_in_use() else None


def set_random_state(state: torch.Tensor) -> None:
    """Set the state of the random generator; do nothing if there is no accelerator."""
    if torch.accelerator.is_available():
        _module().set_rng_state(state)


def profiled() -> list[ProfilerActivity]:
    """Return the activities that torch's profiler can record in this process.

    By default the profiler would choose CUDA, too, and would warn if there is no GPU.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kinds = ["CPU", *([] if device is None else [device.type.upper()])]
    return [getattr(ProfilerActivity, kind) for kind in kinds]


def _module() -> Any:
    kind = torch.accelerator.current_accelerator()
    return torch.get_device_module("cuda" if kind is None else kind)
