"""The Python stack of a worker that cannot tell it: that C code holds up, or that has crashed.

Of the first the agent reads the calls from its memory, which does not disturb it, as signals and
debuggers do; of the second faulthandler has written them into a file (`nbdist.worker.probe`).

py-spy 0.4.3 was tried instead: what it reads of a process that it does not stop is mixed of two
stacks in 134 of 200 readings, and where it stops one, epoll_wait in C code ends with EINTR.
"""

from __future__ import annotations

import asyncio
import linecache
import os
import random
import re
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from nbdist.values.definitions import function_name
from nbdist.wire.call_layout import CallLayout
from nbdist.wire.places import StackFrame
from nbdist.wire.work import Task

Found = TypeVar("Found")

Call = tuple[str, int, str]
"""File, line and function."""

READ_EVERY = 0.005

LOCKED_TIMEOUT = 1.0
"""Seconds for the kernel to give what it has been asked for: nothing of a process's memory can be
read while it is at work on that, as where it pins much of it for a GPU."""

MOST_IN_FILE = 1 << 20  # of a dump; a worker's user can write into the file too
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

    async def sample(self, pid: int, timeout: float) -> tuple[Call, ...]:
        """Return the main thread's calls, innermost first; none where they keep changing."""
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
                layout = CallLayout.read(file.readline(MOST_IN_FILE))
                while True:
                    with suppress(Torn, OSError):
                        if calls := calls_in(memory.fileno(), layout):
                            return tuple((name, line, function_name(n)) for name, line, n in calls)
                    if time.monotonic() > deadline:
                        break
                    time.sleep(READ_EVERY)
        except (OSError, ValueError):
            pass  # it has ended, may not be read, or a cell has written into the file
        return ()

    def crash_text(self, exit_code: int, task: Task | None) -> str:
        """Return the Python stack of a worker that has crashed, "" of one that ended otherwise."""
        # A child's crash can stand before its own.
        _, start, dump = self._read().rpartition(CRASH)
        if exit_code not in CRASHES or not start:
            return ""
        frames = with_code(own_frames(frames_of(crash_calls(dump), task)))
        calls = [line for frame in frames for line in frame.lines] or ["  no Python code"]
        return "\n".join([f"{start}{dump.splitlines()[0]}, in", *calls, ""])

    def remove(self) -> None:
        """Remove the file: the worker has ended."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> str:
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_IN_FILE))
            return file.read(MOST_IN_FILE).decode(errors="replace")
        return ""


def crash_calls(dump: str) -> tuple[Call, ...]:
    """Return the calls of the thread that has crashed."""
    _, _, calls = dump.partition(CRASHED)
    found = filter(None, map(FRAME.match, calls.splitlines()))
    return tuple(
        (each[1], int(each[2]) if each[2].isdigit() else 0, function_name(each[3]))
        for each in found
    )


def frames_of(calls: tuple[Call, ...], task: Task | None) -> list[StackFrame]:
    """Return the calls with the running cell under its name; other cells' numbers are not known."""
    cell = next((file for file, _, _ in reversed(calls) if CELL_FILE.search(file)), "")
    lines, found = task.source.splitlines() if task else [], []
    for file, line, function in calls:
        code, name = "", "Cell In[?]" if CELL_FILE.search(file) else file
        if file == cell and task:
            code = lines[line - 1].strip() if 0 < line <= len(lines) else ""
            name = f"Cell In[{task.execution_count or '?'}]"
        found.append(StackFrame(name, line, function, code))
    return found


def own_frames(frames: Iterable[StackFrame]) -> list[StackFrame]:
    """Return a cell's calls, else those that no kernel makes, in the reverse order."""
    outwards = list(frames)
    cells = [index for index, frame in enumerate(outwards) if frame.is_cell]
    if cells:
        return outwards[: cells[-1] + 1][::-1]
    kernels = (i for i, frame in enumerate(outwards) if any(part in frame.file for part in OURS))
    return outwards[: next(kernels, len(outwards))][::-1]


def with_code(frames: Iterable[StackFrame]) -> tuple[StackFrame, ...]:
    """Return the frames with the source lines that can be read here."""
    found = []
    for frame in frames:
        if not frame.code and not frame.is_cell:
            linecache.checkcache(frame.file)
            code = linecache.getline(frame.file, frame.line).strip()
            frame = replace(frame, code=code)
        found.append(frame)
    return tuple(found)


# --- calls in the memory of a process -----------------------------------------------------------

TYPE, SIZE, STATE, BYTES = 8, 16, 32, 32
"""Where objects have their type, and texts and bytes their length; what a text's letters are
(PyASCIIObject: unicodeobject.h), and where those of bytes begin."""

KINDS = {1: "B", 2: "H", 4: "I"}  # `struct` codes of a string's letters, by the bytes of each
PYTHONS = 3  # calls with a smaller owner run Python code; others stand for C code between them
READS, LONGEST_WAIT = 32, 1500
"""How often the calls must be found the same, and steps of a loop at most between two times.

Calls that change can be found wrong: some as they were, the others as they have become.  Of a
program that is built for it one reading in two is, and all equally; so the moments are random
(some 0.03 ms), and 32 of them leave one in 4,000,000,000.  Where there is too little time for
the processors a sleep in between would cost more than all readings.
"""

MOST_CALLS, MOST_LETTERS, MOST_BYTES = 2000, 4096, 1 << 20  # bytes: of names, tables of lines

LARGEST_ADDRESS = 1 << 63
COUNT_BIT = 1
"""Python 3.14 sets it in a call's pointer to its code if the call does not own a reference."""

CODE_UNIT = 2  # bytes of an instruction; tables of lines count in these
ONE_LINE, NO_COLUMNS, LONG, NO_LINE = range(10, 13), 13, 14, 15
"""Kinds of entries in such a table (InternalDocs/code_objects.md in CPython's repository)."""


class Torn(Exception):
    """What was read is not what should be there: it was changing, or is nothing of the kind."""


Address = tuple[int, int, int]
"""Of a call in memory, of its code, and of its instruction."""


def calls_in(memory: int, layout: CallLayout) -> tuple[Call, ...]:
    """Return the calls, innermost first, in a process's /proc/PID/mem; raises Torn, OSError."""
    reader = _Reader(memory, layout)
    frames = settled(lambda: [*reader.frames()])
    calls = tuple(reader.call(frame) for frame in frames)
    if frames != [*reader.frames()]:
        raise Torn("the calls have changed")
    return calls


def settled(read: Callable[[], Found]) -> Found:
    """Return what `read` finds at random moments, always the same; Torn where it differs once."""
    found = read()
    for _ in range(READS - 1):
        for _ in range(random.randrange(LONGEST_WAIT)):
            pass
        if read() != found:
            raise Torn("it has changed")
    return found


class _Reader:
    """Reads one stack, each code object once."""

    def __init__(self, memory: int, layout: CallLayout) -> None:
        self._memory = memory
        self._layout = layout
        self._codes: dict[int, tuple[str, str, int, bytes]] = {}

    def frames(self) -> Iterator[Address]:
        """Yield the calls of Python code; of a very deep stack the innermost."""
        at = self._layout
        holder = self._pointer(at.thread + at.holder) if at.holder else at.thread
        address = self._pointer(holder + at.call)
        size = max(at.code, at.previous, at.instruction, at.owner) + 8
        for _ in range(MOST_CALLS):
            if not address:
                return
            call = self._read(address, size)
            if call[at.owner] < PYTHONS:
                code = _word(call, at.code) & ~COUNT_BIT
                yield address, code, _word(call, at.instruction)
            address = _word(call, at.previous)

    def call(self, frame: Address) -> Call:
        """Return a call's file, line and function."""
        _, code, instruction = frame
        if code not in self._codes:
            self._codes[code] = self._code(code)
        file, name, first, table = self._codes[code]
        at = (instruction - code - self._layout.instructions) // CODE_UNIT
        return file, line_at(table, first, at), name

    def _code(self, address: int) -> tuple[str, str, int, bytes]:
        """Read a code object: its file, name, first line and table of lines."""
        at = self._layout
        code = self._read(address, at.instructions)
        if _word(code, TYPE) != at.code_type:
            raise Torn("that is no code")
        file, name = (self._text(_word(code, member)) for member in (at.file, at.name))
        first = int.from_bytes(code[at.first_line : at.first_line + 4], sys.byteorder)
        table = _word(code, at.lines)
        size = self._pointer(table + SIZE)
        return file, name, first, self._read(table + BYTES, size, MOST_BYTES)

    def _text(self, address: int) -> str:
        head = self._read(address, STATE + 8)
        if _word(head, TYPE) != self._layout.text_type:
            raise Torn("that is no text")
        # 2 bits for interned texts, 3 for bytes a letter, 1 for compact ones, 1 for ASCII.
        width, is_ascii = head[STATE] >> 2 & 7, head[STATE] >> 6 & 1
        begin = address + (self._layout.ascii if is_ascii else self._layout.other)
        size = _word(head, SIZE)
        letters = self._read(begin, size * width)
        try:
            return "".join(map(chr, struct.unpack(f"{size}{KINDS[width]}", letters)))
        except (KeyError, ValueError, OverflowError) as error:
            raise Torn("these are no letters") from error

    def _pointer(self, address: int) -> int:
        return _word(self._read(address, 8), 0)

    def _read(self, address: int, size: int, most: int = MOST_LETTERS) -> bytes:
        if not 0 < address < LARGEST_ADDRESS or size > most:
            raise Torn("nothing can be there")
        data = os.pread(self._memory, size, address)
        if len(data) < size:
            raise Torn("there is less than that")
        return data


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], sys.byteorder)


def line_at(table: bytes, first: int, at: int) -> int:
    """Find an instruction's line in the table of its code, 0 where it has none."""
    line, end = first, 0
    # Each entry begins with the only byte of it that has the highest bit.
    begins = [index for index, byte in enumerate(table) if byte & 128]
    for begin, after in pairwise([*begins, len(table)]):
        kind = table[begin] >> 3 & 15
        if kind in ONE_LINE:
            line += kind - ONE_LINE[0]
        elif kind in (NO_COLUMNS, LONG):
            line += _signed(table[begin + 1 : after])
        end += (table[begin] & 7) + 1
        if at < end:
            return 0 if kind == NO_LINE else line
    return 0


def _signed(entry: bytes) -> int:
    """Read the first number of an entry: 6 bits a byte, the lowest first; its lowest is a sign."""
    value = 0
    for place, byte in enumerate(entry):
        value |= (byte & 63) << 6 * place
        if not byte & 64:
            break
    return -(value >> 1) if value & 1 else value >> 1
