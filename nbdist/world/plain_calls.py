"""Packs calls of `World.run` that have only plain arguments, such as `run(step, 3, "sgd")`.

Runs in the notebook's process.  The arguments of such a call cannot be changed, so a user cannot
tell a copy from the original.  Its message therefore needs no keys of objects.  The pickle of a
function of `__main__` is used again as long as no part of the function changes.
"""

from __future__ import annotations

import linecache
import operator
import pickle as plain_pickle
import types
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from nbdist.values import definitions
from nbdist.values.definitions import MadeBy
from nbdist.values.payload import INLINE_LIMIT, Payload, is_atomic
from nbdist.values.pickling import is_pickled_by_name, pickle

MAX_ARGUMENTS = 16
"""The most positional arguments of a plain call, and the most keyword arguments.

A tuple among the arguments has at most this many items, too."""

MAX_KEPT = 64
"""The most functions whose pickles are kept; a further function empties the table."""


class PlainCall(NamedTuple):
    """A packed call, and `names`, the variables of `__main__` that are sent with it.

    The payload has a frame for the function, a frame for the arguments and, if there are variables,
    a frame for them.
    """

    payload: Payload
    names: Mapping[str, Any]


class _KeptFunction(NamedTuple):
    """The pickle of a function, and the `parts` that the function had at that time.

    The pickle is used only while all parts are the same objects.  `needs` are the names of
    `__main__` that the function uses.
    """

    parts: tuple[Any, ...]
    needs: tuple[str, ...]
    frame: bytes


_kept: dict[int, _KeptFunction] = {}
"""By the id of a code object, the function with this code that was packed last."""


def pack(
    namespace: dict[str, Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    is_ours: Callable[[str], bool],
) -> PlainCall | None:
    """Pack a short call whose function, arguments and variables are plain; None for other calls.

    A function is plain if it is pickled by its name.  A function of `__main__`, whose variables are
    in `namespace`, is plain if it captures no variables, has no attributes of its own, has plain
    defaults, and uses only variables that are modules or plain values.  `is_ours(name)` returns
    True if the value of a name that the function uses is sent with the call.
    """
    if not (_are_plain(args) and _are_plain(kwargs.values())):
        return None
    if type(function) not in (types.FunctionType, types.BuiltinFunctionType):
        return None
    names: dict[str, Any] = {}
    if is_pickled_by_name(function):
        frame = plain_pickle.dumps((function,), plain_pickle.HIGHEST_PROTOCOL)
    elif (kept := _keep(namespace, function)) is not None:
        frame, names = kept.frame, {name: namespace[name] for name in kept.needs if is_ours(name)}
    else:
        return None
    frames = [frame, plain_pickle.dumps(((args, dict(kwargs)),), plain_pickle.HIGHEST_PROTOCOL)]
    if names:
        if not all(map(_is_plain_variable, names.values())):
            return None
        sent = {name: _by_import(value) for name, value in names.items()}
        frames.append(plain_pickle.dumps((sent,), plain_pickle.HIGHEST_PROTOCOL))
    if sum(map(len, frames)) >= INLINE_LIMIT:
        return None
    return PlainCall(Payload(tuple(frames)), names)


def _are_plain(values: Any) -> bool:
    return len(values) <= MAX_ARGUMENTS and all(map(_is_plain, values))


def _is_plain(value: Any) -> bool:
    """Return True for a short atomic value, such as a number, or a short tuple of such values."""
    if type(value) is tuple:
        return len(value) <= MAX_ARGUMENTS and all(map(is_atomic, value))
    return is_atomic(value)


def _is_plain_variable(value: Any) -> bool:
    if type(value) is not types.ModuleType:
        return _is_plain(value)
    try:
        definitions.require_importable(value)
    except plain_pickle.PicklingError:
        return False
    return True


def _by_import(value: Any) -> Any:
    is_module = type(value) is types.ModuleType
    return MadeBy(import_module, value.__name__) if is_module else value


# --- functions of `__main__` ------------------------------------------------------------------


def _keep(namespace: dict[str, Any], function: Any) -> _KeptFunction | None:
    """Return the pickle of a plain, short function of `__main__`; None for other functions.

    An earlier pickle is returned if all parts of the function are still the same objects.
    """
    if getattr(function, "__globals__", None) is not namespace:
        return None
    if function.__closure__ or function.__dict__:
        return None
    code = function.__code__
    details = [*_details(function)]
    if not all(map(_is_plain_detail, details)):
        return None
    kept = _kept.get(id(code))
    needs = kept.needs if kept is not None and kept.parts[0] is code else None
    if needs is None:
        needs = (*sorted(definitions.global_names(code)),)
    submodules = definitions.imported_submodules(function, frozenset(needs))
    # If the cell has run again, `linecache` has another entry, and the pickle is made again.
    source = linecache.cache.get(code.co_filename)
    parts = (code, namespace, source, len(submodules), *submodules, *details)
    if kept is not None and _are_same(kept.parts, parts):
        return kept
    try:
        pickled = pickle(function, namespace)
    except Exception:  # noqa: BLE001 (the caller's other way to pack the call words the error)
        return None
    if len(pickled.frames) != 1 or pickled.size >= INLINE_LIMIT:
        return None
    if len(_kept) >= MAX_KEPT:
        _kept.clear()
    _kept[id(code)] = made = _KeptFunction(parts, needs, bytes(pickled.frames[0]))
    return made


def _details(function: types.FunctionType) -> Iterator[Any]:
    """Yield a function's name, defaults, annotations and so on, one after the other.

    The pickle of the function depends on these values, and on the other parts that `_keep` lists.
    """
    yield function.__name__
    for name, value in definitions.details_of(function).items():
        yield name
        if type(value) is dict:  # `__annotations__`, for example, can change in place
            yield len(value)
            for key, part in [*value.items()]:
                yield key
                yield part
        else:
            yield value


def _is_plain_detail(value: Any) -> bool:
    return _is_plain(value) or (isinstance(value, type) and is_pickled_by_name(value))


def _are_same(parts: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(parts) == len(others) and all(map(operator.is_, parts, others))
