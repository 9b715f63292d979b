"""The Python stack of a worker that cannot tell it: that C code holds up, or that has crashed.

Runs in the agent; reads the worker's memory, and the file that `nbdist.worker.probe` has
made, into which faulthandler writes when it crashes.
"""

from __future__ import annotations

import asyncio
import linecache
import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from nbdist.agent.calls_in_memory import Call, Torn, calls_in
from nbdist.values.definitions import function_name
from nbdist.wire.views import CallLayout, StackFrame
from nbdist.wire.work import Task

READ_EVERY = 0.005

LOCKED_TIMEOUT = 1.0
"""Seconds for the kernel to give what it has been asked for: nothing of a process's memory can be
read while it is at work on that, as where it pins much of it for a GPU."""

MOST_BYTES = 1 << 20
"""Of a dump; a worker's user can write into the file too."""

CRASH, CRASHED = "Fatal Python error: ", "Stack (most recent call first):"
FRAME = re.compile(r'^  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)$')

CRASHES = frozenset(
    -number
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL)
)
"""Exit codes of processes of which faulthandler has written."""

CELL_FILE = re.compile(r"/ipykernel_\d+/\d+\.py$")

OURS = (
    *("/ipykernel/", "/IPython/", "/tornado/", "/traitlets/", "/asyncio/"),
    *("/nbdist/worker/", "/nbdist/agent/", "runpy>", "/runpy.py", "/selectors.py"),
)
"""Parts of the files that run cells, and wait for the next one."""


class StackFile:
    """The file of one worker, which leads to its calls too."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._reading: asyncio.Future[tuple[Call, ...]] | None = None

    def __repr__(self) -> str:
        return f"<StackFile {self._path}>"

    async def sample(self, pid: int, timeout: float) -> tuple[Call, ...]:
        """Return the main thread's calls now, as file, line and function, from the innermost out.

        Nothing where they cannot be read, or change all the time for `timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        if self._reading is None or self._reading.done():
            deadline = time.monotonic() + timeout
            try:
                self._reading = loop.run_in_executor(None, self._calls, pid, deadline)
            except RuntimeError:  # no further thread can be started
                return ()
        await asyncio.wait([self._reading], timeout=timeout + LOCKED_TIMEOUT)
        return self._reading.result() if self._reading.done() else ()

    def _calls(self, pid: int, deadline: float) -> tuple[Call, ...]:
        """Read them as often as it takes, in a thread of its own."""
        try:
            with self._path.open("rb") as file, open(f"/proc/{pid}/mem", "rb", 0) as memory:
                layout = CallLayout.read(file.readline(MOST_BYTES))
                while not (calls := _whole(memory.fileno(), layout)):
                    if time.monotonic() > deadline:
                        return ()
                    time.sleep(READ_EVERY)
        except (OSError, ValueError):
            return ()  # it has ended, may not be read, or a cell has written into the file
        return tuple((file, line, function_name(name)) for file, line, name in calls)

    def crash_text(self, exit_code: int, task: Task | None) -> str:
        """Return the Python stack of a worker that has crashed, "" of one that ended otherwise."""
        # A child's crash can stand before its own.
        _, start, dump = self._read().rpartition(CRASH)
        if exit_code not in CRASHES or not start:
            return ""
        number, source = (task.execution_count, task.source) if task else (None, "")
        frames = with_code(own_frames(frames_of(crash_calls(dump), number, source)))
        calls = [line for frame in frames for line in frame.lines] or ["  no Python code"]
        return "\n".join([f"{start}{dump.splitlines()[0]}, in", *calls, ""])

    def remove(self) -> None:
        """Remove the file: the worker has ended."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> str:
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_BYTES))
            return file.read(MOST_BYTES).decode(errors="replace")
        return ""


def _whole(memory: int, layout: CallLayout) -> tuple[Call, ...]:
    """Read calls once; none where they were changing."""
    with suppress(Torn, OSError):
        return calls_in(memory, layout)
    return ()


def crash_calls(dump: str) -> tuple[Call, ...]:
    """Return the calls of the thread that has crashed."""
    _, _, calls = dump.partition(CRASHED)
    found = filter(None, map(FRAME.match, calls.splitlines()))
    return tuple(
        (each[1], int(each[2]) if each[2].isdigit() else 0, function_name(each[3]))
        for each in found
    )


def frames_of(calls: tuple[Call, ...], number: int | None, source: str) -> list[StackFrame]:
    """Return the calls with the running cell under its name; other cells' numbers are not known."""
    cell = next((file for file, _, _ in reversed(calls) if CELL_FILE.search(file)), "")
    return [_frame(call, cell, number, source.splitlines()) for call in calls]


def _frame(call: Call, cell: str, number: int | None, lines: list[str]) -> StackFrame:
    file, line, function = call
    if file == cell:
        code = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        return StackFrame(f"Cell In[{number or '?'}]", line, function, code)
    if CELL_FILE.search(file):
        return StackFrame("Cell In[?]", line, function)
    return StackFrame(file, line, function)


def own_frames(frames: Iterable[StackFrame]) -> list[StackFrame]:
    """Return a cell's calls, else those that no kernel makes; outermost first.

    `frames` come from the innermost out.
    """
    outwards = list(frames)
    cells = [index for index, frame in enumerate(outwards) if frame.is_cell]
    if cells:
        return outwards[: cells[-1] + 1][::-1]
    kernels = (index for index, frame in enumerate(outwards) if is_kernels(frame))
    return outwards[: next(kernels, len(outwards))][::-1]


def is_kernels(frame: StackFrame) -> bool:
    """Say whether the call is one of those that run cells, whatever the cell."""
    return any(part in frame.file for part in OURS)


def with_code(frames: Iterable[StackFrame]) -> tuple[StackFrame, ...]:
    """Return the frames with the source lines that can be read here."""
    found = []
    for frame in frames:
        code = frame.code
        if not code and not frame.is_cell:
            linecache.checkcache(frame.file)
            code = linecache.getline(frame.file, frame.line).strip()
        found.append(StackFrame(frame.file, frame.line, frame.function, code))
    return tuple(found)
