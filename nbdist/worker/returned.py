"""Pickles a rank's sharded values for the notebook, and keeps the big last values of cells.

Runs in each worker. `Namespace` and the ops for values and snapshots use this file.
"""

from __future__ import annotations

import copyreg
import sys
import types
from operator import getitem
from pickle import PicklingError
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from nbdist.values.payload import Segment
from nbdist.wire.ops import Spread
from nbdist.words import name_ranks, size_text
from nbdist.worker.compat import models as seam

DEFINITIONS = (types.FunctionType, type, types.ModuleType)
"""Types of variables that `%dist_sync` copies together with a variable that uses them."""


# --- values that have a meaning only among ranks ----------------------------------------------


class SpreadValue(PicklingError):
    """A value is sharded over ranks, or connects ranks, so the notebook could not use it."""


class ReturnReducer:
    """Tells pickle what to send to the notebook for values that have a meaning only among ranks.

    A DDP module becomes the module inside it, and an FSDP2 module the module before `fully_shard`.
    A mesh or a process group raises `SpreadValue`. A DTensor raises it too, by default. With
    `notes`, a DTensor raises nothing and is listed in `spread`. With `joins`, a DTensor becomes a
    whole tensor by a collective, which all ranks that have a part must call in the same order. Each
    pickle needs a new object of this class.
    """

    def __init__(self, *, notes: bool = False, joins: bool = False) -> None:
        self.spread: list[Spread] = []
        self._notes, self._joins = notes, joins
        # By the id of a DTensor: the DTensor and its whole tensor, as `pickle` may reduce a DTensor
        # twice. The DTensor is kept alive, so that no other object gets its id.
        self._wholes: dict[int, tuple[Any, Any]] = {}

    def reduce(self, value: Any) -> tuple[Any, ...]:
        """Return how to pickle a value, as `__reduce__` does.

        Return NotImplemented if the value is pickled as usual.
        """
        kind = type(value)
        if kind is DistributedDataParallel:
            return _reduce_to(value.module)
        if isinstance(value, torch.nn.Module) and seam.is_of_fsdp(value):
            return self._reduce_module(value)
        if kind is dist_class("tensor", "DTensor"):
            return _reduce_to(self._whole_of(value))
        if kind is dist_class("device_mesh", "DeviceMesh"):
            raise SpreadValue("a mesh is of the ranks' groups: gather its `mesh`, a tensor")
        if kind is torch.distributed.ProcessGroup:
            raise SpreadValue("a process group connects the ranks, and the notebook is none")
        return cast("tuple[Any, ...]", NotImplemented)

    def _whole_of(self, tensor: Any) -> Any:
        if type(tensor) is not dist_class("tensor", "DTensor"):
            return tensor
        if id(tensor) not in self._wholes:
            self._wholes[id(tensor)] = tensor, self._join(tensor)
        return self._wholes[id(tensor)][1]

    def _join(self, tensor: Any) -> Any:
        gradient = tensor.grad if tensor.is_leaf else None
        if self._joins:
            with torch.no_grad():
                whole = tensor.detach().full_tensor().requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                whole = torch.nn.Parameter(whole.detach(), tensor.requires_grad)
            whole.grad = self._whole_of(gradient)
            return whole
        ranks = tuple(tensor.device_mesh.mesh.flatten().tolist())
        if not self._notes:
            raise SpreadValue(
                f"a DTensor is spread over {name_ranks(ranks)}: run `whole = x.full_tensor()` of "
                "it on all of them, and use that"
            )
        what = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.placements}"
        self.spread.append(Spread(ranks, what))
        return self._whole_of(gradient)

    def _reduce_module(self, module: Any) -> tuple[Any, ...]:
        kind, state = as_before_fsdp(module)
        if state is None:
            raise SpreadValue(
                f"{kind.__name__} is sharded and has a pickling of its own: gather what "
                "`get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))` of "
                "torch.distributed.checkpoint.state_dict returns"
            )
        return object.__new__, (kind,), state


def _reduce_to(value: Any) -> tuple[Any, ...]:
    """Return a result for the `__reduce__` of any object, with which pickle writes `value`.

    The notebook then gets `value` instead of the object.
    """
    return getitem, ((value,), 0)


def dist_class(package: str, name: str) -> Any:
    """Return a class of `torch.distributed.PACKAGE`, for callers that test the types of values.

    The package is not imported for this. If nobody has imported it, no value can have the class.
    Then return `ReturnReducer` instead, which is not the type of any value to test.
    """
    return getattr(sys.modules.get(f"torch.distributed.{package}"), name, ReturnReducer)


def as_before_fsdp(module: Any) -> tuple[type, dict[str, Any] | None]:
    """Return the class and state that a module had before `fully_shard`.

    The state is None if the module's class defines its own pickling.
    """
    kind = type(module)
    if isinstance(module, dist_class("fsdp", "FSDPModule")):
        kind = seam.class_before_fsdp(kind)
        # Shard parameters again that a forward has gathered: gathered parameters are no DTensors.
        module.reshard()
    make, _, state, *more = module.__reduce_ex__(2)
    if make is not copyreg.__newobj__ or any(more) or not isinstance(state, dict):  # type: ignore[attr-defined]
        return kind, None
    return kind, seam.without_fsdp(state)


# --- last values of cells, kept because the notebook may ask for them -------------------------

MAX_KEPT_RESULTS = 16
MAX_KEPT_BYTES = 1 << 30  # the limit for all kept values of a rank; the newest value always stays
REPLACED = (
    f"is gone: a rank keeps the newest {MAX_KEPT_RESULTS} big results, "
    f"{size_text(MAX_KEPT_BYTES)} in all"
)
CLEANED = "is gone: `%dist_memory --free` released it"


class KeptValues:
    """Keeps the big last values of cells, packed, so that the notebook can request them later.

    Each value is kept under the id of the cell's task. In place of a value that could not be
    packed, or that the user has released, the reason is kept as a text for the user.
    """

    def __init__(self) -> None:
        self._values: dict[str, Segment | str] = {}

    def keep(self, task_id: str, value: Segment | str) -> None:
        """Keep a value, or the reason why it is not available.

        Release the oldest values beyond `MAX_KEPT_RESULTS` or `MAX_KEPT_BYTES`, but never `value`.
        """
        self._values[task_id] = value
        count = size = 0
        for kept_id, kept in reversed([*self._values.items()]):
            if isinstance(kept, Segment):
                count, size = count + 1, size + sum(kept.ref.sizes)
                if count > 1 and (count > MAX_KEPT_RESULTS or size > MAX_KEPT_BYTES):
                    self.release_values(kept_id)
        while len(self._values) > 16 * MAX_KEPT_RESULTS:
            self.release_values(next(iter(self._values)))

    def find(self, task_id: str) -> Segment | str:
        """Return the value of a task, or the reason why it is not available."""
        return self._values.get(task_id, REPLACED)

    def release_values(self, task_id: str) -> None:
        """Release the value of a task, if this object keeps it."""
        if isinstance(value := self._values.pop(task_id, None), Segment):
            value.close()

    def clean(self) -> None:
        """Release all values; record in their place that the user has released them."""
        for task_id, value in self._values.items():
            if isinstance(value, Segment):
                value.close()
                self._values[task_id] = CLEANED
