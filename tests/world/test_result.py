"""Tests of `nbdist.world.result`: what each rank brought back, and how it is found."""

from __future__ import annotations

import copy
import pickle
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from decimal import DivisionByZero
from typing import Any

import pytest
from IPython.lib.pretty import pretty
from pydantic_core import SchemaValidator, ValidationError

from nbdist.errors import Blame, UsageError, WorkerError
from nbdist.output.events import Failure, Text
from nbdist.output.transcript import Transcript
from nbdist.wire.work import Call, Task
from nbdist.worker.tracebacks import contents_of
from nbdist.world.result import CellResult, Contents, as_raised, raised

HOSTS = {0: (socket.gethostname(), 0), 1: ("far", 0), 2: ("far", 1)}
RESULT = CellResult(
    Task("a", (0, 1, 2)), Transcript((0, 1, 2)), 0.5, {}, {0: "a", 1: "b", 2: None}, HOSTS
)


def test_values_come_in_rank_order() -> None:
    """By rank, and one after the other; None is a value like any other."""
    assert (RESULT.rank(1), RESULT.rank(2)) == ("b", None)
    assert (list(RESULT), len(RESULT), RESULT.ok) == (["a", "b", None], 3, True)
    assert (RESULT[0], dict(RESULT)) == ("a", {0: "a", 1: "b", 2: None})
    assert ([*RESULT.keys()], [*RESULT.values()]) == ([0, 1, 2], ["a", "b", None])


def test_it_shows_its_values() -> None:
    """Those that were asked for, as much as fits into a line, or pretty in a notebook."""
    assert repr(RESULT) == "<CellResult of ranks 0-2, ok>"
    asked = replace(RESULT, task=Task("a", (0, 1, 2), Call("call")))
    assert repr(asked) == "<CellResult of ranks 0-2, ok: {0: 'a', 1: 'b', 2: None}>"
    assert pretty(asked, max_width=40) == (
        "<CellResult of ranks 0-2, ok:\n{0: 'a', 1: 'b', 2: None}>"
    )
    long = repr(replace(asked, by_rank={0: "x" * 5000}))
    assert long.endswith("more characters>")
    assert len(long) < 2100


def test_what_ranks_have_written() -> None:
    """A text for each rank and stream, as a terminal would show it."""
    said = Transcript((0, 1))
    for output in (Text("stdout", "50%\r100%\nend\n"), Text("stderr", "\x1b[31mbad\x1b[0m\n")):
        said.receive(1, output, 0.0)
    result = replace(RESULT, transcript=said)
    assert result.stdout == {0: "", 1: "100%\nend\n"}
    assert result.stderr[1] == "bad\n"


def test_a_rank_by_its_machine() -> None:
    """`localhost` is the notebook's own machine, which has a name too."""
    assert RESULT.index("far", 1) is None
    assert RESULT.index("far", local_rank=0) == "b"
    assert RESULT.index("localhost", 0) == RESULT.index(socket.gethostname(), 0) == "a"


@pytest.mark.parametrize("asked", [("elsewhere", 0), ("far", 2), ("localhost", 1)])
def test_a_rank_that_is_not_there(asked: tuple[str, int]) -> None:
    """One line says which there are."""
    host, number = asked
    there = ", ".join(f"{name} {local}" for name, local in HOSTS.values())
    with pytest.raises(UsageError) as caught:
        RESULT.index(*asked)
    assert str(caught.value) == f"No result of local rank {number} on {host}; there are {there}."


def test_a_rank_that_failed() -> None:
    """It has an error and no value: neither by its number nor by its machine."""
    failure = Failure("ValueError", "bad", (), 5)
    failed = CellResult(RESULT.task, RESULT.transcript, 0.5, {1: failure}, {0: 5}, HOSTS)
    assert (failed.ok, list(failed)) == (False, [5])
    assert repr(failed) == "<CellResult of ranks 0-2, failed on rank 1>"
    with pytest.raises(KeyError):
        failed.rank(1)
    with pytest.raises(UsageError):
        failed.index("far", 0)


ERROR = WorkerError(Blame(1, "node1", 4711, {}), 4, 1.2, ("KeyError", "'x'"))


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


class Frozen(KeyError):
    """Has no attribute set."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


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
    "kind", [KeyError, OSError, MemoryError, UnicodeDecodeError, DivisionByZero, Demanding, Frozen]
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
