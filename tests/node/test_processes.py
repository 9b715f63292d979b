"""Tests of `nbdist.node.processes`: real workers, forked and spawned, and their ends."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.node.sources import Source, run, worker_start
from tests.waiting import SOON, until

pytestmark = pytest.mark.own_agent

both_sources = pytest.mark.parametrize("kind", ["fork", "spawn"])


@both_sources
def test_worker_is_a_leader_of_its_own(kind: str, runtime: Path) -> None:
    """A worker leads its own session, so that the notebook's Stop does not reach it."""

    async def test(source: Source) -> None:
        process = await source.worker()
        assert os.getsid(process.pid) == process.pid
        assert os.getpgid(process.pid) == process.pid
        assert repr(process) == f"<WorkerProcess {process.pid} running>"

    run(kind, runtime, test)


@both_sources
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_death_is_told_with_its_signal(kind: str, runtime: Path, number: int) -> None:
    """The exit code of a worker that was killed is the negative signal."""

    async def test(source: Source) -> None:
        process = await source.worker()
        os.kill(process.pid, number)
        assert await asyncio.wait_for(process.exited, SOON) == -number
        assert repr(process) == f"<WorkerProcess {process.pid} exited -{number:d}>"
        process.send_signal(signal.SIGTERM)  # to nobody: no error

    run(kind, runtime, test)


@both_sources
def test_other_workers_live_on(kind: str, runtime: Path) -> None:
    """The death of one worker is nothing to the others."""

    async def test(source: Source) -> None:
        first, second = await source.worker(0), await source.worker(1)
        os.kill(first.pid, signal.SIGKILL)
        await asyncio.wait_for(first.exited, SOON)
        assert psutil.pid_exists(second.pid)
        assert not second.exited.done()

    run(kind, runtime, test)


def test_what_it_started_ends_with_it(runtime: Path, tmp_path: Path) -> None:
    """Also where it ends by itself, in order; and it looks for no modules in its folder."""
    program, said = tmp_path / "program", tmp_path / "said"
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! $PYTHONPATH > {said}\n")
    program.chmod(0o755)

    async def test(source: Source) -> None:
        start = worker_start(runtime)
        environ = {**start.world.environ, "PYTHONPATH": f"/lib:{tmp_path}"}
        spec = replace(start.world, python=str(program), cwd=str(tmp_path), environ=environ)
        process = await source.source.start(replace(start, world=spec), 1, 2)
        assert await asyncio.wait_for(process.exited, SOON) == 0
        child, path = said.read_text().split()
        assert path == "/lib"
        await until(lambda: not psutil.pid_exists(int(child)))

    run("spawn", runtime, test)


@both_sources
def test_close_ends_all_workers(kind: str, runtime: Path) -> None:
    """Closing the source leaves no worker."""
    pids = []

    async def test(source: Source) -> None:
        pids.extend([(await source.worker(0)).pid, (await source.worker(1)).pid])

    run(kind, runtime, test)
    asyncio.run(until(lambda: not any(map(psutil.pid_exists, pids))))


def test_spawner_without_an_interpreter(runtime: Path) -> None:
    """An interpreter that is not there is an error that names it."""

    async def test(source: Source) -> None:
        start = worker_start(runtime)
        start = replace(start, world=replace(start.world, python="/nowhere/python"))
        with pytest.raises(ChildProcessError, match="/nowhere/python: No such file"):
            await source.source.start(start, 1, 2)

    run("spawn", runtime, test)


def test_spawner_with_a_program_that_reads_nothing(runtime: Path) -> None:
    """A program that ends at once is told by its exit code."""

    async def test(source: Source) -> None:
        start = worker_start(runtime)
        start = replace(start, world=replace(start.world, python="/bin/false"))
        process = await source.source.start(start, 1, 2)
        assert await asyncio.wait_for(process.exited, SOON) == 1

    run("spawn", runtime, test)
