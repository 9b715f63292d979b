"""The Python calls of a thread, read from the memory of its process, which notices nothing.

Runs in the agent, for a worker that cannot answer.  Neither is it stopped nor does it run
anything: CPython's own handlers of signals, which walk calls that may be changing at that
moment, end with SIGSEGV now and then, and a debugger that stops it interrupts what it waits
for.  Here what has been torn is read again.

The kernel lets a process read its descendants' memory, as workers are the agent's, also those
that a fork server has left behind; unless ptrace(2) is forbidden altogether.
"""

from __future__ import annotations

import os
import random
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from nbdist.wire.views import CallLayout

Found = TypeVar("Found")

Call = tuple[str, int, str]
"""File, line and function."""

TYPE, SIZE, STATE, BYTES = 8, 16, 32, 32
"""Where objects have their type, and texts and bytes their length; what a text's letters are
(PyASCIIObject: unicodeobject.h), and where those of bytes begin."""

KINDS = {1: "B", 2: "H", 4: "I"}
"""How letters of so many bytes are read."""

PYTHONS = 3
"""Calls with a smaller owner run Python code; others stand for C code between them."""

READS, LONGEST_WAIT = 32, 1500
"""How often the calls must be found the same, and steps of a loop at most between two times.

Calls that change can be found wrong: some as they were, the others as they have become.  Of a
program that is built for it one reading in two is, and all equally; so the moments are random
(some 0.03 ms), and 32 of them leave one in 4,000,000,000.  Where there is too little time for
the processors a sleep in between would cost more than all readings.
"""

MOST_CALLS, MOST_LETTERS, MOST_BYTES = 2000, 4096, 1 << 20
"""Of a thread; bytes of a name and of a table of lines."""

LARGEST_ADDRESS = 1 << 63

CODE_UNIT = 2
"""Bytes of an instruction; tables of lines count in these."""

ONE_LINE, NO_COLUMNS, LONG, NO_LINE = range(10, 13), 13, 14, 15
"""Kinds of entries in such a table (InternalDocs/code_objects.md in CPython's repository)."""


class Torn(Exception):
    """What was read is not what should be there: it was changing, or is nothing of the kind."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """A call as it is in memory."""

    address: int
    code: int
    instruction: int


def calls_in(memory: int, layout: CallLayout) -> tuple[Call, ...]:
    """Return the calls from the innermost out, read from a descriptor of /proc/PID/mem.

    Raises Torn where they change meanwhile, and OSError.
    """
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

    def frames(self) -> Iterator[_Frame]:
        """Give the calls of Python code; of a very deep stack the innermost."""
        at = self._layout
        holder = self._pointer(at.thread + at.holder) if at.holder else at.thread
        address = self._pointer(holder + at.call)
        size = max(at.code, at.previous, at.instruction, at.owner) + 8
        for _ in range(MOST_CALLS):
            if not address:
                return
            call = self._read(address, size)
            if call[at.owner] < PYTHONS:
                yield _Frame(address, _word(call, at.code), _word(call, at.instruction))
            address = _word(call, at.previous)

    def call(self, frame: _Frame) -> Call:
        """Describe a call."""
        if frame.code not in self._codes:
            self._codes[frame.code] = self._code(frame.code)
        file, name, first, table = self._codes[frame.code]
        at = (frame.instruction - frame.code - self._layout.instructions) // CODE_UNIT
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
