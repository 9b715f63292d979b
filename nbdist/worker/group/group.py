"""The process group that all ranks of a world share: formed, aborted, formed again.

When its connections have ended, its backend connects again, before torch 2.14 another one in its
place.  The group's object stays the same, and with it DDP modules, subgroups and meshes.  Called on
the main thread to form the group and when a task begins, and on the control thread for all else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nbdist.system.processes import trim_memory
from nbdist.wire.spec import WorkerStart, cancel_file
from nbdist.worker.compat import nccl
from nbdist.worker.compat import torch as seam
from nbdist.worker.group import default
from nbdist.worker.group.gloo import COLLECTIVE_TIMEOUT, Gloo
from nbdist.worker.group.nccl import START_TIMEOUT, Nccl, wait_for_device
from nbdist.worker.group.stores import (
    FORM_TIMEOUT,
    AbortableStore,
    AgentStore,
    Connections,
    Meeting,
    TorchRendezvous,
)

ARRIVED = "arrived"  # where in the store a rank that is new says that it has come to the group
WORLD = "world"  # the world's own group in the store; others have names that torch gave them
OF_NCCL = "/is "  # and nccl's class follow a group's name where that, not its gloo, is meant


@dataclass(frozen=True, slots=True)
class Side:
    """This rank's side of one group; `group` None where only others have an object for it."""

    name: str
    members: Sequence[int]
    group: ProcessGroup | None
    timeout: timedelta = timedelta(seconds=COLLECTIVE_TIMEOUT)


class Group:
    """A worker's side of the world's group, and of every group made from it."""

    def __init__(self, start: WorkerStart) -> None:
        self._start = start
        of_torch = start.world.torch_store
        self._rendezvous = TorchRendezvous(of_torch, start.rank) if of_torch else None
        asks = start.store_socket and not self._rendezvous
        self._agent = Connections(start.store_socket) if asks else None
        self._stores: dict[str, AgentStore] = {}
        self._file: Any = None
        if self._agent is None:
            self._file = seam.FileStore(start.store_path, start.world.world_size)
            self._file.set_timeout(timedelta(seconds=FORM_TIMEOUT))
        # The same in all generations: `new_group` meets there.
        self._shared = AbortableStore(Meeting(self._store_of(0, WORLD)))
        self._stand_ins: list[Any] = []
        self.is_whole = True
        self.task_began_ns = 0
        self._gloo = Gloo()
        self.connections = self._gloo.connections
        self._nccl = Nccl(torch.device(start.device)) if self.uses_nccl else None
        of_nccl = [] if self._nccl is None else [self._nccl.store]
        self._waited_in = [self._shared, self._gloo.store, *of_nccl]
        self._default = default.DefaultGroup(timedelta(seconds=COLLECTIVE_TIMEOUT))

    def __repr__(self) -> str:
        return f"<Group of {self._start.world.world_size}, {self._gloo}>"

    def begin_task(self, task_id: str) -> None:
        """Put the world's group in its place, and name new groups after this task."""
        self.task_began_ns = time.time_ns()
        self._default.begin_task(task_id)
        if self._nccl is not None and (backend := nccl.nccl_of(self._default.group)) is not None:
            nccl.adapter_of(backend).end_calls(backend)

    def end(self) -> None:
        """Shut everything down, at the end of the worker."""
        self._default.end()
        if self._agent is not None:
            self._agent.close()

    def leave(self) -> None:
        """Take no part in it any more, in a forked child."""
        self._default.leave()
        self._gloo.leave()
        if self._agent is not None:
            self._agent.close()

    def held(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks of each group that this one holds besides the world's, by its name."""
        found = {}
        for name, group in self._default.subgroups().items():
            ranks = tuple(dist.get_process_group_ranks(group))
            if seam.gloo_of(group) is not None:
                found[name] = ranks
            if (backend := nccl.nccl_of(group)) is not None:
                found[name + OF_NCCL + backend.name()] = ranks
        return found

    @property
    def uses_nccl(self) -> bool:
        """Whether the world's group, and so others too, may have nccl for CUDA tensors."""
        return "nccl" in (self._start.world.backend or "")

    @property
    def nccl_error(self) -> str:
        """What has gone wrong between ranks, as nccl says; "" for nothing."""
        backends = self._nccl_backends()
        return next(filter(None, (nccl.adapter_of(each).error(each) for each in backends)), "")

    def wait_for_nccl(self, line: int) -> None:
        """Wait at a cell's end, in its last line, for the collectives that it has begun.

        Raises DistBackendError where nccl has ended them because of an error.
        """
        adapters = {nccl.adapter_of(each) for each in self._nccl_backends()}
        entries = (entry for adapter in adapters for entry in adapter.pending())
        if any(int(entry["time_created_ns"]) >= self.task_began_ns for entry in entries):
            wait_for_device(line)
            if error := self.nccl_error:
                raise dist.DistBackendError(f"nccl has ended this cell's collectives: {error}")

    @property
    def waits_to_meet(self) -> bool:
        """Whether a thread waits for ranks that have not come to make a group."""
        return any(store.is_waited_in for store in self._waited_in)

    @property
    def _world(self) -> Side:
        """This side of the world's own group, also while user code has destroyed it."""
        ranks = range(self._start.world.world_size)
        return Side(WORLD, ranks, self._default.group, self._default.timeout)

    # --- form ---------------------------------------------------------------------------------

    # Torch makes the default group; its gloo backend is ours, and meets in keys of this generation.
    # A newcomer then connects the groups that the others hold, as they do, in the same order.

    def form(self) -> None:
        """Join the world's group, waiting until every rank has.

        The ranks of one machine meet in a file of this user's: no port, and it outlives rank 0.
        """
        generation, joins = self._start.generation, self._start.joins
        self._meet(generation, self._start)
        if joins is not None:
            self._store_of(generation, ARRIVED).set(str(self._start.rank), "")
        self._form_default(Meeting(self._store_of(generation, WORLD), generation))
        if joins is not None:
            self._connect_others(generation, joins)

    def _form_default(self, meeting: Meeting) -> None:
        """Make it torch's default group; its gloo connects in `meeting`."""
        start = self._start
        if start.sized_in > 1:
            # Its name is in the store's keys, and a mesh of the size before must not find it.
            self._default.name_after(f"sized{start.sized_in}")
        is_first = start.generation == 1
        # torch puts prefixes of its own before; survivors of a death meet without them.
        self._gloo.next_meeting = meeting
        try:
            # What torch would wrap a later one in meets where earlier generations did.
            later = nullcontext() if self._nccl is None else self._nccl.connecting_later()
            with later, nullcontext() if is_first else seam.without_comparing():
                self._default.form(start, self._shared)
        finally:
            self._gloo.next_meeting = None
        backend = None if is_first or not seam.compares() else seam.gloo_of(self._default.group)
        if backend is not None:
            # torch made it without comparing collectives, which all others do.
            comparing = self._comparing(backend, self._world, start.generation)
            seam.replace_gloo(self._default.group, comparing, start.generation)
        self._connect_own_nccl(start.generation)

    def resize(self, start: WorkerStart, newcomers: Sequence[int]) -> None:
        """Form a default group of another size; torch's objects keep theirs for life.

        What was made from the one before is stale, but for DDP modules.  Until all newcomers have
        started nothing happens to it, and it can be called off.
        """
        over = cancel_file(start.cancel_path, start.generation)
        self._meet(start.generation, start)
        arrivals = Meeting(self._store_of(start.generation, ARRIVED), over=over)
        AbortableStore(arrivals).wait([str(rank) for rank in newcomers])
        # From here on the group before is gone, whether the ranks meet or not.
        self.abort()
        sizes = self._start.world.world_size, start.world.world_size
        default.refuse_stale(self._default.take_out(), *sizes)
        self._stand_ins.clear()
        before, self._start = self._default.group, start
        self.is_whole = False
        self._start_over()
        self._form_default(Meeting(self._store_of(start.generation, WORLD), start.generation, over))
        self.is_whole = True
        default.move_models(before, self._default.group)

    # --- abort, and form again ----------------------------------------------------------------

    def abort(self) -> int:
        """End all waits, in collectives and for others to make a group; from any thread.

        Returns how many connections of gloo's and groups of nccl's it ended.  Raises AbortHangs.
        """
        self._shared.abort()
        return self._gloo.abort() + self._abort_nccl()

    def regroup(self, generation: int, held: Mapping[str, tuple[int, ...]]) -> None:
        """Connect every group again in place; all its members do so at once.

        `held` are the groups of all ranks together.  Raises RuntimeError when they do not meet.
        """
        most = self._most_generations()
        if most is not None and generation > most:
            why = f"the group was rebuilt {most} times, which is all torch takes"
            raise dist.DistBackendError(why)
        # What they hold on the device; they may not have been aborted.
        self._abort_nccl()
        # First, so that what is made anew here can be waited for, and aborted.
        self._start_over()
        self._meet(generation, self._start)
        self._connect(self._world, generation)
        self._connect_own_nccl(generation)
        self._connect_others(generation, held)
        default.forget_broken_off_steps()
        if self._nccl is not None:
            # A step whose collectives were aborted went on to its end, on some ranks alone, and
            # may have put their gradients into other buckets.
            default.begin_models_anew()
            # A communicator's 34 MB on the CPU are of the arena of whatever thread made it, which
            # keeps them once it is aborted (NCCL 2.28): 9 MB more with each death.
            trim_memory()

    def _most_generations(self) -> int | None:
        """Return how often a group can be rebuilt; None where there is no limit."""
        renews = self._gloo.renews and not seam.compares()
        backend = nccl.nccl_of(self._default.group)
        if backend is None:
            return None if renews else seam.MOST_RENEWALS
        most = nccl.adapter_of(backend).most_renewals
        return seam.MOST_RENEWALS if most is None and not renews else most

    def _start_over(self) -> None:
        for store in self._waited_in:
            store.start_over()

    def _connect_others(self, generation: int, held: Mapping[str, tuple[int, ...]]) -> None:
        """Connect the rest, in one order on all ranks, or they would wait for one another.

        Where this rank does not hold the group, an unused backend stands in for it: the others
        connect to all members.
        """
        own = self._default.subgroups()
        self._stand_ins.clear()
        for name, members in sorted(held.items()):
            if self._start.rank in members:
                side = Side(name, members, own.get(name.partition(OF_NCCL)[0]))
                connect = self._connect_nccl if OF_NCCL in name else self._connect
                connect(side, generation)

    def _connect(self, side: Side, generation: int) -> None:
        """Connect gloo's backend of one group again, or give the group a new one."""
        backend = None if side.group is None else seam.gloo_of(side.group)
        if side.group is not None and backend is None:
            return  # nccl's alone
        meeting, rank = self._meeting_of(side.name, generation), self._rank_in(side)
        # Not one that compares first (debug level DETAIL).
        if self._gloo.renews and getattr(backend, "supports_reconfigure", False):
            self._gloo.renew(backend, meeting, rank, len(side.members))
            return
        backend = self._gloo.new(meeting, rank, len(side.members), side.timeout)
        comparing = self._comparing(backend, side, generation)
        if side.group is None:
            self._stand_ins.append(comparing)
            return
        seam.prepare_gloo(backend, side.group, side.members)
        seam.replace_gloo(side.group, comparing, generation)

    def _comparing(self, backend: Any, side: Side, generation: int) -> Any:
        """Return the backend, with debug level DETAIL in one that compares first over a helper."""
        if not seam.compares():
            return backend
        meeting = self._meeting_of(f"{side.name}/check", generation)
        helper = self._gloo.new(meeting, self._rank_in(side), len(side.members), side.timeout)
        return seam.comparing(backend, helper)

    # --- nccl ---------------------------------------------------------------------------------

    def _connect_own_nccl(self, generation: int) -> None:
        backend = nccl.nccl_of(self._default.group)
        if backend is not None:
            own = self._world
            side = replace(own, name=own.name + OF_NCCL + backend.name())
            self._connect_nccl(side, generation)

    def _connect_nccl(self, side: Side, generation: int) -> None:
        """Connect nccl's backend of one group in keys of this generation."""
        if self._nccl is None:
            return
        meeting = self._meeting_of(side.name, generation)
        seat = self._nccl.seat(meeting, side.members, self._rank_in(side))
        if side.group is None:
            kind = side.name.partition(OF_NCCL)[2]
            self._stand_ins.append(self._nccl.stand_in(kind, meeting, seat, side.timeout))
        elif generation == 1:
            self._nccl.connect(nccl.nccl_of(side.group), meeting, seat, START_TIMEOUT)
        else:
            self._nccl.renew(side.group, meeting, seat, side.timeout)

    def _abort_nccl(self) -> int:
        """Abort collectives of all groups; return how many groups there were.  From any thread."""
        if self._nccl is None:
            return 0
        found = self._nccl_backends()
        self._nccl.abort(found)
        return len(found)

    def _nccl_backends(self) -> list[Any]:
        """Return those of all groups, and what stands in for one."""
        groups = chain([self._default.group], self._default.subgroups().values())
        found = chain(map(nccl.nccl_of, groups), self._stand_ins)
        return [each for each in found if each is not None and each.name() in nccl.ADAPTERS]

    # --- where ranks meet ---------------------------------------------------------------------

    def _meet(self, generation: int, start: WorkerStart) -> None:
        """Take the store of this generation, where each has its own."""
        if self._rendezvous is not None:
            self._rendezvous.rank = start.rank
            self._file = self._rendezvous.meet(generation, start.world.world_size)
            # To connect a backend anew, torch has ranks compare and set.
            self._gloo.renews = self._gloo.renews and self._rendezvous.compares
            self._shared.meeting = Meeting(self._store_of(0, WORLD))

    def _rank_in(self, side: Side) -> int:
        return side.members.index(self._start.rank)

    def _meeting_of(self, name: str, generation: int) -> Meeting:
        """Return where they meet; it can be called off, when one of them has died meanwhile."""
        over = cancel_file(self._start.cancel_path, generation)
        return Meeting(self._store_of(generation, name), generation, over)

    def _store_of(self, generation: int, name: str) -> Any:
        prefix = f"generation{generation}/{name}"
        if self._agent is not None:
            new = AgentStore(self._agent, prefix, FORM_TIMEOUT)
            # C++ that has a store keeps alive what it is there, and not what it is in Python.
            return self._stores.setdefault(prefix, new)
        return seam.PrefixStore(prefix, self._file)
