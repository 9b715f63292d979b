"""Private names of torch that nbdist uses, looked up in the installed torch; no GPU is needed.

    python -m tests.matrix.contract

The exit code is 1 if a name has moved, and the output has the name.  Only torch needs to be
installed.  The names are used in `nbdist.worker.compat`.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup, ProcessGroupGloo, device_mesh, distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from nbdist.worker.compat import nccl as nccl_seam
from nbdist.worker.compat import torch as seam
from nbdist.worker.compat.torch import OPERATIONS, VERSION, entries_in, gloo_of

HAS_NCCL = hasattr(c10d, "ProcessGroupNCCL")
TIMEOUT = timedelta(seconds=20)
KEPT: list[Any] = []
"""Objects that ask for a GPU driver when they are deleted."""

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")

RECORDED = (
    *("record_id", "pg_id", "process_group", "collective_seq_id", "profiling_name"),
    *("retired", "state"),
    *("input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "time_created_ns", "is_p2p"),
)
ALL_ENTRIES = True, False
COUNTED = ("last_enqueued_collective", "last_completed_collective")
ON_DEVICE = "is_initialized mem_get_info memory_allocated max_memory_allocated memory_reserved"
HEALING = "bound_device_id supports_reconfigure get_reconfigure_handle reconfigure"


@dataclass(frozen=True)
class Needs:
    """Names that an object of torch has, from a version on and before another."""

    of: str
    """An expression of this module."""
    names: str
    since: tuple[int, int] = (2, 7)
    before: tuple[int, int] = (9, 0)
    nccl: bool = False

    @property
    def hold(self) -> bool:
        return self.since <= VERSION < self.before and (HAS_NCCL or not self.nccl)


NEEDS = (
    Needs("c10d", "FileStore PrefixStore Store TCPStore _register_process_group DebugLevel"),
    Needs("c10d", "get_debug_level set_debug_level set_debug_level_from_env"),
    Needs("c10d._ProcessGroupWrapper", "wrapped_pg"),
    Needs("c10d.DebugLevel", "OFF DETAIL"),
    Needs("c10d", "_dump_fr_trace_json", since=(2, 11)),
    Needs("c10d", "_dump_nccl_trace_json", nccl=True),
    Needs("distributed_c10d", "_update_default_pg _check_valid_timeout _set_pg_timeout"),
    Needs("distributed_c10d", "_process_group_name _new_process_group_helper _get_default_store"),
    Needs("distributed_c10d._world", "pg_map pg_names pg_group_ranks pg_backend_config pg_to_tag"),
    Needs("distributed_c10d._world", "tags_to_pg group_count"),
    Needs("distributed_c10d._world", "pg_flight_recorder_hooks", since=(2, 15)),
    Needs("dist", "_register_comm_hook _compute_bucket_assignment_by_size"),
    Needs("ProcessGroup", "_device_types _get_backend _register_backend BackendType"),
    Needs("ProcessGroup", "_set_group_name _set_group_desc group_name group_desc"),
    Needs("ProcessGroupGloo", "create_device create_default_device options"),
    Needs("ProcessGroupGloo", "_set_sequence_number_for_group name"),
    Needs("ProcessGroupGloo", "_get_sequence_number_for_group"),
    Needs("ProcessGroupGloo", HEALING, since=(2, 14)),
    Needs("ProcessGroupGloo._Options()", "_devices _threads _timeout"),
    Needs("ProcessGroupGloo._Options()", "enable_reconfigure", since=(2, 14)),
    Needs("dist.Work", "wait"),
    Needs("torch.autograd.graph", "_engine_run_backward"),
    Needs("device_mesh._mesh_resources", "get_root_mesh", before=(2, 10)),
    Needs("device_mesh.DeviceMesh", "_get_root_mesh", since=(2, 10)),
    Needs("c10d.ReconfigureOptions()", "uuid handles timeout", since=(2, 14)),
    Needs("c10d._DistributedBackendOptions", "store group_rank group_size timeout group_id"),
    Needs("c10d._DistributedBackendOptions", "global_ranks_in_group"),
    Needs(
        "c10d._DistributedBackendOptions", "split_from enable_reconfigure", since=(2, 14), nccl=True
    ),
    Needs("dist.Backend", "_plugins _ensure_backend_registered", since=(2, 14)),
    Needs("dist.Backend", "XCCL"),
    Needs("torch.accelerator", "set_device_index synchronize current_stream current_device_index"),
    Needs("torch.accelerator", "is_available current_accelerator"),
    Needs("torch.Stream", "query"),
    Needs("torch.cuda.nccl", "version"),
    Needs("torch.cuda", f"{ON_DEVICE} empty_cache get_rng_state set_rng_state ipc_collect"),
    Needs("torch.xpu", f"{ON_DEVICE} empty_cache get_rng_state set_rng_state", since=(2, 13)),
    Needs("c10d.ErrorType", "SUCCESS", nccl=True),
    Needs("c10d.ProcessGroupNCCL", "_group_end abort get_error name options", nccl=True),
    Needs("c10d.ProcessGroupNCCL", "eager_connect_single_device", nccl=True),
    Needs("c10d.ProcessGroupNCCL", "_set_sequence_number_for_group", nccl=True),
    Needs("c10d.ProcessGroupNCCL.Options()", "is_high_priority_stream _timeout", nccl=True),
    Needs("c10d.ProcessGroupNCCL.Options()", "group_name global_ranks_in_group", nccl=True),
    Needs("c10d.ProcessGroupNCCL.Options()", "enable_reconfigure", since=(2, 14), nccl=True),
    Needs("c10d.ProcessGroupNCCL2", f"{HEALING} abort get_error name", since=(2, 14), nccl=True),
)

SINCE_NCCL = (2, 7) if HAS_NCCL else (9, 0)
ARGUMENTS: tuple[tuple[object, str, tuple[int, int], str], ...] = (
    (c10d, "_dump_fr_trace_json", (2, 15), "includeCollectives onlyActive backend"),
    (c10d, "_dump_nccl_trace_json", SINCE_NCCL, "includeCollectives onlyActive"),
    (c10d, "ProcessGroupNCCL.__init__", SINCE_NCCL, "store rank size options"),
    (c10d, "ProcessGroupGloo.__init__", (2, 7), "store rank size options"),
    (c10d, "ProcessGroup._register_backend", (2, 7), "device backend_type backend"),
    (distributed_c10d, "_process_group_name", (2, 7), "ranks use_hashed_name"),
)
"""Arguments that a function takes from a version on."""


def names() -> Iterator[str]:
    """Yield names that are missing, and arguments that their functions do not take."""
    for needs in filter(lambda each: each.hold, NEEDS):
        try:
            holder = eval(needs.of)
        except AttributeError as error:
            yield f"{needs.of}: {error}"
            continue
        yield from (f"{needs.of}.{n}" for n in needs.names.split() if not hasattr(holder, n))
    for holder, name, since, wanted in ARGUMENTS:
        if since <= VERSION:
            yield from _arguments(holder, name, wanted)
    yield from (f"ProcessGroup.{name}" for name in OPERATIONS if not hasattr(ProcessGroup, name))
    for number in (20, 255):
        if int(ProcessGroup.BackendType(number)) != number:
            yield f"ProcessGroup.BackendType({number})"
    if not seam.can_end_receives():
        yield f"{seam.ABORT_RECEIVE} in libtorch_cpu.so"


def _arguments(holder: object, name: str, wanted: str) -> Iterator[str]:
    try:
        function = attrgetter(name)(holder)
    except AttributeError as error:
        yield f"{name}: {error}"
        return
    # A function of pybind11 has its signature in its docstring only.
    try:
        known = " ".join(inspect.signature(function).parameters)
    except ValueError:
        known = function.__doc__ or ""
    yield from (f"{name}({each}=...)" for each in wanted.split() if each not in known)


# --- entries of Flight Recorder ----------------------------------------------------------------


def records() -> Iterator[str]:
    """Yield fields that entries of Flight Recorder lack, those of gloo and those by a hook."""
    if VERSION < (2, 11):
        return
    gloo = ProcessGroupGloo(dist.HashStore(), 0, 1, TIMEOUT)
    gloo.allreduce([torch.ones(2)]).wait()
    yield from _fields("gloo", c10d._dump_fr_trace_json(*ALL_ENTRIES))
    if VERSION < (2, 15):
        return
    group, kind = ProcessGroup(dist.HashStore(), 0, 1), ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)
    group._register_backend(CPU, kind, Hooked(0, 1))
    group._set_group_name("contract")
    group._set_group_desc("contract")
    hook = c10d.FlightRecorderHook.attach(group, [0])
    group.allreduce([torch.ones(2)]).wait()
    yield from _fields("nccl2", c10d._dump_fr_trace_json(*ALL_ENTRIES, "nccl2"))
    hook.remove()


class Hooked(c10d.Backend):
    """A backend with the name of nccl2, under which a hook records, that needs no GPU."""

    def getBackendName(self) -> str:
        return "nccl2"

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        done: Any = torch.futures.Future()
        done.set_result(tensors)
        return c10d._create_work_from_future(done)


def _fields(backend: str, dump: bytes) -> Iterator[str]:
    found = json.loads(dump)
    if not found.get("entries"):
        yield f"Flight Recorder's entries of {backend}"
        return
    if [*entries_in(dump)] != found["entries"][::-1]:
        yield f"{backend}: how entries[] begin, which `entries_in` goes by"
    yield from (f"{backend}: entries[].{n}" for n in RECORDED if n not in found["entries"][-1])
    if found["entries"][-1]["profiling_name"] != f"{backend}:all_reduce":
        yield f"{backend}: entries[].profiling_name is {found['entries'][-1]['profiling_name']}"
    for status in found["pg_status"].values():
        yield from (f"{backend}: pg_status.{n}" for n in COUNTED if n not in status)


# --- the class of "nccl" -----------------------------------------------------------------------


def resolved(name: str = "nccl") -> str:
    """Return the name of torch's function that makes a backend, "" if torch keeps no such name."""
    ensure = getattr(dist.Backend, "_ensure_backend_registered", None)
    if not HAS_NCCL or ensure is None:
        return ""
    ensure(name)
    return str(dist.Backend._plugins[name.upper()].creator_fn.__name__)


def nccl() -> Iterator[str]:
    """Yield how "nccl" differs from the one known for this version, and make a real nccl2."""
    if HAS_NCCL and nccl_seam.open_calls() is None:
        yield f"{nccl_seam.OPEN_CALLS} in libtorch_cuda.so"
    if not HAS_NCCL or VERSION < (2, 14):
        return
    is_new = VERSION >= (2, 15) and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"
    new, legacy = "_create_nccl2_process_group", "_create_nccl_process_group"
    names = {"nccl": new if is_new else legacy, "nccl2": new, "nccl-legacy": legacy}
    for name, wanted in names.items():
        if (found := resolved(name)) != wanted:
            yield f'"{name}" is made by {found}, not by {wanted}'
    seat = nccl_seam.Seat(dist.HashStore(), [0], 0, 1, CUDA)
    KEPT.append(nccl_seam.ADAPTERS["nccl2"].new("stand-in", seat, TIMEOUT))
    if (name := KEPT[0].name()) != "nccl2":
        yield f"what stands in for nccl2 is {name}"
    if is_new:
        yield from _reconfigurable()


def _reconfigurable() -> Iterator[str]:
    """Yield differences in a group as workers form it, with an nccl2 that is not connected."""

    def make(create: Callable[[Any], Any], options: Any) -> Any:
        return create(options)

    nccl_seam.when_nccl2_is_made(make)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    backend = nccl_seam.nccl_of(dist.group.WORLD)
    if backend is None or gloo_of(dist.group.WORLD) is None:
        yield "the name() of nccl's backend, or gloo's, in a group of both"
        return
    backend.bound_device_id = CUDA
    if (name := backend.name()) != "nccl2" or not backend.supports_reconfigure:
        yield f'"nccl" is {name}, supports_reconfigure: {backend.supports_reconfigure}'
    if not backend.get_reconfigure_handle().startswith("nccl2:0:"):
        yield f"get_reconfigure_handle() is {backend.get_reconfigure_handle()}"
    if nccl_seam.adapter_of(backend).error(backend):
        yield f"get_error() of a new one is {nccl_seam.adapter_of(backend).error(backend)}"
    if dist.group.WORLD not in distributed_c10d._world.pg_flight_recorder_hooks:
        yield "pg_flight_recorder_hooks: torch attaches none to a group with nccl2"


# --- DDP and FSDP2 -----------------------------------------------------------------------------


def models() -> Iterator[str]:
    """Yield names that DDP and FSDP2 modules lack after some steps, in a group of this rank."""
    group: Any = dist.group.WORLD
    if group is None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model: Any = DistributedDataParallel(nn.Linear(2, 2))
    _steps(model)
    yield from _lacks("DistributedDataParallel", model, DDP)
    for of in ("reducer", "logger"):
        yield from _lacks(f"DistributedDataParallel.{of}", getattr(model, of), "_set_static_graph")
    logged = model._get_ddp_logging_data()
    for name in ("has_rebuilt_buckets", "rebuilt_per_bucket_param_indices"):
        if name not in logged:
            yield f"_get_ddp_logging_data()[{name}]"
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    yield from _lacks("torch.compile(module)", compiled, "_orig_mod")
    compiled._orig_mod.compile(backend="eager")
    if compiled._orig_mod._compiled_call_impl is None:
        yield "Module.compile()._compiled_call_impl"
    static: Any = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
    _steps(static)
    yield from _lacks("DistributedDataParallel", static, "_static_graph_delay_allreduce_enqueued")
    yield from _fsdp()


DDP = (
    "_update_process_group process_group device_ids output_device reducer logger static_graph "
    "_comm_hooks _build_params_for_reducer _build_debug_param_to_name_mapping _ddp_init_helper "
    "_get_ddp_logging_data bucket_bytes_cap"
)


def _lacks(of: str, holder: object, names: str) -> Iterator[str]:
    yield from (f"{of}.{name}" for name in names.split() if not hasattr(holder, name))


def _fsdp() -> Iterator[str]:
    from torch.distributed._composable.contract import _get_registry
    from torch.distributed.fsdp import fully_shard

    mesh = device_mesh.init_device_mesh("cpu", (1,))
    model: Any = fully_shard(nn.Linear(2, 2), mesh=mesh)
    _steps(model)
    state = model._get_fsdp_state()
    groups = "_fsdp_param_groups" if VERSION >= (2, 12) else "_fsdp_param_group"
    yield from _lacks("FSDPState", state, f"_is_root _mp_policy _state_ctx {groups}")
    found = getattr(state, groups, None)
    [group] = found if isinstance(found, list | tuple) else [found]
    wanted = "offload_policy post_forward_mesh_info mesh_info fsdp_params"
    if VERSION >= (2, 9):
        wanted += " _all_reduce_hook _all_gather_comm _reduce_scatter_comm"
    if VERSION > (2, 9):
        yield from _lacks("FSDPState", state, "_auto_reshard_after_forward")
    yield from _lacks("FSDPParamGroup", group, wanted)
    yield from _lacks("FSDPParamGroup.mesh_info", group.mesh_info, "mesh shard_mesh_size")
    names = "is_dtensor mp_policy unsharded_accumulated_grad _unsharded_param"
    yield from _lacks("FSDPParam", group.fsdp_params[0], names)
    if "_is_fsdp_managed_module" not in vars(model):
        yield "_is_fsdp_managed_module of a module's"
    if not any(name.startswith("__composable_api_state_key") for name in vars(model)):
        yield "__composable_api_state_key of a module's"
    if "fully_shard" not in (_get_registry(model) or {}):
        yield "_get_registry(module)[fully_shard]"
    if VERSION >= (2, 13):
        yield from _lacks("FSDPModule", model, "reset_iter_state")


def _steps(model: Any) -> None:
    for _ in range(3):  # DDP logs its new buckets in the third step
        model(torch.ones(1, 2)).sum().backward()


def told(check: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Yield the findings of a check, and the error that ends the check, if any."""
    try:
        yield from check()
    except (AttributeError, ImportError, KeyError, TypeError, ValueError, RuntimeError) as error:
        yield f"{check.__name__}: {type(error).__name__}: {error}"


def main() -> int:
    """Print the names that have moved; return 1 if any has."""
    warnings.simplefilter("ignore")
    made = (resolved() or "the legacy class") if HAS_NCCL else "not in it, and not looked at"
    moved = [name for check in (names, records, nccl, models) for name in told(check)]
    sys.stdout.write(f'torch {torch.__version__}, "nccl" is {made}: {len(moved)} names moved\n')
    sys.stdout.writelines(f"  {name}\n" for name in moved)
    sys.stdout.flush()
    return 1 if moved else 0


if __name__ == "__main__":
    # Deleting an nccl2 asks for a driver, and would end the process (`KEPT`).
    os._exit(main())
