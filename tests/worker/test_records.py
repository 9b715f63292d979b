"""Tests of `nbdist.worker.publishing`: which records are sent, and what of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from nbdist.worker.publishing import MOST, Records, plain


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


def test_what_cannot_be_formatted() -> None:
    """The record is sent all the same, and says what went wrong."""
    made = record(logging.INFO, "%d steps", "many")
    try:
        raise Odd
    except Odd as error:
        made.exc_info = (Odd, error, error.__traceback__)
    found = plain(made, "host", 0)
    assert found.message == "'%d steps' (TypeError while it was formatted)"
    assert "Odd" in found.exception


def test_exceptions_and_stacks_travel_as_text() -> None:
    """What they are made of stays with the rank."""
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError as error:
        made = record(logging.ERROR)
        made.exc_info = (ZeroDivisionError, error, error.__traceback__)
    made.stack_info = "Stack (most recent call last):"
    found = plain(made, "host", 0)
    assert found.exception.endswith("ZeroDivisionError: division by zero")
    assert found.stack == "Stack (most recent call last):"
    assert plain(record(), "host", 0).exception == ""
