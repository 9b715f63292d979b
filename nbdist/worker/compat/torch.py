"""Functions that use private names of torch's process groups and their backends.

Code that runs in workers calls these functions. They were tried with torch 2.7 to 2.15. Comments
say how versions differ, and `check` says what the installed version lacks.
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
"""Whether torch's Flight Recorder has gloo's collectives, and nbdist can read it."""

SETS_TIMEOUTS = VERSION >= (2, 9)
"""Whether the timeout of gloo's collectives can be changed once the group exists."""

RENEWS_GLOO = hasattr(ProcessGroupGloo, "reconfigure")
"""Whether a gloo backend can connect again (from torch 2.14 on) and need not be replaced."""

FIRST_TYPE, LAST_TYPE = 20, 255
"""The least and the greatest type that nbdist gives to backends.

A type is a number by which a group tells its backends apart. It is a byte, and torch 2.15 itself
uses fewer than ten types.
"""

MAX_GENERATIONS = LAST_TYPE - FIRST_TYPE
"""How often a group can be formed, counting the first time, if backends cannot connect again.

Each time, a new backend replaces the old one and needs a type that the group has not seen before.
With `nccl.Legacy` two backends are replaced each time, so the group can be formed half as often.
"""

OPERATIONS = (
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast"),
    *("gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor_coalesced", "_reduce_scatter_base", "scatter", "send"),
    "_start_coalescing",
)
"""Methods of ProcessGroup that start an operation."""

BACKWARD = "_engine_run_backward"  # the Python function that calls C++ to run a backward pass

STEP_CODE = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""Code of the function that torch wraps around each optimizer's `step`.

While a step runs, a frame on the stack has this code.
"""

TABLES = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag"),
    # From torch 2.15 on. The table keeps alive the hooks that record the collectives of nccl.
    "pg_flight_recorder_hooks",
)
"""Names of torch's tables that have an entry for each group."""


def check() -> tuple[str, ...]:
    """Return sentences for the user, each about something that nbdist cannot do with this torch.

    Workers can start all the same.
    """
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
    """Return all groups in torch's tables except the default group, by name."""
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
    """Return the store that torch keeps for the default group."""
    return distributed_c10d._get_default_store()


def entries_of(group: ProcessGroup) -> dict[str, Any]:
    """Return a group's entries in torch's tables, by the name of the table.

    `set_default_group` puts them back.
    """
    tables = [table for table in TABLES if group in getattr(distributed_c10d._world, table, ())]
    return {table: getattr(distributed_c10d._world, table)[group] for table in tables}


def set_default_group(group: ProcessGroup, entries: Mapping[str, Any]) -> None:
    """Make a group torch's default group; there must be no default group before.

    `entries` has the group's entries for torch's tables, by the name of the table; `entries_of`
    returns them for a group that is in the tables.
    """
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

    The group is removed from the table of groups that torch shuts down. Afterwards torch empties
    all its tables, as usual.
    """
    del distributed_c10d._world.pg_names[group]


def forget_all(destroy: Callable[[], None]) -> list[ProcessGroup]:
    """Remove all groups from torch's tables without shutting them down; return the groups.

    `destroy` is torch's `destroy_process_group`. The caller must keep references to the groups: in
    a forked child their destructors would wait for threads that the child does not have.
    """
    groups = [*distributed_c10d._world.pg_names]
    if groups:
        distributed_c10d._world.pg_names.clear()
        destroy()
    return groups


def end_coalescing() -> None:
    """Drop collectives that torch's `_coalescing_manager` has collected before an exception.

    Otherwise torch would collect all later collectives of the group, too, and run none of them.
    """
    distributed_c10d._world.pg_coalesce_state.clear()


def check_timeout(timeout: object) -> None:
    """Raise the TypeError that torch raises if `timeout` is no timedelta."""
    distributed_c10d._check_valid_timeout(timeout)


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of a group's later collectives; before torch 2.9 gloo keeps its timeout."""
    distributed_c10d._set_pg_timeout(timeout, group)


def name_groups(choose: Callable[[str, Sequence[int], bool], str]) -> None:
    """Make torch call `choose(torch's name, ranks, is_hashed)` to name each new group.

    If the last argument is True, torch's own name is a hash of the ranks. Do nothing if this torch
    has no function that names groups.
    """
    if not hasattr(distributed_c10d, "_process_group_name"):
        return
    original = distributed_c10d._process_group_name

    def name(ranks: Sequence[int], use_hashed_name: bool) -> str:  # noqa: FBT001
        # Call torch's function even if its name is not used, because the function counts the groups
        # to which it gives a number as a name.
        return choose(str(original(ranks, use_hashed_name)), ranks, use_hashed_name)

    distributed_c10d._process_group_name = name  # type: ignore[assignment]


# --- backends of groups -----------------------------------------------------------------------


def gloo_of(group: ProcessGroup) -> Any:
    """Return the group's gloo backend; None if the group has none.

    At debug level DETAIL, return torch's wrapper around this backend.
    """
    for device in group._device_types:
        backend = group._get_backend(device)
        if backend.name() == "gloo":
            return backend
    return None


def takes_cpu(group: ProcessGroup) -> bool:
    """Return True if the group's collectives accept tensors on the CPU."""
    return any(device.type == "cpu" for device in group._device_types)


def when_gloo_is_made(make: Callable[..., None]) -> Callable[..., None]:
    """Replace the `__init__` of gloo backends by a call `make(backend, store, rank, size, ...)`.

    Return the original `__init__`.
    """
    original = ProcessGroupGloo.__init__

    def init(self: ProcessGroupGloo, *args: Any, **options: Any) -> None:
        make(self, *args, **options)

    ProcessGroupGloo.__init__ = init  # type: ignore[method-assign]
    return original


def when_tcp_store_is_made(make: Callable[..., None]) -> Callable[..., None]:
    """Replace the `__init__` of torch's TCPStore by `make`; return the original `__init__`."""
    original = TCPStore.__init__
    TCPStore.__init__ = make  # type: ignore[method-assign]
    return original


def gloo_options(device: Any, threads: int, timeout: timedelta | None, *, renewable: bool) -> Any:
    """Return options to make a gloo backend.

    A `renewable` backend does not connect when it is made, but each time that `renew` is called.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads = [device], threads
    if timeout is not None:
        options._timeout = timeout
    if renewable:
        options.enable_reconfigure = True
    return options


def renew(backend: Any, store: Any, rank: int, size: int, number: int, timeout: timedelta) -> None:
    """Connect a renewable gloo backend to the other ranks, which must do the same.

    The ranks meet in the store, under a `number` that was not used there before. If ranks do not
    come, raises RuntimeError, and the backend stays as it was.
    """
    options = exchange_handles(backend, store, rank, size, number, timeout)
    backend.reconfigure(options).wait()


def exchange_handles(
    backend: Any, store: Any, rank: int, size: int, number: int, timeout: timedelta
) -> Any:
    """Return the options with which a backend connects to the other ranks within `timeout`.

    The options have a handle of each rank's backend. This rank writes its handle to the store,
    under a `number` that was not used there before, and waits until all ranks have done so.
    """
    store.set(f"handle{number}/{rank}", backend.get_reconfigure_handle())
    options = c10d.ReconfigureOptions()  # type: ignore[attr-defined]
    options.uuid, options.timeout = number, timeout
    handles = store.multi_get([f"handle{number}/{each}" for each in range(size)])
    options.handles = [each.decode() for each in handles]
    return options


def replace_gloo(group: ProcessGroup, backend: Any, number: int) -> None:
    """Put this backend in the place of the group's gloo backend.

    A group accepts a backend only if it has not seen the backend's type before. So `number` must be
    new for each replacement, as the type is made from it.
    """
    # Read name and description first: the group gets both from the backend that is replaced below.
    name, description = group.group_name, group.group_desc
    kind = ProcessGroup.BackendType(FIRST_TYPE + number)
    for device in group._device_types:
        if group._get_backend(device).name() == "gloo":
            group._register_backend(device, kind, backend)
    group._set_group_name(name)
    group._set_group_desc(description)


def prepare_gloo(backend: Any, group: ProcessGroup, members: Sequence[int]) -> None:
    """Set the group's name and members on a gloo backend, as torch does for its own backends."""
    if hasattr(backend.options, "group_name"):  # from torch 2.8 on
        backend.options.group_name = group.group_name
        backend.options.global_ranks_in_group = list(members)
    backend._set_sequence_number_for_group()


def comparing_backend(backend: Any, helper: Any) -> Any:
    """Return a wrapper that compares the calls of all ranks before each collective of `backend`.

    torch makes such wrappers at debug level DETAIL. The wrapper exchanges the calls by another
    backend, `helper`.
    """
    return c10d._ProcessGroupWrapper(backend, helper)


@contextmanager
def without_comparing() -> Iterator[None]:
    """Within this context, torch makes no wrappers that compare collectives."""
    level = c10d.get_debug_level()
    c10d.set_debug_level(c10d.DebugLevel.OFF)
    try:
        yield
    finally:
        c10d.set_debug_level(level)


def read_debug_level() -> None:
    """Make torch read TORCH_DISTRIBUTED_DEBUG again, which it otherwise reads only on import."""
    c10d.set_debug_level_from_env()


def compares() -> bool:
    """Return True if torch's debug level is DETAIL; ranks then compare each collective first."""
    return bool(c10d.get_debug_level() == c10d.DebugLevel.DETAIL)


# --- Flight Recorder of gloo ------------------------------------------------------------------


def recorded_groups() -> dict[str, dict[str, str]]:
    """Return Flight Recorder's counters of each gloo backend, by the backend's number.

    The counters are texts: the numbers of the last collectives that were begun and completed.
    Return {} if this torch does not record gloo's collectives. The call takes 0.05 ms.
    """
    if not RECORDS_GLOO:
        return {}
    dump = c10d._dump_fr_trace_json(False, False)  # type: ignore[attr-defined]  # noqa: FBT003
    groups: dict[str, dict[str, str]] = json.loads(dump).get("pg_status", {})
    return groups


def recorded_collectives() -> Iterator[dict[str, Any]]:
    """Yield Flight Recorder's entries of gloo, the newest first.

    This takes 8 ms or more if Flight Recorder is full.
    """
    if RECORDS_GLOO:
        yield from entries_in(c10d._dump_fr_trace_json(True, False))  # type: ignore[attr-defined]  # noqa: FBT003


def entries_in(written: bytes) -> Iterator[dict[str, Any]]:
    """Parse Flight Recorder's entries in JSON, and yield them, the newest first.

    An entry is parsed only when the caller asks for it, because parsing all 2,000 takes long.
    """
    dump = written.decode()
    decoder, end = json.JSONDecoder(), len(dump)
    while (start := dump.rfind('{"collective_seq_id"', 0, end)) >= 0:
        entry: dict[str, Any] = decoder.raw_decode(dump, start)[0]
        yield entry
        end = start


# --- ending gloo's waits for a message --------------------------------------------------------

# Closing connections does not end a wait for a message from any rank. Such a wait is ended by
# `RecvWork::abort` in torch's C++ library, which the Python class `Work` lacks (torch 2.14).
# So nbdist calls the method by ctypes. Before, nbdist checks that the C++ object of a `Work` begins
# with the address of the table of virtual methods of `RecvWork`.

CPU_LIBRARY = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
ABORT_RECEIVE = "_ZN4c10d16ProcessGroupGloo8RecvWork5abortEv"
RECEIVES = "_ZTVN4c10d16ProcessGroupGloo8RecvWorkE"

# An object of pybind11 has the address of its C++ object at INSTANCE_HEAD. The C++ object begins
# with the address of the first method in its class's table of virtual methods. In this table an
# offset and the type come before the first method.
INSTANCE_HEAD = object.__basicsize__
FIRST_METHOD = 2 * ctypes.sizeof(ctypes.c_void_p)


@cache
def _receives() -> tuple[ctypes._NamedFuncPointer, int] | None:
    """Return the C++ method `RecvWork::abort`, and the address with which `RecvWork` objects begin.

    `RecvWork` is torch's class for waits for a message of gloo. Return None if torch's library
    lacks the class or the method.
    """
    try:
        library = ctypes.CDLL(CPU_LIBRARY)
        table = ctypes.addressof(ctypes.c_char.in_dll(library, RECEIVES))
        abort = library[ABORT_RECEIVE]
    except (OSError, AttributeError, ValueError):
        return None
    abort.argtypes, abort.restype = [ctypes.c_void_p], None
    return abort, table + FIRST_METHOD


def can_end_receives() -> bool:
    """Return True if `end_receive` can end waits with this torch."""
    return _receives() is not None


def end_receive(work: dist.Work) -> bool:
    """End the wait for a message of gloo: `work.wait()` then returns False.

    Any thread may call this. Returns False if `work` is no receive of gloo, or if this torch cannot
    end the wait.
    """
    if (receive := _receives()) is None:
        return False
    abort, begin = receive
    address = ctypes.c_void_p.from_address(id(work) + INSTANCE_HEAD).value
    if not address or ctypes.c_void_p.from_address(address).value != begin:
        return False
    abort(address)
    return True
