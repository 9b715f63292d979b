"""The backend "nccl2" for tensors of the CPU, in the place of torch's own, with its ways to fail.

Torch calls `install` when it is imported, because of an entry point of the group
`torch.backends` (`tests.standin.processes`).  The behaviour and the messages of nccl2 are from
torch's sources (csrc/distributed/c10d/nccl2).
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

from tests.standin.communicator import Aborted, Communicator
from tests.standin.device import DEVICE, Event, Stream

Tensors = Sequence[torch.Tensor]
Came = Mapping[int, Sequence[torch.Tensor]]  # the inputs of all ranks, this rank included

FAULTS: set[str] = set()
"""Faults of this process: "abort" makes aborts hang, "connect" makes the next connect fail."""

KILLS = {"1", "3"}
"""Values of TORCH_NCCL_ASYNC_ERROR_HANDLING with which a watchdog ends the process."""

FAILED = "NCCL commInitRankConfig failed during reconfigure"

RECORDED = 2000

P2P = ("send ", "recv ")
"""The beginnings of the names of messages from a rank to another rank."""

WATCHES_EVERY = 1.0
"""Seconds between two looks of nccl2's watchdog, after which Flight Recorder knows of an end."""

REDUCES: Mapping[Any, Callable[..., torch.Tensor]] = {
    **{dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.AVG: torch.mean},
    **{dist.ReduceOp.MAX: torch.amax, dist.ReduceOp.MIN: torch.amin},
}


@dataclass(slots=True)
class Entry:
    """The record of a collective in Flight Recorder."""

    number: int
    group: str
    sequence: int
    name: str
    inputs: Tensors
    outputs: Tensors
    created: int = field(default_factory=time.time_ns)
    noticed: float = math.inf

    def end(self, watched_since: float) -> None:
        """Record the end of the collective, which a watchdog notices with its next look."""
        looks = math.ceil((time.monotonic() - watched_since) / WATCHES_EVERY)
        self.noticed = watched_since + looks * WATCHES_EVERY

    @property
    def retired(self) -> bool:
        return time.monotonic() >= self.noticed

    def as_json(self) -> dict[str, Any]:
        sizes = {
            f"{side}_{what}": [each(t) for t in tensors]
            for side, tensors in (("input", self.inputs), ("output", self.outputs))
            for what, each in (("sizes", lambda t: list(t.shape)), ("dtypes", _type_of))
        }
        is_p2p = self.name.startswith(P2P)
        return {
            **{"record_id": self.number, "process_group": [self.group, "undefined"], "pg_id": 0},
            **{"collective_seq_id": self.sequence, "p2p_seq_id": 0, "op_id": self.sequence},
            **{"profiling_name": f"nccl2:{self.name}", "time_created_ns": self.created, **sizes},
            **{"state": "completed" if self.retired else "scheduled", "retired": self.retired},
            **{"is_p2p": is_p2p, "timeout_ms": 0, "frames": []},
        }


ENTRIES: deque[Entry] = deque(maxlen=RECORDED)


class Work(dist.Work):
    """A collective that was begun; `wait` lets the current stream wait, and no thread."""

    def __init__(self, backend: StandIn, event: Event, outputs: Tensors, *, blocks: bool) -> None:
        super().__init__()
        self._backend, self._event, self._outputs = backend, event, list(outputs)
        self._blocks = blocks
        self._communicator = backend.communicator

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        DEVICE.use(self._outputs, DEVICE.stream.put(self._event.wait))
        if self._blocks:
            DEVICE.synchronize()
        backend = self._backend
        is_failed = backend.get_error() != c10d.ErrorType.SUCCESS and not self._event.is_over
        if is_failed or self._communicator is not backend.communicator:
            raise dist.DistBackendError("NCCL operation failed")
        return True

    def get_future(self) -> Future[Any]:
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._outputs)
        return future


class StandIn(dist.distributed_c10d.C10DBackend):
    """The backend of a process group."""

    supports_reconfigure = True
    supports_splitting = supports_coalescing = False
    bound_device_id = None

    def __init__(self, asked: Any) -> None:
        super().__init__(asked.group_rank, asked.group_size)
        self._store, self._rank, self._size = asked.store, asked.group_rank, asked.group_size
        self._timeout, self._name = asked.timeout, asked.group_id
        self._can_renew = asked.enable_reconfigure
        self.communicator: Communicator | None = None
        self._error = c10d.ErrorType.SUCCESS
        self._uuid, self._begun = 0, 0
        self._streams: list[Stream] = []
        self._messages = Counter[str]()
        if threading.current_thread() is threading.main_thread():
            DEVICE.watch()
        if not self._can_renew:
            self._connect(self._store, self._timeout)

    def getBackendName(self) -> str:
        return "nccl2"

    # --- connect, abort, connect again ------------------------------------------------------

    def _connect(self, store: Any, timeout: timedelta) -> None:
        if "connect" in FAULTS:
            FAULTS.remove("connect")
            raise RuntimeError(f"{FAILED}: unhandled system error")
        try:
            self.communicator = Communicator(store, self._rank, self._size, timeout)
        except (OSError, Aborted) as error:
            # Not a DistBackendError: Python does not know the type of nccl2's own exception.
            raise RuntimeError(f"{FAILED}: {error}") from error
        self._error, self._messages = c10d.ErrorType.SUCCESS, Counter()

    def abort(self) -> None:
        while "abort" in FAULTS:
            time.sleep(0.05)
        self._error = c10d.ErrorType.COMM_ERROR
        if self.communicator is not None:
            self.communicator.abort()

    def get_error(self) -> Any:
        return self._error

    def get_reconfigure_handle(self) -> str:
        return f"nccl2:{self._rank}:{self._uuid}:{os.getpid()}.{id(self)}:"

    def reconfigure(self, asked: Any) -> Any:
        handles, own = list(asked.handles), self.get_reconfigure_handle()
        if own not in handles:
            raise RuntimeError("Local nccl2 reconfigure handle is not part of the new communicator")
        store = dist.PrefixStore(f"nccl2_reconfigure/{asked.uuid}", self._store)
        rank, timeout = handles.index(own), asked.timeout or self._timeout
        if rank == 0 and store.compare_set("claimed", "", own).decode() != own:
            raise RuntimeError(f"nccl2 reconfigure uuid {asked.uuid} was already used")
        store.set(f"rank/{rank}", "")
        store.wait([f"rank/{each}" for each in range(len(handles))], timeout)
        if self.communicator is not None:
            self.abort()
            self.communicator = None
        self._rank, self._size = rank, len(handles)
        self._error = c10d.ErrorType.COMM_ERROR
        self._connect(store, timeout)
        self._uuid = asked.uuid
        done: Future[list[Any]] = Future()
        done.set_result([])
        return c10d._create_work_from_future(done)

    def shutdown(self) -> None:
        if self.communicator is not None:
            DEVICE.stream.put().wait()
            self.communicator.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    # --- collectives ------------------------------------------------------------------------

    # A collective gives its inputs to all ranks, and makes outputs of the inputs of some ranks.

    def broadcast(self, tensors: Tensors, options: Any) -> Work:
        def take(came: Came) -> None:
            tensors[0].copy_(came[options.rootRank][0])

        return self._begin("broadcast", options, tensors, tensors, [options.rootRank], take)

    def allreduce(self, tensors: Tensors, options: Any) -> Work:
        def take(came: Came) -> None:
            _reduce(tensors[0], [each[0] for each in came.values()], options)

        return self._begin("all_reduce", options, tensors, tensors, self._all, take)

    def reduce(self, tensors: Tensors, options: Any) -> Work:
        is_root = self._rank == options.rootRank

        def take(came: Came) -> None:
            if is_root:
                _reduce(tensors[0], [each[0] for each in came.values()], options)

        return self._begin("reduce", options, tensors, tensors, self._all if is_root else [], take)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> Work:
        return self._gather("all_gather", outputs[0], inputs, options)

    def all_gather_single(self, output: Any, given: Any, options: Any) -> Work:
        rows = output.view(self._size, *given.shape)
        return self._gather("_all_gather_base", rows.unbind(), [given], options)

    _allgather_base = all_gather_single

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> Work:
        lists = outputs[0] if self._rank == options.rootRank else ()
        return self._gather("gather", lists, inputs, options)

    def _gather(self, name: str, outputs: Tensors, inputs: Tensors, options: Any) -> Work:
        def take(came: Came) -> None:
            for rank, output in enumerate(outputs):
                output.copy_(came[rank][0])

        wanted = self._all if outputs else []
        return self._begin(name, options, inputs, outputs, wanted, take)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], options: Any) -> Work:
        root = options.rootRank
        parts = inputs[0] if self._rank == root else ()

        def take(came: Came) -> None:
            outputs[0].copy_(came[root][self._rank])

        return self._begin("scatter", options, parts, outputs, [root], take)

    def all_to_all_single(
        self, output: Any, given: Any, out_sizes: list[int], in_sizes: list[int], options: Any
    ) -> Work:
        outs = output.split(out_sizes or len(output) // self._size)
        ins = given.split(in_sizes or len(given) // self._size)

        def take(came: Came) -> None:
            for rank, out in enumerate(outs):
                out.copy_(came[rank][self._rank])

        return self._begin("all_to_all_single", options, ins, outs, self._all, take)

    alltoall_base = all_to_all_single

    def reduce_scatter_single(self, output: Any, given: Any, options: Any) -> Work:
        parts = given.view(self._size, *output.shape).unbind()

        def take(came: Came) -> None:
            _reduce(output, [each[self._rank] for each in came.values()], options)

        return self._begin("_reduce_scatter_base", options, parts, [output], self._all, take)

    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, options: Any) -> Work:
        return self._begin("barrier", options, (), (), self._all, lambda _: None)

    def send(self, tensors: Tensors, to: int, tag: int) -> Work:
        way = f"{self._rank}->{to}"
        return self._begin(f"send {way}", None, tensors, (), [], lambda _: None, way)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        def take(came: Came) -> None:
            tensors[0].copy_(came[source][0])

        name, way = f"recv {self._rank}<-{source}", f"{source}->{self._rank}"
        return self._begin(name, None, (), tensors, [source], take, way)

    # --- parts that collectives share -------------------------------------------------------

    @property
    def _all(self) -> range:
        return range(self._size)

    def _begin(
        self,
        name: str,
        options: Any,
        inputs: Tensors,
        outputs: Tensors,
        wanted: Iterable[int],
        take: Callable[[Came], None],
        way: str = "collective",
    ) -> Work:
        """Begin a collective or a message; messages are counted by the `way` from rank to rank."""
        DEVICE.check()
        if self.communicator is None:
            raise RuntimeError("ProcessGroupNCCL has not been initialized. Call reconfigure()")
        if self._error != c10d.ErrorType.SUCCESS:
            raise dist.DistBackendError("NCCL Async Error: remote process exited")
        self._begun += options is not None
        self._messages[way] += 1
        key = f"{way} {self._messages[way]}"
        number = ENTRIES[-1].number + 1 if ENTRIES else 0
        entry = Entry(number, self._name, self._begun, name, inputs, outputs)
        ENTRIES.append(entry)
        call = _call(name, inputs, outputs)
        communicator, deadline = self.communicator, time.monotonic() + self._timeout.total_seconds()

        def run() -> None:
            try:
                take(communicator.exchange(key, call, inputs, wanted, deadline))
                entry.end(communicator.made)
            except Aborted:
                pass  # an aborted kernel ends, and the work behind that kernel goes on
            except TimeoutError:
                self._timed_out(communicator)

        is_async = options is not None and getattr(options, "asyncOp", False)
        before = DEVICE.stream.put() if is_async else None
        stream = self._own_stream() if is_async else DEVICE.stream
        event = stream.put(lambda: (before and before.wait(), run()))
        if not is_async:
            DEVICE.use([*inputs, *outputs], event)
        return Work(self, event, [*outputs], blocks=name == "barrier")

    def _own_stream(self) -> Stream:
        if not self._streams:
            self._streams.append(Stream())
        return self._streams[0]

    def _timed_out(self, communicator: Communicator) -> None:
        """Act as nccl2's watchdog, which ends the process only if `reconfigure` is disabled."""
        self._error = c10d.ErrorType.TIMEOUT
        communicator.abort()
        kills = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") in KILLS
        if kills and not self._can_renew:
            os.kill(os.getpid(), signal.SIGABRT)


def _reduce(target: torch.Tensor, parts: Tensors, options: Any) -> None:
    reduce = next(reduce for kind, reduce in REDUCES.items() if options.reduceOp == kind)
    target.copy_(reduce(torch.stack([part.reshape(target.shape) for part in parts]), 0))


def _call(name: str, inputs: Tensors, outputs: Tensors) -> str:
    """Return a text that is equal on all ranks whose calls can meet."""
    by_name = {"scatter": outputs, "all_gather": outputs, "all_to_all_single": ()}
    alike = by_name.get(name, inputs or outputs)
    name = "message" if name.startswith(P2P) else name
    return f"{name} of {[(tuple(each.shape), each.dtype) for each in alike]}"


def _type_of(tensor: torch.Tensor) -> str:
    """Name a type as Flight Recorder does."""
    return {torch.float32: "Float", torch.float64: "Double", torch.int64: "Long"}.get(
        tensor.dtype, str(tensor.dtype)
    )


def install() -> None:
    """Register the stand-in as "nccl" for tensors of the CPU; torch calls this function."""
    for name, kind in (("nccl", "NCCL"), ("nccl2", "CUSTOM")):
        dist.Backend.register_backend(
            name,
            lambda asked, _: StandIn(asked),
            extended_api=True,
            devices=["cpu"],
            _backend_type=getattr(dist.ProcessGroup.BackendType, kind),
        )
    torch.accelerator.synchronize = DEVICE.synchronize
    original = c10d._dump_fr_trace_json

    def dump(*args: Any, **options: Any) -> bytes:
        backend = options.get("backend", args[2] if len(args) > 2 else "")
        if backend != "nccl2":
            return bytes(original(*args, **options))
        only_active = options.get("onlyActive", args[1] if len(args) > 1 else False)
        found = [each.as_json() for each in (*ENTRIES,) if not (only_active and each.retired)]
        return json.dumps({"entries": found, "pg_status": {}}, sort_keys=True).encode()

    c10d._dump_fr_trace_json = dump
