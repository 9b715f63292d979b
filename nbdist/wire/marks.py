"""Marks in a worker's stdout, by which its agent finds where rich output belongs.

A worker writes text straight to its stdout, a pipe that the agent reads, so whatever it
wrote before it died is there, and C code, child processes and Python share one order.
Figures and errors travel over iopub.  Before it sends one, the worker writes a mark
with its number; the agent puts the message where its mark is.

A mark is an APC escape sequence (ECMA-48 8.3.2), which terminals ignore, with a token
that no user's output can hold by chance.  It is shorter than PIPE_BUF, so the kernel
writes it in one piece.
"""

from __future__ import annotations

import re
from typing import Literal, cast

Mark = int | Literal["up", "ready", "stdout", "stderr"]
"""A message's number; or `up`: the worker's kernel is bound; `ready`: and its group formed; or
the stream that the text which follows belongs to."""


def mark(token: str, value: Mark) -> bytes:
    """Make the bytes to write to stdout."""
    return f"\x1b_{token};{value}\x1b\\".encode()


def mark_pattern(token: str) -> re.Pattern[bytes]:
    """Make a pattern that finds marks; group 1 is the value."""
    return re.compile(rb"\x1b_" + token.encode() + rb";([a-z]{1,6}|[0-9]{1,18})\x1b\\")


LONGEST_MARK = 80
"""Bytes; what is held back at most of a read that ends in the middle of a mark."""


def cut_off_pattern(token: str) -> re.Pattern[bytes]:
    """Make a pattern that finds the beginning of a mark at the end of a read."""
    start = f"_{token};"
    begun = "".join(f"(?:{letter}" for letter in start)
    return re.compile(rf"\x1b{begun}[a-z0-9]{{0,18}}\x1b?{')?' * len(start)}\Z".encode())


def mark_value(text: bytes) -> Mark:
    """Read the value of a mark from what `mark_pattern` found."""
    word = text.decode()
    return int(word) if word.isdigit() else cast("Mark", word)
