"""Groups that ended when the world was scaled: using one says what to make anew.

A module or a mesh may hold one for ever.  Its connections have ended, so nothing can hang
in it; but what gloo says of that is no help, and a group of one rank has none.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from torch.distributed import ProcessGroup

from nbdist.worker.compat import torch as seam
from nbdist.worker.models import ddp_models

UNKNOWN = re.compile(r"Could not resolve the process group registered under the name (\S+)")
"""What torch says where a mesh, or a functional collective, names a group that it lacks."""

_outdated: dict[str, str] = {}
"""Why, by the group's name; a name is never used twice."""


def refuse(groups: Iterable[ProcessGroup], before: int, after: int) -> None:
    """Have these groups raise RuntimeError, and DDP modules on them too; from any thread."""
    if not _outdated:
        _watch_operations()
    why = (
        f"this group ended when the world was scaled, {before} -> {after}. What was made with it "
        "has to be made anew: new_group, init_device_mesh, fully_shard, or DDP on a subgroup"
    )
    for group in groups:
        _outdated[group.group_name] = why


def refuse_models() -> None:
    """The same of DDP modules: their reducer asks the group in C++."""
    for model in ddp_models():
        if (why := _outdated.get(model.process_group.group_name)) is not None:
            model.register_forward_pre_hook(functools.partial(_raise, why), prepend=True)


def remedy(error: BaseException, tb: TracebackType | None) -> str:
    """What to say instead of torch's words for a group that it lacks; "" where they are others.

    torch names the group, or checks it in the function that raised.
    """
    if not _outdated or not isinstance(error, RuntimeError | ValueError):
        return ""
    if found := UNKNOWN.search(str(error)):
        return _outdated.get(found[1], "")
    frame = [frame for frame, _ in traceback.walk_tb(tb)][-1:]
    used = (value for each in frame for value in each.f_locals.values())
    groups = [value for value in used if isinstance(value, ProcessGroup)]
    return next(filter(None, (_outdated.get(group.group_name) for group in groups)), "")


def _raise(why: str, *_: Any) -> None:
    raise RuntimeError(why)


def _watch_operations() -> None:
    """Only from the first time on that there are such groups: each call takes longer by this."""
    for name in seam.OPERATIONS:
        if (operation := getattr(ProcessGroup, name, None)) is not None:
            setattr(ProcessGroup, name, _checked(operation))


def _checked(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def checked(self: ProcessGroup, *args: Any, **options: Any) -> Any:
        if (why := _outdated.get(self.group_name)) is not None:
            raise RuntimeError(why)
        return operation(self, *args, **options)

    return checked
