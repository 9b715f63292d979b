"""The layout of a worker's memory: the addresses and offsets of its main thread's calls.

Each worker writes its layout into a file.  If a worker cannot answer, because C code holds the GIL
or because the process is stopped, `nbdist.agent.stacks` reads the stack in the worker's memory.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_OFFSET = 4096
"""Larger or equal offsets are refused: user code can have changed the file with the layout."""


class CallLayout(NamedTuple):
    """The addresses and offsets with which an agent reads the calls of a worker's main thread.

    `thread` is the address of the thread's state in CPython.  `code_type` and `text_type` are the
    addresses of the types of code objects and texts, by which the agent recognizes such objects.
    All other fields are offsets in bytes, in structs of CPython:

    - In the thread's state, `call` leads to the pointer to the innermost call.  But if `holder` is
      not 0, the state points at `holder` to another struct, and `call` is an offset in that struct.
    - In a call, `code` and `previous` lead to the pointers to its code object and to the call that
      made it, `instruction` to its current instruction, and `owner` tells whether it runs Python.
    - In a code object, `file`, `name`, `first_line` and `lines` lead to the file's name, the
      function's name, the first line and the table of lines; bytecode begins at `instructions`.
    - In a text, letters begin at `ascii` if all are ASCII, and at `other` if not.
    """

    thread: int
    code_type: int
    text_type: int
    holder: int
    call: int
    code: int
    previous: int
    instruction: int
    owner: int
    file: int
    name: int
    first_line: int
    lines: int
    instructions: int
    ascii: int
    other: int

    def line(self) -> bytes:
        """Return the layout as a line of text, from which `read` makes it again."""
        return " ".join(map(str, self)).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> CallLayout:
        """Return the layout from a line that `line` made; raises ValueError for an invalid line."""
        thread, code_type, text_type, *offsets = map(int, line.split())
        if len(offsets) != len(cls._fields) - 3 or not all(0 <= n < MAX_OFFSET for n in offsets):
            raise ValueError("these are not the offsets of calls")
        return cls(thread, code_type, text_type, *offsets)
