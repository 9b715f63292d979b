"""What nccl needs in place of gloo's broken connections.  Not run on a GPU yet.

Written after torch 2.13's own `_abort_process_group` and `_new_process_group_helper`.  nccl
has an abort: its kernels end, and what waits for their stream goes on, with results that
mean nothing, so the main thread has to be interrupted as well.  torch's own watchdog must
not act (`TORCH_NCCL_ASYNC_ERROR_HANDLING=0`, which workers start with).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup

CUDA = torch.device("cuda")
LAST_TYPE = 255
"""Types of backends from here down, as gloo's go up from the other end."""


def nccl_of(group: ProcessGroup) -> Any:
    """The group's nccl backend, None where it has none."""
    try:
        backend = group._get_backend(CUDA)
    except RuntimeError:
        return None
    return backend if backend.name() == "nccl" else None


def abort(groups: Iterable[ProcessGroup]) -> int:
    """End the collectives of all these groups, from any thread; how many groups had nccl."""
    backends = [backend for group in groups if (backend := nccl_of(group)) is not None]
    if backends:
        # Together: aborts of communicators that depend on each other would wait for ever.
        backends[0]._group_start()
        for backend in backends:
            backend.abort()
        backends[0]._group_end()
    return len(backends)


def renew(
    group: ProcessGroup,
    store: Any,
    rank: int,
    members: Sequence[int],
    generation: int,
    timeout: timedelta,
) -> None:
    """Give the group a new backend in place; its members connect with their first collective."""
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = False
    options._timeout = timeout
    options.group_name = group.group_name
    options.global_ranks_in_group = list(members)
    backend = dist.ProcessGroupNCCL(store, members.index(rank), len(members), options)
    backend._set_sequence_number_for_group()
    group._register_backend(CUDA, ProcessGroup.BackendType(LAST_TYPE - generation), backend)


class UnderWay:
    """Which of nccl's collectives has begun and not ended, by its own Flight Recorder."""

    def __init__(self) -> None:
        self._first = 0

    def __repr__(self) -> str:
        return f"<UnderWay from {self._first}>"

    def last(self) -> str:
        """The name of the one that was begun last, "" for none."""
        entries = [entry for entry in _active() if entry["record_id"] >= self._first]
        return re.sub(r"^\w+:", "", str(entries[-1]["profiling_name"])) if entries else ""

    def start_over(self) -> None:
        """The groups are being formed anew: nothing of what has begun so far is under way."""
        self._first = max((entry["record_id"] + 1 for entry in _active()), default=self._first)


def _active() -> list[dict[str, Any]]:
    dump = c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=True)  # type: ignore[attr-defined]
    entries: list[dict[str, Any]] = json.loads(dump).get("entries", [])
    return entries
