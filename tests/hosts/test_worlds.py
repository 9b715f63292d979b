"""The matrix of launchers and of what happens to worlds: two hosts with two workers each.

Each test runs by each launcher, in one world of it as long as that lasts.  What makes no sense
for one is told to the user in a line with a remedy, which the test reads: `Launched.way_back`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import nbdist
from nbdist.errors import RanksReleased, ScaleError, UsageError, WorkerDied, WorkerError
from nbdist.world.registry import Found, worlds
from nbdist.world.states import State
from nbdist.world.world import World
from tests.hosts.conftest import complain
from tests.hosts.launched import NAMES, Launched, launched_by
from tests.hosts.network import Host, Network
from tests.hosts.worlds import TRAIN, agent_on, check_whole
from tests.waiting import wait_until

pytestmark = [pytest.mark.shared_world, pytest.mark.timeout(180)]

SEAT = ["RANK", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]

WHERE = "__import__('socket').gethostname()"
PLACES = ["node1", "node1", "node2", "node2"]

FOREVER = "while True: dist.all_reduce(torch.ones(1))"

LASTING = ("sshd", "slurm")
"""What the fixtures ask for."""


@pytest.fixture(scope="module", params=NAMES)
def launched(request: pytest.FixtureRequest, hosts_of_module: list[Host]) -> Iterator[Launched]:
    """The launchers, one after the other; nothing is left by any of them on any host."""
    network: Network = request.getfixturevalue("network")
    with (
        pytest.MonkeyPatch.context() as patch,
        launched_by(request.param, request.getfixturevalue, patch) as launched,
    ):
        yield launched
        is_clean(launched, network)


@pytest.fixture(scope="module")
def started(launched: Launched) -> Iterator[World]:
    """The one that all tests share."""
    with launched.start() as world:
        yield world


@pytest.fixture
def world(started: World, launched: Launched) -> World:
    """It, whole again where a test has failed that was to have it so."""
    if started.state is not State.READY or started.size != 4:
        started.shutdown()
        for said in started.session.starting_texts():
            launched.hear(said)
    started.execute("import torch, torch.distributed as dist\nkept = rank + 10")
    return started


def is_clean(launched: Launched, network: Network) -> None:
    """Nothing is left on any host, nor where the launcher keeps its books."""
    complain(network, launched.name)
    wait_until(lambda: not launched.holds(), f"{launched.name} has let go of the world")


# --- what a cell can do -----------------------------------------------------------------------


def test_a_step_of_training(world: World) -> None:
    """All ranks have the same weights after it, on the hosts that were named."""
    world.execute(TRAIN)
    assert world.gather("where") == ["node1", "node1", "node2", "node2"]
    assert len({float(each) for each in world.gather("weight")}) == 1


def test_what_torchrun_would_have_set(world: World) -> None:
    """Ranks, seats, and where user code's own group can meet; only the node's own environment."""
    world.execute(f"import os\nseat = [os.environ[name] for name in {SEAT}]")
    master = world.gather("seat")[0][-1]
    assert world.gather("seat") == [
        [str(rank), str(rank % 2), str(rank // 2), "2", "2", master] for rank in range(4)
    ]
    assert world.gather("os.environ.get('PYTEST_CURRENT_TEST')") == [None] * 4


def test_a_group_of_the_users_own(world: World) -> None:
    """What a tutorial sets up by hand meets at MASTER_ADDR, over the network."""
    world.execute(
        "import torch, torch.distributed as dist\n"
        "dist.destroy_process_group()\n"
        "dist.init_process_group('gloo', init_method='env://')\n"
        "total = torch.ones(1)\ndist.all_reduce(total)\n"
        "dist.destroy_process_group()"
    )
    assert [float(each) for each in world.gather("total")] == [4.0] * 4


def test_figures(world: World) -> None:
    """One of each rank comes, whole."""
    result = world.execute(
        "import matplotlib.pyplot as plt\nplt.plot([rank, 1])\nplt.show()", ranks=[0, 3]
    )
    assert {track.rank for track in result.transcript if track.displays} == {0, 3}


# --- what goes wrong ------------------------------------------------------------------------------


def test_an_exception_while_the_others_wait(world: World) -> None:
    """They are freed and keep what they have."""
    with pytest.raises(WorkerError, match=r"rank 3.*ValueError: bad shard"):
        world.execute("if rank == 3: raise ValueError('bad shard')\ndist.barrier()")
    check_whole(world)
    assert world.gather("kept") == [10, 11, 12, 13]


def test_ranks_that_wait_for_one_that_never_comes(world: World) -> None:
    """They are freed, and which waited where is said."""
    with pytest.raises(
        RanksReleased,
        match="ranks 0-2 wait in barrier, line 1; rank 3 finished the cell without it",
    ):
        world.execute("if rank < 3: dist.barrier()")
    check_whole(world)


def test_stop(world: World) -> None:
    """Ranks on all hosts leave a loop, or a collective."""
    for source in (
        "import time\nwhile True: time.sleep(0.01)",
        "if rank: dist.barrier()\nelse: time.sleep(99)",
    ):
        main = threading.main_thread().ident
        assert main is not None
        pressing = threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT))
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            world.execute(source)
        pressing.join()
    check_whole(world)
    assert world.gather("kept") == [10, 11, 12, 13]


def test_a_rank_that_is_killed(world: World) -> None:
    """It is replaced on its host, and the others keep what they have."""
    with pytest.raises(WorkerDied, match=r"rank 1 on node1 .*SIGKILL"):
        world.execute("import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
    check_whole(world)
    assert world.gather("globals().get('kept')") == [10, None, 12, 13]


def test_scale(world: World) -> None:
    """Fewer, and as many again; what the hosts have no room for is refused in a line."""
    world.scale(1)
    check_whole(world, 1)
    world.scale(4)
    check_whole(world)
    assert world.gather(WHERE) == PLACES
    assert world.gather("globals().get('kept')") == [10, None, None, None]
    with pytest.raises((ScaleError, UsageError), match=r"room for 4|4 .* have room") as refused:
        world.scale(6)
    assert "\n" not in str(refused.value)
    check_whole(world)


def test_restart(world: World) -> None:
    """All are new, in their places, which a smaller world had not forgotten."""
    pids = dict(world.pids)
    world.restart()
    check_whole(world)
    assert world.gather(WHERE) == PLACES
    assert not {*pids.values()} & {*world.pids.values()}
    assert world.gather("globals().get('kept')") == [None] * 4


# --- when a host, or the notebook, is lost --------------------------------------------------------


def test_an_agent_that_is_killed(world: World, launched: Launched, hosts: list[Host]) -> None:
    """The others go on without its ranks, and the user is told how to have them back."""
    os.kill(agent_on(hosts[1]), signal.SIGKILL)
    with pytest.raises(WorkerDied, match="rank 2 on node2 ") as caught:
        world.execute(FOREVER)
    told = r"now 2 workers; the other ranks keep their variables\. ?"
    assert caught.match(f"{told}{launched.way_back}")
    assert world.gather("kept") == [10, 11]
    launched.come_back(world, hosts[1])
    check_whole(world)
    assert world.gather(WHERE) == PLACES


def test_a_link_that_goes_down(world: World, hosts: list[Host]) -> None:
    """In the middle of a collective: the others are freed, and nothing stays on that host."""
    pull = threading.Timer(1.0, hosts[1].link_down)
    pull.start()
    with pytest.raises(WorkerDied, match=r"rank 2 on node2 .*was lost"):
        world.execute(FOREVER)
    pull.join()
    check_whole(world, 2)
    assert world.gather("kept") == [10, 11]
    # With the cable still out: what was started there has found out by itself.
    wait_until(lambda: not ours_on(hosts[1]), "node2 to be empty")


def ours_on(host: Host) -> list[str]:
    """What is there of a world; daemons take their time to find that nobody is there any more."""
    return [line for line in host.left() if "nbdist" in line and "sshd: " not in line]


NOTEBOOK = """
import sys
from nbdist import World
world = World(**{options})
for said in world.session.starting_texts():
    if said:
        print(said, flush=True)
world.execute("import torch, torch.distributed as dist; dist.barrier(); kept = rank + 10")
print("up", flush=True)
world.execute('''
import os, time
while True:
    is_open = torch.tensor(float(os.path.exists({gate!r})))
    dist.all_reduce(is_open, dist.ReduceOp.MIN)
    if is_open:
        break
    time.sleep(0.05)
''')
"""


@contextmanager
def other_notebook(launched: Launched, gate: str, **options: object) -> Iterator[None]:
    """Have a notebook whose ranks are in the middle of a cell, and kill it."""
    source = NOTEBOOK.format(options={**launched.options, **options}, gate=gate)
    command = [sys.executable, "-c", source]
    notebook = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert notebook.stdout is not None
        with notebook.stdout:
            for line in notebook.stdout:
                if line == "up\n":
                    break
                launched.hear(line)
            else:
                pytest.fail("it did not start")
            yield
    finally:
        notebook.kill()
        notebook.wait()


def named(name: str) -> list[Found]:
    return [each for each in worlds() if each.held.name == name]


def test_a_notebook_that_is_killed(launched: Launched, started: World, network: Network) -> None:
    """Its workers end with it, whatever they do, on all hosts and in the launcher's books."""
    started.shutdown()
    is_clean(launched, network)
    with other_notebook(launched, "/nowhere"):
        assert all(host.left() for host in network.hosts[:2])
    is_clean(launched, network)


def test_a_world_that_outlives_it(launched: Launched, started: World, network: Network) -> None:
    """Its cell goes on, and the next notebook has all of it; after that one nothing is left."""
    started.shutdown()
    name, gate = f"left-{launched}-{os.getpid()}", network.folder / f"gate-{launched}"
    with other_notebook(launched, str(gate), name=name, detach=True):
        wait_until(lambda: named(name)[0].held.state == "busy", "it runs")
    wait_until(lambda: named(name)[0].is_detached, "its notebook is gone")
    with nbdist.attach(name) as world:
        gate.touch()
        world.catch_up()
        assert world.gather("kept") == [10, 11, 12, 13]
        assert world.gather(WHERE) == PLACES
        check_whole(world)
    assert named(name) == []
    is_clean(launched, network)
