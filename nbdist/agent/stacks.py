"""The Python stack of a worker that has crashed, or cannot answer while C code holds its GIL.

Runs in the agent.  A *call* here is a frame of the stack.  If C code holds the GIL, the agent reads
the calls from the worker's memory; unlike a signal or a debugger, this does not disturb the worker.
In a crash, faulthandler writes the calls to a file before the worker ends (`nbdist.worker.probe`).

py-spy 0.4.3 was tried instead.  If py-spy does not stop the process, 134 of 200 readings mix two
stacks.  If py-spy stops the process, epoll_wait in C code fails with EINTR.
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
from nbdist.wire.places import CELL_FILE, StackFrame
from nbdist.wire.stack_layout import CallLayout
from nbdist.wire.work import Task

T = TypeVar("T")

FrameInfo = tuple[str, int, str]
"""A call on the stack: its file, line and function."""

READ_EVERY = 0.005  # seconds between two attempts to read the calls

LOCKED_TIMEOUT = 1.0
"""Seconds by which a reading may exceed its timeout.

Nobody can read a process's memory while the operating system changes the process's mappings, for
example while it pins memory for a GPU."""

MAX_DUMP_BYTES = 1 << 20  # bytes that are read of a dump; user code can write to the file, too
CRASH, CRASHED = "Fatal Python error: ", "Stack (most recent call first):"
DUMP_FRAME = re.compile(r'^  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)$')

CRASHES = frozenset(
    -number
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL)
)
"""The exit codes of a worker whose crash faulthandler has written down, such as -SIGSEGV."""

CELL_RUNNER_FILES = (
    *("/ipykernel/", "/IPython/", "/tornado/", "/traitlets/", "/asyncio/"),
    *("/nbdist/worker/", "/nbdist/agent/", "runpy>", "/runpy.py", "/selectors.py"),
)
"""Texts in the paths of files, in nbdist or a library, whose code runs the cells of a kernel."""


class StackFile:
    """A file that the worker writes, by which the agent finds the worker's calls.

    The first line says at which addresses of the worker's memory the calls are.  If the worker has
    crashed, the calls that faulthandler wrote follow.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._reading: asyncio.Future[tuple[FrameInfo, ...]] | None = None

    async def sample(self, pid: int, timeout: float) -> tuple[FrameInfo, ...]:
        """Read the main thread's calls from the memory of the worker `pid`, innermost first.

        Returns () if they could not be read within `timeout` seconds, or `LOCKED_TIMEOUT` more.
        """
        loop = asyncio.get_running_loop()
        if self._reading is None or self._reading.done():
            deadline = time.monotonic() + timeout
            try:
                self._reading = loop.run_in_executor(None, self._read_calls, pid, deadline)
            except RuntimeError:  # no further thread can be started
                return ()
        await asyncio.wait([self._reading], timeout=timeout + LOCKED_TIMEOUT)
        return self._reading.result() if self._reading.done() else ()

    def _read_calls(self, pid: int, deadline: float) -> tuple[FrameInfo, ...]:
        """Try to read the main thread's calls until the deadline; runs in a thread."""
        try:
            with self._path.open("rb") as file, open(f"/proc/{pid}/mem", "rb", 0) as memory:
                layout = CallLayout.read(file.readline(MAX_DUMP_BYTES))
                while True:
                    with suppress(Torn, OSError):
                        if calls := calls_in(memory.fileno(), layout):
                            return tuple((name, line, function_name(n)) for name, line, n in calls)
                    if time.monotonic() > deadline:
                        break
                    time.sleep(READ_EVERY)
        except (OSError, ValueError):
            pass  # the worker has exited or may not be read, or a cell has changed the file
        return ()

    def crash_text(self, exit_code: int, task: Task | None) -> str:
        """Return the Python stack that a crashed worker has written to the file, as text.

        `task` is the task that the worker ran, None if it ran none.  Returns "" if the worker has
        not crashed, or if there is no stack.
        """
        # Read only the last crash: the file may have a crash of a child process before it.
        _, start, dump = self._read().rpartition(CRASH)
        if exit_code not in CRASHES or not start:
            return ""
        frames = with_code(user_frames(frames_of(crash_calls(dump), task)))
        calls = [line for frame in frames for line in frame.lines] or ["  no Python code"]
        return "\n".join([f"{start}{dump.splitlines()[0]}, in", *calls, ""])

    def remove(self) -> None:
        """Remove the file, after the worker has exited."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> str:
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_DUMP_BYTES))
            return file.read(MAX_DUMP_BYTES).decode(errors="replace")
        return ""


def crash_calls(dump: str) -> tuple[FrameInfo, ...]:
    """Return the calls of the crashed thread, innermost first; `dump` is faulthandler's text."""
    _, _, calls = dump.partition(CRASHED)
    matches = filter(None, map(DUMP_FRAME.match, calls.splitlines()))
    return tuple(
        (match[1], int(match[2]) if match[2].isdigit() else 0, function_name(match[3]))
        for match in matches
    )


def frames_of(calls: tuple[FrameInfo, ...], task: Task | None) -> list[StackFrame]:
    """Return the calls as frames, in the same order.

    A call in the cell of `task`, the running task, gets the file name `Cell In[N]` and its source
    line.  A call in another cell gets `Cell In[?]`.
    """
    cell = next((file for file, _, _ in reversed(calls) if CELL_FILE.search(file)), "")
    lines, frames = task.source.splitlines() if task else [], []
    for file, line, function in calls:
        code, name = "", "Cell In[?]" if CELL_FILE.search(file) else file
        if file == cell and task:
            code = lines[line - 1].strip() if 0 < line <= len(lines) else ""
            name = f"Cell In[{task.execution_count or '?'}]"
        frames.append(StackFrame(name, line, function, code))
    return frames


def user_frames(frames: Iterable[StackFrame]) -> list[StackFrame]:
    """Return the frames of the user's code, outermost first; `frames` begins with the innermost.

    The result begins with the frame of the cell.  If there is no such frame, the result begins with
    the function that nbdist or a library has called to run the user's code (`CELL_RUNNER_FILES`).
    """
    outwards = list(frames)
    cells = [index for index, frame in enumerate(outwards) if frame.is_cell]
    if cells:
        return outwards[: cells[-1] + 1][::-1]
    kernels = (
        i
        for i, frame in enumerate(outwards)
        if any(part in frame.file for part in CELL_RUNNER_FILES)
    )
    return outwards[: next(kernels, len(outwards))][::-1]


def with_code(frames: Iterable[StackFrame]) -> tuple[StackFrame, ...]:
    """Return the frames with the source lines that they lack, if this process can read the file."""
    completed = []
    for frame in frames:
        if not frame.code and not frame.is_cell:
            linecache.checkcache(frame.file)
            code = linecache.getline(frame.file, frame.line).strip()
            frame = replace(frame, code=code)
        completed.append(frame)
    return tuple(completed)


# --- calls in the memory of a process -----------------------------------------------------------

TYPE_OFFSET, SIZE_OFFSET, STATE_OFFSET, BYTES_OFFSET = 8, 16, 32, 32
"""Offsets in objects of CPython.

In this order: of the type, of the length of a string or bytes, of the kind of a string's letters
(PyASCIIObject in unicodeobject.h), and of the first byte of bytes."""

# The format character of `struct` for one letter of a string, by the letter's number of bytes.
LETTER_CODES = {1: "B", 2: "H", 4: "I"}
MIN_C_OWNER = 3  # the field `owner` of a call in CPython has at least this value for C code
MIN_EQUAL_READS, MAX_PAUSE_STEPS = 32, 1500
"""How many readings must agree, and the most steps of a loop that waits between two readings.

If calls change while they are read, a reading can mix old and new calls.  In a program that is made
to cause this, every second reading is mixed, always in the same way.  Random waits (about 0.03 ms)
make the readings independent, so that 32 of them agree on a mixture once in 4,000,000,000 times.
On a machine without free processors, sleeps would take longer than all readings.
"""

MAX_CALLS, MAX_LETTERS = 2000, 4096  # calls of a thread, and bytes of one reading, such as a name
MAX_LINE_TABLE_BYTES = 1 << 20

LARGEST_ADDRESS = 1 << 63
COUNT_BIT = 1
"""A bit of a call's pointer to its code: Python 3.14 sets it if the call owns no reference."""

CODE_UNIT = 2  # bytes of a code unit, in which tables of lines count; an instruction has 1 or more
ONE_LINE, NO_COLUMNS, LONG_ENTRY, NO_LINE = range(10, 13), 13, 14, 15
"""Kinds of entries in a table of lines (InternalDocs/code_objects.md in CPython's repository)."""


class Torn(Exception):
    """Raised if bytes in memory are not of the expected kind, or changed while they were read."""


Address = tuple[int, int, int]
"""The addresses of a call in memory, of its code, and of its instruction."""


def calls_in(memory: int, layout: CallLayout) -> tuple[FrameInfo, ...]:
    """Return the main thread's calls in the memory of a process, innermost first.

    `memory` is a descriptor of /proc/PID/mem.  Raises Torn if the calls change while they are read,
    and OSError.
    """
    reader = _Reader(memory, layout)
    frames = read_stable(lambda: [*reader.frames()])
    calls = tuple(reader.call(frame) for frame in frames)
    if frames != [*reader.frames()]:
        raise Torn("the calls have changed")
    return calls


def read_stable(read: Callable[[], T]) -> T:
    """Call `read` `MIN_EQUAL_READS` times at random moments, and return the result.

    Raises Torn if two results differ.
    """
    result = read()
    for _ in range(MIN_EQUAL_READS - 1):
        for _ in range(random.randrange(MAX_PAUSE_STEPS)):
            pass
        if read() != result:
            raise Torn("it has changed")
    return result


class _Reader:
    """Reads one stack from a process's memory, and each code object in it only once."""

    def __init__(self, memory: int, layout: CallLayout) -> None:
        self._memory = memory
        self._layout = layout
        self._codes: dict[int, tuple[str, str, int, bytes]] = {}

    def frames(self) -> Iterator[Address]:
        """Yield the calls of Python code, innermost first, at most `MAX_CALLS`."""
        layout = self._layout
        holder = self._pointer(layout.thread + layout.holder) if layout.holder else layout.thread
        address = self._pointer(holder + layout.call)
        size = max(layout.code, layout.previous, layout.instruction, layout.owner) + 8
        for _ in range(MAX_CALLS):
            if not address:
                return
            call = self._read(address, size)
            if call[layout.owner] < MIN_C_OWNER:
                code = _word(call, layout.code) & ~COUNT_BIT
                yield address, code, _word(call, layout.instruction)
            address = _word(call, layout.previous)

    def call(self, frame: Address) -> FrameInfo:
        _, code, instruction = frame
        if code not in self._codes:
            self._codes[code] = self._read_code(code)
        file, name, first, table = self._codes[code]
        unit = (instruction - code - self._layout.instructions) // CODE_UNIT
        return file, line_at(table, first, unit), name

    def _read_code(self, address: int) -> tuple[str, str, int, bytes]:
        """Read a code object: its file, name, first line and table of lines."""
        layout = self._layout
        code = self._read(address, layout.instructions)
        if _word(code, TYPE_OFFSET) != layout.code_type:
            raise Torn("that is no code")
        file, name = (self._read_text(_word(code, member)) for member in (layout.file, layout.name))
        first = int.from_bytes(code[layout.first_line : layout.first_line + 4], sys.byteorder)
        table = _word(code, layout.lines)
        size = self._pointer(table + SIZE_OFFSET)
        return file, name, first, self._read(table + BYTES_OFFSET, size, MAX_LINE_TABLE_BYTES)

    def _read_text(self, address: int) -> str:
        head = self._read(address, STATE_OFFSET + 8)
        if _word(head, TYPE_OFFSET) != self._layout.text_type:
            raise Torn("that is no text")
        # Bits: 2 for interning, 3 for the bytes of a letter, 1 for a compact string, 1 for ASCII.
        width, is_ascii = head[STATE_OFFSET] >> 2 & 7, head[STATE_OFFSET] >> 6 & 1
        start = address + (self._layout.ascii if is_ascii else self._layout.other)
        size = _word(head, SIZE_OFFSET)
        letters = self._read(start, size * width)
        try:
            return "".join(map(chr, struct.unpack(f"{size}{LETTER_CODES[width]}", letters)))
        except (KeyError, ValueError, OverflowError) as error:
            raise Torn("these are no letters") from error

    def _pointer(self, address: int) -> int:
        return _word(self._read(address, 8), 0)

    def _read(self, address: int, size: int, limit: int = MAX_LETTERS) -> bytes:
        if not 0 < address < LARGEST_ADDRESS or size > limit:
            raise Torn("nothing can be there")
        data = os.pread(self._memory, size, address)
        if len(data) < size:
            raise Torn("there is less than that")
        return data


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], sys.byteorder)


def line_at(table: bytes, first: int, unit: int) -> int:
    """Return the line of an instruction, from the line table of its code; 0 if it has no line.

    `first` is the first line of the code, `unit` the index of the instruction in code units.
    """
    line, end = first, 0
    # The highest bit is set only in the first byte of each entry.
    begins = [index for index, byte in enumerate(table) if byte & 128]
    for begin, after in pairwise([*begins, len(table)]):
        kind = table[begin] >> 3 & 15
        if kind in ONE_LINE:
            line += kind - ONE_LINE[0]
        elif kind in (NO_COLUMNS, LONG_ENTRY):
            line += _read_signed(table[begin + 1 : after])
        end += (table[begin] & 7) + 1
        if unit < end:
            return 0 if kind == NO_LINE else line
    return 0


def _read_signed(entry: bytes) -> int:
    """Return the first number in `entry`, an entry of a line table without its first byte.

    Each byte holds 6 bits of the number; the first byte holds the lowest bits.  The lowest bit of
    the number is its sign.
    """
    value = 0
    for place, byte in enumerate(entry):
        value |= (byte & 63) << 6 * place
        if not byte & 64:
            break
    return -(value >> 1) if value & 1 else value >> 1
