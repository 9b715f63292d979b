"""Tests of `nbdist.agent.processes`: real workers, forked and spawned, and their ends.

Also fork servers that are idle, busy, broken or killed, and their answers.
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
    """Make the imports of `mpmath` and `sympy` raise errors."""
    for name, error in {"mpmath": "RuntimeError", "sympy": "ImportError"}.items():
        (tmp_path / f"{name}.py").write_text(f"raise {error}('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.fixture
def adopting() -> Iterator[None]:
    """Make workers children of this process, as in an agent."""
    adopt_orphans()
    yield
    adopt_orphans(adopts=False)


Runs = Callable[[str], WorkerStart]


@pytest.fixture
def runs(runtime: Path, tmp_path: Path, program: Program) -> Runs:
    """Return a function that makes the start of a worker that runs `text` as a shell script."""

    def make(text: str) -> WorkerStart:
        start = worker_start(runtime)
        environ = {**start.world.environ, "PYTHONPATH": f"/lib:{tmp_path}"}
        spec = replace(start.world, python=str(program(text)), cwd=str(tmp_path), environ=environ)
        return replace(start, world=spec)

    return make


async def test_a_worker_ends_without_the_others(tmp_path: Path, source: Source, runs: Runs) -> None:
    """A worker leads its own session and can die alone; `close` ends the workers that are left."""
    killed, last = [await source.source.start(runs("exec sleep 600"), 1, 2) for _ in range(2)]
    assert os.getsid(killed.pid) == os.getpgid(killed.pid) == killed.pid
    os.kill(killed.pid, signal.SIGSEGV)
    assert await asyncio.wait_for(killed.exited, SOON) == -signal.SIGSEGV
    killed.send_signal(signal.SIGTERM)  # the process has gone: no error
    assert psutil.pid_exists(last.pid)
    assert not last.exited.done()
    # A child ends with its worker, even after a normal exit; PYTHONPATH loses the worker's folder.
    said = tmp_path / "said"
    process = await source.source.start(runs(f"sleep 600 &\necho $! $PYTHONPATH > {said}"), 1, 2)
    assert await asyncio.wait_for(process.exited, SOON) == 0
    child, path = said.read_text().split()
    assert path == "/lib"
    await until(lambda: not psutil.pid_exists(int(child)))
    await source.close()
    await until(lambda: not psutil.pid_exists(last.pid))


@pytest.mark.parametrize("source", ["fork"], indirect=True)
async def test_a_fork_server_has_one_thread_and_is_replaced_if_silent(
    idle_imports: None, broken: None, monkeypatch: pytest.MonkeyPatch, source: Source
) -> None:
    """A fork server has one thread, so that a fork inherits no lock that nobody will release.

    The server still has one thread after its imports while idle, and its log names an import that
    failed.  A silent server is killed after a while and replaced; its workers, which are children
    of the agent, live on.
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
async def test_a_worker_starts_while_a_fork_server_ends(source: Source) -> None:
    """A worker that is asked for between a server's closed socket and its SIGCHLD is started."""
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
async def test_an_unwritable_log_is_named_in_the_error(source: Source) -> None:
    """If the log of a fork server cannot be written, the error names the file."""
    await source.source.prepare()
    os.kill(source.server_pid, signal.SIGKILL)
    await until(lambda: source.forker._server is None)
    log = source.runtime / fork_server.LOG
    log.unlink()
    log.mkdir()
    with pytest.raises(Lack, match=f"^{log}: Is a directory$"):
        await source.source.prepare()
    log.rmdir()


def test_a_fork_server_ends_with_its_agent(runtime: Path, adopting: None) -> None:
    """A fork server ends and removes its folder if the agent closes the socket between them.

    No worker inherits the descriptors of another worker.
    """
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
        process.suspend()  # all requests arrive before the server reads any
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
                pass  # the end of the pipe: no other worker has inherited it
            os.close(outputs[number])
        server.socket.close()
        process.wait(SOON)
        assert not folder.exists()
    finally:
        server.popen.kill()
        server.popen.wait()
        server.socket.close()
