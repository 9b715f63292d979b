"""Tests of what `GroupFormation` asks of a part: real workers and a fake answer alike.

If the fake keeps this contract, the tests of `GroupFormation` need no processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from nbdist.agent import worker_group
from nbdist.agent.group_formation import NodeWorkers
from nbdist.agent.listener import StoreWindow
from nbdist.agent.worker_group import WorkerGroup
from nbdist.cluster.node import Node
from nbdist.topology import Position
from nbdist.wire import node_messages as asks
from nbdist.wire.control import HeldGroups
from nbdist.wire.messages import AgentRequest
from nbdist.wire.spec import WorldSpec
from nbdist.wire.store import HostedStore, Operation, StoreReply
from tests.agent.sources import Source, worker_start
from tests.agent.test_group_formation import FakePart
from tests.waiting import until

pytestmark = pytest.mark.own_agent


class CountingStore(HostedStore):
    asked = 0

    async def ask(self, operation: Operation) -> StoreReply:
        self.asked += 1
        return await super().ask(operation)


@dataclass
class Tried:
    """A part under test, with ways to kill a rank, to make a start fail and to make it wait."""

    part: NodeWorkers
    kill: Callable[[int], Awaitable[None]]
    fail: Callable[[WorldSpec], WorldSpec]
    wait: Callable[[], None] = lambda: None
    store: CountingStore = field(default_factory=CountingStore)  # for a part on another machine


def fake() -> Tried:
    part = FakePart()

    async def kill(rank: int) -> None:
        part.die(rank)

    def fail(spec: WorldSpec) -> WorldSpec:
        part.fails = "it exited with code 1"
        return spec

    return Tried(part, kill, fail, lambda: setattr(part, "waits", True))


def linked(group: WorkerGroup) -> Node:
    """Return the head's end of a link to an agent that has the workers of `group`."""
    tasks: set[asyncio.Task[None]] = set()

    async def answer(asked: AgentRequest[asks.PartRequest[None]]) -> None:
        node.resolve_request(asked.id, await group.execute(asked.request))

    def send(message: asks.NodeDown) -> None:
        tasks.add(asyncio.ensure_future(answer(message)))

    facts = asks.NodeFacts("a", 0, "127.0.0.1", 1, 2, (), "", {})
    node = Node(0, socket.gethostname(), asks.NodeHello("", 0, facts), send)
    return node


@pytest.fixture
def runner(bench: Source) -> asyncio.Runner:
    return bench.runner


@pytest.fixture
def spec(bench: Source) -> WorldSpec:
    """A world of two ranks on one machine."""
    slots = (Position(0, 0), Position(0, 1))
    spec = worker_start(bench.runtime).world
    return replace(spec, world_size=2, backend="gloo", slots=slots)


@pytest.fixture(params=["fake", "here", "elsewhere"])
def tried(request: pytest.FixtureRequest, bench: Source, runner: asyncio.Runner) -> Iterator[Tried]:
    """A fake part, workers on this machine, or workers behind a link."""
    if request.param == "fake":
        yield fake()
        return
    is_far, runtime, source = request.param == "elsewhere", bench.runtime, bench
    asked = CountingStore()
    store = StoreWindow(runtime, asked.ask) if is_far else None

    async def make() -> WorkerGroup:
        say = (lambda *_: None), (lambda _: None)
        return WorkerGroup(runtime, source.children, source.forker, *say, store)

    async def kill(rank: int) -> None:
        os.kill(group.all[rank].pid, signal.SIGKILL)
        await until(lambda: not group.alive([rank]))

    def fail(spec: WorldSpec) -> WorldSpec:
        return replace(spec, environ={**spec.environ, "GLOO_SOCKET_IFNAME": "nowhere0"})

    async def end() -> None:
        await group.stop(0.0)
        group.close()
        if store is not None:
            await store.close()

    group = runner.run(make())
    yield Tried(linked(group) if is_far else group, kill, fail, store=asked)
    runner.run(end())


async def test_ranks_of_a_part_are_replaced_and_renumbered(tried: Tried, spec: WorldSpec) -> None:
    """A part starts, replaces, renumbers and ends ranks; live ranks keep their processes."""
    part = tried.part
    started = await part.execute(asks.StartPart(spec, (0, 1), 1))
    assert isinstance(started, asks.Formed)
    assert (started.pids.keys(), started.logs) == ({0, 1}, {0: "", 1: ""})
    assert sorted(started.alive) == [0, 1]
    held = [HeldGroups(rank, 2, {}) for rank in (0, 1)]
    assert await part.execute(asks.GetHeld()) == asks.LiveRanks(dict(enumerate(held)))
    await tried.kill(1)
    assert await part.execute(asks.GetHeld()) == asks.LiveRanks({0: held[0]})
    assert await part.execute(asks.Prepare(spec, (1,))) == ""
    formed = await part.execute(asks.Form(spec, (0, 1), 1, 2, 1, (1,), {}))
    assert (formed.problem, sorted(formed.alive)) == ("", [0, 1])
    assert formed.pids[0] == started.pids[0]
    assert formed.pids[1] != started.pids[1]
    assert await part.execute(asks.GetHeld()) == asks.LiveRanks(dict(enumerate(held)))
    await part.execute(asks.EndRanks((0,), 0.0))
    await part.execute(asks.EndRanks((0,), 0.0))  # the part has no rank 0 any more
    await part.execute(asks.Renumber({1: 0}))
    fewer = replace(spec, world_size=1, slots=spec.slots[:1])
    alone = await part.execute(asks.Form(fewer, (0,), 1, 3, 3, (), None))
    assert (alone.problem, alone.alive, dict(alone.pids)) == ("", (0,), {0: formed.pids[1]})
    assert await part.execute(asks.GetHeld()) == asks.LiveRanks({0: HeldGroups(0, 1, {})})
    await part.execute(asks.EndRanks((0,), 0.0))
    assert await part.execute(asks.GetHeld()) == asks.LiveRanks({})


async def test_a_failed_start_names_rank_and_reason(tried: Tried, spec: WorldSpec) -> None:
    """A failed start names the rank and the reason, and leaves no rank alive."""
    failed = await tried.part.execute(asks.StartPart(tried.fail(spec), (0, 1), 1))
    assert (failed.rank in (0, 1), failed.reason) == (True, "it exited with code 1")
    assert await tried.part.execute(asks.GetHeld()) == asks.LiveRanks({})


async def test_calling_off_ends_ranks_that_wait(tried: Tried, spec: WorldSpec) -> None:
    """Ranks that wait for ranks of other parts end if their own generation is called off."""
    tried.wait()
    start = asyncio.ensure_future(tried.part.execute(asks.StartPart(spec, (0,), 1)))
    await asyncio.sleep(0.1)
    await tried.part.execute(asks.CallOff(2))
    await asyncio.sleep(0.1)
    assert not start.done()
    await tried.part.execute(asks.CallOff(1))
    assert (await start).reason == "it was killed by SIGKILL"
    assert await tried.part.execute(asks.GetHeld()) == asks.LiveRanks({})


@pytest.mark.parametrize("tried", ["here"], indirect=True)
async def test_a_silent_survivor_is_ended(
    tried: Tried, spec: WorldSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A survivor that does not answer for a while is ended, and the problem is reported."""
    monkeypatch.setattr(worker_group, "GROUP_HEAL_TIMEOUT", 0.1)
    monkeypatch.setattr(worker_group, "CALLED_OFF_GRACE", 0.1)
    alone = replace(spec, world_size=1, slots=spec.slots[:1])
    started = await tried.part.execute(asks.StartPart(alone, (0,), 1))
    assert isinstance(started, asks.Formed)
    os.kill(started.pids[0], signal.SIGSTOP)
    formed = await tried.part.execute(asks.Form(alone, (0,), 1, 2, 1, (), {}))
    assert (formed.alive, formed.problem) == ((), "a rank did not answer")


@pytest.mark.parametrize("tried", ["elsewhere"], indirect=True)
async def test_a_rank_asks_the_store_twice_for_a_group(tried: Tried, spec: WorldSpec) -> None:
    """To form a group, each rank asks the store of another machine twice.

    For a backend that can be connected again (from torch 2.14 on), both ranks ask 5 times more.
    """
    await tried.part.execute(asks.StartPart(spec, (0, 1), 1))
    assert tried.store.asked in (2 * 2, 4 * 2 + 1)
