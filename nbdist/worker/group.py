"""The process group that all ranks of a world share: formed, broken open, formed again.

When its connections have ended, each living group is connected anew: from torch 2.14 on
its backend is, before that it gets a new backend in place.  Either way the group's object
stays the same one, and with it DDP modules, subgroups and meshes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from socket import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nbdist.wire.messages import LivingGroups, RankStart, over_file
from nbdist.worker import nccl, outdated
from nbdist.worker.compat import torch as seam
from nbdist.worker.default import DefaultGroup
from nbdist.worker.gloo import COLLECTIVE_TIMEOUT, Gloo
from nbdist.worker.models import forget_broken_off_steps, move_models
from nbdist.worker.naming import GroupNames
from nbdist.worker.store import FORM_TIMEOUT, FreeableStore, Meeting

ARRIVED = "arrived"
"""Where in the store a rank that is new says that it has come as far as the group."""

WORLD = "world"
"""The world's own group in the store; others have names that torch gave them."""


class Group:
    """A worker's side of the world's group, and of every group made from it."""

    def __init__(self, orders: RankStart) -> None:
        self._orders = orders
        self._store = seam.FileStore(orders.store_path, orders.world.world_size)
        self._store.set_timeout(timedelta(seconds=FORM_TIMEOUT))
        # The same in all generations: `new_group` meets there.
        self._meeting = FreeableStore(self._store_of(0, WORLD), FORM_TIMEOUT)
        self._stand_ins: list[Any] = []
        self.is_whole = True
        self._names = GroupNames()
        self._gloo = Gloo()
        self._default = DefaultGroup(timedelta(seconds=COLLECTIVE_TIMEOUT))

    def __repr__(self) -> str:
        return f"<Group of {self._orders.world.world_size}, {self._gloo}>"

    def form(self) -> None:
        """Join the world's group, waiting until every rank has.

        The ranks meet in a file that only this user can open: no port, and the store
        outlives rank 0.  Each generation of the group has keys of its own.
        """
        generation = self._orders.generation
        if self._orders.living is not None:
            self._store_of(generation, ARRIVED).set(str(self._orders.rank), "")
        self._form_default(Meeting(self._store_of(generation, WORLD), generation))
        if self._orders.living is not None:
            self._form_others(generation, self._orders.living)

    def _form_default(self, meeting: Meeting) -> None:
        """Make it torch's default group; its gloo connects in `meeting`."""
        orders = self._orders
        if orders.born > 1:
            # Its name is in the store's keys, and a mesh of the size before must not find it.
            self._names.begin_cell(f"born{orders.born}")
        # Threads of nccl's look into the store, and must never wait for the GIL.
        store = self._store_of(0, WORLD) if self.uses_nccl else self._meeting
        # torch puts prefixes of its own before; survivors of a death meet without them.
        self._gloo.next_meets_in(meeting)
        try:
            if orders.generation == 1:
                self._default.form(orders, store)
                self._connect_nccl(nccl.START_TIMEOUT)
                return
            # What torch would wrap the group in meets where earlier generations did.
            with seam.without_comparing():
                self._default.form(orders, store)
        finally:
            self._gloo.next_meets_in(None)
        group, members, timeout = self._default.group, self._everybody, self._default.timeout
        if seam.compares() and (backend := seam.gloo_of(group)) is not None:
            # As the others, whose groups are checked anew.
            checked = self._checked(backend, WORLD, members, orders.generation, timeout)
            seam.replace_gloo(group, checked, orders.generation)
        # Not where the generations before met.
        self._renew_nccl(orders.generation)

    def form_anew(self, orders: RankStart, newcomers: Sequence[int]) -> None:
        """Form another default group in the place of this one: of another size.

        All that was made from the one before is over, but for DDP modules.  Until all
        newcomers have started, nothing happens to it: as long it can be called off.
        """
        over = over_file(orders.store_path, orders.generation)
        arrivals = FreeableStore(self._store_of(orders.generation, ARRIVED), FORM_TIMEOUT, over)
        arrivals.wait([str(rank) for rank in newcomers])
        self.free()
        sizes = self._orders.world.world_size, orders.world.world_size
        outdated.refuse(self._default.take_out(), *sizes)
        self._stand_ins.clear()
        before, self._orders = self._default.group, orders
        self.is_whole = False
        self._start_over()
        store = self._store_of(orders.generation, WORLD)
        self._form_default(Meeting(store, orders.generation, over))
        self.is_whole = True
        move_models(before, self._default.group)
        outdated.refuse_models()

    def begin_cell(self, cell_id: str) -> None:
        """All ranks that run the cell do so before its first line."""
        self._names.begin_cell(cell_id)
        self._default.begin_cell()

    def end(self) -> None:
        """Shut all of it down, at the end of the worker."""
        self._default.end()

    def living(self) -> dict[str, Any]:
        """The fields of `LivingGroups`: what this rank holds besides the world's group."""
        # Not those of nccl alone: they connect with their first collective.
        members = {
            name: tuple(dist.get_process_group_ranks(group))
            for name, group in self._default.subgroups().items()
            if seam.gloo_of(group) is not None
        }
        return {"members": members}

    @property
    def uses_nccl(self) -> bool:
        """Whether the world's group, and so others too, may have nccl for CUDA tensors."""
        return "nccl" in (self._orders.world.backend or "")

    @property
    def _everybody(self) -> Sequence[int]:
        return range(self._orders.world.world_size)

    def form_again(self, generation: int, living: LivingGroups) -> None:
        """Connect every living group anew in place; all its members do so at once.

        `living` is what all ranks hold together.  Raises RuntimeError when they do not meet.
        """
        most = self._most_generations()
        if most is not None and generation > most:
            raise RuntimeError(f"the group was formed anew {most} times, which is all torch takes")
        # First, so that what is made anew here can be waited for, and freed.
        self._start_over()
        # Also while user code has destroyed it: it is there again with the next cell.
        default = self._default
        self._form_one(WORLD, default.group, self._everybody, generation, default.timeout)
        self._renew_nccl(generation)
        self._form_others(generation, living)
        forget_broken_off_steps()

    def _most_generations(self) -> int | None:
        """How often a group can be formed anew; None where there is no limit."""
        if self.uses_nccl:
            return seam.MOST_RENEWALS // 2
        return None if self._gloo.renews and not seam.compares() else seam.MOST_RENEWALS

    def _start_over(self) -> None:
        self._meeting.start_over()
        self._gloo.start_over()

    def _form_others(self, generation: int, living: LivingGroups) -> None:
        """In an order that is the same on all ranks, or they would wait for one another.

        Where this rank, or the one that it replaces, does not hold the group, a backend
        that nobody uses stands in for it, because the others connect to all members.
        """
        own = self._default.subgroups()
        self._stand_ins.clear()
        for name, members in sorted(living.members.items()):
            if self._orders.rank in members:
                self._form_one(name, own.get(name), members, generation)

    def _form_one(
        self,
        name: str,
        group: ProcessGroup | None,
        members: Sequence[int],
        generation: int,
        timeout: timedelta = timedelta(seconds=COLLECTIVE_TIMEOUT),
    ) -> None:
        backend = None if group is None else seam.gloo_of(group)
        if group is not None and backend is None:
            return
        meeting, rank = self._meeting_of(name, generation), members.index(self._orders.rank)
        if backend is not None and self._gloo.renews and seam.is_renewable(backend):
            self._gloo.renew(backend, meeting, rank, len(members))
            return
        backend = self._gloo.new(meeting, rank, len(members), timeout)
        checked = self._checked(backend, name, members, generation, timeout)
        if group is None:
            self._stand_ins.append(checked)
            return
        seam.prepare_gloo(backend, group, members)
        seam.replace_gloo(group, checked, generation)

    def _checked(
        self, backend: Any, name: str, members: Sequence[int], generation: int, timeout: timedelta
    ) -> Any:
        """The backend, as torch has it: with TORCH_DISTRIBUTED_DEBUG=DETAIL it compares first.

        For that it has another one of the same ranks.
        """
        if not seam.compares():
            return backend
        meeting, rank = self._meeting_of(f"{name}/check", generation), self._orders.rank
        helper = self._gloo.new(meeting, members.index(rank), len(members), timeout)
        return seam.comparing(backend, helper)

    def _renew_nccl(self, generation: int) -> None:
        """Give every group that has nccl a new backend, and connect that of the world's."""
        if not self.uses_nccl:
            return
        default = self._default
        # What their old ones hold on the device; they may not have been freed.
        self._abort_nccl()
        rank, timeout = self._orders.rank, timedelta(seconds=COLLECTIVE_TIMEOUT)
        renewals = [(WORLD, default.group, self._everybody, default.timeout)]
        for name, group in default.subgroups().items():
            renewals.append((name, group, dist.get_process_group_ranks(group), timeout))
        for name, group, members, timeout in renewals:
            if seam.nccl_of(group) is not None:
                store = self._store_of(generation, name)
                seam.replace_nccl(group, store, rank, members, generation, timeout)
        over = over_file(self._orders.store_path, generation)
        self._connect_nccl(nccl.RENEWAL_TIMEOUT, over)

    def _connect_nccl(self, timeout: float, over: Path | None = None) -> None:
        """Have the world's own group connect now, while all ranks are known to come."""
        if self.uses_nccl and (backend := seam.nccl_of(self._default.group)) is not None:
            nccl.connect(backend, torch.device(self._orders.device), timeout, over)

    def _abort_nccl(self) -> int:
        """Of all groups; how many there were.  From any thread."""
        groups = chain([self._default.group], self._default.subgroups().values())
        found = [backend for group in groups if (backend := seam.nccl_of(group)) is not None]
        seam.abort_nccl(found)
        return len(found)

    def _meeting_of(self, name: str, generation: int) -> Meeting:
        """It can be called off, when one of the members has died meanwhile."""
        over = over_file(self._orders.store_path, generation)
        return Meeting(self._store_of(generation, name), generation, over)

    def _store_of(self, generation: int, name: str) -> Any:
        return seam.PrefixStore(f"generation{generation}/{name}", self._store)

    def free(self) -> int:
        """Free whoever waits in a collective, or for others to make a group; from any thread.

        Gloo's connections end (how many there were is returned), nccl's collectives are
        aborted.
        """
        self._meeting.free()
        ended = self._abort_nccl() if self.uses_nccl else 0
        return ended + self._gloo.free()

    @property
    def waits_to_meet(self) -> bool:
        """Whether somebody waits for ranks that have not come to make a group."""
        return self._meeting.is_waited_in or self._gloo.waits_to_meet

    def connections(self) -> Iterator[socket]:
        """The connections that gloo accepted, each valid until the next is asked for."""
        return self._gloo.connections()
