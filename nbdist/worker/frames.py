"""The worker's stack in words that can be sent; called on the control thread."""

from __future__ import annotations

import asyncio
import linecache
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from nbdist.wire.cells import function_name

RUNS_CELLS = "run_cell_async"
"""IPython's coroutine in whose chain of awaits the cell is."""


def described(frames: Sequence[FrameType], cells: Mapping[str, int]) -> list[list[Any]]:
    """The fields of `StackFrame` of each frame; `cells` has the number of each cell's file.

    Source lines of cells only: others the agent can read too, without the GIL of this process.
    """
    return [list(_described(frame, cells)) for frame in frames]


def _described(frame: FrameType, cells: Mapping[str, int]) -> tuple[str, int, str, str]:
    file, line = frame.f_code.co_filename, frame.f_lineno or 0
    name = function_name(frame.f_code.co_name)
    if file not in cells:
        return file, line, name, ""
    code = linecache.getline(file, line).strip()
    return f"Cell In[{cells[file]}]", line, name, code


def awaited(loop: asyncio.AbstractEventLoop, cells: Mapping[str, int]) -> list[FrameType]:
    """The frames of a cell that awaits something, from the innermost out; none if none does.

    They are on no thread's stack.
    """
    for task in asyncio.all_tasks(loop):
        frames = list(_awaits(task.get_coro()))
        names = {frame.f_code.co_name for frame in frames}
        if RUNS_CELLS in names and any(frame.f_code.co_filename in cells for frame in frames):
            return frames[::-1]
    return []


def _awaits(coroutine: Any) -> Iterator[FrameType]:
    """From the outermost in."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame
        is_native = hasattr(coroutine, "cr_await")
        coroutine = coroutine.cr_await if is_native else coroutine.gi_yieldfrom
