"""Records when pages connect to the notebook's kernel, to tell the user about missed output.

Runs in the notebook's process.  A page that is opened or reloaded while a cell runs misses what
the cell has shown before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from IPython.core.interactiveshell import InteractiveShell

from nbdist.notebook.cell_text import execution_count, page_of
from nbdist.world.task_run import TaskRun

KIND = "kernel_info_request"  # the message that a page sends when it connects
# A message that is handled within this time after a cell's end counts as sent during the cell.
QUEUED_SECONDS = 0.5


class Connected(NamedTuple):
    """When a page connected: the time (`time.monotonic`), and the number of the cell that ran then.

    The number is 0 if no cell ran.
    """

    at: float
    cell: int


class Pages:
    """Records when each page has connected to the kernel.

    While a cell runs, a page's first message waits in the kernel.  So a page whose first message is
    handled right after the end of a cell counts as connected during that cell.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._connected: dict[str, Connected] = {}
        self._cell_ended = float("-inf")

    def listen(self, kernel: Any) -> Callable[[], None]:
        """Record each page that connects to this kernel, until the returned function is called."""
        handlers = getattr(kernel, "shell_handlers", {})
        original, is_on = handlers.get(KIND), True
        if original is None:  # in a terminal, or in a kernel that is no ipykernel
            return lambda: None

        def handle(stream: Any, ident: Any, request: dict[str, Any]) -> Any:
            if is_on:
                self.record(page_of(request))
            return original(stream, ident, request)

        def undo() -> None:
            nonlocal is_on
            is_on = False
            if handlers.get(KIND) is handle:
                handlers[KIND] = original

        handlers[KIND] = handle
        return undo

    def record(self, page: str) -> None:
        """Record that a page has connected now; later requests of the same page do not count."""
        now = time.monotonic()
        waited = now - self._cell_ended <= QUEUED_SECONDS
        cell = execution_count(self._shell) if waited else 0
        self._connected.setdefault(page, Connected(now, cell))

    def end_cell(self) -> None:
        """Record that a cell has ended now, so that `record` knows which pages connected before."""
        self._cell_ended = time.monotonic()

    def has_missed(self, page: str, running: TaskRun) -> bool:
        """Return True if a page connected while this cell ran, so that it missed output."""
        connected, transcript = self._connected.get(page), running.transcript
        if connected is None or transcript.started is None or connected.at < transcript.started:
            return False
        is_within = connected.at <= transcript.started + transcript.elapsed()
        return is_within or (connected.cell > 0 and connected.cell == running.task.execution_count)
