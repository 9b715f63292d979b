"""Keeps the world's group as torch's default group, and resets DDP and FSDP2 models.

Nearly every tutorial calls `init_process_group` in its first lines and `destroy_process_group` in
its last lines, and in a notebook both run again and again. So in a worker, destroying the world's
group only takes the group out of torch's tables, and its connections stay. A rank can put the group
back alone, whether or not other ranks have destroyed it. `Group` is the main user of this file.
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

ID_LENGTH = 12  # characters of a task's id in a group's name: enough to tell tasks apart


class DefaultGroup:
    """Keeps the world's group usable as torch's default group, even if user code destroys it.

    The class replaces torch's `init_process_group` and `destroy_process_group`. It also names new
    groups, so that a group's name is the same on all its members.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.group: ProcessGroup  # set by `form`
        self.timeout = self._own_timeout = timeout
        self._has_printed_note = False
        self._kept: list[ProcessGroup] | None = None  # the parent's groups, only in a forked child
        self._init, self._destroy = dist.init_process_group, dist.destroy_process_group
        self._wrap()
        self._task = ""
        self._name_counts: Counter[str] = Counter()
        seam.name_groups(self._name)

    @property
    def is_in_place(self) -> bool:
        """Whether the world's group is the default group now."""
        return dist.group.WORLD is self.group

    def subgroups(self) -> dict[str, ProcessGroup]:
        """Return the subgroups of the world's group by name; {} unless `is_in_place`."""
        return seam.subgroups_of(self.group) if self.is_in_place else {}

    def restore(self) -> bool:
        """Make the world's group torch's default group, if it is not the default group already.

        If user code has made another default group, destroy that group and return True. Otherwise
        return False.
        """
        if self.is_in_place:
            return False
        if is_other := dist.is_initialized():
            self._destroy()
        seam.set_default_group(self.group, self._entries)
        self._set_timeout(self._own_timeout)
        return is_other

    def begin_task(self, task_id: str) -> None:
        """Make the world's group the default group, and name new groups after this task.

        If user code has made another default group, that group is destroyed, and a note is printed.
        """
        seam.end_coalescing()
        self.name_after(task_id)
        if self.restore():
            _print_note(
                "The group that an earlier cell initialised has ended; the world's group is "
                "used again."
            )

    def shut_down(self) -> None:
        """Shut down the world's group and its subgroups, at the end of the worker."""
        self.restore()
        self._destroy()

    def abandon_in_child(self) -> None:
        """Forget all groups in a forked child, which makes later groups as torch itself does."""
        # Keep the groups' objects: their destructors would wait for threads, which the child lacks.
        self._kept = [*seam.forget_all(self._destroy), self.group]
        self.name_after("")

    def form(self, start: WorkerStart, store: Any) -> None:
        """Form the world's group; torch keeps `store` for the groups that user code makes later.

        There must be no default group: `pop_groups` destroys an earlier one.
        """
        # Each call of `init_process_group` wraps `sys.excepthook` once more: undo this below.
        excepthook = sys.excepthook
        self._backend, self._has_gpu = start.world.backend or "", start.device != "cpu"
        self._rank, self._size = start.rank, start.world.world_size
        # In a world that was healed or scaled, do not print the note that the group exists already:
        # the old ranks may have printed it, so a new rank would print it alone.
        self._has_printed_note |= start.generation > 1
        try:
            self._init(
                backend=self._backend,
                store=store,
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

    def pop_groups(self) -> list[ProcessGroup]:
        """Destroy all groups in torch's tables, and return them together with the world's group.

        The world's group is not in the tables if user code has made another default group. Without
        a default group nothing is destroyed, and only the world's group is returned.
        """
        # If there is no default group, user code has destroyed it, or an attempt to form it failed.
        if not dist.is_initialized():
            return [self.group]
        assert dist.group.WORLD is not None
        default = dist.group.WORLD  # may be a group that user code has made
        groups = {self.group, default, *seam.subgroups_of(default).values()}
        self._destroy()
        return [*groups]

    def name_after(self, task_id: str) -> None:
        """From now on name new groups after this task; with "" leave the names to torch.

        Each task counts its groups from 1. So a rank that has missed a group in an earlier task
        gives its next groups the same names as the other ranks.
        """
        self._task = task_id[:ID_LENGTH]
        self._name_counts.clear()

    def _name(self, torch_name: str, ranks: Sequence[int], use_hashed_name: bool) -> str:  # noqa: FBT001
        if not self._task:
            return torch_name
        # torch names some groups by a hash of their ranks, and then only the group's members call
        # this function. So count groups separately for each list of members: all members of a group
        # agree on this count, but they may have made different numbers of other groups.
        prefix = f"{self._task}.{'_'.join(map(str, ranks))}" if use_hashed_name else self._task
        self._name_counts[prefix] += 1
        return f"{prefix}.{self._name_counts[prefix]}"

    def _wrap(self) -> None:
        """Replace torch's functions that make or destroy the default group, send or receive."""
        signature = inspect.signature(self._init)

        @functools.wraps(self._init)
        def init_process_group(*args: Any, **options: Any) -> None:
            self._initialise(signature.bind(*args, **options))

        @functools.wraps(self._destroy)
        def destroy_process_group(group: ProcessGroup | None = None) -> None:
            if self._kept is None and self.is_in_place and (group is None or group is self.group):
                seam.exempt_from_shutdown(self.group)
            self._destroy(group)

        for each in (dist.send, dist.recv, dist.isend, dist.irecv):
            _replace_everywhere(each, _checking_peer(each))
        _replace_everywhere(self._init, init_process_group)
        _replace_everywhere(self._destroy, destroy_process_group)

    def _initialise(self, call: inspect.BoundArguments) -> None:
        arguments = call.arguments
        if self._kept is not None:
            return self._init(*call.args, **call.kwargs)
        is_in_place = self.is_in_place
        # When the world's group is not in place, user code asks for another group by a store or
        # another size. If user code has made a default group already, torch's function raises an
        # error. All ranks must pass the same store and size, so all of them decide alike.
        is_another = (
            dist.is_initialized()
            or arguments.get("store") is not None
            or arguments.get("world_size", -1) not in (-1, self._size)
        )
        if not is_in_place and is_another:
            return self._init(*call.args, **call.kwargs)
        if reason := self._contradiction(arguments):
            raise ValueError(f"init_process_group: {reason}")
        if arguments.get("timeout") is not None:
            seam.check_timeout(arguments["timeout"])
        if not is_in_place:
            self.restore()
        elif not self._has_printed_note:
            self._has_printed_note = True
            _print_note(f"The group of all {self._size} ranks ({self._backend}) exists already.")
        if arguments.get("timeout") is not None:
            self._set_timeout(arguments["timeout"])
        return None

    def _contradiction(self, arguments: Mapping[str, Any]) -> str:
        """Return why the world's group is not what a call of `init_process_group` asks for.

        `arguments` are the arguments of the call, such as another backend or size. The text tells
        the user what to change. Return "" if the world's group is what the call asks for.
        """
        size, rank = arguments.get("world_size", -1), arguments.get("rank", -1)
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
        if missing := missing_backends(arguments.get("backend") or "", self._backend):
            name, remedy = min(missing), f'Pass "{self._backend}" or leave it out'
            if "nccl" in name and self._has_gpu:
                remedy += f"; `%dist_restart --backend {name}` starts workers that have it"
            return f"the world's group has the backend {self._backend}, not {name}. {remedy}."
        return ""

    def _set_timeout(self, timeout: timedelta) -> None:
        if timeout != self.timeout:
            self.timeout = timeout
            seam.set_timeout(self.group, timeout)


def missing_backends(requested: str, existing: str) -> set[str]:
    """Return the names of the backends in `requested` that `existing` lacks.

    Both are texts as torch takes them, such as "cpu:gloo,cuda:nccl". If `existing` has "nccl2",
    "nccl" is not missing.
    """
    requested_names, existing_names = (
        {part.rpartition(":")[2].strip() for part in backend.lower().split(",") if part}
        for backend in (requested, existing)
    )
    return requested_names - existing_names - ({"nccl"} if "nccl" in existing else set())


def warn_of_own_groups() -> None:
    """In a world without a process group, print a note once user code makes a group of its own.

    The note says that nbdist neither shows nor releases ranks that wait in this group. Called in
    workers of `--backend none`.
    """
    init, has_printed = dist.init_process_group, False

    @functools.wraps(init)
    def init_process_group(*args: Any, **options: Any) -> None:
        nonlocal has_printed
        init(*args, **options)
        if has_printed:
            return
        has_printed = True
        _print_note(
            "With `--backend none` ranks that wait for each other in this group are neither shown "
            "nor released; with `%dist_restart --backend gloo` they are."
        )

    _replace_everywhere(init, init_process_group)


def _print_note(text: str) -> None:
    sys.stdout.write(f"\x1b[2m{text}\x1b[0m\n")  # a dim line


def _checking_peer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `function` that raises ValueError for a rank that does not exist.

    `function` is torch's function to send or receive, such as `dist.send`. By itself it would wait
    for this rank for ever.
    """
    name = "dst" if "send" in function.__name__ else "src"

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        given = dict(zip(("tensor", name, "group"), args, strict=False)) | options
        peer = given.get(name, given.get(f"group_{name}"))
        # In other groups torch itself looks up the rank `dst` or `src`, and raises ValueError.
        is_world_group = given.get("group") in (None, dist.group.WORLD) and dist.is_initialized()
        if is_world_group and isinstance(peer, int):
            ranks = range(dist.get_world_size())
            if peer not in ranks:
                existing = name_ranks(ranks)
                raise ValueError(f"{function.__name__}: there is no rank {peer}, only {existing}.")
        return function(*args, **options)

    return checked


def _replace_everywhere(function: Callable[..., Any], by: Callable[..., Any]) -> None:
    """Replace a function of torch in all modules of torch that have imported it."""
    name = function.__name__
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("__name__", "").startswith("torch.") and names.get(name) is function:
            setattr(module, name, by)


# --- DDP and FSDP2 models ---------------------------------------------------------------------

# The bucket layouts that `set_bucket_layout` has set, by DDP module. They are kept here because
# DDP's own log has only layouts that DDP itself has chosen.
_given_layouts: WeakKeyDictionary[Any, list[list[int]]] = WeakKeyDictionary()


def reset_interrupted_steps() -> None:
    """Reset this rank's DDP and FSDP2 models after a step was interrupted; call this on each rank.

    Without this, DDP would count the next backward as part of the interrupted iteration, and its
    buckets would differ between ranks. FSDP2 would keep parameters gathered on some ranks, but not
    on others. Before torch 2.13, FSDP2 models cannot be reset, and stay as they are.
    """
    for model in ddp_models():
        models_seam.reset_ddp_step(model)
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for module in instances_of(fsdp) if fsdp else ():
        with suppress(RuntimeError):  # raised if the reset waits for a collective that has failed
            models_seam.reset_fsdp_step(module)


def move_models(before: ProcessGroup, after: ProcessGroup) -> None:
    """Make DDP modules on the group `before` use `after`, the new default group.

    Each module gets a new reducer, which adds up the gradients of all ranks in buckets. An old
    reducer may have other buckets than the reducer of a new rank, and then the ranks would add up
    gradients of different parameters.

    If a DDP module is on a subgroup that has ended because the world was scaled, its forward raises
    an error from now on. `refuse_stale` does not suffice here, as DDP calls the group from C++.
    """
    for model in ddp_models():
        if model.process_group is before:
            models_seam.renew_reducer(model, after)
        elif (why := _stale.get(model.process_group.group_name)) is not None:
            model.register_forward_pre_hook(functools.partial(_raise, why), prepend=True)


def _raise(why: str, *_: Any) -> None:
    raise RuntimeError(why)


def renew_reducers() -> None:
    """Give DDP modules on the default group new reducers; all ranks must call this together.

    Afterwards all ranks reduce gradients in the same buckets. Before, buckets can differ, such as
    after a model was copied to one of the ranks.
    """
    default = dist.group.WORLD
    for model in ddp_models():
        if default is not None and model.process_group is default:
            models_seam.renew_reducer(model, default)


def ddp_models() -> Iterator[Any]:
    """Yield the DDP modules of this process that have a reducer.

    A module has none if its `__init__` failed.
    """
    return (model for model in instances_of(DistributedDataParallel) if "reducer" in vars(model))


def instances_of(kind: type) -> Iterator[Any]:
    """Yield the objects of a class and its subclasses that the garbage collector tracks."""
    return (instance for instance in gc.get_objects() if issubclass(type(instance), kind))


def bucket_layout(net: Any) -> list[list[int]]:
    """Return the numbers of the parameters in each bucket in which DDP reduces gradients.

    With three ranks or more, the last bits of gradients depend on the buckets. DDP chooses its
    buckets in the first step. Before that, return the layout that `set_bucket_layout` has set, or
    [] if it has set none.
    """
    layout = models_seam.buckets_of(net)
    return _given_layouts.get(net, []) if layout is None else layout


def set_bucket_layout(net: Any, layout: list[list[int]]) -> None:
    """Set the buckets of an unpickled DDP module, if the layout fits the module's parameters.

    `layout` is a result of `bucket_layout`.
    """
    if models_seam.set_buckets(net, layout):
        _given_layouts[net] = layout


# --- stale groups -----------------------------------------------------------------------------

# Matches torch's message if a mesh or a functional collective names a group that does not exist.
UNKNOWN_GROUP = re.compile(r"Could not resolve the process group registered under the name (\S+)")
_stale: dict[str, str] = {}  # by the name of a stale group, the message for its user


def refuse_stale(groups: Iterable[ProcessGroup], before: int, after: int) -> None:
    """Raise RuntimeError from now on when Python code calls an operation of these groups.

    The world was scaled from `before` ranks to `after` ranks. These groups were made before that
    and cannot be used any more: they are stale. Calls from C++ raise no error here.
    """
    if not _stale:  # wrap torch's methods only if needed, since wrapped methods are slower
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
    """If a stale group (`refuse_stale`) seems to have caused an error, return a message about it.

    This is assumed for a RuntimeError or ValueError if torch's message names a stale group, or if
    the function that raised the error has a stale group in a variable. Return "" for other errors.
    """
    if not _stale or not isinstance(error, RuntimeError | ValueError):
        return ""
    if match := UNKNOWN_GROUP.search(str(error)):
        return _stale.get(match[1], "")
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
