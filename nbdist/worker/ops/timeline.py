"""When a worker computed and when it waited in its last cell, and which collectives it began.

And a profile of a cell by torch: begun with one task, ended with another after the cell.
"""

from __future__ import annotations

import math
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from nbdist.wire.ops import Met, RankTimes
from nbdist.worker.cell_times import CELL_TIMES
from nbdist.worker.compat import torch as seam
from nbdist.worker.group.flight_record import operation_of

if TYPE_CHECKING:
    from nbdist.worker.op import Context

MOST_MET = 2_000
"""Collectives; Flight Recorder keeps no more by default."""

BYTES = {
    **{"Double": 8, "Long": 8, "ComplexFloat": 8, "ComplexDouble": 16, "Float": 4, "Int": 4},
    **{"Half": 2, "BFloat16": 2, "Short": 2},
}
"""Of an element, by torch's name in C++; others have one."""


def timeline(context: Context) -> RankTimes:
    """Read the last cell's; with `began_ns` 0 where none has run."""
    cell = CELL_TIMES
    newest = takewhile(
        lambda entry: entry["time_created_ns"] >= cell.began_ns, seam.recorded_collectives()
    )
    entries = [*islice(newest, MOST_MET)] if cell.began_ns else []
    of_cell = (each for each in reversed(entries) if each["time_created_ns"] <= cell.ended_ns)
    return RankTimes(
        began_ns=cell.began_ns,
        ended_ns=cell.ended_ns,
        waits=tuple(cell.waits),
        waited_ns=cell.waited_ns,
        met=tuple(map(_met, of_cell)),
        is_recorded=seam.RECORDS_GLOO,
        is_whole=len(entries) < MOST_MET and cell.count == len(cell.waits),
    )


def _met(entry: dict[str, Any]) -> Met:
    sizes = entry["input_sizes"] or entry["output_sizes"]
    dtypes = entry["input_dtypes"] or entry["output_dtypes"] or [""]
    size = sum(math.prod(each) for each in sizes) * BYTES.get(dtypes[0], 1)
    group, number = entry["process_group"][0], int(entry["collective_seq_id"])
    return Met(str(group), number, operation_of(entry), entry["time_created_ns"], size)
