"""Worlds over ssh whose machines are lost, late, slow, silent or back: what ranks keep.

`tests/cluster/test_nodes.py` has lost connections, and heads and agents that stop.
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
from nbdist.world import dispatch, inbox, recovery
from nbdist.world.remote_call import sending
from nbdist.world.states import WorldState
from nbdist.world.task_error import error_of
from nbdist.world.task_run import TaskRun
from nbdist.world.wait_texts import waiting_text
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
from tests.traces import command_line
from tests.waiting import once, press_stop, wait_until

pytestmark = pytest.mark.shared_world

SEAT = """
[rank, world_size, int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"]),
 int(os.environ["LOCAL_WORLD_SIZE"]), socket.gethostname(), globals().get("was")]
"""

SET_UP = "import os, socket, torch, torch.distributed as dist"

LOST_SECONDS = 2.0
"""Seconds in which all packets of a host to another are lost, fewer than a link may be silent."""


@pytest.fixture(scope="module")
def started(path: None, hosts_of_module: list[Host]) -> Iterator[World]:
    """A world with two workers on each of two hosts, which most tests share."""
    with new_world() as world:
        world.execute(SET_UP, setup=True)
        yield world


@pytest.fixture
def world(started: World, hosts: list[Host]) -> World:
    """The shared world, whole again; `was` is the rank that each worker has in this test."""
    if started.state is not WorldState.READY or started.size != 4:
        started.restart(4)
    started.execute("was = rank")
    return started


def has_room(world: World) -> bool:
    """Scale to four workers; return whether the world has four, once machines have room."""
    with suppress(ScaleError):
        world.scale(4)
    return world.size == 4


def in_order(world: World, hosts: list[Host]) -> list[Host]:
    """Return the two hosts, that of rank 0 first: a host that was lost comes back as the second."""
    first = world.gather("socket.gethostname()", ranks=[0])[0]
    return sorted(hosts[:2], key=lambda host: host.name != first)


def slots(world: World) -> list[object]:
    """Return where each rank is and `was`; assert that all ranks can reduce together."""
    world.execute("total = torch.tensor([float(rank)])\ndist.all_reduce(total)")
    everyone = float(sum(range(world.size)))
    assert [float(each) for each in world.gather("total")] == [everyone] * world.size
    return world.gather(SEAT)


def test_survivors_of_a_lost_host_go_on(world: World, hosts: list[Host], network: Network) -> None:
    """Survivors in a collective keep all and go on; the machine is taken in when it is back."""
    world.execute("pair = dist.new_group([0, 1])")
    said = lose(world, network, hosts[1].link_down)
    assert said.startswith("rank 2 on node2 ")
    assert "was lost" in said
    assert "now 2 workers; the other ranks keep their variables" in said
    assert world.state is WorldState.READY
    assert slots(world) == [[r, 2, 0, 1, 2, "node1", r] for r in range(2)]
    # The cable is still out: the processes on node2 have noticed the loss by themselves.
    wait_until(lambda: not ours_on(hosts[1]), "node2 to be empty")
    hosts[1].link_up()
    wait_until(lambda: has_come(world), "node2 to come back")
    there = [["node1", 0], ["node1", 1], ["node2", None], ["node2", None]]
    assert [slot[5:] for slot in slots(world)] == there


def test_ranks_of_a_lost_machine_go_where_there_is_room(
    world: World, hosts: list[Host], network: Network
) -> None:
    """Lost ranks get new workers on another machine: variables are gone, set-up cells have run."""
    world.scale(ranks=[0, 2])
    world.execute("was = rank")
    assert [slot[5] for slot in slots(world)] == ["node1", "node2"]
    said = lose(world, network, hosts[0].link_down)
    assert said.startswith("rank 0 on node1 ")
    assert "was restarted and its variables" in said
    assert slots(world) == [[0, 2, 0, 1, 2, "node2", None], [1, 2, 0, 1, 2, "node2", 1]]
    hosts[0].link_up()
    wait_until(lambda: has_room(world), "node1 to come back")


def test_rank_0_moves_off_a_lost_machine(world: World, hosts: list[Host]) -> None:
    """If the machine of rank 0 is lost, the next has rank 0 and is MASTER_ADDR."""
    first, second = in_order(world, hosts)
    first.link_down()
    engine = world.engine
    wait_until(
        lambda: inbox.receive(engine, 0.1) or engine.rank_table.dead,
        f"the loss of {first} is noticed",
    )
    assert slots(world) == [[r, 2, 0, 1, 2, second.name, r + 2] for r in range(2)]
    assert world.gather("os.environ['MASTER_ADDR']") == [second.address] * 2


def test_losing_all_machines_is_reported(world: World, hosts: list[Host], network: Network) -> None:
    """The error says that all machines are lost, and a restart gives new workers."""

    def pull() -> None:
        for host in hosts[:2]:
            host.link_down()

    assert "all machines are lost" in lose(world, network, pull)
    assert world.state is WorldState.BROKEN
    for host in hosts[:2]:
        host.link_up()
    world.restart()
    assert [slot[5] for slot in slots(world)] == ["node1", "node1", "node2", "node2"]


def test_slow_links_and_busy_machines_lose_no_rank(world: World, hosts: list[Host]) -> None:
    """With values on a slow cable and no free processor no rank or machine counts as lost."""
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


def test_cells_can_use_slots_groups_and_stop(world: World) -> None:
    """Each rank has its slot, a user's own group meets at MASTER_ADDR, and Stop ends waits."""
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


def test_files_that_hosts_lack_are_named(
    world: World, network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If hosts lack a script or the folder for snapshots, the error names the remedy."""
    (tmp_path / "train.py").write_text("pass\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkerError, match=r"node\d has no .*train\.py.*--sync-code"):
        world.run_script("train.py", "a")
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(tmp_path))
    world.execute("x = torch.full((3,), float(rank + 1))")
    with pytest.raises(UsageError, match=r"node\d does not have the folder .*NBDIST_SNAPSHOT_DIR"):
        world.snapshot(name="one")
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(network.folder))  # a folder of all hosts
    world.snapshot(name="one")
    world.execute("del x")
    world.restore(name="one")
    assert [each.tolist() for each in world.gather("x")] == [[rank + 1.0] * 3 for rank in range(4)]


def test_a_message_of_a_finished_rank_still_arrives(world: World, hosts: list[Host]) -> None:
    """A rank that waits for the message is not released while packets are lost and sent again."""
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


# --- a network that is stalled ----------------------------------------------------------------

RETRIES = "/proc/sys/net/ipv4/tcp_retries2"


@pytest.fixture
def steady(world: World, hosts: list[Host]) -> Iterator[World]:
    """The world with a group whose connections exist; the test may lose no rank."""
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
    """Run a cell until the network between the hosts `ends` is reported as stalled."""
    running = dispatch.submit(world.engine, world.engine.task(f"t = torch.ones(1)\n{source}"))
    for _ in recovery.follow(world.engine, running):
        if re.search(f"the network between {ends} is stalled", waiting_text(running)):
            return running
    pytest.fail(f"the cell has ended: {error_of(running)}")


@pytest.mark.parametrize("sender", [0, 2])
def test_a_cell_names_a_stalled_network(sender: int, steady: World, hosts: list[Host]) -> None:
    """The cell goes on once the network is back, whichever host has sent."""
    receiver = 2 - sender
    ends = in_order(steady, hosts)
    here, there = ends[sender // 2], ends[receiver // 2]
    there.block_from(here.address)
    source = f"if rank == {sender}: dist.send(t, {receiver})\n"
    source += f"if rank == {receiver}: dist.recv(t, {sender})"
    running = until_stalled(steady, source, f".*{here.name}.*")
    there.mend()
    dispatch.wait(steady.engine, running)
    assert error_of(running) is None


def test_stop_works_while_the_network_is_stalled(steady: World, hosts: list[Host]) -> None:
    """Stop gives back control, and no rank is lost."""
    hosts[1].block_from(hosts[0].address)
    running = until_stalled(steady)
    recovery.interrupt_all(steady.engine)
    dispatch.wait(steady.engine, running)
    assert not running.unfinished


def test_a_network_that_stays_away_ends_the_cell(steady: World, hosts: list[Host]) -> None:
    """The cell ends when TCP gives up, after seconds in this test and after minutes by default."""
    for host in hosts[:2]:
        host.run(f"echo 4 >{RETRIES}")
    try:
        hosts[1].block_from(hosts[0].address)
        running = until_stalled(steady)
        for _ in recovery.follow(steady.engine, running):
            if running.transcript.errors:
                hosts[1].mend()
        assert "Connection timed out" in str(error_of(running))
    finally:
        for host in hosts[:2]:
            host.run(f"echo 15 >{RETRIES}")


# --- big values, which a thin cable carries for seconds -----------------------------------------

SIZE = 64 << 20
"""Bytes of a big value."""

LIMIT = 80
"""Million bits a second: a big value takes about seven seconds."""


def segments(hosts: list[Host]) -> list[str]:
    """Return the segments that processes of the hosts, and heads of this process, have open."""
    pids, found = [pid for host in hosts for pid in host.processes()], []
    for each in psutil.Process().children(recursive=True):
        pids += [each.pid] if "nbdist.cluster" in command_line(each) else []
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                if (target := os.readlink(link)).startswith("/memfd:nbdist "):
                    found.append(f"{pid}: {target}")
    return found


def begun(hosts: list[Host], then: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `then` as soon as hosts or heads have a new segment: a big value is on its way."""
    before = {*segments(hosts)}
    return once(lambda: {*segments(hosts)} - before, then, "a big value is on its way")


@pytest.fixture
def big(world: World, hosts: list[Host]) -> Iterator[torch.Tensor]:
    """A big value, for a second host with a slow cable; the test may leave no segment open."""
    hosts[1].limit(LIMIT)
    yield torch.ones(SIZE // 4)
    world.execute("for name in ('big', 'mine'): globals().pop(name, None)")
    wait_until(lambda: not segments(hosts), "big values are let go of")


def test_the_progress_of_a_big_value_is_known(world: World, big: torch.Tensor) -> None:
    """The notebook knows how many bytes have moved, up to the value's size for each host."""
    engine = world.engine
    with sending(engine, {"big": big}, range(world.size)) as (payloads, parcels):
        task = engine.task("total = big.sum()", names=payloads)
        running = dispatch.submit(engine, task, shipped=parcels)
        seen = [running.reports.bytes_moved for _ in recovery.follow(engine, running)]
    done, total = zip(*(far for far in dict.fromkeys(seen) if far[1]), strict=True)
    assert len(done) > 3
    assert [*done] == sorted(done)
    assert {*total} == {done[-1]}
    assert done[-1] == pytest.approx(2 * SIZE, rel=0.01)
    assert world.gather("int(total)") == [SIZE // 4] * 4


def test_stop_cancels_a_big_transfer(world: World, hosts: list[Host], big: torch.Tensor) -> None:
    """No rank gets the task, received parts are released, and the next cell runs."""
    with begun(hosts, press_stop), pytest.raises(KeyboardInterrupt):
        world.execute("ran = True", names={"big": big})
    wait_until(lambda: not segments(hosts), "what has come is let go of")
    world.execute("has = 'big' in globals() or 'ran' in globals()")
    assert world.gather("has") == [False] * 4


def test_a_host_lost_half_way_is_dead(world: World, hosts: list[Host], big: torch.Tensor) -> None:
    """If a host is lost while a value is on its way there or back, the cell raises WorkerDied."""
    second = in_order(world, hosts)[1]
    with begun(hosts, second.link_down), pytest.raises(WorkerDied, match=second.name):
        world.execute("done = True", names={"big": big})
    second.mend()
    wait_until(lambda: has_come(world), f"{second} to come back")
    world.execute(f"mine = torch.ones({SIZE // 4})")
    second.limit(LIMIT)
    with begun([], second.link_down), pytest.raises(WorkerDied, match=second.name):
        world.gather("mine", ranks=[2])


# --- killed processes ---------------------------------------------------------------------------


def test_a_head_ends_with_its_guard(started: World, hosts: list[Host]) -> None:
    """If the guard is killed, agents on hosts end as well, and the notebook gets AgentLost."""
    psutil.Process(started.engine.connection.link.agent.pid).kill()
    with pytest.raises(AgentLost):
        started.execute("import time\ntime.sleep(99)")
    wait_until(lambda: not ours_on(hosts[0]), "node1 has ended its agent")


@pytest.mark.parametrize("detach", [False, True])
def test_workers_end_with_a_killed_notebook(
    path: None, hosts: list[Host], network: Network, *, detach: bool
) -> None:
    """Workers on all hosts end with their notebook, and detached workers by a command."""
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
    """A host that comes later is taken in; its loss restarts or ends all workers, as configured."""
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


def test_this_machine_can_be_among_hosts(hosts: list[Host], network: Network, path: None) -> None:
    """`localhost` needs no ssh, and comes back after its agent was killed."""
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
