"""How nccl's backends are made, connected and aborted, and which collective is under way.

Not run on a GPU yet.

nccl has an abort, in place of gloo's broken connections: its kernels end, and what waits for
their stream goes on, with results that mean nothing, so the main thread has to be
interrupted as well.  torch's own watchdog must not act (`TORCH_NCCL_ASYNC_ERROR_HANDLING=0`,
which workers start with).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import islice, takewhile
from typing import Any

import torch
from torch.distributed import ProcessGroup

from nbdist.wire.views import Begun, Collective
from nbdist.worker.compat import accelerator
from nbdist.worker.compat import nccl as seam
from nbdist.worker.compat.nccl import Seat
from nbdist.worker.group.flight_record import MOST_BEGUN, begun_of, operation_of
from nbdist.worker.group.stores import AbortableStore, Meeting, until_over

START_TIMEOUT, RENEWAL_TIMEOUT = 100.0, 25.0
"""Seconds for all ranks to connect: agents wait 180 s for a start, and 30 s for healing."""

ABORT_TIMEOUT = 5.0
"""Seconds for all aborts together, which have been seen to take for ever (NCCL 2.25); NVIDIA's
in-process restart takes 0.5 s, and 0.01 s for each kernel."""


class AbortHangs(RuntimeError):
    """It did not end in time; only another process can take part in the group again."""


class Nccl:
    """Makes nccl2 backends so that they can be renewed, connects all, and aborts all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of every nccl2 backend, for life; it leads to where they meet just then.
        self._store = _Claimed(None)
        self._is_put_off = False
        seam.when_nccl2_is_made(self._make)

    def __repr__(self) -> str:
        return f"<Nccl on {self._device}, {self._store}>"

    @contextmanager
    def connecting_later(self) -> Iterator[None]:
        """Have what is made meanwhile be connected by `connect`, and not at once."""
        self._is_put_off = True
        try:
            yield
        finally:
            self._is_put_off = False

    def _make(self, create: Callable[[Any], Any], options: Any) -> Any:
        meeting = Meeting(options.store, timeout=options.timeout.total_seconds())
        members = options.global_ranks_in_group or range(options.group_size)
        # Torch splits another one where user code has bound its group to a device.
        is_split = options.split_from is not None
        options.store = self._store
        with self._store.at(meeting):
            backend = create(options)
        if not (is_split or self._is_put_off):
            seat = self.seat(meeting, members, options.group_rank)
            self.connect(backend, meeting, seat, START_TIMEOUT)
        return backend

    def seat(self, meeting: Meeting, members: Sequence[int], position: int) -> Seat:
        """Say where the rank at this position meets the other members of a group."""
        return Seat(meeting.store, members, position, meeting.number, self._device)

    def connect(self, backend: Any, meeting: Meeting, seat: Seat, timeout: float) -> None:
        """Have all ranks connect, all at once; raises as `until_over` does.

        With the first collective instead, ranks that wait for one that has failed before it
        could not be aborted.
        """
        with self._store.at(meeting):
            at_store = replace(seat, store=self._store)
            ready = seam.adapter_of(backend).connect(backend, at_store, timedelta(seconds=timeout))
            until_over(ready, "connecting nccl", timeout, meeting.over)

    def renew(
        self, group: ProcessGroup, meeting: Meeting, seat: Seat, timeout: timedelta, *, now: bool
    ) -> None:
        """Have the ranks of a group connect anew: now, or with its first collective if they may."""
        adapter = seam.adapter_of(seam.nccl_of(group))
        backend = adapter.renew(group, seat, timeout)
        if now or adapter.connects_at_once:
            self.connect(backend, meeting, seat, RENEWAL_TIMEOUT)

    def stand_in(self, meeting: Meeting, seat: Seat, timeout: timedelta) -> Any:
        """Make one for a group that this rank does not hold, connected with the others."""
        backend = seam.new_nccl2(replace(seat, store=self._store), timeout)
        self.connect(backend, meeting, seat, RENEWAL_TIMEOUT)
        return backend

    def abort(self, backends: Sequence[Any]) -> None:
        """End waits for one another, and their collectives, from any thread.

        Raises AbortHangs.
        """
        self._store.abort()
        for adapter in {seam.adapter_of(backend) for backend in backends}:
            own = [backend for backend in backends if seam.adapter_of(backend) is adapter]
            try:
                until_over(partial(adapter.abort, own), "aborting nccl", ABORT_TIMEOUT)
            except RuntimeError as error:
                raise AbortHangs(str(error)) from error

    def start_over(self) -> None:
        """Allow backends to be connected again, after `abort`."""
        self._store.start_over()

    @property
    def waits_to_meet(self) -> bool:
        """Whether a thread waits for ranks that have not come to make a group."""
        return self._store.is_waited_in


class _Claimed(AbortableStore):
    """Lets nccl2 claim a number where torch's rendezvous has no compare and set (etcd).

    Only rank 0 does, and each number is given to it once.
    """

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.set(key, desired)
        return self.get(key)


def wait_for_device(line: int) -> None:  # the probe reads it
    """Wait for all that runs on the GPU, in this line of a cell."""
    accelerator.synchronize()


@dataclass(frozen=True, slots=True)
class Pending:
    """What nccl has begun and not ended: how many collectives, and the newest one.

    `number` grows with each that begins, 0 where there is none; `name` is "" then.
    """

    count: int = 0
    number: int = 0
    name: str = ""


class UnderWay:
    """Of the collectives since the groups were last formed."""

    def __init__(self) -> None:
        self._first = dict.fromkeys(seam.ADAPTERS, 0)
        self._before: dict[str, int] = {}  # by group, the last number there until then

    def __repr__(self) -> str:
        return f"<UnderWay from {self._first}>"

    def pending(self) -> Pending:
        """Say what is under way now, on the GPU or waiting there for its turn."""
        found = [
            entry
            for name, first in self._first.items()
            for entry in seam.ADAPTERS[name].pending()
            if entry["record_id"] >= first
        ]
        if not found:
            return Pending()
        newest = max(found, key=lambda entry: int(entry["time_created_ns"]))
        return Pending(len(found), int(newest["time_created_ns"]), operation_of(newest))

    def begun(self, since_ns: int) -> tuple[Begun, ...]:
        """Give the last collectives since then, the oldest first; not sends and receives."""
        found: list[Begun] = []
        for name in self._first:
            of_cell = takewhile(lambda e: e["time_created_ns"] >= since_ns, self._together(name))
            found += map(self._begun, islice(of_cell, MOST_BEGUN))
        return tuple(found[::-1])

    def last(self) -> Collective | None:
        """Name the one that was begun last; None if none was."""
        newest = [each for name in self._first for each in islice(self._together(name), 1)]
        if not newest:
            return None
        entry = max(newest, key=lambda each: int(each["time_created_ns"]))
        begun = self._begun(entry)
        return Collective(begun.name, begun.number, begun.is_done, entry["time_created_ns"])

    def _together(self, name: str) -> Iterator[Mapping[str, Any]]:
        """Read the collectives of one class, the newest first."""
        recorded = seam.ADAPTERS[name].recorded()
        new = takewhile(lambda entry: entry["record_id"] >= self._first[name], recorded)
        return (entry for entry in new if not entry["is_p2p"])

    def start_over(self) -> None:
        """Forget what has begun so far: the groups are being formed anew."""
        for name, adapter in seam.ADAPTERS.items():
            for entry in adapter.recorded():
                self._first[name] = max(self._first[name], int(entry["record_id"]) + 1)
                if adapter.counts_on:
                    group, number = entry["process_group"][0], int(entry["collective_seq_id"])
                    self._before[group] = max(self._before.get(group, 0), number)

    def _begun(self, entry: Mapping[str, Any]) -> Begun:
        """Have a group's nccl backend count by itself, from one in each generation."""
        begun = begun_of(entry)
        number = begun.number - self._before.get(begun.group, 0)
        return replace(begun, group=f"{begun.group} nccl", number=number)
