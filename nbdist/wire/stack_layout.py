"""The layout of a worker's memory: the addresses and offsets of its main thread's calls.

A worker writes its layout into a file.  With the layout `nbdist.agent.stacks` reads the stack of a
rank whose threads cannot run.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_OFFSET = 4096
"""Offsets from here on are refused: a cell of the user can have written into the file."""


class CallLayout(NamedTuple):
    """The addresses and offsets with which an agent reads the calls of a worker's main thread.

    `thread` is the address of the thread's state, `code_type` and `text_type` are the addresses of
    two types; all other fields are offsets in bytes.  The innermost call is at `call` in the state
    if `holder` is 0; otherwise the state has at `holder` a pointer to an object that has the call.
    A call has its `code`, the `previous` call and its current `instruction`; its `owner` says
    whether it runs Python code.  The `instructions` are at the end of a code object.  Letters of a
    text begin at `ascii` if all of them are ASCII, otherwise at `other`.
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
        """Return the layout as a line of text, which `read` reads."""
        return " ".join(map(str, self)).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> CallLayout:
        """Read a line that `line` returned; raises ValueError if the line is not valid."""
        thread, code_type, text_type, *offsets = map(int, line.split())
        if len(offsets) != len(cls._fields) - 3 or not all(0 <= n < MAX_OFFSET for n in offsets):
            raise ValueError("these are not the offsets of calls")
        return cls(thread, code_type, text_type, *offsets)
