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
from nbdist.output.events import Died, Done
from nbdist.wire import messages
from nbdist.wire.frames import pack, unpack
from nbdist.wire.spec import WorldSpec
from nbdist.wire.work import Source, Task
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.own_agent


WITH_GRACE = """
import runpy
from nbdist.system import processes

processes.AGENT_GRACE = {}
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
        assert first == messages.Hello(__version__, agent.pid, os.uname().nodename)
        self.outputs: list[tuple[int, str, Any]] = []
        self._calls = 0

    def send(self, message: messages.Down) -> None:
        self._socket.send_multipart([self._identity, pack(message)])

    def bind(self, name: str) -> None:
        """Wait for an agent at another socket too."""
        self._socket.bind(f"ipc://{self.runtime}/{name}")

    def receive_anew(self) -> messages.Up:
        """The hello of an agent that has connected anew, after what nobody has read before."""
        while not isinstance((said := self.receive())[1], messages.Hello):
            pass
        self._identity, message = said
        return message

    def receive(self) -> tuple[bytes, messages.Up]:
        assert self._socket.poll(SOON * 1000), "the agent says nothing"
        identity, frame = self._socket.recv_multipart()
        return identity, unpack(frame)

    def receive_next(self) -> messages.Up:
        """The next message of the connection that is there now; others may have something left."""
        while (said := self.receive())[0] != self._identity:
            pass
        return said[1]

    def take_one(self) -> messages.Answer | None:
        """The next message; outputs are kept and acknowledged."""
        _, message = self.receive()
        match message:
            case messages.Outputs(items):
                self.outputs.extend(items)
                self.send(messages.Received())
            case messages.Answer():
                return message
        return None

    def call(self, request: messages.Request) -> Any:
        """The reply to a call."""
        self._calls += 1
        self.send(messages.Ask(self._calls, request))
        while (answer := self.take_one()) is None or answer.id != self._calls:
            pass
        return answer.reply

    def start(self) -> Any:
        return self.call(messages.StartWorld(self.spec(None)))

    def spec(self, backend: str | None) -> WorldSpec:
        environ, path = {**os.environ}, tuple(sys.path)
        return WorldSpec(2, backend, environ, os.getcwd(), path, 1, sys.executable)

    def send_task(self, name: str, source: str) -> None:
        """Have both ranks run the source."""
        self.send(messages.Run(name, (0, 1), pack(Task(name, (0, 1), Source(source)))))

    def run(self, source: str) -> None:
        """Run a cell on both ranks, until both are done."""
        self.send_task(source, source)
        ends = (Done, Died)
        while sum(name == source and isinstance(o, ends) for _, name, o in self.outputs) < 2:
            self.take_one()

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


def close_stdin(notebook: Notebook) -> None:
    assert notebook.agent.stdin is not None
    notebook.agent.stdin.close()


def end_notebook(notebook: Notebook) -> None:
    notebook.life.kill()
    notebook.life.wait()


def leave(notebook: Notebook) -> None:
    notebook.send(messages.Leave())


BUSY = "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\nprint(1)\nwhile 1: 0"


@pytest.mark.parametrize(
    ("end", "fork", "is_busy"), [(end_notebook, False, False), (leave, True, True)]
)
def test_end(
    make: Callable[..., Notebook],
    end: Callable[[Notebook], None],
    fork: bool,  # noqa: FBT001
    is_busy: bool,  # noqa: FBT001
) -> None:
    """Whatever ends the agent: its workers, what they started, and its folder go with it.

    Also where they run a cell that ignores signals.  SIGINT ends no agent.
    """
    notebook = make(fork=fork)
    assert isinstance(notebook.start(), messages.WorldStarted)
    notebook.agent.send_signal(signal.SIGINT)
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
    for process in (agent, *processes):
        assert process.net_connections("inet") == []
    assert notebook.runtime.stat().st_mode & 0o777 == 0o700
    end(notebook)
    assert notebook.agent.wait(SOON) == 0
    _gone, alive = psutil.wait_procs(processes, timeout=SOON)
    assert alive == []
    assert not notebook.runtime.exists()


def test_end_while_starting(make: Callable[..., Notebook]) -> None:
    """An agent that is told to end while its fork server still imports ends at once."""
    notebook = make()
    notebook.send(messages.Ask(1, messages.StartWorld(notebook.spec("gloo"))))
    notebook.agent.terminate()
    assert notebook.agent.wait(SOON) == 0
    assert not notebook.runtime.exists()


def test_notebook_that_is_gone_already() -> None:
    """An agent whose notebook ended before it began ends by itself."""
    life = subprocess.Popen(["true"])
    life.wait()
    runtime = Path(tempfile.mkdtemp(prefix="nbdist-", dir=os.environ["XDG_RUNTIME_DIR"]))
    command = [sys.executable, "-m", "nbdist.agent", str(runtime), str(life.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as agent:
        assert agent.wait(SOON) == 0
    wait_until(lambda: not runtime.exists(), "the folder is gone")
