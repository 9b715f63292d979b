"""The state of an object (`ObjectState`), by which a process notices that the object has changed.

The notebook and each rank read the states of the objects that they share (`nbdist.values.scan`).
If an object refers to other objects, its state has only their keys, and not their contents.  So a
change of an object changes the state of this object alone.
"""

from __future__ import annotations

import contextlib
import copyreg
import marshal
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import xxhash

Token = Any
"""Data that represents a value in the state of an object that refers to the value.

The token of a short plain value is the value itself.  The token of an object that has a key is
`(..., key)`.  The token of most other values is a tuple that begins with a text."""

ChangedParts = frozenset[Token] | None
"""The changed parts of an object; None for an object that is compared as a whole."""

MAX_TEXT, MAX_PARTS, MAX_DIGEST = 256, 4096, 48
"""Limits of states.

A text is its own token if it has at most MAX_TEXT characters.  If an object has more than MAX_PARTS
parts, it is compared as a whole.  A token of at most MAX_DIGEST bytes is its own digest."""

HEAD_PART = "head"
"""The name of the part of an object that cannot be changed in place.

If this part has changed, a rank needs a new object in place of the counterpart."""

CLASS = "__class__"
FACTORY = ("default_factory",)
ATTRIBUTE = "attribute"

MISSING_TOKEN: Token = ("missing",)


class ObjectState:
    """The state that an object had at one moment.

    `parts` has the parts that are compared one by one, as tokens by the tokens of their names; None
    for an object that is compared as a whole.  `digest` differs if a part differs.  `children` are
    the keys of the objects and memory blocks to which the object refers.

    `sample` is a value that is fast to compute, and by which a scan recognizes that the object has
    not changed; None without a sample.  For big memory, it is a digest of some pages and the
    versions of the tensors in the memory.  For a tensor, it is the address and layout.  For a dict,
    list or instance, it is a `nbdist.values.unchanged.Parts`, or `NO_PARTS`.
    """

    __slots__ = ("children", "digest", "parts", "sample")

    def __init__(
        self,
        parts: dict[Token, Token] | None,
        children: tuple[int, ...] = (),
        digest: bytes | None = None,
        sample: Any = None,
    ) -> None:
        self.parts = parts
        self.children = children
        self.sample = sample
        self.digest: bytes = digest or digest_of_token(tuple((parts or {}).items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectState) and self.digest == other.digest

    __hash__ = None  # type: ignore[assignment]

    def changed_since(self, before: ObjectState) -> frozenset[Token] | None:
        """Return the names of the parts that differ from `before`.

        Return None if either state is compared as a whole.
        """
        if self.parts is None or before.parts is None:
            return None
        names = self.parts.keys() | before.parts.keys()
        return frozenset(
            name
            for name in names
            if is_different(
                self.parts.get(name, MISSING_TOKEN), before.parts.get(name, MISSING_TOKEN)
            )
        )

    def with_parts(self, now: ObjectState, names: Iterable[Token]) -> ObjectState:
        """Return a state with the parts of this state, but the parts in `names` as in `now`.

        A part in `names` that `now` does not have is left out.
        """
        parts = dict(self.parts or {})
        for name in names:
            if name in (now.parts or {}):
                parts[name] = now.parts[name]  # type: ignore[index]
            else:
                parts.pop(name, None)
        return ObjectState(parts, now.children)


def is_different(token: Token, before: Token) -> bool:
    """Return True if two tokens differ; 1 and True differ here, and so do 0.0 and -0.0."""
    return marshal.dumps(token, 2) != marshal.dumps(before, 2)


def digest_of_token(token: Token) -> bytes:
    """Return a token as bytes, or a digest of the bytes if they are more than MAX_DIGEST.

    marshal's version 2 is used, because later versions write an object that occurs twice as a
    reference: then equal tokens could have different bytes.
    """
    data = marshal.dumps(token, 2)
    return data if len(data) <= MAX_DIGEST else xxhash.xxh3_128_digest(data)


def bytes_of_code(code: types.CodeType) -> bytes:
    """Return bytes that are equal for equal code."""
    try:
        return marshal.dumps(code, 2)
    except ValueError:  # the code has slices, which are constants from Python 3.14 on
        return marshal.dumps(_without_slices(code), 2)


def _without_slices(constant: Any) -> Any:
    match constant:
        case slice(start=start, stop=stop, step=step):
            return "slice", start, stop, step
        case tuple():
            return tuple(map(_without_slices, constant))
        case types.CodeType(co_consts=constants):
            return constant.replace(co_consts=_without_slices(constants))
    return constant


ATOMIC = frozenset({type(None), bool, int, float, complex, str, bytes, type(...)})

HEAP_TYPE = 1 << 9
"""A flag of all classes of Python code, and some of C code: Py_TPFLAGS_HEAPTYPE of CPython."""


class Reducer(NamedTuple):
    """The functions by which a scan learns how an object would be pickled.

    `reduce` returns what `__reduce_ex__` would return, or NotImplemented for an object that pickle
    sends by name or reduces itself.  `content` returns a digest of the pickle of a value.  `table`
    has, by type, further functions that reduce objects.
    """

    reduce: Callable[[Any], Any]
    content: Callable[[Any], str]
    table: Mapping[type, Callable[[Any], Any]]


def reachable_keys(states: Mapping[int, ObjectState], keys: Iterable[int]) -> set[int]:
    """Return `keys`, and the keys of all objects to which these objects refer, directly or not.

    `states` has states by key.  An object without a state there counts as one without references.
    """
    reached_keys, waiting = set[int](), [*keys]
    while waiting:
        key = waiting.pop()
        if key not in reached_keys:
            reached_keys.add(key)
            if (state := states.get(key)) is not None:
                waiting += state.children
    return reached_keys


def keys_in(token: Token) -> list[int]:
    """Return the keys of the objects to which a token refers."""
    if type(token) is not tuple or not token:
        return []
    if token[0] is ... and len(token) == 2:
        return [token[1]]
    return [key for each in token for key in keys_in(each)]


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an instance's attributes, including those in slots.

    If the class defines `__getstate__`, return what this method returns.  For a torch optimizer,
    add the hooks that its `__getstate__` leaves out.
    """
    if has_getstate(type(value)):
        return {**value.__getstate__(), **optimizer_hooks(value)}
    return plain_attributes_of(value, slots_of(type(value)))


def plain_attributes_of(value: Any, slots: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the attributes of an instance whose class has these slots and no `__getstate__`."""
    attributes = dict(getattr(value, "__dict__", ()))
    for name, slot in slots:
        with contextlib.suppress(AttributeError):  # the slot is empty
            attributes[name] = slot.__get__(value)
    return attributes


def optimizer_hooks(value: Any) -> dict[str, Any]:
    """Return the tables of hooks of a torch optimizer by name; {} for any other object.

    The optimizer's `__getstate__` leaves these tables out.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.optim.Optimizer):
        return {}
    return {name: part for name, part in vars(value).items() if name.endswith("_hooks")}


def own_attributes(value: Any) -> list[tuple[str, Any]]:
    """Return (name, value) for each attribute of a dict, list or other container.

    The first pair has the name `CLASS` ("__class__") and the container's class.
    """
    return [(CLASS, type(value)), *getattr(value, "__dict__", {}).items()]


def slots_of(kind: type) -> list[tuple[str, Any]]:
    """Return (name, slot) for the slots that a class and its bases define in Python code."""
    return [
        (name, slot)
        for base in kind.__mro__
        for name, slot in base.__dict__.items()
        if type(slot) is types.MemberDescriptorType and base.__flags__ & HEAP_TYPE
    ]


def listed(reduced: Any) -> tuple[Any, ...]:
    """Return a result of `__reduce_ex__` as six items, with None for each item that it lacks.

    Iterators, which can be read only once, become lists.
    """
    make, args, *more = reduced
    state, items, pairs, setter = (*more, None, None, None, None)[:4]
    listed = None if items is None else [*items]
    return make, args, state, listed, None if pairs is None else [*pairs], setter


def has_getstate(kind: type) -> bool:
    """Return True if a class, or a base other than `object`, defines `__getstate__`."""
    return getattr(kind, "__getstate__", None) is not getattr(object, "__getstate__", None)


def is_made_of_attributes(kind: Any) -> bool:
    """Return True if a class and its bases are Python code without `__reduce__`, `__getnewargs__`.

    Their variants `__reduce_ex__` and `__getnewargs_ex__` are not allowed either.  `__getstate__`
    and `__setstate__` are.  The base `object` does not count.
    """
    return (
        all(base.__flags__ & HEAP_TYPE for base in kind.__mro__[:-1])
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and not hasattr(kind, "__getnewargs__")
        and not hasattr(kind, "__getnewargs_ex__")
    )


def has_python_reduce(kind: Any) -> bool:
    """Return True if a class has a method in Python that determines how instances are pickled."""
    names = ("__reduce__", "__reduce_ex__", "__getstate__")
    return any(isinstance(getattr(kind, name, None), types.FunctionType) for name in names)


def is_its_attributes(value: Any) -> bool:
    """Return True if pickling an instance writes just its class and attributes as they are.

    A `__getstate__` may leave out attributes.  Raises any error that `__reduce_ex__` raises.
    """
    kind = type(value)
    make, args, state, items, pairs, _ = listed(value.__reduce_ex__(5))
    if make is not copyreg.__newobj__ or args != (kind,) or items or pairs:  # type: ignore[attr-defined]
        return False
    if not has_getstate(kind):
        return True
    data = getattr(value, "__dict__", {})
    return type(state) is dict and all(data.get(name, data) is part for name, part in state.items())
