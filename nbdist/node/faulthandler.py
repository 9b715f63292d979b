"""What faulthandler has written of a worker, and how to have it write.

Runs in the agent; reads the file that `nbdist.worker.threads` has made.
"""

from __future__ import annotations

import asyncio
import ctypes
import linecache
import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from nbdist.node.proc import catches, thread_state
from nbdist.wire.cell_sources import function_name
from nbdist.wire.places import STACK_SIGNAL, StackFrame
from nbdist.wire.task import Task

TGKILL = 234 if os.uname().machine == "x86_64" else 131
"""Its number: glibc has a function for it only since 2.30."""

READ_EVERY = 0.005

MOST_BYTES = 1 << 20
"""Of a dump; a worker's user can write into the file too."""

THREAD = re.compile(r"^(?:Current t|T)hread 0x(\w+).*:$")
CRASH, CRASHED = "Fatal Python error: ", "Stack (most recent call first):"
FRAME = re.compile(r'^  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)$')
ENDS = (" in _run_module_as_main\n", "  ...\n")
"""A worker's outermost call, or a stack too deep to be written in full."""

CRASHES = frozenset(
    -number
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL)
)
"""Exit codes of processes of which faulthandler has written."""

CELL_FILE = re.compile(r"/ipykernel_\d+/\d+\.py$")

OURS = (
    *("/ipykernel/", "/IPython/", "/tornado/", "/traitlets/", "/asyncio/"),
    *("/nbdist/worker/", "/nbdist/node/", "runpy>", "/runpy.py", "/selectors.py"),
)
"""Parts of the files that run cells, and wait for the next one."""

_libc = ctypes.CDLL(None, use_errno=True)


class StackFile:
    """The file of one worker."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._head = b""
        self._busy = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<StackFile {self._path}>"

    async def sample(self, pid: int, timeout: float) -> tuple[tuple[str, int, str], ...]:
        """Return the main thread's calls now, as file, line and function, from the innermost out.

        Nothing where the worker's C code does not write them within `timeout` seconds.
        """
        async with self._busy:
            try:
                main, control = self._read_head()
                if not catches(pid, STACK_SIGNAL):  # it would end the process
                    return ()
                os.truncate(self._path, len(self._head))
                # One that sleeps would be woken up: C code need not take that well.  One that
                # runs would change what is read, unless it is the one that writes.
                _signal(pid, control if thread_state(pid) in "SD" else pid)
            except (OSError, ValueError, ctypes.ArgumentError):
                return ()  # it has ended, or a cell has written into the file
            return calls_of(await self._read_all(timeout), main)

    def crash_text(self, exit_code: int, task: Task | None) -> str:
        """Return the Python stack of a worker that has crashed, "" of one that ended otherwise."""
        # A child's crash can stand before its own.
        _, start, dump = self._read().rpartition(CRASH)
        if exit_code not in CRASHES or not start:
            return ""
        number, source = (task.execution_count, task.source) if task else (None, "")
        frames = with_code(own_frames(frames_of(calls_of(dump, CRASHED), number, source)))
        calls = [line for frame in frames for line in frame.lines] or ["  no Python code"]
        return "\n".join([f"{start}{dump.splitlines()[0]}, in", *calls, ""])

    def remove(self) -> None:
        """Remove the file: the worker has ended."""
        self._path.unlink(missing_ok=True)

    def _read_head(self) -> tuple[str, int]:
        """Read faulthandler's name of the main thread, and the number of the control thread."""
        if not self._head:
            with self._path.open("rb") as file:
                self._head = file.readline(MOST_BYTES)
        main, control = self._head.split()
        return main.decode(), int(control)

    async def _read_all(self, timeout: float) -> str:
        """Read the stacks once they are complete, or what there is of them."""
        text, deadline = "", time.monotonic() + timeout
        while time.monotonic() < deadline:
            if (text := self._read()).endswith(ENDS):
                break
            await asyncio.sleep(READ_EVERY)
        return text

    def _read(self) -> str:
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(max(len(self._head), file.seek(0, os.SEEK_END) - MOST_BYTES))
            return file.read(MOST_BYTES).decode(errors="replace")
        return ""


def calls_of(text: str, thread: str) -> tuple[tuple[str, int, str], ...]:
    """Return the calls of a thread, or of the one that `CRASHED`: file, line, function."""
    calls: list[tuple[str, int, str]] = []
    current = ""
    for line in text.splitlines():
        if line == CRASHED:
            current = CRASHED
        elif found := THREAD.match(line):
            current = found[1].lstrip("0")
        elif (found := FRAME.match(line)) and current == thread:
            number = int(found[2]) if found[2].isdigit() else 0
            calls.append((found[1], number, function_name(found[3])))
    return tuple(calls)


def frames_of(
    calls: tuple[tuple[str, int, str], ...], number: int | None, source: str
) -> list[StackFrame]:
    """Return the calls with the running cell under its name; other cells' numbers are not known."""
    cell = next((file for file, _, _ in reversed(calls) if CELL_FILE.search(file)), "")
    return [_frame(call, cell, number, source.splitlines()) for call in calls]


def _frame(
    call: tuple[str, int, str], cell: str, number: int | None, lines: list[str]
) -> StackFrame:
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


def _signal(pid: int, tid: int) -> None:
    """Signal one thread."""
    if _libc.syscall(TGKILL, pid, tid, int(STACK_SIGNAL)):
        raise OSError(ctypes.get_errno(), "tgkill")
