"""Worlds over ssh whose machines are lost."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from nbdist.errors import WorkerDied
from nbdist.world.states import State
from nbdist.world.world import World
from tests.hosts.network import Host
from tests.hosts.sshd import Sshd
from tests.notebook.front_end import Notebook
from tests.waiting import wait_until

ManyHosts = Callable[..., World]

LOSS_TIMEOUT = 6.0
"""Seconds after which a silent machine is known to be lost, with both cores busy."""

FOREVER = "while True: dist.all_reduce(torch.ones(1))"

SEAT = """
[rank, world_size, int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"]),
 int(os.environ["LOCAL_WORLD_SIZE"]), socket.gethostname(), globals().get("was")]
"""


@pytest.fixture
def many_hosts(
    sshd: Sshd, hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> Iterator[ManyHosts]:
    """Makes worlds over ssh; they end before anything is looked for on the hosts."""
    for name, value in sshd.environ.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as worlds:

        def make(machines: str, **options: object) -> World:
            world = World(hosts=machines, log_dir="", show=False, **options)
            worlds.callback(world.shutdown)
            world.start()
            world.execute("import os, socket", setup=True)
            world.execute("was = rank")
            return world

        yield make


def ours_on(host: Host) -> list[str]:
    """What is there of a world; sshd takes its time to find that nobody is there any more."""
    return [line for line in host.left() if "sshd: " not in line]


def is_broken(world: World) -> bool:
    """Whether it is known that ranks have died, or are lost."""
    world.session.receive(0.1)
    return world.state is State.BROKEN


def has_come(world: World) -> bool:
    """Whether a machine has come that could be taken in."""
    world.session.receive(0.1)
    return bool(world.session.have_come)


def later(do: Callable[[], object]) -> threading.Timer:
    """Do it while the cell runs that comes now."""
    timer = threading.Timer(1.0, do)
    timer.start()
    return timer


def seats(world: World) -> list[object]:
    """Say where each rank is, and what it was before; all ranks can still reduce together."""
    world.execute("total = torch.tensor([float(rank)])\ndist.all_reduce(total)")
    everyone = float(sum(range(world.size)))
    assert [float(each) for each in world.gather("total")] == [everyone] * world.size
    return world.gather(SEAT)


def test_a_link_is_taken_down(many_hosts: ManyHosts, hosts: list[Host]) -> None:
    """In the middle of a collective: the survivors are freed, keep what they have, and go on."""
    world = many_hosts("node1:2,node2:2")
    world.execute("pair = dist.new_group([0, 1])")
    pull, began = later(hosts[1].link_down), time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        world.execute(FOREVER)
    pull.join()
    sys.stdout.write(f"{time.monotonic() - began - 1.0:.2f} s after the link was down\n")
    assert "rank 2 on node2 " in str(caught.value)
    assert "was lost" in str(caught.value)
    assert "now 2 workers; the other ranks keep their variables" in str(caught.value)
    assert world.state is State.READY
    assert seats(world) == [[r, 2, 0, 1, 2, "node1", r] for r in range(2)]
    # With the cable still out: what was started there has found out by itself.
    wait_until(lambda: not ours_on(hosts[1]), "node2 to be empty")


def test_the_first_machine_is_lost(many_hosts: ManyHosts, hosts: list[Host]) -> None:
    """Whoever was rank 0: the next is, also for stores of users' own; models go on."""
    world = many_hosts("node1:1,node2:2")
    world.execute(
        "net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "def step():\n"
        "    net(torch.ones(1, 4)).sum().backward()\n"
        "    return net.module.weight.grad.sum().item()\n"
        "step()"
    )
    hosts[0].link_down()
    wait_until(lambda: is_broken(world), "the loss of node1 to be noticed")
    assert seats(world) == [[r, 2, 0, 1, 2, "node2", r + 1] for r in range(2)]
    assert world.gather("os.environ['MASTER_ADDR']") == [hosts[1].address] * 2
    assert len({*world.gather("step()")}) == 1


def test_ranks_of_a_lost_machine_go_where_there_is_room(
    many_hosts: ManyHosts, hosts: list[Host]
) -> None:
    """With their ranks; what they had is lost, set-up cells have run, and groups are whole."""
    world = many_hosts("node1:1,node2:3", n=2)
    assert [seat[5] for seat in seats(world)] == ["node1", "node2"]
    later(hosts[0].link_down)
    with pytest.raises(WorkerDied, match=r"rank 0 on node1 .*was restarted and its variables"):
        world.execute(FOREVER)
    assert seats(world) == [[0, 2, 0, 1, 2, "node2", None], [1, 2, 0, 1, 2, "node2", 1]]


def test_all_machines_are_lost(many_hosts: ManyHosts, hosts: list[Host]) -> None:
    """It is said, and what to do; nothing waits."""
    world = many_hosts("node1:1,node2:1")
    for host in hosts[:2]:
        host.link_down()
    with pytest.raises(WorkerDied, match="all machines are lost"):
        world.execute(FOREVER)
    assert world.state is State.BROKEN
    for host in hosts[:2]:
        host.link_up()
    world.restart()
    assert [seat[5] for seat in seats(world)] == ["node1", "node2"]


@pytest.mark.parametrize("policy", ["restart-all", "stop"])
def test_what_a_loss_leads_to(many_hosts: ManyHosts, hosts: list[Host], policy: str) -> None:
    """All workers are started anew on the machines that are left, if they will do, or ended."""
    world = many_hosts("node1,node2", layout="1:2x1", on_failure=policy)
    assert world.size == 2
    later(hosts[1].link_down)
    with pytest.raises(WorkerDied, match=r"rank 1 on node2 .*All workers were"):
        world.execute(FOREVER)
    if policy == "stop":
        assert world.state is State.STOPPED
    else:
        assert seats(world) == [[0, 1, 0, 1, 1, "node1", None]]


def test_the_ranks_of_one_machine_leave(many_hosts: ManyHosts, hosts: list[Host]) -> None:
    """As is asked for: the others are renumbered, and meet at the machine that is first now."""
    world = many_hosts("node1:1,node2:2")
    world.scale(ranks=[1, 2])
    assert seats(world) == [[r, 2, 0, 1, 2, "node2", r + 1] for r in range(2)]
    assert world.gather("os.environ['MASTER_ADDR']") == [hosts[1].address] * 2


def test_a_notebook_says_who_is_lost_and_who_came(sshd: Sshd, hosts: list[Host]) -> None:
    """In the next cell too, in a line."""
    notebook = Notebook("%load_ext nbdist", env=sshd.environ)
    try:
        assert notebook.run("%%distributed --hosts node1:1,node2:1\nwas = rank").errors == []
        hosts[1].link_down()
        time.sleep(LOSS_TIMEOUT)
        said = notebook.run("%%distributed\nprint(was)").text
        assert "now 1 worker" in said
        hosts[1].link_up()
        texts: list[str] = []

        def has_come_there() -> bool:
            texts.append(notebook.run("%%distributed\nmark = 1").text)
            return "now 2 workers" in texts[-1]

        wait_until(has_come_there, "node2 to come back")
        assert notebook.run("%%distributed\nprint(world_size, rank)").text.count("2 ") >= 2
    finally:
        notebook.close()


def test_a_machine_comes_back(many_hosts: ManyHosts, hosts: list[Host]) -> None:
    """Between cells it is taken in again, with set-up cells; the others keep what they have."""
    world = many_hosts("node1:1,node2:1")
    hosts[1].link_down()
    wait_until(lambda: is_broken(world), "the loss of node2 to be noticed")
    assert seats(world) == [[0, 1, 0, 1, 1, "node1", 0]]
    hosts[1].link_up()
    wait_until(lambda: has_come(world), "node2 to come back")
    assert [seat[5:] for seat in seats(world)] == [["node1", 0], ["node2", None]]
    assert world.size == 2


def test_a_world_begins_at_the_minimum(many_hosts: ManyHosts, hosts: list[Host]) -> None:
    """A host that is not there yet is no obstacle, and is taken in when it comes."""
    hosts[1].block_port(22)
    world = many_hosts("node1,node2", layout="1:2x1")
    assert seats(world) == [[0, 1, 0, 1, 1, "node1", 0]]
    hosts[1].mend()
    wait_until(lambda: has_come(world), "node2 to come")
    assert [seat[5:] for seat in seats(world)] == [["node1", 0], ["node2", None]]


def test_a_slow_link_and_busy_machines(many_hosts: ManyHosts, hosts: list[Host]) -> None:
    """Packets that are late or lost, big values on their way, no processor left: all live on."""
    world = many_hosts("node1:1,node2:1")
    pids = dict(world.pids)
    spinning = [hosts[1].popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    hosts[1].slow(delay=0.05, loss=0.01)
    try:
        values = bytes(3 << 20)
        world.execute("size = len(values)", names={"values": values})
        assert world.gather("size") == [len(values)] * 2
        world.execute("for _ in range(20): dist.all_reduce(torch.ones(1000))")
        world.execute("import time\nend = time.time() + 3\nwhile time.time() < end: pass")
        assert len(world.gather("bytes(2_000_000)", ranks=[1])[0]) == 2_000_000
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert world.state is State.READY
    assert world.pids == pids
