"""Finds variables that an aborted collective may have filled in part.

Gloo writes a result piece by piece into the caller's tensors. The traceback of the failed task
leads to these tensors: arguments of a function of `torch.distributed`, the result of an
asynchronous collective, or a model's gradients. Variables that share the tensors' memory are
incomplete. The kernel calls `find_incomplete` in each worker whose task has failed.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbdist.output.events import Incomplete
from nbdist.values.definitions import cell_numbers
from nbdist.values.memory import has_plain_memory, span_of_array, span_of_tensor
from nbdist.worker.compat.torch import BACKWARD
from nbdist.worker.group.gloo import connections_after, wait
from nbdist.worker.tracebacks import exception_chain, message_of

WRITTEN: dict[Callable[..., Any], str] = {
    dist.all_gather: "tensor_list",
    dist.all_gather_into_tensor: "output_tensor",
    dist.all_reduce: "tensor",
    dist.all_to_all: "output_tensor_list",
    dist.all_to_all_single: "output",
    dist.broadcast: "tensor",
    dist.gather: "gather_list",
    dist.recv: "tensor",
    dist.reduce: "tensor",
    dist.reduce_scatter: "output",
    dist.reduce_scatter_tensor: "output",
    dist.scatter: "tensor",
}
"""For functions of torch.distributed, the name of the parameter whose tensors they write."""

_PARAMETERS = {inspect.unwrap(each).__code__: name for each, name in WRITTEN.items()}

MAX_SEARCHED_PARTS = 100_000  # the most objects in a variable that are searched

AddressRange = tuple[int, int]
"""The first address of a piece of memory, and the first address after it."""


def find_incomplete(error: BaseException, names: Mapping[str, Any]) -> Incomplete | None:
    """Return the variables that an aborted collective may have filled in part, or None.

    `error` is the exception that ended the task, and `names` has the rank's variables. If an object
    of the user raises an exception while it is searched, also return None.
    """
    try:
        return _find_or_raise(error, dict(names))
    except Exception:  # noqa: BLE001 (a proxy or an attribute of the user can raise anything)
        return None


def _find_or_raise(error: BaseException, names: Mapping[str, Any]) -> Incomplete | None:
    chain = [*exception_chain(error)]
    if not any(connections_after(message_of(each)) for each in chain):
        return None
    # Search the calls of all exceptions in the chain: a KeyboardInterrupt may have replaced the
    # exception of the aborted collective.
    calls = [call for each in chain for call in traceback.walk_tb(each.__traceback__)]
    cells = cell_numbers()
    lines = [line for frame, line in calls if frame.f_code.co_filename in cells]
    operation, parts = _find_parts([frame for frame, _ in calls], names)
    return Incomplete(operation, lines[0] if lines else 0, tuple(parts)) if parts else None


def _find_parts(
    frames: Iterable[FrameType], names: Mapping[str, Any]
) -> tuple[str, list[tuple[str, str]]]:
    """Return the name of the aborted operation, and the parts of variables that it may have filled.

    `frames` are the calls in the task's tracebacks. The parts are pairs, as in `_variables_in`. If
    torch does not provide the tensors of a wait, the pair is ("a tensor of the call", ""). Return
    "" and [] if no call is a function in `WRITTEN`, a backward or a wait.
    """
    is_in_torch = False
    for frame in frames:
        if parameter := _PARAMETERS.get(frame.f_code):
            spans = [*_spans_of(frame.f_locals.get(parameter))]
            return frame.f_code.co_name, [*_variables_in(names, spans)]
        if frame.f_code.co_name == BACKWARD:
            modules = {n: m for n, m in names.items() if isinstance(m, DistributedDataParallel)}
            gradients = [p.grad for module in modules.values() for p in module.parameters()]
            return "backward", [*_variables_in(modules, [*_spans_of(gradients)])]
        if frame.f_code is wait.__code__ and not is_in_torch:
            result = _result_of(frame.f_locals["self"])
            parts = [*_variables_in(names, [*_spans_of(result)])]
            return "wait", parts if result else [("a tensor of the call", "")]
        is_in_torch = is_in_torch or frame.f_code.co_filename == dist.distributed_c10d.__file__
    return "", []


def _result_of(work: dist.Work) -> object:
    """Return the result of an asynchronous collective; None if torch does not provide it."""
    try:
        return work.result()
    except RuntimeError:
        return None


def _variables_in(names: Mapping[str, Any], spans: list[AddressRange]) -> Iterator[tuple[str, str]]:
    """Yield (part, name) for variables in `names` with memory in the address ranges `spans`.

    The part is "gradients" or "parameters" for a module, and "" for any other value. Names that
    begin with an underscore are left out. Parameters that several modules share are searched once.
    """
    # Ids of parameters that were searched: a DDP module has the parameters of the model in it.
    visited: set[int] = set()
    for name, value in names.items():
        if name.startswith("_"):
            continue
        if isinstance(value, torch.nn.Module):
            parameters = [each for each in value.parameters() if id(each) not in visited]
            visited.update(map(id, parameters))
            if _overlap(spans, _spans_of([each.grad for each in parameters])):
                yield "gradients", name
            if _overlap(spans, _spans_of(parameters)):
                yield "parameters", name
        elif _overlap(spans, _spans_of(value)):
            yield "", name


def _overlap(spans: Iterable[AddressRange], others: Iterable[AddressRange]) -> bool:
    pieces = [*spans]
    return any(begin < end and start < stop for start, end in others for begin, stop in pieces)


def _spans_of(value: object) -> Iterator[AddressRange]:
    """Yield the address ranges of tensors and arrays in a value, also in lists, tuples and dicts.

    At most `MAX_SEARCHED_PARTS` objects are searched. Tensors without plain memory, such as sparse
    tensors, are left out.
    """
    pending, visited = [value], set[int]()
    for _ in range(MAX_SEARCHED_PARTS):
        if not pending:
            return
        match each := pending.pop():
            case torch.Tensor() if has_plain_memory(torch, each) and each.numel():
                yield span_of_tensor(each)
            case np.ndarray() if each.size:
                yield span_of_array(each)
            case list() | tuple() | dict() if id(each) not in visited:
                visited.add(id(each))
                pending += islice(
                    each.values() if isinstance(each, dict) else each, MAX_SEARCHED_PARTS
                )
