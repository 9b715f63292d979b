"""Keeps the world's group as torch's default group; names groups, and moves DDP and FSDP2 models.

Nearly every tutorial calls `init_process_group` in its first lines and `destroy_process_group` in
its last ones, and in a notebook both run again and again. So in a worker a destroyed group is only
taken out of torch's tables. Putting it back needs no message to other ranks, which may have it.
Runs in each rank; `Group` calls it.
"""

from __future__ import annotations

import functools
import gc
import inspect
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from nbdist.wire.spec import WorkerStart
from nbdist.words import name_ranks
from nbdist.worker.compat import models as models_seam
from nbdist.worker.compat import torch as seam

ID_LENGTH = 12  # characters of a task's id: enough for all tasks that a world ever runs


class DefaultGroup:
    """The world's group as torch's default group, which user code may destroy and initialise.

    It also names new groups, so that the names are the same on all members.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.group: ProcessGroup  # set by `form`
        self.timeout = self._own_timeout = timeout
        self._has_said = False
        self._left: list[ProcessGroup] | None = None
        self._init, self._destroy = dist.init_process_group, dist.destroy_process_group
        self._wrap()
        self._task = ""
        self._made: Counter[str] = Counter()
        seam.name_groups(self._name)

    @property
    def is_in_place(self) -> bool:
        """Whether the world's group is the default group now."""
        return dist.group.WORLD is self.group

    def subgroups(self) -> dict[str, ProcessGroup]:
        """Return the groups made from the world's group, by name; none while it is not in place."""
        return seam.subgroups_of(self.group) if self.is_in_place else {}

    def put_back(self) -> bool:
        """Make the world's group the default group again.

        Return True if another default group, made by user code, was destroyed for it.
        """
        if self.is_in_place:
            return False
        if is_other := dist.is_initialized():
            self._destroy()
        seam.put_back(self.group, self._entries)
        self._set_timeout(self._own_timeout)
        return is_other

    def begin_task(self, task_id: str) -> None:
        """Put the world's group in place, whatever the last task has done with it."""
        seam.end_coalescing()
        self.name_after(task_id)
        if self.put_back():
            _say(
                "The group that an earlier cell initialised has ended; the world's group is "
                "used again."
            )

    def end(self) -> None:
        """Shut the group down, at the end of the worker."""
        self.put_back()
        self._destroy()

    def leave(self) -> None:
        """Forget all groups, and use torch's own functions; called in a forked child."""
        # Keep the objects: their destructors would wait for threads that the child does not have.
        self._left = [*seam.forget_all(self._destroy), self.group]
        self.name_after("")

    def form(self, start: WorkerStart, meeting: Any) -> None:
        """Form the group in this store.  `take_out` has removed the one before."""
        # init_process_group wraps sys.excepthook each time it is called.
        excepthook = sys.excepthook
        self._backend, self._has_gpu = start.world.backend or "", start.device != "cpu"
        self._rank, self._size = start.rank, start.world.world_size
        try:
            self._init(
                backend=self._backend,
                store=meeting,
                rank=self._rank,
                world_size=self._size,
                timeout=self._own_timeout,
            )
        finally:
            sys.excepthook = excepthook
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD
        self.timeout = self._own_timeout
        self._entries = seam.entries_of(self.group)

    def take_out(self) -> list[ProcessGroup]:
        """Remove the group and all groups made from it from torch's tables; return them."""
        if not dist.is_initialized():
            return [self.group]  # user code has destroyed it, or its successor could not be formed
        assert dist.group.WORLD is not None
        default = dist.group.WORLD  # user code may have initialised it
        groups = {self.group, default, *seam.subgroups_of(default).values()}
        self._destroy()
        return [*groups]

    def name_after(self, task_id: str) -> None:
        """Name new groups after this task from now on; for "" name them as torch does."""
        self._task = task_id[:ID_LENGTH]
        self._made.clear()

    def _name(self, torchs: str, ranks: Sequence[int], use_hashed_name: bool) -> str:  # noqa: FBT001
        if not self._task:
            return torchs
        # Only the members of a group make one with a hashed name, so it is counted among its
        # members.
        of = f"{self._task}.{'_'.join(map(str, ranks))}" if use_hashed_name else self._task
        self._made[of] += 1
        return f"{of}.{self._made[of]}"

    def _wrap(self) -> None:
        """Replace functions of torch that user code calls."""
        signature = inspect.signature(self._init)

        @functools.wraps(self._init)
        def init_process_group(*args: Any, **options: Any) -> None:
            self._initialise(signature.bind(*args, **options))

        @functools.wraps(self._destroy)
        def destroy_process_group(group: ProcessGroup | None = None) -> None:
            if self._left is None and self.is_in_place and (group is None or group is self.group):
                seam.spare(self.group)
            self._destroy(group)

        for each in (dist.send, dist.recv, dist.isend, dist.irecv):
            _replace_everywhere(each, _checking_peer(each))
        _replace_everywhere(self._init, init_process_group)
        _replace_everywhere(self._destroy, destroy_process_group)

    def _initialise(self, call: inspect.BoundArguments) -> None:
        asked = call.arguments
        if self._left is not None:
            return self._init(*call.args, **call.kwargs)
        is_there = self.is_in_place
        # These arguments are the same on all ranks of a group, so all of them decide the same.
        is_another = (
            dist.is_initialized()
            or asked.get("store") is not None
            or asked.get("world_size", -1) not in (-1, self._size)
        )
        if not is_there and is_another:
            return self._init(*call.args, **call.kwargs)
        if reason := self._contradiction(asked):
            raise ValueError(f"init_process_group: {reason}")
        if asked.get("timeout") is not None:
            seam.check_timeout(asked["timeout"])
        if not is_there:
            self.put_back()
        elif not self._has_said:
            self._has_said = True
            _say(f"The group of all {self._size} ranks ({self._backend}) exists already.")
        if asked.get("timeout") is not None:
            self._set_timeout(asked["timeout"])
        return None

    def _contradiction(self, asked: Mapping[str, Any]) -> str:
        """Return how a call asks for another group than the world's, with a remedy; else ""."""
        size, rank = asked.get("world_size", -1), asked.get("rank", -1)
        if size not in (-1, self._size):
            return (
                f"the world has {self._size} ranks, not {size}. Pass world_size=world_size or "
                "leave it out; after destroy_process_group() a group of your own can be made."
            )
        if rank not in (-1, self._rank):
            return (
                f"this is rank {self._rank} of the world, not {rank}. "
                "Pass rank=rank or leave it out."
            )
        if missing := lacking(asked.get("backend") or "", self._backend):
            name, remedy = min(missing), f'Pass "{self._backend}" or leave it out'
            if "nccl" in name and self._has_gpu:
                remedy += f"; `%dist_restart --backend {name}` starts workers that have it"
            return f"the world's group has the backend {self._backend}, not {name}. {remedy}."
        return ""

    def _set_timeout(self, timeout: timedelta) -> None:
        if timeout != self.timeout:
            self.timeout = timeout
            seam.set_timeout(self.group, timeout)


def lacking(asked: str, own: str) -> set[str]:
    """Return the backends asked for that are not among `own`; "nccl" means either class."""
    wanted, there = (
        {part.rpartition(":")[2].strip() for part in backend.lower().split(",") if part}
        for backend in (asked, own)
    )
    return wanted - there - ({"nccl"} if "nccl" in own else set())


def warn_of_own_groups() -> None:
    """Print a line when user code makes its first group in a worker of `--backend none`.

    nbdist neither shows nor releases ranks that wait in such a group.
    """
    init, has_said = dist.init_process_group, False

    @functools.wraps(init)
    def init_process_group(*args: Any, **options: Any) -> None:
        nonlocal has_said
        init(*args, **options)
        if has_said:
            return
        has_said = True
        _say(
            "With `--backend none` ranks that wait for each other in this group are neither shown "
            "nor released; with `%dist_restart --backend gloo` they are."
        )

    _replace_everywhere(init, init_process_group)


def _say(text: str) -> None:
    sys.stdout.write(f"\x1b[2m{text}\x1b[0m\n")  # a dim line


def _checking_peer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `dist.send` that raises if the world has no such rank.

    torch would wait for that rank for ever.
    """
    name = "dst" if "send" in function.__name__ else "src"

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        given = dict(zip(("tensor", name, "group"), args, strict=False)) | options
        peer = given.get(name, given.get(f"group_{name}"))
        # In other groups torch itself looks up the rank by its number in the world.
        is_of_all = given.get("group") in (None, dist.group.WORLD) and dist.is_initialized()
        if is_of_all and isinstance(peer, int):
            ranks = range(dist.get_world_size())
            if peer not in ranks:
                there = name_ranks(ranks)
                raise ValueError(f"{function.__name__}: there is no rank {peer}, only {there}.")
        return function(*args, **options)

    return checked


def _replace_everywhere(function: Callable[..., Any], by: Callable[..., Any]) -> None:
    """Replace a function in all modules of torch: `init_device_mesh` has an import of its own."""
    name = function.__name__
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("__name__", "").startswith("torch.") and names.get(name) is function:
            setattr(module, name, by)


# --- DDP and FSDP2 models ---------------------------------------------------------------------

# Layouts of restored modules. DDP's log has only the layouts that DDP found out itself.
_given_layouts: WeakKeyDictionary[Any, list[list[int]]] = WeakKeyDictionary()


def forget_broken_off_steps() -> None:
    """Reset DDP and FSDP2 models after a forward or backward that was interrupted, on all ranks.

    DDP would take the next backward for a second one of the same iteration, and its buckets would
    differ between ranks; FSDP2 keeps parameters gathered on some ranks alone.
    """
    for model in ddp_models():
        models_seam.forget_ddp_step(model)
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for module in instances_of(fsdp) if fsdp else ():
        with suppress(RuntimeError):  # a collective that it waited for has failed
            models_seam.forget_fsdp_step(module)


def move_models(before: ProcessGroup, after: ProcessGroup) -> None:
    """Move DDP modules from the group `before` to `after`, the new default group.

    They get new reducers: a model that has run has other buckets than one that has not, and ranks
    would add gradients of different parameters. Modules on stale groups raise from now on in their
    forward, because their reducer calls the group in C++, where it is not checked.
    """
    for model in ddp_models():
        if model.process_group is before:
            models_seam.give_reducer_anew(model, after)
        elif (why := _stale.get(model.process_group.group_name)) is not None:
            model.register_forward_pre_hook(functools.partial(_raise, why), prepend=True)


def _raise(why: str, *_: Any) -> None:
    raise RuntimeError(why)


def begin_models_anew() -> None:
    """Give DDP modules new reducers, as copies from another rank have; call it on all ranks."""
    default = dist.group.WORLD
    for model in ddp_models():
        if default is not None and model.process_group is default:
            models_seam.give_reducer_anew(model, default)


def ddp_models() -> Iterator[Any]:
    """Yield all DDP modules whose `__init__` has succeeded."""
    return (model for model in instances_of(DistributedDataParallel) if "reducer" in vars(model))


def instances_of(kind: type) -> Iterator[Any]:
    """Yield all objects of this class, and of its subclasses, in the process."""
    return (found for found in gc.get_objects() if issubclass(type(found), kind))


def bucket_layout(net: Any) -> list[list[int]]:
    """Return the numbers of the parameters in each DDP bucket; empty before the second step.

    With three ranks or more, the buckets decide the last bits of gradients.
    """
    found = models_seam.buckets_of(net)
    return _given_layouts.get(net, []) if found is None else found


def set_bucket_layout(net: Any, layout: list[list[int]]) -> None:
    """Set the buckets of a DDP module that was unpickled."""
    if models_seam.set_buckets(net, layout):
        _given_layouts[net] = layout


# --- stale groups -----------------------------------------------------------------------------

# torch's message if a mesh or a functional collective names a group that is not there.
UNKNOWN = re.compile(r"Could not resolve the process group registered under the name (\S+)")
_stale: dict[str, str] = {}  # by a group's name, the message of the error


def refuse_stale(groups: Iterable[ProcessGroup], before: int, after: int) -> None:
    """Make every operation of these groups raise RuntimeError, in every thread."""
    if not _stale:  # wrap torch's methods only now, as each call then takes longer
        for name in seam.OPERATIONS:
            if (operation := getattr(ProcessGroup, name, None)) is not None:
                setattr(ProcessGroup, name, _checked(operation))
    why = (
        f"this group ended when the world was scaled, {before} -> {after}. Recreate what was made "
        "with it: new_group, init_device_mesh, fully_shard, or DDP on a subgroup"
    )
    for group in groups:
        _stale[group.group_name] = why


def stale_group_of(error: BaseException, tb: TracebackType | None) -> str:
    """Return what to recreate if an error of torch comes from a stale group; else "".

    torch's message names the group, or the function that raised has it as a variable.
    """
    if not _stale or not isinstance(error, RuntimeError | ValueError):
        return ""
    if found := UNKNOWN.search(str(error)):
        return _stale.get(found[1], "")
    frame = [frame for frame, _ in traceback.walk_tb(tb)][-1:]
    used = (value for each in frame for value in each.f_locals.values())
    groups = [value for value in used if isinstance(value, ProcessGroup)]
    return next(filter(None, (_stale.get(group.group_name) for group in groups)), "")


def _checked(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def checked(self: ProcessGroup, *args: Any, **options: Any) -> Any:
        if (why := _stale.get(self.group_name)) is not None:
            raise RuntimeError(why)
        return operation(self, *args, **options)

    return checked
