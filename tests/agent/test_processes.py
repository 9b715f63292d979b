"""Tests of `nbdist.agent.processes`: real workers, forked and spawned, and their ends."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.agent.sources import Source, run, worker_start
from tests.waiting import SOON, until

pytestmark = pytest.mark.own_agent


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [("fork", [signal.SIGKILL, signal.SIGSEGV]), ("spawn", [signal.SIGSEGV])],
)
def test_workers_and_their_ends(kind: str, runtime: Path, numbers: list[signal.Signals]) -> None:
    """Each leads its own session, where the notebook's Stop does not reach it.

    The exit code of one that was killed is the negative signal, which is nothing to the
    others; closing the source leaves none.
    """
    pids = []

    async def test(source: Source) -> None:
        last = await source.worker(len(numbers))
        for rank, number in enumerate(numbers):
            process = await source.worker(rank)
            assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
            assert repr(process) == f"<WorkerProcess {process.pid} running>"
            os.kill(process.pid, number)
            assert await asyncio.wait_for(process.exited, SOON) == -number
            assert repr(process) == f"<WorkerProcess {process.pid} exited -{number:d}>"
            process.send_signal(signal.SIGTERM)  # to nobody: no error
        assert psutil.pid_exists(last.pid)
        assert not last.exited.done()
        pids.append(last.pid)

    run(kind, runtime, test)
    asyncio.run(until(lambda: not any(map(psutil.pid_exists, pids))))


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
