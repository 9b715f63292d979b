"""Tests of `nbdist.worker.probe`: what it says of this Python is so."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from nbdist.agent.stacks import Call, Torn, calls_in
from nbdist.wire.views import CallLayout
from nbdist.worker.probe import OFFSETS, call_layout
from tests.waiting import wait_until

SOURCE = """
def outer():
    yield from inner(
        1
    )

def inner(number):
    sorted([number], key=lambda _: [wait() for _ in (1,)])
    yield

list(outer())
"""
"""Waits in what C code has called, in a generator."""


@contextmanager
def waiting(file: str) -> Iterator[tuple[CallLayout, int]]:
    """A thread that runs the source under this file's name; where its calls are."""
    over, found = threading.Lock(), []

    def run() -> None:
        found.append(call_layout())
        exec(compile(SOURCE, file, "exec"), {"wait": over.acquire})

    thread = threading.Thread(target=run, daemon=True)
    with over:
        thread.start()
        wait_until(lambda: bool(found), "it has begun")
        (layout,) = found
        assert layout is not None
        yield layout, thread.ident or 0
    thread.join()


def known(ident: int) -> tuple[Call, ...]:
    """The calls of a thread as Python itself tells them."""
    calls = traceback.walk_stack(sys._current_frames()[ident])
    return tuple((each.f_code.co_filename, line, each.f_code.co_name) for each, line in calls)


def in_memory(layout: CallLayout) -> tuple[Call, ...]:
    """The calls as they are read from this process's memory."""
    with open("/proc/self/mem", "rb", 0) as memory, suppress(Torn, OSError):
        return calls_in(memory.fileno(), layout)
    return ()


@pytest.mark.parametrize("file", ["cell.py", "é.py", "☃.py", "🙂.py", "\udc80.py", "x" * 1000])
def test_a_threads_calls_are_where_it_says(file: str) -> None:
    """They are those that Python itself knows, whatever letters their names have."""
    with waiting(file) as (layout, ident):
        wait_until(lambda: (file, 3, "outer") in in_memory(layout), "it waits")
        assert in_memory(layout) == known(ident)


def test_another_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is not known nothing is said."""
    monkeypatch.delitem(OFFSETS, (sys.version_info[0], sys.version_info[1]))
    assert call_layout() is None
