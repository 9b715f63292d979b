"""Tests of `nbdist.agent.stacks`: stacks of real processes, which notice nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, replace
from pathlib import Path
from types import CodeType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.agent.stacks import READS, Call, Torn, calls_in, line_at, settled
from nbdist.wire.views import LARGEST, CallLayout
from tests.waiting import wait_until

WAITS = "import time\ntime.sleep(1000)"

RUNS = """
import time
def one(n, rests): return one(n - 1, rests) if n else rests and time.sleep(0.02)
def other(n, rests): return other(n - 1, rests) if n else rests and time.sleep(0.02)
while True:
    for rests in [False] * 300 + [True]:
        one(30, rests)
        other(30, rests)
"""
"""Two stacks in turn, in the same memory; no call of the one is in the other."""

TELLS = """
import sys
from nbdist.worker.probe import call_layout
layout = call_layout()
sys.stdout.buffer.write(layout.line())
sys.stdout.flush()
exec(compile({code!r}, "file.py", "exec"))
"""


@contextmanager
def process(code: str) -> Iterator[tuple[int, CallLayout]]:
    """The memory of a process that runs the code, and what it says of its calls."""
    command = [sys.executable, "-c", TELLS.format(code=code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        layout = CallLayout.read(running.stdout.readline())
        try:
            with open(f"/proc/{running.pid}/mem", "rb", 0) as memory:
                yield memory.fileno(), layout
            assert running.poll() is None
        finally:
            running.kill()


@pytest.mark.world
def test_calls_that_change_are_not_mixed() -> None:
    """What is read of a process that runs is what it was at one time, or nothing."""
    seen: list[set[str]] = []
    with process(RUNS) as (memory, layout):
        end = time.monotonic() + 1
        while time.monotonic() < end or {"one"} not in seen or {"other"} not in seen:
            with suppress(Torn, OSError):
                names = {name for _, _, name in calls_in(memory, layout)}
                seen.append(names & {"one", "other"})
    assert {"one", "other"} not in seen


@pytest.mark.parametrize("times", [1, 2, 3, READS - 1])
def test_what_is_found_wrong_in_the_same_way(times: int) -> None:
    """It is taken for nothing: calls may be mixed, and equally so, in some readings in a row."""
    found = iter(["mixed"] * times + ["one"] * READS)
    with pytest.raises(Torn):
        settled(lambda: next(found))
    assert settled(lambda: "one") == "one"


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes(each)


@pytest.mark.parametrize("module", ["asyncio.base_events", "dataclasses", "nbdist.agent.worker"])
def test_lines(module: str) -> None:
    """Each instruction's is the one that Python knows."""
    __import__(module)
    file = Path(sys.modules[module].__file__ or "")
    for code in codes(compile(file.read_text(), file.name, "exec")):
        for start, end, line in code.co_lines():
            for at in {start // 2, end // 2 - 1}:
                assert line_at(code.co_linetable, code.co_firstlineno, at) == (line or 0)


@given(st.binary(max_size=50), st.integers(-9, 99))
def test_any_bytes_are_lines(table: bytes, at: int) -> None:
    """What is read while it changes can be anything."""
    assert isinstance(line_at(table, 1, at), int)


def waits(memory: int, layout: CallLayout) -> tuple[Call, ...]:
    """The calls of such a process; none before it waits."""
    with suppress(Torn, OSError):
        if (calls := calls_in(memory, layout))[:1] == (("file.py", 2, "<module>"),):
            return calls
    return ()


@pytest.mark.world
def test_any_numbers_are_offsets() -> None:
    """Wrong ones lead nowhere, and nothing that is read does harm."""
    with process(WAITS) as (memory, layout):
        wait_until(lambda: waits(memory, layout), "it waits")
        for index, name in enumerate(CallLayout.__slots__):
            for wrong in (0, 8, 200, LARGEST - 1, astuple(layout)[index] + 8, 1 << 62, 1 << 80):
                with suppress(Torn, OSError):
                    calls_in(memory, replace(layout, **{name: wrong}))
        assert waits(memory, layout)


@pytest.mark.world
def test_a_process_that_has_ended() -> None:
    """Nothing of it can be read any more."""
    with process(WAITS) as (memory, layout):
        kept = os.dup(memory)
    try:
        with pytest.raises(Torn):
            calls_in(kept, layout)
    finally:
        os.close(kept)
