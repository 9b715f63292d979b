"""The two classes that "nccl" has been in torch, behind one interface; in the workers.

`Legacy` is for what "nccl" means up to torch 2.14, and from 2.15 on with TORCH_DIST_USE_NCCL2=0 or
by the name "nccl-legacy"; tried on an H200 with torch 2.11. `Nccl2` is for what "nccl" means from
2.15 on; not tried on a GPU yet. The name of a backend says which class the backend has, the version
of torch does not. With nccl2 on torch 2.14, where nccl2 is not the default, groups heal too, but no
rank is seen to wait, because torch does not record the collectives.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup, distributed_c10d

from nbdist.worker.compat.torch import (
    LAST_TYPE,
    MAX_GENERATIONS,
    VERSION,
    entries_in,
    exchange_handles,
)

# Whether Flight Recorder has nccl2's collectives, and marks them when they have ended.
RECORDS_NCCL2 = VERSION >= (2, 15)
# Found in messages of NCCL and torch about a GPU of this process, not about other ranks.
OF_OWN_GPU = re.compile(r"\bcuda\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in a group that connects: its `position`, and the store where ranks meet.

    `number` has not been used in this store before.
    """

    store: Any
    members: Sequence[int]
    position: int
    number: int
    device: torch.device


class Adapter(ABC):
    """The operations of nccl's backends that nbdist uses; each class of torch has a subclass."""

    max_generations: int | None
    """How often a group can be connected, with the first time; None if there is no limit."""

    keeps_numbering: bool  # whether numbers of a group's collectives go on after a renewal

    @abstractmethod
    def connect(self, backend: Any, seat: Seat, timeout: timedelta) -> Callable[[], None]:
        """Wait for the other ranks in the store; return a function that then connects in C++."""

    @abstractmethod
    def renew(self, group: ProcessGroup, seat: Seat, timeout: timedelta) -> Any:
        """Return the backend to connect: the group's own, or a new one that takes its place."""

    @abstractmethod
    def new(self, name: str, seat: Seat, timeout: timedelta) -> Any:
        """Return a new backend, not connected yet, for a group of this name."""

    def abort(self, backends: Sequence[Any]) -> None:
        """Abort the collectives of backends, from any thread; this can take for ever.

        All are aborted at the same time: one after the other, two could wait for each other, as
        an abort waits for everything that runs on the GPU. NCCL's group calls do not help: torch
        aborts in a thread of its own.
        """
        with ThreadPoolExecutor(len(backends)) as pool:
            for _ in pool.map(lambda backend: backend.abort(), backends):
                pass

    @abstractmethod
    def dump(self, *, active: bool) -> bytes:
        """Return Flight Recorder's entries as JSON; if `active`, only those that have not ended."""

    def pending(self) -> list[dict[str, Any]]:
        """Return the entries of collectives that have not ended."""
        entries: list[dict[str, Any]] = json.loads(self.dump(active=True)).get("entries", [])
        return entries

    def recorded(self) -> Iterator[dict[str, Any]]:
        """Yield all entries of Flight Recorder, the newest first."""
        return entries_in(self.dump(active=False))

    def error(self, backend: Any) -> str:
        """Return the kind of error that has ended the backend's collectives; "" if none has."""
        kind = backend.get_error()
        return "" if kind == c10d.ErrorType.SUCCESS else kind.name.lower()

    def end_calls(self, backend: Any) -> None:  # noqa: B027 (one class leaves none)
        """End group calls of NCCL that an interrupted call has left open on this thread."""


class Legacy(Adapter):
    """torch's first class: in a group, a new backend takes the place of an aborted one."""

    max_generations: int | None = MAX_GENERATIONS // 2
    keeps_numbering = False

    def connect(self, backend: Any, seat: Seat, timeout: timedelta) -> Callable[[], None]:
        """Wait for the other ranks in the store; return a function that makes the communicator.

        If the first collective made the communicator, torch could not abort a wait in it. Sends and
        receives use this communicator too.
        """
        store, size = seat.store, len(seat.members)
        store.set(f"connects{seat.number}/{seat.position}", "")
        store.wait([f"connects{seat.number}/{each}" for each in range(size)])
        return lambda: backend.eager_connect_single_device(seat.device)

    def renew(self, group: ProcessGroup, seat: Seat, timeout: timedelta) -> Any:
        """Put a new backend in the group, and return it."""
        # Read now: the group takes both from its backend, which is replaced below.
        name, description = group.group_name, group.group_desc
        backend = self.new(name, seat, timeout)
        # A group takes another backend only if it has not seen the backend's type before.
        kind = ProcessGroup.BackendType(LAST_TYPE - seat.number)
        group._register_backend(torch.device("cuda"), kind, backend)
        group._set_group_name(name)
        group._set_group_desc(description)
        return backend

    def new(self, name: str, seat: Seat, timeout: timedelta) -> Any:
        """Return a new backend, made as by torch 2.13's `_new_process_group_helper`."""
        options: Any = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = False
        options._timeout = timeout
        options.group_name = name
        options.global_ranks_in_group = list(seat.members)
        backend = dist.ProcessGroupNCCL(seat.store, seat.position, len(seat.members), options)
        if VERSION < (2, 14):  # from 2.14 on the call does nothing, and warns
            backend._set_sequence_number_for_group()
        return backend

    def error(self, backend: Any) -> str:
        # Once a collective is late, the watchdog reports that for ever, and ends nothing.
        name = super().error(backend)
        return "" if name == "timeout" else name

    def end_calls(self, backend: Any) -> None:
        # `batch_isend_irecv` begins a group call of NCCL and ends it. If the end fails, torch still
        # counts the call as open: making a communicator would end the call again, and fail. If the
        # end was left out, all later operations would wait for it.
        calls = open_calls()
        while calls is not None and calls.value:
            try:
                backend._group_end()
            except RuntimeError:
                calls.value = 0

    def dump(self, *, active: bool) -> bytes:
        ask = getattr(c10d, "_dump_nccl_trace_json", None)  # torch for the CPU has none
        return bytes(ask(includeCollectives=True, onlyActive=active)) if ask else b"{}"


class Nccl2(Adapter):
    """torch's newer class: `reconfigure` connects it; its watchdog never ends the process."""

    max_generations: int | None = None
    keeps_numbering = True

    def connect(self, backend: Any, seat: Seat, timeout: timedelta) -> Callable[[], None]:
        """Wait for the other ranks in the store; return a function that connects in bounded time.

        The function uses the rank's device, and raises DistError if the ranks do not connect.
        """
        # By default the backend uses the device of the calling thread; each thread has its own.
        backend.bound_device_id = seat.device
        size = len(seat.members)
        options = exchange_handles(backend, seat.store, seat.position, size, seat.number, timeout)

        def ready() -> None:
            try:
                backend.reconfigure(options).wait()
            except RuntimeError as error:
                # NCCL reports errors between ranks, such as a dead rank, as a plain RuntimeError.
                if type(error) is not RuntimeError or OF_OWN_GPU.search(str(error)):
                    raise
                raise dist.DistBackendError(str(error)) from error

        return ready

    def renew(self, group: ProcessGroup, seat: Seat, timeout: timedelta) -> Any:
        """Return the group's own backend; remove a backend around it that compares collectives.

        Such a backend would compare over connections that have ended.
        """
        device, backend = _device_and_backend(group)
        if group._get_backend(device) is not backend:
            kind = ProcessGroup.BackendType(LAST_TYPE - seat.number)
            group._register_backend(device, kind, backend)
        return backend

    def new(self, name: str, seat: Seat, timeout: timedelta) -> Any:
        options: Any = c10d._DistributedBackendOptions()
        options.store, options.timeout = seat.store, timeout
        options.group_rank, options.group_size = seat.position, len(seat.members)
        options.global_ranks_in_group = list(seat.members)
        options.group_id, options.enable_reconfigure = name, True
        plugins: Any = distributed_c10d.Backend._plugins
        return plugins["NCCL2"].creator_fn(options, None)

    def dump(self, *, active: bool) -> bytes:
        if not RECORDS_NCCL2:
            return b"{}"
        return bytes(c10d._dump_fr_trace_json(True, active, "nccl2"))  # type: ignore[attr-defined]  # noqa: FBT003

    def pending(self) -> list[dict[str, Any]]:
        # torch retires a collective at once if it does not report its end to the hook.
        return [entry for entry in super().pending() if not entry["retired"]]


ADAPTERS: Mapping[str, Adapter] = {"nccl": Legacy(), "nccl2": Nccl2()}
"""Adapters by the backend's own name, whatever name user code has asked for."""


def nccl_of(group: ProcessGroup) -> Any:
    """Return the group's nccl backend, of either class; None if it has none."""
    return _device_and_backend(group)[1]


def _device_and_backend(group: ProcessGroup) -> tuple[Any, Any]:
    for device in group._device_types:
        # With debug level DETAIL the backend is inside of one that compares, and cannot abort.
        backend: Any = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)
        if backend.name() in ADAPTERS:
            return device, backend
    return None, None


def adapter_of(backend: Any) -> Adapter:
    """Return the adapter for this nccl backend."""
    return ADAPTERS[backend.name()]


def when_nccl2_is_made(make: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Let `make(create, options)` make each nccl2 backend.

    `create(options)` makes a backend without connecting it.
    """
    for name in ("nccl", "nccl2"):
        if plugin := _plugin_of_nccl2(name):
            creator = _creator(plugin.creator_fn, make)
            plugins: Any = distributed_c10d.Backend._plugins
            plugins[name.upper()] = plugin._replace(creator_fn=creator)


def when_legacy_is_made(made: Callable[[Any, Any, int, int, timedelta], None]) -> None:
    """Call `made(backend, store, rank, size, timeout)` after a legacy backend was made.

    `made` is not called for a backend that torch splits from another.
    """
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:  # torch for the CPU
        return
    original = kind.__init__

    def init(self: Any, store: Any, rank: int, size: int, *options: Any, **named: Any) -> None:
        original(self, store, rank, size, *options, **named)
        if getattr(self.options, "split_from", None) is None:
            made(self, store, rank, size, self.options._timeout)

    kind.__init__ = init


CUDA_LIBRARY = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so")
OPEN_CALLS = "_ZN4c10d16ProcessGroupNCCL23ncclActiveGroupCounter_E"


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(CUDA_LIBRARY)
    except OSError:
        return None


def open_calls() -> ctypes.c_uint64 | None:
    """Return torch's counter of NCCL's open group calls on this thread; None if not found."""
    try:
        return ctypes.c_uint64.in_dll(library, OPEN_CALLS) if (library := _library()) else None
    except ValueError:  # a version of torch without this counter
        return None


def plain_class() -> str:
    """Return the name of the class that "nccl" means in this torch."""
    return "ProcessGroupNCCL2" if _plugin_of_nccl2("nccl") else "ProcessGroupNCCL"


def _plugin_of_nccl2(name: str) -> Any:
    """Return torch's plugin of this name if it makes nccl2 backends, else None."""
    torchs: Any = distributed_c10d
    if not hasattr(c10d, "ReconfigureOptions"):  # before torch 2.14
        return None
    torchs.Backend._ensure_backend_registered(name)
    plugin = torchs.Backend._plugins.get(name.upper())
    is_legacy = plugin and plugin.creator_fn is torchs._create_nccl_process_group
    return None if is_legacy else plugin


def _creator(original: Callable[..., Any], make: Callable[..., Any]) -> Callable[..., Any]:
    def create(options: Any, backend_options: Any) -> Any:
        if options.enable_reconfigure:  # user code connects the backend itself
            return original(options, backend_options)
        options.enable_reconfigure = True
        return make(lambda changed: original(changed, backend_options), options)

    return create
