"""Gives a class the same id on all ranks that have defined it alike in the same task.

So the notebook gets a single class if it gathers instances of the class from several ranks.  Runs
in workers, whose kernels call `name_classes` after a task.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import cloudpickle.cloudpickle as by_value

from nbdist.values.definitions import Variable


def name_classes(names: Mapping[str, Any], task_id: str) -> None:
    """Give ids to classes that a task has defined; equal classes of two ranks get equal ids.

    A receiver of pickles recognizes a class by its id.  `names` has, by name, the variables that
    the task has bound.  Only classes of `__main__` get ids.  A class that already has an id,
    because it came from the notebook or was pickled before, keeps that id.  If the code or plain
    values of a class differ between two ranks, the two classes get different ids.  Of a large
    class, only a part is compared (`_outline`).
    """
    for name, kind in _classes_in(names, ""):
        if kind in by_value._DYNAMIC_CLASS_TRACKER_BY_CLASS:
            continue
        with suppress(Exception):  # attributes of a user's class can raise anything
            contents = hashlib.blake2b(repr(_outline(kind)).encode(), digest_size=8).hexdigest()
            by_value._lookup_class_or_track(f"{task_id} {name} {contents}", kind)


def _classes_in(names: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, type]]:
    """Yield (name, class) for the classes of `__main__` in `names`, and for their inner classes.

    `names` has variables, or the attributes of a class.  For attributes, `prefix` is the name of
    their class and a dot, such as `Model.`; for variables, `prefix` is "".  If several variables
    refer to the same class, the variable that has the name of the class comes first.
    """
    classes = [
        (prefix + name, value)
        for name, value in sorted(names.items())
        # Not `isinstance`, which reads `__class__`: a proxy object can raise an error then.
        if issubclass(type(value), type) and value.__module__ == "__main__"
    ]
    for name, kind in sorted(classes, key=lambda each: each[0] != each[1].__qualname__):
        if not prefix or kind.__qualname__ == name:
            yield name, kind
            yield from _classes_in(vars(kind), f"{kind.__qualname__}.")


def _outline(kind: type) -> Any:
    """Return a class's code and plain values as nested tuples and lists.

    For equal classes, the `repr` of the result is the same in all processes.  An object that is
    neither code nor a plain value is represented by the name of its type.  Of a large class, only
    about `_LARGEST_OUTLINE` values are read.
    """
    remaining = _LARGEST_OUTLINE

    def outline(value: Any, depth: int = 0) -> Any:
        nonlocal remaining
        remaining -= 1
        what = type(value)
        if what in _ATOMS:
            return value[:_LARGEST_OUTLINE] if isinstance(value, str | bytes) else value
        if remaining < 0 or depth > _DEEPEST_OUTLINE:
            return what.__qualname__
        match value:
            case types.CodeType():
                parts: Iterable[Any] = (value.co_code, value.co_names, value.co_consts)
            case types.FunctionType():
                cells = (Variable(cell).contents() for cell in value.__closure__ or ())
                parts = (value.__code__, value.__defaults__, value.__kwdefaults__, *cells)
            case property():
                parts = (value.fget, value.fset, value.fdel)
            case classmethod() | staticmethod():
                parts = (value.__func__,)
            case enum.Enum():
                parts = (vars(value).get("_value_"),)
            case type() if depth:
                return value.__qualname__
            case type():
                parts = (kind.__bases__, dict(vars(kind)))
            case dict() if what is dict:
                parts = value.items()
            case list() | tuple() if what in (list, tuple):
                parts = value
            case set() | frozenset() if what in (set, frozenset):
                return what.__name__, sorted(repr(outline(each, depth + 1)) for each in value)
            case _:
                return what.__qualname__
        some = itertools.islice(parts, max(0, remaining))
        return what.__qualname__, [outline(each, depth + 1) for each in some]

    return outline(kind)


_ATOMS = {str, bytes, int, float, complex, bool, type(None), type(...)}
_LARGEST_OUTLINE = 10_000  # about how many values of a class, and characters of a text, are read
_DEEPEST_OUTLINE = 20
