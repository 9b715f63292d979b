"""Tests of `nbdist.worker.publishing`: what messages leave out, and which log records are sent."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from nbdist.worker.publishing import (
    LARGEST,
    LONGEST_ERROR,
    MOST,
    MOST_AHEAD,
    MOST_IN_A_TASK,
    MOST_IN_FILES,
    OF_MESSAGE,
    SMALL,
    LargeOutputs,
    MarkingSession,
    Records,
    plain,
)


def display(kind: str, size: int) -> dict[str, object]:
    """The content of a message that shows so many characters."""
    return {"data": {kind: "x" * size, "text/plain": "<a figure>"}, "metadata": {"a": 1}}


def test_what_fits_is_passed_on(tmp_path: Path) -> None:
    """The message itself, and no file is written."""
    large = LargeOutputs(tmp_path)
    for kind, content in [
        ("display_data", display("image/png", LARGEST)),
        ("stream", {"text": "x" * (LARGEST + 1)}),
        ("error", {"evalue": "bad", "traceback": ["x" * LONGEST_ERROR]}),
        ("display_data", {"data": None}),
        ("error", "no content at all"),
    ]:
        assert large.fitting(kind, content) is content
    assert list(tmp_path.iterdir()) == []


def test_a_large_display_is_in_a_file(tmp_path: Path) -> None:
    """A line says what it was and where it is; only this user can read it."""
    content = LargeOutputs(tmp_path).fitting("display_data", display("text/html", LARGEST + 1))
    (file,) = tmp_path.iterdir()
    assert (file.name, file.stat().st_size) == ("display-0.html", LARGEST + 1)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    said = f"<a figure>\n… text/html of 10,000,001 characters, too much for a page: {file}"
    assert content == {"data": {"text/plain": said}, "metadata": {}}


def test_a_large_json(tmp_path: Path) -> None:
    """What is no text is as long as its JSON: a figure of plotly's may be very large."""
    data = {"application/x": {"y": ["é" * 10] * (LARGEST // 60)}}
    content = LargeOutputs(tmp_path).fitting("display_data", {"data": data})
    (file,) = tmp_path.iterdir()
    assert content["data"]["text/plain"].endswith(f"too much for a page: {file}")
    assert json.loads(file.read_text()) == data["application/x"]
    small = {"data": {"application/x": {"y": 1}, "text/x": object()}}
    assert LargeOutputs(tmp_path).fitting("display_data", small) is small


def test_many_displays_of_a_task(tmp_path: Path) -> None:
    """After so many only small ones are passed on; the next task may show as much again."""
    large = LargeOutputs(tmp_path)
    some, small = display("image/png", LARGEST), display("image/png", SMALL)
    for _ in range(MOST_IN_A_TASK // LARGEST):
        assert large.fitting("display_data", some) is some
    assert large.fitting("display_data", some) is not some
    assert large.fitting("display_data", small) is small
    session = MarkingSession()
    session.large = large
    session.begin_task()
    assert large.fitting("display_data", some) is some


def test_who_shows_much_waits_for_the_agent(capfd: pytest.CaptureFixture[str]) -> None:
    """Each time that so many bytes have been sent, or messages, and not in between."""
    session, waits = MarkingSession(), list[int]()
    session.catch_up = lambda: waits.append(session._sent)
    part = MOST_AHEAD // 4
    for _ in range(6):
        session.send(None, "display_data", {"data": {"text/html": "x" * part}})
    for _ in range(4):
        session.send(None, "comm_msg", {}, buffers=[bytes(part)])
    assert waits == [4, 8]
    assert capfd.readouterr().out.count("\x1b_") == 10
    for _ in range(2 * MOST_AHEAD // OF_MESSAGE):
        session.send(None, "display_data", {"data": {"text/plain": "x"}})
    assert len(waits) == 4


def test_which_error_has_been_shown(capfd: pytest.CaptureFixture[str]) -> None:
    """What ended the task is not taken for shown because another one was."""
    session, shown = MarkingSession(), KeyError("x")
    session.showing = shown
    with zmq.Context() as context, context.socket(zmq.PUB) as nobody:
        session.send(nobody, "error", {"ename": "KeyError"})
        assert session.number_of(ValueError()) == 0
        session.send(nobody, "error", {"ename": "KeyError"})
        assert session.number_of(shown) == 2
    assert capfd.readouterr().out == "\x1b_;1\x1b\\\x1b_;2\x1b\\"


def test_a_large_error(tmp_path: Path) -> None:
    """Its message keeps both ends, and says where the whole is.

    Those that differ in what is left out do not look the same, or ranks that have them would be
    folded.
    """
    text = "a" * LONGEST_ERROR + "b" * LONGEST_ERROR
    sent = {"ename": "ValueError", "evalue": text, "traceback": ["head", "calls", text]}
    content = LargeOutputs(tmp_path).fitting("error", sent)
    (file,) = tmp_path.iterdir()
    assert file.read_text() == f"head\ncalls\nValueError: {text}"
    assert content["traceback"][:2] == ["head", "calls"]
    assert content["traceback"][-1].endswith(f"of this error were left out: {file}")
    message = content["evalue"]
    assert (message[0], message[-1], len(message) < LONGEST_ERROR + 100) == ("a", "b", True)
    other = {**sent, "evalue": text.replace("ab", "xy")}
    assert LargeOutputs(None).fitting("error", other)["evalue"] != message


def test_without_room_for_files(tmp_path: Path) -> None:
    """Without a folder, or when it holds enough, the line names no file."""
    full = LargeOutputs(tmp_path)
    for content in (display("text/html", LARGEST + 1) for _ in range(MOST_IN_FILES // LARGEST)):
        said = full.fitting("display_data", content)
    nowhere = LargeOutputs(None).fitting("display_data", display("text/html", LARGEST + 1))
    assert said == nowhere
    assert said["data"]["text/plain"].endswith("too much for a page")


# --- records ----------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    return []


@pytest.fixture
def records(sent: list[dict[str, Any]]) -> Records:
    return Records(sent.append, "nbdist-worker")


def record(level: int = logging.INFO, message: object = "step %d", *args: object) -> Any:
    """One that a logger of the user's has made."""
    return logging.LogRecord("train", level, "/home/me/train.py", 7, message, args or (4,), None)


def test_from_the_wanted_level_on(records: Records, sent: list[dict[str, Any]]) -> None:
    """None where no task runs, or the notebook wants none."""
    records.take(record())
    records.begin_task(logging.WARNING)
    records.take(record(logging.INFO))
    records.take(record(logging.ERROR))
    records.begin_task(None)
    records.take(record(logging.ERROR))
    assert [each["level_name"] for each in sent] == ["ERROR"]
    (only,) = sent
    assert (only["rank"], only["local_rank"], only["name"]) == (3, 1, "train")
    assert (only["message"], only["line"], only["pid"]) == ("step 4", 7, os.getpid())


def test_the_kernels_own_are_not_sent(records: Records, sent: list[dict[str, Any]]) -> None:
    """It logs each of its messages, also those that would carry them."""
    records.begin_task(logging.DEBUG)
    records.take(logging.LogRecord("nbdist-worker", 40, "kernel.py", 1, "sent", (), None))
    assert sent == []


def test_a_task_sends_so_many(records: Records, sent: list[dict[str, Any]]) -> None:
    """Of more it is said how many there were; the next task may send as many again."""
    records.begin_task(logging.DEBUG)
    for _ in range(MOST + 2):
        records.take(record())
    records.end_task()
    assert len(sent) == MOST + 1
    said = "2 records more were not sent: 10,000 a cell and rank are"
    assert (sent[-1]["name"], sent[-1]["message"]) == ("nbdist", said)
    records.begin_task(logging.DEBUG)
    records.take(record())
    assert len(sent) == MOST + 2


@pytest.fixture
def _logging() -> Iterator[None]:
    """The method that all loggers call, as it was."""
    before = logging.Logger.callHandlers
    yield
    logging.Logger.callHandlers = before  # type: ignore[method-assign]


@pytest.mark.usefixtures("_logging")
def test_handlers_get_them_too(
    records: Records, sent: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """What a user's own handlers do is as ever."""
    records.watch()
    records.begin_task(logging.DEBUG)
    logging.getLogger("train").warning("loss is %s", "nan")
    assert [each["message"] for each in sent] == ["loss is nan"]
    assert caplog.messages == ["loss is nan"]


class Odd(Exception):
    """One that cannot be shown."""

    def __str__(self) -> str:
        raise TypeError("no text")


def test_what_a_record_is_made_of() -> None:
    """It stays with the rank: text is sent, also where an exception or argument has none."""
    made = record(logging.INFO, "%d steps", "many")
    try:
        raise Odd
    except Odd as error:
        made.exc_info = (Odd, error, error.__traceback__)
    found = plain(made, "host", 0)
    assert found.message == "'%d steps' (TypeError while it was formatted)"
    assert "Odd" in found.exception
    made = record(logging.ERROR)
    made.exc_info = (ZeroDivisionError, ZeroDivisionError("division by zero"), None)
    made.stack_info = "Stack (most recent call last):"
    found = plain(made, "host", 0)
    assert found.exception.endswith("ZeroDivisionError: division by zero")
    assert found.stack == "Stack (most recent call last):"
    assert plain(record(), "host", 0).exception == ""
