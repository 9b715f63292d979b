"""Functions that use private names of `torch.nn.Module`, DDP, FSDP2 and device meshes.

Code that runs in workers calls these functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

COMPOSED = "__composable_api_state_key"  # the prefix of attributes that `fully_shard` sets


def parts_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's layers, parameters and buffers by name; `attributes` is its `__dict__`."""
    tables = [attributes.get(name, {}) for name in ("_parameters", "_buffers", "_modules")]
    return {name: part for table in tables for name, part in {**table}.items()}


def compiles_hooks(model: Any) -> bool:
    """Return True if `model.compile()` was called, which compiles the model's hooks, too."""
    return getattr(model, "_compiled_call_impl", None) is not None


def compiled_in(model: Any) -> Any:
    """Return the module inside of `model`, if `torch.compile` has made `model`; else None."""
    return getattr(model, "_orig_mod", None)


# --- DDP --------------------------------------------------------------------------------------


def reset_ddp_step(model: Any) -> None:
    """Make a DDP module forget an interrupted iteration, and choose its buckets anew."""
    model._update_process_group(model.process_group)


def renew_reducer(model: Any, group: ProcessGroup) -> None:
    """Give a DDP module a new reducer, which reduces gradients in this group."""
    model.process_group = group
    if model.device_ids:
        # Set the number of this rank's GPU. A model that was copied from another rank still has the
        # number of the other rank's GPU.
        model.device = next(model.parameters()).device
        model.device_ids, model.output_device = [model.device.index], model.device.index
    state = model.__getstate__()
    # Delete the old reducer first, or two reducers would wait for each parameter's gradient.
    del model.reducer, model.logger
    model.__setstate__(state)
    if model.static_graph:
        # With a static graph the first step finds out the order of gradients. Make the next step a
        # first step again, which unpickling does not do.
        model._static_graph_delay_allreduce_enqueued = False
    for hook, argument in getattr(model, "_comm_hooks", ()):
        dist._register_comm_hook(model.reducer, argument, hook)  # type: ignore[attr-defined]


def buckets_of(model: Any) -> list[list[int]] | None:
    """Return the buckets in which DDP reduces gradients, each as a list of numbers of parameters.

    Return None until DDP has chosen its final buckets, in the first step.
    """
    logged = model._get_ddp_logging_data()
    if not logged.get("has_rebuilt_buckets"):
        return None
    buckets = str(logged.get("rebuilt_per_bucket_param_indices", "")).split(",")
    return [[int(number) for number in bucket.split()] for bucket in buckets]


def set_buckets(model: Any, buckets: Sequence[Sequence[int]]) -> bool:
    """Make a DDP module reduce gradients in these buckets, and return True.

    Each bucket is a list of numbers of parameters. Do nothing and return False if the buckets do
    not fit the module's parameters.
    """
    parameters, are_sparse = model._build_params_for_reducer()
    if sorted(number for bucket in buckets for number in bucket) != [*range(len(parameters))]:
        return False
    names = model._build_debug_param_to_name_mapping(parameters)
    torch_dist: Any = dist
    compute = torch_dist._compute_bucket_assignment_by_size
    # Replace torch's function that computes buckets by one that returns the given buckets. Reverse
    # both lists, because the caller of that function reverses them.
    given = [*map(list, buckets)][::-1], [model.bucket_bytes_cap] * len(buckets)
    torch_dist._compute_bucket_assignment_by_size = lambda *_: given
    try:
        model._ddp_init_helper(parameters, are_sparse, names, model.static_graph)
    finally:
        torch_dist._compute_bucket_assignment_by_size = compute
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    return True


# --- FSDP2 and meshes -------------------------------------------------------------------------


def reset_fsdp_step(module: Any) -> None:
    """Make a root FSDP2 module forget an interrupted iteration.

    Do nothing if another FSDP2 module contains the module, if its forward was never called, or
    before torch 2.13.
    """
    if hasattr(module, "reset_iter_state") and module._get_fsdp_state()._is_root:
        module.reset_iter_state()


def root_of(mesh: Any) -> Any:
    """Return the whole mesh of which `mesh` is a part; a whole mesh itself is returned."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh  # up to torch 2.9

    return device_mesh._mesh_resources.get_root_mesh(mesh)


def is_of_fsdp(module: Any) -> bool:
    """Return True if `fully_shard` was called on this module or a module that contains it."""
    return "_is_fsdp_managed_module" in vars(module)


def class_before_fsdp(kind: type) -> type:
    """Return the class that a module had before `fully_shard`."""
    return kind.__mro__[2]  # [0] is the class that `fully_shard` has made, [1] is FSDPModule


def without_fsdp(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's state without the attributes and hooks that `fully_shard` has added.

    The parameters in the state stay sharded.
    """
    names = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
    state = {k: v for k, v in state.items() if k not in names and not k.startswith(COMPOSED)}
    hooks = {name: each for name, each in state.items() if "_hooks" in name and each}
    every = [(number, hook) for each in hooks.values() for number, hook in each.items()]
    modules = [(n, getattr(getattr(hook, "func", hook), "__module__", None)) for n, hook in every]
    added = {n for n, module in modules if (module or "").startswith("torch.distributed.fsdp.")}
    kept = {
        name: type(each)((number, hook) for number, hook in each.items() if number not in added)
        for name, each in hooks.items()
    }
    return state | kept


def sharding_of(module: Any) -> tuple[int, Any, dict[str, Any], dict[str, Any]]:
    """Return how an FSDP2 module was sharded: (id of the call, mesh, options, settings).

    Modules that were sharded by the same call of `fully_shard` have the same id. The options are
    arguments of that call. The settings are flags and numbers that can be set on the module later,
    with their present values. If the module has no parameters of its own, the mesh is that of an
    inner module, or None.
    """
    state = module._get_fsdp_state()
    inside = [group for inner in module.modules() for group in _fsdp_groups(inner)]
    options = {"mp_policy": state._mp_policy}
    settings: dict[str, Any] = {}
    # Return `reshard_after_forward` only if the user has given a value. If not, the present value
    # may be FSDP2's own, because the first forward of a root module sets it to False.
    is_given = not getattr(state, "_auto_reshard_after_forward", False)
    for group in _fsdp_groups(module):
        options |= {"offload_policy": group.offload_policy}
        if is_given:
            after, size = group.post_forward_mesh_info, group.mesh_info.shard_mesh_size
            to = after.shard_mesh_size if after else 0
            options |= {"reshard_after_forward": to if 0 < to < size else bool(to)}
        named = {k: v for k, v in vars(group).items() if not k.startswith("_")}
        settings = {k: v for k, v in named.items() if isinstance(v, bool | int | float)}
    return id(state), inside[0].mesh_info.mesh if inside else None, options, settings


def set_on_fsdp(module: Any, settings: Mapping[str, Any]) -> None:
    """Set on an FSDP2 module the settings that `sharding_of` has returned."""
    for group in _fsdp_groups(module):
        vars(group).update(settings)


def sharding_problem(module: Any) -> str:
    """Return why the result of `sharding_of` cannot restore an FSDP2 module; "" if it can."""
    from torch.distributed._composable.contract import _get_registry

    groups, state = _fsdp_groups(module), _fsdp_state(module)
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    if {*(_get_registry(module) or {})} - {"fully_shard"}:
        return "it is of replicate or checkpoint"
    if len(groups) > 1 or any(parameter.is_dtensor for parameter in parameters):
        return "its parameters are on several meshes"
    if any(getattr(group, "_all_reduce_hook", None) for group in groups):
        return "it has a hook in its all_reduce"
    names = ("_all_gather_comm", "_reduce_scatter_comm")
    comms = [vars(group).get(name) for group in groups for name in names]
    if any(each and not type(each).__module__.startswith("torch.") for each in comms):
        return "it has communication of its own"
    if any(p.mp_policy.param_dtype != state._mp_policy.param_dtype for p in parameters):
        return "its parameters are cast to several dtypes"
    if state and getattr(state._state_ctx, "manual_backward_finalization", False):
        return "its backward is finalized by a call"
    gathered = [getattr(parameter, "_unsharded_param", None) for parameter in parameters]
    grads = [getattr(parameter, "grad", None) for parameter in gathered]
    grads += [parameter.unsharded_accumulated_grad for parameter in parameters]
    if any(grad is not None for grad in grads):
        return "it has gradients that were not reduced yet"
    return ""


def _fsdp_state(module: Any) -> Any:
    return module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None


def _fsdp_groups(module: Any) -> list[Any]:
    if (state := _fsdp_state(module)) is None:
        return []
    if hasattr(state, "_fsdp_param_groups"):
        return [*state._fsdp_param_groups]
    return [group for group in [state._fsdp_param_group] if group]  # before torch 2.12
