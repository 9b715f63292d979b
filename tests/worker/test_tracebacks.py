"""Tests of `nbdist.worker.tracebacks`: what is said of an exception, however it is drawn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdist.errors import WorkerError
from nbdist.output.events import Failure
from nbdist.worker.tracebacks import (
    MOST_CHARACTERS,
    failure_of,
    in_few_words,
    message_of,
    own_part,
)
from nbdist.world.running import RunningTask
from nbdist.world.world import World
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

RAISES = "if rank == 1: raise LookupError('no such shard')"

DRAWN = {
    "a showtraceback of one's own": "shell.showtraceback = lambda *args, **options: None",
    "a _showtraceback that fails": "shell._showtraceback = lambda *args: 1 / 0",
    "set_custom_exc that fails": "shell.set_custom_exc((Exception,), lambda *args: 1 / 0)",
    "an InteractiveTB that fails": "del shell.InteractiveTB.__class__.structured_traceback",
    "no stdout": "import sys; sys.stdout = sys.stderr = None",
    "no __main__": "import sys; del sys.modules['__main__']",
    "no more descriptors": (
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')), 4096))"
    ),
    "no linecache": "import linecache; linecache.getlines = linecache.checkcache = None",
    "a session that sends no errors": (
        "send = shell.kernel.session.send\n"
        "shell.kernel.session.send = lambda stream, kind, *args, **options: (\n"
        "    None if kind == 'error' else send(stream, kind, *args, **options))"
    ),
}
"""What a cell does before another one, or itself, raises."""


@pytest.fixture(scope="module")
def started(new_world: NewWorld) -> Iterator[World]:
    with new_world(2, show=False) as world:
        yield world


@pytest.fixture
def world(started: World) -> Iterator[World]:
    """The world; rank 1 is a new one afterwards."""
    yield started
    started.replace([1])


def ran(world: World, source: str) -> RunningTask:
    running = world.submit(world.task(source, execution_count=7))
    world.session.wait(running)
    return running


@pytest.mark.parametrize("drawn", DRAWN)
def test_failed_cell_is_failed(world: World, drawn: str) -> None:
    """In the cell that changes how errors are shown, and in the next one."""
    change = "\n".join(f"    {line}" for line in DRAWN[drawn].splitlines())
    setup = f"if rank == 1:\n    shell = get_ipython()\n{change}\n"
    for source in (setup + RAISES, RAISES):
        running = ran(world, source)
        assert list(running.transcript.errors) == [1]
        failure = running.transcript.errors[1]
        assert isinstance(failure, Failure)
        assert (failure.name, failure.message) == ("LookupError", "no such shard")
        assert "builtins:LookupError" in failure.kinds
        error = running.error()
        assert isinstance(error, WorkerError)
        assert isinstance(error, LookupError)
        assert error.rank == 1


def test_error_that_is_only_shown(world: World) -> None:
    """A traceback that a cell shows of an error that it has met does not make it a failed one."""
    running = ran(
        world,
        "if rank == 1:\n    try:\n        1 / 0\n    except ZeroDivisionError:\n"
        "        get_ipython().showtraceback()\n    print('went on')",
    )
    assert running.error() is None
    assert running.transcript[1].state == "ok"
    (screen,) = running.transcript[1].pieces
    lines = [line.text for line in screen.tail(100)]
    assert any("ZeroDivisionError" in line for line in lines)
    assert "went on" in lines


class ShardError(LookupError):
    """A user's own."""


def caught(code: str) -> BaseException:
    """What the code raises, as code of a file that is no cell."""
    try:
        exec(compile(code, "/home/me/train.py", "exec"), {"ShardError": ShardError})
    except BaseException as error:  # noqa: BLE001 (it is what is looked at)
        return error
    raise AssertionError("nothing was raised")


def test_a_failure() -> None:
    """Its words, the calls by file and line, and the classes by which others may catch it."""
    failure = failure_of(caught("def load():\n    raise ShardError('no shard 3')\nload()"))
    assert (failure.name, failure.message) == ("ShardError", "no shard 3")
    assert failure.traceback[-3:] == (
        "File /home/me/train.py:3, in <module>",
        "File /home/me/train.py:2, in load",
        "ShardError: no shard 3",
    )
    own, *others = failure.kinds
    assert own.endswith(":ShardError")
    assert others == [
        "builtins:LookupError",
        "builtins:Exception",
        "builtins:BaseException",
        "builtins:object",
    ]
    assert failure.connections == ""


def test_a_failure_of_connections() -> None:
    """It says that those to other ranks have ended."""
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    assert failure_of(caught(f"raise RuntimeError({gloo!r})")).connections == "ended"


def test_messages() -> None:
    """As much as is read, in characters that can be sent; some cannot be made at all."""
    long = message_of(ValueError("x" * (MOST_CHARACTERS + 1_000)))
    assert long == "x" * MOST_CHARACTERS + " … 1,000 more characters"
    assert message_of(ValueError("half \ud800")) == "half \\ud800"
    odd = caught("class Odd(Exception):\n    def __str__(self): raise LookupError\nraise Odd")
    assert message_of(odd) == "<its text cannot be made: LookupError>"


def test_errors_that_are_too_long_to_colour() -> None:
    """IPython gets another of the same name and cause; one that is short it gets itself."""
    short, cause = ValueError("bad"), KeyError(1)
    assert in_few_words(ValueError, short) == (ValueError, short)
    long = ShardError("x" * (2 * MOST_CHARACTERS))
    long.__cause__ = cause
    kind, shown = in_few_words(ShardError, long)
    assert (kind.__name__, shown.__cause__) == ("ShardError", cause)
    assert len(str(shown)) < MOST_CHARACTERS + 100


def test_own_part_of_a_traceback() -> None:
    """It begins where IPython's calls end."""
    source = "def run(): exec(compile('1 / 0', '<cell>', 'exec'))\nrun()"
    try:
        exec(compile(source, "/lib/IPython/core/interactiveshell.py", "exec"), {})
    except ZeroDivisionError as error:
        own = own_part(error.__traceback__.tb_next if error.__traceback__ else None)
    assert own is not None
    assert own.tb_frame.f_code.co_filename == "<cell>"
    assert own_part(None) is None


def test_a_last_value_that_cannot_be_shown(world: World) -> None:
    """What its class raises is what ends the cell, with the line in its traceback."""
    odd = "class Odd:\n    def _repr_html_(self): raise LookupError('odd')\n"
    running = ran(world, f"{odd}if rank == 0: Odd = int\nOdd()")
    error = running.error()
    assert isinstance(error, LookupError)
    assert (error.rank, error.args) == (1, ("odd",))
    (failure,) = running.transcript.errors.values()
    assert isinstance(failure, Failure)
    assert (failure.name, failure.message) == ("LookupError", "odd")
    assert "raise" in "".join(failure.traceback)


def test_a_falsy_exception(world: World) -> None:
    """It is an error as any other, of its own class."""
    falsy = "def __len__(self): return 0"
    source = f"class Empty(LookupError):\n    {falsy}\nif rank == 1: raise Empty('a', 2)"
    error = ran(world, source).error()
    assert isinstance(error, LookupError)
    assert error.args == ("a", 2)
    assert "LookupError" not in str(error)
    assert "Empty: ('a', 2)" in str(error)
