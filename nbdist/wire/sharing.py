"""Which objects of a pickle another value may share with it."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import logging
import pathlib
import re
import sys
import types
import uuid
from typing import Any

from nbdist.wire.definitions import Variable

# Not worth keeping together: equal copies of these cannot be distinguished, or there is
# one of each in every process.
_IMMUTABLE: tuple[type, ...] = (
    *(str, bytes, int, float, complex, tuple, frozenset, range, slice, type, property),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(types.CodeType, types.GenericAlias, types.UnionType, types.MappingProxyType),
    *(staticmethod, classmethod, enum.Enum, logging.Logger, pathlib.PurePath, re.Pattern),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID),
)

_PLAIN = frozenset({str, bytes, int, float, tuple, types.FunctionType, type})

# Their instances are made once in every process; ours stand for things in a pickle.
_BY_NAME = ("typing", "dataclasses", "nbdist.wire.")


class Fence:
    """Marks in a pickle's memo where the contents of a class or a function begin and end."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _fence, ()


def mutable_ids(
    memo: dict[int, tuple[int, Any]], fences: list[tuple[Fence, Fence]]
) -> frozenset[int]:
    """Collect the ids of the objects in a pickler's memo that two values can share.

    The memo is numbered in the order in which objects were met.
    """
    inside = [False] * (len(memo) + 1)
    for begin, end in fences:
        # The second is missing where the class was still open: never after a pickle.
        for index in range(memo[id(begin)][0], memo[id(end)][0]):
            inside[index] = True
    immutable = (*_IMMUTABLE, *_immutable_of("torch"), *_immutable_of("numpy"))
    outside = {
        key: value
        for key, (index, value) in memo.items()
        # Nearly all of them; asking for subclasses takes ten times as long.
        if type(value) not in _PLAIN and not inside[index]
    }
    return frozenset(
        key
        for key, value in outside.items()
        if not isinstance(value, immutable) and not type(value).__module__.startswith(_BY_NAME)
    ).union(id(value.cell) for value in outside.values() if isinstance(value, Variable))


def _immutable_of(library: str) -> tuple[type, ...]:
    names = {
        "torch": ("dtype", "device", "layout", "memory_format"),
        "numpy": ("dtype", "generic"),
    }
    module = sys.modules.get(library)
    return tuple(found for name in names[library] if (found := getattr(module, name, None)))


def _fence() -> None:
    return None
