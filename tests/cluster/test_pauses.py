"""Heads and agents that are paused, and connections that are lost: the world goes on with them."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from nbdist.errors import WorkerDied
from nbdist.world.agents import worlds
from nbdist.world.running import RunningTask
from nbdist.world.world import World
from tests.waiting import wait_until

pytestmark = [pytest.mark.own_agent, pytest.mark.shared_world]

LINK_TIMEOUT = 2

OPTIONS = {"launcher": "here", "log_dir": "", "show": False, "link_timeout": LINK_TIMEOUT}

SUM = "total = torch.ones(1)\ndist.all_reduce(total)\nassert total == 2"

LOOP = """
import os
is_open = torch.zeros(1)
while not is_open:
    is_open = torch.tensor(float(os.path.exists({gate!r})))
    dist.all_reduce(is_open, dist.ReduceOp.MIN)
"""

NAME = f"alone-{os.getpid()}"

DETACHED = f"""
from nbdist import World
world = World(layout="2x1", detach=True, name={NAME!r}, **{OPTIONS})
world.start()
print("up", flush=True)
input()
"""


@pytest.fixture(scope="module")
def world(launchers: None) -> Iterator[World]:
    """A worker on each of two nodes, with a variable, until the last test loses one of them."""
    with World(layout="2x1", **OPTIONS) as world:
        world.execute("import torch.distributed as dist\nkept = rank + 10")
        yield world


def agents(head: int) -> dict[str, psutil.Process]:
    """The agents below a head by the numbers of their nodes; each has a guard before it."""
    found = {}
    for each in psutil.Process(head).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended, and may not have been waited for
            if each.cmdline()[-2:-1] == ["--node"]:
                found[each.cmdline()[-1]] = each
    return found


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Have a process stand still."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


PIDFD_GETFD = 438
"""The number of the system call, on all architectures."""

COUNT = """
import itertools, os, time
for number in itertools.count():
    print(number)
    is_open = torch.tensor(float(os.path.exists({gate!r})))
    dist.all_reduce(is_open, dist.ReduceOp.MIN)
    if is_open: break
    time.sleep(0.01)
"""


def cut(agent: psutil.Process, head: int) -> None:
    """Have the connection between both be lost, as a router does that has forgotten it."""
    ports = {each.laddr.port for each in psutil.Process(head).net_connections("tcp")}
    found: list[int] = []

    def is_connected() -> bool:
        there = agent.net_connections("tcp")
        found[:] = (each.fd for each in there if each.raddr and each.raddr.port in ports)
        return len(found) == 1

    wait_until(is_connected, "the agent is connected to its head")
    pidfd = os.pidfd_open(agent.pid)
    fd = ctypes.CDLL(None).syscall(PIDFD_GETFD, pidfd, found[0], 0)
    os.close(pidfd)
    with socket.socket(fileno=fd) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_is_lost(world: World, tmp_path: Path) -> None:
    """It is made again: nothing that was said on either side is lost, or comes twice.

    Nor where the head is paused for longer than it waits for agents.
    """
    (head,) = psutil.Process(world.session.link.agent.pid).children()
    second, gate = agents(head.pid)["1"], tmp_path / "gate"
    pids = dict(world.pids)
    running = world.session.submit(world.session.task(COUNT.format(gate=str(gate))))
    second_rank = running.transcript[1]
    for _ in range(5):
        count = second_rank.line_count
        follow(world, running, lambda: second_rank.line_count > count)  # noqa: B023
        cut(second, head.pid)
    gate.touch()
    world.session.wait(running)
    assert running.error() is None
    lines = second_rank.written().split()
    assert lines == [str(number) for number in range(len(lines))]
    with paused(head.pid):
        time.sleep(2 * LINK_TIMEOUT)
    world.execute(SUM)
    assert world.gather("kept") == [10, 11]
    assert world.pids == pids


def test_an_agent_that_is_paused(world: World, tmp_path: Path) -> None:
    """The running cell says that its machine does not respond, and goes on with it.

    Where the pause is too long the machine is lost, and nothing is left there once it is over.
    """
    head, gate = world.session.link.agent.pid, tmp_path / "gate"
    second = agents(head)["1"]
    silent = f"node1 does not respond and counts as lost after {LINK_TIMEOUT} s"
    running = world.session.submit(world.session.task(LOOP.format(gate=str(gate))))
    follow(world, running, lambda: running.unfinished and not running.waits)
    with paused(second.pid):
        follow(world, running, lambda: silent in running.waits)
    follow(world, running, lambda: silent not in running.waits)
    gate.touch()
    world.session.wait(running)
    assert running.error() is None
    with paused(second.pid), pytest.raises(WorkerDied, match=r"rank 1 on node1 .*was lost"):
        world.execute("while True: dist.all_reduce(torch.ones(1))")
    assert world.gather("kept") == [10]
    wait_until(lambda: "1" not in agents(head), "it has left")


def test_a_detached_head_without_machines(launchers: None) -> None:
    """It ends: what the world had is gone with them."""
    command = [sys.executable, "-c", DETACHED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as notebook:
        assert notebook.stdout is not None
        assert notebook.stdout.readline() == b"up\n"
        notebook.kill()
    (found,) = (each for each in worlds() if each.info.name == NAME)
    head = psutil.Process(found.agent)
    for agent in agents(head.pid).values():
        agent.kill()
    wait_until(lambda: not head.is_running(), "the head has ended")


def follow(world: World, running: RunningTask, is_so: Callable[[], object]) -> None:
    """Follow a cell until this is so."""
    for _ in world.session.follow(running):
        if is_so():
            return
    pytest.fail(f"the cell has ended: {running.error()}")
