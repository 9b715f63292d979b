"""Makes, connects and aborts nccl's backends, and reads collectives from Flight Recorder.

nccl has an abort: its GPU kernels end, and code that waits for their stream goes on with
meaningless results, so the main thread has to be interrupted too. torch's own watchdog must not act
(`TORCH_NCCL_ASYNC_ERROR_HANDLING=0`, which workers start with). Runs in each rank; `Group` and the
probe use this file, the probe also for gloo's collectives.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import islice, takewhile
from typing import Any

import torch
from torch.distributed import ProcessGroup

from nbdist.wire.places import Begun, Collective
from nbdist.worker.compat import accelerator
from nbdist.worker.compat import nccl as seam
from nbdist.worker.compat import torch as torch_seam
from nbdist.worker.compat.nccl import Seat
from nbdist.worker.group.default import instances_of
from nbdist.worker.group.stores import AbortableStore, Meeting, run_with_timeout

NCCL_START_TIMEOUT, NCCL_RENEWAL_TIMEOUT = 100.0, 25.0
"""Seconds for all ranks to connect; agents wait 180 s for a start, and 30 s for healing."""

NCCL_ABORT_TIMEOUT, NCCL_WHOLE_ABORT_TIMEOUT = 10.0, 60.0
"""Seconds until the next GPU kernel must end during an abort, and for the whole abort.

Aborts have been seen to take for ever (NCCL 2.25). An abort takes 0.5 s, and for each GPU kernel in
the queue the time to copy its data: 0.2 s for a gigabyte on an H200 that ranks share, and more if
other programs use the GPU too.
"""

ABORT_STEP = 1.0  # seconds between two checks whether GPU kernels still end


class AbortHangs(RuntimeError):
    """An abort did not end in time; only a new process can take part in the group again."""


class Nccl:
    """Makes nccl2 backends that can be renewed; connects and aborts backends of nccl and nccl2."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # nccl2 backends keep this store, whose `leading_to` chooses another meeting each time.
        self.store = _Claimed(Meeting(None))
        self._connects_later = False
        self._aborting = threading.Lock()
        seam.when_nccl2_is_made(self._make)
        seam.when_legacy_is_made(self._connect_new)

    @contextmanager
    def connecting_later(self) -> Iterator[None]:
        """Within this context, make backends without connections: `connect` connects them later."""
        self._connects_later = True
        try:
            yield
        finally:
            self._connects_later = False

    def _make(self, create: Callable[[Any], Any], options: Any) -> Any:
        store, size, timeout = options.store, options.group_size, options.timeout
        # torch splits a backend from another one if user code has bound its group to a device.
        is_split = options.split_from is not None
        options.store = self.store
        with self.store.leading_to(Meeting(store, timeout=timeout.total_seconds())):
            backend = create(options)
        if not is_split:
            self._connect_new(backend, store, options.group_rank, size, timeout)
        return backend

    def _connect_new(
        self, backend: Any, store: Any, position: int, size: int, timeout: timedelta
    ) -> None:
        if not self._connects_later:
            meeting = Meeting(store, timeout=timeout.total_seconds())
            seat = self.seat(meeting, range(size), position)
            self.connect(backend, meeting, seat, NCCL_START_TIMEOUT)

    def seat(self, meeting: Meeting, members: Sequence[int], position: int) -> Seat:
        """Return the place where the rank at this position of a group meets the other members."""
        return Seat(meeting.store, members, position, meeting.number, self._device)

    def connect(self, backend: Any, meeting: Meeting, seat: Seat, timeout: float) -> None:
        """Connect a backend once all ranks have come to the meeting.

        An abort, or calling the meeting off, ends the wait. Connecting in the first collective
        instead, as torch does, could not be aborted while ranks wait for a rank that has failed.
        """
        with self.store.leading_to(meeting):
            at_store = replace(seat, store=self.store)
            ready = seam.adapter_of(backend).connect(backend, at_store, timedelta(seconds=timeout))
            run_with_timeout(ready, "connecting nccl", timeout, self.store.check_abort)

    def renew(self, group: ProcessGroup, meeting: Meeting, seat: Seat, timeout: timedelta) -> None:
        """Connect a group's nccl backend again, or a new backend that takes its place."""
        with self.connecting_later():
            backend = seam.adapter_of(seam.nccl_of(group)).renew(group, seat, timeout)
        self.connect(
            backend, replace(meeting, timeout=NCCL_RENEWAL_TIMEOUT), seat, NCCL_RENEWAL_TIMEOUT
        )

    def stand_in(self, kind: str, meeting: Meeting, seat: Seat, timeout: timedelta) -> Any:
        """Make and connect a backend for a group that this rank has no object for."""
        at_store = replace(seat, store=self.store)
        with self.connecting_later():
            backend = seam.ADAPTERS[kind].new("stand-in", at_store, timeout)
        self.connect(
            backend, replace(meeting, timeout=NCCL_RENEWAL_TIMEOUT), seat, NCCL_RENEWAL_TIMEOUT
        )
        return backend

    def abort(self, backends: Sequence[Any]) -> None:
        """Abort waits in the store and the backends' collectives.  Raises AbortHangs.

        May be called from any thread.
        """
        self.store.abort()
        with self._aborting:
            for adapter in {seam.adapter_of(backend) for backend in backends}:
                of_class = [backend for backend in backends if seam.adapter_of(backend) is adapter]
                abort = partial(adapter.abort, of_class)
                try:
                    run_with_timeout(
                        abort, "aborting nccl", ABORT_STEP, may_extend=_progress_of(adapter)
                    )
                except RuntimeError as error:
                    raise AbortHangs(str(error)) from error


def _progress_of(adapter: seam.Adapter) -> Callable[[], bool]:
    """Return a function that, each time it is called, tells whether to wait longer for an abort.

    The function returns False once no collective has ended for `NCCL_ABORT_TIMEOUT` seconds, or
    after `NCCL_WHOLE_ABORT_TIMEOUT` seconds.
    """
    pending, last_end = len(adapter.pending()), time.monotonic()
    deadline = last_end + NCCL_WHOLE_ABORT_TIMEOUT

    def has_progress() -> bool:
        nonlocal pending, last_end
        before, pending, now = pending, len(adapter.pending()), time.monotonic()
        if pending < before:
            last_end = now
        elif not pending:
            # A CUDA graph that has captured a collective keeps the communicator.
            for graph in instances_of(accelerator.graph()):
                graph.reset()
        return now < min(deadline, last_end + NCCL_ABORT_TIMEOUT)

    return has_progress


class _Claimed(AbortableStore):
    """Lets nccl2 claim a number in stores without compare and set (etcd).

    `compare_set` is not atomic here, which is enough: only rank 0 calls it, once for each number.
    """

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.set(key, desired)
        return self.get(key)


def wait_for_device(line: int) -> None:  # the probe reads `line`
    """Wait until all work on the GPU is done; `line` of the cell is shown meanwhile."""
    accelerator.synchronize()


@dataclass(frozen=True, slots=True)
class Pending:
    """The number of nccl's collectives that have begun and not ended, and the newest of them.

    `number` is the time when the newest was begun, in nanoseconds, which no other collective has.
    """

    count: int = 0
    number: int = 0
    name: str = ""


class UnderWay:
    """Collectives that nccl has begun since the groups were last formed."""

    def __init__(self, *, is_used: bool = True) -> None:
        self._first = dict.fromkeys(seam.ADAPTERS if is_used else (), 0)
        self._before: dict[str, int] = {}  # by group, the last number before the groups were formed

    def pending(self) -> Pending:
        """Return the collectives that have not ended, on the GPU or in its queue."""
        entries = [
            entry
            for name, first in self._first.items()
            for entry in seam.ADAPTERS[name].pending()
            if entry["record_id"] >= first
        ]
        if not entries:
            return Pending()
        newest = max(entries, key=lambda entry: int(entry["time_created_ns"]))
        return Pending(len(entries), int(newest["time_created_ns"]), operation_of(newest))

    def begun(self, since_ns: int) -> tuple[Begun, ...]:
        """Return the last collectives since this time, the oldest of each nccl class first.

        Sends and receives are left out.
        """
        collectives: list[Begun] = []
        for name in self._first:
            of_cell = takewhile(lambda e: e["time_created_ns"] >= since_ns, self._collectives(name))
            collectives += map(self._begun, islice(of_cell, MAX_REPORTED))
        return tuple(collectives[::-1])

    def last(self) -> Collective | None:
        """Return the collective that was begun last; None if no collective was begun."""
        newest = [each for name in self._first for each in islice(self._collectives(name), 1)]
        if not newest:
            return None
        entry = max(newest, key=lambda each: int(each["time_created_ns"]))
        begun = self._begun(entry)
        return Collective(begun.name, begun.number, begun.is_done, entry["time_created_ns"])

    def _collectives(self, name: str) -> Iterator[Mapping[str, Any]]:
        """Yield the collectives of a class of nccl, newest first, without sends and receives."""
        recorded = seam.ADAPTERS[name].recorded()
        new = takewhile(lambda entry: entry["record_id"] >= self._first[name], recorded)
        return (entry for entry in new if not entry["is_p2p"])

    def start_over(self) -> None:
        """Leave out collectives that have begun so far, as the groups are being rebuilt."""
        for name in self._first:
            adapter = seam.ADAPTERS[name]
            for entry in adapter.recorded():
                self._first[name] = max(self._first[name], int(entry["record_id"]) + 1)
                if adapter.keeps_numbering:
                    group, number = entry["process_group"][0], int(entry["collective_seq_id"])
                    self._before[group] = max(self._before.get(group, 0), number)

    def _begun(self, entry: Mapping[str, Any]) -> Begun:
        """Return an entry as `Begun`, in a group `NAME nccl`, because gloo has its own numbers.

        Numbers begin again whenever the groups are formed.
        """
        begun = begun_of(entry)
        number = begun.number - self._before.get(begun.group, 0)
        # An entry is retired only after a watchdog has seen that it was completed on the GPU.
        is_done = begun.is_done or entry["state"] == "completed"
        return replace(begun, group=f"{begun.group} nccl", number=number, is_done=is_done)


# --- gloo's collectives, by torch's Flight Recorder -----------------------------------------------

MAX_REPORTED = 64
"""The most collectives that are reported: mismatched ranks are rarely further apart."""

# Collectives in which sizes may differ between ranks; nccl2 uses the second name.
UNEVEN = {"all_to_all", "all_to_all_single"}


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of collectives that a backend has begun, and that seem not to have ended.

    `unfinished` may be too high: if two collectives end at once, the lower number can come last.
    """

    begun: int = 0
    unfinished: int = 0


class Recording:
    """Collectives of gloo's backends since the groups were last formed.

    torch counts a collective, may wait for the GIL, and then records the collective: in between the
    record lacks the newest. So a result is kept for later only if all counted collectives have
    ended.
    """

    def __init__(self) -> None:
        self._first = 0
        self._before: Mapping[str, Mapping[str, str]] = {}
        self._kept_last: tuple[object, Collective | None] | None = None
        self._kept_begun: tuple[object, tuple[Begun, ...]] | None = None

    def start_over(self) -> None:
        """Leave out collectives that have begun so far, as the groups are being rebuilt."""
        # Flight Recorder goes on counting, and never marks a failed collective as completed (2.13).
        self._kept_last = self._kept_begun = None
        self._before = torch_seam.recorded_groups()
        self._first = next((e["record_id"] + 1 for e in torch_seam.recorded_collectives()), 0)

    def counts(self) -> dict[str, Counts]:
        """Return counts for the backends in use, by the backend's number."""
        by_number, unknown = {}, set()
        for number, status in torch_seam.recorded_groups().items():
            before, begun = self._before.get(number), int(status["last_enqueued_collective"])
            done = "last_completed_collective"
            counts = Counts(begun, begun - max(0, int(status[done])))  # -1 for none completed
            if before is None:
                by_number[number] = counts
            elif torch_seam.RENEWS_GLOO:
                # The counters are right again once the reconnected backend has completed a
                # collective.
                if status[done] != before[done] and counts.unfinished >= 0:
                    by_number[number] = counts
                else:
                    unknown.add(number)
        for entry in self._entries() if unknown else ():
            if (number := str(entry["pg_id"])) in unknown:
                so_far = by_number.get(number, Counts())
                ended = bool(entry["retired"])
                by_number[number] = Counts(so_far.begun + 1, so_far.unfinished + (not ended))
        return by_number

    def newest_pending(self, counts: Mapping[str, Counts]) -> str:
        """Return the name of the newest collective that has not ended; "" if there is none."""
        if _have_ended(counts):
            return ""  # asking for all entries takes a thousand times as long
        return next((operation_of(entry) for entry in self._entries() if not entry["retired"]), "")

    def begun(self, counts: Mapping[str, Counts], since_ns: int) -> tuple[Begun, ...]:
        """Return the last collectives since this time, the oldest first."""
        if self._kept_begun is None or self._kept_begun[0] != (counts, since_ns):
            of_cell = takewhile(lambda e: e["time_created_ns"] >= since_ns, self._entries())
            collectives = tuple(begun_of(entry) for entry in islice(of_cell, MAX_REPORTED))[::-1]
            if not (_have_ended(counts) and all(each.is_done for each in collectives)):
                return collectives
            self._kept_begun = (dict(counts), since_ns), collectives
        return self._kept_begun[1]

    def last(self) -> Collective | None:
        """Return the collective begun last, or None; takes 8 ms if Flight Recorder is full."""
        counts = self.counts()
        if self._kept_last is None or self._kept_last[0] != counts:
            collective, entry = None, next(self._entries(), None)
            if entry is not None and (count := counts.get(str(entry["pg_id"]))) is not None:
                number = int(entry["collective_seq_id"])
                is_done = bool(entry["retired"]) or number <= count.begun - count.unfinished
                began_ns = entry["time_created_ns"]
                collective = Collective(operation_of(entry), number, is_done, began_ns)
            if not (_have_ended(counts) and (collective is None or collective.is_done)):
                return collective
            self._kept_last = counts, collective
        return self._kept_last[1]

    def _entries(self) -> Iterator[dict[str, Any]]:
        """Yield Flight Recorder's entries since `start_over`, the newest first."""
        entries = torch_seam.recorded_collectives()
        return takewhile(lambda entry: entry["record_id"] >= self._first, entries)


def _have_ended(counts: Mapping[str, Counts]) -> bool:
    return not any(each.unfinished for each in counts.values())


def operation_of(entry: Mapping[str, Any]) -> str:
    """Return a collective's name without backend and other rank: `all_reduce`, `recv`."""
    return re.sub(r"^\w+:| .*", "", entry["profiling_name"])


def begun_of(entry: Mapping[str, Any]) -> Begun:
    """Return the fields of a Flight Recorder entry that are compared between ranks."""
    name = operation_of(entry)
    # Only the root has the input of a scatter, and the output of a gather.
    side = "output" if name == "scatter" else "input"
    # nccl's all_gather allows tensors of different sizes.
    is_uneven = name == "all_gather" and len({*map(tuple, entry["output_sizes"])}) > 1
    sizes = [] if is_uneven or name in UNEVEN else entry[f"{side}_sizes"]
    return Begun(
        group=entry["process_group"][0],
        number=entry["collective_seq_id"],
        name=name,
        sizes=" ".join(map(str, sizes)),
        dtypes=" ".join(dict.fromkeys(entry[f"{side}_dtypes"])),
        elements=" ".join(str(math.prod(size)) for size in sizes),
        is_done=bool(entry["retired"]),
    )
