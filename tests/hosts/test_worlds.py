"""Worlds of two workers on each of two hosts, over ssh: what cells do there, and what goes wrong.

How worlds of other launchers live is in `test_slurm.py`, `test_ray.py` and `test_join.py`, by
`tests.hosts.launched.lives`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.errors import UsageError, WorkerError
from nbdist.world.states import State
from nbdist.world.world import World
from tests.attacks.test_open_files import TAKE_ALL
from tests.attacks.test_too_much import displays_that_nobody_takes
from tests.hosts.launched import (
    KEPT,
    Launched,
    can_be_scaled,
    has_torchruns_variables,
    inherited,
    is_clean,
    other_notebook,
    survives_an_agent,
    trains,
)
from tests.hosts.network import Host, Network
from tests.hosts.worlds import agent_on, check_whole
from tests.waiting import press_stop

pytestmark = pytest.mark.shared_world

SSH = Launched("ssh", {"hosts": "node1:2,node2:2"}, "")


def test_a_notebook_that_is_killed(path: None, hosts: list[Host], network: Network) -> None:
    """Its workers end with it, whatever they do, on all hosts."""
    with other_notebook(SSH, "/nowhere"):
        assert all(host.left() for host in hosts[:2])
    is_clean(SSH, network)


@pytest.fixture(scope="module")
def started(path: None, hosts_of_module: list[Host], network: Network) -> Iterator[World]:
    """The one that all tests share: it has outlived its notebook."""
    with inherited(SSH, network) as world:
        yield world


@pytest.fixture
def world(started: World) -> World:
    """It, whole again where a test has failed that was to have it so."""
    if started.state is not State.READY or started.size != 4:
        started.restart(layout="2x2")
    started.execute("import torch, torch.distributed as dist\nkept = rank + 10")
    return started


# --- what a cell can do -----------------------------------------------------------------------


def test_a_step_of_training(world: World) -> None:
    """With what torchrun would have set, on the hosts that were named."""
    trains(world)
    has_torchruns_variables(world)


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


# --- what goes wrong ------------------------------------------------------------------------------


def test_stop(world: World) -> None:
    """Ranks on all hosts leave a loop, or a collective."""
    for source in (
        "import time\nwhile True: time.sleep(0.01)",
        "if rank: dist.barrier()\nelse: time.sleep(99)",
    ):
        pressing = threading.Timer(1.0, press_stop)
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            world.execute(source)
        pressing.join()
    check_whole(world)
    assert world.gather("kept") == KEPT


def test_a_rank_at_a_limit_of_its_own(world: World) -> None:
    """By `ulimit` it cannot meet the ranks of either host again: it alone is restarted."""
    pids = dict(world.pids)
    few = "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 300))"
    world.execute(f"import resource\n{few}")
    with pytest.raises(WorkerError, match="Rank 1 was restarted and its va"):
        world.execute(f"kept = rank\n{TAKE_ALL}")
    check_whole(world)
    assert world.gather("globals().get('kept')") == [0, None, 2, 3]
    assert [rank for rank in pids if world.pids[rank] != pids[rank]] == [1]
    world.restart()


def test_displays_of_another_host(world: World, hosts: list[Host], network: Network) -> None:
    """They are kept there up to a limit, as at home, and the memory is given back."""
    displays_that_nobody_takes(world, agent_on(hosts[1]), network.folder / "shown")


def test_scale(world: World) -> None:
    """Fewer, and as many again; not more than there is room for."""
    can_be_scaled(world)


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


def test_an_agent_that_is_killed(world: World, network: Network) -> None:
    """It is started again; the loss of a machine is in `tests/hosts/test_membership.py`."""
    survives_an_agent(world, SSH, network)
