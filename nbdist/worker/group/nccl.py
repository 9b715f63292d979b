"""How nccl's backends connect, and which of their collectives is under way.  Not run on a GPU yet.

nccl has an abort, in place of gloo's broken connections: its kernels end, and what waits for
their stream goes on, with results that mean nothing, so the main thread has to be
interrupted as well.  torch's own watchdog must not act (`TORCH_NCCL_ASYNC_ERROR_HANDLING=0`,
which workers start with).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nbdist.worker.compat import torch as seam
from nbdist.worker.group.store import until_over

START_TIMEOUT, RENEWAL_TIMEOUT = 100.0, 25.0
"""Seconds for all ranks to connect: agents wait 180 s for a start, and 30 s for healing."""


def connect(backend: Any, device: torch.device, timeout: float, over: Path | None = None) -> None:
    """Have all ranks connect, all at once; raises as `until_over` does.

    With the first collective instead, ranks that wait for one that has failed before it
    could not be aborted.
    """
    until_over(lambda: seam.connect_nccl(backend, device), "connecting nccl", timeout, over)


@dataclass(frozen=True, slots=True)
class Pending:
    """What nccl has begun and not ended: how many collectives, and the newest one.

    `number` counts over all groups, 0 where there is none; `name` is "" then.
    """

    count: int = 0
    number: int = 0
    name: str = ""


class UnderWay:
    """Of the collectives since the groups were last formed."""

    def __init__(self) -> None:
        self._first = 0

    def __repr__(self) -> str:
        return f"<UnderWay from {self._first}>"

    def pending(self) -> Pending:
        """Say what is under way now, on the GPU or waiting there for its turn."""
        entries = [e for e in seam.unfinished_of_nccl() if e["record_id"] >= self._first]
        if not entries:
            return Pending()
        newest = max(entries, key=lambda entry: int(entry["record_id"]))
        name = re.sub(r"^\w+:", "", str(newest["profiling_name"]))
        return Pending(len(entries), int(newest["record_id"]) + 1, name)

    def start_over(self) -> None:
        """Forget what has begun so far: the groups are being formed anew."""
        self._first = max(self._first, self.pending().number)
