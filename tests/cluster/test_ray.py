"""Tests of `nbdist.cluster.ray` without a cluster; tests with a cluster are in `tests/hosts`."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path

import psutil
import pytest

from nbdist.cluster import ray as ours
from nbdist.cluster.launcher import find_launcher
from nbdist.cluster.ray import AgentActor, NoRoom, RayLauncher, RayNode, bundles_of, distinct
from nbdist.cluster.ticket import KeyPair, Ticket
from nbdist.config import WorldConfig
from tests.waiting import wait_until

TICKET = Ticket(("127.0.0.1",), 1, "x" * 40, KeyPair.new())
WANTED = WorldConfig(launcher="ray", layout="2x1", env={"KEY": "secret"})


def test_the_error_says_how_to_install_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command in the error installs Ray for the interpreter that needs Ray."""
    launcher = find_launcher("ray")
    assert isinstance(launcher, RayLauncher)
    monkeypatch.setitem(sys.modules, "ray", None)  # makes `import ray` fail
    with pytest.raises(OSError, match=rf"not installed here: {sys.executable} -m pip install"):
        launcher.launch(WANTED, TICKET, tmp_path)


@pytest.mark.world
def test_a_missing_cluster_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error names the address that was tried, and no process is left."""
    pytest.importorskip("ray", reason="Ray is not installed")
    before = {child.pid for child in psutil.Process().children()}
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(OSError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: .*refused") as it:
        RayLauncher().launch(WANTED, TICKET, tmp_path)
    assert "\n" not in str(it.value)
    assert {child.pid for child in psutil.Process().children()} <= before


GIB = 1 << 30
SMALL = RayNode("small", {"CPU": 2, "memory": 4 * GIB, "node:10.0.0.1": 1})
BIG = RayNode("big", {"CPU": 16, "memory": 64 * GIB})
CARDS = RayNode("cards", {"CPU": 16, "GPU": 4, "memory": 64 * GIB})


def wanted(**options: object) -> WorldConfig:
    return WorldConfig(launcher="ray", **options)  # type: ignore[arg-type]


ONE, TWO, FOUR = {"CPU": 1}, {"CPU": 2}, {"CPU": 4}


@pytest.mark.parametrize(
    ("asked", "nodes", "bundles"),
    [
        # A CPU for each worker, or the CPUs and the memory that a worker needs.
        ({"layout": "2x2"}, [SMALL, BIG], [TWO, TWO]),
        ({"layout": "1x2", "cpus": 4, "memory": "3G"}, [BIG], [{"CPU": 8, "memory": 6 * GIB}]),
        # A GPU for each worker if nodes have GPUs, unless the backend is gloo.
        ({"layout": "1x4"}, [BIG, CARDS], [{**FOUR, "GPU": 4}]),
        ({"layout": "1x4", "backend": "gloo"}, [BIG, CARDS], [FOUR]),
        # As many nodes as the cluster has, between the least and the most.
        ({"layout": "1:3x4"}, [SMALL, BIG, BIG], [FOUR] * 2),
        ({"layout": "1:3x4"}, [BIG] * 5, [FOUR] * 3),
        # A number of workers goes to as few nodes as possible, the biggest first.
        ({"n": 5}, [SMALL, CARDS, CARDS], [{**FOUR, "GPU": 4}, {**ONE, "GPU": 1}]),
        # Without a number, all nodes give their GPUs, or a few CPUs, or all CPUs; a cluster's
        # head often has no CPU to give.
        ({}, [RayNode("head", {}), SMALL, BIG], [FOUR, TWO]),
        ({"n": "cpu"}, [SMALL, BIG], [{"CPU": 16}, TWO]),
        ({"n": "gpu"}, [CARDS], [{**FOUR, "GPU": 4}]),
    ],
)
def test_each_used_node_gets_a_bundle(
    asked: dict[str, object], nodes: list[RayNode], bundles: list[dict[str, float]]
) -> None:
    """A bundle has the resources of all workers of its node."""
    assert bundles_of(wanted(**asked), nodes) == bundles


def test_missing_resources_are_named() -> None:
    """The error names the request, and what some nodes have or how much of that is free."""
    there = "the cluster has 2 nodes: small has 2 CPU, 4.0 GiB of memory; big has 16 CPU, 64.0 GiB"
    for asked, said in (
        ({"layout": "2x4"}, f"2 nodes with 4 CPU each: {there}"),
        ({"n": 99}, f"99 workers with 1 CPU each: {there}"),
        ({"n": "gpu"}, f"1 worker with 1 CPU, 1 GPU each: {there}"),
        ({"n": 1, "memory": "1T"}, f"with 1 CPU, 1024.0 GiB of memory each: {there}"),
    ):
        with pytest.raises(NoRoom, match=re.escape(said)):
            bundles_of(wanted(**asked), [SMALL, BIG])
    with pytest.raises(NoRoom, match=r"the cluster has 50 nodes: .*; and 44 more$"):
        bundles_of(wanted(layout="51x1"), [SMALL] * 50)
    said = ours.word_busy([{"CPU": 2}] * 2, {"CPU": 1}, {"CPU": 4})
    assert said.startswith("2 nodes with 2 CPU each: the cluster has that, but it was not free")
    assert said.endswith("of 4 CPU there is 1 CPU free")
    assert os.linesep not in said


def test_no_two_nodes_have_the_same_name() -> None:
    """Equal names get suffixes, because a name tells the head which node has ended."""
    assert distinct(["a", "b"], ["1", "2"]) == ["a", "b"]
    assert distinct(["a", "a", "b"], ["1", "2", "3"]) == ["a-1", "a-2", "b"]
    assert distinct(["a", "a"], ["1", "1"]) == ["a-1-0", "a-1-1"]
    names = sorted(["node10", "node2", "a", "1b"], key=ours.natural_key)
    assert names == ["1b", "a", "node2", "node10"]


# --- the driver ---------------------------------------------------------------------------------

NOTHING = "/nowhere/python"


@pytest.mark.world
def test_an_actor_runs_the_agent_and_hands_it_the_ticket() -> None:
    """The ticket comes on stdin; the actor returns the agent's exit code and last lines."""
    program = "import sys; print(sys.stdin.readline(), 'x' * 9); sys.exit(3)"
    command = [sys.executable, "-c", program]
    assert AgentActor().run(command, "", b"a ticket\n") == (3, ["a ticket", " xxxxxxxxx"])
    # The actor's interpreter replaces the notebook's if the node lacks that, but no other.
    command = [NOTHING, "-c", "print(1)"]
    assert AgentActor().run(command, NOTHING, b"") == (0, ["1"])
    code, lines = AgentActor().run(command, "", b"")
    assert (code, NOTHING in lines[0]) == (127, True)


@pytest.mark.world
def test_the_agent_outlives_what_ray_kills(tmp_path: Path) -> None:
    """If Ray kills the actor's child, the agent can still end in order, once its stdin ends."""
    agent, ended = AgentActor(), tmp_path / "ended"
    program = f"import sys; print('up', flush=True); sys.stdin.read(); open({str(ended)!r}, 'x')"
    command = [sys.executable, "-c", program]
    run = threading.Thread(target=lambda: agent.run(command, "", b""))
    run.start()
    wait_until(lambda: agent._child and psutil.Process(agent._child.pid).children(), "it runs")
    agent._child.kill()
    agent.end()
    wait_until(ended.exists, "it has ended in order")
    run.join()


@pytest.mark.world
def test_the_agent_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent gets neither Ray's block of SIGINT nor variables that Ray sets for its own code."""
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace")
    monkeypatch.setenv("RAY_JOB_ID", "01")
    monkeypatch.setenv("RAY_ADDRESS", "here:1")
    names = ["PYTHONBREAKPOINT", "RAY_JOB_ID", "RAY_ADDRESS"]
    program = (
        f"import os, signal; print([os.environ.get(name) for name in {names}],"
        "signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        code, lines = AgentActor().run([sys.executable, "-c", program], "", b"")
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (code, lines) == (0, ["[None, None, 'here:1'] set()"])


def test_the_cluster_of_ray_start_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The address that `ray start` has written is tried; a silent address is soon given up."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ours.word_no_cluster("auto").startswith("this machine is no node of a Ray cluster; `ray")
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as there:
        noted = f"127.0.0.1:{there.getsockname()[1]}"
        (tmp_path / "ray" / ours.CURRENT).write_text(f"{noted}\n")
        assert ours.word_no_cluster("auto") == ""
    told = f"no Ray cluster answers at {noted}: Connection refused; `ray start` makes it one"
    assert ours.word_no_cluster("auto").startswith(told)
    monkeypatch.setattr(ours, "RAY_REACH_TIMEOUT", 0.2)
    silent = "ray://192.0.2.77:10001"
    assert ours.word_no_cluster(silent).startswith(f"no Ray cluster answers at {silent}: ")
    assert ours.word_no_cluster("anyscale://mine") == ""
