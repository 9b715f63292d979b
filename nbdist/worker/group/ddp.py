"""Models on a group whose collectives were aborted, or that has ended; or restored ones."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from nbdist.worker.compat import models as seam

_given_layouts: WeakKeyDictionary[Any, list[list[int]]] = WeakKeyDictionary()
"""Of restored modules, which keep them; DDP's log has only what it found out itself."""


def forget_broken_off_steps() -> None:
    """Have DDP and FSDP2 forget a forward or backward that was broken off; on all ranks.

    DDP would take the next backward for a second of the same iteration, and its buckets would
    differ over the ranks; FSDP2 keeps parameters gathered on some ranks and not on others.
    FSDP2 has a way to do so from torch 2.13 on (`FSDPModule.reset_iter_state`).
    """
    for model in ddp_models():
        seam.forget_ddp_step(model)
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for module in models_of(fsdp) if fsdp else ():
        with suppress(RuntimeError):  # what it still waited for has failed
            seam.forget_fsdp_step(module)


def move_models(before: ProcessGroup, after: ProcessGroup) -> None:
    """Have DDP modules on the one group go on with the other, the default group.

    Another group for the reducer that they have would do, were it not for the buckets: those
    of a model that has run are in the order in which its gradients came, of one that has not
    in another, and ranks would add up what does not belong together.
    """
    for model in ddp_models():
        if model.process_group is before:
            seam.give_reducer_anew(model, after)


def begin_models_anew() -> None:
    """Have DDP modules be as those that have just come from another rank; on all ranks."""
    default = dist.group.WORLD
    for model in ddp_models():
        if default is not None and model.process_group is default:
            seam.give_reducer_anew(model, default)


def ddp_models() -> Iterator[Any]:
    """Give those of DDP; not one whose `__init__` failed and that a traceback keeps alive."""
    return (model for model in models_of(DistributedDataParallel) if "reducer" in vars(model))


def models_of(kind: type) -> Iterator[Any]:
    """Give all modules of this kind that there are."""
    for found in gc.get_objects():
        if issubclass(type(found), kind):
            yield found


def bucket_layout(net: Any) -> list[list[int]]:
    """Give the parameters in each of DDP's buckets, by number; none before it has ordered them.

    DDP does so in its second iteration.  In which bucket, and where in it, a gradient lies
    decides about the last bits of its sum over three ranks or more.
    """
    found = seam.buckets_of(net)
    return _given_layouts.get(net, []) if found is None else found


def set_bucket_layout(net: Any, layout: list[list[int]]) -> None:
    """Have a DDP module that came out of a pickle reduce its gradients in these buckets."""
    if seam.set_buckets(net, layout):
        _given_layouts[net] = layout
