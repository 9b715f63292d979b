"""The status of a worker, as reported by its agent: state, memory, GPU, and the rank's place.

Agents make these records; `%dist_status`, `nbdist status` and live panels of cells show them.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbdist.wire.places import Collective, RankPosition, RankState


@dataclass(frozen=True, slots=True)
class Gpu:
    """The state of a GPU: all processes together use `used` of `total` bytes of its memory.

    `busy` is the utilisation in per cent; None if the driver does not report it, for example for
    a MIG slice.
    """

    used: int
    total: int
    busy: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """The memory that a worker uses, in bytes (PSS), and the state of its GPU or None."""

    memory: int
    gpu: Gpu | None = None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A row of `%dist_status`: the status of a worker, as reported by its agent."""

    rank: int
    pid: int
    host: str
    state: RankState
    busy_seconds: float  # the seconds since the worker's task began; 0.0 if the worker is idle
    memory: int  # bytes, as PSS: a page that n processes share counts as 1/n
    device: str
    place: RankPosition | None = None  # None unless the rank is busy, stopped or stuck in C code
    code: str = ""  # the source of the line that `place` names
    collective: Collective | None = None  # the last collective, None if none is known
    gpu: Gpu | None = None
    cpu_seconds: float = 0.0  # processor time of all threads since the process started
    cell: int | None = None  # the execution count of a busy rank's cell
    last_line: str = ""  # the beginning of the last line of output that is not blank
