"""What faulthandler has written of a worker, and how to have it write.

Runs in the agent; reads the file that `nbdist.worker.dumping` has made.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from nbdist.wire.cells import function_name
from nbdist.wire.looks import STACK_SIGNAL, StackFrame

TGKILL = 234 if os.uname().machine == "x86_64" else 131
"""Its number: glibc has a function for it only since 2.30."""

READ_EVERY = 0.005

THREAD = re.compile(r"^(?:Current t|T)hread 0x(\w+).*:$")
CRASH, CRASHED = "Fatal Python error: ", "Stack (most recent call first):"
FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
ENDS = (" in _run_module_as_main\n", "  ...\n")
"""A worker's outermost call, or a stack too deep to be written in full."""

CELL_FILE = re.compile(r"/ipykernel_\d+/\d+\.py$")

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
        """The main thread's calls now, as file, line and function, from the innermost out.

        Nothing where the worker's C code does not write them within `timeout` seconds.
        """
        async with self._busy:
            try:
                main, control = self._read_head()
                if not _catches(pid):  # it would end the process
                    return ()
                os.truncate(self._path, len(self._head))
                # One that sleeps would be woken up: C code need not take that well.  One that
                # runs would change what is read, unless it is the one that writes.
                _signal(pid, control if thread_state(pid) in "SD" else pid)
            except (OSError, ValueError):
                return ()  # it has ended
            return calls_of(await self._read_all(timeout), main)

    def read_crash(self) -> str:
        """What was written of the worker's own crash; a child's can stand before it."""
        _, start, text = self._read().rpartition(CRASH)
        return start + text

    def remove(self) -> None:
        """The worker is no more."""
        self._path.unlink(missing_ok=True)

    def _read_head(self) -> tuple[str, int]:
        """faulthandler's name of the main thread, and the number of the control thread."""
        if not self._head:
            with self._path.open("rb") as file:
                self._head = file.readline()
        main, control = self._head.split()
        return main.decode(), int(control)

    async def _read_all(self, timeout: float) -> str:
        """The stacks once they are complete, or what there is of them."""
        text, deadline = "", time.monotonic() + timeout
        while time.monotonic() < deadline:
            if (text := self._read()).endswith(ENDS):
                break
            await asyncio.sleep(READ_EVERY)
        return text

    def _read(self) -> str:
        with suppress(FileNotFoundError):
            return self._path.read_bytes()[len(self._head) :].decode(errors="replace")
        return ""


def calls_of(text: str, thread: str) -> tuple[tuple[str, int, str], ...]:
    """The calls of a thread, or of the one that `CRASHED`: file, line, function."""
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
    """The calls with the running cell under its name; other cells' numbers are not known."""
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


def thread_state(pid: int) -> str:
    """`R`: the main thread runs, `S` sleeps, `T` is stopped ... (proc(5)); `X`: it has ended."""
    try:
        with open(f"/proc/{pid}/task/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(") ")[2][:1]
    except OSError:
        return "X"


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP, or a debugger, has stopped the process."""
    return thread_state(pid) in "Tt"


def _catches(pid: int) -> bool:
    """Whether the process has a handler for the signal."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
        caught = next((line for line in status if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)


def _signal(pid: int, tid: int) -> None:
    """Signal one thread."""
    if _libc.syscall(TGKILL, pid, tid, int(STACK_SIGNAL)):
        raise OSError(ctypes.get_errno(), "tgkill")
