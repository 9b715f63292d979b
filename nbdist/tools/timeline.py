"""`%dist_timeline` shows how ranks spent the last cell; `%%distributed --profile` writes a trace.

Runs in the notebook's process.  The op `timeline` (`nbdist.tools.timeline_op`) returns the records
of each rank, `nbdist.tools.timeline_data` computes the timeline from these records, and
`nbdist.tools.timeline_chart` draws it.
"""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from IPython.core.magic_arguments import argument

from nbdist.errors import NbdistError, UsageError
from nbdist.notebook.command import CellOption, MagicCall, command
from nbdist.notebook.display import CommandOutput, below, block, table
from nbdist.notebook.options import ranks_option
from nbdist.output.wording import seconds_text
from nbdist.system.folders import whole_file
from nbdist.tools.timeline_chart import chart, short_seconds
from nbdist.tools.timeline_data import Timeline, TimelineRow, timeline_of
from nbdist.wire.ops import TracePart
from nbdist.words import count, one_line

MAX_ROWS = 32
"""At most this many ranks have a row: the ranks for which others waited longest."""

ON_GPUS = "nccl collectives are not included: `%%distributed --profile` shows what GPUs do"


@command(ranks_option)
def dist_timeline(line: MagicCall) -> CommandOutput | str:
    """Show where the last cell's time went on each rank: computing, or waiting for others.

    The straggler is named, with how long others waited for it in collectives.  With
    `%%distributed --profile` torch's profiler writes a trace of the cell.
    """
    timeline = timeline_of(line.call("timeline"))
    if timeline is None:
        return "no cell has run on these workers"
    rows = _rows_to_show(timeline)
    shown = [_table(timeline, rows), chart(timeline, rows)]
    notes = [" · ".join(timeline.operations[:4])]
    if hidden_count := len(timeline.rows) - len(rows):
        notes.insert(0, count(hidden_count, "more rank"))
    if "nccl" in line.world.engine.rank_table.backend:
        notes.append(ON_GPUS)
    return below([*shown, *map(block, filter(None, notes))])


def headline(timeline: Timeline) -> str:
    """Return the heading: the time of the cell, its collectives, and the rank others waited for."""
    collectives = count(timeline.collective_count, "collective")
    if not timeline.is_recorded:
        collectives = "which rank came last is not recorded before torch 2.11"
    elif not timeline.is_whole:
        collectives = f"the last {collectives}"
    parts = [count(len(timeline.rows), "rank"), seconds_text(timeline.seconds), collectives]
    if (row := timeline.straggler) is not None:
        last = f", which came last to {row.came_last} of them" if row.came_last > 1 else ""
        awaited = short_seconds(row.awaited, timeline.seconds)
        parts.append(f"others waited {awaited} for rank {row.rank}{last}")
    return " · ".join(parts)


def _table(timeline: Timeline, shown: Iterable[TimelineRow]) -> CommandOutput:
    """Return the times of these ranks as a table, below the heading.

    The table has the time that a rank waited for other ranks only if torch records that time.
    """
    waiting = ["waiting"] if timeline.is_recorded else []
    rows = [["rank", "total", "computing", "in collectives", *waiting, "times last", "wait caused"]]
    text = partial(short_seconds, whole=timeline.seconds)
    for row in shown:
        within = f"{text(row.in_collectives)} ({row.in_collectives / (row.seconds or 1):.0%})"
        caused = text(row.awaited) if row.awaited >= timeline.seconds / 200 else ""
        times = [str(row.rank), text(row.seconds), text(row.computing), within]
        times += [text(row.waiting)] if waiting else []
        rows.append([*times, str(row.came_last or ""), caused])
    return table(headline(timeline), rows)


def _rows_to_show(timeline: Timeline) -> list[TimelineRow]:
    """Return the rows to show, in the order of the ranks.

    If there are more than `MAX_ROWS` ranks, the ranks for which other ranks waited longest are
    shown; if waits are equal, the ranks that computed longest.
    """
    order = sorted(timeline.rows, key=lambda row: (-row.awaited, -row.computing))
    return sorted(order[:MAX_ROWS], key=lambda row: row.rank)


# --- a profile ---------------------------------------------------------------------------

TRACE_HEAD = b'{"nbdist": 1, "displayTimeUnit": "ms", "traceEvents": [\n'
"""The beginning of every trace of nbdist; a file with another beginning is not overwritten."""

SUFFIXES = (".json", ".json.gz")


@contextmanager
def _profiled(line: MagicCall) -> Iterator[None]:
    """Run torch's profiler on all ranks while a cell with `--profile` runs, and write the trace.

    The trace is also written if the cell fails.  A line says where it is, or why there is none.
    """
    if line.options.profile is None:
        yield
        return
    if line.options.no_wait:
        raise UsageError("`--profile`: the trace is written after the cell: not with `--no-wait`.")
    path = check_path(line.options.profile)
    line.pool.ensure(line.options, line.display)
    line.display.show_status("starting torch's profiler …")
    line.call("timeline.begin_profile")
    origin = time.time_ns()
    try:
        yield
    finally:
        line.pool.display().show_text(_collect(line, path, origin))


def _collect(line: MagicCall, path: Path, origin: int) -> str:
    """Fetch the events of all ranks, and write them to `path`; return a line on the result.

    `origin` is the time in nanoseconds since 1970 from which the trace counts its times.
    """
    try:
        traces = line.call("timeline.end_profile", origin_ns=origin)
        parts = {rank: part or TracePart() for rank, part in traces.items()}
        write_trace(path, parts)
    except NbdistError as error:
        return f"no trace of this cell: {one_line(str(error))}"
    events = sum(part.count for part in parts.values())
    phrases = [
        f"{path} · {events:,} events of {count(len(parts), 'rank')} · ui.perfetto.dev opens it"
    ]
    for rank, part in parts.items():
        lost = f"the last {part.dropped:,} events are not in it" if part.dropped else part.problem
        phrases += [f"rank {rank}: {lost}"] if lost else []
    return " · ".join(phrases)


PROFILE = CellOption(
    argument("--profile", nargs="?", const="trace.json", metavar="FILE",
             help="run the cell under torch.profiler, and write one trace of all ranks for"
             " ui.perfetto.dev (trace.json)"),
    _profiled,
)  # fmt: skip


def check_path(text: str) -> Path:
    """Return the path of a trace to write.

    Raises UsageError if the name has another suffix, if the folder does not exist, or if a file
    exists that is no trace of nbdist.
    """
    path = Path(text).expanduser()
    if not text.endswith(SUFFIXES):
        raise UsageError(
            f"`--profile {text}`: the trace needs a name that ends in .json or .json.gz."
        )
    if not path.parent.is_dir():
        raise UsageError(f"`--profile {text}`: there is no folder {path.parent}.")
    if path.exists() and not _is_trace(path):
        raise UsageError(
            f"`--profile {text}`: {path} already exists and is not a trace of nbdist. Choose "
            "another name."
        )
    return path


def write_trace(path: Path, parts: Mapping[int, TracePart]) -> None:
    """Write the parts of all ranks to one trace file.

    If the file cannot be written, raise UsageError, and leave no part of a file.
    """
    try:
        with whole_file(path) as opened, ExitStack() as stack:
            is_packed = path.suffix == ".gz"
            file = stack.enter_context(gzip.open(opened, "wb", 5)) if is_packed else opened
            file.write(TRACE_HEAD)
            for number, part in enumerate(part for part in parts.values() if part.events):
                file.write((b",\n" if number else b"") + zlib.decompress(part.events))
            file.write(b"\n]}\n")
    except OSError as error:
        raise UsageError(f"`--profile {path}`: {error.strerror or error}.") from None


def _is_trace(path: Path) -> bool:
    """Return True if the file begins as a trace that nbdist has written."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return bool(file.read(len(TRACE_HEAD)) == TRACE_HEAD)
    except (OSError, EOFError, zlib.error):
        return False
