"""Tests of `nbdist.agent.agent`: real agents, and whatever ends them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from nbdist import __version__
from nbdist.output.events import Died, Done, Failure, Text
from nbdist.wire.messages import (
    Answer,
    Ask,
    Down,
    GetStatus,
    Hello,
    Interrupt,
    Leave,
    Outputs,
    Received,
    Request,
    Run,
    StartFailure,
    StartWorld,
    StopWorld,
    Up,
    WorldStarted,
    to_bytes,
    up_from,
)
from nbdist.wire.spec import WorldSpec
from nbdist.wire.work import Source, Task
from tests.waiting import SOON, wait_until

both_sources = pytest.mark.parametrize("fork", [True, False], ids=["fork", "spawn"])

pytestmark = pytest.mark.own_agent


WITH_GRACE = """
import runpy
from nbdist.agent import startup

startup.AGENT_GRACE = {}
runpy.run_module("nbdist.agent", run_name="__main__")
"""


class Notebook:
    """The notebook's end of a link, with an agent at the other; `life` is its process."""

    def __init__(self, *, fork: bool, grace: float | None = None) -> None:
        """`grace` is how long a guard waits for an agent that is to leave."""
        self.runtime = Path(tempfile.mkdtemp(prefix="nbdist-", dir=os.environ["XDG_RUNTIME_DIR"]))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(f"ipc://{self.runtime}/notebook.sock")
        self.life = subprocess.Popen(["sleep", "1000"])
        program = ["-m", "nbdist.agent"] if grace is None else ["-c", WITH_GRACE.format(grace)]
        command = [sys.executable, *program, str(self.runtime), str(self.life.pid)]
        self.agent = subprocess.Popen(
            command if fork else [*command, "--no-fork"],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._identity, first = self.receive()
        (agent,) = psutil.Process(self.agent.pid).children()  # the other one is its guard
        assert first == Hello(__version__, agent.pid, os.uname().nodename)
        self.outputs: list[tuple[int, str, Any]] = []
        self._calls = 0

    def send(self, message: Down) -> None:
        self._socket.send_multipart([self._identity, to_bytes(message)])

    @property
    def workers(self) -> list[psutil.Process]:
        """All that the agent has started."""
        (agent,) = psutil.Process(self.agent.pid).children()
        return agent.children(recursive=True)

    def bind(self, name: str) -> None:
        """Wait for an agent at another socket too."""
        self._socket.bind(f"ipc://{self.runtime}/{name}")

    def receive_anew(self) -> Up:
        """The hello of an agent that has connected anew, after what nobody has read before."""
        while not isinstance((said := self.receive())[1], Hello):
            pass
        self._identity, message = said
        return message

    def receive(self) -> tuple[bytes, Up]:
        assert self._socket.poll(SOON * 1000), "the agent says nothing"
        identity, frame = self._socket.recv_multipart()
        return identity, up_from(frame)

    def receive_next(self) -> Up:
        """The next message of the connection that is there now; others may have something left."""
        while (said := self.receive())[0] != self._identity:
            pass
        return said[1]

    def take_one(self) -> Answer | None:
        """The next message; outputs are kept and acknowledged."""
        _, message = self.receive()
        match message:
            case Outputs(items):
                self.outputs.extend(items)
                self.send(Received())
            case Answer():
                return message
        return None

    def call(self, request: Request) -> Any:
        """The reply to a call."""
        self._calls += 1
        self.send(Ask(self._calls, request))
        while (answer := self.take_one()) is None or answer.id != self._calls:
            pass
        return answer.reply

    def start(self, spec: WorldSpec | None = None) -> Any:
        return self.call(StartWorld(spec or self.spec()))

    def spec(self, backend: str | None = None, *, fork: bool = True, **changes: Any) -> WorldSpec:
        environ, path = {**os.environ, **changes}, tuple(sys.path)
        return WorldSpec(
            2, backend, environ, os.getcwd(), path, 1, sys.executable, use_fork_server=fork
        )

    def send_task(self, name: str, source: str) -> None:
        """Have both ranks run the source."""
        self.send(Run(name, (0, 1), Task(name, (0, 1), Source(source)).pack()))

    def run(self, source: str) -> list[tuple[int, Any]]:
        """Run a cell on both ranks, until both are done."""
        self.send_task(source, source)
        ends = (Done, Died)
        while sum(name == source and isinstance(o, ends) for _, name, o in self.outputs) < 2:
            self.take_one()
        return [(rank, output) for rank, name, output in self.outputs if name == source]

    def close(self) -> None:
        for process in (self.agent, self.life):
            process.kill()
            process.wait()
        assert self.agent.stdin is not None
        self.agent.stdin.close()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self.runtime, ignore_errors=True)


@pytest.fixture
def make() -> Iterator[Callable[..., Notebook]]:
    made: list[Notebook] = []

    def one(*, fork: bool = True) -> Notebook:
        made.append(Notebook(fork=fork))
        return made[-1]

    yield one
    for notebook in made:
        notebook.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Notebook]:
    notebook = Notebook(fork=True)
    yield notebook
    notebook.close()


@pytest.fixture
def notebook(shared: Notebook) -> Iterator[Notebook]:
    """One whose agent all tests have that do not end it, without workers."""
    shared.outputs.clear()
    yield shared
    shared.call(StopWorld(0.0))


def close_stdin(notebook: Notebook) -> None:
    assert notebook.agent.stdin is not None
    notebook.agent.stdin.close()


def end_notebook(notebook: Notebook) -> None:
    notebook.life.kill()
    notebook.life.wait()


def terminate(notebook: Notebook) -> None:
    notebook.agent.terminate()


def leave(notebook: Notebook) -> None:
    notebook.send(Leave())


ENDS = [close_stdin, end_notebook, terminate, leave]
BUSY = "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\nprint(1)\nwhile 1: 0"


@pytest.mark.parametrize(
    ("end", "fork", "is_busy"),
    [
        (close_stdin, True, True),
        (end_notebook, False, False),
        (terminate, True, False),
        (leave, False, True),
    ],
)
def test_end(
    make: Callable[..., Notebook],
    end: Callable[[Notebook], None],
    fork: bool,  # noqa: FBT001
    is_busy: bool,  # noqa: FBT001
) -> None:
    """Whatever ends the agent: its workers, what they started, and its folder go with it.

    Also where they run a cell that ignores signals.
    """
    notebook = make(fork=fork)
    assert isinstance(notebook.start(), WorldStarted)
    notebook.run(
        "import subprocess, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "children = [subprocess.Popen(['sleep', '1000'], start_new_session=s) for s in (0, 1)]"
    )
    agent = psutil.Process(notebook.agent.pid)

    def all_sleep() -> bool:  # a process has no command line yet in the moment of its exec
        return sum("sleep" in each.cmdline() for each in agent.children(recursive=True)) == 4

    wait_until(all_sleep, "all that they started is there")
    if is_busy:
        notebook.send_task("busy", BUSY)
        while len({rank for rank, name, _ in notebook.outputs if name == "busy"}) < 2:
            notebook.take_one()
    processes = agent.children(recursive=True)
    end(notebook)
    assert notebook.agent.wait(SOON) == 0
    _gone, alive = psutil.wait_procs(processes, timeout=SOON)
    assert alive == []
    assert not notebook.runtime.exists()


@pytest.mark.parametrize("end", ENDS)
def test_end_while_starting(make: Callable[..., Notebook], end: Callable[[Notebook], None]) -> None:
    """An agent that is told to end while its fork server still imports ends at once."""
    notebook = make()
    notebook.send(Ask(1, StartWorld(notebook.spec("gloo"))))
    end(notebook)
    assert notebook.agent.wait(SOON) == 0
    assert not notebook.runtime.exists()


def test_stop_button_does_not_reach_the_agent(notebook: Notebook) -> None:
    """SIGINT to the agent changes nothing."""
    notebook.start()
    notebook.agent.send_signal(signal.SIGINT)
    assert [row.state for row in notebook.call(GetStatus())] == ["idle", "idle"]


@both_sources
def test_cell_and_interrupt(notebook: Notebook, fork: bool) -> None:  # noqa: FBT001
    """Cells run on all ranks; an interrupt is answered while a cell runs, and ends it."""
    notebook.start(notebook.spec(fork=fork))
    said = notebook.run("print('rank', rank)")
    for rank in (0, 1):
        # A line may come in pieces.
        pieces = [o.text for on, o in said if on == rank and isinstance(o, Text)]
        assert "".join(pieces) == f"rank {rank}\n"
    source = "print('runs')\nimport time\ntime.sleep(600)"
    notebook.send_task("slow", source)
    while len([o for _, name, o in notebook.outputs if name == "slow"]) < 2:
        notebook.take_one()
    assert [row.state for row in notebook.call(GetStatus())] == ["busy", "busy"]
    notebook.send(Interrupt((0, 1)))
    while sum(name == "slow" and isinstance(o, Done) for _, name, o in notebook.outputs) < 2:
        notebook.take_one()
    names = {o.name for _, name, o in notebook.outputs if name == "slow" and type(o) is Failure}
    assert names == {"KeyboardInterrupt"}


def test_stop_and_start_again(notebook: Notebook) -> None:
    """The agent outlives its workers, and starts new ones, with a folder kept tidy."""
    first = notebook.start(notebook.spec("gloo"))
    notebook.call(StopWorld(1.0))
    assert notebook.call(GetStatus()) == ()
    assert not any(map(psutil.pid_exists, first.pids.values()))
    second = notebook.start(notebook.spec("gloo"))
    assert set(first.pids.values()).isdisjoint(second.pids.values())
    assert [o for _, o in notebook.run("dist.barrier()") if isinstance(o, Failure)] == []


@both_sources
def test_start_that_fails(notebook: Notebook, fork: bool) -> None:  # noqa: FBT001
    """A failed start says which rank and why, leaves no worker, and the next one can work."""
    failure = notebook.start(notebook.spec("gloo", fork=fork, GLOO_SOCKET_IFNAME="nowhere0"))
    assert isinstance(failure, StartFailure)
    assert failure.reason == "it exited with code 1"
    assert "nowhere0" in failure.last_lines[-1]
    assert notebook.call(GetStatus()) == ()
    assert isinstance(notebook.start(notebook.spec("gloo")), WorldStarted)


def test_last_words_come_before_the_death(notebook: Notebook) -> None:
    """All that a rank wrote before it died comes before the news of its death."""
    notebook.start()
    said = notebook.run("import os\nprint('x' * 1_000_000)\nos.write(2, b'bye')\nos._exit(7)")
    for rank in (0, 1):
        mine = [output for who, output in said if who == rank]
        assert sum(len(o.text) for o in mine if isinstance(o, Text)) == 1_000_001 + 3
        assert isinstance(mine[-1], Died)
        assert mine[-1].exit_code == 7


def test_cell_for_a_rank_that_has_died(notebook: Notebook) -> None:
    """A cell that was sent before the notebook had heard of a death ends there all the same."""
    started = notebook.start()
    os.kill(started.pids[1], signal.SIGKILL)
    while not any(isinstance(output, Died) for _, _, output in notebook.outputs):
        notebook.take_one()
    said = notebook.run("print(rank)")
    assert [type(output) for rank, output in said if rank == 1] == [Died]
    assert any(isinstance(output, Done) for rank, output in said if rank == 0)


def test_folder_of_sockets_is_private(notebook: Notebook) -> None:
    """Nobody else can open the folder, and nothing listens on TCP before there is a group."""
    notebook.start()
    assert notebook.runtime.stat().st_mode & 0o777 == 0o700
    agent = psutil.Process(notebook.agent.pid)
    for process in (agent, *agent.children(recursive=True)):
        assert process.net_connections("inet") == []


def test_notebook_that_is_gone_already() -> None:
    """An agent whose notebook ended before it began ends by itself."""
    life = subprocess.Popen(["true"])
    life.wait()
    runtime = Path(tempfile.mkdtemp(prefix="nbdist-", dir=os.environ["XDG_RUNTIME_DIR"]))
    command = [sys.executable, "-m", "nbdist.agent", str(runtime), str(life.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as agent:
        assert agent.wait(SOON) == 0
    wait_until(lambda: not runtime.exists(), "the folder is gone")
