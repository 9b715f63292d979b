"""Tests of `nbdist.cluster.node`: the places of ranks, and checks and requests of machines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from nbdist.cluster import node as nodes_module
from nbdist.cluster.node import (
    REACHED,
    Node,
    NodeLost,
    NoSlots,
    lack_of_room,
    place_new_world,
    resized,
    targets,
)
from nbdist.config import WorldConfig
from nbdist.topology import GPU_BACKEND, Position
from nbdist.wire import node_messages as messages
from nbdist.wire.messages import AgentRequest, GetStatus, StartFailure
from nbdist.wire.node_messages import NodeDown, NodeFacts, NodeHello
from nbdist.wire.spec import WorldSpec, versions_here


@dataclass
class Machine:
    number: int
    facts: NodeFacts

    @property
    def name(self) -> str:
        return self.facts.name


def machine(number: int, gpus: int = 0, cores: int = 2) -> Machine:
    """Return a node with this many GPUs and cores."""
    names = tuple(map(str, range(gpus)))
    address, port = f"10.0.0.{number + 1}", 4000 + number
    facts = NodeFacts(f"n{number}", number, address, port, cores, names, "", {})
    return Machine(number, facts)


SPEC = WorldSpec(1, "gloo", {"SECRET": "x"}, "/", (), 1, "")


def wanted(**fields: Any) -> WorldConfig:
    """Return the configuration of a world, by ssh if hosts are given, else by `nbdist join`."""
    return WorldConfig(launcher="ssh" if "hosts" in fields else "join", **fields)


@pytest.mark.parametrize(
    ("fields", "nodes", "slots"),
    [
        ({"hosts": "a:1,b:2"}, [machine(0), machine(1)], [(0, 0), (1, 0), (1, 1)]),
        ({}, [machine(0, gpus=1), machine(1, cores=1)], [(0, 0), (1, 0)]),
        ({"layout": "2x2", "n": 3}, [machine(0), machine(1)], [(0, 0), (0, 1), (1, 0)]),
        ({"layout": "2x1"}, [machine(2), machine(0)], [(0, 0), (2, 0)]),
        # A host beyond the nodes, and room for further ranks, are in reserve.
        ({"layout": "2x1", "hosts": "a:2,b,c"}, [*map(machine, range(3))], [(0, 0), (1, 0)]),
        ({"gpus": "1,3"}, [machine(0, gpus=4)], [(0, 0), (0, 1)]),
    ],
)
def test_ranks_fill_one_node_after_the_other(
    fields: Mapping[str, Any], nodes: list[Machine], slots: list[tuple[int, int]]
) -> None:
    """A node has as many ranks as requested, or a rank for each GPU, or for each core."""
    spec = place_new_world(SPEC, wanted(**fields), nodes)
    assert [tuple(slot) for slot in spec.slots] == slots
    assert spec.world_size == len(slots)
    assert spec.master_addr == "10.0.0.1"


def test_nccl_is_refused_before_ranks_start() -> None:
    """nccl needs a GPU for each rank, and a torch with nccl; otherwise the default is gloo."""
    asked, auto = wanted(layout="1x2", backend="nccl"), wanted(layout="1x2")
    few = "for 2 ranks, and nccl needs one for each: `--backend gloo`"
    for gpus, torch, told in (
        (0, "2.13.0", f"n0 has 0 GPUs {few}"),
        (1, "2.13.0", f"n0 has 1 GPU {few}"),
        (2, "2.13.0+cpu", "torch 2.13.0+cpu on n0 has no nccl: `--backend gloo`"),
    ):
        there = machine(0, gpus)
        there.facts = there.facts._replace(versions={"torch": torch})
        with pytest.raises(NoSlots) as found:
            place_new_world(replace(SPEC, backend="nccl"), asked, [there])
        assert str(found.value) == told
        if gpus == 1:
            shared = replace(asked, share_gpus=True)
            assert place_new_world(replace(SPEC, backend="nccl"), shared, [there]).world_size == 2
        else:
            assert place_new_world(SPEC, auto, [there]).backend == "gloo"


def test_the_backend_is_that_of_all_nodes() -> None:
    """nccl needs GPUs on all nodes; a requested backend is not changed."""
    mixed, all_have = [machine(0, gpus=1), machine(1)], [machine(0, gpus=1), machine(1, gpus=1)]
    assert place_new_world(SPEC, wanted(), mixed).backend == "gloo"
    assert place_new_world(SPEC, wanted(), all_have).backend == GPU_BACKEND
    assert place_new_world(SPEC, wanted(backend="gloo"), all_have).backend == "gloo"


def test_resizing_keeps_slots_of_ranks_that_stay() -> None:
    """New ranks take free slots, other ranks keep theirs; an error names the missing room."""
    nodes = [machine(0), machine(1)]
    asked = wanted(layout="2x2", n=3)
    spec, room = place_new_world(SPEC, asked, nodes), nodes_module.room_of(asked, nodes)
    assert resized(spec, 4, (0, 1, 2), room).slots == (*spec.slots, (1, 1))
    assert resized(spec, 1, (2,), room).slots == spec.slots[2:]
    assert resized(spec, 3, (0, 2), room).slots == (spec.slots[0], spec.slots[2], (0, 1))
    with pytest.raises(NoSlots, match="4 workers have room"):
        resized(spec, 5, (0, 1, 2), room)
    with pytest.raises(NoSlots, match="5 workers asked for, but room for 4: n0 has 2, n1 has 2"):
        place_new_world(SPEC, wanted(n=5), nodes)
    with pytest.raises(NoSlots, match="n1: `--gpus 1,3`: there is no GPU 3, 0-1 are visible"):
        place_new_world(SPEC, wanted(gpus="1,3"), [machine(0, gpus=4), machine(1, gpus=2)])
    by_gpu, without = wanted(n="gpu"), machine(1)
    assert nodes_module.room_of(by_gpu, [machine(0, gpus=3)]) == {0: 3}
    with pytest.raises(NoSlots, match="n1: `-n gpu`: no GPU is visible"):
        place_new_world(SPEC, by_gpu, [machine(0, gpus=1), without])
    assert lack_of_room(by_gpu, without).startswith("n1: `-n gpu`: no GPU is visible")
    assert lack_of_room(wanted(layout="2x2"), without) == ""
    for fields, there, size in (
        *(({"layout": "2x2"}, 1, 2), ({"layout": "2x2"}, 3, 4), ({"hosts": "a:1,b:2"}, 2, 3)),
        *(({"layout": "2x2", "n": 3}, 2, 3), ({"layout": "2x2", "n": 3}, 1, 2)),
    ):
        assert nodes_module.attainable_size(wanted(**fields), [*map(machine, range(there))]) == size


@pytest.mark.parametrize(
    ("hosts", "there", "keep", "slots"),
    [
        ("a:2,b:2", (0, 1), (0, 1, 2, 3), [(0, 0), (0, 1), (1, 0), (1, 1)]),
        # Ranks without room leave, and the other ranks keep node and LOCAL_RANK.
        ("a:2,b:2", (0,), (0, 1), [(0, 0), (0, 1)]),
        ("a:2,b:3", (1,), (2, 3), [(1, 0), (1, 1)]),
        ("a:2,b:2", (), (), [(0, 0), (0, 1), (1, 0), (1, 1)]),
        # A host in reserve, or another host with room, takes the ranks.
        ("a:2,b:2,c:2", (1, 2), (0, 1, 2, 3), [(2, 0), (2, 1), (1, 0), (1, 1)]),
        ("a:4,b:2", (0,), (0, 1, 2, 3), [(0, 0), (0, 1), (0, 2), (0, 3)]),
    ],
)
def test_ranks_of_lost_machines_move_if_there_is_room(
    hosts: str, there: tuple[int, ...], keep: tuple[int, ...], slots: list[tuple[int, int]]
) -> None:
    """Ranks without room leave; MASTER_ADDR is the address of rank 0's machine."""
    asked = wanted(hosts=hosts, layout="2x2")
    nodes = [machine(number) for number in range(len(asked.named_hosts))]
    spec = place_new_world(SPEC, asked, nodes)
    spec, stay = nodes_module.without_lost_nodes(spec, asked, [nodes[number] for number in there])
    assert stay == keep
    assert [*spec.slots] == slots
    assert spec.world_size == len(slots)
    assert spec.master_addr == f"10.0.0.{slots[0][0] + 1}"


HERE = {"Python": "3.11.7", "torch": "2.13.0+cpu", "cloudpickle": "3.1.2"}
THERE = {"Python": "3.11.2", "torch": "2.13.1", "cloudpickle": "3.1.0"}
FACTS = NodeFacts("b", 1, "10.0.0.2", 4000, 4, (), "/usr/bin/python", THERE)


@pytest.mark.parametrize(
    ("version", "changes", "said"),
    [
        ("0.1.0", {}, ""),
        ("0.2.0", {}, "b has nbdist 0.2.0, the notebook 0.1.0: `pip install nbdist==0.1.0` for"),
        ("0.1.0", {"Python": "3.12.1"}, "/usr/bin/python on b is Python 3.12.1, the notebook's is"),
        ("0.1.0", {"torch": ""}, "/usr/bin/python on b has no torch: `--python` names the"),
        ("0.1.0", {"torch": "2.1.0"}, "b has torch 2.1.0, the notebook 2.13.0+cpu: `pip install t"),
        ("0.1.0", {"cloudpickle": "3.0.0"}, "b has cloudpickle 3.0.0, the notebook 3.1.2: `pip in"),
    ],
)
def test_other_versions_are_named(version: str, changes: dict[str, str], said: str) -> None:
    """The message names both versions, and a command or option that makes them equal."""
    facts = FACTS._replace(versions=THERE | changes)
    found = nodes_module.mismatch("b", NodeHello(version, 1, facts), HERE)
    assert (found[: len(said)], bool(found)) == (said, bool(said))
    # A notebook without torch accepts any torch.
    assert nodes_module.mismatch("b", NodeHello("0.1.0", 1, FACTS), HERE | {"torch": ""}) == ""
    assert all(versions_here().values())


def test_machines_try_to_reach_each_other() -> None:
    """Each of few machines tries all others; of many, each tries a share, and all are tried."""
    few = targets([machine(number) for number in range(3)])
    names = [" ".join(each.name for each in few[n]) for n in range(3)]
    assert names == ["n1 n2", "n2 n0", "n0 n1"]
    assert (few[0][0].address, few[0][0].port) == ("10.0.0.2", 4001)
    many = targets([machine(number) for number in range(40)])
    assert {len(each) for each in many.values()} == {REACHED}
    assert {each.name for tried in many.values() for each in tried} == {f"n{n}" for n in range(40)}
    assert targets([machine(0)]) == {0: ()}


# --- requests to a machine, and its loss ----------------------------------------------------------

HOUR = 3600 * 10**9
SEATED = replace(SPEC, slots=(Position(1, 0),))


def node(number: int, send: Callable[[NodeDown], None]) -> Node:
    """Return a node without a machine; `send` gets its messages."""
    return Node(number, "b", NodeHello("0.1.0", 7, FACTS), send)


async def test_answers_are_matched_by_number() -> None:
    """Each request has a number of its own, and a request without an answer raises NodeLost."""
    sent: list[NodeDown] = []
    there = node(1, sent.append)
    both = asyncio.gather(there.ask(GetStatus(), 5), there.ask(messages.CallOff(1), 5))
    await asyncio.sleep(0)
    assert sent == [AgentRequest(1, GetStatus()), AgentRequest(2, messages.CallOff(1))]
    there.resolve_request(2, None)
    there.resolve_request(1, ())
    there.resolve_request(9, "of nobody")
    assert await both == [(), None]
    with pytest.raises(NodeLost, match="b did not answer within 0 s"):
        await there.ask(GetStatus(), 0.01)


async def test_a_nodes_wrong_clock_is_measured() -> None:
    """The measured lead of a node's clock is wrong by less than a second."""
    sent: list[NodeDown] = []
    there = node(1, sent.append)
    reading = asyncio.create_task(there.measure_clock())
    while not reading.done():
        await asyncio.sleep(0)
        while sent:
            message = sent.pop()
            assert message.request == messages.GetClock()
            there.resolve_request(message.id, time.time_ns() + HOUR)
    assert abs(there.offset_ns - HOUR) < 10**9


async def test_a_lost_node_answers_with_its_problem() -> None:
    """A pending start fails; later requests return the loss and no ranks, without a message."""
    sent: list[NodeDown] = []
    there = node(1, sent.append)
    waiting = asyncio.create_task(there.execute(messages.StartPart(SEATED, (0,), 1)))
    await asyncio.sleep(0)
    there.mark_lost("the connection to b was lost")
    there.mark_lost("again")
    failed = await waiting
    assert isinstance(failed, StartFailure)
    assert (failed.host, failed.reason) == ("b", "the connection to b was lost")
    before = len(sent)
    nothing = messages.Formed({}, {}, (), there.lost)
    assert await there.execute(messages.Form(SEATED, (0,), 1, 2, 1, (), {})) == nothing
    assert await there.execute(messages.GetHeld()) == messages.LiveRanks({}, there.lost)
    assert await there.execute(messages.LocateRanks((0,))) == {}
    assert await there.execute(messages.Prepare(SEATED, (0,))) == there.lost
    await there.execute(messages.CallOff(2))
    await there.execute(messages.EndRanks((0,), 0.0))
    assert len(sent) == before
    assert repr(there) == "<Node 1 b lost: the connection to b was lost>"
