"""Worlds over ssh whose machines are lost, late, slow, or back."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from nbdist.errors import AgentLost, ScaleError, WorkerError
from nbdist.world.states import State
from nbdist.world.world import World
from tests.hosts.launched import has_come, ours_on
from tests.hosts.network import Host, Network
from tests.hosts.worlds import check_whole, lose, new_world
from tests.waiting import wait_until

pytestmark = pytest.mark.shared_world

SEAT = """
[rank, world_size, int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"]),
 int(os.environ["LOCAL_WORLD_SIZE"]), socket.gethostname(), globals().get("was")]
"""

SET_UP = "import os, socket, torch, torch.distributed as dist"

LOST_SECONDS = 2.0
"""In which all packets of one host to another are lost; less than a sign of life may take."""


@pytest.fixture(scope="module")
def started(path: None, hosts_of_module: list[Host]) -> Iterator[World]:
    """Two workers on each of two hosts, of which all tests have some."""
    with new_world() as world:
        world.execute(SET_UP, setup=True)
        yield world


@pytest.fixture
def world(started: World, hosts: list[Host]) -> World:
    """It, whole again, with what each rank was in this test."""
    if started.state is not State.READY or started.size != 4:
        started.restart(4)
    started.execute("was = rank")
    return started


def is_broken(world: World) -> bool:
    """Whether it is known that ranks have died, or are lost."""
    world.session.receive(0.1)
    return world.state is State.BROKEN


def has_room(world: World) -> bool:
    """Whether there are four workers again, as soon as the machines for them are there."""
    with suppress(ScaleError):
        world.scale(4)
    return world.size == 4


def in_order(world: World, hosts: list[Host]) -> list[Host]:
    """The two hosts, that of rank 0 first: one that has been lost comes back after the other."""
    first = world.gather("socket.gethostname()", ranks=[0])[0]
    return sorted(hosts[:2], key=lambda host: host.name != first)


def seats(world: World) -> list[object]:
    """Say where each rank is, and what it was before; all ranks can still reduce together."""
    world.execute("total = torch.tensor([float(rank)])\ndist.all_reduce(total)")
    everyone = float(sum(range(world.size)))
    assert [float(each) for each in world.gather("total")] == [everyone] * world.size
    return world.gather(SEAT)


def test_a_link_is_taken_down(world: World, hosts: list[Host], network: Network) -> None:
    """In the middle of a collective: the survivors are freed, keep what they have, and go on.

    When the machine comes back it is taken in between cells, with set-up cells.
    """
    world.execute("pair = dist.new_group([0, 1])")
    said = lose(world, network, hosts[1].link_down)
    assert said.startswith("rank 2 on node2 ")
    assert "was lost" in said
    assert "now 2 workers; the other ranks keep their variables" in said
    assert world.state is State.READY
    assert seats(world) == [[r, 2, 0, 1, 2, "node1", r] for r in range(2)]
    # With the cable still out: what was started there has found out by itself.
    wait_until(lambda: not ours_on(hosts[1]), "node2 to be empty")
    hosts[1].link_up()
    wait_until(lambda: has_come(world), "node2 to come back")
    there = [["node1", 0], ["node1", 1], ["node2", None], ["node2", None]]
    assert [seat[5:] for seat in seats(world)] == there


def test_ranks_of_a_lost_machine_go_where_there_is_room(
    world: World, hosts: list[Host], network: Network
) -> None:
    """With their ranks; what they had is lost, set-up cells have run, and groups are whole."""
    world.scale(ranks=[0, 2])
    world.execute("was = rank")
    assert [seat[5] for seat in seats(world)] == ["node1", "node2"]
    said = lose(world, network, hosts[0].link_down)
    assert said.startswith("rank 0 on node1 ")
    assert "was restarted and its variables" in said
    assert seats(world) == [[0, 2, 0, 1, 2, "node2", None], [1, 2, 0, 1, 2, "node2", 1]]
    hosts[0].link_up()
    wait_until(lambda: has_room(world), "node1 to come back")


def test_the_ranks_of_one_machine_leave(world: World, hosts: list[Host]) -> None:
    """As is asked for: the others are renumbered, and meet at the machine that is first now."""
    _, second = in_order(world, hosts)
    world.scale(ranks=[2, 3])
    assert seats(world) == [[r, 2, 0, 1, 2, second.name, r + 2] for r in range(2)]
    assert world.gather("os.environ['MASTER_ADDR']") == [second.address] * 2
    world.scale(4)


def test_the_first_machine_is_lost(world: World, hosts: list[Host]) -> None:
    """Whoever was rank 0: the next is, also for stores of users' own; models go on."""
    world.execute(
        "net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "def step():\n"
        "    net(torch.ones(1, 4)).sum().backward()\n"
        "    return net.module.weight.grad.sum().item()\n"
        "step()"
    )
    first, second = in_order(world, hosts)
    first.link_down()
    wait_until(lambda: is_broken(world), f"the loss of {first} to be noticed")
    assert seats(world) == [[r, 2, 0, 1, 2, second.name, r + 2] for r in range(2)]
    assert world.gather("os.environ['MASTER_ADDR']") == [second.address] * 2
    assert len({*world.gather("step()")}) == 1


def test_all_machines_are_lost(world: World, hosts: list[Host], network: Network) -> None:
    """It is said, and what to do; nothing waits."""

    def pull() -> None:
        for host in hosts[:2]:
            host.link_down()

    assert "all machines are lost" in lose(world, network, pull)
    assert world.state is State.BROKEN
    for host in hosts[:2]:
        host.link_up()
    world.restart()
    assert [seat[5] for seat in seats(world)] == ["node1", "node1", "node2", "node2"]


def test_a_slow_link_and_busy_machines(world: World, hosts: list[Host]) -> None:
    """Packets that are late or lost, big values on their way, no processor left: all live on."""
    pids = dict(world.pids)
    spinning = [
        hosts[1].popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    for host in hosts[:2]:
        host.slow(delay=0.025, loss=0.01)
    try:
        values = bytes(1 << 20)
        world.execute("size = len(values)", names={"values": values})
        assert world.gather("size") == [len(values)] * 4
        world.execute("for _ in range(5): dist.all_reduce(torch.ones(1000))")
        with pytest.raises(WorkerError, match="bad shard"):
            world.execute("if rank: raise ValueError('bad shard')\ndist.barrier()")
        world.execute("import time\nend = time.time() + 3\nwhile time.time() < end: pass")
        assert len(world.gather("bytes(500_000)", ranks=[3])[0]) == 500_000
        check_whole(world)
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert world.state is State.READY
    assert world.pids == pids


def test_what_is_on_its_way_when_a_rank_has_finished(world: World, hosts: list[Host]) -> None:
    """Who waits for it does not wait in vain, though packets have to be sent again and again."""
    send = "t = torch.ones(1)\nif rank == 0: dist.send(t, 2)\nif rank == 2: dist.recv(t, 0)"
    world.execute(send)
    first, second = in_order(world, hosts)
    second.block_from(first.address)
    again = threading.Timer(LOST_SECONDS, second.mend)
    again.start()
    try:
        world.execute(send)
    finally:
        again.join()
    with pytest.raises(WorkerError, match=r"rank 2 waits in recv.*ranks 0-1,3 finished"):
        world.execute("if rank == 2: dist.recv(t, 0)")
    check_whole(world)


def test_what_kills_the_head(started: World, hosts: list[Host]) -> None:
    """With its guard it ends: nothing is left of it on any host, and the notebook is told."""
    psutil.Process(started.session.link.agent.pid).kill()
    with pytest.raises(AgentLost):
        started.execute("import time\ntime.sleep(99)")
    wait_until(lambda: not ours_on(hosts[0]), "node1 has ended its agent")


def test_a_world_begins_at_the_minimum(hosts: list[Host], network: Network, path: None) -> None:
    """A host that is not there yet is no obstacle, and is taken in when it comes.

    What its loss leads to is the user's to say: all workers are started anew on the machines
    that are left, if they will do, or ended.
    """
    hosts[1].block_port(22)
    with new_world("node1,node2", layout="1:2x1", on_failure="restart-all") as world:
        world.execute(SET_UP, setup=True)
        world.execute("was = rank")
        assert seats(world) == [[0, 1, 0, 1, 1, "node1", 0]]
        hosts[1].mend()
        wait_until(lambda: has_come(world), "node2 to come")
        assert [seat[5:] for seat in seats(world)] == [["node1", 0], ["node2", None]]
        assert "All workers were" in lose(world, network, hosts[1].link_down)
        assert seats(world) == [[0, 1, 0, 1, 1, "node1", None]]
        hosts[1].link_up()
        wait_until(lambda: has_come(world), "node2 to come back")
        assert [seat[5] for seat in seats(world)] == ["node1", "node2"]
        world.restart(on_failure="stop")
        assert "All workers were" in lose(world, network, hosts[1].link_down)
        assert world.state is State.STOPPED
