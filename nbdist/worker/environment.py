"""torchrun's variables and the names that every worker's namespace starts with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nbdist.wire.messages import RankStart


def device_of(orders: RankStart) -> torch.device:
    """The rank's own GPU, or the CPU where the world uses none."""
    if orders.world.gpus:
        return torch.device("cuda", orders.local_rank)
    return torch.device("cpu")


def prepare_torch(orders: RankStart) -> None:
    """Give torch its share of the cores and the rank's GPU.

    A forked worker's OpenMP read OMP_NUM_THREADS long ago, in the nursery.
    """
    torch.set_num_threads(orders.world.threads)
    device = device_of(orders)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def ready_names(orders: RankStart) -> dict[str, Any]:
    """What a cell finds without importing anything."""
    return {
        "rank": orders.rank,
        "world_size": orders.world.world_size,
        "local_rank": orders.local_rank,
        "device": device_of(orders),
        "torch": torch,
        "dist": dist,
    }
