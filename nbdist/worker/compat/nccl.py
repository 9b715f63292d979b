"""torch's two classes of nccl backends, behind one interface for `nbdist.worker.group.nccl`.

`Legacy` is for the class that "nccl" means up to torch 2.14. From 2.15 on, this class is used with
TORCH_DIST_USE_NCCL2=0 or by the name "nccl-legacy". It was tried on an H200 with torch 2.11.
`Nccl2` is for the class that "nccl" means from 2.15 on, which was not tried on a GPU yet. As any
recent torch can have both classes, nbdist chooses by the name of a backend and not by the version
of torch. torch 2.14 has nccl2, too, but does not record its collectives: groups heal, but nbdist
does not see which rank waits.
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

# Whether Flight Recorder records the collectives of nccl2, and marks those that have ended. torch
# 2.14 has nccl2, but does not record its collectives.
RECORDS_NCCL2 = VERSION >= (2, 15)
# Matches messages of NCCL and torch about this process's own GPU.
OF_OWN_GPU = re.compile(r"\bcuda\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Seat:
    """The data with which a rank connects its nccl backend to the other members of a group.

    `members` are the ranks of the group, this rank among them. `position` is the index of this rank
    among the members, and `device` its GPU. The ranks meet in `store`, under a `number` that was
    not used there before.
    """

    store: Any
    members: Sequence[int]
    position: int
    number: int
    device: torch.device


class Adapter(ABC):
    """The operations of nccl's backends that nbdist uses.

    Each of torch's two classes of backends has a subclass.
    """

    max_generations: int | None
    """How often a group can be connected, counting the first time; None if there is no limit."""

    # Whether the numbers of a group's collectives continue after `renew`, and do not begin again.
    keeps_numbering: bool

    @abstractmethod
    def connect(self, backend: Any, seat: Seat, timeout: timedelta) -> Callable[[], None]:
        """Wait in the store until all ranks have come; return a function that connects them.

        The function waits in C++, which nothing can interrupt. So the caller runs it in a thread of
        its own. `timeout` limits the function, but `Legacy` ignores it.
        """

    @abstractmethod
    def renew(self, group: ProcessGroup, seat: Seat, timeout: timedelta) -> Any:
        """Return the backend with which a group connects again after an abort.

        The caller passes the backend to `connect`. The backend is the group's own, or a new one
        that this method has put in its place. `timeout` is that of the new backend's collectives.
        """

    @abstractmethod
    def new(self, name: str, seat: Seat, timeout: timedelta) -> Any:
        """Return a new backend for a group of this name; the backend is not connected yet."""

    def abort(self, backends: Sequence[Any]) -> None:
        """Abort the collectives of backends; any thread may call this, and it may never return.

        All backends are aborted at the same time, each on another thread. An abort waits for
        everything that runs on the GPU, so the first of two aborts could wait for collectives that
        only the second would end. NCCL's group calls would not help, since torch aborts in a thread
        of its own.
        """
        with ThreadPoolExecutor(len(backends)) as pool:
            for _ in pool.map(lambda backend: backend.abort(), backends):
                pass

    @abstractmethod
    def dump(self, *, active: bool) -> bytes:
        """Return Flight Recorder's entries in JSON; if `active`, only of unfinished collectives."""

    def pending(self) -> list[dict[str, Any]]:
        """Return Flight Recorder's entries of collectives that have not ended."""
        entries: list[dict[str, Any]] = json.loads(self.dump(active=True)).get("entries", [])
        return entries

    def recorded(self) -> Iterator[dict[str, Any]]:
        """Yield all of Flight Recorder's entries, the newest first."""
        return entries_in(self.dump(active=False))

    def error(self, backend: Any) -> str:
        """Return the kind of error that has ended the backend's collectives; "" if none has."""
        kind = backend.get_error()
        return "" if kind == c10d.ErrorType.SUCCESS else kind.name.lower()

    def end_calls(self, backend: Any) -> None:  # noqa: B027 (nccl2 leaves no call open)
        """End group calls of NCCL that an exception has left open on this thread.

        A group call begins with ncclGroupStart. If it stayed open, all later operations on this
        thread would wait for its end.
        """


class Legacy(Adapter):
    """The adapter for `ProcessGroupNCCL`, the older of torch's two classes of nccl backends.

    An aborted backend cannot connect again, so a new backend takes its place in the group.
    """

    max_generations: int | None = MAX_GENERATIONS // 2
    keeps_numbering = False

    def connect(self, backend: Any, seat: Seat, timeout: timedelta) -> Callable[[], None]:
        """Wait in the store until all ranks have come; return a function that connects them.

        The function makes NCCL's communicator, which sends and receives use, too. Otherwise torch
        would make it in the first collective, where a wait for ranks could not be aborted.
        """
        store, size = seat.store, len(seat.members)
        store.set(f"connects{seat.number}/{seat.position}", "")
        store.wait([f"connects{seat.number}/{each}" for each in range(size)])
        return lambda: backend.eager_connect_single_device(seat.device)

    def renew(self, group: ProcessGroup, seat: Seat, timeout: timedelta) -> Any:
        """Make a new backend, put it in the place of the group's backend, and return it."""
        # Read name and description first: the group gets both from the backend that is replaced.
        name, description = group.group_name, group.group_desc
        backend = self.new(name, seat, timeout)
        # A group accepts a backend only if it has not seen the backend's type before.
        kind = ProcessGroup.BackendType(LAST_TYPE - seat.number)
        group._register_backend(torch.device("cuda"), kind, backend)
        group._set_group_name(name)
        group._set_group_desc(description)
        return backend

    def new(self, name: str, seat: Seat, timeout: timedelta) -> Any:
        """Return a new backend, made as `_new_process_group_helper` of torch 2.13 makes it."""
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
        # Once a collective has been late, torch's watchdog reports "timeout" for ever, although it
        # has ended nothing.
        name = super().error(backend)
        return "" if name == "timeout" else name

    def end_calls(self, backend: Any) -> None:
        # `batch_isend_irecv` begins a group call of NCCL and ends it. An exception in between keeps
        # the call open, and all later operations would wait for its end. So end the call here. If
        # ending it fails, set torch's counter of open calls to 0. Otherwise torch would try to end
        # the call again when it makes a communicator, and fail.
        calls = open_calls()
        while calls is not None and calls.value:
            try:
                backend._group_end()
            except RuntimeError:
                calls.value = 0

    def dump(self, *, active: bool) -> bytes:
        ask = getattr(c10d, "_dump_nccl_trace_json", None)  # torch for the CPU lacks the function
        return bytes(ask(includeCollectives=True, onlyActive=active)) if ask else b"{}"


class Nccl2(Adapter):
    """The adapter for nccl2, the newer class, whose backends can connect again (`reconfigure`)."""

    max_generations: int | None = None
    keeps_numbering = True

    def connect(self, backend: Any, seat: Seat, timeout: timedelta) -> Callable[[], None]:
        """Wait in the store until all ranks have come; return a function that connects them.

        The function raises DistError if the ranks do not connect within `timeout`, and RuntimeError
        for an error of this rank's GPU.
        """
        # Set the device: by default a backend uses the current device of the calling thread, which
        # may be another device.
        backend.bound_device_id = seat.device
        size = len(seat.members)
        options = exchange_handles(backend, seat.store, seat.position, size, seat.number, timeout)

        def ready() -> None:
            try:
                backend.reconfigure(options).wait()
            except RuntimeError as error:
                # torch raises a plain RuntimeError both for errors between ranks, such as a dead
                # rank, and for errors of this rank's GPU. Replace it if the error is between ranks.
                if type(error) is not RuntimeError or OF_OWN_GPU.search(str(error)):
                    raise
                raise dist.DistBackendError(str(error)) from error

        return ready

    def renew(self, group: ProcessGroup, seat: Seat, timeout: timedelta) -> Any:
        """Return the group's own backend, which can connect again.

        If the group has a wrapper around the backend that compares collectives, remove the wrapper,
        which would use connections that have ended.
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
        # Leave out collectives whose entries torch marked as retired as soon as they began: torch
        # never records that these collectives have ended.
        return [entry for entry in super().pending() if not entry["retired"]]


ADAPTERS: Mapping[str, Adapter] = {"nccl": Legacy(), "nccl2": Nccl2()}
"""Adapters by `backend.name()`, which may differ from the name that user code has requested."""


def nccl_of(group: ProcessGroup) -> Any:
    """Return the group's backend `nccl` or `nccl2` (see `ADAPTERS`); None if it has neither."""
    return _device_and_backend(group)[1]


def _device_and_backend(group: ProcessGroup) -> tuple[Any, Any]:
    for device in group._device_types:
        # At debug level DETAIL the backend is inside of torch's wrapper, which cannot abort.
        backend: Any = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)
        if backend.name() in ADAPTERS:
            return device, backend
    return None, None


def adapter_of(backend: Any) -> Adapter:
    """Return the adapter for this nccl backend."""
    return ADAPTERS[backend.name()]


def when_nccl2_is_made(make: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Make torch call `make(create, options)` whenever it makes an nccl2 backend, from now on.

    `create(options)` makes the backend without connecting it, and `make` must return the backend.
    `make` is not called if user code will connect the backend itself (`enable_reconfigure`).
    """
    for name in ("nccl", "nccl2"):
        if plugin := _plugin_of_nccl2(name):
            creator = _creator(plugin.creator_fn, make)
            plugins: Any = distributed_c10d.Backend._plugins
            plugins[name.upper()] = plugin._replace(creator_fn=creator)


def when_legacy_is_made(made: Callable[[Any, Any, int, int, timedelta], None]) -> None:
    """Make torch call `made(backend, store, rank, size, timeout)` after it makes a legacy backend.

    `made` is not called for a backend that torch splits from another one.
    """
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:  # torch for the CPU lacks the class
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
    """Return torch's counter of NCCL's group calls (ncclGroupStart) that this thread has open.

    Return None if this torch has no such counter.
    """
    try:
        return ctypes.c_uint64.in_dll(library, OPEN_CALLS) if (library := _library()) else None
    except ValueError:  # a version of torch without this counter
        return None


def plain_class() -> str:
    """Return the name of the class that this version of torch uses for the backend "nccl"."""
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
