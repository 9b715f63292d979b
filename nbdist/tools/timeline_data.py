"""Computes from records of the ranks how they spent the last cell, and for whom they waited.

`nbdist.tools.timeline` calls this file in the notebook's process; pure, so without I/O.  The
records come from `nbdist.tools.timeline_op` in the workers.

Waits in Python code are measured; they include the communication itself.  Waits in C++ code are not
measured.  So a rank is assumed to wait from when it begins a collective until the last rank begins
the collective, unless the rank has another record in that time.  If a rank goes on computing after
a collective has begun, as at the end of a backward, that computing counts as waiting.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from nbdist.wire.ops import Met, RankTimes
from nbdist.words import size_text

TimeSpan = tuple[float, float]

LATE = 0.001
"""The last rank of a collective is late if it begins at least this many seconds after the first."""

LEAST, LEAST_SHARE = 0.01, 0.02
"""Texts name a rank as the straggler if other ranks waited for it at least this long.

The wait must be at least `LEAST` seconds, and at least the share `LEAST_SHARE` of the cell's time.
"""


class RankWait(NamedTuple):
    """A wait of a rank for the rank `awaited`, which was the last to begin a collective."""

    begin: float
    end: float
    awaited: int


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """How a rank spent the cell, in seconds; moments count from when the first rank began."""

    rank: int
    begin: float
    seconds: float  # how long the cell took on this rank
    in_collectives: float  # how many of these seconds the rank spent in collectives
    spans: tuple[TimeSpan, ...]  # when the rank was in collectives
    waits: tuple[RankWait, ...]  # the parts of `spans` in which the rank waited for another rank
    recorded_from: float  # before this moment spans may be missing
    came_last: int = 0  # how many collectives the rank began late, after all other ranks
    awaited: float = 0.0  # seconds for which another rank waited for this rank: the mean of others

    @property
    def computing(self) -> float:
        """The seconds that the rank spent outside of collectives."""
        return max(0.0, self.seconds - self.in_collectives)

    @property
    def waiting(self) -> float:
        """The seconds that the rank spent in collectives that another rank had not begun."""
        return sum(wait.end - wait.begin for wait in self.waits)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The last cell on all ranks that ran it."""

    rows: tuple[TimelineRow, ...]
    collective_count: int  # the number of collectives that more than one rank began
    straggler: TimelineRow | None  # the rank for which others waited, None if no rank stands out
    operations: tuple[str, ...]  # such as `all_reduce x 3 (3 KiB)`
    is_recorded: bool  # False if torch does not record collectives on some rank
    is_whole: bool  # False if spans of some rank may be missing

    @property
    def seconds(self) -> float:
        """The seconds from when the first rank began the cell until the last rank ended it."""
        return max(row.begin + row.seconds for row in self.rows)


def least_awaited(whole: float) -> float:
    """Return for how many seconds others must have waited for a rank before texts name it.

    `whole` is the time of the whole cell in seconds.
    """
    return max(LEAST, LEAST_SHARE * whole)


def timeline_of(times: Mapping[int, RankTimes]) -> Timeline | None:
    """Return the timeline, computed from the ranks' records; None if no rank has run a cell."""
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
    waits, came_last = _waits(meetings, spans)
    awaited: dict[int, float] = defaultdict(float)
    for wait in chain.from_iterable(waits.values()):
        awaited[wait.awaited] += wait.end - wait.begin
    others = max(1, len(times) - 1)

    def moment(at_ns: float) -> float:
        return (at_ns - origin) / 1e9

    rows = tuple(
        TimelineRow(
            rank,
            moment(each.began_ns),
            took[rank] / 1e9,
            max(sum(b - a for a, b in spans[rank]), min(each.waited_ns, took[rank])) / 1e9,
            tuple((moment(a), moment(b)) for a, b in spans[rank]),
            tuple(RankWait(moment(a), moment(b), last_rank) for a, b, last_rank in waits[rank]),
            moment(_recorded_from(each)),
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
        most_awaited if most_awaited.awaited >= least_awaited(longest) else None,
        _operations(each.met for each in times.values()),
        all(each.is_recorded for each in times.values()),
        all(each.is_whole for each in times.values()),
    )


def _wait_spans(times: RankTimes, last: Mapping[tuple[str, int], int]) -> list[tuple[int, int]]:
    """Return when a rank was in collectives: its measured waits and its assumed waits, merged.

    `last` has by a collective's group and number the time at which the last rank began it.
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


def _recorded_from(times: RankTimes) -> int:
    """Return the time, in nanoseconds since 1970, before which records of a rank may be missing."""
    if times.is_whole:
        return times.began_ns
    firsts = [collective.at_ns for collective in times.met[:1]]
    if sum(b - a for a, b in times.waits) < times.waited_ns:  # the oldest waits were dropped
        firsts += [a for a, _ in times.waits[:1]]
    return max(firsts, default=times.ended_ns)


def _waits(
    meetings: Mapping[tuple[str, int], Mapping[int, int]],
    spans: Mapping[int, list[tuple[int, int]]],
) -> tuple[dict[int, list[RankWait]], dict[int, int]]:
    """Return two dicts by rank: its waits for other ranks, and how many collectives it began late.

    All times are in nanoseconds.  `meetings` has, by a collective's group and number, when each
    rank began it.  `spans` has for each rank when it was in collectives.
    """
    waits: dict[int, list[RankWait]] = {rank: [] for rank in spans}
    came_last: dict[int, int] = dict.fromkeys(spans, 0)
    done: dict[int, int] = defaultdict(int)  # by rank: the time up to which its waits are counted
    for at in sorted(meetings.values(), key=lambda at: max(at.values())):
        last_rank = max(at, key=lambda rank: at[rank])
        came_last[last_rank] += at[last_rank] - min(at.values()) >= LATE * 1e9
        for rank, arrived in at.items():
            if rank != last_rank:
                begin = max(arrived, done[rank])
                waits[rank] += (
                    RankWait(a, b, last_rank) for a, b in _within(spans[rank], begin, at[last_rank])
                )
                done[rank] = max(done[rank], at[last_rank])
    return waits, came_last


def _within(spans: Sequence[TimeSpan], begin: float, end: float) -> Iterator[TimeSpan]:
    """Yield the parts of these time spans that lie between `begin` and `end`."""
    for at in range(max(0, bisect_left(spans, (begin, 0)) - 1), len(spans)):
        first, last = max(spans[at][0], begin), min(spans[at][1], end)
        if spans[at][0] >= end:
            break
        if first < last:
            yield first, last


def _operations(ranks: Iterable[tuple[Met, ...]]) -> tuple[str, ...]:
    """Return texts on the collectives by operation: `all_reduce x 3 (3 KiB)`, most bytes first.

    Only the rank that has begun the most collectives is counted.
    """
    sizes: dict[str, list[int]] = defaultdict(list)
    for each in max(ranks, key=len, default=()):
        sizes[each.name].append(each.size)
    order = sorted(sizes.items(), key=lambda item: (-sum(item[1]), -len(item[1]), item[0]))
    return tuple(
        f"{name} x {len(each)}{f' ({size_text(sum(each))})' if any(each) else ''}"
        for name, each in order
    )


# --- slices of equal length, for a drawing ------------------------------------------------------


class TimeSlice(NamedTuple):
    """How a rank spent a slice of the cell's time.

    `computing`, `communicating` and `waiting` are shares of the time in which the rank ran the cell
    during the slice; they add up to 1.  `caused` is the share of the slice in which another rank
    waited for this rank, on average.
    """

    computing: float
    communicating: float  # the share in collectives without `waiting`
    waiting: float  # the share in collectives that another rank had not begun
    caused: float
    is_recorded: bool = True  # False if spans may be missing: all shares are 0 then


def slices_of(timeline: Timeline, slice_count: int) -> dict[int, list[TimeSlice | None]]:
    """Divide the time of the cell into slices of equal length; return by rank the rank's slices.

    A slice is None if the rank ran the cell for less than half of that time.
    """
    step = timeline.seconds / slice_count or 1.0
    others = max(1, len(timeline.rows) - 1)
    caused = {row.rank: [0.0] * slice_count for row in timeline.rows}
    for row in timeline.rows:
        for wait in row.waits:
            for number, seconds in _by_slice(wait.begin, wait.end, step, slice_count):
                caused[wait.awaited][number] += seconds / step / others
    return {row.rank: _slices(row, step, caused[row.rank]) for row in timeline.rows}


def _slices(row: TimelineRow, step: float, caused: Sequence[float]) -> list[TimeSlice | None]:
    within, waiting = [0.0] * len(caused), [0.0] * len(caused)
    for spans, seconds_of in ((row.spans, within), (row.waits, waiting)):
        for begin, end, *_ in spans:
            for number, seconds in _by_slice(begin, end, step, len(caused)):
                seconds_of[number] += seconds
    slices: list[TimeSlice | None] = []
    for number in range(len(caused)):
        begin, end = number * step, (number + 1) * step
        first, last = max(begin, row.begin), min(end, row.begin + row.seconds)
        if (ran := last - first) < step / 2:
            slices.append(None)
        elif end - max(begin, row.recorded_from) < step / 2:
            slices.append(TimeSlice(0.0, 0.0, 0.0, 0.0, is_recorded=False))
        else:
            inside = min(1.0, within[number] / ran)
            waits = min(inside, waiting[number] / ran)
            slices.append(TimeSlice(1 - inside, inside - waits, waits, caused[number]))
    return slices


def _by_slice(
    begin: float, end: float, step: float, slice_count: int
) -> Iterator[tuple[int, float]]:
    """Yield the number of each slice that a time span overlaps, and the seconds of the overlap.

    The span is from `begin` to `end`.  There are `slice_count` slices of `step` seconds each; the
    first begins at 0.
    """
    for number in range(max(0, int(begin / step)), min(slice_count, int(end / step) + 1)):
        seconds = min(end, (number + 1) * step) - max(begin, number * step)
        if seconds > 0:
            yield number, seconds
