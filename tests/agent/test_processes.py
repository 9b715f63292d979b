"""Tests of `nbdist.agent.processes`: real workers, forked and spawned, and their ends.

And a fork server that is idle, busy, broken, killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nbdist.agent.processes import WorkerProcess
from tests.agent.sources import Source, worker_start
from tests.faults.soak import wait_until_at_rest
from tests.waiting import SOON, until

pytestmark = pytest.mark.own_agent

forked = pytest.mark.parametrize("source", ["fork"], indirect=True)


@pytest.fixture
def broken(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of these names cannot be imported: they raise this."""
    for name, error in request.param.items():
        (tmp_path / f"{name}.py").write_text(f"raise {error}('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("source", "numbers"),
    [("fork", [signal.SIGKILL, signal.SIGSEGV]), ("spawn", [signal.SIGSEGV])],
    indirect=["source"],
)
async def test_workers_and_their_ends(source: Source, numbers: list[signal.Signals]) -> None:
    """Each leads its own session, where the notebook's Stop does not reach it.

    The exit code of one that was killed is the negative signal, which is nothing to the
    others; closing the source leaves none.
    """
    last = await source.worker(len(numbers))
    for rank, number in enumerate(numbers):
        process = await source.worker(rank)
        assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
        os.kill(process.pid, number)
        assert await asyncio.wait_for(process.exited, SOON) == -number
        process.send_signal(signal.SIGTERM)  # to nobody: no error
    assert psutil.pid_exists(last.pid)
    assert not last.exited.done()
    source.close()
    await until(lambda: not psutil.pid_exists(last.pid))


async def test_what_it_started_ends_with_it(runtime: Path, tmp_path: Path, source: Source) -> None:
    """Also where it ends by itself, in order; and it looks for no modules in its folder."""
    program, said = tmp_path / "program", tmp_path / "said"
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! $PYTHONPATH > {said}\n")
    program.chmod(0o755)
    start = worker_start(runtime)
    environ = {**start.world.environ, "PYTHONPATH": f"/lib:{tmp_path}"}
    spec = replace(start.world, python=str(program), cwd=str(tmp_path), environ=environ)
    process = await source.source.start(replace(start, world=spec), 1, 2)
    assert await asyncio.wait_for(process.exited, SOON) == 0
    child, path = said.read_text().split()
    assert path == "/lib"
    await until(lambda: not psutil.pid_exists(int(child)))


@forked
async def test_fork_server_that_hangs_or_is_killed(
    monkeypatch: pytest.MonkeyPatch, source: Source
) -> None:
    """A silent one is killed after a while; what was asked of it comes from another.

    Its workers live on, and their ends are told; also where a worker dies with its fork server,
    told with its signal or as one that was killed.
    """
    first, second = await source.worker(0), await source.worker(1)
    fork_server = fork_server_of(first)
    fork_server.suspend()
    monkeypatch.setattr("nbdist.agent.processes.FORK_TIMEOUT", 0.2)
    asked = asyncio.ensure_future(source.worker(2))
    await until(lambda: fork_server_of(first) == psutil.Process(), "it is killed")
    monkeypatch.undo()  # the next one has its time
    third = await asked
    another = fork_server_of(third)
    assert another not in (fork_server, psutil.Process())
    assert not fork_server.is_running()
    os.kill(second.pid, signal.SIGSEGV)
    assert await asyncio.wait_for(second.exited, SOON) == -signal.SIGSEGV
    os.kill(third.pid, signal.SIGSEGV)
    another.kill()
    code = await asyncio.wait_for(third.exited, SOON)
    assert code in (-signal.SIGSEGV, -signal.SIGKILL)
    assert not first.exited.done()


@forked
@pytest.mark.parametrize("broken", [{"torch": "ImportError"}], indirect=True)
async def test_fork_server_that_cannot_import_torch(
    runtime: Path, broken: None, source: Source
) -> None:
    """Whoever wants a worker of it gets an error, and its last lines say why."""
    with pytest.raises(ChildProcessError, match="fork server has ended"):
        await source.source.start(worker_start(runtime), 1, 2)
    assert source.forker is not None
    assert source.forker.last_lines()[-1] == "ImportError: broken on purpose"


def fork_server_of(process: WorkerProcess) -> psutil.Process:
    fork_server = psutil.Process(process.pid).parent()
    assert fork_server is not None
    return fork_server


@forked
@pytest.mark.parametrize(
    "broken", [{"mpmath": "RuntimeError", "sympy": "ImportError"}], indirect=True
)
async def test_fork_server_is_fit_for_forks(
    idle_imports: None, broken: None, source: Source
) -> None:
    """The fork server has one thread: a fork of it inherits no lock that nobody will release.

    Also when it has imported all that it imports while it is idle, and could not import some of
    it, which its log says; who asks before gets a worker, however much there is left to import.
    """
    assert source.forker is not None
    fork_server = fork_server_of(await source.worker(0))
    await source.worker(1)
    assert fork_server.num_threads() == 1
    await asyncio.to_thread(wait_until_at_rest, fork_server)
    assert fork_server.num_threads() == 1
    assert fork_server_of(await source.worker(3)) == fork_server
    assert "RuntimeError: broken on purpose" in source.forker.last_lines()
