"""Tests of `nbdist.world.result` and `nbdist.worker.publishing`, with real workers."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from nbdist.worker.publishing import plain
from nbdist.world.result import hand_over
from nbdist.world.world import World
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world


class Kept(logging.Handler):
    """A user's handler that keeps what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def said(self) -> list[tuple[int, str]]:
        """Rank and message of each, by rank."""
        found = [(record.rank, record.getMessage()) for record in self.records]  # type: ignore[attr-defined]
        return sorted(found, key=lambda each: each[0])


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(2) as world:
        world.execute("import logging\nlogger = logging.getLogger('train')\nlogger.setLevel(10)")
        yield world


@pytest.fixture
def silent() -> Iterator[logging.Logger]:
    """The logger `nbdist`, with no handlers, pytest's on the root logger included."""
    logger = logging.getLogger("nbdist")
    logger.propagate = False
    yield logger
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def kept(silent: logging.Logger) -> Iterator[Kept]:
    """A handler on it, from INFO on."""
    handler = Kept()
    silent.addHandler(handler)
    silent.setLevel(logging.INFO)
    yield handler
    silent.removeHandler(handler)


def test_records_reach_the_loggers(world: World, kept: Kept) -> None:
    """A record comes with its message, place, time and exception, from the level on."""
    before = time.time()
    world.execute(
        "logger.debug('too little')\n"
        "logger.info('epoch %d on rank %s', 3, rank)\n"
        "try: 1 / 0\nexcept ZeroDivisionError: logger.exception('bad')"
    )
    found = [(rank, f"epoch 3 on rank {rank}") for rank in range(2)]
    assert kept.said() == sorted([*found, (0, "bad"), (1, "bad")], key=lambda each: each[0])
    first, second = [record for record in kept.records if record.rank == 1]  # type: ignore[attr-defined]
    assert (first.name, first.levelname, first.lineno) == ("train", "INFO", 2)
    assert before <= first.created <= time.time()
    assert first.host == socket.gethostname()  # type: ignore[attr-defined]
    assert second.exc_text is not None
    assert second.exc_text.endswith("ZeroDivisionError: division by zero")
    assert second.exc_info is None


def test_loggers_are_named_by_host_and_local_rank(world: World, silent: logging.Logger) -> None:
    """A handler on the logger of one rank gets that rank's records alone, from its own level."""
    logger, handler = logging.getLogger(f"nbdist.{socket.gethostname()}.1"), Kept()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        world.execute("logger.debug('little')")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert handler.said() == [(1, "little")]


def test_nothing_travels_where_nobody_listens(world: World, silent: logging.Logger) -> None:
    """Without a handler in the notebook's process a worker sends none, and nobody prints any."""
    silent.handlers.clear()  # pytest's
    running = world.submit(world.task("logger.warning('to nobody')"))
    world.session.wait(running)
    assert running.task.log_level is None
    told = world.gather("repr(get_ipython().kernel.records)")
    assert told == ["<Records from level None, 0 sent, 0 dropped>"] * 2
    # The worker's own handler of last resort has.
    assert "to nobody" in running.transcript[0].tail(9)[0].text  # type: ignore[union-attr]


def test_records_of_threads_that_outlive_the_cell(world: World, kept: Kept) -> None:
    """They come when the notebook hears of the workers next."""
    world.execute(
        "import threading\ngo = threading.Event()\n"
        "def late(): go.wait(); logger.info('late'); done.set()\n"
        "done = threading.Event(); thread = threading.Thread(target=late); thread.start()",
        ranks=[0],
    )
    world.execute("threading.Timer(0.05, go.set).start()", ranks=[0])
    world.execute("done.wait(10)", ranks=[0])
    assert kept.said() == [(0, "late")]


def test_nothing_is_printed_where_the_handler_has_gone(
    silent: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record that was on its way is not for logging's handler of last resort."""
    silent.handlers.clear()  # pytest's
    logged = logging.makeLogRecord({"msg": "x", "levelno": logging.ERROR})
    hand_over(plain(logged, "host", 0), is_shown=True)
    assert capsys.readouterr() == ("", "")


def test_the_console_has_each_record_once(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`logging.basicConfig()` here adds nothing to what ranks show; a handler of ours does."""
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
    monkeypatch.setattr(world.session, "config", replace(world.session.config, show=False))
    logger.removeHandler(handler)
    world.execute("logger.warning('hello %d', rank)", ranks=[1])
    assert capsys.readouterr() == ("", "WARNING:train:hello 1\n")


def test_a_handler_that_raises_fails_no_cell(
    world: World, silent: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its traceback is printed, as logging does, and the cell ends well."""

    class Bad(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("bad handler")

        def handleError(self, record: logging.LogRecord) -> None:
            raise sys.exc_info()[1] or AssertionError

    handler = Bad()
    silent.addHandler(handler)
    try:
        world.execute("logger.warning('x')", ranks=[0])
    finally:
        silent.removeHandler(handler)
    assert capsys.readouterr().err.count("RuntimeError: bad handler") == 1
