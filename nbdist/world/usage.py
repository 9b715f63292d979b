"""How it is said what workers use: `cpu 1.9 GiB · gpu 61/80 GiB · 97 %`.  Pure."""

from __future__ import annotations

from collections.abc import Collection

from nbdist.wire.places import Gpu, Usage
from nbdist.words import size_range

GIB = 2**30


def usage_text(used: Collection[Usage]) -> str:
    """Say it of all ranks, from which to which where they differ; "" where nothing is known."""
    memory = [each.memory for each in used if each.memory]
    parts = [f"cpu {size_range(memory)}"] if memory else []
    if gpus := [each.gpu for each in used if each.gpu]:
        parts.append(f"gpu {gpu_memory_text(gpus)}")
        if busy := [gpu.busy for gpu in gpus if gpu.busy is not None]:
            parts.append(f"{_range(busy)} %")
    return " · ".join(parts)


def gpu_memory_text(gpus: Collection[Gpu]) -> str:
    """Write `61/80 GiB`, `3.5-12/80 GiB`: used of total."""
    used, total = ([getattr(gpu, name) / GIB for gpu in gpus] for name in ("used", "total"))
    return f"{_range(used)}/{_range(total)} GiB"


def _range(numbers: Collection[float]) -> str:
    low, high = (f"{x:.0f}" if x >= 10 else f"{x:.2g}" for x in (min(numbers), max(numbers)))
    return high if low == high else f"{low}-{high}"
