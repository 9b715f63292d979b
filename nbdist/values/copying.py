"""Copies new values from another rank, the notebook or a file into a rank's own objects, in place.

The rank's objects keep their identity, so that optimizers, wrappers and containers still refer to
these objects.  Runs in workers, called by `nbdist.worker.counterparts`.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from nbdist.values.states import ATOMIC

_UNPAIRED = object()


def copy_into(
    variables: Mapping[str, tuple[Any, Any]], others: Iterable[tuple[Any, Any]], *tops: Any
) -> tuple[dict[int, Any], set[str]]:
    """Copy new values into old values in place, part by part, so that the old objects stay in use.

    `variables` has by name the old and the new value of each variable, and `others` has further
    pairs of an old and a new object.  `tops` are the new values that the caller keeps: if they
    contain a new object that was copied into an old object, the old object is put in its place.

    Return two results.  The first has, by the id of a new object, the object to use for it: the old
    object into which it was copied, or else the new object itself.  For a tuple in `tops` it has a
    new tuple.  The second result has the names of the variables whose old values were not changed
    in place.  This is so if the old and the new value do not fit, for example because a
    tensor has another shape.  It is also so if the new value shares a tensor or module with the new
    value of another such variable.
    """
    failed, kept = set[str](), set[int]()
    while True:
        copying = _Copying(kept)
        tried = {name: pair for name, pair in variables.items() if name not in failed}
        bad = {n for n, (old, new) in tried.items() if not copying.match(old, new, is_top=True)}
        if not bad:
            break
        failed |= bad
        for name in bad:
            kept |= copying.strict_ids_in(variables[name][1])
    for old, new in others:
        if id(new) not in kept:
            copying.match(old, new)
    copying.copy(tops)
    return copying.instead, failed


class _Copying:
    """Pairs old and new objects, part by part, then copies the new objects into the old ones.

    `kept` has the ids of new objects that must not be copied into old objects.
    """

    def __init__(self, kept: set[int]) -> None:
        self._kept = kept
        self.instead: dict[int, Any] = {}
        self._pairs: list[tuple[Any, Any]] = []
        self._torch: Any = sys.modules.get("torch")

    def match(self, old: Any, new: Any, *, is_top: bool = False) -> bool:
        """Pair an old and a new object, and their parts, for `copy`; return True on success.

        Return False if a tensor or module cannot be changed in place, if `new` is in `kept`, or if
        `new` is paired with another old object already.  Any other two parts that do not fit, such
        as a list and a tuple, are no failure: `copy` will replace the old part by the new part.
        With `is_top`, return False also if `old` itself cannot be changed in place, as a number.
        """
        if type(new) in ATOMIC:
            return not is_top
        if old is new:
            if type(new) is not tuple:
                self.instead[id(new)] = old
            return True
        if id(new) in self._kept:
            return False
        if id(new) in self.instead:
            return self.instead[id(new)] is old
        kind = type(new)
        if type(old) is not kind:
            return not self._is_strict(old) and not self._is_strict(new) and not is_top
        if isinstance(new, self._torch.Tensor if self._torch else ()):
            if _structure_of(old) != _structure_of(new):
                return False
            self._add(old, new)
            return True
        if kind in (dict, OrderedDict, defaultdict):
            self._add(old, new)
            return all(self.match(old[k], part) for k, part in new.items() if k in old)
        if kind in (list, deque):
            self._add(old, new)
            return all(map(self.match, old, new))
        if kind in (set, bytearray):
            self._add(old, new)
            return True
        if kind is tuple:
            if len(old) != len(new):
                return not (is_top or self.strict_ids_in(new) or self.strict_ids_in(old))
            return all(map(self.match, old, new))
        if self._is_array(new):
            if old.shape == new.shape and old.dtype == new.dtype and old.flags.writeable:
                self._add(old, new)
                return True
            return not is_top
        if _has_attributes(new):
            self._add(old, new)
            if self._is_module(new) and not _have_same_parts(old, new):
                return False
            parts = vars(old)
            return all(self.match(parts[n], part) for n, part in vars(new).items() if n in parts)
        if _is_definition(new):
            parts = _parts_of_definition(old)
            for name, part in _parts_of_definition(new).items():
                if name in parts:
                    self.match(parts[name], part)
        return not is_top

    def _add(self, old: Any, new: Any) -> None:
        self.instead[id(new)] = old
        self._pairs.append((old, new))

    def _is_array(self, value: Any) -> bool:
        numpy = sys.modules.get("numpy")
        return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject

    def _is_module(self, value: Any) -> bool:
        return self._torch is not None and isinstance(value, self._torch.nn.Module)

    def _is_strict(self, value: Any) -> bool:
        return self._torch is not None and isinstance(
            value, self._torch.Tensor | self._torch.nn.Module
        )

    def strict_ids_in(self, value: Any) -> set[int]:
        """Return the ids of the tensors and modules in a value, its containers and attributes."""
        ids, seen_ids, waiting = set[int](), set[int](), [value]
        while waiting:
            part = waiting.pop()
            if id(part) in seen_ids:
                continue
            seen_ids.add(id(part))
            if self._is_strict(part):
                ids.add(id(part))
            if isinstance(part, dict):
                waiting += [*part, *part.values()]
            elif isinstance(part, list | tuple | set | deque):
                waiting += part
            elif _has_attributes(part):
                waiting += vars(part).values()
        return ids

    def copy(self, tops: Iterable[Any]) -> None:
        """Copy the contents of new objects into the old objects with which `match` has paired them.

        Also put, in the new values `tops`, the old object in the place of each copied part.  For a
        tuple in `tops`, `instead` then has a new tuple with the old objects.
        """
        for old, new in [*self._pairs]:
            if old is not new:
                self._copy(old, new)
        for top in tops:
            self.instead[id(top)] = self._substitute(top)

    def _copy(self, old: Any, new: Any) -> None:
        sub = self._substitute
        if self._torch is not None and isinstance(new, self._torch.Tensor):
            with self._torch.no_grad():
                old.data.copy_(new.data)
            if old.is_leaf:
                old.requires_grad_(new.requires_grad)
                old.grad = sub(new.grad)
            return
        if self._is_array(new):
            old[...] = new
            return
        match new:
            case dict():
                pairs = [(sub(key), sub(part)) for key, part in new.items()]
                old.clear()
                old.update(pairs)
            case list():
                old[:] = [*map(sub, new)]
            case deque():
                parts = [*map(sub, new)]
                old.clear()
                old.extend(parts)
            case set():
                parts = [*map(sub, new)]
                old.clear()
                old.update(parts)
            case bytearray():
                old[:] = new
            case _:
                attributes = {name: sub(part) for name, part in vars(new).items()}
                # Remove attributes that the new object lacks; but not from a module, nor if a
                # `__getstate__` may have left the attributes out of the pickle.
                kind: Any = type(old)
                if kind.__getstate__ is object.__getstate__ and not self._is_module(old):
                    for name in vars(old).keys() - attributes.keys():
                        del vars(old)[name]
                vars(old).update(attributes)

    def _substitute(self, value: Any) -> Any:
        """Return the old object with which a new object is paired, or the new object itself.

        In a new object that is not paired, parts that are paired are replaced by their old objects.
        For a tuple, return a new tuple of such objects.
        """
        partner = self.instead.get(id(value), _UNPAIRED)
        if partner is not _UNPAIRED:
            return partner
        kind = type(value)
        if kind is tuple:
            return tuple(map(self._substitute, value))
        self.instead[id(value)] = value
        if kind in (dict, OrderedDict, defaultdict, list, deque, set) or _has_attributes(value):
            self._copy(value, value)
        elif _is_definition(value):
            for name, part in _parts_of_definition(value).items():
                partner = self._substitute(part)
                if partner is not part:
                    _set_part(value, name, partner)
        return value


def _structure_of(tensor: Any) -> tuple[Any, ...]:
    """Return a tensor's shape, dtype and layout, and for a DTensor its mesh and placements."""
    mesh = getattr(tensor, "device_mesh", None)
    spread = None if mesh is None else (mesh, tensor.placements)
    return tensor.shape, tensor.dtype, tensor.layout, spread


def _has_attributes(value: Any) -> bool:
    kinds = type | types.FunctionType | types.ModuleType | types.MethodType
    return hasattr(value, "__dict__") and not isinstance(value, kinds)


def _is_definition(value: Any) -> bool:
    """Return True if a value is a class or function of `__main__`."""
    return isinstance(value, type | types.FunctionType) and value.__module__ == "__main__"


def _parts_of_definition(value: Any) -> dict[Any, Any]:
    """Return a class's attributes, or a function's attributes, defaults and captured values.

    They are returned by name; the key of a captured value is the number of its variable in the
    closure.  Attributes such as `__doc__` of a class, and parts of a function that are None, are
    left out.
    """
    if isinstance(value, type):
        return {name: part for name, part in vars(value).items() if not name.startswith("__")}
    parts: dict[Any, Any] = dict(vars(value))
    parts |= {"__defaults__": value.__defaults__, "__kwdefaults__": value.__kwdefaults__}
    for number, cell in enumerate(value.__closure__ or ()):
        with suppress(ValueError):  # the variable has no value
            parts[number] = cell.cell_contents
    return {name: part for name, part in parts.items() if part is not None}


def _set_part(value: Any, name: Any, part: Any) -> None:
    if isinstance(name, int):
        value.__closure__[name].cell_contents = part
    else:
        setattr(value, name, part)


def _have_same_parts(old: Any, new: Any) -> bool:
    if any(kind.__name__ == "FSDPModule" for kind in type(new).__mro__):
        return False  # FSDP's parameter groups keep their own references to the parameters
    return all(
        getattr(old, name).keys() == getattr(new, name).keys()
        for name in ("_parameters", "_buffers", "_modules")
    )
