"""What workers do and use, in a line and as a table.  Pure.

`%dist_status`, `nbdist status` and `nbdist top` show the table, the head of a cell the line:
`cpu 1.9 GiB · gpu 61/80 GiB · 97 %`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from nbdist.wire.views import Gpu, Usage, WorkerStatus
from nbdist.words import size_range, size_text
from nbdist.world.hangs import doing_of

GIB = 2**30


def usage_text(used: Collection[Usage]) -> str:
    """Say it of all ranks, from which to which where they differ; "" where nothing is known."""
    memory = [each.memory for each in used if each.memory]
    parts = [f"cpu {size_range(memory)}"] if memory else []
    if gpus := [each.gpu for each in used if each.gpu]:
        parts.append(f"gpu {gpu_memory_text(gpus)}")
        if busy := [gpu.busy for gpu in gpus if gpu.busy is not None]:
            parts.append(f"{_range(busy)} %")
    return " · ".join(parts)


def gpu_memory_text(gpus: Collection[Gpu]) -> str:
    """Write `61/80 GiB`, `3.5-12/80 GiB`: used of total."""
    used, total = ([getattr(gpu, name) / GIB for gpu in gpus] for name in ("used", "total"))
    return f"{_range(used)}/{_range(total)} GiB"


def _range(numbers: Collection[float]) -> str:
    low, high = (f"{x:.0f}" if x >= 10 else f"{x:.2g}" for x in (min(numbers), max(numbers)))
    return high if low == high else f"{low}-{high}"


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
