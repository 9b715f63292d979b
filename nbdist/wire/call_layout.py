"""Where a worker's memory has the calls of its main thread.

A worker writes it into a file for its agent.  With it `nbdist.agent.stacks` reads the stack of a
rank whose threads cannot run.
"""

from __future__ import annotations

from typing import NamedTuple

LARGEST = 4096
"""No offset is as large; what is read may come from a cell that wrote into the file."""


class CallLayout(NamedTuple):
    """Where a worker's memory has the calls of its main thread, which its agent reads there.

    Addresses of the `thread`'s state and of two types; all else are offsets in bytes.  The state
    has the innermost `call`, or, unless `holder` is 0, a pointer there to what has it.  A call has
    its `code`, the `previous` one, the `instruction` that it is at, and by its `owner` whether it
    is one of Python code.  A code object ends with its `instructions`.  The letters of an `ascii`
    text begin elsewhere than those of any `other`.
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
        """Write it as one line of text."""
        return " ".join(map(str, self)).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> CallLayout:
        """Read such a line; raises ValueError where it is none."""
        thread, code_type, text_type, *offsets = map(int, line.split())
        if len(offsets) != len(cls._fields) - 3 or not all(0 <= n < LARGEST for n in offsets):
            raise ValueError("these are not the offsets of calls")
        return cls(thread, code_type, text_type, *offsets)
