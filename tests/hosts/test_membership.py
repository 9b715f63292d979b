"""Worlds over ssh whose machines are lost, late, slow, or back."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from nbdist.errors import AgentLost, ScaleError, UsageError, WorkerError
from nbdist.world.states import State
from nbdist.world.world import World
from tests.hosts.launched import Launched, is_clean, other_notebook, trains
from tests.hosts.network import Host, Network
from tests.hosts.worlds import check_whole, has_come, lose, new_world, ours_on
from tests.waiting import press_stop, wait_until

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
    session = world.session
    wait_until(lambda: session.receive(0.1) or session.dead, f"the loss of {first} is noticed")
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
    """Big values on a thin cable, and no processor left: no rank or machine counts as lost."""
    pids = dict(world.pids)
    spinning = [
        hosts[1].popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    hosts[1].limit(20)
    try:
        values = bytes(1 << 20)
        world.execute("size = len(values)", names={"values": values})
        assert world.gather("size") == [len(values)] * 4
        with pytest.raises(WorkerError, match="bad shard"):
            world.execute("if rank: raise ValueError('bad shard')\ndist.barrier()")
        world.execute("import time\nend = time.time() + 3\nwhile time.time() < end: pass")
        assert len(world.gather("bytes(500_000)", ranks=[3])[0]) == 500_000
        check_whole(world)
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert world.pids == pids


def test_a_step_of_training(world: World) -> None:
    """With what torchrun would have set, on the hosts that were named."""
    trains(world)


def test_a_group_of_the_users_own(world: World) -> None:
    """What a tutorial sets up by hand meets at MASTER_ADDR, over the network."""
    world.execute(
        "dist.destroy_process_group()\n"
        "dist.init_process_group('gloo', init_method='env://')\n"
        "total = torch.ones(1)\ndist.all_reduce(total)\n"
        "dist.destroy_process_group()"
    )
    assert [float(each) for each in world.gather("total")] == [4.0] * 4


def test_stop(world: World) -> None:
    """Ranks on all hosts leave a collective, in which one is missing."""
    pressing = threading.Timer(1.0, press_stop)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        world.execute("import time\nif rank: dist.barrier()\nelse: time.sleep(99)")
    pressing.join()
    check_whole(world)
    assert world.gather("was") == [0, 1, 2, 3]


def test_files_that_hosts_do_not_have(
    world: World, network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a script and of a folder for snapshots it is said, with the way out."""
    (tmp_path / "train.py").write_text("pass\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkerError, match=r"node\d has no .*train\.py.*--sync-code"):
        world.run_script("train.py", "a")
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(tmp_path))
    world.execute("x = torch.full((3,), float(rank + 1))")
    with pytest.raises(UsageError, match=r"node\d does not have the folder .*NBDIST_SNAPSHOT_DIR"):
        world.snapshot(name="one")
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(network.folder))  # which all hosts have
    world.snapshot(name="one")
    world.restart()
    world.restore(name="one")
    assert [each.tolist() for each in world.gather("x")] == [[rank + 1.0] * 3 for rank in range(4)]


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


def test_a_notebook_that_is_killed(path: None, hosts: list[Host], network: Network) -> None:
    """Its workers end with it, whatever they do, on all hosts."""
    ssh = Launched("ssh", {"hosts": "node1:2,node2:2"})
    with other_notebook(ssh, "/nowhere"):
        assert all(host.left() for host in hosts[:2])
    is_clean(ssh, network)


def test_a_world_begins_at_the_minimum(hosts: list[Host], network: Network, path: None) -> None:
    """A host that is not there yet is no obstacle, and is taken in when it comes.

    What its loss leads to is the user's to say: all workers are started anew on the machines
    that are left, if they will do, or ended.
    """
    hosts[1].block("tcp dport 22")
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
