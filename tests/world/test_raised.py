"""Tests of `nbdist.world.result`: an error of ours that is also what a rank raised."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from decimal import DivisionByZero
from typing import Any

import pytest
from pydantic_core import SchemaValidator, ValidationError

from nbdist.errors import WorkerError
from nbdist.worker.exceptions import contents_of
from nbdist.world.result import Contents, as_raised, raised

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


class Slotted(Exception):
    """Has an attribute that is in no dictionary, and is false."""

    __slots__ = ("shard",)

    def __bool__(self) -> bool:
        return False

    @property
    def rank(self) -> str:
        return "its own"


class Proud(RuntimeError):
    """No class can be derived from it."""

    def __init_subclass__(cls) -> None:
        raise TypeError("never")


def as_sent(error: Exception) -> WorkerError:
    """What the notebook makes of what a rank raises."""
    contents = Contents.read(contents_of(error, {}), {})
    return as_raised(copy.copy(ERROR), kinds_of(type(error)), contents)


@pytest.mark.parametrize(
    "kind", [KeyError, OSError, MemoryError, UnicodeDecodeError, DivisionByZero, Demanding]
)
def test_both_are_caught(kind: type[Exception]) -> None:
    """It is of both classes, and says and has what ours says and has."""
    error = as_raised(ERROR, kinds_of(kind))
    assert isinstance(error, WorkerError)
    assert isinstance(error, kind)
    assert (str(error), type(error).__name__, error.rank) == (str(ERROR), "WorkerError", 1)
    assert repr(error) == f"WorkerError({str(ERROR)!r})"


def test_it_has_what_the_other_has() -> None:
    """Arguments and attributes, wherever the class keeps them, beside ours."""
    assert as_sent(KeyError("x")).args == ("x",)
    missing: Any = as_sent(FileNotFoundError(2, "No such file", "a.txt"))
    assert isinstance(missing, FileNotFoundError)
    assert (missing.errno, missing.strerror, missing.filename) == (2, "No such file", "a.txt")
    ended: Any = as_sent(subprocess.CalledProcessError(3, ["false"], output="said"))
    assert (ended.returncode, ended.cmd, ended.stdout) == (3, ["false"], "said")
    undecoded: Any = as_sent(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"))
    assert (undecoded.object, undecoded.start, undecoded.reason) == (b"\xff", 0, "bad")
    slotted = Slotted("a", 1)
    slotted.shard = 7
    found: Any = as_sent(slotted)
    assert (found.shard, found.args, found.rank, bool(found)) == (7, ("a", 1), 1, True)
    demanding: Any = as_sent(Demanding(shard=5))
    assert (demanding.shard, demanding.args, str(demanding)) == (5, (), str(ERROR))


def test_what_cannot_be_sent_is_left_out() -> None:
    """A text stands in place of an argument; what is too large to be a message stays there."""
    error = ValueError(threading.Lock(), "x" * 100_000, 5)
    error.lock, error.code = threading.Lock(), 3  # type: ignore[attr-defined]
    found: Any = as_sent(error)
    lock, long, number = found.args
    assert (lock[:16], long[:3], len(long), number) == ("<unlocked _threa", "'xx", 1000, 5)
    assert (found.code, hasattr(found, "lock")) == (3, False)


@pytest.mark.parametrize("kind", [Final, Proud, ValidationError])
def test_classes_that_cannot_be_derived_from(kind: type[Exception]) -> None:
    """What the rank raised is raised as it is; our line is a note, and all that is shown."""
    made = kind("a", 1) if kind is not ValidationError else no_number()
    made.shard = 5  # type: ignore[attr-defined]
    error: Any = raised(as_sent(made))
    assert type(error) is kind
    assert (error.args, error.shard, error.rank) == (made.args, 5, 1)
    assert str(error) == str(made)
    assert error.__notes__ == [str(ERROR)]
    assert error._render_traceback_() == ERROR._render_traceback_()


def no_number() -> Exception:
    """An exception of a class in Rust."""
    try:
        SchemaValidator({"type": "int"}).validate_python("five")
    except ValidationError as error:
        return error
    raise AssertionError


def test_the_first_class_that_is_known_counts() -> None:
    """Of a module that has been imported; nothing is imported."""
    assert "turtledemo" not in sys.modules
    error = as_raised(ERROR, ["turtledemo:Error", *kinds_of(Demanding)])
    assert isinstance(error, Demanding)
    assert "turtledemo" not in sys.modules
    assert as_raised(ERROR, ["turtledemo:Error", "builtins:Exception"]) is ERROR


def test_copies_are_ours_alone() -> None:
    """Pickles of it can be read where the other class is not."""
    error = as_sent(KeyError("x"))
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is WorkerError
        assert (str(twin), twin.rank) == (str(ERROR), 1)
