"""Worlds over ssh whose machines are lost, late, slow, silent, or back: what is kept, and said.

`tests/cluster/test_nodes.py` has connections that are lost, heads and agents that stop.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import psutil
import pytest
import torch

from nbdist.errors import AgentLost, ScaleError, UsageError, WorkerDied, WorkerError
from nbdist.terminal.worlds import kill_world
from nbdist.world.remote_call import sending
from nbdist.world.states import WorldState
from nbdist.world.task_run import TaskRun
from nbdist.world.world import World
from tests.hosts.network import Host, Network
from tests.hosts.worlds import (
    AGENT_ARGUMENTS,
    Launched,
    check_whole,
    has_come,
    has_slots,
    is_clean,
    lose,
    named,
    new_world,
    other_notebook,
    ours_on,
)
from tests.waiting import once, press_stop, wait_until

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
    if started.state is not WorldState.READY or started.size != 4:
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


def slots(world: World) -> list[object]:
    """Say where each rank is, and what it was before; all ranks can still reduce together."""
    world.execute("total = torch.tensor([float(rank)])\ndist.all_reduce(total)")
    everyone = float(sum(range(world.size)))
    assert [float(each) for each in world.gather("total")] == [everyone] * world.size
    return world.gather(SEAT)


def test_a_link_is_taken_down(world: World, hosts: list[Host], network: Network) -> None:
    """In mid-collective: survivors keep all and go on; the machine is taken in when it is back."""
    world.execute("pair = dist.new_group([0, 1])")
    said = lose(world, network, hosts[1].link_down)
    assert said.startswith("rank 2 on node2 ")
    assert "was lost" in said
    assert "now 2 workers; the other ranks keep their variables" in said
    assert world.state is WorldState.READY
    assert slots(world) == [[r, 2, 0, 1, 2, "node1", r] for r in range(2)]
    # With the cable still out: what was started there has found out by itself.
    wait_until(lambda: not ours_on(hosts[1]), "node2 to be empty")
    hosts[1].link_up()
    wait_until(lambda: has_come(world), "node2 to come back")
    there = [["node1", 0], ["node1", 1], ["node2", None], ["node2", None]]
    assert [slot[5:] for slot in slots(world)] == there


def test_ranks_of_a_lost_machine_go_where_there_is_room(
    world: World, hosts: list[Host], network: Network
) -> None:
    """With their ranks; what they had is lost, set-up cells have run, and groups are whole."""
    world.scale(ranks=[0, 2])
    world.execute("was = rank")
    assert [slot[5] for slot in slots(world)] == ["node1", "node2"]
    said = lose(world, network, hosts[0].link_down)
    assert said.startswith("rank 0 on node1 ")
    assert "was restarted and its variables" in said
    assert slots(world) == [[0, 2, 0, 1, 2, "node2", None], [1, 2, 0, 1, 2, "node2", 1]]
    hosts[0].link_up()
    wait_until(lambda: has_room(world), "node1 to come back")


def test_the_first_machine_is_lost(world: World, hosts: list[Host]) -> None:
    """Whoever was rank 0: the next is, also for stores of users' own."""
    first, second = in_order(world, hosts)
    first.link_down()
    session = world.session
    wait_until(lambda: session.receive(0.1) or session.dead, f"the loss of {first} is noticed")
    assert slots(world) == [[r, 2, 0, 1, 2, second.name, r + 2] for r in range(2)]
    assert world.gather("os.environ['MASTER_ADDR']") == [second.address] * 2


def test_all_machines_are_lost(world: World, hosts: list[Host], network: Network) -> None:
    """It is said, and what to do; nothing waits."""

    def pull() -> None:
        for host in hosts[:2]:
            host.link_down()

    assert "all machines are lost" in lose(world, network, pull)
    assert world.state is WorldState.BROKEN
    for host in hosts[:2]:
        host.link_up()
    world.restart()
    assert [slot[5] for slot in slots(world)] == ["node1", "node1", "node2", "node2"]


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
        check_whole(world)
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert world.pids == pids


def test_cells(world: World) -> None:
    """Each rank has its slot; a user's own group meets at MASTER_ADDR; Stop ends what waits."""
    has_slots(world)
    world.execute(
        "dist.destroy_process_group()\n"
        "dist.init_process_group('gloo', init_method='env://')\n"
        "total = torch.ones(1)\ndist.all_reduce(total)\n"
        "dist.destroy_process_group()"
    )
    assert [float(each) for each in world.gather("total")] == [4.0] * 4
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
    world.execute("del x")
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


# --- a network that stands still --------------------------------------------------------------

RETRIES = "/proc/sys/net/ipv4/tcp_retries2"


@pytest.fixture
def steady(world: World, hosts: list[Host]) -> Iterator[World]:
    """The world, with a group whose connections are made; no test may lose a rank."""
    check_whole(world)
    pids = dict(world.pids)
    yield world
    for host in hosts:
        host.mend()
    check_whole(world)
    assert world.pids == pids


def until_stalled(
    world: World, source: str = "dist.all_reduce(t)", ends: str = "node1 and node2"
) -> TaskRun:
    """Run a cell until it says that the network between these is."""
    running = world.session.submit(world.session.task(f"t = torch.ones(1)\n{source}"))
    for _ in world.session.follow(running):
        if re.search(f"the network between {ends} is stalled", running.waits):
            return running
    pytest.fail(f"the cell has ended: {running.error()}")


@pytest.mark.parametrize("sender", [0, 2])
def test_a_network_that_is_stalled(sender: int, steady: World, hosts: list[Host]) -> None:
    """It is named in the running cell, which goes on once it is back, whichever end has sent."""
    receiver = 2 - sender
    ends = in_order(steady, hosts)
    here, there = ends[sender // 2], ends[receiver // 2]
    there.block_from(here.address)
    source = f"if rank == {sender}: dist.send(t, {receiver})\n"
    source += f"if rank == {receiver}: dist.recv(t, {sender})"
    running = until_stalled(steady, source, f".*{here.name}.*")
    there.mend()
    steady.session.wait(running)
    assert running.error() is None


def test_stop_where_the_network_is_stalled(steady: World, hosts: list[Host]) -> None:
    """Control is given back, and nothing is lost."""
    hosts[1].block_from(hosts[0].address)
    running = until_stalled(steady)
    steady.session.interrupt()
    steady.session.wait(running)
    assert not running.unfinished


def test_a_network_that_does_not_come_back(steady: World, hosts: list[Host]) -> None:
    """TCP says when it gives up, after seconds here and minutes elsewhere; then it is over."""
    for host in hosts[:2]:
        host.run(f"echo 4 >{RETRIES}")
    try:
        hosts[1].block_from(hosts[0].address)
        running = until_stalled(steady)
        for _ in steady.session.follow(running):
            if running.transcript.errors:
                hosts[1].mend()
        assert "Connection timed out" in str(running.error())
    finally:
        for host in hosts[:2]:
            host.run(f"echo 15 >{RETRIES}")


# --- big values, which a thin cable carries for seconds -----------------------------------------

SIZE = 64 << 20
"""Bytes of a big value."""

LIMIT = 80
"""Million bits a second: they take some seven seconds."""


def segments(hosts: list[Host]) -> list[str]:
    """The shared memory that processes of the hosts, and the heads of this process, have open."""
    pids, found = [pid for host in hosts for pid in host.processes()], []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            pids += [each.pid] if "nbdist.cluster" in each.cmdline() else []
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                if (target := os.readlink(link)).startswith("/memfd:nbdist "):
                    found.append(f"{pid}: {target}")
    return found


def begun(hosts: list[Host], then: Callable[[], None]) -> AbstractContextManager[None]:
    """Do something as soon as a big value is on its way: to hosts, or without any from them."""
    before = {*segments(hosts)}
    return once(lambda: {*segments(hosts)} - before, then, "a big value is on its way")


@pytest.fixture
def big(world: World, hosts: list[Host]) -> Iterator[torch.Tensor]:
    """A big value, for the second host over a thin cable; after the test no host has any."""
    hosts[1].limit(LIMIT)
    yield torch.ones(SIZE // 4)
    world.execute("for name in ('big', 'mine'): globals().pop(name, None)")
    wait_until(lambda: not segments(hosts), "big values are let go of")


def test_how_far_it_is(world: World, big: torch.Tensor) -> None:
    """The notebook is told while it is on its way, once to each host, and when it is there."""
    session = world.session
    with sending(session, {"big": big}, range(world.size)) as (payloads, parcels):
        task = session.task("total = big.sum()", names=payloads)
        running = session.submit(task, shipped=parcels)
        seen = [running.bytes_moved for _ in session.follow(running)]
    done, total = zip(*(far for far in dict.fromkeys(seen) if far[1]), strict=True)
    assert len(done) > 3
    assert [*done] == sorted(done)
    assert {*total} == {done[-1]}
    assert done[-1] == pytest.approx(2 * SIZE, rel=0.01)
    assert world.gather("int(total)") == [SIZE // 4] * 4


def test_stop_before_it_is_there(world: World, hosts: list[Host], big: torch.Tensor) -> None:
    """No rank gets the task, what has come is let go, and the next cell runs."""
    with begun(hosts, press_stop), pytest.raises(KeyboardInterrupt):
        world.execute("ran = True", names={"big": big})
    wait_until(lambda: not segments(hosts), "what has come is let go of")
    world.execute("has = 'big' in globals() or 'ran' in globals()")
    assert world.gather("has") == [False] * 4


def test_a_host_is_lost_half_way(world: World, hosts: list[Host], big: torch.Tensor) -> None:
    """Its ranks count as dead: the others end the task, and what has come back is no value."""
    second = in_order(world, hosts)[1]
    with begun(hosts, second.link_down), pytest.raises(WorkerDied, match=second.name):
        world.execute("done = True", names={"big": big})
    second.mend()
    wait_until(lambda: has_come(world), f"{second} to come back")
    world.execute(f"mine = torch.ones({SIZE // 4})")
    second.limit(LIMIT)
    with begun([], second.link_down), pytest.raises(WorkerDied, match=second.name):
        world.gather("mine", ranks=[2])


# --- what is killed -----------------------------------------------------------------------------


def test_what_kills_the_head(started: World, hosts: list[Host]) -> None:
    """With its guard it ends: nothing is left of it on any host, and the notebook is told."""
    psutil.Process(started.session.link.agent.pid).kill()
    with pytest.raises(AgentLost):
        started.execute("import time\ntime.sleep(99)")
    wait_until(lambda: not ours_on(hosts[0]), "node1 has ended its agent")


@pytest.mark.parametrize("detach", [False, True])
def test_a_notebook_that_is_killed(
    path: None, hosts: list[Host], network: Network, *, detach: bool
) -> None:
    """Its workers end with it, whatever they do, on all hosts; detached ones by a command."""
    ssh, name = Launched("ssh", {"hosts": "node1:1,node2:1"}), f"killed-{os.getpid()}"
    with other_notebook(ssh, "/nowhere", name=name, detach=detach):
        assert all(host.left() for host in hosts[:2])
    if detach:
        wait_until(lambda: named(name)[0].is_detached, "its notebook is gone")
        assert all(host.left() for host in hosts[:2])
        assert kill_world(name) == 0
        assert named(name) == []
    is_clean(ssh, network)


def test_a_world_begins_at_the_minimum(hosts: list[Host], network: Network, path: None) -> None:
    """A host that comes later is taken in; its loss restarts all workers, or ends them, as said."""
    hosts[1].block("tcp dport 22")
    with new_world("node1,node2", layout="1:2x1", on_failure="restart-all") as world:
        world.execute(SET_UP, setup=True)
        world.execute("was = rank")
        assert slots(world) == [[0, 1, 0, 1, 1, "node1", 0]]
        hosts[1].mend()
        wait_until(lambda: has_come(world), "node2 to come")
        assert [slot[5:] for slot in slots(world)] == [["node1", 0], ["node2", None]]
        assert "All workers were" in lose(world, network, hosts[1].link_down)
        assert slots(world) == [[0, 1, 0, 1, 1, "node1", None]]
        hosts[1].link_up()
        wait_until(lambda: has_come(world), "node2 to come back")
        assert [slot[5] for slot in slots(world)] == ["node1", "node2"]
        world.restart(on_failure="stop")
        assert "All workers were" in lose(world, network, hosts[1].link_down)
        assert world.state is WorldState.STOPPED


def test_this_machine_among_hosts(hosts: list[Host], network: Network, path: None) -> None:
    """It needs no ssh, which would not know it; an agent that is killed there comes again."""
    with new_world("localhost:1,node2:1", address=network.address) as world:
        world.execute(SET_UP, setup=True)
        agent = psutil.Process(world.gather("os.getpid()")[0])
        while agent.cmdline()[1:5] != AGENT_ARGUMENTS:
            agent = agent.parent()
        said = lose(world, network, agent.kill)
        assert "now 1 worker" in said
        wait_until(lambda: has_come(world), "this machine to come back")
        check_whole(world, 2)
        assert {*world.gather("socket.gethostname()")} == {socket.gethostname(), "node2"}
