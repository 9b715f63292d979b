"""Stacks of this worker's threads: sampled from the control thread, or written in a crash.

Where C code holds the GIL, the agent reads them (`nbdist.agent.calls_in_memory`).
"""

from __future__ import annotations

import asyncio
import faulthandler
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any

from nbdist.values.definitions import function_name
from nbdist.wire.places import StackFrame
from nbdist.worker.compat.cpython import call_layout, innermost_frames, outer_frame

RUNS_CELLS = "run_cell_async"
"""IPython's coroutine in whose chain of awaits the cell is."""

_open: list[IO[bytes]] = []
"""faulthandler has the descriptor alone; it must not be closed."""


def frames_of(ident: int) -> Iterator[FrameType]:
    """Give the frames of a thread, from the innermost out."""
    frame = innermost_frames().get(ident)
    while frame is not None:
        yield frame
        frame = outer_frame(frame)


def awaited(loop: asyncio.AbstractEventLoop, cells: Mapping[str, int]) -> list[FrameType]:
    """Give the frames of a cell that awaits something, from the innermost out; none if none does.

    They are on no thread's stack.
    """
    for task in asyncio.all_tasks(loop):
        frames = list(_awaits(task.get_coro()))
        names = {frame.f_code.co_name for frame in frames}
        if RUNS_CELLS in names and any(frame.f_code.co_filename in cells for frame in frames):
            return frames[::-1]
    return []


def _awaits(coroutine: Any) -> Iterator[FrameType]:
    """Give its frames, from the outermost in."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame
        is_native = hasattr(coroutine, "cr_await")
        coroutine = coroutine.cr_await if is_native else coroutine.gi_yieldfrom


def described(frames: Sequence[FrameType], cells: Mapping[str, int]) -> tuple[StackFrame, ...]:
    """Describe each frame; `cells` has the number of each cell's file.

    Source lines of cells only: others the agent can read too, without the GIL of this process.
    """
    return tuple(_described(frame, cells) for frame in frames)


def _described(frame: FrameType, cells: Mapping[str, int]) -> StackFrame:
    file, line = frame.f_code.co_filename, frame.f_lineno or 0
    name = function_name(frame.f_code.co_name)
    if file not in cells:
        return StackFrame(file, line, name)
    code = linecache.getline(file, line).strip()
    return StackFrame(f"Cell In[{cells[file]}]", line, name, code)


def handles_stop(ident: int) -> bool:
    """Say whether the thread is in an `except` or `finally` that KeyboardInterrupt has led to."""
    found: Any = sys._current_exceptions().get(ident)
    error: BaseException | None = found[1] if isinstance(found, tuple) else found  # Python 3.11
    while error is not None:
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            return True
        error = error.__context__
    return False


# --- without the GIL --------------------------------------------------------------------------


def write_stacks_to(path: str) -> None:
    """Have crashes append stacks to a new file.

    Its first line says where the calls of this thread are, which is the main one; it is empty
    where that is not known.
    """
    file = open(path, "ab", buffering=0)  # noqa: SIM115 (for as long as the process lives)
    _open.append(file)
    layout = call_layout()
    file.write(layout.line() if layout is not None else b"\n")
    keep_crashes()


def keep_crashes() -> None:
    """Have crashes go there again: torch's `@record`, for one, has them go to stderr."""
    if _open:
        faulthandler.enable(file=_open[-1], all_threads=False)
