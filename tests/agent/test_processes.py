"""Tests of `nbdist.agent.processes`: real workers, forked and spawned, and their ends.

And a fork server: what it answers, and when it is idle, busy, broken, killed.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbdist.agent import fork_server
from nbdist.system.limits import Lack
from nbdist.system.processes import adopt_orphans
from nbdist.wire.frames import FrameCutter, framed, pack
from nbdist.wire.spec import WorkerStart
from tests.agent.sources import Program, Source, worker_start
from tests.waiting import SOON, until, wait_until, wait_until_at_rest

pytestmark = pytest.mark.own_agent


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of these names cannot be imported: they raise this."""
    for name, error in {"mpmath": "RuntimeError", "sympy": "ImportError"}.items():
        (tmp_path / f"{name}.py").write_text(f"raise {error}('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.fixture
def adopting() -> Iterator[None]:
    """As in an agent, workers become children of this process."""
    adopt_orphans()
    yield
    adopt_orphans(adopts=False)


Runs = Callable[[str], WorkerStart]


@pytest.fixture
def runs(runtime: Path, tmp_path: Path, program: Program) -> Runs:
    """Makes a start of a worker that runs these lines of a shell, in a folder of its own."""

    def make(text: str) -> WorkerStart:
        start = worker_start(runtime)
        environ = {**start.world.environ, "PYTHONPATH": f"/lib:{tmp_path}"}
        spec = replace(start.world, python=str(program(text)), cwd=str(tmp_path), environ=environ)
        return replace(start, world=spec)

    return make


async def test_workers_and_their_ends(tmp_path: Path, source: Source, runs: Runs) -> None:
    """Each leads its own session; how it ended is nothing to the others, which a close ends."""
    killed, last = [await source.source.start(runs("exec sleep 600"), 1, 2) for _ in range(2)]
    assert os.getsid(killed.pid) == os.getpgid(killed.pid) == killed.pid
    os.kill(killed.pid, signal.SIGSEGV)
    assert await asyncio.wait_for(killed.exited, SOON) == -signal.SIGSEGV
    killed.send_signal(signal.SIGTERM)  # to nobody: no error
    assert psutil.pid_exists(last.pid)
    assert not last.exited.done()
    # What it started ends with it, also where it ends in order; no modules are of its folder.
    said = tmp_path / "said"
    process = await source.source.start(runs(f"sleep 600 &\necho $! $PYTHONPATH > {said}"), 1, 2)
    assert await asyncio.wait_for(process.exited, SOON) == 0
    child, path = said.read_text().split()
    assert path == "/lib"
    await until(lambda: not psutil.pid_exists(int(child)))
    await source.close()
    await until(lambda: not psutil.pid_exists(last.pid))


@pytest.mark.parametrize("source", ["fork"], indirect=True)
async def test_a_fork_server_and_the_next_one(
    idle_imports: None, broken: None, monkeypatch: pytest.MonkeyPatch, source: Source
) -> None:
    """It has one thread: a fork of it inherits no lock that nobody will release.

    Also when it has imported all that it imports while it is idle, and could not import some of
    it, which its log says; who asks before gets a worker, however much there is left to import.
    A silent one is killed after a while, and another takes its place; its workers live on, which
    are not its children.
    """
    first, second = await source.worker(0), await source.worker(1)
    server = psutil.Process(source.server_pid)
    assert server.num_threads() == 1
    await asyncio.to_thread(wait_until_at_rest, server)
    assert server.num_threads() == 1
    third = await source.worker(2)
    assert {psutil.Process(each.pid).ppid() for each in (first, second, third)} == {os.getpid()}
    assert "RuntimeError: broken on purpose" in source.forker.last_lines()
    server.suspend()
    with monkeypatch.context() as patched:
        patched.setattr("nbdist.agent.processes.FORK_TIMEOUT", 0.2)
        asked = asyncio.ensure_future(source.worker(3))
        await until(lambda: not server.is_running(), "it is killed")
    last = await asked
    assert source.server_pid != server.pid
    for process in (second, last):
        os.kill(process.pid, signal.SIGSEGV)
        assert await asyncio.wait_for(process.exited, SOON) == -signal.SIGSEGV
    assert not first.exited.done()


@pytest.mark.parametrize("source", ["fork"], indirect=True)
async def test_a_fork_server_whose_end_is_read_before_it_is_reaped(source: Source) -> None:
    """Who asks between the two gets a worker of the next one, as who asks before or after."""
    await source.source.prepare()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
    os.kill(source.server_pid, signal.SIGKILL)
    await until(lambda: source.forker._server.socket.fileno() < 0)
    asked = asyncio.ensure_future(source.worker())
    await asyncio.sleep(0.1)
    source.children.attach()
    signal.raise_signal(signal.SIGCHLD)
    assert not (await asked).exited.done()


@pytest.mark.parametrize("source", ["fork"], indirect=True)
async def test_a_log_that_cannot_be_written(source: Source) -> None:
    """The line names the file, and nothing is left open."""
    await source.source.prepare()
    os.kill(source.server_pid, signal.SIGKILL)
    await until(lambda: source.forker._server is None)
    log = source.runtime / fork_server.LOG
    log.unlink()
    log.mkdir()
    with pytest.raises(Lack, match=f"^{log}: Is a directory$"):
        await source.source.prepare()
    log.rmdir()


def test_requests_and_the_end_of_a_fork_server(runtime: Path, adopting: None) -> None:
    """Each worker has its own descriptors; once the agent has gone nothing is left."""
    folder = runtime / "world"
    folder.mkdir()
    server = fork_server.start_fork_server(folder)
    server.socket.settimeout(SOON)
    process, cutter = psutil.Process(server.popen.pid), FrameCutter()

    def answers() -> Iterator[Any]:
        while data := server.socket.recv(1 << 16):
            yield from map(pickle.loads, cutter.feed(data))

    def ask(number: int) -> int:
        read, write = os.pipe()
        frame = framed(pack(fork_server.Fork(number, worker_start(folder, number))))
        sent = socket.send_fds(server.socket, [frame], [write, write])
        server.socket.sendall(frame[sent:])
        os.close(write)
        return read

    try:
        said = answers()
        assert os.getsid(process.pid) == process.pid
        assert next(said) == fork_server.Imported()
        process.suspend()  # so that all of them are there when it reads
        outputs = [ask(number) for number in range(3)]
        process.resume()
        for number, forked in enumerate([next(said) for _ in outputs]):
            assert forked.number == number
            worker = psutil.Process(forked.pid)
            leads = (os.getpid(), worker.pid)
            wait_until(lambda of=worker, by=leads: (of.ppid(), os.getsid(of.pid)) == by)
            worker.kill()
            worker.wait(SOON)
            while os.read(outputs[number], 1 << 16):
                pass  # its end is here: no other worker has that pipe
            os.close(outputs[number])
        server.socket.close()
        process.wait(SOON)
        assert not folder.exists()
    finally:
        server.popen.kill()
        server.popen.wait()
        server.socket.close()
