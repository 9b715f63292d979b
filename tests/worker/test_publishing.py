"""Tests of `nbdist.worker.publishing`: limits of messages, and log records for the notebook."""

from __future__ import annotations

import json
import logging
import os
import resource
import stat
from pathlib import Path
from typing import Any

import pytest
import zmq

from nbdist.worker.publishing import (
    LONGEST_ERROR,
    MAX_BYTES_AHEAD,
    MAX_DISPLAY_LENGTH,
    MAX_FILES_LENGTH,
    MAX_LOG_RECORDS,
    MAX_TASK_DISPLAYS,
    OF_MESSAGE,
    SMALL_DISPLAY,
    LargeOutputs,
    MarkingSession,
    Records,
    plain_record,
)


def display(kind: str, size: int) -> dict[str, object]:
    """Return the content of a display with `size` characters of a mime type."""
    return {"data": {kind: "x" * size, "text/plain": "<a figure>"}, "metadata": {"a": 1}}


def test_content_within_limits_is_passed_on(tmp_path: Path) -> None:
    """Content that is small enough, or has no limit, is passed on as it is, without a file."""
    large = LargeOutputs(tmp_path)
    for kind, content in [
        ("display_data", display("image/png", MAX_DISPLAY_LENGTH)),
        ("display_data", {"data": {"application/x": {"y": 1}, "text/x": object()}}),
        ("stream", {"text": "x" * (MAX_DISPLAY_LENGTH + 1)}),
        ("error", {"evalue": "bad", "traceback": ["x" * LONGEST_ERROR]}),
        ("display_data", {"data": None}),
        ("error", "no content at all"),
    ]:
        assert large.limit_content(kind, content) is content
    assert list(tmp_path.iterdir()) == []


def test_a_large_display_goes_to_a_file(tmp_path: Path) -> None:
    """A display that is too large is written to a private file, and a line with its path is shown.

    Once the files have no room left, the line has no path.
    """
    large, data = LargeOutputs(tmp_path), display("text/html", MAX_DISPLAY_LENGTH + 1)
    content = large.limit_content("display_data", data)
    (file,) = tmp_path.iterdir()
    assert (file.name, file.stat().st_size) == ("display-0.html", MAX_DISPLAY_LENGTH + 1)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    said = f"<a figure>\n… text/html of 10,000,001 characters, too much for a page: {file}"
    assert content == {"data": {"text/plain": said}, "metadata": {}}
    large.limit_content("display_data", display("image/avif", MAX_DISPLAY_LENGTH + 1))
    (image,) = {*tmp_path.iterdir()} - {file}
    assert image.name == "display-1.avif.base64"
    image.unlink()
    figure = {"y": ["é" * 10] * (MAX_DISPLAY_LENGTH // 60)}
    content = large.limit_content("display_data", {"data": {"application/x": figure}})
    (other,) = {*tmp_path.iterdir()} - {file}
    assert content["data"]["text/plain"].endswith(f"too much for a page: {other}")
    assert json.loads(other.read_text()) == figure
    for _ in range(MAX_FILES_LENGTH // MAX_DISPLAY_LENGTH):
        content = large.limit_content("display_data", data)
    assert content == LargeOutputs(None).limit_content("display_data", data)
    assert content["data"]["text/plain"].endswith("too much for a page")


def test_room_for_files_is_taken_by_files_alone(tmp_path: Path) -> None:
    """A display whose file is too large, or fails, takes no room from later displays."""
    large, small = LargeOutputs(tmp_path), display("text/html", MAX_DISPLAY_LENGTH + 1)
    large.limit_content("display_data", display("text/html", MAX_FILES_LENGTH + 1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_DISPLAY, before[1]))
    try:
        for _ in range(MAX_FILES_LENGTH // MAX_DISPLAY_LENGTH):
            large.limit_content("display_data", small)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    content = large.limit_content("display_data", small)
    (file,) = tmp_path.iterdir()
    assert content["data"]["text/plain"].endswith(f"too much for a page: {file}")
    assert file.stat().st_size == MAX_DISPLAY_LENGTH + 1


def test_displays_of_a_task_are_limited_together(tmp_path: Path) -> None:
    """After many displays a task can only show small ones; the next task has a limit of its own."""
    large = LargeOutputs(tmp_path)
    some, small = display("image/png", MAX_DISPLAY_LENGTH), display("image/png", SMALL_DISPLAY)
    for _ in range(MAX_TASK_DISPLAYS // MAX_DISPLAY_LENGTH):
        assert large.limit_content("display_data", some) is some
    assert large.limit_content("display_data", some) is not some
    assert large.limit_content("display_data", small) is small
    session = MarkingSession()
    session.large_outputs = large
    session.begin_task()
    assert large.limit_content("display_data", some) is some


def test_a_rank_that_shows_much_waits_for_the_agent(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank waits for the agent each time it has sent a number of bytes, or of messages."""
    session, waits = MarkingSession(), list[int]()
    session.catch_up = lambda: waits.append(session._sent)
    part = MAX_BYTES_AHEAD // 4
    for _ in range(6):
        session.send(None, "display_data", {"data": {"text/html": "x" * part}})
    for _ in range(4):
        session.send(None, "comm_msg", {}, buffers=[bytes(part)])
    assert waits == [4, 8]
    assert capfd.readouterr().out.count("\x1b_") == 10
    for _ in range(2 * MAX_BYTES_AHEAD // OF_MESSAGE):
        session.send(None, "display_data", {"data": {"text/plain": "x"}})
    assert len(waits) == 4


def test_an_error_is_shown_by_its_own_message(capfd: pytest.CaptureFixture[str]) -> None:
    """An error does not count as shown because the message of another error was sent."""
    session, shown = MarkingSession(), KeyError("x")
    session.announced_error = shown, {}
    with zmq.Context() as context, context.socket(zmq.PUB) as nobody:
        session.send(nobody, "error", {"ename": "KeyError"})
        assert session.pop_error_number(ValueError()) == 0
        session.send(nobody, "error", {"ename": "KeyError"})
        assert session.pop_error_number(shown) == 2
    assert capfd.readouterr().out == "\x1b_;1\x1b\\\x1b_;2\x1b\\"


def test_a_large_error_keeps_both_ends(tmp_path: Path) -> None:
    """A large error keeps its beginning and its end, and names the file that has all of it.

    Errors that differ in the part that was left out still differ.
    """
    text = "a" * LONGEST_ERROR + "b" * LONGEST_ERROR
    sent = {"ename": "ValueError", "evalue": text, "traceback": ["head", "calls", text]}
    content = LargeOutputs(tmp_path).limit_content("error", sent)
    (file,) = tmp_path.iterdir()
    assert file.read_text() == f"head\ncalls\nValueError: {text}"
    assert content["traceback"][:2] == ["head", "calls"]
    assert content["traceback"][-1].endswith(f"of this error were left out: {file}")
    message = content["evalue"]
    assert (message[0], message[-1], len(message) < LONGEST_ERROR + 100) == ("a", "b", True)
    other = {**sent, "evalue": text.replace("ab", "xy")}
    assert LargeOutputs(None).limit_content("error", other)["evalue"] != message


def record(level: int = logging.INFO, message: object = "step %d", *args: object) -> Any:
    """Return a record that a logger of the user has made."""
    return logging.LogRecord("train", level, "/home/me/train.py", 7, message, args or (4,), None)


def test_records_from_a_level_on_are_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Records are sent from a level on, up to a limit; the user's own handlers get them too."""
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    sent: list[dict[str, Any]] = []
    records = Records(sent.append, "nbdist-worker")
    records.relay(record())  # no task runs
    records.begin_task(logging.WARNING)
    records.relay(record(logging.INFO))
    records.relay(record(logging.ERROR))
    records.begin_task(None)
    records.relay(record(logging.ERROR))
    (only,) = sent
    assert (only["level_name"], only["rank"], only["local_rank"]) == ("ERROR", 3, 1)
    assert (only["name"], only["message"], only["line"]) == ("train", "step 4", 7)
    assert only["pid"] == os.getpid()
    sent.clear()
    records.begin_task(logging.DEBUG)
    # Records of the kernel's logger are left out: it logs each message, also with a record.
    records.relay(logging.LogRecord("nbdist-worker", 40, "kernel.py", 1, "sent", (), None))
    for _ in range(MAX_LOG_RECORDS + 2):
        records.relay(record())
    records.end_task()
    assert len(sent) == MAX_LOG_RECORDS + 1
    said = "2 records more were not sent: 10,000 a cell and rank are"
    assert (sent[-1]["name"], sent[-1]["message"]) == ("nbdist", said)
    sent.clear()
    # Restore the method that all loggers call after the test.
    monkeypatch.setattr(logging.Logger, "callHandlers", logging.Logger.callHandlers)
    records.watch()
    records.begin_task(logging.DEBUG)
    logging.getLogger("train").warning("loss is %s", "nan")
    assert [each["message"] for each in sent] == caplog.messages == ["loss is nan"]


class Odd(Exception):
    """An exception without a text: its `__str__` raises."""

    def __str__(self) -> str:
        raise TypeError("no text")


def test_a_record_is_sent_as_text() -> None:
    """A record is sent as text, even if an exception or an argument in it cannot be formatted."""
    made = record(logging.INFO, "%d steps", "many")
    try:
        raise Odd
    except Odd as error:
        made.exc_info = (Odd, error, error.__traceback__)
    found = plain_record(made, "host")
    assert found.message == "'%d steps' (TypeError while it was formatted)"
    assert "Odd" in found.exception
    made = record(logging.ERROR)
    made.exc_info = (ZeroDivisionError, ZeroDivisionError("division by zero"), None)
    made.stack_info = "Stack (most recent call last):"
    found = plain_record(made, "host")
    assert found.exception.endswith("ZeroDivisionError: division by zero")
    assert found.stack == "Stack (most recent call last):"
    assert plain_record(record(), "host").exception == ""
