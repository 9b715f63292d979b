"""What the agent tells of a worker that may be deaf: it asks, and looks for itself."""

from __future__ import annotations

import asyncio
import linecache
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbdist.node.dumps import frames_of, is_stopped
from nbdist.node.memory import MemoryGauge
from nbdist.wire.looks import Collective, Stack, StackFrame
from nbdist.wire.messages import Place, WorkerStatus

if TYPE_CHECKING:
    from nbdist.node.rank import Rank

STACK_TIMEOUT = 0.3
"""Seconds in which a worker answers unless C code holds the GIL."""

OURS = (
    *("/ipykernel/", "/IPython/", "/tornado/", "/traitlets/", "/asyncio/"),
    *("/nbdist/worker/", "/nbdist/node/", "runpy>", "/runpy.py", "/selectors.py"),
)
"""Parts of the files that run cells, and wait for the next one."""

STATUS_TIMEOUT = 0.12
LAST_TIMEOUT = 2.0
BRIEF_SAMPLE_TIMEOUT = 0.04
SAMPLE_TIMEOUT = 0.4

IN_TORCH = "/torch/distributed/"

NO_ANSWER = "it does not answer, and its stack cannot be read"
NO_LINE = "no line of the cell runs: names are bound, or values brought back"


async def stack_of(rank: Rank) -> Stack:
    """Where it is and how it came there, however deaf it is."""
    state = rank.state
    if state in ("starting", "dead"):
        return Stack(rank.rank, rank.pid, state, Place())
    seen = await _ask(rank, {"do": "stack"}, STACK_TIMEOUT)
    if isinstance(seen, Place):
        return Stack(rank.rank, rank.pid, state, seen)
    if seen is not None:
        place = Place(**seen["place"])
        frames = [StackFrame(*fields) for fields in seen["frames"]]
    else:
        place, frames = await _of_deaf(rank, SAMPLE_TIMEOUT)
        if not frames:
            return Stack(rank.rank, rank.pid, state, place, problem=NO_ANSWER)
    own = own_frames(frames)
    problem = NO_LINE if state == "busy" and not own else ""
    return Stack(rank.rank, rank.pid, state, place, with_code(own), problem)


async def status_of(ranks: Sequence[Rank], gauge: MemoryGauge) -> tuple[WorkerStatus, ...]:
    """What `%dist_status` shows of them.

    Takes `STATUS_TIMEOUT` and `BRIEF_SAMPLE_TIMEOUT` at most, and what time the agent has to
    wait for a processor.
    """
    memory, rows = await asyncio.gather(
        gauge.read([rank.pid for rank in ranks], STATUS_TIMEOUT),
        asyncio.gather(*map(_status_of, ranks)),
    )
    return tuple(replace(row, memory=memory[row.pid]) for row in rows)


async def _status_of(rank: Rank) -> WorkerStatus:
    """All but the memory."""
    found = rank.status()
    if found.state in ("starting", "dead"):
        return found
    if found.state == "idle":
        collective = await _last_collective(rank)
        # Whoever answers is neither stopped nor deaf.
        place = Place() if _has_answered(rank) else await _of_silent(rank)
    else:
        place, collective = await asyncio.gather(_place(rank), _last_collective(rank))
    lines = rank.cell.source.splitlines() if rank.cell else []
    code = lines[place.line - 1] if 0 < place.line <= len(lines) else ""
    code = place.code or code
    shown = place if found.state == "busy" or place.is_deaf or place.is_stopped else None
    return replace(found, place=shown, code=code, collective=collective)


async def _ask(rank: Rank, request: Mapping[str, Any], timeout: float) -> Any:
    """The rank's answer; a `Place` if its process is stopped, None if it is deaf."""
    if not is_stopped(rank.pid):
        answer = await rank.ask(request, timeout)
        if answer is not None or not is_stopped(rank.pid):
            return answer
    return Place(is_stopped=True)


async def _of_deaf(rank: Rank, timeout: float) -> tuple[Place, list[StackFrame]]:
    """What the C code of a rank that cannot answer writes of it, from the innermost out."""
    cell = rank.cell
    number, source = (cell.execution_count, cell.source) if cell else (None, "")
    frames = frames_of(await rank.stacks.sample(rank.pid, timeout), number, source)
    line = next((frame.line for frame in reversed(frames) if frame.is_cell), 0)
    file = ""
    if cell and cell.script:
        file = os.path.basename(cell.script.file)
        line = next((frame.line for frame in frames if frame.file == cell.script.file), 0)
    # What waits in a collective does not hold the GIL: the machine is busy.
    is_deaf = not frames or IN_TORCH not in frames[0].file
    return Place(line=line, is_deaf=is_deaf, file=file), frames


async def _place(rank: Rank) -> Place:
    seen = await _ask(rank, {"do": "where"}, STATUS_TIMEOUT)
    if isinstance(seen, Place):
        return seen
    if seen is not None:
        return Place(**seen)
    return await _of_silent(rank)


async def _of_silent(rank: Rank) -> Place:
    """Of one that has not answered in time."""
    if is_stopped(rank.pid):
        return Place(is_stopped=True)
    return (await _of_deaf(rank, BRIEF_SAMPLE_TIMEOUT))[0]


def _has_answered(rank: Rank) -> bool:
    """Whether it has said what its last collective was."""
    asked = rank.last_collective
    return asked is not None and asked.done() and isinstance(asked.result(), dict)


async def _last_collective(rank: Rank) -> Collective | None:
    """Unknown where it takes too long; then it is not asked for again before it is there."""
    if rank.last_collective is None or rank.last_collective.done():
        asking = _ask(rank, {"do": "last"}, LAST_TIMEOUT)
        rank.last_collective = asyncio.ensure_future(asking)
    await asyncio.wait([rank.last_collective], timeout=STATUS_TIMEOUT)
    seen = rank.last_collective.result() if rank.last_collective.done() else None
    return Collective(**seen) if isinstance(seen, dict) and seen else None


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
