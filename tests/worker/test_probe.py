"""Tests of `nbdist.worker.probe`: where the main thread is, asked from another one."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from linecache import getline
from pathlib import Path

import pytest

from nbdist.agent.stacks import Call, Torn, calls_in
from nbdist.wire.views import CallLayout, StackFrame
from nbdist.worker.probe import OFFSETS, awaited, call_layout, described, frames_of, handles_stop
from tests.waiting import wait_until


@contextmanager
def running(code: str) -> Iterator[int]:
    """While another thread is in `wait()`, which the code calls; its identifier."""
    waits, over = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        over.wait(10)

    def run() -> int:
        exec(compile(code, "<cell>", "exec"), {"wait": wait})
        return threading.get_ident()

    with ThreadPoolExecutor() as pool:
        done = pool.submit(run)
        waits.wait(10)
        (ident,) = {t.ident for t in threading.enumerate() if t.name.startswith("ThreadPool")}
        try:
            yield ident or 0
        finally:
            over.set()
            done.result(10)


def test_frames_of_a_thread() -> None:
    """From the innermost out; a cell's are named as the notebook names it, with their line."""
    with running("def f():\n    wait()\n\n\nf()") as ident:
        frames = [f for f in frames_of(ident) if f.f_code.co_filename == "<cell>"]
        found = tuple(described(frame, {"<cell>": 3}) for frame in frames)
    assert found == (StackFrame("Cell In[3]", 2, "f"), StackFrame("Cell In[3]", 5, "<module>"))
    assert list(frames_of(0)) == []


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collections do not begin there")
def test_no_garbage_is_collected_as_a_frame_is_taken() -> None:
    """A destructor would let the thread go on, and the frame's memory be something else."""
    thresholds, began = gc.get_threshold(), set()

    def note(phase: str, _: object) -> None:
        if phase == "start":
            at = sys._getframe(1)
            began.add((at.f_code.co_name, getline(at.f_code.co_filename, at.f_lineno).strip()))

    with running("def f():\n    wait()\nf()") as ident:
        gc.callbacks.append(note)
        gc.set_threshold(1)
        try:
            assert len(list(frames_of(ident))) > 5
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(note)
    assert began
    # Where one of another thread is made; afterwards it is owned, and a collection does no harm.
    assert ("_uncollected", "return get()") not in began
    assert "<lambda>" not in {name for name, _ in began}
    assert gc.isenabled()


def test_source_lines_are_of_cells_only() -> None:
    """The agent reads those of files without this process's GIL."""
    frame = sys._getframe()
    found = described(frame, {})
    assert (found.file, found.line > 0) == (__file__, True)
    assert (found.function, found.code) == (frame.f_code.co_name, "")


async def in_cell(code: str) -> list[str]:
    """The functions that are found while a task like IPython's awaits what the code says."""
    names: dict[str, object] = {"asyncio": asyncio}
    exec(compile(code, "<cell>", "exec"), names)

    async def run_cell_async() -> None:
        await names["cell"]()  # type: ignore[operator]

    task = asyncio.get_running_loop().create_task(run_cell_async())
    await asyncio.sleep(0)
    frames = awaited(asyncio.get_running_loop(), {"<cell>": 1})
    task.cancel()
    return [frame.f_code.co_name for frame in frames]


def test_a_cell_that_awaits() -> None:
    """Its frames are on no thread's stack, but in the chain of what it awaits."""
    source = "async def inner(): await asyncio.sleep(9)\nasync def cell(): await inner()"
    found = asyncio.run(in_cell(source))
    assert found[-3:] == ["inner", "cell", "run_cell_async"]
    assert asyncio.run(in_cell("async def cell(): pass")) == []


def test_cleaning_up_after_stop() -> None:
    """In an `except` or `finally` that KeyboardInterrupt has led to, also through another one."""
    stopped = "try:\n    raise KeyboardInterrupt\nexcept BaseException:\n    "
    for code, handles in [
        (f"{stopped}wait()", True),
        (f"{stopped}try:\n        1 / 0\n    except Exception:\n        wait()", True),
        ("try:\n    1 / 0\nexcept Exception:\n    wait()", False),
        (f"{stopped}pass\nwait()", False),
    ]:
        with running(code) as ident:
            assert handles_stop(ident) == handles, code


CRASHES = """
import sys
from nbdist.worker.probe import write_stacks_to
write_stacks_to(sys.argv[1])
def stuck():
    print("ready", flush=True)
    sys.stdin.read()
stuck()
"""


@pytest.mark.world
def test_the_stack_of_a_crash(tmp_path: Path) -> None:
    """It is appended to the file, whose first line says where calls are."""
    path = tmp_path / "rank0.stack"
    command = [sys.executable, "-c", CRASHES, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        head = path.read_bytes()
        assert CallLayout.read(head).line() == head
        os.kill(process.pid, signal.SIGSEGV)
        process.wait(10)
    found = path.read_text()
    assert found.startswith(head.decode())
    assert found.count("in stuck") == 1
    assert "Fatal Python error: Segmentation fault" in found


WAITS = """
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
        exec(compile(WAITS, file, "exec"), {"wait": over.acquire})

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
