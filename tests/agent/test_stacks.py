"""Tests of `nbdist.agent.stacks`: the calls of real processes, read from outside."""

from __future__ import annotations

import asyncio
import signal
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

from nbdist.agent import stacks
from nbdist.agent.stacks import FrameInfo, StackFile, Torn, calls_in
from nbdist.wire.places import StackFrame
from nbdist.wire.stack_layout import MAX_OFFSET, CallLayout
from nbdist.wire.work import CellCode, Task
from tests.waiting import SOON, wait_until

PROGRAM = """
import ctypes, os, select, signal, sys, threading, time
from nbdist.worker.probe import write_stacks_to

def waits():
    os.read(0, 1)

def holds_the_gil():
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)

def runs():
    while not select.select([0], [], [], 0)[0]:
        for rests in [False] * 300 + [True]:
            one(30, rests)
            other(30, rests)
    os.read(0, 1)

def one(n, rests): return one(n - 1, rests) if n else rests and time.sleep(0.02)
def other(n, rests): return other(n - 1, rests) if n else rests and time.sleep(0.02)

def crashes():
    os.abort()

signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGABRT})
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
write_stacks_to(sys.argv[1])
print("ready", flush=True)
for deed in (waits, holds_the_gil, runs, crashes):
    deed()
"""
"""Runs its functions in turn, each until a byte comes on stdin; its import of torch takes seconds.

No thread handles a signal: a read of the stacks runs no code in the process, and cannot crash it.
The function `runs` has two stacks in turn, in the same memory; the stacks share none of its calls.
"""


@contextmanager
def program(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run the program, and yield its process and its stack file once it is ready."""
    (folder / "program.py").write_text(PROGRAM)
    file = folder / "stacks"
    command = [sys.executable, "-m", "program", str(file)]
    with subprocess.Popen(command, cwd=folder, stdin=-1, stdout=-1, bufsize=0) as process:
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process, file
        finally:
            process.kill()


async def sampled(file: Path, pid: int, innermost: FrameInfo) -> list[tuple[FrameInfo, ...]]:
    """Return two samples of a process, taken once `innermost` is among its calls."""
    stacks = StackFile(str(file))
    while innermost not in await stacks.sample(pid, SOON):
        pass
    return [await stacks.sample(pid, SOON) for _ in range(2)]


def check_any_offsets(memory: int, layout: CallLayout) -> None:
    """Check that wrong offsets raise an expected error at most, and do the process no harm."""

    def waits() -> tuple[FrameInfo, ...]:
        with suppress(Torn, OSError):
            return tuple(each for each in calls_in(memory, layout) if each[1:] == (6, "waits"))
        return ()

    wait_until(waits, "it waits")
    for index, name in enumerate(CallLayout.__slots__):
        for wrong in (0, 8, 200, MAX_OFFSET - 1, astuple(layout)[index] + 8, 1 << 62, 1 << 80):
            with suppress(Torn, OSError):
                calls_in(memory, replace(layout, **{name: wrong}))
    assert waits()


def check_not_mixed(memory: int, layout: CallLayout) -> None:
    """Check that the calls of a running process are never a mixture of its two stacks."""
    seen: list[set[str]] = []
    end = time.monotonic() + 1
    while time.monotonic() < end or {"one"} not in seen or {"other"} not in seen:
        with suppress(Torn, OSError):
            names = {name for _, _, name in calls_in(memory, layout)}
            seen.append(names & {"one", "other"})
    assert {"one", "other"} not in seen


@pytest.mark.world
def test_calls_of_the_main_thread_are_read(tmp_path: Path) -> None:
    """The main thread's calls are read, innermost first, also while C code holds the GIL.

    Of an ended process no calls are read. If the process has crashed, its stack file has a text
    with the calls and their code.
    """
    place = str(tmp_path / "program.py")
    with program(tmp_path) as (process, file), open(f"/proc/{process.pid}/mem", "rb", 0) as mem:
        memory, layout = mem.fileno(), CallLayout.read(file.read_bytes().partition(b"\n")[0])
        for line, name in ((6, "waits"), (9, "holds_the_gil")):
            for calls in asyncio.run(sampled(file, process.pid, (place, line, name))):
                found = [call for call in calls if call[0] == place]
                assert found == [(place, line, name), (place, 29, "<module>")]
                assert calls[-1][2] == "_run_module_as_main"
            if name == "waits":
                check_any_offsets(memory, layout)
            process.stdin.write(b"x")
        check_not_mixed(memory, layout)
        process.stdin.write(b"x")
        assert process.wait(SOON) == -signal.SIGABRT
        with pytest.raises(Torn):
            calls_in(memory, layout)
    found = StackFile(str(file))
    assert found.crash_text(-signal.SIGKILL, None) == ""
    first, *calls = found.crash_text(-signal.SIGABRT, None).splitlines()
    assert first == "Fatal Python error: Aborted, in"
    assert calls[-2:] == [f"  {place}, line 22, in crashes", "    os.abort()"]
    found.remove()
    found.remove()
    assert not file.exists()


@pytest.mark.world
def test_a_process_without_python_has_no_calls(tmp_path: Path) -> None:
    """Processes without Python, without a stack file, or that have ended have no calls."""
    file = tmp_path / "stacks"
    found = StackFile(str(file))
    assert asyncio.run(found.sample(1, SOON)) == ()
    assert found.crash_text(-signal.SIGABRT, None) == ""
    file.write_bytes(CallLayout(1 << 46, 1 << 45, 1 << 44, *range(13)).line())
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert asyncio.run(found.sample(process.pid, 0.1)) == ()
        assert process.poll() is None
        process.kill()
    assert asyncio.run(found.sample(process.pid, SOON)) == ()


def test_calls_of_a_crash_are_parsed() -> None:
    """Calls are read below the headline of a crash; a line number that is unknown becomes 0."""
    text = '  File "a.py", line 1 in f\n  File "b.py", line ??? in g\n'
    told = stacks.crash_calls(f"Aborted\n\nStack (most recent call first):\n{text}")
    assert (told, stacks.crash_calls(text)) == ((("a.py", 1, "f"), ("b.py", 0, "g")), ())


def test_frames_begin_at_the_cell() -> None:
    """Frames begin at the cell, outermost first, with the lines of the cell's own source."""
    kernel = ("/site-packages/IPython/core/interactiveshell.py", 9, "run_code")
    cell, other = "/tmp/ipykernel_7/1.py", "/tmp/ipykernel_7/2.py"
    calls = ((__file__, 1, "g"), (other, 4, "h"), (cell, 2, "<module>"), kernel)
    task = Task("a", (0,), CellCode("x = 1\n  f()"), execution_count=5)
    frames = stacks.user_frames(stacks.frames_of(calls, task))
    assert stacks.with_code(frames) == (
        StackFrame("Cell In[5]", 2, "<module>", "f()"),
        StackFrame("Cell In[?]", 4, "h"),
        StackFrame(__file__, 1, "g", Path(__file__).read_text().splitlines()[0]),
    )
    frames = stacks.user_frames(stacks.frames_of((calls[0], kernel), None))
    assert frames == [StackFrame(__file__, 1, "g")]


# --- memory that changes while it is read -------------------------------------------------


@pytest.mark.parametrize("times", [1, 2, 3, stacks.MIN_EQUAL_READS - 1])
def test_a_few_equal_readings_are_not_trusted(times: int) -> None:
    """A reading counts only after MIN_EQUAL_READS equal ones, as a few may be mixed alike."""
    found = iter(["mixed"] * times + ["one"] * stacks.MIN_EQUAL_READS)
    with pytest.raises(Torn):
        stacks.read_stable(lambda: next(found))
    assert stacks.read_stable(lambda: "one") == "one"


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all code objects in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes(each)


@pytest.mark.parametrize("module", ["asyncio.base_events", "nbdist.agent.worker"])
def test_line_numbers_are_those_of_python(module: str) -> None:
    """`line_at` finds the line that Python itself gives for each instruction."""
    __import__(module)
    file = Path(sys.modules[module].__file__ or "")
    for code in codes(compile(file.read_text(), file.name, "exec")):
        for start, end, line in code.co_lines():
            for at in {start // 2, end // 2 - 1}:
                found = stacks.line_at(code.co_linetable, code.co_firstlineno, at)
                assert found == (line or 0)


@given(st.binary(max_size=50), st.integers(-9, 99))
def test_any_bytes_give_a_line_number(table: bytes, at: int) -> None:
    """A table that changes while it is read can have any bytes, and `line_at` accepts all."""
    assert isinstance(stacks.line_at(table, 1, at), int)
