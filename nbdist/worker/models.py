"""Models that were built on a group whose collectives were broken open."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from typing import Any

from torch.nn.parallel import DistributedDataParallel


def forget_broken_off_steps() -> None:
    """Have DDP and FSDP2 forget a forward or backward that was broken off; on all ranks.

    DDP would take the next backward for a second of the same iteration, and its buckets would
    differ over the ranks; FSDP2 keeps parameters gathered on some ranks and not on others.
    FSDP2 can be told so from torch 2.13 on (`FSDPModule.reset_iter_state`).
    """
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for found in gc.get_objects():
        kind = type(found)
        if kind is DistributedDataParallel:
            found._update_process_group(found.process_group)
        elif issubclass(kind, fsdp) and hasattr(found, "reset_iter_state"):
            _reset(found)


def _reset(module: Any) -> None:
    # Only the root module can; what it still waited for has failed.
    if module._get_fsdp_state()._is_root:
        with suppress(RuntimeError):
            module.reset_iter_state()
