"""Names of groups: the same on all ranks, never used twice, and stale when a group has ended.

The members of a new group meet in the store under its name.  torch counts the groups that
a rank has made; but one rank raises before a `new_group` that others go through, and from
then on no two ranks mean the same group by a name, or find what another group of that
name has left in the store.  So the count starts anew with each task, whose id all ranks
have: a name is never used twice, and a rank that has missed something is in step again
with the next task.

A group is stale when the world was scaled.  A module or a mesh may hold it for ever.  Its
connections have ended, so nothing can hang in it; but what gloo says of that is no help,
and a group of one rank has none.  So using it says what to make anew.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from torch.distributed import ProcessGroup

from nbdist.worker.compat import torch as seam
from nbdist.worker.group.ddp import ddp_models

ID_LENGTH = 12
"""Characters of a task's id: enough for all tasks that a world ever runs."""

UNKNOWN = re.compile(r"Could not resolve the process group registered under the name (\S+)")
"""What torch says where a mesh, or a functional collective, names a group that it lacks."""

_stale: dict[str, str] = {}
"""Why, by the group's name."""


class GroupNames:
    """Gives torch's `new_group` its names."""

    def __init__(self) -> None:
        self._task = ""
        self._made: Counter[str] = Counter()
        seam.name_groups(self._name)

    def __repr__(self) -> str:
        return f"<GroupNames of task {self._task}: {sum(self._made.values())} made>"

    def begin_task(self, task_id: str) -> None:
        """Name all groups that are made from now on after this task."""
        self._task = task_id[:ID_LENGTH]
        self._made.clear()

    def _name(self, torchs: str, ranks: Sequence[int], use_hashed_name: bool) -> str:  # noqa: FBT001
        if not self._task:
            return torchs
        # A hashed name is one that its members alone agree on: others make no such group.
        of = f"{self._task}.{'_'.join(map(str, ranks))}" if use_hashed_name else self._task
        self._made[of] += 1
        return f"{of}.{self._made[of]}"


# --- stale groups -----------------------------------------------------------------------------


def refuse_stale(groups: Iterable[ProcessGroup], before: int, after: int) -> None:
    """Have these groups raise RuntimeError, and DDP modules on them too; from any thread."""
    if not _stale:
        _check_operations()
    why = (
        f"this group ended when the world was scaled, {before} -> {after}. Recreate what was "
        f"made with it:"
        " new_group, init_device_mesh, fully_shard, or DDP on a subgroup"
    )
    for group in groups:
        _stale[group.group_name] = why


def refuse_stale_models() -> None:
    """Have DDP modules on stale groups raise too: their reducer asks the group in C++."""
    for model in ddp_models():
        if (why := _stale.get(model.process_group.group_name)) is not None:
            model.register_forward_pre_hook(functools.partial(_raise, why), prepend=True)


def stale_group_of(error: BaseException, tb: TracebackType | None) -> str:
    """Say what to make anew where torch's error means a stale group; "" where it does not.

    torch names the group, or checks it in the function that raised.
    """
    if not _stale or not isinstance(error, RuntimeError | ValueError):
        return ""
    if found := UNKNOWN.search(str(error)):
        return _stale.get(found[1], "")
    frame = [frame for frame, _ in traceback.walk_tb(tb)][-1:]
    used = (value for each in frame for value in each.f_locals.values())
    groups = [value for value in used if isinstance(value, ProcessGroup)]
    return next(filter(None, (_stale.get(group.group_name) for group in groups)), "")


def _raise(why: str, *_: Any) -> None:
    raise RuntimeError(why)


def _check_operations() -> None:
    """Have operations raise on stale groups; only once there are such: each call takes longer."""
    for name in seam.OPERATIONS:
        if (operation := getattr(ProcessGroup, name, None)) is not None:
            setattr(ProcessGroup, name, _checked(operation))


def _checked(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def checked(self: ProcessGroup, *args: Any, **options: Any) -> Any:
        if (why := _stale.get(self.group_name)) is not None:
            raise RuntimeError(why)
        return operation(self, *args, **options)

    return checked
