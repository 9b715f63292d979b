"""The table of workers: `%dist_status`, `nbdist status` and `nbdist top` show it.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbdist.wire.places import WorkerStatus
from nbdist.words import size_text
from nbdist.world.hangs import doing_of
from nbdist.world.usage import gpu_memory_text

HEADINGS = ("rank", "host", "state", "pid", "device", "memory")
MORE_HEADINGS = ("cpu", "gpu", "where", "last collective", "last line")
"""Shown where any rank has an entry."""


def rows(
    workers: Sequence[WorkerStatus],
    cpu: Mapping[int, float] | None = None,
    lines: Mapping[int, str] | None = None,
) -> list[tuple[str, ...]]:
    """Lay out headings, and a row per rank; nothing where there are none.

    Hosts are named where there are several.  `cpu` is per cent of a core by rank, `lines` what
    each rank has written last.
    """
    if not workers:
        return []
    table = [
        (*HEADINGS, *MORE_HEADINGS),
        *(_row(each, (cpu or {}).get(each.rank), (lines or {}).get(each.rank)) for each in workers),
    ]
    has_several = len({each.host for each in workers}) > 1
    shown = [
        index
        for index, (heading, *entries) in enumerate(zip(*table, strict=True))
        if (has_several if heading == "host" else heading in HEADINGS or any(entries))
    ]
    return [tuple(line[index] for index in shown) for line in table]


def _row(worker: WorkerStatus, cpu: float | None, line: str | None) -> tuple[str, ...]:
    collective = worker.collective
    done = "done" if collective and collective.is_done else "not done"
    return (
        str(worker.rank),
        worker.host,
        f"busy {worker.busy_seconds:.0f} s" if worker.state == "busy" else worker.state,
        str(worker.pid),
        worker.device,
        size_text(worker.memory),
        "" if cpu is None else f"{cpu:.0f} %",
        _gpu_text(worker),
        doing_of([worker.rank], worker.place, worker.code) if worker.place else "",
        f"{collective}, {done}" if collective else "",
        line or "",
    )


def _gpu_text(worker: WorkerStatus) -> str:
    """Write `61/80 GiB 97 %`."""
    if worker.gpu is None:
        return ""
    busy = "" if worker.gpu.busy is None else f" {worker.gpu.busy} %"
    return f"{gpu_memory_text([worker.gpu])}{busy}"
