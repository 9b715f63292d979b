"""What the notebook has sent to this worker, and whether it was changed; and what goes back."""

from __future__ import annotations

import copyreg
import hashlib
import mmap
import sys
import types
from collections.abc import Iterable
from operator import getitem
from pickle import PicklingError
from typing import Any, cast

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from nbdist.values.payload import Identity, Segment, is_atomic, size_of
from nbdist.values.pickling import digest_of, pickle
from nbdist.wire.ops import Spread
from nbdist.words import name_ranks, size_text
from nbdist.worker.compat import models as seam

READ_MOST = 4 << 20
"""Bytes of a value that are read when it arrives; of a bigger one it is asked later which pages
have been written to."""

DEFINITIONS = (types.FunctionType, type, types.ModuleType)
"""What is not looked at: they are the notebook's, which sends them when they change."""


_Part = str | tuple[int, int, str, str]
"""A digest of memory; or address, size and edges of memory that this process has not written to."""


class Received:
    """Knows how each value was when it was bound, and keeps none alive."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._known: dict[str, tuple[Identity, tuple[_Part, ...] | None]] = {}

    def note(self, names: Iterable[str]) -> None:
        """Remember how these are now, which have just been bound."""
        for name in names:
            value = self._names[name]
            self._known.pop(name, None)
            if not (is_atomic(value) or isinstance(value, DEFINITIONS)):
                self._known[name] = Identity(value), self._parts(value)

    def changed(self, names: Iterable[str]) -> frozenset[str]:
        """Return those that have been changed, or bound to something else, since they came.

        What could not be looked at then counts as unchanged.
        """
        return frozenset(filter(self._is_changed, names))

    def _is_changed(self, name: str) -> bool:
        if name not in self._known or name not in self._names:
            return False
        value, (identity, before) = self._names[name], self._known[name]
        if before is None or not identity.is_still(value):
            return not identity.is_still(value)
        is_written = any(isinstance(part, tuple) and _are_written(*part[:2]) for part in before)
        return is_written or self._parts(value) != before

    def _parts(self, value: Any) -> tuple[_Part, ...] | None:
        """Describe a value by its pickle and the memory beside it; None where it has none."""
        try:
            pickled = pickle(value, self._names, sketch=True)
        except Exception:  # noqa: BLE001 (a user's __reduce__ can raise anything)
            return None
        first, *buffers = (memoryview(frame).cast("B") for frame in pickled.frames)
        head = hashlib.blake2b(first, digest_size=16)
        if pickled.is_sketch:
            head.update(repr(pickled.versions).encode())
        is_big = size_of(pickled.frames) > READ_MOST
        return head.hexdigest(), *(_part_of(each, is_big=is_big) for each in buffers)


def _part_of(view: memoryview, *, is_big: bool) -> _Part:
    if not is_big:
        return digest_of(view)
    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    if _are_written(address, view.nbytes):
        return digest_of(view)
    # Of pages that it has in part it is read: others may be written to there.
    before, after = -address % mmap.PAGESIZE, (address + view.nbytes) % mmap.PAGESIZE
    edges = view[:before], view[max(before, view.nbytes - after) :]
    return address, view.nbytes, digest_of(edges[0]), digest_of(edges[1])


_PRESENT, _SWAPPED, _OF_A_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))
"""Bits of `/proc/PID/pagemap`, which every process may read for itself; proc_pid_pagemap(5)."""


def _are_written(address: int, size: int) -> bool:
    """Return True if any page that lies wholly in this memory is this process's own.

    That is once it is written to, or from the start where the memory is no file's.  True also
    where the kernel does not say.
    """
    first, last = -(-address // mmap.PAGESIZE), (address + size) // mmap.PAGESIZE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            pages.seek(8 * first)
            found = np.frombuffer(pages.read(8 * max(0, last - first)), np.uint64)
    except OSError:
        return True
    is_own = ((found & (_PRESENT | _SWAPPED)) != 0) & ((found & _OF_A_FILE) == 0)
    return len(found) < last - first or bool(is_own.any())


# --- what has a meaning only among ranks, as something that the notebook can use --------------


class SpreadValue(PicklingError):
    """It is spread over ranks, which have not been asked to put it together."""


class Homeward:
    """Takes apart what goes to the notebook, for the length of one pickle.

    With `notes` it only lists what is `spread`; with `joins` it puts that together, which all ranks
    that it is spread over must do in the same order.
    """

    def __init__(self, *, notes: bool = False, joins: bool = False) -> None:
        self.spread: list[Spread] = []
        self._notes, self._joins = notes, joins
        # With the tensors, so that ids stay theirs: a pickle can be made twice.
        self._wholes: dict[int, tuple[Any, Any]] = {}

    def reduce(self, value: Any) -> tuple[Any, ...]:
        """Return how to pickle it; NotImplemented for what means the same in the notebook."""
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
    """Pickle this in the place of another value."""
    return getitem, ((value,), 0)


def known(package: str, name: str) -> Any:
    """Return a class of torch.distributed if it was imported; else one without instances."""
    return getattr(sys.modules.get(f"torch.distributed.{package}"), name, Homeward)


def as_before_fsdp(module: Any) -> tuple[type, dict[str, Any] | None]:
    """Return a module's class and state as before `fully_shard`; None if it pickles itself."""
    kind = type(module)
    if isinstance(module, known("fsdp", "FSDPModule")):
        kind = seam.class_before_fsdp(kind)
        # A parameter that was gathered for a forward is no DTensor.
        module.reshard()
    make, _, state, *more = module.__reduce_ex__(2)
    if make is not copyreg.__newobj__ or any(more) or not isinstance(state, dict):  # type: ignore[attr-defined]
        return kind, None
    return kind, seam.without_fsdp(state)


# --- last values of cells whose results have a name in the notebook ---------------------------

MOST = 16
MOST_BYTES = 1 << 30  # of all copies that a rank keeps; the newest one stays, however big it is
REPLACED = f"is gone: a rank keeps the newest {MOST} big results, {size_text(MOST_BYTES)} in all"
CLEANED = "is gone: `%dist_memory --free` released it"


class KeptValues:
    """Big last values by task, packed, or why one cannot be had."""

    def __init__(self) -> None:
        self._kept: dict[str, Segment | str] = {}

    def keep(self, task_id: str, value: Segment | str) -> None:
        """Keep a value, or why it cannot be had; the oldest ones make room."""
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
        """Return one, to be read before it is let go; or why it cannot be had."""
        return self._kept.get(task_id, REPLACED)

    def release_values(self, task_id: str) -> None:
        """Release a value that has been read."""
        if isinstance(found := self._kept.pop(task_id, None), Segment):
            found.close()

    def clean(self) -> None:
        """Release all of them."""
        for of, each in self._kept.items():
            if isinstance(each, Segment):
                each.close()
                self._kept[of] = CLEANED
