"""What keeps workers from being started, and what may not keep them from living on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from nbdist import World
from nbdist.errors import ScaleError, StartError, WorldBroken
from tests.waiting import SOON, wait_until

pytestmark = [pytest.mark.shared_world, pytest.mark.own_agent]

GROUPS = Path("/sys/fs/cgroup/pids")
if not GROUPS.exists():
    GROUPS = Path("/sys/fs/cgroup")

SUM = "t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two workers, for all tests here."""
    with World(2, log_dir="") as started:
        yield started


@pytest.fixture(autouse=True)
def two_ranks_with_a_variable(world: World) -> None:
    """Before each test."""
    if world.size != 2:
        world.scale(2)
    world.execute(f"kept = rank\n{SUM}")


def tree(world: World) -> list[psutil.Process]:
    """The guard, the agent, the fork server, the workers."""
    guard = psutil.Process(world.session.link.agents[0].pid)
    return [guard, *guard.children(recursive=True)]


def kill_fork_server(world: World) -> None:
    """Kill the fork server, and wait until it has gone."""
    workers = set(world.pids.values())
    (fork_server,) = (
        process
        for process in tree(world)
        if "nbdist.agent.fork_server" in process.cmdline() and process.pid not in workers
    )
    fork_server.kill()
    fork_server.wait(SOON)


def test_the_fork_server_is_killed(world: World) -> None:
    """All ranks live on, and one that is killed afterwards is replaced alone."""
    pids = dict(world.pids)
    kill_fork_server(world)
    world.execute(SUM)
    assert world.gather("kept") == [0, 1]
    os.kill(pids[1], signal.SIGKILL)  # the agent hears of it, whose child it is now
    wait_until(lambda: world.status()[1].state == "dead")
    world.execute(SUM)
    assert world.gather("globals().get('kept')") == [0, None]
    assert world.pids[0] == pids[0]


def test_restart_after_the_fork_server_was_killed(world: World) -> None:
    """The first try works."""
    kill_fork_server(world)
    world.restart()
    world.execute(SUM)


@contextmanager
def at_most(world: World, more: int) -> Iterator[Path]:
    """Let the agent and its children have only so many more processes and threads."""
    group = GROUPS / f"nbdist-test-{os.getpid()}"
    try:
        group.mkdir()
        for process in tree(world):
            (group / "cgroup.procs").write_text(str(process.pid))
    except OSError:
        pytest.skip("takes the right to make a control group of pids")
    (group / "pids.max").write_text(str(int((group / "pids.current").read_text()) + more))
    try:
        yield group
    finally:
        (group / "pids.max").write_text("max")
        for pid in (group / "cgroup.procs").read_text().split():
            (GROUPS / "cgroup.procs").write_text(pid)
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_no_further_process_when_scaling(world: World) -> None:
    """It says which limit, in one line; the others keep what they have, and later it works."""
    pids = dict(world.pids)
    with at_most(world, 0) as group:
        # Where they get no thread, the old group cannot be made again either.
        with pytest.raises((ScaleError, WorldBroken)) as caught:
            world.scale(3)
        assert f"pids.max of {group} is " in str(caught.value)
        assert "\n" not in str(caught.value)
        assert world.pids == pids
        assert {row.state for row in world.status()} == {"idle"}
    world.execute(SUM)
    assert world.gather("kept") == [0, 1]
    world.scale(3)
    world.execute(SUM)


def test_no_further_process_for_a_new_fork_server(world: World) -> None:
    """The same where it is the fork server that cannot be started; later more ranks are had."""
    kill_fork_server(world)
    with at_most(world, 0) as group:
        with pytest.raises(ScaleError, match=f"pids.max of {group} is "):
            world.scale(3)
        assert world.gather("kept") == [0, 1]
    world.scale(3)
    world.execute(SUM)
    assert world.gather("globals().get('kept')") == [0, 1, None]


def test_no_further_process_at_the_start(world: World) -> None:
    """A start that fails so names the limit in its first line, and leaves nothing."""
    with at_most(world, 2) as group:
        with pytest.raises(StartError) as caught:
            world.restart(n=4)
        sys.stdout.write(f"{caught.value}\n")
        assert f"pids.max of {group} is " in str(caught.value).splitlines()[0]
    world.start()
    world.execute(SUM)


def test_no_further_thread_on_the_way(world: World) -> None:
    """Also where the limit is met later in the start: that start fails, and says why."""
    with at_most(world, 10) as group, pytest.raises(StartError) as caught:
        world.restart(n=8)
    assert f"pids.max of {group} is " in str(caught.value)
    world.start()
    world.execute(SUM)


def test_the_agent_needs_no_thread_for_a_worker(world: World) -> None:
    """Where a thread of zmq's cannot be started, zmq aborts the process."""
    (agent,) = psutil.Process(world.session.link.agents[0].pid).children()
    before = agent.num_threads()
    world.scale(4)
    assert agent.num_threads() == before
