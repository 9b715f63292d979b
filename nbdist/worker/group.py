"""The process group that all ranks of a world share."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from nbdist.wire.messages import RankStart

FORM_TIMEOUT = 120.0
"""Seconds for all ranks to meet; torch's own default is ten to thirty minutes."""

COLLECTIVE_TIMEOUT = 30 * 60.0
"""Seconds that one collective may take: torch's default for gloo."""


def form_group(orders: RankStart) -> None:
    """Join the world's group, waiting until every rank has.

    The ranks meet in a file that only this user can open: no port, and the store
    outlives rank 0.  Each generation of the group has keys of its own.
    """
    if orders.world.backend is None:
        return
    file_store = FileStore(orders.store_path, orders.world.world_size)
    file_store.set_timeout(timedelta(seconds=FORM_TIMEOUT))
    store = PrefixStore(f"generation{orders.generation}", file_store)
    # init_process_group wraps sys.excepthook each time it is called.
    excepthook = sys.excepthook
    try:
        dist.init_process_group(
            backend=orders.world.backend,
            store=store,
            rank=orders.rank,
            world_size=orders.world.world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT),
        )
    finally:
        sys.excepthook = excepthook
