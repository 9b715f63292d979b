"""Tests of `nbdist.world.workers`: how worlds begin and end, what fails then, what is left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nbdist import topology
from nbdist.config import WorldConfig
from nbdist.errors import StartError
from nbdist.output.events import Died, Done
from nbdist.wire.messages import Healed
from nbdist.world.states import State
from nbdist.world.workers import Workers
from nbdist.world.world import World
from tests.waiting import once, press_stop
from tests.worlds import NewWorld


@pytest.fixture
def new_children() -> Callable[[], list[psutil.Process]]:
    """A question to ask in mid-test: what has been started since it began, and lives?"""
    before = psutil.Process().children(recursive=True)
    return lambda: [
        child for child in psutil.Process().children(recursive=True) if child not in before
    ]


@pytest.mark.world
def test_worker_that_cannot_form_its_group(
    monkeypatch: pytest.MonkeyPatch,
    traces_left: Callable[[], list[str]],
    new_children: Callable[[], list[psutil.Process]],
) -> None:
    """A start that fails says which rank, where, why, how it was started, and its last lines."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    world = World(2, log_dir="")
    began = time.monotonic()
    with pytest.raises(StartError) as caught:
        world.start()
    sys.stdout.write(f"{time.monotonic() - began:.2f} s\n")
    assert caught.value.rank in (0, 1)
    assert caught.value.host == os.uname().nodename
    assert "-m nbdist.worker" in caught.value.command
    (said,) = caught.value.log_lines
    assert said.startswith("GLOO_SOCKET_IFNAME=nowhere0: this network interface does not exist. ")
    assert said.endswith("; without the variable workers use lo.")
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"rank {caught.value.rank} on {caught.value.host} could not start: ")
    assert "it exited with code 1." in first
    assert world.state is State.STOPPED
    monkeypatch.undo()
    assert new_children() == []
    world.restart()
    assert world.gather("rank") == [0, 1]
    world.shutdown()
    assert [line for line in traces_left() if not line.startswith("process")] == []


@pytest.mark.world
def test_worker_whose_gpu_torch_cannot_use(
    monkeypatch: pytest.MonkeyPatch, new_children: Callable[[], list[psutil.Process]]
) -> None:
    """It is one line that says which GPU, of which machine, why, and what to do."""
    if torch.accelerator.is_available():
        pytest.skip("torch can use one here")
    monkeypatch.setattr(topology, "installed_gpus", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for _ in range(5):  # the other rank may be about to be forked
        world = World(2, log_dir="", share_gpus=True)
        with pytest.raises(StartError) as caught:
            world.start()
        assert new_children() == []
    (said,) = str(caught.value).splitlines()
    assert said.startswith(f"the workers could not start: GPU 0 of {os.uname().nodename}: ")
    assert said.endswith("; `--env CUDA_VISIBLE_DEVICES=` uses the CPU.")


@pytest.mark.own_agent
def test_worker_whose_import_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A broken torch fails the start within seconds, with the end of its traceback."""
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    world = World(2, log_dir="")
    began = time.monotonic()
    with pytest.raises(StartError) as caught:
        world.start()
    sys.stdout.write(f"{time.monotonic() - began:.2f} s\n")
    assert "broken on purpose" in str(caught.value)
    assert world.state is State.STOPPED
    world.shutdown()


@pytest.mark.own_agent
def test_start_interrupted(new_children: Callable[[], list[psutil.Process]]) -> None:
    """Stop during a start ends all that was started; the world can be started afterwards."""
    world = World(2, log_dir="")
    starts = once(lambda: world.state is State.STARTING and new_children(), press_stop)
    with starts, pytest.raises(KeyboardInterrupt):
        world.start()
    assert world.state is State.STOPPED
    assert new_children() == []
    world.start()
    assert world.gather("rank") == [0, 1]
    world.shutdown()


@pytest.mark.own_agent
def test_restart_interrupted() -> None:
    """A restart that Stop has cut short is asked for again, and ends the old workers."""
    with World(1, log_dir="") as world:
        world.execute("import atexit, time; atexit.register(time.sleep, 60)")
        before = dict(world.pids)
        restarts = once(lambda: world.state is not State.READY, press_stop)
        with restarts, pytest.raises(KeyboardInterrupt):
            world.restart()
        world.restart()
        assert world.state is State.READY
        assert not psutil.pid_exists(before[0])
        world.execute("assert 'atexit' not in globals()")


def test_local_world_listens_for_gloo_alone(new_world: NewWorld) -> None:
    """Without a group nothing listens on TCP; gloo's own sockets do, on the loopback device.

    Nor is anything of the environment in a command line, which other users can read.
    """
    for backend in ("none", "gloo"):
        with new_world(2, backend=backend) as world:
            agent = psutil.Process(world.session.link.agent.pid)
            processes = agent, *agent.children(recursive=True)
            assert not any("NBDIST_TEST_RUN" in " ".join(each.cmdline()) for each in processes)
            listening = [
                connection.laddr.ip
                for process in processes
                for connection in connections_of(process)
                if connection.status == psutil.CONN_LISTEN
            ]
            assert {*listening} == ({"127.0.0.1"} if backend == "gloo" else set())


def connections_of(process: psutil.Process) -> list[Any]:
    """psutil 6 has another name for it."""
    ask = getattr(process, "net_connections", None) or process.connections
    return list(ask("inet"))


def test_who_was_replaced_is_said_once() -> None:
    """With how they ended; ranks that there are no more do not count."""
    workers = Workers(WorldConfig(n=2, log_dir=""))
    workers.names.finished(1, Done("ok", 0.0, frozenset("x")), {})
    workers.dead = {1: Died(-9, 0), 2: Died(-9, 0)}
    workers.take_healed(Healed({0: 1, 1: 2}, {0: "", 1: ""}))
    assert workers.replace_dead({"late"}) == (1,)
    assert (workers.dead, workers.names.lacking([1])) == ({}, "late and x")
    assert [workers.take_replaced(), workers.take_replaced()] == [{1: Died(-9, 0)}, {}]
