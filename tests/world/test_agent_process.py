"""Tests of `nbdist.world.agents`: an agent whose life hangs on a pipe of this process."""

from __future__ import annotations

import os
import select
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nbdist.agent.code_folder import CodeFolder
from nbdist.system.folders import RuntimeFolder
from nbdist.wire.messages import CodeFile, GetCode, PutCode
from nbdist.world.agents import AgentProcess
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.own_agent

ENDED_IN = 3.0


@pytest.fixture
def runtime() -> Iterator[RuntimeFolder]:
    folder = RuntimeFolder()
    yield folder
    folder.close()


def test_an_agent_ends_with_its_stdin(runtime: RuntimeFolder) -> None:
    """It has a session of its own, which Stop does not reach, and says when it has ended."""
    agent = AgentProcess(runtime.path, fork_server=False)
    assert os.getsid(agent.pid) == agent.pid
    assert agent.exit_code() is None
    assert agent.command.endswith(f"-m nbdist.agent {runtime.path} {os.getpid()} --no-fork")
    agent.end(SOON)
    assert select.select([agent], [], [], 0)[0] == [agent]
    assert (agent.exit_code(), agent.last_lines()) == (0, [])
    agent.close()


def test_an_agent_that_hangs_is_killed(
    runtime: RuntimeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the seconds it has for it; its guard then ends what it has left, and itself.

    Of the notebook's code, too, nothing stays that dead agents had.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code, file = CodeFolder(), CodeFile(b"digest")
    code.take(GetCode({}, {"a.py": file}))
    code.take(PutCode({file: b"x = 1"}))
    os.close(code._claim)  # as the kernel does at a process's end
    agent = AgentProcess(runtime.path, fork_server=True)
    guard = psutil.Process(agent.pid)
    wait_until(lambda: len(guard.children(recursive=True)) == 2, "the agent has a fork server")
    (hanging,) = guard.children()
    left = guard.children(recursive=True)
    hanging.suspend()
    agent.end(ENDED_IN)
    assert agent.exit_code() == -signal.SIGKILL
    assert not any(process.is_running() for process in left)
    assert not runtime.path.exists()
    assert [*tmp_path.iterdir()] == []
    agent.close()


def test_a_guard_that_hangs_is_killed_after_its_agent(runtime: RuntimeFolder) -> None:
    """It is stopped here, and can neither see the agent end nor pass SIGTERM on to it."""
    agent = AgentProcess(runtime.path, fork_server=False)
    guard = psutil.Process(agent.pid)
    wait_until(guard.children, "the guard has forked the agent")
    (hanging,) = guard.children()
    guard.suspend()
    hanging.suspend()
    agent.end(0.1)
    assert agent.exit_code() == -signal.SIGKILL
    hanging.wait(SOON)
    agent.close()
