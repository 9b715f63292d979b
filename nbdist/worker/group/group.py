"""The process group that all ranks of a world share: formed, aborted and formed again.

If the group's connections have ended, its backend connects again; before torch 2.14 another backend
takes its place. The group's object stays the same, so DDP modules, subgroups and meshes live on,
unless the world's size changes. Runs in each rank: the main thread forms the group, the control
thread aborts it and forms it again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nbdist.system.processes import trim_memory
from nbdist.wire.spec import AGENTS_WAIT, LINK_TIMEOUT, WorkerStart, cancel_file
from nbdist.worker.compat import nccl
from nbdist.worker.compat import torch as seam
from nbdist.worker.group import default
from nbdist.worker.group.gloo import COLLECTIVE_TIMEOUT, Gloo
from nbdist.worker.group.nccl import NCCL_START_TIMEOUT, Nccl, wait_for_device
from nbdist.worker.group.stores import (
    FORM_TIMEOUT,
    AbortableStore,
    AgentStore,
    Meeting,
    StoreConnections,
    TorchRendezvous,
)

ARRIVED = "arrived"  # the part of the store where a rank that joins later reports that it has come
WORLD = "world"  # the world's group in the store; other groups have the names that torch gave them
OF_NCCL = "/is "  # stands between a group's name and nccl's class, if its nccl backend is meant


@dataclass(frozen=True, slots=True)
class GroupSide:
    """A group as this rank knows it; `group` is None if this rank has no object for the group."""

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
        uses_agent = start.store_socket and not self._rendezvous
        silence = AGENTS_WAIT * (start.world.config.link_timeout or LINK_TIMEOUT)
        self._agent = StoreConnections(start.store_socket, silence) if uses_agent else None
        self._stores: dict[str, AgentStore] = {}
        self._file: Any = None
        if self._agent is None:
            self._file = seam.FileStore(start.store_path, start.world.world_size)
            self._file.set_timeout(timedelta(seconds=FORM_TIMEOUT))
        # The same store in all generations, because `new_group` of user code uses it.
        self._shared = AbortableStore(Meeting(self._store_of(0, WORLD)))
        self._stand_ins: list[Any] = []
        self.is_whole = True
        self.task_began_ns = 0
        self._gloo = Gloo()
        self.connections = self._gloo.connections
        self._nccl = Nccl(torch.device(start.device)) if self.uses_nccl else None
        of_nccl = [] if self._nccl is None else [self._nccl.store]
        self._stores_with_waits = [self._shared, self._gloo.store, *of_nccl]
        self._default = default.DefaultGroup(timedelta(seconds=COLLECTIVE_TIMEOUT))

    def __repr__(self) -> str:
        return f"<Group of {self._start.world.world_size}, {self._gloo}>"

    def begin_task(self, task_id: str) -> None:
        """Put the world's group in place, and name new groups after this task."""
        self.task_began_ns = time.time_ns()
        self._default.begin_task(task_id)
        if self._nccl is not None and (backend := nccl.nccl_of(self._default.group)) is not None:
            nccl.adapter_of(backend).end_calls(backend)

    def shut_down(self) -> None:
        """Shut down all groups, at the end of the worker."""
        self._default.shut_down()
        if self._agent is not None:
            self._agent.close()

    def abandon_in_child(self) -> None:
        """Forget groups, and close gloo's listener and accepted connections in a forked child."""
        self._default.abandon_in_child()
        self._gloo.abandon_in_child()
        if self._agent is not None:
            self._agent.close()

    def subgroup_members(self) -> dict[str, tuple[int, ...]]:
        """Return by name the members of the subgroups for which this rank has an object.

        A group with gloo and nccl has two names.
        """
        members = {}
        for name, group in self._default.subgroups().items():
            ranks = tuple(dist.get_process_group_ranks(group))
            if seam.gloo_of(group) is not None:
                members[name] = ranks
            if (backend := nccl.nccl_of(group)) is not None:
                members[name + OF_NCCL + backend.name()] = ranks
        return members

    def count_beyond(self, ranks: Collection[int]) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return by name the groups that have members outside of `ranks`.

        The values are how many collectives this rank has begun in the group, and these members.
        """
        subgroups = self._default.subgroups()
        members = {name: dist.get_process_group_ranks(group) for name, group in subgroups.items()}
        members[WORLD] = [*range(self.size)]
        beyond = {n: tuple(r for r in on if r not in ranks) for n, on in members.items()}
        groups = {WORLD: self._default.group, **subgroups}
        return {n: (seam.count_collectives(groups[n]), on) for n, on in beyond.items() if on}

    @property
    def size(self) -> int:
        """The number of ranks of the world."""
        return self._start.world.world_size

    @property
    def uses_nccl(self) -> bool:
        """Whether the world's group, and so other groups too, may use nccl for CUDA tensors."""
        return "nccl" in (self._start.world.backend or "")

    @property
    def nccl_error(self) -> str:
        """The first error that an nccl backend reports; "" if no backend reports an error."""
        backends = self._nccl_backends()
        return next(filter(None, (nccl.adapter_of(each).error(each) for each in backends)), "")

    def wait_for_nccl(self, line: int) -> None:
        """Wait at the end of a cell for nccl's collectives that the cell has begun.

        `line`, the number of the cell's last line, is shown meanwhile. Raises DistBackendError if
        nccl has ended the collectives because of an error.
        """
        adapters = {nccl.adapter_of(each) for each in self._nccl_backends()}
        entries = (entry for adapter in adapters for entry in adapter.pending())
        if any(int(entry["time_created_ns"]) >= self.task_began_ns for entry in entries):
            wait_for_device(line)
            if error := self.nccl_error:
                raise dist.DistBackendError(f"nccl has ended this cell's collectives: {error}")

    @property
    def is_waiting_for_ranks(self) -> bool:
        """Whether a thread waits to make a group, for ranks that have not come yet."""
        return any(store.has_waiting_thread for store in self._stores_with_waits)

    @property
    def _world(self) -> GroupSide:
        """The world's group as this rank knows it, even after user code has destroyed the group."""
        ranks = range(self._start.world.world_size)
        return GroupSide(WORLD, ranks, self._default.group, self._default.timeout)

    # --- forming ------------------------------------------------------------------------------

    # torch makes the default group with nbdist's gloo backend, in this generation's part of the
    # store. A newcomer then connects the other ranks' groups, when they do and in their order.

    def form(self) -> None:
        """Join the world's group, and wait until every rank has joined.

        Ranks of one machine mostly meet in a file, which needs no port and outlives rank 0.
        """
        generation, joins = self._start.generation, self._start.joins
        self._use_store_of(generation, self._start)
        if joins is not None:
            self._store_of(generation, ARRIVED).set(str(self._start.rank), "")
        self._form_default(Meeting(self._store_of(generation, WORLD), generation))
        if joins is not None:
            self._connect_others(generation, joins)

    def _form_default(self, meeting: Meeting) -> None:
        """Make torch's default group of all ranks; its gloo backend connects in `meeting`."""
        start = self._start
        if start.sized_in > 1:
            # The name is in the store's keys. A mesh of the earlier size must not find this group
            # by an old name.
            self._default.name_after(f"sized{start.sized_in}")
        is_first = start.generation == 1
        # torch would add prefixes to the keys, and survivors use keys without prefixes.
        self._gloo.next_meeting = meeting
        try:
            # Without comparing: torch's wrapper would meet in the store's keys of earlier
            # generations.
            later = nullcontext() if self._nccl is None else self._nccl.connecting_later()
            with later, nullcontext() if is_first else seam.without_comparing():
                self._default.form(start, self._shared)
        finally:
            self._gloo.next_meeting = None
        backend = None if is_first or not seam.compares() else seam.gloo_of(self._default.group)
        if backend is not None:
            # At debug level DETAIL backends compare collectives; torch has made one that does not.
            comparing = self._comparing(backend, self._world, start.generation)
            seam.replace_gloo(self._default.group, comparing, start.generation)
        self._connect_own_nccl(start.generation)

    def resize(self, start: WorkerStart, newcomers: Sequence[int]) -> None:
        """Form a default group of another size, as groups of torch keep their size for life.

        Groups made from the old default group become stale; DDP modules are moved. Until all
        newcomers have come the old group stays, and the resize can be called off.
        """
        path = cancel_file(start.cancel_path, start.generation)
        self._use_store_of(start.generation, start)
        arrivals = Meeting(self._store_of(start.generation, ARRIVED), cancel_path=path)
        AbortableStore(arrivals).wait([str(rank) for rank in newcomers])
        # From here on the old group is gone, whether the ranks meet or not.
        self.abort()
        sizes = self._start.world.world_size, start.world.world_size
        default.refuse_stale(self._default.pop_groups(), *sizes)
        self._stand_ins.clear()
        before, self._start = self._default.group, start
        self.is_whole = False
        self._start_over()
        self._form_default(Meeting(self._store_of(start.generation, WORLD), start.generation, path))
        self.is_whole = True
        default.move_models(before, self._default.group)

    # --- aborting, and forming again ----------------------------------------------------------

    def abort(self) -> int:
        """End this rank's waits, in collectives and for ranks to make a group; from any thread.

        Returns the number of gloo's connections and nccl's groups that were ended. Raises
        AbortHangs.
        """
        self._shared.abort()
        return self._gloo.abort() + self._abort_nccl()

    def regroup(self, generation: int, groups: Mapping[str, tuple[int, ...]]) -> None:
        """Connect every group again in place; all of its members do so at the same time.

        `groups` has the members of all ranks' groups. Raises RuntimeError if the ranks do not come.
        """
        limit = self._max_generations()
        if limit is not None and generation > limit:
            why = f"the group was rebuilt {limit - 1} times, which is all torch takes"
            raise dist.DistBackendError(why)
        # Releases the GPU memory of nccl's groups, which may not have been aborted yet.
        self._abort_nccl()
        # Before new connections are made, so that waits for them can be aborted.
        self._start_over()
        self._use_store_of(generation, self._start)
        self._connect(self._world, generation)
        self._connect_own_nccl(generation)
        self._connect_others(generation, groups)
        default.reset_interrupted_steps()
        if self._nccl is not None:
            # On some ranks alone, a step whose collectives were aborted went on to its end, and may
            # have put gradients into other buckets.
            default.renew_reducers()
            # A communicator has 34 MB on the CPU, in the arena of the thread that made it.  After
            # an abort the arena keeps part of them (NCCL 2.28): 9 MB more with each lost rank.
            trim_memory()

    def _max_generations(self) -> int | None:
        """Return how often a group can be formed, counting the first time; None without a limit."""
        renews = self._gloo.renews and not seam.compares()
        backend = nccl.nccl_of(self._default.group)
        if backend is None:
            return None if renews else seam.MAX_GENERATIONS
        limit = nccl.adapter_of(backend).max_generations
        return seam.MAX_GENERATIONS if limit is None and not renews else limit

    def _start_over(self) -> None:
        for store in self._stores_with_waits:
            store.start_over()

    def _connect_others(self, generation: int, groups: Mapping[str, tuple[int, ...]]) -> None:
        """Connect the groups besides the world's in the order of names, so that ranks do not hang.

        If this rank has no object for a group, an unused backend stands in, since the other members
        connect to all members.
        """
        subgroups = self._default.subgroups()
        self._stand_ins.clear()
        for name, members in sorted(groups.items()):
            if self._start.rank in members:
                side = GroupSide(name, members, subgroups.get(name.partition(OF_NCCL)[0]))
                connect = self._connect_nccl if OF_NCCL in name else self._connect
                connect(side, generation)

    def _connect(self, side: GroupSide, generation: int) -> None:
        """Connect a group's gloo backend again, or make a backend that takes its place."""
        backend = None if side.group is None else seam.gloo_of(side.group)
        if side.group is not None and backend is None:
            return  # a group of nccl alone
        meeting, rank = self._meeting_of(side.name, generation), self._rank_in(side)
        # A backend that compares first (debug level DETAIL) does not support connecting again.
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

    def _comparing(self, backend: Any, side: GroupSide, generation: int) -> Any:
        """Return the backend, or for debug level DETAIL one around it that compares collectives."""
        if not seam.compares():
            return backend
        meeting = self._meeting_of(f"{side.name}/check", generation)
        helper = self._gloo.new(meeting, self._rank_in(side), len(side.members), side.timeout)
        return seam.comparing_backend(backend, helper)

    # --- nccl ---------------------------------------------------------------------------------

    def _connect_own_nccl(self, generation: int) -> None:
        backend = nccl.nccl_of(self._default.group)
        if backend is not None:
            world = self._world
            side = replace(world, name=world.name + OF_NCCL + backend.name())
            self._connect_nccl(side, generation)

    def _connect_nccl(self, side: GroupSide, generation: int) -> None:
        """Connect a group's nccl backend, or a stand-in, in this generation's part of the store."""
        if self._nccl is None:
            return
        meeting = self._meeting_of(side.name, generation)
        seat = self._nccl.seat(meeting, side.members, self._rank_in(side))
        if side.group is None:
            kind = side.name.partition(OF_NCCL)[2]
            self._stand_ins.append(self._nccl.stand_in(kind, meeting, seat, side.timeout))
        elif generation == 1:
            self._nccl.connect(nccl.nccl_of(side.group), meeting, seat, NCCL_START_TIMEOUT)
        else:
            self._nccl.renew(side.group, meeting, seat, side.timeout)

    def _abort_nccl(self) -> int:
        """Abort the collectives of all groups, from any thread; return the number of groups."""
        if self._nccl is None:
            return 0
        backends = self._nccl_backends()
        self._nccl.abort(backends)
        return len(backends)

    def _nccl_backends(self) -> list[Any]:
        """Return the nccl backends of this rank's groups, and the nccl backends that stand in."""
        groups = chain([self._default.group], self._default.subgroups().values())
        backends = chain(map(nccl.nccl_of, groups), self._stand_ins)
        return [each for each in backends if each is not None and each.name() in nccl.ADAPTERS]

    # --- stores where ranks meet --------------------------------------------------------------

    def _use_store_of(self, generation: int, start: WorkerStart) -> None:
        """Get this generation's store from torch's rendezvous, if the world uses one."""
        if self._rendezvous is not None:
            self._rendezvous.rank = start.rank
            self._file = self._rendezvous.join(generation, start.world.world_size)
            # A renewal needs a store that can compare and set.
            self._gloo.renews = self._gloo.renews and self._rendezvous.compares
            self._shared.meeting = Meeting(self._store_of(0, WORLD))

    def _rank_in(self, side: GroupSide) -> int:
        return side.members.index(self._start.rank)

    def _meeting_of(self, name: str, generation: int) -> Meeting:
        """Return a meeting of a group's members, called off once the cancel file exists."""
        path = cancel_file(self._start.cancel_path, generation)
        return Meeting(self._store_of(generation, name), generation, path)

    def _store_of(self, generation: int, name: str) -> Any:
        prefix = f"generation{generation}/{name}"
        if self._agent is not None:
            new = AgentStore(self._agent, prefix, FORM_TIMEOUT)
            # C++ keeps its own object of a store alive, but not the Python object: keep that here.
            return self._stores.setdefault(prefix, new)
        return seam.PrefixStore(prefix, self._file)
