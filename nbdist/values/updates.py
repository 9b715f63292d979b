"""Describes changes of the notebook's objects, and applies them to a rank's counterparts in place.

The notebook calls `update_of`, a rank calls `apply`.  A counterpart stays the same object, so that
aliases, wrappers and optimizers on the rank still refer to it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from nbdist.values import definitions
from nbdist.values.memory import attributes_of_array
from nbdist.values.scan import Scan
from nbdist.values.states import (
    ATTRIBUTE,
    CLASS,
    FACTORY,
    HEAD_PART,
    ObjectState,
    Token,
    attributes_of,
    listed,
    own_attributes,
    slots_of,
)

ObjectUpdate = tuple[int, str, Any]
"""The key of an object, the name of its tool, and its new contents.

The tool, such as "dict" or "tensor", selects the functions that write the contents (`_WRITERS`) and
apply them (`_APPLIERS`).
"""

COPY = "copy"
"""In a tensor's update, the name of the contents if the notebook's tensor has kept its memory.

The rank then copies the contents into the memory of its own tensor, if shape and dtype are equal.
If the notebook's tensor has got other memory, the contents have the name "data", and the rank's
tensor gets the memory that was sent.
"""
_PLAIN = (dict, OrderedDict, defaultdict, list, set, deque)


# --- the sender's side ------------------------------------------------------------------


def update_of(
    entry: Any,
    state: ObjectState,
    before: ObjectState,
    changed: frozenset[Token] | None,
    scan: Scan,
) -> ObjectUpdate:
    """Return the update by which a rank brings its counterpart of an object up to date.

    `entry` is the object's entry in the notebook's table, `state` the object's present state, and
    `before` the state that the counterpart has.  `changed` has the parts to send; with None the
    object is sent as a whole.
    """
    value = entry()
    return entry.key, entry.tool, _WRITERS[entry.tool](value, state, before, changed, scan)


def is_replaced(changed: frozenset[Token] | None) -> bool:
    """Return True if `changed` has a part that ranks cannot change in place (`HEAD_PART`).

    Ranks then need a new object in place of the counterpart.
    """
    return changed is not None and HEAD_PART in changed


def _write_dict(
    value: Any,
    state: ObjectState,
    before: ObjectState,
    changed: frozenset[Token] | None,
    scan: Scan,
) -> Any:
    attributes = None if type(value) in _PLAIN else [*own_attributes(value)]
    if changed is None or state.parts is None or before.parts is None:
        factory = (value.default_factory,) if isinstance(value, defaultdict) else None
        return None, items_of(value), (), None, factory, attributes
    pairs = [(k, v) for k, v in items_of(value) if scan.token(k) in changed]
    drops = [name for name in changed if name not in state.parts and name != FACTORY]
    names = [name for name in state.parts if name != FACTORY and not is_attribute(name)]
    items = {*names}
    kept = [name for name in before.parts if name in items]
    # The rank appends new keys at the end.  The order is sent only if the notebook's order differs.
    is_in_order = names[: len(kept)] == kept
    order = None if is_in_order else names
    factory = (value.default_factory,) if FACTORY in changed else None
    if attributes is not None:
        attributes = [(name, part) for name, part in attributes if (ATTRIBUTE, name) in changed]
    return True, pairs, drops, order, factory, attributes


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return a list of a dict's items, without calling methods of a user's subclass."""
    return [*(OrderedDict.items if isinstance(value, OrderedDict) else dict.items)(value)]


def iter_of(value: Any) -> Iterable[Any]:
    """Iterate over the items of a list, set or deque, without calling methods of a subclass."""
    kind: Any = next(each for each in (list, set, deque) if isinstance(value, each))
    return kind.__iter__(value)  # type: ignore[no-any-return]


def _write_list(value: Any, *_: Any) -> Any:
    return [*iter_of(value)], None if type(value) in _PLAIN else [*own_attributes(value)]


def _write_bytearray(value: Any, *_: Any) -> Any:
    return bytes(value)


def _write_cell(value: Any, *_: Any) -> Any:
    try:
        return (value.cell_contents,)
    except ValueError:  # the cell is empty
        return ()


def _parts_of(
    names: Mapping[str, Any], changed: frozenset[Token] | None, before: ObjectState
) -> tuple[dict[str, Any], list[str]]:
    if changed is None:
        changed = frozenset([*names, *(before.parts or ())])
    sets = {name: part for name, part in names.items() if name in changed}
    return sets, [name for name in changed if name not in names and name not in (HEAD_PART, CLASS)]


def _write_instance(
    value: Any,
    state: ObjectState,
    before: ObjectState,
    changed: frozenset[Token] | None,
    scan: Scan,
) -> Any:
    names = {**attributes_of(value), CLASS: type(value)}
    return _parts_of(names, changed, before)


def _write_function(
    value: Any,
    state: ObjectState,
    before: ObjectState,
    changed: frozenset[Token] | None,
    scan: Scan,
) -> Any:
    attributes = {f".{name}": part for name, part in value.__dict__.items()}
    code = value.__code__
    names = {**definitions.details_of(value), **attributes, "__code__": (code.co_filename, code)}
    return _parts_of(names, changed, before)


def _write_class(
    value: Any,
    state: ObjectState,
    before: ObjectState,
    changed: frozenset[Token] | None,
    scan: Scan,
) -> Any:
    parts = state.parts or ()
    attributes = {name: part for name, part in value.__dict__.items() if name in parts}
    if "__annotations__" in parts:
        attributes["__annotations__"] = definitions.annotations_of(value)
    return _parts_of(attributes, changed, before)


def _write_tensor(
    value: Any,
    state: ObjectState,
    before: ObjectState,
    changed: frozenset[Token] | None,
    scan: Scan,
) -> Any:
    names = {f".{name}": part for name, part in value.__dict__.items()}
    is_moved = changed is not None or (state.parts or {}).get("data") != (before.parts or {}).get(
        "data"
    )
    names |= {"data" if is_moved else COPY: value.detach(), "requires_grad": value.requires_grad}
    if value.is_leaf or value.retains_grad:
        names["grad"] = value.grad
    return _parts_of(names, changed, before)


def _write_array(
    value: Any,
    state: ObjectState,
    before: ObjectState,
    changed: frozenset[Token] | None,
    scan: Scan,
) -> Any:
    attributes = {f".{name}": part for name, part in attributes_of_array(value).items()}
    return _parts_of({"writeable": bool(value.flags.writeable), **attributes}, changed, before)


def _write_opaque(
    value: Any,
    state: ObjectState,
    before: ObjectState,
    changed: frozenset[Token] | None,
    scan: Scan,
) -> Any:
    return listed(scan.reduced(value))[2:]


def _write_frame(value: Any, *_: Any) -> Any:
    return value.__getstate__()


_WRITERS: dict[str, Callable[..., Any]] = {
    "dict": _write_dict,
    "list": _write_list,
    "set": _write_list,
    "deque": _write_list,
    "bytearray": _write_bytearray,
    "cell": _write_cell,
    "instance": _write_instance,
    "function": _write_function,
    "class": _write_class,
    "tensor": _write_tensor,
    "array": _write_array,
    "opaque": _write_opaque,
    "frame": _write_frame,
}


# --- a rank's side ----------------------------------------------------------------------


def apply(value: Any, tool: str, data: Any, token: Callable[[Any], Token]) -> None:
    """Change a rank's object in place by an update of the notebook.

    `tool` and `data` are the last two items of the `ObjectUpdate`.  The update of a dict has the
    tokens of keys that it removes or reorders; `token` (`Scan.token`) returns the token of a key.
    """
    _APPLIERS[tool](value, data, token)


def _apply_dict(value: Any, data: Any, token: Callable[[Any], Token]) -> None:
    is_by_part, pairs, drops, order, factory, attributes = data
    # Call methods of Python's class: a user's class may have methods that do more than store items.
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    if not is_by_part:
        kind.clear(value)
    elif drops:
        for key in [key for key in value if token(key) in drops]:
            kind.__delitem__(value, key)
    for key, part in pairs:
        kind.__setitem__(value, key, part)
    if factory is not None:
        (value.default_factory,) = factory
    _set_own(value, attributes, drops)
    if order is not None:
        by_token = {token(key): (key, part) for key, part in kind.items(value)}
        named = [by_token.pop(name) for name in order if name in by_token]
        kind.clear(value)
        for key, part in [*named, *by_token.values()]:
            kind.__setitem__(value, key, part)


def _set_own(value: Any, sets: Iterable[tuple[str, Any]] | None, drops: Iterable[Any] = ()) -> None:
    """Set the attributes `sets` of a container of a user's class, and remove those in `drops`.

    `sets` is None if there is no attribute to set.  Items in `drops` that are no attributes are
    ignored.
    """
    for name, part in sets or ():
        if name != CLASS:
            value.__dict__[name] = part
    for drop in drops:
        if is_attribute(drop):
            value.__dict__.pop(drop[1], None)


def is_attribute(part: Token) -> bool:
    """Return True if a part of a container's state is an attribute, and not an item."""
    return type(part) is tuple and len(part) == 2 and part[0] == ATTRIBUTE


def _apply_list(value: Any, data: Any, token: Callable[[Any], Token]) -> None:
    parts, attributes = data
    list.__setitem__(value, slice(None), parts)
    _set_own(value, attributes)


def _apply_set(value: Any, data: Any, token: Callable[[Any], Token]) -> None:
    parts, attributes = data
    set.clear(value)
    set.update(value, parts)
    _set_own(value, attributes)


def _apply_deque(value: Any, data: Any, token: Callable[[Any], Token]) -> None:
    parts, attributes = data
    deque.clear(value)
    deque.extend(value, parts)
    _set_own(value, attributes)


def _apply_cell(value: Any, data: Any, token: Callable[[Any], Token]) -> None:
    if data:
        (value.cell_contents,) = data
    else:
        with suppress(ValueError):
            del value.cell_contents


def _apply_instance(value: Any, data: Any, token: Callable[[Any], Token]) -> None:
    sets, drops = data
    if CLASS in sets and type(value) is not sets[CLASS]:
        value.__class__ = sets[CLASS]
    slots = dict(slots_of(type(value)))
    for name, part in sets.items():
        if name in slots:
            slots[name].__set__(value, part)
        elif name != CLASS:
            value.__dict__[name] = part
    for name in drops:
        if name in slots:
            with suppress(AttributeError):
                slots[name].__delete__(value)
        else:
            value.__dict__.pop(name, None)


def _apply_function(value: Any, data: Any, token: Callable[[Any], Token]) -> None:
    sets, drops = data
    for name, part in sets.items():
        if name == "__code__":
            value.__code__ = part[1].replace(co_filename=part[0])
        elif name.startswith("."):
            value.__dict__[name[1:]] = part
        else:
            setattr(value, name, part)
    for name in drops:
        if name.startswith("."):
            value.__dict__.pop(name[1:], None)
        elif name in ("__defaults__", "__kwdefaults__"):
            setattr(value, name, None)


def _apply_class(value: Any, data: Any, token: Callable[[Any], Token]) -> None:
    sets, drops = data
    for name, part in sets.items():
        type.__setattr__(value, name, part)
    for name in drops:
        if name in value.__dict__:
            type.__delattr__(value, name)


def _apply_tensor(value: Any, data: Any, token: Callable[[Any], Token]) -> None:
    import torch

    sets, drops = data
    with torch.no_grad():
        if "data" in sets:
            value.data = sets["data"].to(value.device)
        if COPY in sets and value.data_ptr() != sets[COPY].data_ptr():
            if value.shape == sets[COPY].shape and value.dtype == sets[COPY].dtype:
                value.copy_(sets[COPY])
            else:
                value.data = sets[COPY].to(value.device)
        if "requires_grad" in sets and value.is_leaf:
            value.requires_grad_(sets["requires_grad"])
        if "grad" in sets:
            value.grad = None if sets["grad"] is None else sets["grad"].to(value.device)
    for name, part in sets.items():
        if name.startswith("."):
            value.__dict__[name[1:]] = part
    _drop_own(value, drops)


def _drop_own(value: Any, drops: Iterable[str]) -> None:
    """Remove attributes of a tensor or array that the notebook's object no longer has."""
    for name in drops:
        if name.startswith("."):
            value.__dict__.pop(name[1:], None)


def _apply_array(value: Any, data: Any, token: Callable[[Any], Token]) -> None:
    sets, drops = data
    for name, part in sets.items():
        if name == "writeable":
            value.flags.writeable = part
        else:
            value.__dict__[name[1:]] = part
    _drop_own(value, drops)


def _apply_frame(value: Any, data: Any, token: Callable[[Any], Token]) -> None:
    value.__setstate__(data)


def _apply_bytearray(value: Any, data: Any, token: Callable[[Any], Token]) -> None:
    value[:] = data


def _apply_opaque(value: Any, data: Any, token: Callable[[Any], Token]) -> None:
    state, items, pairs, setter = data
    set_state(value, state, setter)
    if items is not None:
        if isinstance(value, list):
            del value[:]
            value.extend(items)
        elif hasattr(value, "clear") and hasattr(value, "extend"):
            value.clear()
            value.extend(items)
    if pairs is not None:
        value.clear()
        for key, part in pairs:
            value[key] = part


def set_state(value: Any, state: Any, setter: Callable[..., Any] | None = None) -> None:
    """Set an object's state as pickle does, but also remove attributes that the state lacks.

    Pickle itself removes nothing, because it sets the state of new objects only.  If there is a
    `setter` or a method `__setstate__`, only this is called, and no attribute is removed.  Without
    a setter, the state None changes nothing.
    """
    if setter is not None:
        setter(value, state)
        return
    if state is None:
        return
    if hasattr(value, "__setstate__"):
        value.__setstate__(state)
        return
    slots: Mapping[str, Any] = {}
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state[0] or {}, state[1] or {}
    attributes = value.__dict__
    attributes.clear()
    attributes.update(state)
    for name, part in slots.items():
        object.__setattr__(value, name, part)


_APPLIERS: dict[str, Callable[[Any, Any, Callable[[Any], Token]], None]] = {
    "dict": _apply_dict,
    "list": _apply_list,
    "set": _apply_set,
    "deque": _apply_deque,
    "bytearray": _apply_bytearray,
    "cell": _apply_cell,
    "instance": _apply_instance,
    "function": _apply_function,
    "class": _apply_class,
    "tensor": _apply_tensor,
    "array": _apply_array,
    "opaque": _apply_opaque,
    "frame": _apply_frame,
}
