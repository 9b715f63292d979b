"""Tests of `nbdist.worker.probe`: the calls of the main thread, read by another thread."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from linecache import getline

import pytest
from torch.distributed import distributed_c10d, rendezvous

from nbdist.agent.stacks import FrameInfo, Torn, calls_in
from nbdist.wire.stack_layout import CallLayout
from nbdist.worker.probe import OFFSETS, call_layout, frames_of, is_calling, is_handling_stop
from tests.waiting import wait_until


@contextmanager
def running(code: str, file: str = "<cell>") -> Iterator[tuple[int, CallLayout]]:
    """Run code in a thread until `wait()` is called; yield the thread's ident and call layout."""
    waits, over = threading.Event(), threading.Event()
    layouts: list[CallLayout | None] = []

    def wait(*_: object) -> None:
        waits.set()
        over.wait(10)

    def run() -> None:
        layouts.append(call_layout())
        exec(compile(code, file, "exec"), {"wait": wait})

    thread = threading.Thread(target=run)
    thread.start()
    waits.wait(10)
    assert thread.ident
    assert layouts[0]
    try:
        yield thread.ident, layouts[0]
    finally:
        over.set()
        thread.join(10)


def test_only_functions_of_collectives_connect_ranks() -> None:
    """A collective's own function, and no other code of torch, counts as connecting ranks."""
    calling = distributed_c10d.all_reduce, distributed_c10d._coalescing_manager
    others = distributed_c10d._object_to_tensor, rendezvous
    found = [is_calling(inspect.unwrap(each).__code__) for each in (*calling, *others)]
    assert found == [True, True, False, False]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collections do not begin there")
def test_no_garbage_is_collected_as_a_frame_is_taken() -> None:
    """No garbage is collected while a frame object is made: the frame could end meanwhile."""
    thresholds, began = gc.get_threshold(), set()

    def note(phase: str, _: object) -> None:
        if phase == "start":
            at = sys._getframe(1)
            began.add((at.f_code.co_name, getline(at.f_code.co_filename, at.f_lineno).strip()))

    with running("def f():\n    wait()\nf()") as (ident, _):
        gc.callbacks.append(note)
        gc.set_threshold(1)
        try:
            assert len(list(frames_of(ident))) > 5
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(note)
    assert began
    # This call makes the frame object; once the object exists, a collection does no harm.
    assert ("call_without_gc", "return get()") not in began
    assert "<lambda>" not in {name for name, _ in began}
    assert gc.isenabled()


def test_a_thread_that_handles_stop_is_recognized() -> None:
    """Code in an `except` block of KeyboardInterrupt handles Stop, also in a block inside of it."""
    stopped = "try:\n    raise KeyboardInterrupt\nexcept BaseException:\n    "
    for code, handles in [
        (f"{stopped}wait()", True),
        (f"{stopped}try:\n        1 / 0\n    except Exception:\n        wait()", True),
        ("try:\n    1 / 0\nexcept Exception:\n    wait()", False),
        (f"{stopped}pass\nwait()", False),
    ]:
        with running(code) as (ident, _):
            assert is_handling_stop(ident) == handles, code


IN_C_CODE = """
def outer():
    yield from inner(
        1
    )

def inner(number):
    sorted([number], key=lambda _: [wait() for _ in (1,)])
    yield

list(outer())
"""
"""Waits in a function that C code calls, inside of a generator."""


@pytest.mark.parametrize("file", ["cell.py", "é.py", "☃.py", "🙂.py", "\udc80.py", "x" * 1000])
def test_calls_read_from_memory_are_pythons_own(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that are read from memory are those that Python knows, whatever the file's name.

    An unknown version of Python has no layout.
    """

    def in_memory() -> tuple[FrameInfo, ...]:
        with open("/proc/self/mem", "rb", 0) as memory, suppress(Torn, OSError):
            return calls_in(memory.fileno(), layout)
        return ()

    def known() -> tuple[FrameInfo, ...]:
        calls = traceback.walk_stack(sys._current_frames()[ident])
        return tuple((each.f_code.co_filename, line, each.f_code.co_name) for each, line in calls)

    with running(IN_C_CODE, file) as (ident, layout):
        wait_until(lambda: in_memory() == known(), "they are those that Python knows")
        assert (file, 3, "outer") in known()
    monkeypatch.delitem(OFFSETS, (sys.version_info[0], sys.version_info[1]))
    assert call_layout() is None
