"""What has a meaning only among ranks, as something that the notebook can use.

A DDP model goes home as its module.  A DTensor, and a model of FSDP2's, is spread over ranks:
it goes home whole where all of these put it together, which is a collective.  The last values of
cells are kept here until the notebook asks for them.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from operator import getitem
from pickle import PicklingError
from typing import Any, cast

import torch
from ipykernel.displayhook import ZMQShellDisplayHook
from torch.nn.parallel import DistributedDataParallel

from nbdist.values.shared_memory import Segment
from nbdist.wire.ops import Spread
from nbdist.words import name_ranks, size_text
from nbdist.worker.compat import models as seam

Reduced = tuple[Any, ...]


class SpreadValue(PicklingError):
    """It is spread over ranks, which have not been asked to put it together."""


class Homeward:
    """Takes apart what goes to the notebook, for the length of one pickle.

    With `notes` it only lists what is `spread`, with `joins` that is put together: all ranks
    that it is spread over have to do that, in the same order.
    """

    def __init__(self, *, notes: bool = False, joins: bool = False) -> None:
        self.spread: list[Spread] = []
        self._notes, self._joins = notes, joins
        # With the tensors, so that ids stay theirs: a pickle can be made twice.
        self._wholes: dict[int, tuple[Any, Any]] = {}

    def reduce(self, value: Any) -> Reduced:
        """Say how to pickle it; NotImplemented for what means the same in the notebook."""
        kind = type(value)
        if kind is DistributedDataParallel:
            return _itself(value.module)
        if isinstance(value, torch.nn.Module) and seam.is_of_fsdp(value):
            return self._reduce_module(value)
        if kind is _known("tensor", "DTensor"):
            return _itself(self._whole(value))
        if kind is _known("device_mesh", "DeviceMesh"):
            raise SpreadValue("a mesh is of the ranks' groups: gather its `mesh`, a tensor")
        if kind is torch.distributed.ProcessGroup:
            raise SpreadValue("a process group connects the ranks, and the notebook is none")
        return cast(Reduced, NotImplemented)

    def _whole(self, tensor: Any) -> Any:
        if type(tensor) is not _known("tensor", "DTensor"):
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

    def _reduce_module(self, module: Any) -> Reduced:
        """Take it apart as before `fully_shard`: its class, and its state without FSDP2's."""
        kind = type(module)
        if isinstance(module, _known("fsdp", "FSDPModule")):
            kind = seam.class_before_fsdp(kind)
            # A parameter that was gathered for a forward is no DTensor.
            module.reshard()
        make, _, state, *more = module.__reduce_ex__(2)
        if make is not copyreg.__newobj__ or any(more) or not isinstance(state, dict):  # type: ignore[attr-defined]
            raise SpreadValue(
                f"{kind.__name__} is sharded and has a pickling of its own: gather what "
                "`get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))` of "
                "torch.distributed.checkpoint.state_dict returns"
            )
        return object.__new__, (kind,), seam.without_fsdp(state)


def _itself(value: Any) -> Reduced:
    """Have this be pickled in the place of another value."""
    return getitem, ((value,), 0)


def _known(package: str, name: str) -> Any:
    """Find a class of torch.distributed where it was imported; else one that nothing is of."""
    return getattr(sys.modules.get(f"torch.distributed.{package}"), name, Homeward)


# --- last values of cells whose results have a name in the notebook ---------------------------


MOST = 16
MOST_BYTES = 1 << 30
"""Of all copies that a rank keeps; the newest one stays, however big it is."""

REPLACED = f"is gone: a rank keeps the newest {MOST} big results, {size_text(MOST_BYTES)} in all"
CLEANED = "is gone: `%dist_memory --free` released it"


class NotingHook(ZMQShellDisplayHook):
    """A display hook that notes the last value of a cell, also that of `x;`, while asked to."""

    _is_noting = False
    _last: object = None

    def __call__(self, result: Any = None) -> None:
        """Show the value; called for the last expression of a cell."""
        if self._is_noting:
            self._last = result
        super().__call__(result)  # type: ignore[no-untyped-call]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note values meanwhile."""
        self._is_noting, self._last = True, None
        try:
            yield
        finally:
            self._is_noting = False

    def take(self) -> object:
        """Return the value that was noted last, None for none, and hold it no longer."""
        last, self._last = self._last, None
        return last


class KeptValues:
    """Big last values by task, packed; in place of one that is no longer there says why."""

    def __init__(self) -> None:
        self._kept: dict[str, Segment | str] = {}

    def __repr__(self) -> str:
        return f"<KeptValues {len(self._segments)}, {size_text(self.size)}>"

    @property
    def _segments(self) -> dict[str, Segment]:
        return {of: each for of, each in self._kept.items() if isinstance(each, Segment)}

    @property
    def size(self) -> int:
        """How many bytes all of them take."""
        return sum(map(_size, self._segments.values()))

    def keep(self, task_id: str, value: Segment | str) -> None:
        """Keep a value, or why it cannot be had; the oldest ones make room."""
        self._kept[task_id] = value
        for of, segment in [*self._segments.items()][:-1]:
            if len(self._segments) <= MOST and self.size <= MOST_BYTES:
                break
            segment.close()
            self._kept[of] = REPLACED
        while len(self._kept) > 16 * MOST:
            self.let_go(next(iter(self._kept)))

    def find(self, task_id: str) -> Segment | str:
        """Return one, to be read before it is let go; or why it cannot be had."""
        return self._kept.get(task_id, REPLACED)

    def let_go(self, task_id: str) -> None:
        """Release a value that has been read."""
        if isinstance(found := self._kept.pop(task_id, None), Segment):
            found.close()

    def clean(self) -> None:
        """Release all of them."""
        for of, segment in self._segments.items():
            segment.close()
            self._kept[of] = CLEANED


def _size(segment: Segment) -> int:
    return sum(segment.ref.sizes)
