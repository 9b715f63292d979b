"""Tests of `nbdist.agent.agent` and `notebook_link`: how agents end, and how calls are answered."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import zmq

from nbdist import __version__
from nbdist.agent.notebook_link import NotebookLink, Serving
from nbdist.config import WorldConfig
from nbdist.output.events import Died
from nbdist.system.folders import NOTEBOOK_SOCKET
from nbdist.wire import messages
from nbdist.wire.frames import pack
from nbdist.wire.messages import AgentReply, AgentRequest, GetStatus, Kill
from nbdist.wire.queries import Attach, AttachRefused
from nbdist.world.agent_link import Link
from tests.agent.sources import worker_start
from tests.traces import command_line
from tests.waiting import SOON, until, wait_until

NOTEBOOK = """
import nbdist, os, sys

if __name__ == "__main__":
    world = nbdist.World(2, backend="none", log_dir="", fork=sys.argv[1] == "fork")
    world.start()
    world.execute(sys.argv[2])
    world.submit(world.task(sys.argv[3]))
    print(world.engine.connection.link.agent.pid, flush=True)
    sys.stdin.read()
    world.engine.connection.link.close()
    os._exit(0)
"""

STARTS = """
import os, subprocess, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
children = [subprocess.Popen(['sleep', '1000'], start_new_session=s) for s in (0, 1)]
"""

IDLE = "os.mknod(f'here{rank}')"
BUSY = f"for n in (2, 15): signal.signal(n, signal.SIG_IGN)\n{IDLE}\nwhile 1: 0"

Script = subprocess.Popen


def leave(notebook: Script[str]) -> None:
    notebook.stdin.close()


@pytest.mark.own_agent
@pytest.mark.parametrize(
    ("kind", "source", "end"),
    [("spawn", IDLE, Script.kill), ("fork", BUSY, leave)],
    ids=["idle", "busy"],
)
def test_an_agent_ends_with_all_that_it_started(
    tmp_path: Path, kind: str, source: str, end: Callable[[Script[str]], None]
) -> None:
    """An agent ends if its notebook ends, and so do its workers, their children and its folder."""
    command = [sys.executable, "-c", NOTEBOOK, kind, STARTS, source]
    with Script(command, cwd=tmp_path, stdin=-1, stdout=-1, text=True) as notebook:
        guard = psutil.Process(int(notebook.stdout.readline()))
        folder = Path(guard.cmdline()[-2 if kind == "fork" else -3])
        guard.send_signal(signal.SIGINT)
        wait_until(lambda: len([*tmp_path.iterdir()]) == 2, "both have come so far")

        def all_sleep() -> bool:  # a process in its exec has no command line yet
            started = guard.children(recursive=True)
            return sum("sleep" in command_line(each) for each in started) == 4

        wait_until(all_sleep, "all that they started is there")
        processes = [guard, *guard.children(recursive=True)]
        for process in processes:
            assert process.net_connections("inet") == []
        assert folder.stat().st_mode & 0o777 == 0o700
        end(notebook)
        _gone, alive = psutil.wait_procs(processes, timeout=SOON)
        assert alive == []
        assert not folder.exists()


@pytest.mark.own_agent
def test_an_agent_ends_while_its_fork_server_imports() -> None:
    """An agent that gets SIGTERM while its fork server still imports ends at once."""
    link = Link()
    link.open()
    try:
        assert link.call(GetStatus()) == ()
        link.ask(messages.StartWorld(worker_start(Path()).world))
        os.kill(link.agent.pid, signal.SIGTERM)
        wait_until(lambda: link.agent.exit_code() == 0, "it has ended")
    finally:
        link.close()


@pytest.mark.own_agent
def test_an_agent_without_workers_ends_with_its_notebook() -> None:
    """An agent without workers ends with its notebook, even if the configuration has `detach`."""
    link = Link(fork_server=False)
    link.open()
    link.send(messages.HandoverState(WorldConfig(detach=True)))
    assert link.call(GetStatus()) == ()
    guard = psutil.Process(link.agent.pid)
    link.detach()
    guard.wait(SOON)


@pytest.mark.own_agent
def test_an_agent_whose_notebook_has_exited_ends(runtime: Path) -> None:
    """An agent ends by itself if its notebook had exited before the agent began."""
    life = Script(["true"])
    life.wait()
    (runtime / "agent").mkdir(mode=0o700)
    command = [sys.executable, "-m", "nbdist.agent", str(runtime / "agent"), str(life.pid)]
    with Script(command, stdin=-1) as agent:
        assert agent.wait(SOON) == 0
    assert not [*runtime.iterdir()]


async def test_a_notebook_of_another_version_is_refused(runtime: Path) -> None:
    """A notebook with another version of nbdist is refused in a sentence with both versions."""
    link = NotebookLink(runtime, os.getpid(), SimpleNamespace(pid=1), print, print)
    refused = await link.attach(Attach("0.0", 1, "notebook-1.sock"))
    assert refused == AttachRefused(f"it is of nbdist {__version__}, and this is 0.0")
    await link.close()


async def test_a_death_that_the_link_observes_releases_the_survivors(runtime: Path) -> None:
    """If an agent's link to the notebook observes a rank's death, the agent aborts collectives."""
    carried_out = list[messages.Down]()
    link = NotebookLink(runtime, os.getpid(), SimpleNamespace(pid=1), carried_out.append, print)
    notebook: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    with notebook:
        notebook.bind(f"ipc://{runtime}/{NOTEBOOK_SOCKET}")
        run = messages.RunTask("id", (0, 1, 2), b"", rules=messages.Rules(3, "gloo"))
        notebook.send(pack(run))
        await until(lambda: carried_out == [run])
        link.observe(2, "id", Died(-9, 1))
        await until(lambda: messages.AbortRanks((0, 1, 2)) in carried_out)
        await link.close()


async def test_calls_are_answered_in_turn_beside_other_work() -> None:
    """Calls are answered in turn, by number; other work is cancelled when serving ends."""
    answers, said, released = list[AgentReply](), list[str](), asyncio.Event()

    async def answer(request: messages.RequestBody) -> messages.Reply:
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

    def send(answer: AgentReply) -> None:
        answers.append(answer)
        if len(answers) == 2:
            serving.stop()

    serving = Serving(answer, send)
    serving.enqueue(AgentRequest(1, Kill((0,))))
    serving.enqueue(AgentRequest(2, GetStatus()))
    working = asyncio.create_task(serving.run_until_stopped())
    await asyncio.sleep(0)
    serving.spawn(beside())
    await working
    serving.spawn(beside())  # closed, without having begun
    assert answers == [AgentReply(1, ()), AgentReply(2, ())]
    assert said == ["beside", "cancelled"]


async def _raise(_: object = None) -> messages.Reply:
    raise KeyError(17)


@pytest.mark.parametrize(
    "fail",
    [
        lambda serving: serving.spawn(_raise()),
        lambda serving: asyncio.get_running_loop().call_soon({}.__getitem__, 17),
    ],
    ids=["a task", "a callback"],
)
async def test_an_error_of_the_agent_ends_it(fail: Callable[[Serving], object]) -> None:
    """An error in the agent's own code ends `run_until_stopped`, which raises that error."""
    serving = Serving(_raise, lambda _: None)
    asyncio.get_running_loop().set_exception_handler(serving.on_loop_error)
    working = asyncio.create_task(serving.run_until_stopped())
    await asyncio.sleep(0)
    fail(serving)
    with pytest.raises(KeyError, match="17"):
        await working
