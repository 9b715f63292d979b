"""The ops of `%dist_timeline` and `--profile`: times of ranks, and events of torch's profiler.

Runs in workers, called by `nbdist.tools.timeline` in the notebook.  `timeline` returns when the
rank waited in its last cell, and which collectives it began.  `begin_profile` and `end_profile` run
before and after a cell, as tasks of their own.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import zlib
from collections.abc import Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nbdist.wire.ops import Met, RankTimes, TracePart
from nbdist.worker.compat import accelerator
from nbdist.worker.compat import torch as seam
from nbdist.worker.group.nccl import operation_of
from nbdist.worker.process import CELL_TIMES

if TYPE_CHECKING:
    from nbdist.worker.namespace import Context

MAX_COLLECTIVES = 2_000
"""The most collectives of a cell that are returned: torch's Flight Recorder keeps about as many."""

DTYPE_BYTES = {
    **{"Double": 8, "Long": 8, "ComplexFloat": 8, "ComplexDouble": 16, "Float": 4, "Int": 4},
    **{"Half": 2, "BFloat16": 2, "Short": 2},
}
"""The bytes of an element, by the name of its dtype in torch's C++ code.

Elements of all other dtypes count as one byte.
"""


def timeline(context: Context) -> RankTimes:
    """Return when this rank ran its last cell, waited for other ranks, and began collectives.

    If the rank has run no cell, `began_ns` is 0.
    """
    cell = CELL_TIMES
    newest = takewhile(
        lambda entry: entry["time_created_ns"] >= cell.began_ns, seam.recorded_collectives()
    )
    entries = [*islice(newest, MAX_COLLECTIVES)] if cell.began_ns else []
    of_cell = (each for each in reversed(entries) if each["time_created_ns"] <= cell.ended_ns)
    return RankTimes(
        began_ns=cell.began_ns,
        ended_ns=cell.ended_ns,
        waits=tuple(cell.waits),
        waited_ns=cell.waited_ns,
        met=tuple(map(_met, of_cell)),
        is_recorded=seam.RECORDS_GLOO,
        is_whole=len(entries) < MAX_COLLECTIVES and cell.count == len(cell.waits),
    )


def _met(entry: dict[str, Any]) -> Met:
    sizes = entry["input_sizes"] or entry["output_sizes"]
    dtypes = entry["input_dtypes"] or entry["output_dtypes"] or [""]
    size = sum(map(math.prod, sizes)) * DTYPE_BYTES.get(dtypes[0], 1)
    group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
    return Met(group, number, operation_of(entry), entry["time_created_ns"], size)


# --- a profile --------------------------------------------------------------------------------

MAX_TRACE_BYTES = 256_000_000
MAX_EVENTS = 400_000

_profilers: list[Any] = []
"""The profiler that runs, if any; `end_profile` or the next `begin_profile` removes it."""


def begin_profile(context: Context) -> None:
    """Start torch's profiler on this rank, after stopping a profiler that still runs."""
    _stop()
    profiler = torch.profiler.profile(activities=accelerator.profiled())
    profiler.start()
    _profilers.append(profiler)


def end_profile(context: Context, origin_ns: int) -> TracePart | None:
    """Stop the profiler, and return its events as compressed JSON; None if no profiler runs.

    The times of the events are in microseconds since `origin_ns`.  At most `MAX_EVENTS` events are
    returned.  If the profiler's file has more than `MAX_TRACE_BYTES`, return a problem instead.
    """
    if not (profiler := _stop()):
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        if (size := path.stat().st_size) > MAX_TRACE_BYTES:
            return TracePart(problem=f"{size / 1e6:,.0f} MB: profile fewer steps")
        trace = json.loads(path.read_bytes())
    base = trace.get("baseTimeNanoseconds", 0)
    rank, pid = context.rank, os.getpid()
    events = [*trace_events(trace["traceEvents"], rank, pid, (base - origin_ns) / 1000)]
    kept = events[:MAX_EVENTS]
    text = ",\n".join(map(json.dumps, kept)).encode()
    return TracePart(zlib.compress(text, 1), len(text), len(kept), len(events) - len(kept))


def trace_events(
    events: list[dict[str, Any]], rank: int, pid: int, shift: float
) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank, changed so that the events of all ranks fit in one trace.

    The rank becomes a process whose number is `rank`, and each stream of its GPUs a thread of that
    process.  `shift`, in microseconds, is added to all times.  Names of processes are left out, and
    so are events of processes other than `pid`, except those of GPUs.
    """
    yield _meta(rank, "process_name", 0, {"name": f"rank {rank}"})
    yield _meta(rank, "process_sort_index", 0, {"sort_index": rank})
    streams: set[tuple[int, int]] = set()
    timed = []
    for event in events:
        if event.get("name", "").startswith("process_"):
            continue
        of_gpu = str(event.get("cat", "")).startswith(("kernel", "gpu_"))
        if of_gpu:
            stream = int(event["pid"]), int(event["tid"])
            streams.add(stream)
            event["tid"] = _tid(*stream)
        elif event.get("pid") != pid:
            continue
        event["pid"] = rank
        event["ts"] = round(event.get("ts", 0.0) + shift, 3)
        if "id" in event:  # viewers draw arrows between events with equal ids: keep ranks apart
            event["id"] = f"{rank}.{event['id']}"
        if event["ph"] == "M":
            yield event
        else:
            timed.append(event)
    for device, stream_id in sorted(streams):
        name = f"GPU {device} stream {stream_id}"
        yield _meta(rank, "thread_name", _tid(device, stream_id), {"name": name})
    yield from sorted(timed, key=lambda event: float(event["ts"]))


def _meta(rank: int, name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": tid, "ts": 0, "args": args}


def _tid(device: int, stream: int) -> int:
    """Return the number of a GPU's stream among the threads of the trace.

    The number is larger than that of any thread on Linux, so it is not the number of a real thread.
    """
    return 10_000_000 + 10_000 * device + stream


def _stop() -> Any:
    """Stop and return the profiler that runs; return None if no profiler runs."""
    if not _profilers:
        return None
    profiler = _profilers.pop()
    profiler.stop()
    return profiler
