"""The last cell's time on each rank: computing, waiting, and for whom."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument

from nbdist.errors import NbdistError, UsageError
from nbdist.notebook.command import Line, command
from nbdist.notebook.options import Magic, ranks_option
from nbdist.notebook.tables import Shown, below, block, table
from nbdist.output.markup import AMBER, BLUE
from nbdist.output.wording import seconds_text
from nbdist.wire.ops import TracePart
from nbdist.words import count, one_line, size_text
from nbdist.world import traces
from nbdist.world.timelines import Timeline, shares, timeline_of

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.world.timelines import Row

SLICES = 60
"""Of a bar: characters."""

MOST_BARS = 32
"""Ranks that have a bar; of more those that stand out."""

ON_GPUS = "nccl collectives are not included: `%%distributed --profile` shows what GPUs do"

COMPUTES, WAITS, MIXED = "█", "░", "▓"
_COLOURS = {COMPUTES: BLUE, WAITS: AMBER, MIXED: BLUE}
_BARS = "font-family:monospace;font-size:13px;white-space:pre;line-height:1.3"


def profile_option(magic: Magic) -> Magic:
    """Add `--profile`, for `profiled`."""
    add = argument("--profile", nargs="?", const="trace.json", metavar="FILE",
                   help="run the cell under torch.profiler, and write one trace of all ranks for"
                   " ui.perfetto.dev (trace.json)")  # fmt: skip
    return add(magic)  # type: ignore[no-any-return]


@contextmanager
def profiled(line: Line) -> Iterator[None]:
    """Have torch's profiler look at the cell that runs inside, where `--profile` says so.

    The trace is written also where the cell fails; that it cannot be is said, and no error.
    """
    if line.options.profile is None:
        yield
        return
    if line.options.no_wait:
        raise UsageError("`--profile`: the trace is written after the cell: not with `--no-wait`.")
    path = traces.check_path(line.options.profile)
    line.pool.ensure(line.options, line.display)
    line.display.wait_for("starting torch's profiler …")
    line.call("timeline.begin_profile")
    origin = time.time_ns()
    try:
        yield
    finally:
        line.pool.display().say(_write_trace(line, path, origin))


def _write_trace(line: Line, path: Path, origin: int) -> str:
    """Collect the ranks' events and write them; what is to be said of it."""
    try:
        found = line.call("timeline.end_profile", origin_ns=origin)
        parts = {rank: part or TracePart() for rank, part in found.items()}
        path = traces.write(path, parts)
    except NbdistError as error:
        return f"no trace of this cell: {one_line(str(error))}"
    lost = [f"rank {rank}: {part.problem}" for rank, part in parts.items() if part.problem]
    lost += [f"rank {rank}: the last {part.dropped:,} events are not in it"
             for rank, part in parts.items() if part.dropped]  # fmt: skip
    events = sum(part.count for part in parts.values())
    said = [f"{path} · {events:,} events of {count(len(parts), 'rank')} · ui.perfetto.dev opens it"]
    return " · ".join([*said, *lost])


@command(ranks_option)
def dist_timeline(line: Line) -> Shown | str:
    """Show where the last cell's time went on each rank: computing, or waiting for others.

    The straggler is named, with how long others waited for it in collectives.  With
    `%%distributed --profile` torch's profiler writes a trace of the cell.
    """
    found = timeline_of(line.call("timeline"))
    if found is None:
        return "no cell has run on these workers"
    shown = [_table(found), _bars(found)]
    if "nccl" in line.world.session.backend:
        shown.append(block(ON_GPUS))
    return below(shown)


def headline(found: Timeline) -> str:
    """Say how long it took, and who kept the others waiting."""
    met = count(found.met, "collective")
    parts = [count(len(found.rows), "rank"), seconds_text(found.seconds)]
    if not found.is_recorded:
        parts.append("which rank came last is not recorded before torch 2.11")
    else:
        parts.append(met if found.is_whole else f"the last {met}")
    if (late := found.straggler) is not None:
        last = f"came last to {late.came_last} of them; " if late.came_last > 1 else ""
        parts.append(
            f"rank {late.rank} {last}others waited {_seconds(late.awaited, found.seconds)} for it"
        )
    return " · ".join(parts)


def _table(found: Timeline) -> Shown:
    rows = [("rank", "total", "computing", "in collectives", "times last", "wait caused")]
    whole = found.seconds
    for row in _shown(found):
        share = f"{row.waiting / row.seconds:.0%}" if row.seconds else "0%"
        waiting = f"{_seconds(row.waiting, whole)} ({share})"
        late = _seconds(row.awaited, whole) if row.awaited >= whole / 200 else ""
        rows.append(
            (str(row.rank), _seconds(row.seconds, whole), _seconds(row.computing, whole), waiting,
             str(row.came_last or ""), late)
        )  # fmt: skip
    return table(headline(found), rows)


def _bars(found: Timeline) -> Shown:
    """Draw a bar for each rank, and below them what they have met in."""
    bars = {row.rank: _bar(row, found.seconds) for row in _shown(found)}
    width = max(len(str(rank)) for rank in bars)
    lines = {f"rank {rank:>{width}} ": bar for rank, bar in bars.items()}
    legend = f"{COMPUTES} computing  {WAITS} in collectives"
    if any(MIXED in bar for bar in bars.values()):
        legend += f"  {MIXED} both"
    more = len(found.rows) - len(bars)
    said = [legend, *([f"{count(more, 'more rank')}"] if more else []), *_operations(found)]
    text = "\n".join([*(f"{head}{bar}" for head, bar in lines.items()), *said])
    drawn = "\n".join([*(f"{head}{_coloured(bar)}" for head, bar in lines.items()),
                       _coloured(legend), *map(escape, said[1:])])  # fmt: skip
    return Shown(f'<div style="{_BARS}">{drawn}</div>', text)


def _shown(found: Timeline) -> list[Row]:
    """Choose the ranks that are shown: the slowest and the most awaited, where there are many."""
    if len(found.rows) <= MOST_BARS:
        return [*found.rows]
    order = sorted(found.rows, key=lambda row: (-row.awaited, -row.computing))
    return sorted(order[:MOST_BARS], key=lambda row: row.rank)


def _bar(row: Row, seconds: float) -> str:
    return "".join(
        " " if share is None else WAITS if share > 0.8 else COMPUTES if share < 0.2 else MIXED
        for share in shares(row, seconds, SLICES)
    ).rstrip()


def _coloured(bar: str) -> str:
    runs = ((sign, len([*run])) for sign, run in groupby(bar))
    return "".join(
        f'<span style="color:{_COLOURS[sign]}">{sign * length}</span>'
        if sign in _COLOURS
        else escape(sign * length)
        for sign, length in runs
    )


def _operations(found: Timeline) -> list[str]:
    parts = [
        f"{each.name} x {each.count}" + (f" ({size_text(each.size)})" if each.size else "")
        for each in found.operations[:4]
    ]
    return [" · ".join(parts)] if parts else []


def _seconds(seconds: float, whole: float) -> str:
    """Write `0.99 s`, or `45 ms` where the whole is short: a column has one unit."""
    if whole < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if whole >= 100 else f"{seconds:.2f} s"
