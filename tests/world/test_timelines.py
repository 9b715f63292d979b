"""Tests of `nbdist.world.timelines`: who waited for whom, from what ranks have noted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from nbdist.wire.ops import Met, RankTimes
from nbdist.world.timelines import Timeline, shares, timeline_of

MS = 1_000_000
START = 1_700_000_000_000 * MS


def times(
    *meetings: int, ends: int = 1000, waits: tuple[tuple[int, int], ...] = (), name: str = "x"
) -> RankTimes:
    """A rank that began its collectives at these milliseconds, and measured these waits."""
    spans = tuple((START + a * MS, START + b * MS) for a, b in waits)
    met = tuple(Met("0", n, name, START + at * MS, 4) for n, at in enumerate(meetings, 1))
    return RankTimes(START, START + ends * MS, spans, sum(b - a for a, b in spans), met)


def found(**ranks: RankTimes) -> Timeline:
    timeline = timeline_of({int(rank[1:]): each for rank, each in ranks.items()})
    assert timeline is not None
    return timeline


def test_the_straggler() -> None:
    """Whom the others waited for, and how long each of them did on average."""
    timeline = found(
        r0=times(100, 400, waits=((100, 301), (400, 601))),
        r1=times(300, 600, waits=((300, 301), (600, 601))),
        r2=times(200, 500, waits=((200, 301), (500, 601))),
    )
    late = timeline.straggler
    assert late is not None
    assert (late.rank, late.came_last, timeline.met) == (1, 2, 2)
    assert late.awaited == pytest.approx(0.3)  # 400 ms of rank 0 and 200 ms of rank 2
    assert [row.waiting for row in timeline.rows] == pytest.approx([0.402, 0.002, 0.202])
    assert timeline.rows[0].computing == pytest.approx(0.598)


def test_nobody_stands_out() -> None:
    """Some milliseconds are no straggler."""
    waits = ((100, 103), (300, 301))
    timeline = found(r0=times(100, 300, waits=waits), r1=times(102, 300, waits=waits))
    assert timeline.straggler is None
    assert timeline.rows[1].came_last == 1


def test_waits_of_c_code() -> None:
    """A DDP module's: from the last collective that the rank began until the last rank came."""
    timeline = found(r0=times(100, 110, 120, ends=700), r1=times(500, 510, 520, ends=700))
    first, second = timeline.rows
    assert first.spans == ((0.12, 0.52),)
    assert second.waiting == 0
    assert timeline.straggler is second
    assert second.awaited == pytest.approx(0.4)


def test_what_is_begun_and_waited_for_later() -> None:
    """A rank that computes meanwhile does not wait."""
    early = times(100, waits=((600, 700),))
    timeline = found(r0=early, r1=times(650, waits=((650, 700),)))
    assert timeline.rows[0].waiting == pytest.approx(0.1)
    assert timeline.rows[1].awaited == pytest.approx(0.05)


def test_ranks_that_begin_at_different_times() -> None:
    """Times are counted from the first one's begin."""
    late = RankTimes(START + 50 * MS, START + 250 * MS, (), 0, ())
    timeline = found(r0=times(ends=100), r1=late)
    assert (timeline.rows[1].begin, timeline.seconds) == (0.05, 0.25)
    assert timeline_of({0: RankTimes(0, 0, (), 0, ())}) is None


def test_operations_and_what_is_known() -> None:
    """By bytes; who cannot tell says so."""
    timeline = found(r0=times(1, 2, name="all_reduce"), r1=RankTimes(START, START, (), 0, (),
                     is_recorded=False, is_whole=False))  # fmt: skip
    assert [(each.name, each.count, each.size) for each in timeline.operations] == [
        ("all_reduce", 2, 8)
    ]
    assert (timeline.is_recorded, timeline.is_whole, timeline.met) == (False, False, 0)


def test_slices() -> None:
    """The share of waiting in each; nothing where the rank did not run."""
    timeline = found(r0=times(ends=500, waits=((0, 250),)), r1=times(ends=1000))
    assert shares(timeline.rows[0], timeline.seconds, 4) == [1.0, 0.0, None, None]
    assert shares(timeline.rows[1], timeline.seconds, 2) == [0.0, 0.0]


MOMENTS = some.lists(some.integers(0, 1000), max_size=6).map(sorted)
SPANS = some.lists(some.tuples(some.integers(0, 900), some.integers(0, 100)), max_size=4)


@given(some.lists(some.tuples(MOMENTS, SPANS), min_size=1, max_size=4))
def test_nobody_waits_longer_than_it_ran(ranks: list[tuple[list[int], list[tuple[int, int]]]]):
    """Whatever ranks have noted: no more waiting than time, nor than others were late."""
    timeline = timeline_of(
        {
            rank: times(*moments, waits=tuple((a, a + b) for a, b in spans))
            for rank, (moments, spans) in enumerate(ranks)
        }
    )
    assert timeline is not None
    for row in timeline.rows:
        assert 0 <= row.waiting <= row.seconds + 1e-9
        ordered = [edge for span in row.spans for edge in span]
        assert ordered == sorted(ordered)
        assert all(share is None or 0 <= share <= 1 for share in shares(row, timeline.seconds, 7))
    waited, others = sum(row.waiting for row in timeline.rows), max(1, len(timeline.rows) - 1)
    assert sum(row.awaited for row in timeline.rows) * others <= waited + 1e-6
