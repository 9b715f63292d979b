"""Makes, connects and aborts nccl's backends, and reads collectives from Flight Recorder.

nccl has an abort, which ends its GPU kernels. But code that waits for these kernels then goes on
with meaningless results, so the main thread must be interrupted, too. torch's own watchdog must do
nothing: workers start with `TORCH_NCCL_ASYNC_ERROR_HANDLING=0`.

`Group` uses this file, and so does `Probe`, which finds out for which collective the main thread
waits. `Probe` also reads the collectives of gloo by this file.
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
"""Seconds for all ranks to connect nccl: for a new group, and after a world was healed or scaled.

Both are less than agents wait: 180 s for a start, and 30 s for healing.
"""

NCCL_ABORT_TIMEOUT, NCCL_WHOLE_ABORT_TIMEOUT = 10.0, 60.0
"""Seconds after which an abort is given up.

The first limit begins anew whenever a collective ends; the second is for the whole abort.

Some aborts never end (seen with NCCL 2.25). A usual abort takes 0.5 s. Each GPU kernel in the queue
adds as much time as a copy of its data. On an H200 that ranks share, a copy of a gigabyte takes
0.2 s, and more if other programs use the GPU.
"""

ABORT_STEP = 1.0  # seconds between two checks whether an abort still makes progress


class AbortHangs(RuntimeError):
    """An abort of nccl failed or did not end in time, so this rank needs a new process."""


class Nccl:
    """Connects and aborts backends of torch's two classes for nccl, "nccl" and "nccl2".

    Backends of nccl2 are made so that they can be connected again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # An nccl2 backend always uses the store with which it was made. So the nccl2 backends that
        # nbdist connects get this store. Whenever one of them connects, `leading_to` makes this
        # store pass calls to the store where the ranks meet now.
        self.store = _Claimed(Meeting(None))
        self._connects_later = False
        self._aborting = threading.Lock()
        seam.when_nccl2_is_made(self._make)
        seam.when_legacy_is_made(self._connect_new)

    @contextmanager
    def connecting_later(self) -> Iterator[None]:
        """Within this context, new nccl backends are not connected; the caller does so later."""
        self._connects_later = True
        try:
            yield
        finally:
            self._connects_later = False

    def _make(self, create: Callable[[Any], Any], options: Any) -> Any:
        store, size, timeout = options.store, options.group_size, options.timeout
        # If user code has bound its group to a device, torch splits a backend from an existing one.
        # Such a backend is connected already.
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
        """Return the data with which this rank connects a backend of a group.

        `members` are the group's ranks, and `position` is the index of this rank among them.
        """
        return Seat(meeting.store, members, position, meeting.number, self._device)

    def connect(self, backend: Any, meeting: Meeting, seat: Seat, timeout: float) -> None:
        """Wait until all ranks have come to the meeting, and connect a backend to them.

        The wait ends with an error if it is aborted, if the meeting is called off, or if it takes
        too long. The meeting's own timeout limits the wait in the store, and `timeout`, in seconds,
        the connecting afterwards. Without this method torch would connect in the first collective,
        where a wait for a rank that has failed could not be aborted.
        """
        with self.store.leading_to(meeting):
            at_store = replace(seat, store=self.store)
            ready = seam.adapter_of(backend).connect(backend, at_store, timedelta(seconds=timeout))
            run_with_timeout(ready, "connecting nccl", timeout, self.store.check_abort)

    def renew(self, group: ProcessGroup, meeting: Meeting, seat: Seat, timeout: timedelta) -> None:
        """Connect a group's nccl2 backend again, or replace its legacy backend by a new one.

        A legacy backend cannot connect again. `timeout` is the time limit for collectives of the
        new backend.
        """
        with self.connecting_later():
            backend = seam.adapter_of(seam.nccl_of(group)).renew(group, seat, timeout)
        self.connect(
            backend, replace(meeting, timeout=NCCL_RENEWAL_TIMEOUT), seat, NCCL_RENEWAL_TIMEOUT
        )

    def stand_in(self, kind: str, meeting: Meeting, seat: Seat, timeout: timedelta) -> Any:
        """Make and connect a backend for a group for which this rank has no object.

        The other members of the group can connect only if this rank connects, too. `kind` is "nccl"
        or "nccl2", and `timeout` is that of the backend's collectives.
        """
        at_store = replace(seat, store=self.store)
        with self.connecting_later():
            backend = seam.ADAPTERS[kind].new("stand-in", at_store, timeout)
        self.connect(
            backend, replace(meeting, timeout=NCCL_RENEWAL_TIMEOUT), seat, NCCL_RENEWAL_TIMEOUT
        )
        return backend

    def abort(self, backends: Sequence[Any]) -> None:
        """Abort the collectives of these backends, and end the waits of backends that connect now.

        Any thread may call this. Raises AbortHangs if an abort fails or does not end in time.
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
    """Return a function that tells whether the abort that begins now still makes progress.

    The function returns False if no collective has ended for `NCCL_ABORT_TIMEOUT` seconds, or if
    the abort has taken `NCCL_WHOLE_ABORT_TIMEOUT` seconds. Once all collectives have ended, a call
    resets all CUDA graphs, for which the abort may be waiting.
    """
    pending, last_end = len(adapter.pending()), time.monotonic()
    deadline = last_end + NCCL_WHOLE_ABORT_TIMEOUT

    def has_progress() -> bool:
        nonlocal pending, last_end
        before, pending, now = pending, len(adapter.pending()), time.monotonic()
        if pending < before:
            last_end = now
        elif not pending:
            # The abort may wait for CUDA graphs that have captured a collective: reset all graphs.
            for graph in instances_of(accelerator.graph()):
                graph.reset()
        return now < min(deadline, last_end + NCCL_ABORT_TIMEOUT)

    return has_progress


class _Claimed(AbortableStore):
    """A store for nccl2 backends, with the method `compare_set` that they need.

    Some stores, such as etcd's, lack this method. The method here is not atomic. This suffices,
    because only rank 0 of a group calls it, and only once each time that the group connects.
    """

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.set(key, desired)
        return self.get(key)


def wait_for_device(line: int) -> None:  # `Probe` reads `line` in this function's frame
    """Wait until all work on the GPU is done; meanwhile the rank is shown at `line` of the cell."""
    accelerator.synchronize()


@dataclass(frozen=True, slots=True)
class Pending:
    """The `count` of nccl's collectives that have begun and not ended, and the newest of them.

    `name` is the name of the newest collective. `number` is the time when it was begun, in
    nanoseconds since 1970, and tells it apart from other collectives.
    """

    count: int = 0
    number: int = 0
    name: str = ""


class UnderWay:
    """Reads from Flight Recorder the collectives of nccl since the groups were last formed."""

    def __init__(self, *, is_used: bool = True) -> None:
        # For each class of nccl, the number of Flight Recorder's first entry after the groups were
        # last formed.
        self._first = dict.fromkeys(seam.ADAPTERS if is_used else (), 0)
        # For each group, the number of its last collective before the groups were last formed. Only
        # for nccl2, whose numbers do not begin again.
        self._before: dict[str, int] = {}

    def pending(self) -> Pending:
        """Return how many collectives the GPU has not completed, and the newest of them if any."""
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
        """Return the collectives that were begun since `since_ns`, without sends and receives.

        Of each nccl class, at most the last `MAX_REPORTED` are returned, the oldest first.
        """
        collectives: list[Begun] = []
        for name in self._first:
            of_cell = takewhile(lambda e: e["time_created_ns"] >= since_ns, self._collectives(name))
            collectives += map(self._begun, islice(of_cell, MAX_REPORTED))
        return tuple(collectives[::-1])

    def last(self) -> Collective | None:
        """Return the collective of nccl that was begun last; None if there is none.

        Sends and receives do not count.
        """
        newest = [each for name in self._first for each in islice(self._collectives(name), 1)]
        if not newest:
            return None
        entry = max(newest, key=lambda each: int(each["time_created_ns"]))
        begun = self._begun(entry)
        return Collective(begun.name, begun.number, begun.is_done, entry["time_created_ns"])

    def _collectives(self, name: str) -> Iterator[Mapping[str, Any]]:
        """Yield Flight Recorder's entries of collectives of an nccl class, the newest first.

        Sends, receives, and entries from before the groups were last formed are left out.
        """
        recorded = seam.ADAPTERS[name].recorded()
        new = takewhile(lambda entry: entry["record_id"] >= self._first[name], recorded)
        return (entry for entry in new if not entry["is_p2p"])

    def start_over(self) -> None:
        """Ignore the collectives that have begun so far; called while the groups are rebuilt."""
        for name in self._first:
            adapter = seam.ADAPTERS[name]
            for entry in adapter.recorded():
                self._first[name] = max(self._first[name], int(entry["record_id"]) + 1)
                if adapter.keeps_numbering:
                    group, number = entry["process_group"][0], int(entry["collective_seq_id"])
                    self._before[group] = max(self._before.get(group, 0), number)

    def _begun(self, entry: Mapping[str, Any]) -> Begun:
        """Return an entry of Flight Recorder as `Begun`, to compare it with those of other ranks.

        The group is called `NAME nccl`, because gloo numbers its collectives in the same group
        independently. Numbers begin again whenever the groups are formed.
        """
        begun = begun_of(entry)
        number = begun.number - self._before.get(begun.group, 0)
        # Flight Recorder marks a collective first as completed, and as retired only after torch's
        # watchdog has seen that it is completed.
        is_done = begun.is_done or entry["state"] == "completed"
        return replace(begun, group=f"{begun.group} nccl", number=number, is_done=is_done)


# --- gloo's collectives, by torch's Flight Recorder -----------------------------------------------

MAX_REPORTED = 64
"""The most collectives of gloo, and of each nccl class, that a rank reports to the agent.

They are compared with the collectives of other ranks. Ranks are rarely further apart than this.
"""

# Collectives in which the ranks' tensors may have different sizes. nccl2 uses the second name.
UNEVEN = {"all_to_all", "all_to_all_single"}


@dataclass(frozen=True, slots=True)
class Counts:
    """How many collectives a backend has begun, and how many seem not to have ended.

    torch reports only the number of the collective that ended last. If two end at once, this can be
    the lower number, and then `unfinished` is too high.
    """

    begun: int = 0
    unfinished: int = 0


class Recording:
    """Reads from Flight Recorder the collectives of gloo since the groups were last formed.

    A result is kept for later calls only if all counted collectives have ended. The reason is that
    torch counts a collective before it records it, and may wait for the GIL in between: a result
    can lack the newest collective although the counts include it.
    """

    def __init__(self) -> None:
        self._first = 0
        self._before: Mapping[str, Mapping[str, str]] = {}
        self._kept_last: tuple[object, Collective | None] | None = None
        self._kept_begun: tuple[object, tuple[Begun, ...]] | None = None

    def start_over(self) -> None:
        """Ignore the collectives that have begun so far; called while the groups are rebuilt."""
        # Flight Recorder does not begin again: its counts go on, and it never marks a failed
        # collective as completed (torch 2.13).
        self._kept_last = self._kept_begun = None
        self._before = torch_seam.recorded_groups()
        self._first = next((e["record_id"] + 1 for e in torch_seam.recorded_collectives()), 0)

    def counts(self) -> dict[str, Counts]:
        """Return the `Counts` of gloo's backends, by the number that torch has given a backend.

        A backend that was connected again may be missing until it has begun a collective.
        """
        by_number, unknown = {}, set()
        for number, status in torch_seam.recorded_groups().items():
            before, begun = self._before.get(number), int(status["last_enqueued_collective"])
            done = "last_completed_collective"
            # `status[done]` is the number of the last completed collective, -1 before the first.
            counts = Counts(begun, begun - max(0, int(status[done])))
            if before is None:
                by_number[number] = counts
            elif torch_seam.RENEWS_GLOO:
                # torch's counters of a backend that was reconnected are wrong until the backend has
                # completed a collective. Until then count Flight Recorder's entries for it.
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
            return ""  # reading the entries would take much longer than reading the counters
        return next((operation_of(entry) for entry in self._entries() if not entry["retired"]), "")

    def begun(self, counts: Mapping[str, Counts], since_ns: int) -> tuple[Begun, ...]:
        """Return the collectives of gloo that were begun since `since_ns`, the oldest first.

        At most the last `MAX_REPORTED` are returned. The argument `counts` is the present result of
        the method `counts`.
        """
        if self._kept_begun is None or self._kept_begun[0] != (counts, since_ns):
            of_cell = takewhile(lambda e: e["time_created_ns"] >= since_ns, self._entries())
            collectives = tuple(begun_of(entry) for entry in islice(of_cell, MAX_REPORTED))[::-1]
            if not (_have_ended(counts) and all(each.is_done for each in collectives)):
                return collectives
            self._kept_begun = (dict(counts), since_ns), collectives
        return self._kept_begun[1]

    def last(self) -> Collective | None:
        """Return the collective of gloo that was begun last; None if there is none.

        If Flight Recorder is full, this can take 8 ms.
        """
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
    """Return the name of a collective in a Flight Recorder entry: `recv` for `gloo:recv 0<-1`."""
    return re.sub(r"^\w+:| .*", "", entry["profiling_name"])


def begun_of(entry: Mapping[str, Any]) -> Begun:
    """Return a Flight Recorder entry as `Begun`, to compare it with those of other ranks.

    The entry's sizes are left out if they may differ between ranks.
    """
    name = operation_of(entry)
    # Compare the tensors that all ranks have: only the root has the input of a scatter, and only
    # the root has the output of a gather.
    side = "output" if name == "scatter" else "input"
    # In nccl's all_gather the ranks' tensors may have different sizes.
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
