"""Tests of `nbdist.agent.stacks`: stacks of real processes, which cannot tell them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nbdist.agent.stacks import StackFile, crash_calls, frames_of, own_frames, with_code
from nbdist.wire.views import CallLayout, StackFrame
from tests.waiting import SOON

PROGRAM = """
import os, re, signal, sys, threading, time
from nbdist.worker.probe import write_stacks_to

def inner(end):
    {deed}

signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
write_stacks_to(sys.argv[1])
inner(print("ready", flush=True))
"""

"""Handles no signal, in any thread: to look at it need not run anything there, and so cannot
crash it."""

HOLDS_THE_GIL = 're.match("(a+)+$", "a" * 60 + "b")'


@contextmanager
def program(folder: Path, deed: str) -> Iterator[tuple[subprocess.Popen[bytes], StackFile]]:
    """A process that does this once it has said that it is ready, and the file of its stacks."""
    (folder / "program.py").write_text(PROGRAM.format(deed=deed))
    stacks = folder / "stacks"
    with subprocess.Popen(
        [sys.executable, "-m", "program", str(stacks)], cwd=folder, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process, StackFile(str(stacks))
        finally:
            process.kill()


@pytest.mark.world
@pytest.mark.parametrize("deed", ["time.sleep(1000)", HOLDS_THE_GIL])
def test_sample(tmp_path: Path, deed: str) -> None:
    """The main thread's calls, innermost first, also where C code holds the GIL."""
    file = str(tmp_path / "program.py")

    async def twice(stacks: StackFile, pid: int) -> list[tuple[tuple[str, int, str], ...]]:
        while (file, 6, "inner") not in await stacks.sample(pid, SOON):
            pass  # it has said that it is ready, and not come to it yet
        return [await stacks.sample(pid, SOON) for _ in range(2)]

    with program(tmp_path, deed) as (process, stacks):
        for calls in asyncio.run(twice(stacks, process.pid)):
            found = [call for call in calls if call[0] == file]
            assert found == [(file, 6, "inner"), (file, 11, "<module>")]
            assert calls[-1][2] == "_run_module_as_main"


@pytest.mark.world
def test_a_process_without_python(tmp_path: Path) -> None:
    """It has no calls there; and neither has one that is no more."""
    stacks = tmp_path / "stacks"
    stacks.write_bytes(CallLayout(1 << 46, 1 << 45, 1 << 44, *range(13)).line())
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert asyncio.run(StackFile(str(stacks)).sample(process.pid, 0.1)) == ()
        assert process.poll() is None
        process.kill()
    assert asyncio.run(StackFile(str(stacks)).sample(process.pid, SOON)) == ()


@pytest.mark.world
def test_crash(tmp_path: Path) -> None:
    """What it was, and the calls with their code; nothing where it did not crash."""
    with program(tmp_path, "os.abort()") as (process, stacks):
        assert process.wait(SOON) == -signal.SIGABRT
    assert stacks.crash_text(-signal.SIGKILL, None) == ""
    first, *calls = stacks.crash_text(-signal.SIGABRT, None).splitlines()
    assert first == "Fatal Python error: Aborted, in"
    assert calls[-2:] == [f"  {tmp_path}/program.py, line 6, in inner", "    os.abort()"]


def test_no_file(tmp_path: Path) -> None:
    """A worker that wrote none has no stack."""
    stacks = StackFile(str(tmp_path / "stacks"))
    assert asyncio.run(stacks.sample(1, SOON)) == ()
    assert stacks.crash_text(-signal.SIGABRT, None) == ""
    stacks.remove()


def test_crash_calls() -> None:
    """Those that stand under the line for it; a line that cannot be known is 0."""
    calls = '  File "a.py", line 1 in f\n  File "b.py", line ??? in g\n'
    assert crash_calls(f"Aborted\n\nStack (most recent call first):\n{calls}") == (
        ("a.py", 1, "f"),
        ("b.py", 0, "g"),
    )
    assert crash_calls(calls) == ()


def test_frames_of_a_cell() -> None:
    """From the cell in, outermost first, with the lines of the cell's own source."""
    kernel = ("/site-packages/IPython/core/interactiveshell.py", 9, "run_code")
    cell, other = "/tmp/ipykernel_7/1.py", "/tmp/ipykernel_7/2.py"
    calls = ((__file__, 1, "g"), (other, 4, "h"), (cell, 2, "<module>"), kernel)
    assert with_code(own_frames(frames_of(calls, 5, "x = 1\n  f()"))) == (
        StackFrame("Cell In[5]", 2, "<module>", "f()"),
        StackFrame("Cell In[?]", 4, "h"),
        StackFrame(__file__, 1, "g", Path(__file__).read_text().splitlines()[0]),
    )
    assert own_frames(frames_of((calls[0], kernel), None, "")) == [StackFrame(__file__, 1, "g")]
