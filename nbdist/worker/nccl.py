"""Which of nccl's collectives is under way, by its own Flight Recorder.  Not run on a GPU yet.

nccl has an abort, in place of gloo's broken connections: its kernels end, and what waits for
their stream goes on, with results that mean nothing, so the main thread has to be
interrupted as well.  torch's own watchdog must not act (`TORCH_NCCL_ASYNC_ERROR_HANDLING=0`,
which workers start with).
"""

from __future__ import annotations

import re

from nbdist.worker.compat import torch as seam


class UnderWay:
    """Of the collectives since the groups were last formed."""

    def __init__(self) -> None:
        self._first = 0

    def __repr__(self) -> str:
        return f"<UnderWay from {self._first}>"

    def last(self) -> str:
        """The name of the one that was begun last, "" for none."""
        entries = [e for e in seam.unfinished_of_nccl() if e["record_id"] >= self._first]
        return re.sub(r"^\w+:", "", str(entries[-1]["profiling_name"])) if entries else ""

    def start_over(self) -> None:
        """The groups are being formed anew: nothing of what has begun so far is under way."""
        entries = seam.unfinished_of_nccl()
        self._first = max((entry["record_id"] + 1 for entry in entries), default=self._first)
