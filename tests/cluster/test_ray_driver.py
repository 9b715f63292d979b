"""Tests of `nbdist.cluster.ray_driver` without a cluster; with one they are in `tests/hosts`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from nbdist.cluster import ray_driver
from nbdist.cluster.ray_driver import Agent, current, probe, word_busy
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.world

NOTHING = "/nowhere/python"


def test_an_actor_runs_the_agent_and_hands_it_the_ticket() -> None:
    """On its stdin; how it has ended comes back, with what it wrote last."""
    program = "import sys; print(sys.stdin.readline(), 'x' * 9); sys.exit(3)"
    command = [sys.executable, "-c", program]
    assert Agent().run(command, "", b"a ticket\n") == (3, ["a ticket", " xxxxxxxxx"])


def test_the_agent_ends_when_it_is_to() -> None:
    """As its stdin ends."""
    agent, ended = Agent(), threading.Event()
    program = "import sys; print('up', flush=True); sys.exit(bool(sys.stdin.read()))"
    run = threading.Thread(
        target=lambda: (agent.run([sys.executable, "-c", program], "", b""), ended.set())
    )
    run.start()
    deadline = time.monotonic() + SOON
    while not ended.wait(0.05) and time.monotonic() < deadline:
        agent.end()  # nothing, where it has not begun
    assert ended.is_set()
    run.join()


def test_the_agent_outlives_what_ray_kills(tmp_path: Path) -> None:
    """The actor's own child, so that the agent can end in order, as its stdin does."""
    agent, ended = Agent(), tmp_path / "ended"
    program = f"import sys; print('up', flush=True); sys.stdin.read(); open({str(ended)!r}, 'x')"
    command = [sys.executable, "-c", program]
    run = threading.Thread(target=lambda: agent.run(command, "", b""))
    run.start()
    wait_until(lambda: agent._child and psutil.Process(agent._child.pid).children(), "it runs")
    agent._child.kill()
    agent.end()
    wait_until(ended.exists, "it has ended in order")
    run.join()


def test_the_agent_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray blocks SIGINT, which is not to reach workers so; nor what it sets for its own code."""
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
        code, lines = Agent().run([sys.executable, "-c", program], "", b"")
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (code, lines) == (0, ["[None, None, 'here:1'] set()"])


def test_the_interpreter_of_the_actor() -> None:
    """It takes the place of the notebook's where the node has no such file; of no other."""
    command = [NOTHING, "-c", "print(1)"]
    assert Agent().run(command, NOTHING, b"") == (0, ["1"])
    code, lines = Agent().run(command, "", b"")
    assert code == 127
    assert NOTHING in lines[0]


def test_the_cluster_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As `ray start` has noted it."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert current() == ""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / ray_driver.CURRENT).write_text("10.0.0.1:6379\n")
    assert current() == "10.0.0.1:6379"


def test_an_address_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is not asked for long; one in another form is Ray's to read."""
    monkeypatch.setattr(ray_driver, "REACH_TIMEOUT", 0.2)
    with pytest.raises(OSError, match=r"no Ray cluster answers at ray://192\.0\.2\.77:10001: "):
        probe("ray://192.0.2.77:10001")
    probe("anyscale://mine")


def test_what_others_use() -> None:
    """Which of it is free."""
    said = word_busy([{"CPU": 2}] * 2, {"CPU": 1}, {"CPU": 4})
    assert said.startswith("2 nodes with 2 CPU each: the cluster has that, but it was not free")
    assert said.endswith("of 4 CPU there is 1 CPU free")
    assert os.linesep not in said
