"""Tests of `nbdist.world.raised`: an error of ours that is also what a rank raised."""

from __future__ import annotations

import copy
import pickle
import sys
from decimal import DivisionByZero

import pytest

from nbdist.errors import WorkerError
from nbdist.world.raised import as_raised

ERROR = WorkerError(1, "node1", 4711, {}, 4, 1.2, ("KeyError", "'x'"))


class Demanding(ValueError):
    """Cannot be made without its arguments, nor be shown without its attributes."""

    def __init__(self, *, shard: int) -> None:
        self.shard = shard

    def __str__(self) -> str:
        return f"shard {self.shard}"


class Closed(type):
    """The type of classes that cannot be derived from."""

    def __new__(cls, name: str, bases: tuple[type, ...], own: dict[str, object]) -> Closed:
        if name != "Final":
            raise TypeError("it is final")
        return super().__new__(cls, name, bases, own)


class Final(ArithmeticError, metaclass=Closed):
    """Leaves only what it is derived from."""


def kinds_of(kind: type[BaseException]) -> list[str]:
    return [f"{base.__module__}:{base.__qualname__}" for base in kind.__mro__]


@pytest.mark.parametrize(
    "kind", [KeyError, OSError, MemoryError, UnicodeDecodeError, DivisionByZero, Demanding]
)
def test_both_are_caught(kind: type[Exception]) -> None:
    """It is of both classes, and says and has what ours says and has."""
    error = as_raised(ERROR, kinds_of(kind))
    assert isinstance(error, WorkerError)
    assert isinstance(error, kind)
    assert (str(error), type(error).__name__, error.rank) == (str(ERROR), "WorkerError", 1)


def test_the_first_class_that_is_known_counts() -> None:
    """Of a module that has been imported, and that can be derived from; nothing is imported."""
    assert "turtledemo" not in sys.modules
    error = as_raised(ERROR, ["turtledemo:Error", *kinds_of(Final)])
    assert isinstance(error, ArithmeticError)
    assert not isinstance(error, Final)
    assert "turtledemo" not in sys.modules
    assert as_raised(ERROR, ["turtledemo:Error", "builtins:Exception"]) is ERROR


def test_copies_are_ours_alone() -> None:
    """Pickles of it can be read where the other class is not."""
    error = as_raised(ERROR, kinds_of(Demanding))
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is WorkerError
        assert (str(twin), twin.rank) == (str(ERROR), 1)
