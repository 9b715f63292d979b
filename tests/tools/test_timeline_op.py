"""Tests of `nbdist.tools.timeline_op`, in real workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdist.tools.timeline import timeline_of
from nbdist.tools.timeline_op import trace_events
from nbdist.wire.ops import RankTimes
from nbdist.world.world import World
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(2) as world:
        yield world


def times_of(world: World) -> dict[int, RankTimes]:
    return dict(enumerate(world.call("timeline")))


def test_before_any_cell(world: World) -> None:
    """There is nothing to tell."""
    assert timeline_of(times_of(world)) is None


def test_waits_and_collectives(world: World) -> None:
    """Of the last cell: what it met in, on both ranks, and how long it waited for the late one."""
    world.execute("dist.barrier()")
    world.execute(
        "import time\nx = torch.ones(8, dtype=torch.float64)\n"
        "time.sleep(0.3 * rank)\ndist.all_reduce(x)\nwork = dist.all_reduce(x, async_op=True)\n"
        "work.wait()"
    )
    times = times_of(world)
    for each in times.values():
        assert [(met.name, met.size) for met in each.met] == [("all_reduce", 64)] * 2
        assert len(each.waits) == 2
        assert each.is_whole
    timeline = timeline_of(times)
    assert timeline is not None
    assert timeline.straggler is timeline.rows[1]
    assert timeline.rows[1].awaited > 0.2
    assert timeline.rows[0].waiting > 0.2 > timeline.rows[1].waiting
    assert times_of(world) == times  # looking is no cell


def test_ddp(world: World) -> None:
    """What C++ code waits for in a backward is seen too."""
    world.execute(
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "model(torch.ones(1, 4)).sum().backward()"
    )
    world.execute("time.sleep(0.3 * rank)\nmodel(torch.ones(1, 4)).sum().backward()")
    timeline = timeline_of(times_of(world))
    assert timeline is not None
    assert timeline.straggler is timeline.rows[1]
    assert timeline.rows[0].waiting > 0.2


def test_calls_are_timed_as_cells_are(world: World) -> None:
    """`World.run` too."""
    world.run(sum, [1, 2])
    assert all(0 < each.ended_ns - each.began_ns < 1e9 for each in times_of(world).values())
    assert all(each.met == () for each in times_of(world).values())


def test_a_rank_s_events() -> None:
    """Its own process under its rank; a GPU's streams are threads of it, arrows stay inside."""
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


def test_no_profile(world: World) -> None:
    """Nothing runs, nothing comes back."""
    assert [*world.call("timeline.end_profile", origin_ns=0)] == [None, None]
