"""Tests of `nbdist.agent.usage_watch`: what workers use is told while a cell runs, then no more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.agent.usage_watch import UsageWatch
from nbdist.system.proc import LARGEST_SHARE, MemoryGauge
from nbdist.world.status import usage_text
from nbdist.world.world import World
from tests.waiting import SOON
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(2) as started:
        yield started


def test_while_a_cell_runs(world: World, tmp_path: Path) -> None:
    """Each rank's memory comes by itself, and is less on the rank that has less."""
    gate = tmp_path / "gate"
    running = world.submit(
        world.task(
            "import os, time\nbig = torch.ones((1 + 200 * rank) * 2**20, dtype=torch.uint8)\n"
            f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)"
        )
    )
    deadline, more = time.monotonic() + SOON, 0
    for _ in world.follow(running):
        if len(running.usage) == 2:
            more = running.usage[1].memory - running.usage[0].memory
        if more > 150 << 20 or time.monotonic() > deadline:  # it may be counted as it is filled
            gate.touch()
    assert not running.error()
    assert 150 << 20 < more < 250 << 20
    assert usage_text(running.usage.values()).startswith("cpu ")
    world.execute("del big")


def test_no_cell_no_reading() -> None:
    """The watch ends with the last rank that is busy."""
    sent: list[object] = []

    async def run() -> str:
        watch = UsageWatch(MemoryGauge(), sent.append)
        watching = asyncio.ensure_future(watch.watch(lambda: []))
        await asyncio.sleep(0)
        during = repr(watch)
        await watching
        watch.close()
        return during + repr(watch)

    assert asyncio.run(run()) == "<UsageWatch on><UsageWatch off>"
    assert sent == []


def test_what_counting_costs_is_bounded(world: World) -> None:
    """The longer it takes, the seldomer it is done; what is private is known in between."""
    pids = [*world.pids.values()]

    began = time.thread_time()
    for pid in pids:
        Path(f"/proc/{pid}/smaps_rollup").read_text()
    cost = time.thread_time() - began

    async def run() -> tuple[float, list[int], list[int]]:
        gauge = MemoryGauge()
        before = [*(await gauge.read(pids, 10.0)).values()]
        world.execute("more = torch.ones(100 * 2**20, dtype=torch.uint8)", ranks=[1])
        after = [*(await gauge.read(pids, 10.0, fresh=3600.0)).values()]
        return gauge.fresh_seconds, before, after

    fresh, before, after = asyncio.run(run())
    assert fresh > 0.2 * cost / LARGEST_SHARE
    assert after[1] - before[1] > 90 << 20
    assert abs(after[0] - before[0]) < 20 << 20
