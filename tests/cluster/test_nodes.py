"""Tests of `nbdist.cluster.nodes`: agents that connect, cannot start, are paused, or are lost."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from nbdist import __version__
from nbdist.cluster import nodes as nodes_module
from nbdist.cluster.launcher import Launched, LauncherProcess
from nbdist.cluster.nodes import Awaited, CannotStart, NodePool
from nbdist.errors import StartError, UsageError, WorkerDied, WorkerError
from nbdist.terminal.worlds import WORLD_STATUS_TIMEOUT as TERMINAL_TIMEOUT
from nbdist.wire.messages import GetStatus
from nbdist.wire.node_messages import NodeFacts, NodeHello, Reach
from nbdist.wire.queries import DescribeRanks
from nbdist.wire.spec import versions_here
from nbdist.world import dispatch, recovery
from nbdist.world.agents import ask_all, worlds
from nbdist.world.task_error import error_of
from nbdist.world.task_run import TaskRun
from nbdist.world.wait_texts import waiting_text
from nbdist.world.world import World
from tests.cluster.test_node import node as node_that
from tests.cluster.test_node import wanted
from tests.traces import command_line
from tests.waiting import until, wait_until

pytestmark = pytest.mark.own_agent

BARRIERS = "import torch.distributed as dist\nwhile True: dist.barrier()"


def test_an_agent_that_cannot_start_is_named(launchers: None) -> None:
    """The error names the node, its exit code and its command; no process is left."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    world = World(layout="2x1", launcher="here", log_dir="", python="/bin/false")
    either = r"the agent on node([01]) .*exited with code 1.*`/bin/false .*--ticket --node \1`"
    with pytest.raises(StartError, match=either):
        world.start()
    world.shutdown()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


SLOW = """#!/bin/sh
case "$*" in *"--node 1"*) sleep 3;; esac
exec {python} "$@"
"""
"""An interpreter that starts on the second machine after three seconds."""


def test_a_task_sent_early_runs_on_all_machines(launchers: None, tmp_path: Path) -> None:
    """A task that is sent before any machine has come runs on the ranks of all machines.

    A restart may use another launcher, but an unknown launcher is refused and ends nothing.
    """
    python = tmp_path / "slow"
    python.write_text(SLOW.format(python=sys.executable))
    python.chmod(0o755)
    world = World(launcher="here", python=str(python), log_dir="", show=False)
    try:
        task = world.task("x = 7")
        assert task.ranks == (0,)  # the number of ranks is not known yet
        running = world.submit(task)
        assert (running.task.ranks, world.size > 1) == (world.engine.rank_table.everyone, True)
        dispatch.finish(world.engine, running)
        assert {row.host for row in world.status()} == {"node0", "node1"}
        before, agent = world.pids, world.engine.connection.link.agent
        below = psutil.Process(agent.pid).children(recursive=True)
        sockets = [each for process in below for each in process.net_connections("tcp")]
        listening = [each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN]
        assert listening
        said = r"`--launcher nowhere`: available: here, .*local, .*ssh"
        with pytest.raises(UsageError, match=said):
            world.restart(launcher="nowhere", n=2)
        assert (world.pids, world.engine.config.launcher_name) == (before, "here")
        world.restart(1, keep=["x"], launcher="local", python=sys.executable)
        assert "nbdist.cluster" in agent.command
        assert "nbdist.cluster" not in world.engine.connection.link.agent.command
        assert not psutil.pid_exists(agent.pid)
        assert world.gather("x") == [7]
    finally:
        world.shutdown()
    for port in listening:  # the head has closed its port
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_items_of_a_map_reach_ranks_of_two_nodes(launchers: None) -> None:
    """Items go to other machines in messages; an item or a result above the limit is an error."""
    with World(layout="2x1", launcher="here", log_dir="", show=False) as world:
        items = [bytes([number]) * (1 << 20) for number in range(6)]
        assert world.map(lambda item: item[-1], items) == [*range(6)]
        with pytest.raises(WorkerError, match="at most 32 MiB an item from another machine"):
            world.map(lambda size: bytes(size), [33 << 20])
        with pytest.raises(UsageError, match="at most 32 MiB an item to other machines"):
            world.map(len, [bytes(33 << 20)])
        assert world.map(lambda item: int(os.environ["RANK"]), [0, 0], ranks=[1]) == [1, 1]


def test_a_restart_brings_a_lost_machine_back(launchers: None) -> None:
    """A restart brings back a lost machine, although the world could do without the machine.

    The error about the loss names the command of the restart.
    """
    with World(layout="1:2x1", launcher="here", log_dir="", show=False) as world:
        wait_until(lambda: has_ranks(world, 2), "the second machine is there")
        everyone = psutil.Process(world.engine.connection.link.agent.pid).children(recursive=True)
        guard, agent = (each for each in everyone if command_line(each)[-2:] == ["--node", "1"])
        assert agent.ppid() == guard.pid
        agent.kill()
        asks = r"`--launcher here` machines come at the start alone: `%dist_restart` asks for all"
        with pytest.raises(WorkerDied, match=f"now 1 worker; .* With {asks}"):
            world.execute(BARRIERS)
        world.execute("pass")
        world.restart()
        wait_until(lambda: has_ranks(world, 2), "it is back")


def has_ranks(world: World, number: int) -> bool:
    """Return True if the world has `number` ranks, after it has used machines that have come."""
    world.execute("pass")
    return world.size == number


FACTS = NodeFacts("b", 0, "10.0.0.2", 4000, 4, (), sys.executable, versions_here())
HELLO = NodeHello(__version__, 7, FACTS)


class Pipe(LauncherProcess):
    """Stands for a launcher's process for the host `b`: runs until `end`, or has ended already."""

    host = "b"

    def __init__(self, *, has_ended: bool) -> None:
        self._read_end, self._write_end = os.pipe()
        if has_ended:
            self.end(0)

    def fileno(self) -> int:
        return self._read_end

    def end(self, timeout: float) -> None:
        if self._write_end >= 0:
            os.close(self._write_end)
        self._write_end = -1

    def close(self) -> None:
        self.end(0)
        os.close(self._read_end)


def new_pool(folder: Path) -> NodePool:
    """Return a pool of two nodes that nobody listens to."""
    none = lambda *_: None  # noqa: E731
    return NodePool(folder, wanted(layout="2x1"), none, none, none, none)


JOIN, RUN = "nbdist join a:1", "run `nbdist join a:1` on each machine · "


@pytest.mark.parametrize(
    ("awaited", "room", "is_enough", "will_do", "said"),
    [
        (Awaited(2), {"a": 4, "b": 2}, True, False, "2 of 2 nodes: a (4), b (2)"),
        (Awaited(2, least=1), {}, False, False, "0 of 2 nodes"),
        (Awaited(2, least=1), {"a": 4}, False, True, "1 of 2 nodes: a (4)"),
        (Awaited(1, 8), {"a": 4}, True, False, "1 of 1 node: a (4)"),
        (Awaited(2, None, JOIN, least=1), {"a": 4}, False, False, f"{RUN}1 of 2 nodes: a (4)"),
        (Awaited(1, 6, JOIN), {"a": 4}, False, False, f"{RUN}4 of 6 workers: a (4)"),
        (Awaited(1, 6, JOIN), {"a": 4, "b": 2}, True, False, "6 of 6 workers: a (4), b (2)"),
    ],
)
def test_a_start_counts_the_nodes_that_have_come(
    awaited: Awaited, room: dict[str, int], *, is_enough: bool, will_do: bool, said: str
) -> None:
    """Until all nodes have come, the text names the command by which users let machines join.

    If a launcher starts the nodes, there is no command, and `least` nodes are enough.
    """
    found = awaited.is_complete(room), awaited.can_start_without_rest(room), awaited.text(room)
    assert found == (is_enough, will_do, said)


# --- nodes that are refused, or do not answer ----------------------------------------------------


async def test_a_refused_node_is_started_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pauses before the starts of a refused agent double, up to a limit, until it joins."""
    monkeypatch.setattr(nodes_module, "AGAIN_INTERVAL", 0.05)
    monkeypatch.setattr(nodes_module, "MAX_REFUSED_PAUSE", 0.4)
    pool, starts = new_pool(tmp_path), list[float]()
    old = HELLO._replace(version="0.0.1")

    def again(number: int) -> LauncherProcess:
        starts.append(time.monotonic())
        is_new = len(starts) == 6
        pool._handle_message(b"b", HELLO if is_new else old)
        return Pipe(has_ended=not is_new)

    pool._launched, pool._has_started = Launched((), 1, ("b",), again=again), True
    pool._run_in_background(pool._restart_missing_agents())
    await until(lambda: pool.present_nodes, "the agent has joined at its sixth start")
    pauses = [after - before for before, after in pairwise(starts)]
    assert all(pause >= least for pause, least in zip(pauses, (0.1, 0.2, 0.4, 0.4), strict=False))
    await pool.close()


async def test_a_start_fails_if_a_machine_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is lost or silent while connections are checked does not count as reached."""
    monkeypatch.setattr(Reach, "timeout", 0.05)
    pool = new_pool(tmp_path)
    first, silent = (node_that(number, lambda _: None) for number in (0, 1))
    first._send = lambda message: first.resolve_request(message.id, "")
    with pytest.raises(CannotStart, match="b did not answer within 0 s"):
        await pool._check_connections([first, silent])
    silent.mark_lost("the connection to b was lost")
    with pytest.raises(CannotStart, match="the connection to b was lost"):
        await pool._check_connections([first, silent])
    await pool._check_connections([first])
    await pool.close()


async def test_a_lost_machine_that_joins_again_has_its_number(tmp_path: Path) -> None:
    """A machine that joins without a number gets the number that it had before it was lost."""
    pool = new_pool(tmp_path)
    for identity, name in ((b"1", "a"), (b"2", "b"), (b"3", "a"), (b"4", "c")):
        facts = FACTS._replace(name=name, number=-1)
        pool._handle_message(identity, HELLO._replace(facts=facts))
        if identity == b"2":
            pool.nodes[0].mark_lost("the connection to a was lost")
    assert {node.name: node.number for node in pool.present_nodes} == {"a": 0, "b": 1, "c": 2}
    await pool.close()


# --- pauses, and connections that are lost --------------------------------------------------------

LINK_TIMEOUT = 2

OPTIONS = {"launcher": "here", "log_dir": "", "show": False, "link_timeout": LINK_TIMEOUT}

SUM = "total = torch.ones(1)\ndist.all_reduce(total)\nassert total == 2"

COUNT = """
import itertools, os, time
for number in itertools.count():
    print(number)
    is_open = torch.tensor(float(os.path.exists({gate!r})))
    dist.all_reduce(is_open, dist.ReduceOp.MIN)
    if is_open: break
    time.sleep(0.01)
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
    """A world with a worker and a variable on each of two nodes; the last test loses a node."""
    with World(layout="2x1", **OPTIONS) as world:
        world.execute("import torch.distributed as dist\nkept = rank + 10")
        yield world


def agents(head: int) -> dict[str, psutil.Process]:
    """Return a head's agents by their nodes' numbers; an agent comes after its guard."""
    found = {}
    for each in psutil.Process(head).children(recursive=True):
        words = command_line(each)
        if words[-2:-1] == ["--node"]:
            found[words[-1]] = each
    return found


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Pauses a process by SIGSTOP."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


PIDFD_GETFD = 438
"""The number of the system call, on all architectures."""


def cut(agent: psutil.Process, head: int) -> None:
    """Shut down the connection of an agent to its head, as a router might."""
    ports = {each.laddr.port for each in psutil.Process(head).net_connections("tcp")}

    def found() -> list[int]:
        there = agent.net_connections("tcp")
        return [each.fd for each in there if each.raddr and each.raddr.port in ports]

    def shut_down() -> bool:
        descriptors = found()
        if len(descriptors) != 1:
            return False
        pidfd = os.pidfd_open(agent.pid)
        fd = ctypes.CDLL(None).syscall(PIDFD_GETFD, pidfd, *descriptors, 0)
        os.close(pidfd)
        if fd < 0:  # the agent has just closed this connection, to connect again
            return False
        with socket.socket(fileno=fd) as connection, suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
            return True
        return False

    wait_until(shut_down, "the agent is connected to its head")


@pytest.mark.shared_world
def test_a_lost_connection_is_made_again(world: World, tmp_path: Path) -> None:
    """No output is lost or doubled if connections are cut, and no rank if the head was paused."""
    (head,) = psutil.Process(world.engine.connection.link.agent.pid).children()
    second, gate = agents(head.pid)["1"], tmp_path / "gate"
    pids = dict(world.pids)
    running = dispatch.submit(world.engine, world.engine.task(COUNT.format(gate=str(gate))))
    second_rank = running.transcript[1]
    for _ in range(5):
        count = second_rank.line_count
        follow(world, running, lambda: second_rank.line_count > count)  # noqa: B023
        cut(second, head.pid)
    gate.touch()
    dispatch.wait(world.engine, running)
    assert error_of(running) is None
    lines = second_rank.written().split()
    assert lines == [str(number) for number in range(len(lines))]
    with paused(head.pid):
        time.sleep(2 * LINK_TIMEOUT)
    world.execute(SUM)
    assert world.gather("kept") == [10, 11]
    assert world.pids == pids


@pytest.mark.shared_world
def test_a_paused_agent_is_named_or_lost(world: World, tmp_path: Path) -> None:
    """A cell names the agent and goes on after a pause; after the link's timeout a rank is lost."""
    head, gate = world.engine.connection.link.agent.pid, tmp_path / "gate"
    second = agents(head)["1"]
    silent = f"node1 does not respond and counts as lost after {LINK_TIMEOUT} s"
    running = dispatch.submit(world.engine, world.engine.task(COUNT.format(gate=str(gate))))
    follow(world, running, lambda: running.unfinished and not waiting_text(running))
    with paused(second.pid):
        follow(world, running, lambda: silent in waiting_text(running))
    follow(world, running, lambda: silent not in waiting_text(running))
    gate.touch()
    dispatch.wait(world.engine, running)
    assert error_of(running) is None
    with paused(second.pid), pytest.raises(WorkerDied, match=r"rank 1 on node1 .*was lost"):
        world.execute("while True: dist.all_reduce(torch.ones(1))")
    assert world.gather("kept") == [10]
    wait_until(lambda: "1" not in agents(head), "it has left")


def test_a_silent_agent_hides_no_world(launchers: None) -> None:
    """A question about all ranks has the rows of other machines, although one agent is silent."""
    with World(layout="2x1", **{**OPTIONS, "link_timeout": 60}) as world:
        (head,) = psutil.Process(world.engine.connection.link.agent.pid).children()
        with paused(agents(head.pid)["1"].pid), ThreadPoolExecutor() as pool:
            in_terminal = pool.submit(ask_all, DescribeRanks(), TERMINAL_TIMEOUT)
            assert [row.rank for row in world.engine.ask_from_thread(GetStatus())] == [0]
            found = {each.agent: each.info for each in in_terminal.result()}
            assert [row.rank for row in found[head.pid].ranks] == [0]


def test_a_detached_head_ends_without_its_machines(launchers: None) -> None:
    """A detached head ends if all agents were killed, since all variables are gone."""
    command = [sys.executable, "-c", DETACHED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as notebook:
        assert notebook.stdout.readline() == b"up\n"
        notebook.kill()
    (found,) = (each for each in worlds() if each.info.name == NAME)
    head = psutil.Process(found.agent)
    for agent in agents(head.pid).values():
        agent.kill()
    wait_until(lambda: not head.is_running(), "the head has ended")


def follow(world: World, running: TaskRun, is_so: Callable[[], object]) -> None:
    """Follow a cell until a condition is true, which must be before the cell ends."""
    for _ in recovery.follow(world.engine, running):
        if is_so():
            return
    pytest.fail(f"the cell has ended: {error_of(running)}")
