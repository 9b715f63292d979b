"""Tracebacks of collectives that were broken open, in little time.

IPython reads and colours the source of every frame, 50 to 100 ms a rank; where one rank has
failed, all others would do so at once, for what the notebook then shows in one line.
"""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Any

from nbdist.wire.outputs import CONNECTION_LOST
from nbdist.worker import outdated


def shorten_lost_connections(shell: Any) -> None:
    """Have the shell format these errors as lines of files only.

    Where torch only says that it does not know a group, it says why.
    """
    whole = shell.InteractiveTB.structured_traceback

    def structured_traceback(
        kind: Any, error: Any, tb: TracebackType | None = None, *args: Any, **options: Any
    ) -> Any:
        if said := outdated.remedy(error, tb):
            error.args = (said,)
        if not CONNECTION_LOST.search(str(error)):
            return whole(kind, error, tb, *args, **options)
        cells = getattr(shell.compile, "_filename_map", {})
        lines = [
            f"Cell In[{cells[frame.f_code.co_filename]}], line {number}"
            if frame.f_code.co_filename in cells
            else f"File {frame.f_code.co_filename}:{number}, in {frame.f_code.co_name}"
            for frame, number in traceback.walk_tb(tb)
        ]
        return [*lines, f"{kind.__name__}: {error}"]

    shell.InteractiveTB.structured_traceback = structured_traceback
