"""What the agent tells of a worker that may be deaf: it asks, and looks for itself."""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nbdist.node.dumps import frames_of, thread_state
from nbdist.wire.looks import Stack, StackFrame
from nbdist.wire.messages import Place

if TYPE_CHECKING:
    from nbdist.node.rank import Rank

STACK_TIMEOUT = 0.3
"""Seconds in which a worker answers unless C code holds the GIL."""

OURS = (
    *("/ipykernel/", "/IPython/", "/tornado/", "/traitlets/", "/asyncio/"),
    *("/nbdist/worker/", "/nbdist/node/", "runpy>", "/runpy.py", "/selectors.py"),
)
"""Parts of the files that run cells, and wait for the next one."""

NO_ANSWER = "it does not answer, and its stack cannot be read"
AWAITS_NOTHING = "no line of the cell runs: names are bound, or values brought back"


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP, or a debugger, has stopped the process."""
    return thread_state(pid) in "Tt"


async def stack_of(rank: Rank) -> Stack:
    """Where it is and how it came there, however deaf it is."""
    state = rank.state
    if state in ("starting", "dead"):
        return Stack(rank.rank, rank.pid, state, Place())
    if is_stopped(rank.pid):
        return Stack(rank.rank, rank.pid, state, Place(is_stopped=True))
    seen = await rank.ask({"do": "stack"}, STACK_TIMEOUT)
    if seen is not None:
        place = Place(**seen["place"])
        frames = [StackFrame(*fields) for fields in seen["frames"]]
    elif is_stopped(rank.pid):
        return Stack(rank.rank, rank.pid, state, Place(is_stopped=True))
    else:
        cell = rank.cell
        number, source = (cell.execution_count, cell.source) if cell else (None, "")
        frames = frames_of(await rank.stacks.sample(rank.pid), number, source)
        line = next((frame.line for frame in reversed(frames) if frame.is_cell), 0)
        place = Place(line=line, is_deaf=True)
        if not frames:
            return Stack(rank.rank, rank.pid, state, place, problem=NO_ANSWER)
    own = own_frames(frames)
    problem = AWAITS_NOTHING if state == "busy" and not own else ""
    return Stack(rank.rank, rank.pid, state, place, with_code(own), problem)


def own_frames(frames: Iterable[StackFrame]) -> list[StackFrame]:
    """From the outermost call of a cell in, else those that no kernel makes; outermost first.

    `frames` come from the innermost out.
    """
    outwards = list(frames)
    cells = [index for index, frame in enumerate(outwards) if frame.is_cell]
    if cells:
        return outwards[: cells[-1] + 1][::-1]
    kernels = (index for index, frame in enumerate(outwards) if is_kernels(frame))
    return outwards[: next(kernels, len(outwards))][::-1]


def is_kernels(frame: StackFrame) -> bool:
    """Whether the call is one of those that run cells, whatever the cell."""
    return any(part in frame.file for part in OURS)


def with_code(frames: Iterable[StackFrame]) -> tuple[StackFrame, ...]:
    """The frames with the source lines that can be read here."""
    found = []
    for frame in frames:
        code = frame.code
        if not code and not frame.is_cell:
            linecache.checkcache(frame.file)
            code = linecache.getline(frame.file, frame.line).strip()
        found.append(StackFrame(frame.file, frame.line, frame.function, code))
    return tuple(found)
