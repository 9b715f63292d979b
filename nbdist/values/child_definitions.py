"""Sends functions and classes of `__main__` between a rank and its multiprocessing children.

Runs in workers, where `run_worker` calls `share_definitions_with_children` once, and in their
children, such as those of a DataLoader.
"""

from __future__ import annotations

import io
import os
import sys
import types
import uuid
import weakref
from multiprocessing import parent_process
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle.cloudpickle as by_value

from nbdist.values.definitions import REFERENCE_LENGTH, class_attributes, set_annotations

script_names: set[str] = set()
"""The names that the running script binds.  A spawned child has them too: it imports the script."""

_marks: weakref.WeakKeyDictionary[types.FunctionType, str] = weakref.WeakKeyDictionary()
"""The mark of each function: a random text by which other processes recognize the function.

The mark of a class is the id by which cloudpickle recognizes the class."""

_marked: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""By mark: the worker's own functions and classes.  A forked child inherits the table."""


def share_definitions_with_children() -> None:
    """Let this process and its multiprocessing children exchange functions and classes of cells.

    A spawned child cannot import a worker's `__main__`.  So a function or class of `__main__` is
    pickled by value, unless the receiver finds it by its name (`_is_found_by_name`).  A receiver
    that has a function or class with the same mark (`_marks`) uses that one, and makes no copy: a
    copy would have other globals, and instances of a copied class would fail `isinstance`.
    """
    _pickle_by_value()
    # A spawned child imports the parent's script as `__mp_main__`, and sends that name in pickles.
    sys.modules["__mp_main__"] = sys.modules["__main__"]
    os.register_at_fork(before=_mark_all)


def _pickle_by_value() -> None:
    # `setattr`, because mypy takes an assignment for a change of a method.
    setattr(ForkingPickler, "reducer_override", _reduce)  # noqa: B010


def _reduce(_pickler: ForkingPickler, value: Any) -> Any:
    if not _is_definition(value) or _is_found_by_name(value):
        return NotImplemented
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return _receive, (_mark(value), file.getvalue())


class _Pickler(by_value.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles as cloudpickle does, but keeps the annotations of classes on Python 3.14, too."""

    def reducer_override(self, value: Any) -> Any:
        reduced = super().reducer_override(value)
        is_by_value = reduced is not NotImplemented and len(reduced) > REFERENCE_LENGTH
        if isinstance(value, type) and is_by_value:
            set_annotations(value, class_attributes(reduced[2]))
        return reduced


def _receive(mark: str, pickled: bytes) -> Any:
    if mark not in _marked and parent_process() is None:
        # A class that was pickled as a part of another definition may not be in the table yet.
        _mark_all()
    if (definition := _marked.get(mark)) is not None:
        return definition
    _pickle_by_value()  # so that a spawned child can send the definition, or instances, back
    return by_value.loads(pickled)


def _is_definition(value: Any) -> bool:
    return isinstance(value, types.FunctionType | type) and value.__module__ == "__main__"


def _is_found_by_name(value: Any) -> bool:
    """Return True if a function or class can be pickled as its qualified name in `__main__`.

    The name must lead to `value` in this process, and the receiver must have the name, too.  A
    parent process is assumed to have the name.  Any other receiver has the name only if the running
    script binds it (`script_names`).
    """
    first, *others = value.__qualname__.split(".")
    is_sent_to_parent = parent_process() is not None and get_spawning_popen() is None
    if not is_sent_to_parent and first not in script_names:
        return False
    candidate = sys.modules["__main__"].__dict__.get(first)
    for part in others:
        candidate = getattr(candidate, part, None)
    return candidate is value


def _mark(value: Any) -> str:
    if isinstance(value, type):
        mark: str = by_value._get_or_create_tracker_id(value)
    else:
        mark = _marks.setdefault(value, uuid.uuid4().hex)
    if parent_process() is None:
        _marked[mark] = value
    return mark


def _mark_all(kind: type | None = None) -> None:
    """Give marks to the functions and classes that `__main__`, or the class `kind`, defines.

    Functions and classes inside of a marked class get marks, too.  A name is skipped unless
    it is the definition's own name, so a class with a reference to itself is marked only once.
    """
    names = vars(kind) if kind else sys.modules["__main__"].__dict__
    prefix = f"{kind.__qualname__}." if kind else ""
    for name, value in [*names.items()]:
        if _is_definition(value) and value.__qualname__ == prefix + name:
            _mark(value)
            if isinstance(value, type):
                _mark_all(value)
