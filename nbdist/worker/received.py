"""Values of a rank on their way to the notebook: unsharded while pickled, or kept until asked for.

Runs in each rank, on the main thread; `Namespace` and the ops for values use it.
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
"""Types of values that `%dist_sync` copies too if another value uses them."""


# --- values that have a meaning only among ranks ----------------------------------------------


class SpreadValue(PicklingError):
    """A value is spread over ranks, or connects them, and cannot be pickled for the notebook."""


class Homeward:
    """Pickles values for the notebook that have a meaning only among ranks; made for one pickle.

    DDP modules become the module inside, FSDP2 modules what they were before `fully_shard`. A
    DTensor raises `SpreadValue`; with `notes` it is listed in `spread`; with `joins` it is put
    together, which all ranks that it is spread over must do in the same order.
    """

    def __init__(self, *, notes: bool = False, joins: bool = False) -> None:
        self.spread: list[Spread] = []
        self._notes, self._joins = notes, joins
        # With the DTensors, so that no id is used again: a pickle may be made twice.
        self._wholes: dict[int, tuple[Any, Any]] = {}

    def reduce(self, value: Any) -> tuple[Any, ...]:
        """Return how to pickle a value; NotImplemented if the notebook can use it as it is."""
        kind = type(value)
        if kind is DistributedDataParallel:
            return _itself(value.module)
        if isinstance(value, torch.nn.Module) and seam.is_of_fsdp(value):
            return self._reduce_module(value)
        if kind is known("tensor", "DTensor"):
            return _itself(self._whole(value))
        if kind is known("device_mesh", "DeviceMesh"):
            raise SpreadValue("a mesh is of the ranks' groups: gather its `mesh`, a tensor")
        if kind is torch.distributed.ProcessGroup:
            raise SpreadValue("a process group connects the ranks, and the notebook is none")
        return cast("tuple[Any, ...]", NotImplemented)

    def _whole(self, tensor: Any) -> Any:
        if type(tensor) is not known("tensor", "DTensor"):
            return tensor
        if id(tensor) not in self._wholes:
            self._wholes[id(tensor)] = tensor, self._put_together(tensor)
        return self._wholes[id(tensor)][1]

    def _put_together(self, tensor: Any) -> Any:
        gradient = tensor.grad if tensor.is_leaf else None
        if self._joins:
            with torch.no_grad():
                whole = tensor.detach().full_tensor().requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                whole = torch.nn.Parameter(whole.detach(), tensor.requires_grad)
            whole.grad = self._whole(gradient)
            return whole
        ranks = tuple(tensor.device_mesh.mesh.flatten().tolist())
        if not self._notes:
            raise SpreadValue(
                f"a DTensor is spread over {name_ranks(ranks)}: run `whole = x.full_tensor()` of "
                "it on all of them, and use that"
            )
        what = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.placements}"
        self.spread.append(Spread(ranks, what))
        return self._whole(gradient)

    def _reduce_module(self, module: Any) -> tuple[Any, ...]:
        kind, state = as_before_fsdp(module)
        if state is None:
            raise SpreadValue(
                f"{kind.__name__} is sharded and has a pickling of its own: gather what "
                "`get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))` of "
                "torch.distributed.checkpoint.state_dict returns"
            )
        return object.__new__, (kind,), state


def _itself(value: Any) -> tuple[Any, ...]:
    """Return how to pickle this value in the place of another."""
    return getitem, ((value,), 0)


def known(package: str, name: str) -> Any:
    """Return a class of torch.distributed, or a class without instances if it was not imported."""
    return getattr(sys.modules.get(f"torch.distributed.{package}"), name, Homeward)


def as_before_fsdp(module: Any) -> tuple[type, dict[str, Any] | None]:
    """Return a module's class and state before `fully_shard`; no state if it pickles itself."""
    kind = type(module)
    if isinstance(module, known("fsdp", "FSDPModule")):
        kind = seam.class_before_fsdp(kind)
        # Until it is sharded again, a parameter gathered for a forward is no DTensor.
        module.reshard()
    make, _, state, *more = module.__reduce_ex__(2)
    if make is not copyreg.__newobj__ or any(more) or not isinstance(state, dict):  # type: ignore[attr-defined]
        return kind, None
    return kind, seam.without_fsdp(state)


# --- last values of cells, kept until the notebook asks for them ------------------------------

MOST = 16
MOST_BYTES = 1 << 30  # of all kept values of a rank; the newest one stays, whatever its size
REPLACED = f"is gone: a rank keeps the newest {MOST} big results, {size_text(MOST_BYTES)} in all"
CLEANED = "is gone: `%dist_memory --free` released it"


class KeptValues:
    """Big last values of cells, packed, by the id of the task; or why a value is not available."""

    def __init__(self) -> None:
        self._kept: dict[str, Segment | str] = {}

    def keep(self, task_id: str, value: Segment | str) -> None:
        """Keep a value, or why it is not available; release the oldest values beyond the limits."""
        self._kept[task_id] = value
        count = size = 0
        for of, each in reversed([*self._kept.items()]):
            if isinstance(each, Segment):
                count, size = count + 1, size + sum(each.ref.sizes)
                if count > 1 and (count > MOST or size > MOST_BYTES):
                    self.release_values(of)
        while len(self._kept) > 16 * MOST:
            self.release_values(next(iter(self._kept)))

    def find(self, task_id: str) -> Segment | str:
        """Return a value, which stays here until it is released; or why it is not available."""
        return self._kept.get(task_id, REPLACED)

    def release_values(self, task_id: str) -> None:
        """Release the value of a task, which the notebook has read."""
        if isinstance(found := self._kept.pop(task_id, None), Segment):
            found.close()

    def clean(self) -> None:
        """Release all values."""
        for of, each in self._kept.items():
            if isinstance(each, Segment):
                each.close()
                self._kept[of] = CLEANED
