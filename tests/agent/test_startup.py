"""Tests of how the process of an agent, or of a head, begins.

Also how a guard cleans up after its agent, and what an agent says that cannot start.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from nbdist.cluster.ticket import KeyPair, Ticket
from tests.waiting import SOON

pytestmark = pytest.mark.world

AGENT = """
import os, signal, subprocess, sys
from pathlib import Path
from nbdist.system import processes

processes.AGENT_GRACE = 0.2
above = processes.fork_below_guard(Path(sys.argv[1]), int(sys.argv[2]))
# Neither its parent nor its session leads to it.
command = "setsid sleep 1000 > /dev/null & echo $!"
shell = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE)
print(os.getpid(), shell.communicate()[0].decode(), flush=True)
if sys.stdin.readline():
    above.send(processes.LEAVES_BYTE)
    above.send(processes.STAYS_BYTE)
    print("stays", flush=True)
    signal.pause()
"""


class Processes:
    """A guard, the agent below the guard, an orphan of the agent, and the notebook's process."""

    def __init__(self, runtime: Path) -> None:
        self.notebook = subprocess.Popen(["sleep", "1000"])
        self.guard = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(runtime), str(self.notebook.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        agent, orphan = map(int, self.guard.stdout.readline().split())
        self.agent, self.orphan = psutil.Process(agent), psutil.Process(orphan)
        self.folder = runtime

    def close(self) -> None:
        for process in (self.notebook, self.guard, self.agent, self.orphan):
            if isinstance(process, subprocess.Popen) or process.is_running():
                process.kill()
        self.notebook.wait()
        with self.guard:
            pass

    def end_notebook(self) -> None:
        self.notebook.kill()
        self.notebook.wait()

    def leave_nothing(self, number: signal.Signals) -> None:
        """Check that the guard ends by this signal, and that agent, orphan and folder have gone."""
        assert self.guard.wait(SOON) == -number
        for process in (self.agent, self.orphan):
            assert not process.is_running()
        assert not self.folder.exists()


@pytest.fixture
def folder(runtime: Path) -> Path:
    """The folder of an agent, which is removed with its agent."""
    (runtime / "agent").mkdir()
    return runtime / "agent"


@pytest.fixture
def processes(folder: Path) -> Iterator[Processes]:
    with closing(Processes(folder)) as processes:
        yield processes


def hang(processes: Processes) -> None:
    """Suspend the agent and end the notebook: after some seconds the guard kills the agent."""
    processes.agent.suspend()
    processes.end_notebook()


@pytest.mark.parametrize(
    ("end", "number"),
    [
        (lambda processes: processes.agent.send_signal(signal.SIGSEGV), signal.SIGSEGV),
        (hang, signal.SIGKILL),
        (lambda processes: processes.guard.terminate(), signal.SIGTERM),
    ],
    ids=["the agent is killed", "the agent hangs", "the guard is told to end"],
)
def test_a_guard_leaves_nothing_of_its_agent(
    processes: Processes, end: Callable[[Processes], None], number: signal.Signals
) -> None:
    """The agent's processes and folder are removed, and the guard ends by the agent's signal."""
    end(processes)
    processes.leave_nothing(number)


def test_an_agent_ends_if_its_guard_is_killed(processes: Processes) -> None:
    """An agent whose guard is killed ends too."""
    processes.guard.kill()
    processes.agent.wait(SOON)


def test_a_detached_agent_outlives_its_notebook(processes: Processes) -> None:
    """An agent that has announced that it stays outlives its notebook; a guard still cleans up."""
    guard = processes.guard
    guard.stdin.write(b"stay\n")
    guard.stdin.flush()
    assert [guard.stdout.readline() for _ in range(2)] == [b"\n", b"stays\n"]
    processes.agent.suspend()
    guard.stdin.close()
    processes.end_notebook()
    with pytest.raises(subprocess.TimeoutExpired):
        guard.wait(1.0)
    processes.agent.kill()
    processes.leave_nothing(signal.SIGKILL)


BEGIN = """
import os, resource, sys
from pathlib import Path
above = os.getpid()
if free := int(sys.argv[2]):
    import ctypes  # from libffi 3.5 on it keeps a file open
    first = os.open(os.devnull, os.O_RDONLY)
    os.close(first)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + free, first + free))
else:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from nbdist.agent.fork_server import start_guarded
heavy = {"asyncio", "zmq", "psutil", "torch"} & sys.modules.keys()
guard, fork_server = start_guarded(Path(sys.argv[1]), None, fork_server=False)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print(heavy, guard.pid == above == os.getppid(), soft == hard, fork_server)
"""


NO_ROOM = "nbdist: no further process can be started: Too many open files\n"


@pytest.mark.own_agent
@pytest.mark.parametrize(
    ("free", "ended"), [(0, (0, "set() True True None\n", "")), (1, (1, "", NO_ROOM))]
)
def test_agents_start_below_a_guard(runtime: Path, free: int, ended: tuple[int, str, str]) -> None:
    """An agent may open as many files as the hard limit allows, and imports nothing slow.

    If the limit allows too few files, the agent ends with a line that says so.
    """
    command = [sys.executable, "-P", "-c", BEGIN, str(runtime), str(free)]
    nothing = subprocess.DEVNULL
    found = subprocess.run(command, stdin=nothing, capture_output=True, text=True, timeout=SOON)
    assert (found.returncode, found.stdout, found.stderr) == ended


NOWHERE = Ticket(("127.0.0.1",), 1, KeyPair.new().public, KeyPair.new(), fork=False)


@pytest.mark.own_agent
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"hello\n", "nbdist: that is no ticket of a world"),
        (b"", "nbdist: stdin has ended before there was a ticket on it"),
        (NOWHERE.to_line(), "at 127.0.0.1:1: Connection refused"),
    ],
)
def test_an_agent_that_cannot_start_says_why(
    line: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that cannot join a head exits with code 1 and a line, and leaves no folder."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    command = [sys.executable, "-P", "-m", "nbdist.agent", "--ticket", "--node", "0"]
    ended = subprocess.run(command, input=line, capture_output=True, timeout=SOON)
    assert ended.returncode == 1
    (words,) = ended.stderr.decode().splitlines()
    assert said in words
    assert not [*tmp_path.iterdir()]
