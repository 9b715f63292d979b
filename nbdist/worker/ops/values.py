"""Ops that move values between the notebook and a rank, or from one rank to others by collectives.

The kernel of each rank calls these ops, for `%dist_gather`, `%dist_push`, `%dist_sync` and
restarts. `push`, `scatter` and `sync` keep the values that a rank receives, and do not bind them. A
second op binds the values once all ranks have received theirs, so that no rank has new values if
another rank fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nbdist.errors import NotEnoughMemory
from nbdist.values.payload import Payload
from nbdist.values.pickling import Buffer, pickle, unpickle
from nbdist.values.states import ChangedParts
from nbdist.values.unpicklable import fails_in
from nbdist.wire.ops import Brought, Inspected, Replaced
from nbdist.words import did_you_mean
from nbdist.worker.compat import torch as seam
from nbdist.worker.group.default import renew_reducers
from nbdist.worker.namespace import Context, Taken, VariableError
from nbdist.worker.ops.sharded import is_sharded
from nbdist.worker.returned import DEFINITIONS, ReturnReducer

SHARDED_REMEDY = (
    "a rank has only its own part of what is sharded. `%dist_restore` restores a snapshot; without "
    "one make the model again on all ranks, with `fully_shard`, and load a checkpoint"
)


def gather(context: Context, expressions: Sequence[str], *, joins: bool = False) -> Brought:
    """Pack this rank's values of names or expressions for the notebook.

    The values are in one pickle, so that objects in several of them stay shared. If the values
    have DTensors, the result only lists the DTensors. With `joins`, DTensors become whole tensors
    by collectives instead, and all ranks must call this together. If a value cannot be sent, the
    result says why, and no error is raised.
    """
    values = []
    for expression in expressions:
        try:
            values.append(eval(expression, context.names))
        except NameError as error:
            return Brought(expression, missing=error.name or "")
        except Exception as error:  # noqa: BLE001 (the expression is the user's)
            return Brought(expression, problem=f"{type(error).__name__}: {error}")
    reducer = ReturnReducer(notes=not joins, joins=joins)
    try:
        packed = context.lend(values, reducer)
    except NotEnoughMemory as error:
        return Brought(expressions[0], problem=f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 (a user's __reduce__ can raise anything)
        fails = fails_in(context.names)
        number, value = next((each for each in enumerate(values) if fails(each[1])), (0, values[0]))
        path, kind, why = context.namespace.blame(expressions[number], value, error)
        part = "it" if path == expressions[number] else f"`{path}`"
        problem = f"{part} ({kind}) cannot be sent to the notebook: {why}"
        return Brought(expressions[number], problem=problem)
    if reducer.spread:
        context.namespace.release_values(context.task_id)
        return Brought(" ".join(expressions), spread=tuple(reducer.spread))
    return Brought(packed=packed)


def last_value(context: Context, of: str) -> Brought:
    """Return the big last value of a cell, which this rank has kept, packed for the notebook.

    `of` is the id of the cell's task. If this rank does not have the value any more, the result has
    the reason.
    """
    return context.namespace.lend_kept(of, context.task_id)


def push(context: Context, packed: Mapping[int, Payload]) -> None:
    """Receive this rank's values by name, and keep them for `bind_pushed`.

    `packed` has the values by rank.
    """
    arrived = context.namespace.read(packed[context.rank])
    context.namespace.keep_received(Taken(arrived.values, arrived=arrived), context.task_id)


def bind_pushed(context: Context) -> Mapping[str, Replaced]:
    """Bind the values that `push` has received.

    Return, by the name of the variable, facts on the old value that was replaced, for example
    whether this rank had changed it.
    """
    return context.namespace.bind_received().replaced


def scatter(context: Context, name: str, parts: Mapping[int, Payload]) -> None:
    """Receive this rank's part of the variable `name`, and keep it for `bind_scattered`.

    `parts` has the parts by rank.
    """
    part = context.namespace.open(parts[context.rank])
    context.namespace.keep_received(Taken({name: part}), context.task_id)


def bind_scattered(context: Context) -> None:
    """Bind the part that `scatter` has received.

    From then on the variable belongs to the rank: it is no counterpart of the notebook's variable.
    """
    values = context.namespace.pop_received().values
    context.names.update(values)
    context.bound |= values.keys()


def inspect(
    context: Context, objects: Mapping[int, ChangedParts], names: Sequence[str] = ()
) -> Inspected:
    """Return which of the notebook's objects this rank has changed or freed.

    `objects` has, by key, the parts of each object to compare, or None to compare all parts. The
    result also describes this rank's values of the variables in `names`.
    """
    return context.namespace.counterparts.inspect(objects, names)


def keep(context: Context, names: Sequence[str]) -> Payload:
    """Pack variables of this rank with the keys of their objects, before this process is replaced.

    `bind_kept` binds them again in the new process of the rank.
    """
    values = {name: eval(name, context.names) for name in names}
    keyed = context.namespace.counterparts.keyed_objects(_pickled(context, values).objects)
    return context.namespace.lend((values, keyed), context.task_id)


def sync(context: Context, wanted: Sequence[str], source: int, to: Sequence[int] | None) -> None:
    """Copy the variables `wanted` from the rank `source` to the ranks in `to`, by collectives.

    If `to` is None, the ranks that lack any of the variables get them. All ranks must call this
    together. The values are in one pickle, so that objects in several of them stay shared. Raises
    VariableError on a rank that cannot send or rebuild the values. `bind_synced` binds them later.
    """
    names, rank = context.names, dist.get_rank()
    is_source = rank == source
    missing = [name for name in wanted if name not in names]
    is_receiver = not is_source and (bool(missing) if to is None else rank in to)
    is_needed, is_impossible = _any(is_receiver), _any(is_source and bool(missing))
    if is_impossible and is_source:
        near = did_you_mean(missing[0], names)
        problem = f"this rank has no `{', '.join(missing)}`; nothing was copied"
        raise VariableError(f"{problem}.{near}" if near else problem)
    taken = Taken({})
    if is_needed and not is_impossible:
        frames = _send(context, wanted, source) if is_source else _receive(source)
        if is_source:
            taken.values = {name: names[name] for name in wanted}
        elif is_receiver:
            taken = _rebuilt(names, wanted, frames)
    context.namespace.keep_received(taken, context.task_id)


def bind_synced(context: Context, wanted: Sequence[str]) -> None:
    """Bind the values that `sync` has received; all ranks must call this together.

    The variables are recorded as bound by the ranks, also on the source. So they belong to the
    ranks from now on, and no longer to the notebook.
    """
    bound = context.namespace.bind_received()
    context.bound |= bound.names & {*wanted}
    context.gained |= {*bound.gained}
    if _any(bool(bound.names)):
        # DDP reduces gradients in buckets. Ranks that had a model before may have other buckets
        # than the ranks that have received it now, so all ranks make their buckets again.
        renew_reducers()


def bind_kept(context: Context, packed: Payload) -> None:
    """Bind variables that `keep` has packed in this rank's previous process."""
    values, keyed = context.namespace.open(packed)
    context.names.update(values)
    context.bound |= values.keys()
    context.gained |= {*context.namespace.counterparts.register(keyed, {})}


def _send(context: Context, variables: Sequence[str], source: int) -> Sequence[Buffer]:
    names = context.names
    try:
        _check_is_whole(names[name] for name in variables)
        pickled = _pickled(context, {name: names[name] for name in variables})
        _check_is_whole(pickled.objects)
        keyed = context.namespace.counterparts.keyed_objects(pickled.objects, adds=True)
        frames = pickle((pickled.values, keyed), names, back_to_device=True).frames
    except Exception as error:  # a user's __reduce__ can raise anything
        _broadcast_header([], source)
        why = (
            SHARDED_REMEDY if isinstance(error, _OnlyAPart) else f"{type(error).__name__}: {error}"
        )
        text = f"`{', '.join(variables)}` cannot be copied: {why}; nothing was copied"
        raise VariableError(text) from error
    _broadcast_header([memoryview(frame).nbytes for frame in frames], source)
    for frame in frames:
        view = memoryview(frame)
        if view.nbytes:
            # Copy read-only memory, of which torch would warn.
            contents = bytearray(view) if view.readonly else view
            _broadcast(torch.frombuffer(contents, dtype=torch.uint8), source)
    return frames


class _OnlyAPart(Exception):
    """A value that `sync` should copy is sharded, so the source has only a part of it."""


def _check_is_whole(values: Iterable[Any]) -> None:
    if any(map(is_sharded, values)):
        raise _OnlyAPart


class _Objects(NamedTuple):
    """Values by name, and all objects that their pickle contains."""

    values: dict[str, Any]
    objects: Sequence[Any]


def _pickled(context: Context, values: dict[str, Any]) -> _Objects:
    """Add to `values` the functions, classes and modules of this rank that the values use.

    Return the extended `values`, and all objects that their pickle contains. Variables of other
    types that the values use are not added: users must name these themselves.
    """
    names = context.names
    while True:
        pickled = pickle(values, names, sketch=True, back_to_device=True)
        more = {
            name: names[name]
            for name in pickled.needs - values.keys()
            if isinstance(names.get(name), DEFINITIONS)
        }
        if not more:
            return _Objects(values, pickled.objects)
        values |= more


def _receive(source: int) -> Sequence[Buffer]:
    frames = []
    for size in _broadcast_header(None, source):
        frame = torch.empty(size, dtype=torch.uint8, device="cpu")
        if size:
            frame = _broadcast(frame, source)
        frames.append(frame.numpy().data)
    return frames


def _rebuilt(names: dict[str, Any], variables: Sequence[str], frames: Sequence[Buffer]) -> Taken:
    if not frames:
        return Taken({})  # the source has failed, and raises VariableError there
    try:
        values, keyed = unpickle(frames, names)
    except Exception as error:  # a user's class can raise anything while it is rebuilt
        raise VariableError(
            f"`{', '.join(variables)}` could not be rebuilt: {type(error).__name__}: {error}; "
            "nothing was copied"
        ) from error
    # A definition that the user has not named must not replace this rank's own.
    values = {name: each for name, each in values.items() if name in variables or name not in names}
    return Taken(values, keyed)


# --- collectives ------------------------------------------------------------------------


def _any(value: bool) -> bool:  # noqa: FBT001
    flag = torch.tensor([int(value)], device=_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def _broadcast_header(sizes: list[int] | None, source: int) -> list[int]:
    header = [sizes]
    dist.broadcast_object_list(header, src=source)
    assert header[0] is not None
    return header[0]


def _broadcast(frame: torch.Tensor, source: int) -> torch.Tensor:
    """Broadcast the bytes of the rank `source`; return them as a CPU tensor.

    `frame` has the bytes on the source. On other ranks `frame` has as many bytes, which may be
    overwritten.
    """
    on_device = frame.to(_device())
    dist.broadcast(on_device, src=source)
    return on_device.cpu()


def _device() -> torch.device:
    """Return a device whose tensors the default group's collectives take."""
    group = dist.group.WORLD
    assert group is not None
    return seam.CPU if seam.takes_cpu(group) else seam.CUDA
