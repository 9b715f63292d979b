"""Models on a group whose collectives were broken open, or that has ended; or restored ones."""

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

_given_layouts: WeakKeyDictionary[Any, list[list[int]]] = WeakKeyDictionary()
"""Of restored modules, which keep them; DDP's log has only what it found out itself."""


def forget_broken_off_steps() -> None:
    """Have DDP and FSDP2 forget a forward or backward that was broken off; on all ranks.

    DDP would take the next backward for a second of the same iteration, and its buckets would
    differ over the ranks; FSDP2 keeps parameters gathered on some ranks and not on others.
    FSDP2 can be told so from torch 2.13 on (`FSDPModule.reset_iter_state`).
    """
    for model in ddp_models():
        model._update_process_group(model.process_group)
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for module in models_of(fsdp) if fsdp else ():
        if hasattr(module, "reset_iter_state"):
            _reset(module)


def move_models(before: ProcessGroup, after: ProcessGroup) -> None:
    """Have DDP modules on the one group go on with the other, the default group."""
    for model in ddp_models():
        if model.process_group is before:
            _begin_anew(model, after)


def begin_models_anew() -> None:
    """Have DDP modules be as those that have just come from another rank; on all ranks."""
    default = dist.group.WORLD
    for model in ddp_models():
        if default is not None and model.process_group is default:
            _begin_anew(model, default)


def ddp_models() -> Iterator[Any]:
    """Those of DDP; not one whose `__init__` failed and that a traceback keeps alive."""
    return (model for model in models_of(DistributedDataParallel) if "reducer" in vars(model))


def models_of(kind: type) -> Iterator[Any]:
    """All modules of this kind that there are."""
    for found in gc.get_objects():
        if issubclass(type(found), kind):
            yield found


def _begin_anew(model: Any, group: ProcessGroup) -> None:
    """Give it a reducer as it has after unpickling, where others get a copy of it.

    `_update_process_group` would do, were it not for the buckets: those of a model that has
    run are in the order in which its gradients came, of one that has not in another, and
    ranks would add up what does not belong together.
    """
    model.process_group = group
    if model.device_ids:
        # A copy from another rank still says which was that one's GPU.
        model.device = next(model.parameters()).device
        model.device_ids, model.output_device = [model.device.index], model.device.index
    state = model.__getstate__()
    # First, or each parameter would have two that wait for its gradient.
    del model.reducer, model.logger
    model.__setstate__(state)
    if model.static_graph:
        # Its first step finds out in which order gradients come; torch forgets to say so.
        model._static_graph_delay_allreduce_enqueued = False
    for hook, argument in getattr(model, "_comm_hooks", ()):
        dist._register_comm_hook(model.reducer, argument, hook)  # type: ignore[attr-defined]


def _reset(module: Any) -> None:
    # Only the root module can; what it still waited for has failed.
    if module._get_fsdp_state()._is_root:
        with suppress(RuntimeError):
            module.reset_iter_state()


def bucket_layout(net: Any) -> list[list[int]]:
    """The parameters in each of DDP's buckets, by number; empty before it has ordered them.

    DDP does so in its second iteration.  In which bucket, and where in it, a gradient lies
    decides about the last bits of its sum over three ranks or more.
    """
    told = net._get_ddp_logging_data()
    if not told.get("has_rebuilt_buckets"):
        return _given_layouts.get(net, [])
    buckets = str(told.get("rebuilt_per_bucket_param_indices", "")).split(",")
    return [[int(number) for number in bucket.split()] for bucket in buckets]


def set_bucket_layout(net: Any, layout: list[list[int]]) -> None:
    """Have a DDP module that came out of a pickle reduce its gradients in these buckets."""
    parameters, are_sparse = net._build_params_for_reducer()
    if sorted(number for bucket in layout for number in bucket) != [*range(len(parameters))]:
        return
    names = net._build_debug_param_to_name_mapping(parameters)
    torch_dist: Any = dist
    compute = torch_dist._compute_bucket_assignment_by_size
    # The caller turns both round.
    given = layout[::-1], [net.bucket_bytes_cap] * len(layout)
    torch_dist._compute_bucket_assignment_by_size = lambda *_: given
    try:
        net._ddp_init_helper(parameters, are_sparse, names, net.static_graph)
    finally:
        torch_dist._compute_bucket_assignment_by_size = compute
    if net.static_graph:
        net.reducer._set_static_graph()
        net.logger._set_static_graph()
    _given_layouts[net] = layout
