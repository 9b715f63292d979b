"""The two classes that "nccl" has been in torch, behind one protocol.

`Legacy` is what "nccl" means up to torch 2.14, "nccl-legacy" from then on, and where
TORCH_DIST_USE_NCCL2=0: it was run on an H200 with torch 2.11.  `Nccl2`, which was not run on a GPU
yet, is what it means from 2.15 on.  Which of them a backend is follows from its name, and never
from the version of torch.  With nccl2 on 2.14, which is not its default, groups heal too, but no
rank could be said to wait: torch does not record its collectives.
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
    MOST_RENEWALS,
    VERSION,
    entries_in,
    exchange_handles,
)

# Whether Flight Recorder has entries of nccl2 that end when the collective does.
RECORDS_NCCL2 = VERSION >= (2, 15)
# In what NCCL and torch say of a GPU of this process, and not of what is between ranks.
OF_OWN_GPU = re.compile(r"\bcuda\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Seat:
    """Where the rank at a `position` of a group meets the others, by a new `number`."""

    store: Any
    members: Sequence[int]
    position: int
    number: int
    device: torch.device


class Adapter(ABC):
    """What nbdist asks of nccl."""

    most_renewals: int | None
    """How often a group can be connected anew; None where there is no limit."""

    counts_on: bool  # whether the numbers of a group's collectives go on where it is renewed

    @abstractmethod
    def connect(self, backend: Any, seat: Seat, timeout: timedelta) -> Callable[[], None]:
        """Wait for the other ranks in the store; return what connects then, and waits in C++."""

    @abstractmethod
    def renew(self, group: ProcessGroup, seat: Seat, timeout: timedelta) -> Any:
        """Return what is to be connected: the group's backend, or another one in its place."""

    @abstractmethod
    def new(self, name: str, seat: Seat, timeout: timedelta) -> Any:
        """Make one, for a group of this name, to be connected."""

    def abort(self, backends: Sequence[Any]) -> None:
        """End their collectives, from any thread; it can take for ever.

        All at once: one after the other two could wait for each other, as each waits for all that
        runs on the GPU.  NCCL's group calls are no help, as torch aborts in a thread of its own.
        """
        with ThreadPoolExecutor(len(backends)) as pool:
            for _ in pool.map(lambda backend: backend.abort(), backends):
                pass

    @abstractmethod
    def dump(self, *, active: bool) -> bytes:
        """Read Flight Recorder's entries, or only those of what has not ended."""

    def pending(self) -> list[dict[str, Any]]:
        """Return its entries of collectives that have not ended."""
        entries: list[dict[str, Any]] = json.loads(self.dump(active=True)).get("entries", [])
        return entries

    def recorded(self) -> Iterator[dict[str, Any]]:
        """Yield all of its entries, the newest first."""
        return entries_in(self.dump(active=False))

    def error(self, backend: Any) -> str:
        """Return what has ended its collectives; "" for nothing."""
        kind = backend.get_error()
        return "" if kind == c10d.ErrorType.SUCCESS else kind.name.lower()

    def end_calls(self, backend: Any) -> None:  # noqa: B027 (one class leaves none)
        """End what a broken off call has left open on this thread."""


class Legacy(Adapter):
    """torch's first class: aborted, and then replaced by another one in its group."""

    most_renewals: int | None = MOST_RENEWALS // 2
    counts_on = False

    def connect(self, backend: Any, seat: Seat, timeout: timedelta) -> Callable[[], None]:
        """Meet in the store, and connect then, instead of with the first collective.

        torch cannot abort a wait there: it has no communicator yet.  Sends and receives use it too.
        """
        store, size = seat.store, len(seat.members)
        store.set(f"connects{seat.number}/{seat.position}", "")
        store.wait([f"connects{seat.number}/{each}" for each in range(size)])
        return lambda: backend.eager_connect_single_device(seat.device)

    def renew(self, group: ProcessGroup, seat: Seat, timeout: timedelta) -> Any:
        """Give the group a new backend."""
        # Asked of one of the backends, which can be another one in a moment.
        name, description = group.group_name, group.group_desc
        backend = self.new(name, seat, timeout)
        # A group takes a backend in another's place where it has not seen its type.
        kind = ProcessGroup.BackendType(LAST_TYPE - seat.number)
        group._register_backend(torch.device("cuda"), kind, backend)
        group._set_group_name(name)
        group._set_group_desc(description)
        return backend

    def new(self, name: str, seat: Seat, timeout: timedelta) -> Any:
        """Make one as torch 2.13's `_new_process_group_helper` does."""
        options: Any = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = False
        options._timeout = timeout
        options.group_name = name
        options.global_ranks_in_group = list(seat.members)
        backend = dist.ProcessGroupNCCL(seat.store, seat.position, len(seat.members), options)
        if VERSION < (2, 14):  # from then on it does nothing, and warns
            backend._set_sequence_number_for_group()
        return backend

    def error(self, backend: Any) -> str:
        # Of a collective that is late its watchdog says so for ever, and ends nothing.
        said = super().error(backend)
        return "" if said == "timeout" else said

    def end_calls(self, backend: Any) -> None:
        # `batch_isend_irecv` begins a group call of NCCL's and ends it, which can fail, and then
        # torch still counts it: making a communicator would end it once more, and fail.  Where
        # it was left out, all that comes after would wait for it.
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
    """torch's other class, reconfigured to connect; its watchdog never ends the process."""

    most_renewals: int | None = None
    counts_on = True

    def connect(self, backend: Any, seat: Seat, timeout: timedelta) -> Callable[[], None]:
        """Connect on the rank's device; that is bounded, raises DistError, and can be repeated."""
        # Else it takes the device of the thread, and each thread has its own.
        backend.bound_device_id = seat.device
        size = len(seat.members)
        options = exchange_handles(backend, seat.store, seat.position, size, seat.number, timeout)

        def ready() -> None:
            try:
                backend.reconfigure(options).wait()
            except RuntimeError as error:
                # What NCCL itself says comes as any error does: of a rank that has died, too.
                if type(error) is not RuntimeError or OF_OWN_GPU.search(str(error)):
                    raise
                raise dist.DistBackendError(str(error)) from error

        return ready

    def renew(self, group: ProcessGroup, seat: Seat, timeout: timedelta) -> Any:
        """Return the group's own, without what compares first over connections that have ended."""
        device, backend = _found_in(group)
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
        # One that does not tell the hook when a collective ends has them retired at once.
        return [entry for entry in super().pending() if not entry["retired"]]


ADAPTERS: Mapping[str, Adapter] = {"nccl": Legacy(), "nccl2": Nccl2()}
"""By the name that a backend has for itself, whatever it was asked for by."""


def nccl_of(group: ProcessGroup) -> Any:
    """Return the group's nccl backend of either class, None if it has none."""
    return _found_in(group)[1]


def _found_in(group: ProcessGroup) -> tuple[Any, Any]:
    for device in group._device_types:
        # With debug level DETAIL it is in one that compares first, which has no abort of its own.
        backend: Any = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)
        if backend.name() in ADAPTERS:
            return device, backend
    return None, None


def adapter_of(backend: Any) -> Adapter:
    """Return what speaks to this nccl backend."""
    return ADAPTERS[backend.name()]


def when_nccl2_is_made(make: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Have `make(create, options)` make each; `create(options)` makes one without connecting it."""
    for name in ("nccl", "nccl2"):
        if plugin := _plugin_of_nccl2(name):
            creator = _creator(plugin.creator_fn, make)
            plugins: Any = distributed_c10d.Backend._plugins
            plugins[name.upper()] = plugin._replace(creator_fn=creator)


def when_legacy_is_made(made: Callable[[Any, Any, int, int, timedelta], None]) -> None:
    """Call `made(backend, store, rank, size, timeout)` after each; not where torch splits one."""
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:  # torch for the CPU
        return
    original = kind.__init__

    def init(self: Any, store: Any, rank: int, size: int, *options: Any, **named: Any) -> None:
        original(self, store, rank, size, *options, **named)
        if getattr(self.options, "split_from", None) is None:
            made(self, store, rank, size, self.options._timeout)

    kind.__init__ = init


LIBRARY = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so")
OPEN_CALLS = "_ZN4c10d16ProcessGroupNCCL23ncclActiveGroupCounter_E"


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def open_calls() -> ctypes.c_uint64 | None:
    """Return how many group calls of NCCL's torch has open on this thread; None if unknown."""
    try:
        return ctypes.c_uint64.in_dll(library, OPEN_CALLS) if (library := _library()) else None
    except ValueError:  # a version without it
        return None


def plain_class() -> str:
    """Name the class that "nccl" is here."""
    return "ProcessGroupNCCL2" if _plugin_of_nccl2("nccl") else "ProcessGroupNCCL"


def _plugin_of_nccl2(name: str) -> Any:
    """Return torch's plugin of this name, None where that is the legacy class or nothing."""
    torchs: Any = distributed_c10d
    if not hasattr(c10d, "ReconfigureOptions"):  # before torch 2.14
        return None
    torchs.Backend._ensure_backend_registered(name)
    plugin = torchs.Backend._plugins.get(name.upper())
    is_legacy = plugin and plugin.creator_fn is torchs._create_nccl_process_group
    return None if is_legacy else plugin


def _creator(original: Callable[..., Any], make: Callable[..., Any]) -> Callable[..., Any]:
    def create(options: Any, backend_options: Any) -> Any:
        if options.enable_reconfigure:  # user code's own
            return original(options, backend_options)
        options.enable_reconfigure = True
        return make(lambda changed: original(changed, backend_options), options)

    return create
