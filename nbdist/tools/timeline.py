"""`%dist_timeline` shows where ranks spent the last cell; `%%distributed --profile` writes a trace.

Runs in the notebook, from the records of each rank (`nbdist.tools.timeline_op`).  There are two
kinds of waits.  Waits in Python code are measured, and include the communication itself.  A wait in
C++ code is assumed from the time a rank begins a collective until the last rank begins it, if the
rank has no other record in between.  So a backward that computes on after its last collective
counts as waiting until then.
"""

from __future__ import annotations

import gzip
import time
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from IPython.core.magic_arguments import argument

from nbdist.errors import NbdistError, UsageError
from nbdist.notebook.command import CellOption, MagicCall, command
from nbdist.notebook.display import CommandOutput, below, block, table
from nbdist.notebook.options import ranks_option
from nbdist.output.wording import seconds_text
from nbdist.system.folders import whole_file
from nbdist.wire.ops import Met, RankTimes, TracePart
from nbdist.words import count, one_line, size_text

SLICES, MAX_BARS = 60, 32
"""Characters of a bar, and how many ranks have a bar: of more ranks, the ones that stand out."""

TimeSpan = tuple[float, float]

ON_GPUS = "nccl collectives are not included: `%%distributed --profile` shows what GPUs do"

COMPUTES_MARK, WAITS_MARK, MIXED_MARK = "█", "░", "▓"


@command(ranks_option)
def dist_timeline(line: MagicCall) -> CommandOutput | str:
    """Show where the last cell's time went on each rank: computing, or waiting for others.

    The straggler is named, with how long others waited for it in collectives.  With
    `%%distributed --profile` torch's profiler writes a trace of the cell.
    """
    timeline = timeline_of(line.call("timeline"))
    if timeline is None:
        return "no cell has run on these workers"
    shown = [_table(timeline), _bars(timeline)]
    if "nccl" in line.world.session.backend:
        shown.append(block(ON_GPUS))
    return below(shown)


def headline(timeline: Timeline) -> str:
    """Return a line with the time of the cell, and the rank that kept the others waiting."""
    collectives = count(timeline.collective_count, "collective")
    if not timeline.is_recorded:
        collectives = "which rank came last is not recorded before torch 2.11"
    elif not timeline.is_whole:
        collectives = f"the last {collectives}"
    parts = [count(len(timeline.rows), "rank"), seconds_text(timeline.seconds), collectives]
    if (row := timeline.straggler) is not None:
        last = f"came last to {row.came_last} of them; " if row.came_last > 1 else ""
        parts.append(
            f"rank {row.rank} {last}others waited {_seconds(row.awaited, timeline.seconds)} for it"
        )
    return " · ".join(parts)


def _table(timeline: Timeline) -> CommandOutput:
    rows = [("rank", "total", "computing", "in collectives", "times last", "wait caused")]
    text = partial(_seconds, whole=timeline.seconds)
    for row in _rows_to_show(timeline):
        waiting = f"{text(row.waiting)} ({row.waiting / (row.seconds or 1):.0%})"
        caused = text(row.awaited) if row.awaited >= timeline.seconds / 200 else ""
        times = str(row.rank), text(row.seconds), text(row.computing), waiting
        rows.append((*times, str(row.came_last or ""), caused))
    return table(headline(timeline), rows)


def _bars(timeline: Timeline) -> CommandOutput:
    """Draw a bar for each rank, and below the bars a legend and the collectives."""
    bars = {row.rank: bar_of(row, timeline.seconds) for row in _rows_to_show(timeline)}
    width = max(len(str(rank)) for rank in bars)
    both = f"  {MIXED_MARK} both" if any(MIXED_MARK in bar for bar in bars.values()) else ""
    lines = [f"{COMPUTES_MARK} computing  {WAITS_MARK} in collectives{both}"]
    if more := len(timeline.rows) - len(bars):
        lines.append(count(more, "more rank"))
    lines += [" · ".join(timeline.operations[:4])] if timeline.operations else []
    return block("\n".join([*(f"rank {r:>{width}} {bar}" for r, bar in bars.items()), *lines]))


def _rows_to_show(timeline: Timeline) -> list[TimelineRow]:
    """Return the rows to show: of many ranks, the most awaited and then the slowest."""
    order = sorted(timeline.rows, key=lambda row: (-row.awaited, -row.computing))
    return sorted(order[:MAX_BARS], key=lambda row: row.rank)


def bar_of(row: TimelineRow, seconds: float, slices: int = SLICES) -> str:
    """Draw `seconds` as equal slices: a character each, a space while the rank ran no cell."""
    step, bar = seconds / slices or 1.0, ""
    for number in range(slices):
        begin, end = number * step, (number + 1) * step
        first, last = max(begin, row.begin), min(end, row.begin + row.seconds)
        if last - first < step / 2:
            bar += " "
        else:
            share = _overlap(row.spans, first, last) / (last - first)
            bar += WAITS_MARK if share > 0.8 else COMPUTES_MARK if share < 0.2 else MIXED_MARK
    return bar.rstrip()


def _seconds(seconds: float, whole: float) -> str:
    """Return `0.99 s`, or `45 ms` if the `whole` is short, so that a column has one unit."""
    if whole < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if whole >= 100 else f"{seconds:.2f} s"


LATE = 0.001
"""Seconds after the first rank from which on the last rank of a collective counts as late."""

LEAST, LEAST_SHARE = 0.01, 0.02
"""How long others must wait for a rank until it is called the straggler: seconds, and share of the
cell."""


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """The seconds of a rank in the cell; `begin` and `spans` count from the first rank's begin."""

    rank: int
    begin: float
    seconds: float  # how long the cell took
    waiting: float  # how much of that the rank waited in collectives
    spans: tuple[TimeSpan, ...]  # when the rank waited
    came_last: int = 0  # how many collectives the rank began late, after all other ranks
    awaited: float = 0.0  # how long each other rank waited for this rank, on average

    @property
    def computing(self) -> float:
        """The seconds in which the rank did not wait."""
        return max(0.0, self.seconds - self.waiting)


@dataclass(frozen=True, slots=True)
class Timeline:
    """A cell on all ranks that ran it."""

    rows: tuple[TimelineRow, ...]
    collective_count: int  # the number of collectives that more than one rank began
    straggler: TimelineRow | None  # the rank for which others waited, None if no rank stands out
    operations: tuple[str, ...]  # such as `all_reduce x 3 (3 KiB)`
    is_recorded: bool  # as in `RankTimes`, for all ranks
    is_whole: bool

    @property
    def seconds(self) -> float:
        """The time from the first rank's begin to the last rank's end."""
        return max(row.begin + row.seconds for row in self.rows)


def timeline_of(times: Mapping[int, RankTimes]) -> Timeline | None:
    """Return the timeline of the ranks' records; None if no rank has run a cell."""
    times = {rank: each for rank, each in times.items() if each.began_ns}
    if not times:
        return None
    origin = min(each.began_ns for each in times.values())
    arrivals: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for rank, each in times.items():
        for collective in each.met:
            arrivals[collective.group, collective.number][rank] = collective.at_ns
    meetings = {key: at for key, at in arrivals.items() if len(at) > 1}
    last = {key: max(at.values()) for key, at in meetings.items()}
    spans = {rank: _wait_spans(each, last) for rank, each in times.items()}
    took = {rank: each.ended_ns - each.began_ns for rank, each in times.items()}
    awaited, came_last = _lateness(meetings, spans)
    others = max(1, len(times) - 1)
    rows = tuple(
        TimelineRow(
            rank,
            (each.began_ns - origin) / 1e9,
            took[rank] / 1e9,
            max(sum(b - a for a, b in spans[rank]), min(each.waited_ns, took[rank])) / 1e9,
            tuple(((a - origin) / 1e9, (b - origin) / 1e9) for a, b in spans[rank]),
            came_last[rank],
            awaited[rank] / 1e9 / others,
        )
        for rank, each in sorted(times.items())
    )
    most_awaited = max(rows, key=lambda row: row.awaited)
    longest = max(row.seconds for row in rows)
    return Timeline(
        rows,
        len(meetings),
        most_awaited if most_awaited.awaited >= max(LEAST, LEAST_SHARE * longest) else None,
        _operations(each.met for each in times.values()),
        all(each.is_recorded for each in times.values()),
        all(each.is_whole for each in times.values()),
    )


def _wait_spans(times: RankTimes, last: Mapping[tuple[str, int], int]) -> list[tuple[int, int]]:
    """Return when a rank waited, from measured waits and assumed waits in C++ code, merged.

    `last` has the time when the last rank began a collective, by its group and number.
    """
    spans = [*times.waits]
    begins = sorted([*(collective.at_ns for collective in times.met), *(a for a, _ in times.waits)])
    begins.append(times.ended_ns)
    for collective in times.met:
        until = last.get((collective.group, collective.number), 0)
        after = (
            begins[bisect_right(begins, collective.at_ns)] if collective.at_ns < begins[-1] else 0
        )
        if collective.at_ns < until <= after:
            spans.append((collective.at_ns, until))
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _lateness(
    meetings: Mapping[tuple[str, int], Mapping[int, int]],
    spans: Mapping[int, list[tuple[int, int]]],
) -> tuple[dict[int, float], dict[int, int]]:
    """Return by rank how many nanoseconds others waited for it, and how often it came late."""
    awaited: dict[int, float] = dict.fromkeys(spans, 0.0)
    came_last: dict[int, int] = dict.fromkeys(spans, 0)
    done: dict[int, int] = defaultdict(int)  # by rank: until when its waits are counted
    for at in sorted(meetings.values(), key=lambda at: max(at.values())):
        last_rank = max(at, key=lambda rank: at[rank])
        came_last[last_rank] += at[last_rank] - min(at.values()) >= LATE * 1e9
        for rank, arrived in at.items():
            if rank != last_rank:
                begin = max(arrived, done[rank])
                awaited[last_rank] += _overlap(spans[rank], begin, at[last_rank])
                done[rank] = max(done[rank], at[last_rank])
    return awaited, came_last


def _overlap(spans: Sequence[TimeSpan], begin: float, end: float) -> float:
    """Return how much of the time from `begin` to `end` is in these spans."""
    total = 0.0
    for at in range(max(0, bisect_left(spans, (begin, 0)) - 1), len(spans)):
        first, last = spans[at]
        if first >= end:
            break
        total += max(0, min(last, end) - max(first, begin))
    return total


def _operations(ranks: Iterable[tuple[Met, ...]]) -> tuple[str, ...]:
    """Return texts like `all_reduce x 3 (3 KiB)`, the most bytes first.

    The texts describe the collectives of the rank that began the most.
    """
    sizes: dict[str, list[int]] = defaultdict(list)
    for each in max(ranks, key=len, default=()):
        sizes[each.name].append(each.size)
    order = sorted(sizes.items(), key=lambda item: (-sum(item[1]), -len(item[1]), item[0]))
    return tuple(
        f"{name} x {len(each)}{f' ({size_text(sum(each))})' if any(each) else ''}"
        for name, each in order
    )


# --- a profile ---------------------------------------------------------------------------

TRACE_HEAD = b'{"nbdist": 1, "displayTimeUnit": "ms", "traceEvents": [\n'
"""The beginning of every trace: only a file that begins so is overwritten."""

SUFFIXES = (".json", ".json.gz")


@contextmanager
def _profiled(line: MagicCall) -> Iterator[None]:
    """Run torch's profiler around a cell with `--profile`.

    The trace is written even if the cell fails.  If the trace cannot be written, a line says so.
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
    """Fetch the ranks' events and write the trace; return the line to show."""
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
    """Return the path for a trace; raises UsageError for a bad name, folder or existing file."""
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
    """Write the ranks' parts as one trace; on an OSError raise UsageError and write nothing."""
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
    """Return True if the file is a trace that nbdist has written."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return bool(file.read(len(TRACE_HEAD)) == TRACE_HEAD)
    except (OSError, EOFError, zlib.error):
        return False
