"""A rank's side of the process group of the world: forms the group, aborts it, forms it again.

After an abort the group's backend connects again, or a new backend replaces it if it cannot, as
before torch 2.14. The group's object stays the same, so DDP modules, subgroups and meshes can still
be used, unless the world's size changes. In each worker the main thread forms the group, and the
control thread aborts it and forms it again.

Each attempt to form all groups is a generation. In each generation, the members of a group first
find each other in a store (`Meeting`), and then connect their backends.
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

# Parts of the store's keys. New ranks of an existing world report under `ARRIVED` that they have
# come, and `Group.resize` waits for these reports.
ARRIVED = "arrived"
# The world's group meets under `WORLD`. Other groups meet under the names that they have in torch.
WORLD = "world"
# To connect nccl, the members of a group meet under a longer name, such as `world/is nccl`.
OF_NCCL = "/is "


@dataclass(frozen=True, slots=True)
class GroupSide:
    """The name and members of a group, and this rank's object for it.

    `group` is None if this rank has no such object, for example because the rank was restarted
    after the group was made.
    """

    name: str
    members: Sequence[int]
    group: ProcessGroup | None
    timeout: timedelta = timedelta(seconds=COLLECTIVE_TIMEOUT)


class Group:
    """Forms and aborts the process groups of a worker: the world's group and its subgroups."""

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
        # This store stays the same whenever the group is formed again, because torch keeps it for
        # the `new_group` of user code.
        self._shared = AbortableStore(Meeting(self._store_of(0, WORLD)))
        # Backends for groups for which this rank has no object. They are connected because the
        # other members can connect only together with this rank (`_connect_others`).
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
        """Make the world's group the default group again, and name new groups after this task."""
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
        """In a forked child forget all groups, and close sockets that the child has inherited.

        The sockets are gloo's listener, the connections that gloo has accepted, and idle
        connections to the agent's socket for the store.
        """
        self._default.abandon_in_child()
        self._gloo.abandon_in_child()
        if self._agent is not None:
            self._agent.close()

    def subgroup_members(self) -> dict[str, tuple[int, ...]]:
        """Return by name the members of the subgroups for which this rank has an object.

        An nccl backend has an entry of its own, whose name ends with `OF_NCCL` and the name of the
        backend. So a subgroup with both gloo and nccl has two entries.
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
        """Count this rank's collectives in groups that have members outside of a task's `ranks`.

        Return, by the group's name, how many collectives this rank has begun in the group, and the
        members that are not in `ranks`. Return {} if the task runs on all ranks of the world.
        """
        if len(ranks) == self.size:
            return {}
        subgroups = self._default.subgroups()
        members = {name: dist.get_process_group_ranks(group) for name, group in subgroups.items()}
        members[WORLD] = [*range(self.size)]
        beyond = {n: tuple(r for r in on if r not in ranks) for n, on in members.items()}
        groups = {WORLD: self._default.group, **subgroups}
        return {n: (seam.count_collectives(groups[n]), on) for n, on in beyond.items() if on}

    def reached_beyond(
        self, ranks: Collection[int], before: Mapping[str, tuple[int, tuple[int, ...]]]
    ) -> tuple[int, ...]:
        """Return the ranks outside of a task's `ranks` that the task has reached by collectives.

        They are members of groups in which this rank has begun collectives since `before`, the
        result of `count_beyond` at the beginning of the task. The notebook warns of such ranks, as
        they may have exchanged values with the task from another cell.
        """
        now = self.count_beyond(ranks)
        reached = (on for n, (count, on) in now.items() if count > before.get(n, (0, ()))[0])
        return (*sorted({rank for on in reached for rank in on}),)

    @property
    def size(self) -> int:
        """The number of ranks of the world."""
        return self._start.world.world_size

    @property
    def uses_nccl(self) -> bool:
        """Whether the world's group uses nccl for CUDA tensors; if so, other groups may, too."""
        return "nccl" in (self._start.world.backend or "")

    @property
    def nccl_error(self) -> str:
        """The error of an nccl backend of this rank; "" if no backend reports an error."""
        backends = self._nccl_backends()
        return next(filter(None, (nccl.adapter_of(each).error(each) for each in backends)), "")

    def wait_for_nccl(self, line: int) -> None:
        """Wait, at the end of a cell, for the collectives of nccl that the cell has begun.

        Meanwhile `line`, the number of a line of the cell, is shown as the rank's position.
        Raises DistBackendError if nccl has ended the collectives because of an error.
        """
        adapters = {nccl.adapter_of(each) for each in self._nccl_backends()}
        entries = (entry for adapter in adapters for entry in adapter.pending())
        if any(int(entry["time_created_ns"]) >= self.task_began_ns for entry in entries):
            wait_for_device(line)
            if error := self.nccl_error:
                raise dist.DistBackendError(f"nccl has ended this cell's collectives: {error}")

    @property
    def is_waiting_for_ranks(self) -> bool:
        """Whether a thread of this rank waits in a store for ranks that have not come yet."""
        return any(store.has_waiting_thread for store in self._stores_with_waits)

    @property
    def _world(self) -> GroupSide:
        """The world's group as this rank knows it, even after user code has destroyed the group."""
        ranks = range(self._start.world.world_size)
        return GroupSide(WORLD, ranks, self._default.group, self._default.timeout)

    # --- forming ------------------------------------------------------------------------------

    # Each attempt to form all groups is a generation, with its own part of the store. In a new
    # worker torch makes the default group, and nbdist makes its gloo backend. A worker that joins
    # an existing world then connects the other groups, at the same time and in the same order as
    # the survivors.

    def form(self) -> None:
        """Form the world's group; in a world that exists already, also connect its other groups.

        Ranks of one machine meet in a FileStore, which needs no port and outlives rank 0. Ranks of
        several machines meet in the head's store, by way of their agents. With `--rdzv-backend`
        all meet in the store of torch's rendezvous.
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
            # Give the group of the new size a new name, which all ranks use in keys of the store.
            # By the old name, a mesh of the earlier size would find the new group.
            self._default.name_after(f"sized{start.sized_in}")
        is_first = start.generation == 1
        # Make the backend use the store of `meeting`. The store that torch passes adds prefixes to
        # keys, so a new rank would not find the survivors, whose keys lack these prefixes.
        self._gloo.next_meeting = meeting
        try:
            # In later generations make the group without torch's wrapper that compares collectives:
            # the wrapper would use keys of the store that an earlier generation has set.
            later = nullcontext() if self._nccl is None else self._nccl.connecting_later()
            with later, nullcontext() if is_first else seam.without_comparing():
                self._default.form(start, self._shared)
        finally:
            self._gloo.next_meeting = None
        backend = None if is_first or not seam.compares() else seam.gloo_of(self._default.group)
        if backend is not None:
            # At debug level DETAIL a backend must compare collectives, so put it into a wrapper.
            comparing = self._comparing(backend, self._world, start.generation)
            seam.replace_gloo(self._default.group, comparing, start.generation)
        self._connect_own_nccl(start.generation)

    def resize(self, start: WorkerStart, newcomers: Sequence[int]) -> None:
        """Form a new default group of another size, as torch cannot change the size of a group.

        `start` describes this worker in the new world, and `newcomers` are the ranks of new
        workers. Until all of them have come to the store, the old group stays, and the agent can
        call the resize off. The old group and its subgroups become stale (`refuse_stale`), and DDP
        modules on the old group get the new one.
        """
        path = cancel_file(start.cancel_path, start.generation)
        self._use_store_of(start.generation, start)
        arrivals = Meeting(self._store_of(start.generation, ARRIVED), cancel_path=path)
        AbortableStore(arrivals).wait([str(rank) for rank in newcomers])
        # From here on the old group cannot be used any more, even if forming the new group fails.
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
        """End this rank's waits in collectives, and for other ranks while it makes a group.

        Any thread may call this. Returns the number of gloo's connections that were shut down plus
        the number of nccl's backends that were aborted. Raises AbortHangs if nccl's abort fails or
        does not end in time.
        """
        self._shared.abort()
        return self._gloo.abort() + self._abort_nccl()

    def regroup(self, generation: int, groups: Mapping[str, tuple[int, ...]]) -> None:
        """Connect every group of this rank again, so that the groups' objects can still be used.

        All ranks that keep their process must call this at the same time; new ranks call `form`.
        `groups` has the members of the subgroups of all ranks, by name, as `subgroup_members`
        returns them. Raises RuntimeError if other ranks do not come in time, and
        ConnectionResetError if this is called off.
        """
        limit = self._max_generations()
        if limit is not None and generation > limit:
            why = f"the group was rebuilt {limit - 1} times, which is all torch takes"
            raise dist.DistBackendError(why)
        # Release the GPU memory of nccl's groups, which may not have been aborted yet.
        self._abort_nccl()
        # Allow waits in the stores again. From now on another abort ends them.
        self._start_over()
        self._use_store_of(generation, self._start)
        self._connect(self._world, generation)
        self._connect_own_nccl(generation)
        self._connect_others(generation, groups)
        default.reset_interrupted_steps()
        if self._nccl is not None:
            # A step whose collectives were aborted may have gone on to its end on some ranks only.
            # Then DDP has chosen other buckets there, so all ranks make their buckets again.
            default.renew_reducers()
            # A communicator has 34 MB on the CPU, in the memory arena of the thread that made it.
            # The arena keeps 9 MB of them after each abort (NCCL 2.28), if it is not trimmed.
            trim_memory()

    def _max_generations(self) -> int | None:
        """Return how often the world's group can be formed, counting the first time.

        Return None if there is no limit.
        """
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
        """Connect all groups that have this rank as a member, except for the world's group.

        All ranks connect their groups in the order of names. Otherwise two ranks could wait for
        each other in different groups. If this rank has no object for a group, it connects a
        backend that is never used, because the other members can connect only with all members.
        """
        subgroups = self._default.subgroups()
        self._stand_ins.clear()
        for name, members in sorted(groups.items()):
            if self._start.rank in members:
                side = GroupSide(name, members, subgroups.get(name.partition(OF_NCCL)[0]))
                connect = self._connect_nccl if OF_NCCL in name else self._connect
                connect(side, generation)

    def _connect(self, side: GroupSide, generation: int) -> None:
        """Connect a group's gloo backend again, or make a backend that takes its place.

        Do nothing if the group has only nccl.
        """
        backend = None if side.group is None else seam.gloo_of(side.group)
        if side.group is not None and backend is None:
            return  # the group has no gloo backend, only nccl
        meeting, rank = self._meeting_of(side.name, generation), self._rank_in(side)
        # At debug level DETAIL the backend is torch's wrapper, which cannot connect again.
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
        """Return the backend itself; at torch's debug level DETAIL return a wrapper around it.

        Before each collective the wrapper compares the calls of all ranks.
        """
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
        """Connect a group's nccl backend.

        If this rank has no object for the group, make and connect a backend that is never used,
        because the other members can connect only with all members.
        """
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
        """Abort nccl's collectives in all groups of this rank; return the number of nccl backends.

        Any thread may call this.
        """
        if self._nccl is None:
            return 0
        backends = self._nccl_backends()
        self._nccl.abort(backends)
        return len(backends)

    def _nccl_backends(self) -> list[Any]:
        """Return the nccl backends of this rank's groups, and those of `_stand_ins`."""
        groups = chain([self._default.group], self._default.subgroups().values())
        backends = chain(map(nccl.nccl_of, groups), self._stand_ins)
        return [each for each in backends if each is not None and each.name() in nccl.ADAPTERS]

    # --- stores where ranks meet --------------------------------------------------------------

    def _use_store_of(self, generation: int, start: WorkerStart) -> None:
        """In a world with `--rdzv-backend`, get a new store from torch's rendezvous.

        Do nothing in other worlds, which use the same store in all generations.
        """
        if self._rendezvous is not None:
            self._rendezvous.rank = start.rank
            self._file = self._rendezvous.join(generation, start.world.world_size)
            # gloo's backends can be connected again only by a store that has `compare_set`.
            self._gloo.renews = self._gloo.renews and self._rendezvous.compares
            self._shared.meeting = Meeting(self._store_of(0, WORLD))

    def _rank_in(self, side: GroupSide) -> int:
        return side.members.index(self._start.rank)

    def _meeting_of(self, name: str, generation: int) -> Meeting:
        """Return where a group's members find each other in a generation.

        The agent can call the meeting off, for example because a member has failed.
        """
        path = cancel_file(self._start.cancel_path, generation)
        return Meeting(self._store_of(generation, name), generation, path)

    def _store_of(self, generation: int, name: str) -> Any:
        prefix = f"generation{generation}/{name}"
        if self._agent is not None:
            new = AgentStore(self._agent, prefix, FORM_TIMEOUT)
            # Keep the Python object of the store: torch's C++ code keeps only the C++ object.
            return self._stores.setdefault(prefix, new)
        return seam.PrefixStore(prefix, self._file)
