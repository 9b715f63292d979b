"""Tests of `nbdist.node.forker`: a fork server that is idle, busy, broken, killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from nbdist.node import forker
from nbdist.node.processes import WorkerProcess
from tests.node.sources import Source, run, worker_start
from tests.waiting import SOON, until

pytestmark = pytest.mark.own_agent


def test_fork_server_that_is_killed(runtime: Path) -> None:
    """Its workers live on, their ends are told, and the next one comes from a new fork server."""

    async def test(source: Source) -> None:
        first, second = await source.worker(0), await source.worker(1)
        fork_server = fork_server_of(first)
        fork_server.kill()
        await until(lambda: fork_server_of(first) == psutil.Process())
        third = await source.worker(2)
        assert fork_server_of(third) not in (fork_server, psutil.Process())
        os.kill(second.pid, signal.SIGSEGV)
        assert await asyncio.wait_for(second.exited, SOON) == -signal.SIGSEGV
        assert not first.exited.done()
        assert not psutil.pid_exists(fork_server.pid)

    run("fork", runtime, test)


def test_worker_and_fork_server_die_together(runtime: Path) -> None:
    """The end of the worker is told with its signal, or as that of one that was killed."""

    async def test(source: Source) -> None:
        process = await source.worker()
        os.kill(process.pid, signal.SIGSEGV)
        fork_server_of(process).kill()
        code = await asyncio.wait_for(process.exited, SOON)
        assert code in (-signal.SIGSEGV, -signal.SIGKILL)
        assert (await source.worker(1)).pid != process.pid

    run("fork", runtime, test)


def test_fork_server_that_is_killed_while_it_forks(runtime: Path) -> None:
    """Whoever asked gets a worker all the same."""

    async def test(source: Source) -> None:
        fork_server = fork_server_of(await source.worker(0))
        fork_server.suspend()
        asked = asyncio.ensure_future(source.worker(1))
        await asyncio.sleep(0.05)
        fork_server.kill()
        assert fork_server_of(await asked) != fork_server

    run("fork", runtime, test)


def test_fork_server_that_hangs(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed after a while; what was asked of it comes from another, its workers stay."""
    monkeypatch.setattr(forker, "FORK_TIMEOUT", 3.0)

    async def test(source: Source) -> None:
        first = await source.worker(0)
        fork_server = fork_server_of(first)
        fork_server.suspend()
        assert fork_server_of(await source.worker(1)) != fork_server
        assert not fork_server.is_running()
        assert not first.exited.done()

    run("fork", runtime, test)


def test_fork_server_that_cannot_import_torch(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever wants a worker of it gets an error, and its last lines say why."""
    (tmp_path / "torch.py").write_text("raise ImportError('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def test(source: Source) -> None:
        with pytest.raises(ChildProcessError, match="fork server has ended"):
            await source.source.start(worker_start(runtime), 1, 2)
        assert source.forker is not None
        assert source.forker.last_lines()[-1] == "ImportError: broken on purpose"

    run("fork", runtime, test)


def fork_server_of(process: WorkerProcess) -> psutil.Process:
    fork_server = psutil.Process(process.pid).parent()
    assert fork_server is not None
    return fork_server


@pytest.mark.usefixtures("idle_imports")
def test_fork_server_is_fit_for_forks(runtime: Path) -> None:
    """The fork server has one thread: a fork of it inherits no lock that nobody will release.

    Also when it has imported all that it imports while it is idle.
    """

    async def test(source: Source) -> None:
        assert source.forker is not None
        fork_server = fork_server_of(await source.worker(0))
        assert fork_server.num_threads() == 1
        await asyncio.wait_for(source.forker.has_all.wait(), SOON)
        assert fork_server.num_threads() == 1
        assert fork_server_of(await source.worker(1)) == fork_server
        assert source.forker.last_lines() == ()

    run("fork", runtime, test)


@pytest.mark.usefixtures("idle_imports")
def test_requests_come_before_what_is_imported_when_idle(runtime: Path) -> None:
    """Who asks gets a worker, however much there is left to import."""

    async def test(source: Source) -> None:
        assert source.forker is not None
        for rank in range(3):
            await source.worker(rank)
        assert not source.forker.has_all.is_set()

    run("fork", runtime, test)


@pytest.mark.usefixtures("idle_imports")
def test_what_cannot_be_imported_when_idle(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Workers can be had all the same, and the fork server's log says what is wrong with it."""
    (tmp_path / "mpmath.py").write_text("raise RuntimeError('broken on purpose')")
    (tmp_path / "sympy.py").write_text("raise ImportError('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def test(source: Source) -> None:
        assert source.forker is not None
        await asyncio.wait_for(source.forker.has_all.wait(), SOON)
        await source.worker()
        assert "RuntimeError: broken on purpose" in source.forker.last_lines()

    run("fork", runtime, test)
