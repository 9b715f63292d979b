"""What connects the ranks of a backend: a file in which each leaves what it gives to a collective.

A collective that the others do not come to, or come to with another one, never ends; nor does
one with a rank that has died, as with NCCL on one machine.  `abort` ends them all.
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
"""Seconds between two looks whether another rank has come."""

PATH = "path"  # the key of the file's in the store where ranks meet
READY = "ready"


class Aborted(Exception):
    """The communicator was aborted meanwhile."""


class Communicator:
    """Connects to the others, all or none, within the time."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.made = rank, time.monotonic()
        self._over = False
        if rank == 0:
            # In the folder where the stand-in was found, which goes with what has made it.
            folder = os.environ["PYTHONPATH"].partition(os.pathsep)[0]
            store.set(PATH, f"{folder}/communicator-{secrets.token_hex(8)}")
        store.wait([PATH], timeout)
        # Without a number of ranks it is not removed with the first one that ends.
        self._given = dist.FileStore(store.get(PATH).decode())
        deadline = self.made + timeout.total_seconds()
        self.exchange(READY, READY, [], range(size), deadline)
        if rank == 0:  # who comes under a number that was used is to meet nobody
            store.delete_key(PATH)

    def exchange(
        self,
        key: str,
        call: str,
        given: Sequence[torch.Tensor],
        wanted: Iterable[int],
        deadline: float = float("inf"),
    ) -> dict[int, list[torch.Tensor]]:
        """Give this to the other ranks, and return what the wanted ones give under the same key.

        Raises TimeoutError, and Aborted.  Who gives to another call never meets this rank.
        """
        buffer = io.BytesIO()
        torch.save((call, [each.detach().clone() for each in given]), buffer)
        self._given.set(f"{key}/{self.rank}", buffer.getvalue())  # type: ignore[arg-type]
        return {rank: self._of(rank, key, call, deadline) for rank in wanted}

    def abort(self) -> None:
        """End all that waits in it, from any thread."""
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
