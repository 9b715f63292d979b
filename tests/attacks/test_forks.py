"""Children that user code forks from ranks and notebook, and limits that keep workers away."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from nbdist import World
from nbdist.errors import ForkedProcess, ScaleError, StartError, WorldBroken
from tests.traces import command_line
from tests.waiting import SOON, wait_until

pytestmark = [pytest.mark.shared_world, pytest.mark.own_agent]

TUTORIAL = """
import os
from torch.multiprocessing import get_context

def run(rank, size, said):
    import signal
    t = torch.full((1,), float(rank))
    dist.all_reduce(t)
    group = dist.new_group([0, 1])
    dist.barrier(group)
    wakeup = signal.set_wakeup_fd(-1)
    said.put((rank, size, dist.get_world_size(), t.item(), wakeup))

def init_process(rank, size, fn, port, said, backend='gloo'):
    os.environ['MASTER_ADDR'] = '127.0.0.1'
    os.environ['MASTER_PORT'] = str(port)
    assert not dist.is_initialized()
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size, said)
    dist.destroy_process_group()

def tutorial(port, size=3):
    context = get_context('fork')
    said = context.Queue()
    processes = [
        context.Process(target=init_process, args=(each, size, run, port, said))
        for each in range(size)
    ]
    for p in processes:
        p.start()
    answers = sorted(said.get(timeout=60) for _ in processes)
    for p in processes:
        p.join(10)
    return answers, [p.exitcode for p in processes]

import socket
with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A world of two workers for all tests of this file."""
    with World(2, log_dir="") as started:
        yield started


def test_forked_children_form_their_own_group(world: World) -> None:
    """Forked children of each rank form a group of their own; the ranks' own group goes on."""
    world.execute(f"{TUTORIAL}\nfound = tutorial(port)")
    answers = [(rank, 3, 3, 3.0, -1) for rank in range(3)]
    assert world.gather("found") == [(answers, [0, 0, 0])] * 2
    world.execute("t = torch.ones(1); dist.all_reduce(t); assert t.item() == 2")


def test_children_know_their_rank_and_hold_no_port(world: World) -> None:
    """No child listens on gloo's port; a data loader's child knows its rank and the world size."""
    world.execute(
        "import os, psutil, subprocess, sys, time\n"
        "from multiprocessing import get_context\n"
        "from torch.utils.data import DataLoader, IterableDataset\n"
        "def ports(pid):\n"
        "    found = psutil.Process(pid).net_connections('inet')\n"
        "    return {c.laddr.port for c in found if c.status == 'LISTEN'}\n"
        "fork = get_context('fork'); begun = fork.Event()\n"
        "child = fork.Process(target=lambda: (begun.set(), time.sleep(60)))\n"
        "child.start(); begun.wait()\n"
        "mine, its = ports(os.getpid()), ports(child.pid); child.kill(); child.join()\n"
        "class Ranks(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        yield dist.get_rank() * 10 + dist.get_world_size()\n"
        "loader = DataLoader(\n"
        "    Ranks(), num_workers=1, batch_size=None, multiprocessing_context='fork')\n"
        "loaded = list(loader)"
    )
    assert all(mine and not its for mine, its in world.gather("(mine, its)"))
    assert world.gather("loaded") == [[2], [12]]


def test_a_forked_child_cannot_use_a_world(world: World) -> None:
    """A fork of the process that made a world cannot use the world, and fails at once."""

    def is_refused(do: Callable[[], object]) -> None:
        with pytest.raises(ForkedProcess, match=r"^nbdist: this process is a forked child"):
            do()

    for do in (partial(world.gather, "rank"), world.status, partial(world.execute, "rank")):
        child = multiprocessing.get_context("fork").Process(target=is_refused, args=(do,))
        child.start()
        child.join(SOON)
        assert child.exitcode == 0
    assert world.gather("rank") == [0, 1]


SUM = "t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size"


@pytest.fixture(autouse=True)
def two_ranks_with_a_variable(world: World) -> None:
    """Give the world two ranks, each with a variable, before each test."""
    if world.size != 2:
        world.scale(2)
    world.execute(f"kept = rank\n{SUM}")


def tree(world: World) -> list[psutil.Process]:
    """Return the guard, the agent, the fork server and the workers."""
    guard = psutil.Process(world.engine.connection.link.agent.pid)
    return [guard, *guard.children(recursive=True)]


def kill_fork_server(world: World) -> None:
    """Kill the fork server, and wait until it has gone."""
    (agent,) = psutil.Process(world.engine.connection.link.agent.pid).children()
    # Only children of the agent: modules that the fork server imports start processes themselves.
    (fork_server,) = (
        process
        for process in agent.children()
        if "nbdist.agent.fork_server" in command_line(process)
        and process.pid not in world.pids.values()
    )
    fork_server.kill()
    fork_server.wait(SOON)


@pytest.fixture
def group(control_group: Callable[..., Path]) -> Path:
    return control_group("pids", "pids.max")


@contextmanager
def at_most(world: World, group: Path, more: int) -> Iterator[None]:
    """Let the guard and its children have only `more` further processes and threads."""
    for process in tree(world):
        with suppress(ProcessLookupError):  # the process has just ended
            (group / "cgroup.procs").write_text(str(process.pid))
    (group / "pids.max").write_text(str(int((group / "pids.current").read_text()) + more))
    try:
        yield
    finally:
        (group / "pids.max").write_text("max")
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)


def test_scaling_without_a_free_process_loses_nothing(world: World, group: Path) -> None:
    """A line names the limit that forbids a further process, and no rank loses a variable."""
    pids = dict(world.pids)
    with at_most(world, group, 0):
        # Without a free thread, the old group cannot be formed again either.
        with pytest.raises((ScaleError, WorldBroken)) as caught:
            world.scale(3)
        assert f"pids.max of {group} is " in str(caught.value)
        assert "\n" not in str(caught.value)
        assert {row.state for row in world.status()} == {"idle"}
    world.execute(SUM)
    assert world.gather("kept") == [0, 1]
    assert world.pids == pids


def test_ranks_outlive_their_fork_server(world: World, group: Path) -> None:
    """Ranks outlive their fork server, and a rank that is killed afterwards is replaced alone."""
    pids = dict(world.pids)
    kill_fork_server(world)
    world.execute(SUM)
    with at_most(world, group, 0):
        with pytest.raises(ScaleError, match=f"pids.max of {group} is "):
            world.scale(3)
        assert world.gather("kept") == [0, 1]
    assert world.pids == pids
    os.kill(pids[1], signal.SIGKILL)  # the agent is now the parent of rank 1
    wait_until(lambda: world.status()[1].state == "dead")
    world.execute(SUM)
    assert world.gather("globals().get('kept')") == [0, None]
    assert world.pids[0] == pids[0]
    world.scale(3)
    world.execute(SUM)
    assert world.gather("globals().get('kept')") == [0, None, None]


def test_a_start_without_processes_names_the_limit(world: World, group: Path) -> None:
    """A start without enough processes names the limit in its first line; a later start works."""
    with at_most(world, group, 2):
        with pytest.raises(StartError) as caught:
            world.restart(n=4)
        sys.stdout.write(f"{caught.value}\n")
        assert f"pids.max of {group} is " in str(caught.value).splitlines()[0]
    world.start()
    world.execute(SUM)


def test_the_agent_needs_no_thread_for_a_worker(world: World) -> None:
    """New workers need no thread of the agent, since zmq aborts if its thread cannot start."""
    (agent,) = psutil.Process(world.engine.connection.link.agent.pid).children()
    before = agent.num_threads()
    world.scale(4)
    assert agent.num_threads() == before
