"""Tests of `nbdist.world.result`: values, exceptions, the status and log records of ranks."""

from __future__ import annotations

import copy
import logging
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from decimal import DivisionByZero
from logging.handlers import BufferingHandler
from typing import Any

import pytest
from IPython.lib.pretty import pretty
from pydantic_core import SchemaValidator, ValidationError

from nbdist.errors import Blame, UsageError, WorkerError
from nbdist.output.events import Failure, Text
from nbdist.output.transcript import Transcript
from nbdist.wire.places import Collective, RankPosition
from nbdist.wire.status import Gpu, Usage, WorkerStatus
from nbdist.wire.work import OpCall, Task
from nbdist.worker.publishing import plain_record
from nbdist.worker.tracebacks import contents_of
from nbdist.world import dispatch
from nbdist.world.result import CellResult, Contents, as_raised, hand_over, raised, rows, usage_text
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)

HOSTS = {0: (socket.gethostname(), 0), 1: ("far", 0), 2: ("far", 1)}
VALUES = {0: "a", 1: "b", 2: None}
FETCHING = Task("a", (0, 1, 2), fetch=("x",))
RESULT = CellResult(FETCHING, Transcript((0, 1, 2)), 0.5, {}, VALUES, HOSTS)
NO_VALUES = replace(RESULT, task=Task("a", (0, 1, 2)), by_rank=dict.fromkeys(range(3)))
ERROR = WorkerError(Blame(1, "node1", 4711, {}), 4, 1.2, ("KeyError", "'x'"))


def test_values_come_in_rank_order() -> None:
    """Values are read by rank, by machine, or in rank order; a rank that failed has no value."""
    assert (RESULT.rank(1), RESULT.rank(2)) == ("b", None)
    assert (list(RESULT), len(RESULT), RESULT.ok) == (["a", "b", None], 3, True)
    assert (RESULT[0], dict(RESULT)) == ("a", {0: "a", 1: "b", 2: None})
    assert ([*RESULT.keys()], [*RESULT.values()]) == ([0, 1, 2], ["a", "b", None])
    assert (RESULT.index("far", 1), RESULT.index("far", local_rank=0)) == (None, "b")
    assert RESULT.index("localhost", 0) == RESULT.index(socket.gethostname(), 0) == "a"
    places = ", ".join(f"{name} {local}" for name, local in HOSTS.values())
    for host, number in (("elsewhere", 0), ("far", 2), ("localhost", 1)):
        with pytest.raises(UsageError) as caught:
            RESULT.index(host, number)
        message = f"No result of local rank {number} on {host}; there are {places}."
        assert str(caught.value) == message
    failure = Failure("ValueError", "bad", (), 5)
    failed = CellResult(RESULT.task, RESULT.transcript, 0.5, {1: failure}, {0: 5}, HOSTS)
    assert (failed.ok, list(failed)) == (False, [5])
    assert repr(replace(NO_VALUES, errors={1: failure})).endswith("failed on rank 1>")
    with pytest.raises(KeyError):
        failed.rank(1)


def test_reading_values_that_were_not_asked_raises() -> None:
    """Reading values that were not fetched raises an error with the remedy, and returns no None."""
    for read in (list, dict, lambda result: result[0], CellResult.values, CellResult.items):
        with pytest.raises(UsageError, match=r'no names were given: .+ `world.gather\("x"\)`'):
            read(NO_VALUES)
    assert (len(NO_VALUES), NO_VALUES.ok) == (3, True)


def test_a_small_last_value_comes_back(world: World) -> None:
    """A small last value comes back; reading a large or unpicklable last value raises an error."""
    assert world.execute("rank + 5")[0] == 5
    result = world.execute("x = 7\nrank * x or None;")
    assert (result[0], result.rank(1), [*result]) == (None, 7, [None, 7])
    assert repr(result) == "<CellResult of ranks 0-1, ok: {0: None, 1: 7}>"
    for source in ("torch.zeros(1 << 20)", "'x' * (1 << 20)", "(each for each in 'ab')"):
        for read in (list, lambda result: result[1]):
            with pytest.raises(UsageError, match="the last value of ranks 0-1 did not come back"):
                read(world.execute(source))
    result = world.execute("torch.zeros(1 << 20) if rank else 3")
    assert result[0] == 3
    with pytest.raises(UsageError, match="the last value of rank 1 did not come back"):
        result[1]
    for source in ("y = 1", "print('done')"):
        with pytest.raises(UsageError, match="the source does not end with a value"):
            world.execute(source)[0]


def test_a_result_shows_its_values_and_output() -> None:
    """`repr` shows fetched values, up to a limit; output is read as text, by stream and rank."""
    assert repr(NO_VALUES) == "<CellResult of ranks 0-2, ok>"
    values = "{0: 'a', 1: 'b', 2: None}"
    called = replace(RESULT, task=Task("a", (0, 1, 2), OpCall("run.call")))
    assert repr(called) == f"<CellResult of ranks 0-2, ok: {values}>"
    assert pretty(called, max_width=40) == f"<CellResult of ranks 0-2, ok:\n{values}>"
    long = repr(replace(called, by_rank={0: "x" * 5000}))
    assert long.endswith("more characters>")
    assert len(long) < 2100
    transcript = Transcript((0, 1))
    for output in (Text("stdout", "50%\r100%\nend\n"), Text("stderr", "\x1b[31mbad\x1b[0m\n")):
        transcript.receive(1, output, 0.0)
    result = replace(RESULT, transcript=transcript)
    assert (result.stdout, result.stderr[1]) == ({0: "", 1: "100%\nend\n"}, "bad\n")


# --- exceptions -------------------------------------------------------------------------------


class Demanding(ValueError):
    """An error whose constructor needs an argument, and whose text needs an attribute."""

    def __init__(self, *, shard: int) -> None:
        self.shard = shard

    def __str__(self) -> str:
        return f"shard {self.shard}"


def kinds_of(kind: type[BaseException]) -> list[str]:
    return [f"{base.__module__}:{base.__qualname__}" for base in kind.__mro__]


class Frozen(KeyError):
    """An error whose attributes cannot be set."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class Slotted(Exception):
    """An error that counts as false, with an attribute in a slot instead of a dictionary."""

    __slots__ = ("shard",)

    def __bool__(self) -> bool:
        return False

    @property
    def rank(self) -> str:
        return "its own"


class Proud(RuntimeError):
    """An error whose class allows no subclasses."""

    def __init_subclass__(cls) -> None:
        raise TypeError("never")


def as_sent(error: Exception) -> WorkerError:
    """Return the error that the notebook makes of an exception of a rank."""
    contents = Contents.read(contents_of(error, {}), {})
    return as_raised(copy.copy(ERROR), kinds_of(type(error)), contents)


@pytest.mark.parametrize("kind", [OSError, UnicodeDecodeError, DivisionByZero, Demanding, Frozen])
def test_an_error_has_both_classes(kind: type[Exception]) -> None:
    """The error is a WorkerError, with its text and attributes, and also of the rank's class."""
    error = as_raised(ERROR, kinds_of(kind))
    assert isinstance(error, WorkerError)
    assert isinstance(error, kind)
    assert (str(error), type(error).__name__, error.rank) == (str(ERROR), "WorkerError", 1)
    assert repr(error) == f"WorkerError({str(ERROR)!r})"


def test_an_error_has_the_ranks_attributes() -> None:
    """The error has the rank's arguments and attributes; a text replaces an unsendable argument."""
    assert as_sent(KeyError("x")).args == ("x",)
    missing: Any = as_sent(FileNotFoundError(2, "No such file", "a.txt"))
    assert (missing.errno, missing.strerror, missing.filename) == (2, "No such file", "a.txt")
    ended: Any = as_sent(subprocess.CalledProcessError(3, ["false"], output="said"))
    assert (ended.returncode, ended.cmd, ended.stdout) == (3, ["false"], "said")
    undecoded: Any = as_sent(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"))
    assert (undecoded.object, undecoded.start, undecoded.reason) == (b"\xff", 0, "bad")
    slotted = Slotted("a", 1)
    slotted.shard = 7
    received: Any = as_sent(slotted)
    assert (received.shard, received.args, received.rank, bool(received)) == (7, ("a", 1), 1, True)
    demanding: Any = as_sent(Demanding(shard=5))
    assert (demanding.shard, demanding.args, str(demanding)) == (5, (), str(ERROR))
    error = ValueError(threading.Lock(), "x" * 100_000, 5)
    error.lock, error.code = threading.Lock(), 3  # type: ignore[attr-defined]
    received = as_sent(error)
    lock, long, number = received.args
    assert (lock[:16], long[:3], len(long), number) == ("<unlocked _threa", "'xx", 1000, 5)
    assert (received.code, hasattr(received, "lock")) == (3, False)


def raised_in_rust() -> Exception:
    with pytest.raises(ValidationError) as caught:
        SchemaValidator({"type": "int"}).validate_python("five")
    return caught.value


@pytest.mark.parametrize("original", [Proud("a", 1), raised_in_rust()])
def test_an_error_without_subclass_is_raised_itself(original: Exception) -> None:
    """If no class can be derived, the rank's own error is raised with nbdist's line as a note."""
    original.shard = 5  # type: ignore[attr-defined]
    error: Any = raised(as_sent(original))
    assert type(error) is type(original)
    assert (error.args, error.shard, error.rank) == (original.args, 5, 1)
    assert str(error) == str(original)
    assert error.__notes__ == [str(ERROR)]
    assert error._render_traceback_() == ERROR._render_traceback_()


def test_the_first_imported_class_counts() -> None:
    """Only a class whose module is imported already is used; a copy is a plain WorkerError."""
    assert "turtledemo" not in sys.modules
    error = as_raised(ERROR, ["turtledemo:Error", *kinds_of(Demanding)])
    assert isinstance(error, Demanding)
    assert "turtledemo" not in sys.modules
    assert as_raised(ERROR, ["turtledemo:Error", "builtins:Exception"]) is ERROR
    error = as_sent(KeyError("x"))
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is WorkerError
        assert (str(twin), twin.rank) == (str(ERROR), 1)


# --- the status -------------------------------------------------------------------------------


GIB = 2**30
IDLE = WorkerStatus(0, 100, "here", "idle", 0.0, 45 * 2**20, "cuda:0")


def test_the_status_has_no_empty_columns():
    """Only columns in which a rank has a value are shown, and hosts only if there are several."""
    assert rows([]) == []
    assert rows([IDLE]) == [
        ("rank", "state", "pid", "device", "memory"),
        ("0", "idle", "100", "cuda:0", "45 MiB"),
    ]
    headings, first, second = rows([IDLE, replace(IDLE, rank=1, host="there")])
    assert headings[:3] == ("rank", "host", "state")
    assert (first[1], second[1]) == ("here", "there")
    place, last = (
        RankPosition(line=7, operation="all_reduce"),
        Collective("all_reduce", 3, is_done=False),
    )
    busy = WorkerStatus(1, 101, "here", "busy", 2.6, 2**20, "cuda:1", place, "", last)
    headings, idle, row = rows([IDLE, busy])
    assert (headings[5:], idle[5:]) == (("where", "last collective"), ("", ""))
    assert row[1] == "busy 3 s"
    assert row[5:] == ("waits in all_reduce, line 7", "all_reduce #3, not done")
    other = replace(IDLE, rank=1, gpu=Gpu(61 * GIB, 80 * GIB, 97))
    headings, first, second = rows([IDLE, other], {0: 98.6}, {1: "loss 0.5"})
    assert headings[5:] == ("cpu", "gpu", "last line")
    assert (first[5:], second[5:]) == (("99 %", "", ""), ("", "61/80 GiB 97 %", "loss 0.5"))
    slice_of = replace(IDLE, gpu=Gpu(GIB, 10 * GIB))
    assert rows([slice_of])[1][5:] == ("1/10 GiB",)


def test_usage_is_one_figure_or_a_range():
    """Equal figures are shown once, others as a range, and unknown figures not at all."""
    assert usage_text([]) == usage_text([Usage(0)]) == ""
    assert usage_text([Usage(2 * GIB), Usage(2 * GIB)]) == "cpu 2 GiB"
    gpu = Gpu(61 * GIB, 80 * GIB, 97)
    assert usage_text([Usage(2 * GIB, gpu)]) == "cpu 2 GiB · gpu 61/80 GiB · 97 %"
    first, second = Gpu(3 * GIB, 16 * GIB, None), Gpu(12 * GIB, 16 * GIB, 5)
    used = [Usage(500 << 20, first), Usage(GIB, second), Usage(2 * GIB, Gpu(GIB // 2, 16 * GIB, 0))]
    assert usage_text(used) == "cpu 500 MiB-2 GiB · gpu 0.5-12/16 GiB · 0-5 %"


# --- log records ------------------------------------------------------------------------------


def messages_of(handler: BufferingHandler) -> list[tuple[int, str]]:
    """Return the rank and message of each record that came to a user's handler, by rank."""
    messages = [(record.rank, record.getMessage()) for record in handler.buffer]
    return sorted(messages, key=lambda each: each[0])


@pytest.fixture(scope="module")
def started(started: World) -> World:
    started.execute("import logging\nlogger = logging.getLogger('train')\nlogger.setLevel(10)")
    return started


@pytest.fixture
def silent() -> Iterator[logging.Logger]:
    """The logger `nbdist`, whose records do not reach the root logger with pytest's handlers."""
    logger = logging.getLogger("nbdist")
    logger.propagate = False
    yield logger
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


def test_records_reach_the_notebooks_loggers(world: World, silent: logging.Logger) -> None:
    """Records from the logger's level on come with message, place, time and exception."""
    silent.addHandler(handler := BufferingHandler(99))
    silent.setLevel(logging.INFO)
    before = time.time()
    world.execute(
        "logger.debug('too little')\n"
        "logger.info('epoch %d on rank %s', 3, rank)\n"
        "try: 1 / 0\nexcept ZeroDivisionError: logger.exception('bad')"
    )
    silent.removeHandler(handler)
    infos = [(rank, f"epoch 3 on rank {rank}") for rank in range(2)]
    assert messages_of(handler) == sorted(
        [*infos, (0, "bad"), (1, "bad")], key=lambda each: each[0]
    )
    first, second = [record for record in handler.buffer if record.rank == 1]
    assert (first.name, first.levelname, first.lineno) == ("train", "INFO", 2)
    assert before <= first.created <= time.time()
    assert first.host == socket.gethostname()
    assert second.exc_text.endswith("ZeroDivisionError: division by zero")
    assert second.exc_info is None


def test_no_record_is_sent_without_a_handler(
    world: World, silent: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a handler in the notebook a worker sends no record, and the notebook prints none."""
    silent.handlers.clear()  # remove those of pytest
    running = world.submit(world.task("logger.warning('to nobody')"))
    dispatch.wait(world.engine, running)
    assert running.task.log_level is None
    summaries = world.gather("repr(get_ipython().kernel.records)")
    assert summaries == ["<Records from level None, 0 sent, 0 dropped>"] * 2
    # On the worker, `logging.lastResort` has written the record.
    assert "to nobody" in running.transcript[0].tail(9)[0].text  # type: ignore[union-attr]
    capsys.readouterr()
    logged = logging.makeLogRecord({"msg": "x", "levelno": logging.ERROR})
    hand_over(plain_record(logged, "host"), is_shown=True)
    assert capsys.readouterr() == ("", "")


def test_the_console_has_each_record_once(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The root logger repeats no record that a rank has shown; a handler of `nbdist` does."""
    logger, root = logging.getLogger("nbdist"), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logger, "handlers", [])
    logging.basicConfig()
    world.execute("logger.warning('hello %d', rank)", ranks=[1])
    assert capsys.readouterr() == ("[1] hello 1\n", "")
    logger.addHandler(handler := logging.StreamHandler())
    handler.setFormatter(logging.Formatter("%(rank)d: %(message)s"))
    world.execute("logger.warning('hello %d', rank)", ranks=[1])
    assert capsys.readouterr() == ("[1] hello 1\n", "1: hello 1\n")
    monkeypatch.setattr(world.engine, "config", replace(world.engine.config, show=False))
    logger.removeHandler(handler)
    world.execute("logger.warning('hello %d', rank)", ranks=[1])
    assert capsys.readouterr() == ("", "WARNING:train:hello 1\n")


def test_a_logger_gets_the_records_of_one_rank(
    world: World, silent: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """The logger of a host and local rank gets the rank's records; bad handlers fail no cell."""
    logger, handler = logging.getLogger(f"nbdist.{socket.gethostname()}.1"), BufferingHandler(9)
    raises = logging.Handler()  # its `emit` raises NotImplementedError
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    silent.addHandler(raises)
    try:
        world.execute("logger.debug('little')")
    finally:
        silent.removeHandler(raises)
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert messages_of(handler) == [(1, "little")]
    assert capsys.readouterr().err.count("NotImplementedError: emit must") == 1
