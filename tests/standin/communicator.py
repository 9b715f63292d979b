"""The connection of a backend's ranks: a file with the tensors of each rank for each collective.

A collective never ends if another rank does not come, makes another call, or has died, as with
NCCL on one machine.  `abort` ends all collectives.
"""

from __future__ import annotations

import io
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

FIRST_STEP, LONGEST_STEP = 0.0005, 0.02
"""The first and the longest pause between two looks for another rank's tensors, in seconds."""

PATH = "path"  # the key of the file's path in the store
READY = "ready"


class Aborted(Exception):
    """The communicator was aborted meanwhile."""


class Communicator:
    """Connects to all other ranks within the timeout, or to none."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.made = rank, time.monotonic()
        self._over = False
        if rank == 0:
            # In the folder of the stand-in, which is removed by the process that made it.
            folder = os.environ["PYTHONPATH"].partition(os.pathsep)[0]
            store.set(PATH, f"{folder}/communicator-{secrets.token_hex(8)}")
        store.wait([PATH], timeout)
        # Without a number of ranks, the first rank that ends does not remove the file.
        self._given = dist.FileStore(store.get(PATH).decode())
        deadline = self.made + timeout.total_seconds()
        self.exchange(READY, READY, [], range(size), deadline)
        if rank == 0:  # a rank that comes with a used number must meet no rank
            store.delete_key(PATH)

    def exchange(
        self,
        key: str,
        call: str,
        given: Sequence[torch.Tensor],
        wanted: Iterable[int],
        deadline: float = float("inf"),
    ) -> dict[int, list[torch.Tensor]]:
        """Give tensors to the other ranks, and return the `wanted` ranks' tensors for this key.

        Raises TimeoutError, and Aborted.  A rank that makes another call never meets this rank.
        """
        buffer = io.BytesIO()
        torch.save((call, [each.detach().clone() for each in given]), buffer)
        self._given.set(f"{key}/{self.rank}", buffer.getvalue())  # type: ignore[arg-type]
        return {rank: self._of(rank, key, call, deadline) for rank in wanted}

    def abort(self) -> None:
        """End all waits in the communicator, from any thread."""
        self._over = True

    def _of(self, rank: int, key: str, call: str, deadline: float) -> list[torch.Tensor]:
        step, its_call = FIRST_STEP, None
        while not self._over:
            if its_call is None and self._given.check([f"{key}/{rank}"]):
                given = self._given.get(f"{key}/{rank}")
                its_call, tensors = torch.load(io.BytesIO(given))
                if its_call == call:
                    return list(tensors)
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} did not come to {call}")
            time.sleep(step)
            step = min(1.5 * step, LONGEST_STEP)
        raise Aborted
