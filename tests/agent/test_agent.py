"""Tests of `nbdist.agent.agent` and `notebook_link`: real agents, and whatever ends them.

An agent whose notebook goes, and the next one that comes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from nbdist import __version__
from nbdist.agent.notebook_link import Serving
from nbdist.config import WorldConfig
from nbdist.output.events import Died, Done, Text
from nbdist.wire import messages
from nbdist.wire.frames import pack, unpack
from nbdist.wire.messages import Answer, Ask, GetStatus, Kill
from nbdist.wire.spec import WorldSpec
from nbdist.wire.views import Accepted, Attach, Describe, Refused, Said, WorldInfo
from nbdist.wire.work import Source, Task
from nbdist.world.agents import Asking
from tests.waiting import SOON, wait_until

WITH_GRACE = """
import runpy
from nbdist.system import processes

processes.AGENT_GRACE = {}
runpy.run_module("nbdist.agent", run_name="__main__")
"""


class Notebook:
    """The notebook's end of a link, with an agent at the other; `life` is its process."""

    def __init__(self, *, fork: bool = True, grace: float | None = None) -> None:
        """`grace` is how long a guard waits for an agent that is to leave."""
        self.runtime = Path(tempfile.mkdtemp(prefix="nbdist-", dir=os.environ["XDG_RUNTIME_DIR"]))
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(f"ipc://{self.runtime}/notebook.sock")
        self.life = subprocess.Popen(["sleep", "1000"])
        program = ["-m", "nbdist.agent"] if grace is None else ["-c", WITH_GRACE.format(grace)]
        command = [sys.executable, *program, str(self.runtime), str(self.life.pid)]
        self.agent = subprocess.Popen(
            command if fork else [*command, "--no-fork"],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self.identity, first = self.receive()
        (agent,) = psutil.Process(self.agent.pid).children()  # the other one is its guard
        assert first == messages.Hello(__version__, agent.pid, os.uname().nodename)
        self.outputs: list[tuple[int, str, Any]] = []
        self._calls = 0

    def send(self, message: messages.Down) -> None:
        self.socket.send_multipart([self.identity, pack(message)])

    def receive(self) -> tuple[bytes, messages.Up]:
        assert self.socket.poll(SOON * 1000), "the agent says nothing"
        identity, frame = self.socket.recv_multipart()
        return identity, unpack(frame)

    def take_one(self) -> Answer | None:
        """The next message; outputs are kept and acknowledged."""
        _, message = self.receive()
        match message:
            case messages.Outputs(items):
                self.outputs.extend(items)
                self.send(messages.Received())
            case Answer():
                return message
        return None

    def call(self, request: messages.Request) -> Any:
        """The reply to a call."""
        self._calls += 1
        self.send(Ask(self._calls, request))
        while (answer := self.take_one()) is None or answer.id != self._calls:
            pass
        return answer.reply

    def spec(self, backend: str | None = None) -> WorldSpec:
        environ, path = {**os.environ}, tuple(sys.path)
        return WorldSpec(2, backend, environ, os.getcwd(), path, 1, sys.executable)

    def start(self) -> None:
        assert isinstance(self.call(messages.StartWorld(self.spec())), messages.WorldStarted)

    def begin(self, name: str, source: str) -> None:
        """Have both ranks run the source, until both have shown something."""
        self.send(messages.Run(name, (0, 1), pack(Task(name, (0, 1), Source(source)))))
        while len({rank for rank, task, _ in self.outputs if task == name}) < 2:
            self.take_one()

    def run(self, source: str) -> None:
        """Run a cell on both ranks, until both are done."""
        self.begin(source, source)
        ends = (Done, Died)
        while sum(name == source and isinstance(o, ends) for _, name, o in self.outputs) < 2:
            self.take_one()

    def end_notebook(self) -> None:
        self.life.kill()
        self.life.wait()

    def close_stdin(self) -> None:
        self.agent.stdin.close()

    def close(self) -> None:
        for process in (self.agent, self.life):
            process.kill()
            process.wait()
        self.close_stdin()
        self.socket.close()
        self._context.term()
        shutil.rmtree(self.runtime, ignore_errors=True)


@pytest.fixture
def notebook(request: pytest.FixtureRequest) -> Iterator[Notebook]:
    """One whose agent is started with these options."""
    with closing(Notebook(**request.param)) as notebook:
        yield notebook


def leave(notebook: Notebook) -> None:
    notebook.send(messages.Leave())


BUSY = "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\nprint(1)\nwhile 1: 0"


@pytest.mark.own_agent
@pytest.mark.parametrize(
    ("notebook", "end", "source"),
    [({"fork": False}, Notebook.end_notebook, ""), ({}, leave, BUSY)],
    indirect=["notebook"],
    ids=["idle", "busy"],
)
def test_end(notebook: Notebook, end: Callable[[Notebook], None], source: str) -> None:
    """Whatever ends it: its workers, busy or not, what they started, and its folder go with it."""
    notebook.start()
    notebook.agent.send_signal(signal.SIGINT)
    notebook.run(
        "import subprocess, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "children = [subprocess.Popen(['sleep', '1000'], start_new_session=s) for s in (0, 1)]"
    )
    agent = psutil.Process(notebook.agent.pid)

    def all_sleep() -> bool:  # a process has no command line yet in the moment of its exec
        return sum("sleep" in each.cmdline() for each in agent.children(recursive=True)) == 4

    wait_until(all_sleep, "all that they started is there")
    if source:
        notebook.begin("busy", source)
    processes = agent.children(recursive=True)
    for process in (agent, *processes):
        assert process.net_connections("inet") == []
    assert notebook.runtime.stat().st_mode & 0o777 == 0o700
    end(notebook)
    assert notebook.agent.wait(SOON) == 0
    _gone, alive = psutil.wait_procs(processes, timeout=SOON)
    assert alive == []
    assert not notebook.runtime.exists()


@pytest.mark.own_agent
@pytest.mark.parametrize("notebook", [{}], indirect=True)
def test_end_while_starting(notebook: Notebook) -> None:
    """An agent that is told to end while its fork server still imports ends at once."""
    notebook.send(Ask(1, messages.StartWorld(notebook.spec("gloo"))))
    notebook.agent.terminate()
    assert notebook.agent.wait(SOON) == 0
    assert not notebook.runtime.exists()


@pytest.mark.own_agent
def test_notebook_that_is_gone_already() -> None:
    """An agent whose notebook ended before it began ends by itself."""
    life = subprocess.Popen(["true"])
    life.wait()
    runtime = Path(tempfile.mkdtemp(prefix="nbdist-", dir=os.environ["XDG_RUNTIME_DIR"]))
    command = [sys.executable, "-m", "nbdist.agent", str(runtime), str(life.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as agent:
        assert agent.wait(SOON) == 0
    wait_until(lambda: not runtime.exists(), "the folder is gone")


# --- the next notebook --------------------------------------------------------------------


@pytest.mark.own_agent
@pytest.mark.parametrize("notebook", [{"grace": 0.2}], indirect=True)
def test_the_next_notebook_gets_all(notebook: Notebook) -> None:
    """What a cell has said since it began; others are refused in a sentence, why."""
    following = Attach(__version__, 1, "notebook-1.sock")

    def ask(question: Said) -> Said:
        with closing(Asking(notebook.runtime, question)) as asking:
            return asking.answer(SOON)

    def is_alone() -> bool:
        info = ask(Describe())
        return isinstance(info, WorldInfo) and info.notebook == 0

    notebook.send(messages.Remember(WorldConfig(detach=True)))
    notebook.start()
    wrong = Refused(f"it is of nbdist {__version__}, and this is 0.0")
    assert ask(Attach("0.0", 1, "notebook-1.sock")) == wrong
    assert ask(following) == Refused(f"the notebook of process {notebook.life.pid} uses it")
    notebook.run("stop = False")
    slow = "print('before', rank)\nimport time\nwhile not stop: time.sleep(0.01)\nprint('after')"
    notebook.begin("slow", slow)
    notebook.close_stdin()
    wait_until(is_alone, "the notebook is gone")
    notebook.end_notebook()
    with pytest.raises(subprocess.TimeoutExpired):  # the guard ends no agent that stays
        notebook.agent.wait(0.5)
    # The same socket will do: whoever attaches has bound it.
    notebook.socket.bind(f"ipc://{notebook.runtime}/notebook-1.sock")
    with closing(Asking(notebook.runtime, following)) as asking:
        assert isinstance(asking.answer(SOON), Accepted)
        refused = ask(Attach(__version__, 2, "notebook-1.sock"))
        assert refused == Refused("the notebook of process 1 uses it")
        while not isinstance((hello := notebook.receive())[1], messages.Hello):
            pass  # what nobody has read before
        notebook.identity = hello[0]
        came = (message for of, message in iter(notebook.receive, None) if of == hello[0])
        there, again = next(came), next(came)
        assert isinstance(there, messages.Attached)
        assert there.run is not None
        assert there.run.id == "slow"
        assert there.bound[0].keys() >= {"stop"}
        assert isinstance(again, messages.Outputs)
        for rank in (0, 1):
            said = [o.text for on, _, o in again.items if on == rank and isinstance(o, Text)]
            assert "".join(said) == f"before {rank}\n"
        notebook.send(messages.Received())
        notebook.call(messages.StopWorld(0.0))
    # Nothing is kept that nobody can want: a world without workers.
    assert notebook.agent.wait(SOON) == 0


async def test_calls_wait_for_one_another_and_other_things_do_not() -> None:
    """Each is answered under its number; what is under way when it leaves is cancelled."""
    answers, said, released = list[Answer](), list[str](), asyncio.Event()

    async def answer(request: messages.Request) -> messages.Reply:
        if isinstance(request, Kill):
            await released.wait()
        return ()

    async def beside() -> None:
        said.append("beside")
        assert answers == []
        released.set()
        try:
            await asyncio.Event().wait()
        finally:
            said.append("cancelled")

    def send(answer: Answer) -> None:
        answers.append(answer)
        if len(answers) == 2:
            serving.leave()

    serving = Serving(answer, send)
    serving.call(Ask(1, Kill((0,))))
    serving.call(Ask(2, GetStatus()))
    working = asyncio.create_task(serving.until_left())
    await asyncio.sleep(0)
    serving.do(beside())
    await working
    serving.do(beside())  # it is closed, not begun
    assert answers == [Answer(1, ()), Answer(2, ())]
    assert said == ["beside", "cancelled"]


async def _raise(_: object = None) -> messages.Reply:
    raise KeyError(17)


@pytest.mark.parametrize(
    "fail",
    [
        lambda serving: serving.do(_raise()),
        lambda serving: asyncio.get_running_loop().call_soon({}.__getitem__, 17),
    ],
    ids=["a task", "a callback"],
)
async def test_a_fault_of_ours(fail: Callable[[Serving], object]) -> None:
    """It ends all, and is raised: the process exits with its line as the last of the log."""
    serving = Serving(_raise, lambda _: None)
    asyncio.get_running_loop().set_exception_handler(serving.fail)
    working = asyncio.create_task(serving.until_left())
    await asyncio.sleep(0)
    fail(serving)
    with pytest.raises(KeyError, match="17"):
        await working
