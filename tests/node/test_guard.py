"""Tests of `nbdist.node.guard`: what is left when an agent, or its guard, is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nbdist.node.guard import end_group
from tests.waiting import SOON

pytestmark = pytest.mark.world

AGENT = """
import os, signal, subprocess, sys
from pathlib import Path
from nbdist.node import guard

guard.AGENT_GRACE = 0.2
above = guard.go_below_guard(Path(sys.argv[1]), int(sys.argv[2]))
# Neither its parent nor its session leads to it.
command = "setsid sleep 1000 > /dev/null & echo $!"
shell = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE)
print(os.getpid(), shell.communicate()[0].decode(), flush=True)
if sys.stdin.readline():
    above.tell(stays=False)
    above.tell(stays=True)
    print("stays", flush=True)
    signal.pause()
"""

SLOW = """
import os, sys, time
from pathlib import Path
from nbdist.node import guard

guard.AGENT_GRACE, guard.AGENT_GRACES = 1.0, int(sys.argv[1])
guard.go_below_guard(Path(sys.argv[2]), None)
while time.process_time() < 1.5:
    pass
sys.exit(3)
"""


class Processes:
    """A guard, the agent below it, an orphan of that one's, and the notebook's process."""

    def __init__(self, runtime: Path) -> None:
        self.notebook = subprocess.Popen(["sleep", "1000"])
        self.guard = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(runtime), str(self.notebook.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.guard.stdout is not None
        agent, orphan = map(int, self.guard.stdout.readline().split())
        self.agent, self.orphan = psutil.Process(agent), psutil.Process(orphan)

    def close(self) -> None:
        for process in (self.notebook, self.guard, self.agent, self.orphan):
            if isinstance(process, subprocess.Popen) or process.is_running():
                process.kill()
        self.notebook.wait()
        with self.guard:
            pass

    def close_stdin(self) -> None:
        assert self.guard.stdin is not None
        self.guard.stdin.close()

    def end_notebook(self) -> None:
        self.notebook.kill()
        self.notebook.wait()


@pytest.fixture
def processes(runtime: Path) -> Iterator[Processes]:
    processes = Processes(runtime)
    try:
        yield processes
    finally:
        processes.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_agent_is_killed(processes: Processes, runtime: Path, number: int) -> None:
    """All that it started ends, its folder is removed, and the guard ends as it did."""
    processes.agent.send_signal(number)
    assert processes.guard.wait(SOON) == -number
    assert not processes.orphan.is_running()
    assert not runtime.exists()
    runtime.mkdir()


@pytest.mark.parametrize("end", [Processes.close_stdin, Processes.end_notebook])
def test_the_agent_hangs(
    processes: Processes, runtime: Path, end: Callable[[Processes], None]
) -> None:
    """One that has not ended some seconds after its notebook is killed; nothing is left."""
    processes.agent.suspend()
    end(processes)
    assert processes.guard.wait(SOON) == -signal.SIGKILL
    assert not processes.orphan.is_running()
    assert not runtime.exists()
    runtime.mkdir()


@pytest.mark.parametrize(("graces", "ends"), [(1000, 3), (1, -signal.SIGKILL)])
def test_the_agent_is_slow(runtime: Path, graces: int, ends: int) -> None:
    """One that works on when its notebook has ended, as it imports still, has longer; not ever."""
    command = [sys.executable, "-c", SLOW, str(graces), str(runtime)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as guard:
        assert guard.stdin is not None
        guard.stdin.close()
        assert guard.wait(2 * SOON) == ends
    assert not runtime.exists()
    runtime.mkdir()


@pytest.mark.parametrize("end", [Processes.close_stdin, Processes.end_notebook])
def test_the_agent_stays(
    processes: Processes, runtime: Path, end: Callable[[Processes], None]
) -> None:
    """One that has said so outlives its notebook, whatever it does; killed, it leaves nothing."""
    assert processes.guard.stdin is not None
    assert processes.guard.stdout is not None
    processes.guard.stdin.write(b"stay\n")
    processes.guard.stdin.flush()
    lines = [processes.guard.stdout.readline() for _ in range(2)]
    assert lines == [b"\n", b"stays\n"]
    processes.agent.suspend()
    end(processes)
    with pytest.raises(subprocess.TimeoutExpired):
        processes.guard.wait(1.0)
    processes.agent.kill()
    assert processes.guard.wait(SOON) == -signal.SIGKILL
    assert not processes.orphan.is_running()
    assert not runtime.exists()
    runtime.mkdir()


def test_the_guard_is_killed(processes: Processes) -> None:
    """The agent gets SIGTERM."""
    processes.guard.kill()
    processes.agent.wait(SOON)


def test_sigterm_is_passed_on(processes: Processes) -> None:
    """The guard has the agent end, and ends with it."""
    processes.guard.terminate()
    assert processes.guard.wait(SOON) == -signal.SIGTERM
    assert not processes.agent.is_running()


def test_a_process_group_is_ended() -> None:
    """Its leader and what that started; a group that is no more is no error."""
    with subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
    ) as shell:
        assert shell.stdout is not None
        child = psutil.Process(int(shell.stdout.readline()))
        end_group(shell.pid)
    child.wait(SOON)
    end_group(shell.pid)
