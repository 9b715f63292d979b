"""Private names of torch's groups and backends, behind functions and constants of our own.

Runs in the workers; tried with torch 2.7 to 2.15. Comments say where versions differ; `check` says
what the installed version lacks.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import FileStore as FileStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.distributed import ProcessGroup, ProcessGroupGloo, distributed_c10d

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VERSION = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])

RECORDS_GLOO = VERSION >= (2, 11) and hasattr(c10d, "_dump_fr_trace_json")
"""Whether Flight Recorder has gloo's collectives; before torch 2.8 nothing can read it."""

SETS_TIMEOUTS = VERSION >= (2, 9)
"""Whether the timeout of gloo's collectives can be changed once the group exists."""

RENEWS_GLOO = hasattr(ProcessGroupGloo, "reconfigure")
"""Whether a gloo backend can connect again (from torch 2.14 on), so that it is not replaced."""

FIRST_TYPE, LAST_TYPE = 20, 255  # a backend's type is a byte, and torch 2.15 names less than ten

MAX_GENERATIONS = LAST_TYPE - FIRST_TYPE
"""How often a group can be formed, the first time included; with `nccl.Legacy` half as often."""

OPERATIONS = (
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast"),
    *("gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor_coalesced", "_reduce_scatter_base", "scatter", "send"),
    "_start_coalescing",
)
"""Methods of ProcessGroup that start an operation."""

BACKWARD = "_engine_run_backward"  # the function in which a thread runs a backward pass, in C++

STEP_CODE = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""Code of the function around each optimizer's `step`; on the stack while a step runs."""

TABLES = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag"),
    # From torch 2.15 on.  A hook records the collectives of its group with nccl, but only while
    # anything refers to the hook.
    "pg_flight_recorder_hooks",
)
"""Tables in which torch keeps something for each group."""


def check() -> tuple[str, ...]:
    """Return a sentence on each ability that this torch lacks; workers start without it."""
    problems = []
    if not RECORDS_GLOO:
        problems.append("ranks that wait in an asynchronous collective are shown without its name")
    if not hasattr(distributed_c10d, "_process_group_name"):
        problems.append("new groups do not find each other where a rank has missed one before")
    if not can_end_receives():
        problems.append("a wait for a message from any rank is not aborted; Stop replaces the rank")
    if not SETS_TIMEOUTS:
        problems.append("a timeout that a cell gives `init_process_group` has no effect on gloo")
    if VERSION < (2, 13):
        problems.append("an FSDP2 model whose step was interrupted must be recreated")
    return tuple(f"torch {torch.__version__}: {each}." for each in problems)


# --- the default group, and what torch keeps of every group -----------------------------------


def subgroups_of(default: ProcessGroup) -> dict[str, ProcessGroup]:
    """Return all groups but the default one, by name."""
    names = distributed_c10d._world.pg_names
    return {str(name): group for group, name in names.items() if group is not default}


def count_collectives(group: ProcessGroup) -> int:
    """Return a number that grows with each collective that this rank begins in a group.

    The group's own number stands still once its backend was replaced (torch 2.13), so the numbers
    of the backends are used.  Backends without numbers count as 0.  Takes some 10 µs.
    """
    count = 0
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        with suppress(RuntimeError):
            count += int(backend._get_sequence_number_for_group())
    return count


def default_store() -> Any:
    """Return the store through which the ranks of the default group found each other."""
    return distributed_c10d._get_default_store()


def entries_of(group: ProcessGroup) -> dict[str, Any]:
    """Return a group's entries in torch's tables, by table, for `set_default_group`."""
    tables = [table for table in TABLES if group in getattr(distributed_c10d._world, table, ())]
    return {table: getattr(distributed_c10d._world, table)[group] for table in tables}


def set_default_group(group: ProcessGroup, entries: Mapping[str, Any]) -> None:
    """Make a group the default group, by its `entries`; there must be no default group before."""
    tables = distributed_c10d._world
    for table, entry in entries.items():
        getattr(tables, table)[group] = entry
    for tag in ("", entries["pg_to_tag"]):
        tables.tags_to_pg.setdefault(tag, []).append(group)
    c10d._register_process_group(entries["pg_names"], group)
    distributed_c10d._update_default_pg(group)
    tables.group_count = 1


def exempt_from_shutdown(group: ProcessGroup) -> None:
    """Keep the next `destroy_process_group` from shutting this group down.

    The group is removed from the table of groups to shut down; torch then empties all tables.
    """
    del distributed_c10d._world.pg_names[group]


def forget_all(destroy: Callable[[], None]) -> list[ProcessGroup]:
    """Remove all groups from torch's tables without shutting any down; return them.

    `destroy` is torch's `destroy_process_group`. The caller must keep references to the groups.
    """
    groups = [*distributed_c10d._world.pg_names]
    if groups:
        distributed_c10d._world.pg_names.clear()
        destroy()
    return groups


def end_coalescing() -> None:
    """Drop the collectives that a `_coalescing_manager` has collected before an exception.

    torch would go on collecting all later collectives of the group, and run none of them.
    """
    distributed_c10d._world.pg_coalesce_state.clear()


def check_timeout(timeout: object) -> None:
    """Raise torch's TypeError if `timeout` is no timedelta."""
    distributed_c10d._check_valid_timeout(timeout)


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of all collectives of a group from now on."""
    distributed_c10d._set_pg_timeout(timeout, group)


def name_groups(choose: Callable[[str, Sequence[int], bool], str]) -> None:
    """Let `choose(torch's name, ranks, is_hashed)` name each new group, if torch allows that."""
    if not hasattr(distributed_c10d, "_process_group_name"):
        return
    original = distributed_c10d._process_group_name

    def name(ranks: Sequence[int], use_hashed_name: bool) -> str:  # noqa: FBT001
        # Call torch's function even if its name is not used, because it counts the groups.
        return choose(str(original(ranks, use_hashed_name)), ranks, use_hashed_name)

    distributed_c10d._process_group_name = name  # type: ignore[assignment]


# --- backends of groups -----------------------------------------------------------------------


def gloo_of(group: ProcessGroup) -> Any:
    """Return the group's gloo backend; None if it has none."""
    for device in group._device_types:
        backend = group._get_backend(device)
        if backend.name() == "gloo":
            return backend
    return None


def takes_cpu(group: ProcessGroup) -> bool:
    """Return True if the group's collectives take tensors on the CPU."""
    return any(device.type == "cpu" for device in group._device_types)


def when_gloo_is_made(make: Callable[..., None]) -> Callable[..., None]:
    """Let `make(backend, store, rank, size, ...)` replace the `__init__` of gloo backends.

    Return the original `__init__`.
    """
    original = ProcessGroupGloo.__init__

    def init(self: ProcessGroupGloo, *args: Any, **options: Any) -> None:
        make(self, *args, **options)

    ProcessGroupGloo.__init__ = init  # type: ignore[method-assign]
    return original


def when_tcp_store_is_made(make: Callable[..., None]) -> Callable[..., None]:
    """Let `make` replace the `__init__` of TCPStore; return the original one."""
    original = TCPStore.__init__
    TCPStore.__init__ = make  # type: ignore[method-assign]
    return original


def gloo_options(device: Any, threads: int, timeout: timedelta | None, *, renewable: bool) -> Any:
    """Return options of a gloo backend.  A `renewable` backend connects only by `renew`."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads = [device], threads
    if timeout is not None:
        options._timeout = timeout
    if renewable:
        options.enable_reconfigure = True
    return options


def renew(backend: Any, store: Any, rank: int, size: int, number: int, timeout: timedelta) -> None:
    """Connect a gloo backend to ranks that do the same, in a store where `number` is used once.

    Raises RuntimeError if the ranks do not come; then the backend stays as it was.
    """
    options = exchange_handles(backend, store, rank, size, number, timeout)
    backend.reconfigure(options).wait()


def exchange_handles(
    backend: Any, store: Any, rank: int, size: int, number: int, timeout: timedelta
) -> Any:
    """Wait in the store until all ranks have come; return the options to connect to them."""
    store.set(f"handle{number}/{rank}", backend.get_reconfigure_handle())
    options = c10d.ReconfigureOptions()  # type: ignore[attr-defined]
    options.uuid, options.timeout = number, timeout
    handles = store.multi_get([f"handle{number}/{each}" for each in range(size)])
    options.handles = [each.decode() for each in handles]
    return options


def replace_gloo(group: ProcessGroup, backend: Any, number: int) -> None:
    """Put this backend in the place of the group's gloo backend; `number` is new each time.

    The backend gets a new type by `number`: a group takes no other backend of a known type.
    """
    # Read now: the group takes both from its backend, which is replaced below.
    name, description = group.group_name, group.group_desc
    kind = ProcessGroup.BackendType(FIRST_TYPE + number)
    for device in group._device_types:
        if group._get_backend(device).name() == "gloo":
            group._register_backend(device, kind, backend)
    group._set_group_name(name)
    group._set_group_desc(description)


def prepare_gloo(backend: Any, group: ProcessGroup, members: Sequence[int]) -> None:
    """Set the group's name and members on a backend that torch has not made itself."""
    if hasattr(backend.options, "group_name"):  # from torch 2.8 on
        backend.options.group_name = group.group_name
        backend.options.global_ranks_in_group = list(members)
    backend._set_sequence_number_for_group()


def comparing_backend(backend: Any, helper: Any) -> Any:
    """Return a backend that compares collectives over the helper first: debug level DETAIL."""
    return c10d._ProcessGroupWrapper(backend, helper)


@contextmanager
def without_comparing() -> Iterator[None]:
    """In this context torch makes no backends that compare collectives first."""
    level = c10d.get_debug_level()
    c10d.set_debug_level(c10d.DebugLevel.OFF)
    try:
        yield
    finally:
        c10d.set_debug_level(level)


def read_debug_level() -> None:
    """Read TORCH_DISTRIBUTED_DEBUG again, after torch has read this variable on import."""
    c10d.set_debug_level_from_env()


def compares() -> bool:
    """Return True if ranks compare each collective before it runs: debug level DETAIL."""
    return bool(c10d.get_debug_level() == c10d.DebugLevel.DETAIL)


# --- Flight Recorder of gloo ------------------------------------------------------------------


def recorded_groups() -> dict[str, dict[str, str]]:
    """Return Flight Recorder's counters by the backend's number, if it has gloo's; 0.05 ms."""
    if not RECORDS_GLOO:
        return {}
    dump = c10d._dump_fr_trace_json(False, False)  # type: ignore[attr-defined]  # noqa: FBT003
    groups: dict[str, dict[str, str]] = json.loads(dump).get("pg_status", {})
    return groups


def recorded_collectives() -> Iterator[dict[str, Any]]:
    """Yield Flight Recorder's entries, the newest first; takes 8 ms or more for a full recorder."""
    if RECORDS_GLOO:
        yield from entries_in(c10d._dump_fr_trace_json(True, False))  # type: ignore[attr-defined]  # noqa: FBT003


def entries_in(written: bytes) -> Iterator[dict[str, Any]]:
    """Yield Flight Recorder's entries, the newest first.

    Each entry is parsed when the caller takes it, because parsing all 2,000 takes long.
    """
    dump = written.decode()
    decoder, end = json.JSONDecoder(), len(dump)
    while (start := dump.rfind('{"collective_seq_id"', 0, end)) >= 0:
        entry: dict[str, Any] = decoder.raw_decode(dump, start)[0]
        yield entry
        end = start


# --- ending gloo's waits for a message --------------------------------------------------------

# Closing connections does not end a wait for a message from any rank. torch exports a method for
# that, `RecvWork::abort`, which Python's `Work` lacks (torch 2.14). This method is called only if
# the object behind a `Work` has the table of virtual methods of a `RecvWork`.

CPU_LIBRARY = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
ABORT_RECEIVE = "_ZN4c10d16ProcessGroupGloo8RecvWork5abortEv"
RECEIVES = "_ZTVN4c10d16ProcessGroupGloo8RecvWorkE"

# HEAD is where an object of pybind11 has the address of its C++ object, which begins with the
# address of its table of methods. The table has an offset and the type before FIRST_METHOD.
INSTANCE_HEAD = object.__basicsize__
FIRST_METHOD = 2 * ctypes.sizeof(ctypes.c_void_p)


@cache
def _receives() -> tuple[ctypes._NamedFuncPointer, int] | None:
    """Return `RecvWork::abort`, and the address each `RecvWork` begins with; None if missing."""
    try:
        library = ctypes.CDLL(CPU_LIBRARY)
        table = ctypes.addressof(ctypes.c_char.in_dll(library, RECEIVES))
        abort = library[ABORT_RECEIVE]
    except (OSError, AttributeError, ValueError):
        return None
    abort.argtypes, abort.restype = [ctypes.c_void_p], None
    return abort, table + FIRST_METHOD


def can_end_receives() -> bool:
    """Return True if `end_receive` works with this torch."""
    return _receives() is not None


def end_receive(work: dist.Work) -> bool:
    """Make the wait for a receive of gloo return False; any thread may call this.

    Returns False if `work` is no receive of gloo, or if this torch cannot end the wait.
    """
    if (receive := _receives()) is None:
        return False
    abort, begin = receive
    address = ctypes.c_void_p.from_address(id(work) + INSTANCE_HEAD).value
    if not address or ctypes.c_void_p.from_address(address).value != begin:
        return False
    abort(address)
    return True
