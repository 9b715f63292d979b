"""An error of ours that is also what a rank raised: `except ValueError` catches it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, cast

from nbdist.errors import WorkerError, rebuild


def as_raised(error: WorkerError, kinds: Iterable[str]) -> WorkerError:
    """Return the error, of a class that is also the first of `kinds` that is known here.

    These are the classes of what the rank raised, as `module:qualified.name`, its own first.
    Nothing is imported for it.
    """
    for name in kinds:
        original = _known(name)
        if original is Exception:
            break
        if original is not None and (both := _also(error, original)) is not None:
            return both
    return error


def _known(name: str) -> type[Exception] | None:
    """Return the exception class of this name, of a module that has been imported."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _also(error: WorkerError, original: type[Exception]) -> WorkerError | None:
    """Return the same as an exception of another class too; None if no class can be both."""
    kind = type(error)
    own = {
        "__module__": kind.__module__,
        # What the other class has of these may want attributes that only it sets.
        **{name: getattr(Exception, name) for name in ("__str__", "__repr__", "__setattr__")},
        **{name: getattr(object, name) for name in ("__eq__", "__hash__")},
        "__reduce__": lambda found: (rebuild, (kind, found.args), found.__dict__),
        **vars(error),  # it may have properties of these names
    }
    try:
        both: type[WorkerError] = type(kind.__name__, (kind, original), own)
        # A constructor in Python would want arguments that are not known.
        made = _builtin_base(both).__new__(both, str(error))
    except Exception:  # noqa: BLE001 (a metaclass, or `__init_subclass__`, can raise anything)
        return None
    made.args = error.args
    made.__dict__.update(error.__dict__)
    return made


def _builtin_base(kind: type[BaseException]) -> type[BaseException]:
    """Return the builtin class that makes its instances; MemoryError makes only its own."""
    while kind.__module__ != "builtins":
        kind = cast("type[BaseException]", kind.__base__)
    return kind
