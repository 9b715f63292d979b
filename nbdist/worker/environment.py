"""torchrun's variables and the names that every worker's namespace starts with."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from nbdist.wire.environ import sharing_variables
from nbdist.wire.messages import RankStart
from nbdist.worker.compat import torch as seam


def device_of(orders: RankStart) -> torch.device:
    """The rank's own GPU, or the CPU where the world uses none."""
    return torch.device(orders.device)


def prepare_torch(orders: RankStart) -> None:
    """Give torch its share of the cores and the rank's GPU.

    What a forked worker's torch and OpenMP read on import, they read in the nursery, which
    does not have the world's environment: OMP_NUM_THREADS, TORCH_DISTRIBUTED_DEBUG.
    """
    torch.set_num_threads(orders.world.threads)
    seam.read_debug_level()
    device = device_of(orders)
    if device.type == "cuda":
        if orders.world.share_gpus:
            version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # needs no CUDA
            os.environ.update(sharing_variables(orders.rank, version, os.environ))
        torch.cuda.set_device(device)


def count_restarts(done: int, most: int) -> None:
    """How often the cell that begins has been run before; each cell counts anew."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(done)
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = str(most)


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
