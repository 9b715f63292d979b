"""Tests of `nbdist.agent.agent` and `notebook_link`: real agents, and whatever ends them."""

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

from nbdist import __version__
from nbdist.agent.notebook_link import NotebookLink, Serving
from nbdist.config import WorldConfig
from nbdist.wire import messages
from nbdist.wire.messages import AgentReply, AgentRequest, GetStatus, Kill
from nbdist.wire.queries import Attach, AttachRefused
from nbdist.world.agent_link import Link
from tests.agent.sources import worker_start
from tests.waiting import SOON, wait_until

NOTEBOOK = """
import nbdist, os, sys

if __name__ == "__main__":
    world = nbdist.World(2, backend="none", log_dir="", fork=sys.argv[1] == "fork")
    world.start()
    world.execute(sys.argv[2])
    world.submit(world.task(sys.argv[3]))
    print(world.session.link.agent.pid, flush=True)
    sys.stdin.read()
    world.session.link.close()
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
def test_end(tmp_path: Path, kind: str, source: str, end: Callable[[Script[str]], None]) -> None:
    """Whatever ends it: its workers, busy or not, what they started, and its folder go with it."""
    command = [sys.executable, "-c", NOTEBOOK, kind, STARTS, source]
    with Script(command, cwd=tmp_path, stdin=-1, stdout=-1, text=True) as notebook:
        guard = psutil.Process(int(notebook.stdout.readline()))
        folder = Path(guard.cmdline()[-2 if kind == "fork" else -3])
        guard.send_signal(signal.SIGINT)
        wait_until(lambda: len([*tmp_path.iterdir()]) == 2, "both have come so far")

        def all_sleep() -> bool:  # a process has no command line yet in the moment of its exec
            return sum("sleep" in each.cmdline() for each in guard.children(recursive=True)) == 4

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
def test_end_while_starting() -> None:
    """An agent that is told to end while its fork server still imports ends at once."""
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
def test_a_world_without_workers() -> None:
    """Nobody can want it: its agent does not outlive the notebook, whatever that has said."""
    link = Link(fork_server=False)
    link.open()
    link.send(messages.HandoverState(WorldConfig(detach=True)))
    assert link.call(GetStatus()) == ()
    guard = psutil.Process(link.agent.pid)
    link.detach()
    guard.wait(SOON)


@pytest.mark.own_agent
def test_notebook_that_is_gone_already(runtime: Path) -> None:
    """An agent whose notebook ended before it began ends by itself."""
    life = Script(["true"])
    life.wait()
    (runtime / "agent").mkdir(mode=0o700)
    command = [sys.executable, "-m", "nbdist.agent", str(runtime / "agent"), str(life.pid)]
    with Script(command, stdin=-1) as agent:
        assert agent.wait(SOON) == 0
    assert not [*runtime.iterdir()]


async def test_another_version(runtime: Path) -> None:
    """A notebook of another nbdist is refused, in a sentence."""
    link = NotebookLink(runtime, os.getpid(), SimpleNamespace(pid=1), print, print)
    refused = await link.attach(Attach("0.0", 1, "notebook-1.sock"))
    assert refused == AttachRefused(f"it is of nbdist {__version__}, and this is 0.0")
    await link.close()


async def test_calls_wait_for_one_another_and_other_things_do_not() -> None:
    """Each is answered under its number; what is under way when it leaves is cancelled."""
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
    serving.spawn(beside())  # it is closed, not begun
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
async def test_a_fault_of_ours(fail: Callable[[Serving], object]) -> None:
    """It ends all, and is raised: the process exits with its line as the last of the log."""
    serving = Serving(_raise, lambda _: None)
    asyncio.get_running_loop().set_exception_handler(serving.on_loop_error)
    working = asyncio.create_task(serving.run_until_stopped())
    await asyncio.sleep(0)
    fail(serving)
    with pytest.raises(KeyError, match="17"):
        await working
