"""Tests of `nbdist.tools.timeline`, and its op: which ranks waited for which, and traces."""

from __future__ import annotations

import gzip
import json
import re
import time
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from nbdist.errors import UsageError
from nbdist.tools.timeline import check_path, headline, write_trace
from nbdist.tools.timeline_chart import (
    AwaitedPeriod,
    awaited_periods,
    chart,
    row_picture,
    text_bar,
    tick_text,
    ticks,
)
from nbdist.tools.timeline_data import Timeline, TimeSlice, slices_of, timeline_of
from nbdist.tools.timeline_op import trace_events
from nbdist.wire.ops import Met, RankTimes, TracePart
from nbdist.world import dispatch
from nbdist.world.task_error import error_of
from nbdist.world.world import World
from tests.notebook.front_end import Notebook
from tests.waiting import wait_until

pytestmark = pytest.mark.shared_world(2)


def test_the_timeline_names_the_straggler(kernel: Notebook) -> None:
    """The straggler is named in the head, in its row and by its bar; a rank alone has no waits."""
    kernel.run("%dist_init -n 2")
    assert kernel.run("%dist_timeline").text == "no cell has run on these workers"
    kernel.run(
        "%%distributed\nimport time\nfor _ in range(3):\n    time.sleep(0.4 if rank else 0.01)\n"
        "    dist.all_reduce(torch.ones(256))"
    )
    shown = kernel.run("%dist_timeline")
    head, titles, first, second, bar, late_bar, *others = shown.text.split("\n")
    axis, legend, *periods, last = others
    assert re.search(r"3 collectives · others waited .* for rank 1, which came last to 3 of", head)
    assert titles.split("  ")[0] == "rank"
    assert first.split()[0] == "0"
    assert second.split()[-3] == "3"
    assert bar.count("▁") > 30 > late_bar.count("▁")
    assert late_bar.count("█") > 30 > bar.count("█")
    assert axis.split("|")[1].rstrip() in ("0 s", "0 ms")
    assert legend == "█ only computing  ▄ half  ▁ in collectives"
    assert 1 <= len(periods) <= 3
    for period in periods:
        assert re.fullmatch(r"others waited .* s for rank 1 between .* s and .* s", period)
    assert last == "all_reduce x 3 (3 KiB)"
    pictures = re.findall(r'<img src="[^"]+" alt="(rank \d): ', shown.panel["text/html"])
    assert pictures == ["rank 0", "rank 1"]
    kernel.run("%%distributed\npass")
    head = kernel.run("%dist_timeline -r 0").text.splitlines()[0]
    assert re.fullmatch(r"1 rank · \d+\.\d s · 0 collectives", head)


WORK = """\
import time
time.sleep(rank)
dist.all_reduce(torch.ones(256))
torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
"""


def test_a_profile_is_a_trace_of_all_ranks(kernel: Notebook, tmp_path: Path) -> None:
    """A profile is a single trace of the cell, with a process for each rank and a common clock."""
    path = tmp_path / "trace.json"
    shown = kernel.run(f"%%distributed -n 2 --profile {path}\n{WORK}")
    assert shown.errors == []
    assert shown.streams == []
    said = shown.texts[-1]
    assert said.startswith(f"{path} · ")
    assert said.endswith(" events of 2 ranks · ui.perfetto.dev opens it")
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    timed = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in timed} == {0, 1}
    linear = {e["pid"]: e["ts"] for e in timed if e["name"] == "aten::linear"}
    begins = {e["pid"]: e["ts"] for e in timed if e["name"] == "c10d::allreduce_"}
    assert linear[0] > begins[1]  # rank 0 has waited for rank 1
    arrows = [e["id"] for e in events if e["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) > 0
    assert all(0 <= e["ts"] < 60e6 for e in timed)

    # The trace is written also if the cell fails, over the earlier trace.
    shown = kernel.run(f"%%distributed -r 0 --profile {path}\ntorch.ones(1)\n1 / 0")
    assert "ZeroDivisionError" in shown.error
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0}
    assert "aten::ones" in {e["name"] for e in events}
    # If no trace can be written, the cell does not run.
    kernel.run("%%distributed\nx = 0")
    for options, said in (
        ("--profile train.py", "needs a name that ends in .json"),
        ("--profile /nowhere/x.json", "there is no folder /nowhere"),
        ("--no-wait --profile", "not with `--no-wait`"),
    ):
        assert said in kernel.run(f"%%distributed {options}\nx = 1").error
    assert "0" in kernel.run("%%distributed\nx").text


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


def test_the_straggler_is_the_awaited_rank() -> None:
    """The straggler is the rank that others waited for; a few milliseconds do not count."""
    timeline = found(
        r0=times(100, 400, waits=((100, 301), (400, 601))),
        r1=times(300, 600, waits=((300, 301), (600, 601))),
        r2=times(200, 500, waits=((200, 301), (500, 601))),
    )
    late = timeline.straggler
    assert late is not None
    assert (late.rank, late.came_last, timeline.collective_count) == (1, 2, 2)
    assert late.awaited == pytest.approx(0.3)  # 400 ms of rank 0 and 200 ms of rank 2
    assert [row.in_collectives for row in timeline.rows] == pytest.approx([0.402, 0.002, 0.202])
    assert timeline.rows[0].computing == pytest.approx(0.598)
    waits = ((100, 103), (300, 301))
    timeline = found(r0=times(100, 300, waits=waits), r1=times(102, 300, waits=waits))
    assert (timeline.straggler, timeline.rows[1].came_last) == (None, 1)


def test_waits_in_c_code_are_computed() -> None:
    """A wait in C code, as of DDP, is from the rank's last collective until the last rank came."""
    timeline = found(r0=times(100, 110, 120, ends=700), r1=times(500, 510, 520, ends=700))
    first, second = timeline.rows
    assert first.spans == ((0.12, 0.52),)
    assert second.in_collectives == 0
    assert timeline.straggler is second
    assert second.awaited == pytest.approx(0.4)
    # A rank that computes meanwhile does not wait.
    timeline = found(r0=times(100, waits=((600, 700),)), r1=times(650, waits=((650, 700),)))
    assert timeline.rows[0].in_collectives == pytest.approx(0.1)
    assert timeline.rows[1].awaited == pytest.approx(0.05)


def test_operations_have_bytes_and_gaps_are_named() -> None:
    """Operations have their bytes, and the headline says what ranks have not recorded."""
    timeline = found(r0=times(1, 2, name="all_reduce"), r1=RankTimes(START, START, (), 0, (),
                     is_recorded=False, is_whole=False))  # fmt: skip
    assert [*timeline.operations] == ["all_reduce x 2 (8 B)"]
    assert (timeline.is_recorded, timeline.is_whole, timeline.collective_count) == (False, False, 0)
    assert "which rank came last is not recorded before torch 2.11" in headline(timeline)
    long = found(r0=RankTimes(1, 2, (), 0, (), is_whole=False))
    assert "the last 0 collectives" in headline(long)


def slices(timeline: Timeline, slice_count: int, rank: int = 0) -> list[TimeSlice | None]:
    """Return a rank's slices, rounded."""
    parts = slices_of(timeline, slice_count)[rank]
    return [part and TimeSlice(*(round(each, 6) for each in part[:-1]), part[-1]) for part in parts]


COMPUTES = TimeSlice(1.0, 0.0, 0.0, 0.0)


def test_a_slice_has_shares_of_its_time() -> None:
    """A slice has the shares of computing, communicating, waiting and of the waits caused."""
    timeline = found(
        r0=times(100, 400, waits=((100, 325), (400, 625))),
        r1=times(300, 600, waits=((300, 325), (600, 625))),
    )
    assert slices(timeline, 2) == [
        TimeSlice(0.35, 0.05, 0.6, 0.0),  # 325 ms of 500 ms in collectives, 300 ms of them waiting
        TimeSlice(0.75, 0.05, 0.2, 0.0),
    ]
    assert slices(timeline, 2, 1) == [
        TimeSlice(0.95, 0.05, 0.0, 0.6),
        TimeSlice(0.95, 0.05, 0.0, 0.2),
    ]
    assert [(each.begin, each.end, each.awaited) for each in timeline.rows[0].waits] == [
        (0.1, 0.3, 1),
        (0.4, 0.6, 1),
    ]
    assert timeline.rows[1].waits == ()


def test_a_slice_without_records_is_not_called_computing() -> None:
    """A slice before the oldest records is not recorded; one in which no cell ran is None."""
    late = RankTimes(START + 500 * MS, START + 1000 * MS, (), 0, ())
    timeline = found(r0=times(ends=750), r1=late)
    assert slices(timeline, 4) == [COMPUTES, COMPUTES, COMPUTES, None]
    assert slices(timeline, 4, 1) == [None, None, COMPUTES, COMPUTES]
    assert (timeline.rows[1].begin, timeline.seconds) == (0.5, 1.0)
    assert timeline_of({0: RankTimes(0, 0, (), 0, ())}) is None
    unknown = TimeSlice(0.0, 0.0, 0.0, 0.0, is_recorded=False)
    # The oldest waits were dropped, since the sum of all waits is longer than that of the kept.
    kept = times(450, 800, waits=((500, 600),))._replace(is_whole=False, waited_ns=300 * MS)
    assert slices(found(r0=kept), 4) == [
        unknown,
        unknown,
        TimeSlice(0.6, 0.4, 0.0, 0.0),
        COMPUTES,
    ]
    # All waits were kept, but the oldest collectives were dropped.
    kept = times(200, 800, waits=((500, 600),))._replace(is_whole=False)
    assert slices(found(r0=kept), 4)[:2] == [unknown, COMPUTES]


def test_a_bar_shows_the_share_of_computing() -> None:
    """Text has a character for each slice, as high as the share of computing."""
    shares = [TimeSlice(share / 8, 1 - share / 8, 0.0, 0.0) for share in range(9)]
    unknown = TimeSlice(0.0, 0.0, 0.0, 0.0, is_recorded=False)
    assert text_bar(shares) == "▁▂▃▄▅▆▇██"
    assert text_bar([None, unknown, *shares[:1], None]) == " ·▁"


def test_a_picture_has_an_area_for_each_kind() -> None:
    """A picture has areas for waiting, communicating and computing, and marks below for waits."""
    half = TimeSlice(0.5, 0.25, 0.25, 0.6)
    picture = row_picture([half, half, None, COMPUTES])
    paths = re.findall(r'<path d="([^"]+)" fill="([^"]+)"', picture)
    assert [path for path, _ in paths] == [
        *("M0 80V0h2V80z", "M0 80V20h2V80z", "M0 80V40h2V80z"),
        *("M3 80V0h1V80z",) * 3,
        "M0 84h2v16h-2z",
    ]
    assert len({colour for _, colour in paths}) == 4
    assert 'fill-opacity="0.75"' in picture  # 0.6 of the slice, in quarters


def test_an_axis_has_few_ticks_with_units() -> None:
    """Ticks are at round times with a unit, and none is so near the end that its text is cut."""
    assert ticks(10.2) == [0, 2, 4, 6, 8]
    assert [tick_text(each, 0.9) for each in ticks(0.9)] == [
        *("0 ms", "200 ms", "400 ms", "600 ms", "800 ms"),
    ]
    assert [tick_text(each, 2500.0) for each in ticks(2500.0)][-1] == "2,000 s"
    assert ticks(0.0) == [0.0]


def test_periods_say_when_a_rank_was_awaited() -> None:
    """A period names the awaited rank, its begin and end, and how long the others waited."""
    early = times(100, 110, 700, waits=((100, 250), (700, 960)))
    late = times(250, 250, 950, waits=((950, 960),))
    timeline = found(r0=early, r1=late)
    first, second = awaited_periods(timeline)
    assert (first.rank, second.rank) == (1, 1)
    assert first.seconds == pytest.approx(0.15)
    assert first.begin <= 0.1 < 0.25 <= first.end < 0.3
    assert second.seconds == pytest.approx(0.25)
    said = AwaitedPeriod(1, 0.7, 0.95, 0.25).text(timeline.seconds)
    assert said == "others waited 0.25 s for rank 1 between 0.70 s and 0.95 s"
    assert said.split(" for ")[0] in chart(timeline, timeline.rows).text


MOMENTS = some.lists(some.integers(0, 1000), max_size=6).map(sorted)
SPANS = some.lists(some.tuples(some.integers(0, 900), some.integers(0, 100)), max_size=4)


@given(some.lists(some.tuples(MOMENTS, SPANS), min_size=1, max_size=4))
def test_no_rank_waits_longer_than_it_ran(ranks: list[tuple[list[int], list[tuple[int, int]]]]):
    """No rank waits longer than it ran, and no rank is awaited for longer than others waited."""
    timeline = timeline_of(
        {
            rank: times(*moments, waits=tuple((a, a + b) for a, b in spans))
            for rank, (moments, spans) in enumerate(ranks)
        }
    )
    assert timeline is not None
    for row in timeline.rows:
        assert 0 <= row.waiting <= row.in_collectives + 1e-9 <= row.seconds + 2e-9
        ordered = [edge for span in row.spans for edge in span]
        assert ordered == sorted(ordered)
    parts = slices_of(timeline, 7)
    for row in timeline.rows:
        for part in filter(None, parts[row.rank]):
            assert sum(part[:3]) == pytest.approx(1)
            assert min(part[:4]) >= -1e-9
            assert part.caused <= 1 + 1e-9
    for period in awaited_periods(timeline):
        assert 0 <= period.begin < period.end <= timeline.seconds + 1e-9
        assert (
            period.seconds
            <= min(timeline.rows[period.rank].awaited, period.end - period.begin) + 1e-9
        )
    waited, others = (
        sum(row.in_collectives for row in timeline.rows),
        max(1, len(timeline.rows) - 1),
    )
    assert sum(row.awaited for row in timeline.rows) * others <= waited + 1e-6


def part(text: str) -> TracePart:
    return TracePart(zlib.compress(text.encode()), len(text), 1)


PARTS = {0: part('{"a": 1}'), 1: TracePart(problem="too large"), 2: part('{"b": 2}')}


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_traces_of_ranks_are_joined_in_a_file(tmp_path: Path, name: str) -> None:
    """Traces of ranks are joined as JSON; a file is overwritten only if it is such a trace."""
    path = tmp_path / name
    for _ in range(2):
        write_trace(check_path(str(path)), PARTS)
        data = path.read_bytes()
        events = json.loads(gzip.decompress(data) if name.endswith("gz") else data)["traceEvents"]
        assert events == [{"a": 1}, {"b": 2}]
    path.write_text("{}")
    with pytest.raises(UsageError, match="already exists"):
        check_path(str(path))
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="--profile"):
        write_trace(path, PARTS)
    assert [each.name for each in tmp_path.iterdir()] == [name]


# --- the op, in real workers ------------------------------------------------------------------


def times_of(world: World) -> dict[int, RankTimes]:
    return dict(enumerate(world.call("timeline")))


LATE = """
import os, time
if rank == 1:
    while not os.path.exists({gate!r}): time.sleep(0.001)
"""


def waited_for(world: World, source: str, gate: Path) -> tuple[Timeline, float]:
    """Run a cell in which rank 1 joins the collectives only after rank 0 has waited for 0.1 s."""
    running = world.submit(world.task(f"{LATE.format(gate=str(gate))}{source}"))

    def waits() -> bool:
        rank = world.status()[0]
        return bool(rank.state == "busy" and rank.collective and not rank.collective.is_done)

    wait_until(waits, "rank 0 is in a collective")
    seen = time.monotonic()
    wait_until(lambda: time.monotonic() - seen > 0.1)
    held = time.monotonic() - seen
    gate.touch()
    dispatch.wait(world.engine, running)
    assert error_of(running) is None
    timeline = timeline_of(times_of(world))
    assert timeline is not None
    return timeline, held


def test_ranks_report_waits_and_collectives(world: World, tmp_path: Path) -> None:
    """Both ranks report the collectives of the last cell, and how long they waited."""
    world.execute("x = torch.ones(8, dtype=torch.float64)\ndist.barrier()")
    source = "dist.all_reduce(x)\nwork = dist.all_reduce(x, async_op=True)\nwork.wait()"
    timeline, held = waited_for(world, source, tmp_path / "gate")
    times = times_of(world)
    for each in times.values():
        assert [(met.name, met.size) for met in each.met] == [("all_reduce", 64)] * 2
        assert len(each.waits) == 2
        assert each.is_whole
    assert timeline.rows[0].in_collectives >= held
    assert timeline.rows[1].awaited >= held
    assert times_of(world) == times  # a request for times does not count as a cell
    # Waits of C++ code in a backward pass are measured, too.
    step = "model(torch.ones(1, 4)).sum().backward()"
    ddp = "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))"
    world.execute(f"{ddp}\n{step}")
    timeline, held = waited_for(world, step, tmp_path / "another gate")
    assert timeline.rows[0].in_collectives >= held


def test_events_of_a_rank_are_in_its_process() -> None:
    """Events of a rank are in a process of its own, with a thread for each stream of a GPU."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": 77, "tid": 5, "args": {"name": "main"}},
        {"ph": "X", "name": "b", "cat": "cpu_op", "pid": 77, "tid": 5, "ts": 20.0, "dur": 1},
        {"ph": "X", "name": "a", "cat": "kernel", "pid": 1, "tid": 7, "ts": 10.0, "dur": 1},
        {"ph": "s", "name": "f", "cat": "fwdbwd", "pid": 77, "tid": 5, "ts": 21.0, "id": 3},
        {"ph": "X", "name": "self", "cat": "Trace", "pid": "Spans", "tid": "x", "ts": 1.0},
        {"ph": "i", "name": "end", "pid": "", "ts": 1.0},
    ]
    found = [*trace_events(events, 2, 77, 100.0)]
    assert {each["pid"] for each in found} == {2}
    timed = [(each["name"], each["ts"], each["tid"]) for each in found if each["ph"] != "M"]
    assert timed == [("a", 110.0, 10_010_007), ("b", 120.0, 5), ("f", 121.0, 5)]
    assert found[-1]["id"] == "2.3"
    names = [each["args"]["name"] for each in found if each["name"].endswith("_name")]
    assert names == ["rank 2", "main", "GPU 1 stream 7"]
