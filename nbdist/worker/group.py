"""The process group that all ranks of a world share: formed, broken open, formed again.

Gloo has no abort: a rank that waits in a collective ignores signals for up to half an hour.
What frees it is the end of its connections.  So all of a worker's gloo groups, also those
that user code makes, share one device with one listening port, by which their connections
are known; shutting these down wakes every rank within milliseconds, with an error.
(`abort` and `shutdown` of ProcessGroupGloo do nothing, torch 2.13.)

Then each living group gets a new backend in place.  A ProcessGroup keeps a backend whose
type it knows, but takes one of a type it has not seen, and makes it the default; so the
group's object stays the same one, and with it DDP modules, subgroups and meshes.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    DebugLevel,
    FileStore,
    PrefixStore,
    _ProcessGroupWrapper,
    get_debug_level,
    set_debug_level,
)
from torch.distributed import ProcessGroup, ProcessGroupGloo

from nbdist.wire.messages import LivingGroups, RankStart, over_file
from nbdist.worker import nccl, outdated
from nbdist.worker.default import DefaultGroup
from nbdist.worker.models import forget_broken_off_steps, move_models
from nbdist.worker.naming import GroupNames
from nbdist.worker.store import FreeableStore

FORM_TIMEOUT = 120.0
"""Seconds for all ranks to meet; torch's own default is ten to thirty minutes."""

COLLECTIVE_TIMEOUT = 30 * 60.0
"""Seconds that one collective may take: torch's default for gloo."""

THREADS = 2
"""For each group, as torch has it: with one a small all_reduce takes 1.7 times as long."""

FIRST_TYPE = 20
"""Types of backends up to 255 are free from here on (torch 2.13 names less than ten)."""

ARRIVED = "arrived"
"""Where in the store a rank that is new says that it has come as far as the group."""

WORLD = "world"
"""The world's own group in the store; others have names that torch gave them."""

MOST_GENERATIONS = nccl.LAST_TYPE - FIRST_TYPE
"""Half of it where nccl takes types too, from the other end."""


class Group:
    """A worker's side of the world's group, and of every group made from it."""

    def __init__(self, orders: RankStart) -> None:
        self._orders = orders
        self._store = FileStore(orders.store_path, orders.world.world_size)
        self._store.set_timeout(timedelta(seconds=FORM_TIMEOUT))
        # The same in all generations: `new_group` meets there.
        self._meeting = FreeableStore(self._store_of(0, WORLD), FORM_TIMEOUT)
        self._device, self._port = _make_device()
        self._stand_ins: list[Any] = []
        self._joining: Any = None
        self.is_whole = True
        self._names = GroupNames()
        self._put_all_gloo_on_it()
        self._default = DefaultGroup(timedelta(seconds=COLLECTIVE_TIMEOUT))

    def __repr__(self) -> str:
        return f"<Group of {self._orders.world.world_size}, port {self._port}>"

    def form(self) -> None:
        """Join the world's group, waiting until every rank has.

        The ranks meet in a file that only this user can open: no port, and the store
        outlives rank 0.  Each generation of the group has keys of its own.
        """
        generation = self._orders.generation
        if self._orders.living is not None:
            self._store_of(generation, ARRIVED).set(str(self._orders.rank), "")
        self._form_default(self._store_of(generation, WORLD))
        if self._orders.living is not None:
            self._form_others(generation, self._orders.living)

    def _form_default(self, joining: Any) -> None:
        """Make it torch's default group; its gloo meets in `joining`."""
        orders = self._orders
        if orders.born > 1:
            # Its name is in the store's keys, and a mesh of the size before must not find it.
            self._names.begin_cell(f"born{orders.born}")
        # Threads of nccl's look into the store, and must never wait for the GIL.
        meeting = self._store_of(0, WORLD) if self.uses_nccl else self._meeting
        # torch puts prefixes of its own before; survivors of a death meet without them.
        self._joining = joining
        level = get_debug_level()
        if orders.generation > 1:
            # What torch would wrap the group in meets where earlier generations did.
            set_debug_level(DebugLevel.OFF)
        try:
            self._default.form(orders, meeting)
        finally:
            self._joining = None
            set_debug_level(level)
        if orders.generation > 1:
            self._check_too(self._default.group, orders.generation, self._default.timeout)
        if self.uses_nccl and orders.generation > 1:
            # Not where the generations before met.
            members, group = range(orders.world.world_size), self._default.group
            store = self._store_of(orders.generation, WORLD)
            nccl.renew(group, store, orders.rank, members, orders.generation, self._default.timeout)

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
        self._meeting.start_over()
        self._form_default(
            FreeableStore(self._store_of(orders.generation, WORLD), FORM_TIMEOUT, over)
        )
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
        groups = self._default.subgroups().items()
        members = {name: tuple(dist.get_process_group_ranks(group)) for name, group in groups}
        return {"members": members}

    @property
    def uses_nccl(self) -> bool:
        """Whether the world's group, and so others too, may have nccl for CUDA tensors."""
        return "nccl" in (self._orders.world.backend or "")

    def form_again(self, generation: int, living: LivingGroups) -> None:
        """Give every living group a new backend in place; all its members do so at once.

        `living` is what all ranks hold together.  Raises RuntimeError when they do not meet.
        """
        most = MOST_GENERATIONS // (2 if self.uses_nccl else 1)
        if generation > most:
            raise RuntimeError(f"the group was formed anew {most} times, which is all torch takes")
        # Also while user code has destroyed it: it is there again with the next cell.
        members, default = range(self._orders.world.world_size), self._default
        self._form_one(WORLD, default.group, members, generation, default.timeout)
        self._form_others(generation, living)
        forget_broken_off_steps()
        self._meeting.start_over()

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
        store, rank = self._store_of(generation, name), self._orders.rank
        if group is not None and nccl.nccl_of(group) is not None:
            nccl.renew(group, store, rank, members, generation, timeout)
        if group is not None and not _has_gloo(group):
            return
        # It can be called off, when one of the members has died meanwhile.
        over = over_file(self._orders.store_path, generation)
        meeting = FreeableStore(store, FORM_TIMEOUT, over)
        backend = ProcessGroupGloo(meeting, members.index(rank), len(members), timeout)
        checked = self._checked(backend, name, members, generation, timeout)
        if group is None:
            self._stand_ins.append(checked)
            return
        backend.options.group_name = group.group_name
        backend.options.global_ranks_in_group = list(members)
        backend._set_sequence_number_for_group()
        _put_into(group, generation, checked)

    def _check_too(self, group: ProcessGroup, generation: int, timeout: timedelta) -> None:
        """Do to a group that this rank has just joined what the others have done to theirs."""
        if get_debug_level() == DebugLevel.DETAIL and _has_gloo(group):
            members = range(self._orders.world.world_size)
            backend = group._get_backend(torch.device("cpu"))
            _put_into(
                group, generation, self._checked(backend, WORLD, members, generation, timeout)
            )

    def _checked(
        self, backend: Any, name: str, members: Sequence[int], generation: int, timeout: timedelta
    ) -> Any:
        """The backend, as torch has it: with TORCH_DISTRIBUTED_DEBUG=DETAIL it compares first.

        For that it has another one of the same ranks.
        """
        if get_debug_level() != DebugLevel.DETAIL:
            return backend
        over = over_file(self._orders.store_path, generation)
        meeting = FreeableStore(self._store_of(generation, f"{name}/check"), FORM_TIMEOUT, over)
        rank = members.index(self._orders.rank)
        return _ProcessGroupWrapper(backend, ProcessGroupGloo(meeting, rank, len(members), timeout))

    def _store_of(self, generation: int, name: str) -> Any:
        return PrefixStore(f"generation{generation}/{name}", self._store)

    def free(self) -> int:
        """End all connections of gloo, which frees whoever waits; how many there were.

        One end of each is enough, the one that accepted it.  Who waits for others to make
        a group is freed too, and nccl's collectives are aborted.  From any thread.
        """
        self._meeting.free()
        ended = 0
        if self.uses_nccl:
            groups = [self._default.group, *self._default.subgroups().values()]
            ended += nccl.abort(groups)
        for connection in self.connections():
            with suppress(OSError):  # the other rank was quicker
                connection.shutdown(socket.SHUT_RDWR)
                ended += 1
        return ended

    @property
    def waits_to_meet(self) -> bool:
        """Whether somebody waits for ranks that have not come to make a group."""
        return self._meeting.is_waited_in

    def connections(self) -> Iterator[socket.socket]:
        """The connections that gloo accepted, each valid until the next is asked for."""
        for fd, inode in _sockets():
            with suppress(OSError), _borrowed(fd, inode) as found:
                if found.getsockname()[1] == self._port and not _listens(found):
                    yield found

    def _options(self, timeout: timedelta | None) -> Any:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._threads = THREADS
        if timeout is not None:
            options._timeout = timeout
        return options

    def _put_all_gloo_on_it(self) -> None:
        """Have gloo groups that torch or the user makes share the device too."""
        init, make_options, group = ProcessGroupGloo.__init__, self._options, self

        def on_one_device(
            self: ProcessGroupGloo,
            store: Any,
            rank: int,
            size: int,
            timeout: Any = None,
            **_: Any,  # torch 2.14 and later say enable_reconfigure=False
        ) -> None:
            # The first alone: TORCH_DISTRIBUTED_DEBUG=DETAIL makes a helper besides.
            store, group._joining = group._joining or store, None
            is_time = timeout is None or isinstance(timeout, timedelta)
            init(self, store, rank, size, make_options(timeout) if is_time else timeout)

        ProcessGroupGloo.__init__ = on_one_device  # type: ignore[method-assign]


def _has_gloo(group: ProcessGroup) -> bool:
    return any(group._get_backend(device).name() == "gloo" for device in group._device_types)


def _put_into(group: ProcessGroup, generation: int, backend: Any) -> None:
    """Have the group use this backend alone, in the place of gloo's."""
    # Both are asked of the backend, which is another one in a moment.
    name, description = group.group_name, group.group_desc
    kind = ProcessGroup.BackendType(FIRST_TYPE + generation)
    for device in group._device_types:
        if group._get_backend(device).name() == "gloo":
            group._register_backend(device, kind, backend)
    group._set_group_name(name)
    group._set_group_desc(description)


def _make_device() -> tuple[Any, int]:
    """A device of gloo's, as torch would make it, and the port on which it listens."""
    before = set(_sockets())
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface:
        device = ProcessGroupGloo.create_device(interface=interface)
    else:
        device = ProcessGroupGloo.create_default_device()
    for fd, inode in set(_sockets()) - before:
        with suppress(OSError), _borrowed(fd, inode) as found:
            if _listens(found):
                return device, int(found.getsockname()[1])
    raise RuntimeError("gloo's listening socket was not found")


def _listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of each socket of this process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                yield int(name), status.st_ino


@contextmanager
def _borrowed(fd: int, inode: int) -> Iterator[socket.socket]:
    """The internet socket behind a descriptor; OSError when it is none, or none any more."""
    with socket.socket(fileno=os.dup(fd)) as found:
        if found.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError("no internet socket")
        if os.fstat(found.fileno()).st_ino != inode:
            raise OSError("closed meanwhile")
        yield found
