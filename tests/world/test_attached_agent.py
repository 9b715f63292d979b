"""Tests of `nbdist.world.agents`: an agent of which this process is not the parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import __version__
from nbdist.wire.views import Accepted, WorldInfo
from nbdist.world.agents import AttachedAgent, Found

pytestmark = pytest.mark.own_agent

INFO = WorldInfo(__version__, "vm", "default", "exp")
GUARDED = "sleep 1000 & echo $!; wait $!; %s"


class Line:
    """Stands for the connection to the agent, which ends with the agent's hold."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def guard() -> Iterator[subprocess.Popen[str]]:
    """A process that ends after the one that it has started."""
    with subprocess.Popen(["sh", "-c", GUARDED % ""], stdout=subprocess.PIPE, text=True) as found:
        yield found
        found.kill()


def test_its_end(guard: subprocess.Popen[str], tmp_path: Path) -> None:
    """It is there while the guard is; it is ended by a signal where it does not end by itself.

    What it said last is known once its folder has gone, unless somebody took that away before.
    """
    assert guard.stdout is not None
    pid, line = int(guard.stdout.readline()), Line()
    (tmp_path / "agent.log").write_text("one\ntwo\n")
    found = Found(tmp_path, pid, INFO)
    agent = AttachedAgent(found, line, Accepted(pid, guard.pid))  # type: ignore[arg-type]
    assert (agent.host, agent.pid, agent.exit_code()) == ("vm", pid, None)
    assert agent.last_lines() == ["one", "two"]
    assert select.select([agent.fileno()], [], [], 0)[0] == []
    agent.end(0.1)
    assert select.select([agent.fileno()], [], [], 0)[0] == [agent.fileno()]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    (tmp_path / "agent.log").unlink()
    assert agent.last_lines() == ["one", "two"]
    agent.close()
    assert line.is_closed
    agent = AttachedAgent(found, line, Accepted(os.getpid(), os.getpid()))  # type: ignore[arg-type]
    assert agent.last_lines() == []
    agent.close()
