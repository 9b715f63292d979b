"""Counts what a magic shows below its cell; on IPython's own thread.

A cell's outputs are cleared only if they are those of one panel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class OutputCount:
    """The number of displays that nbdist has made, and of writes to stdout and stderr."""

    def __init__(self) -> None:
        self.number = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count from 0 on while a magic runs, also what other threads of the notebook write."""
        self.number = 0
        with ExitStack() as stack:
            for stream in (sys.stdout, sys.stderr):
                self._count_writes(stream, stack)
            yield

    def _count_writes(self, stream: Any, stack: ExitStack) -> None:
        # As IPython does that keeps a cell's outputs: handlers of `logging` hold the stream itself.
        write: Callable[..., Any] = stream.write

        def counted(text: str) -> Any:
            self.number += bool(text)
            return write(text)

        if "write" in vars(stream):
            stack.callback(setattr, stream, "write", write)
        else:
            stack.callback(delattr, stream, "write")
        stream.write = counted


OUTPUTS = OutputCount()
"""Of the notebook's kernel, which runs one cell at a time."""
