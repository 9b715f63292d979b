"""The layout of a worker's memory: the addresses and offsets of its main thread's calls.

Each worker writes its layout into a file.  From the layout and the memory of a rank whose threads
cannot run, `nbdist.agent.stacks` reads the rank's stack.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_OFFSET = 4096
"""Offsets from this number on are refused, because a cell can have written into the file."""


class CallLayout(NamedTuple):
    """The addresses and offsets with which an agent reads the calls of a worker's main thread.

    `thread` is the address of the thread's state, `code_type` and `text_type` are the addresses of
    two types; all other fields are offsets in bytes.  If `holder` is 0, the state has at `call` a
    pointer to the innermost call.  If not, an object to which the state points at `holder` has this
    pointer.  A call has its `code`, the `previous` call and its current `instruction`; `owner` says
    whether the call runs Python code.  The `instructions` are at the end of a code object.  Letters
    of a text begin at `ascii` if all letters are ASCII, and at `other` if not.
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
