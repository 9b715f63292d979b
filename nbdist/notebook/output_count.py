"""Counts the outputs below a notebook cell while a magic runs, on IPython's main thread.

`PanelDisplay` clears a cell's output only if the count shows that all of the output is the panel's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class OutputCount:
    """The number of displays for panels, and below panels, plus writes to stdout and stderr."""

    def __init__(self) -> None:
        self.number = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count outputs from 0 in this context, including writes by other threads."""
        self.number = 0
        with ExitStack() as stack:
            for stream in (sys.stdout, sys.stderr):
                self._count_writes(stream, stack)
            yield

    def _count_writes(self, stream: Any, stack: ExitStack) -> None:
        # Wrap the method and not the stream, since handlers of `logging` hold the stream itself.
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
"""The only count in the notebook's process, because its main thread runs one cell at a time."""
