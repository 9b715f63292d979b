"""Keeps the world's group as torch's default group; names groups, and resets DDP and FSDP2 models.

Nearly every tutorial calls `init_process_group` in its first lines and `destroy_process_group` in
its last ones, and in a notebook both run again and again. So in a worker destroying the world's
group only takes the group out of torch's tables. Putting the group back needs no message to other
ranks, which may still have it. Runs in each rank.
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
    """The world's group as torch's default group, which user code may destroy and initialise.

    This class also names new groups, so that a group's name is the same on all its members.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.group: ProcessGroup  # set by `form`
        self.timeout = self._own_timeout = timeout
        self._has_printed_note = False
        self._kept: list[ProcessGroup] | None = None  # in a forked child, the parent's groups
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
        """Make the world's group the default group again.

        Return True if another default group, made by user code, was destroyed for it.
        """
        if self.is_in_place:
            return False
        if is_other := dist.is_initialized():
            self._destroy()
        seam.set_default_group(self.group, self._entries)
        self._set_timeout(self._own_timeout)
        return is_other

    def begin_task(self, task_id: str) -> None:
        """Make the world's group the default group again, and name new groups after this task."""
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
        """Forget all groups, and use torch's own functions; called in a forked child."""
        # Keep the objects: their destructors would wait for threads that the child does not have.
        self._kept = [*seam.forget_all(self._destroy), self.group]
        self.name_after("")

    def form(self, start: WorkerStart, meeting: Any) -> None:
        """Form the world's group in the store `meeting`; to form again, call `pop_groups` first."""
        # Restored below, because each call of init_process_group wraps sys.excepthook again.
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

    def pop_groups(self) -> list[ProcessGroup]:
        """Destroy the groups that torch knows; return these groups and the world's group."""
        if not dist.is_initialized():
            return [self.group]  # user code has destroyed the group, or forming another has failed
        assert dist.group.WORLD is not None
        default = dist.group.WORLD  # may be a group of user code
        groups = {self.group, default, *seam.subgroups_of(default).values()}
        self._destroy()
        return [*groups]

    def name_after(self, task_id: str) -> None:
        """Name new groups after this task from now on; for "" name them as torch does."""
        self._task = task_id[:ID_LENGTH]
        self._name_counts.clear()

    def _name(self, torch_name: str, ranks: Sequence[int], use_hashed_name: bool) -> str:  # noqa: FBT001
        if not self._task:
            return torch_name
        # A group with a hashed name is made by its members alone, so the members count apart.
        prefix = f"{self._task}.{'_'.join(map(str, ranks))}" if use_hashed_name else self._task
        self._name_counts[prefix] += 1
        return f"{prefix}.{self._name_counts[prefix]}"

    def _wrap(self) -> None:
        """Wrap torch's functions that make or destroy the default group, and its send and recv."""
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
        # Ranks have to pass the same store and world size, so that all of them decide the same.
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
        """Return how a call asks for another group than the world's, with a remedy; else ""."""
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
    """Return the requested backends that `existing` lacks; "nccl2" is enough for "nccl"."""
    requested_names, existing_names = (
        {part.rpartition(":")[2].strip() for part in backend.lower().split(",") if part}
        for backend in (requested, existing)
    )
    return requested_names - existing_names - ({"nccl"} if "nccl" in existing else set())


def warn_of_own_groups() -> None:
    """Print a line once user code has made its first group in a worker of `--backend none`.

    nbdist neither shows nor releases ranks that wait in such a group.
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
    """Return a function like `dist.send` that raises if the default group lacks the other rank.

    torch would wait for such a rank for ever.
    """
    name = "dst" if "send" in function.__name__ else "src"

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        given = dict(zip(("tensor", name, "group"), args, strict=False)) | options
        peer = given.get(name, given.get(f"group_{name}"))
        # In other groups torch itself looks up the rank by its number in the world.
        is_world_group = given.get("group") in (None, dist.group.WORLD) and dist.is_initialized()
        if is_world_group and isinstance(peer, int):
            ranks = range(dist.get_world_size())
            if peer not in ranks:
                existing = name_ranks(ranks)
                raise ValueError(f"{function.__name__}: there is no rank {peer}, only {existing}.")
        return function(*args, **options)

    return checked


def _replace_everywhere(function: Callable[..., Any], by: Callable[..., Any]) -> None:
    """Replace a function in all modules of torch that have imported it, as `device_mesh` has."""
    name = function.__name__
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("__name__", "").startswith("torch.") and names.get(name) is function:
            setattr(module, name, by)


# --- DDP and FSDP2 models ---------------------------------------------------------------------

# Bucket layouts of unpickled modules: DDP's log has only layouts that DDP has found out itself.
_given_layouts: WeakKeyDictionary[Any, list[list[int]]] = WeakKeyDictionary()


def reset_interrupted_steps() -> None:
    """Reset this rank's DDP and FSDP2 models after a step was interrupted; call this on each rank.

    DDP would take the next backward for a second one of the same iteration, and its buckets would
    differ between ranks; FSDP2 keeps parameters gathered on some ranks alone.
    """
    for model in ddp_models():
        models_seam.reset_ddp_step(model)
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for module in instances_of(fsdp) if fsdp else ():
        with suppress(RuntimeError):  # the model waits for a collective that has failed
            models_seam.reset_fsdp_step(module)


def move_models(before: ProcessGroup, after: ProcessGroup) -> None:
    """Move DDP modules from the group `before` to `after`, the new default group.

    The modules get new reducers: after a first step a model has other buckets than before, and
    ranks would add gradients of different parameters. Modules on stale groups raise from now on in
    their forward, because their reducer calls the group in C++, where no call is checked.
    """
    for model in ddp_models():
        if model.process_group is before:
            models_seam.renew_reducer(model, after)
        elif (why := _stale.get(model.process_group.group_name)) is not None:
            model.register_forward_pre_hook(functools.partial(_raise, why), prepend=True)


def _raise(why: str, *_: Any) -> None:
    raise RuntimeError(why)


def renew_reducers() -> None:
    """Give DDP modules on the default group new reducers; all ranks must call this together."""
    default = dist.group.WORLD
    for model in ddp_models():
        if default is not None and model.process_group is default:
            models_seam.renew_reducer(model, default)


def ddp_models() -> Iterator[Any]:
    """Yield all DDP modules whose `__init__` has succeeded."""
    return (model for model in instances_of(DistributedDataParallel) if "reducer" in vars(model))


def instances_of(kind: type) -> Iterator[Any]:
    """Yield the objects of a class and its subclasses that the garbage collector tracks."""
    return (instance for instance in gc.get_objects() if issubclass(type(instance), kind))


def bucket_layout(net: Any) -> list[list[int]]:
    """Return the numbers of the parameters in each DDP bucket; empty if no layout is known yet.

    With three ranks or more, the buckets decide the last bits of gradients.
    """
    layout = models_seam.buckets_of(net)
    return _given_layouts.get(net, []) if layout is None else layout


def set_bucket_layout(net: Any, layout: list[list[int]]) -> None:
    """Set the buckets of a DDP module that was unpickled, if they fit the parameters."""
    if models_seam.set_buckets(net, layout):
        _given_layouts[net] = layout


# --- stale groups -----------------------------------------------------------------------------

# torch's message if a mesh or a functional collective names a group that does not exist.
UNKNOWN_GROUP = re.compile(r"Could not resolve the process group registered under the name (\S+)")
_stale: dict[str, str] = {}  # by a group's name, the message of the error


def refuse_stale(groups: Iterable[ProcessGroup], before: int, after: int) -> None:
    """Make operations that Python calls on stale groups raise an error with both world sizes."""
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
    """Return the message for a stale group if the group seems to have caused an error; else "".

    torch's message names the group, or the function that raised has the group as a variable.
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
