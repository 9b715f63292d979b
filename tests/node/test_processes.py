"""Tests of `nbdist.node.processes`: real workers, from the nursery and spawned, and their ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nbdist.node.birth import start_nursery
from nbdist.node.processes import Nursery, ProcessSource, Spawner, WorkerProcess
from nbdist.wire.marks import mark
from nbdist.wire.messages import RankStart, WorldSpec

SOON = 20.0
TOKEN = "0123456789abcdef"

both_sources = pytest.mark.parametrize("kind", ["nursery", "spawn"])


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A folder with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="nbt-") as folder:
        yield Path(folder)


def orders(runtime: Path, rank: int = 0) -> RankStart:
    """What a worker that needs no others is told."""
    spec = WorldSpec(1, None, dict(os.environ), os.getcwd(), tuple(sys.path), 1, sys.executable)
    return RankStart(
        rank=rank,
        local_rank=rank,
        local_world_size=1,
        world=spec,
        connection_file=str(runtime / f"{rank}.json"),
        token=TOKEN,
        store_path=str(runtime / "store"),
        generation=1,
        environ={"RANK": str(rank)},
    )


def write_connection_file(runtime: Path, rank: int) -> None:
    from jupyter_client.connect import write_connection_file as write

    ports = {f"{channel}_port": n for n, channel in enumerate(CHANNELS, start=1)}
    write(str(runtime / f"{rank}.json"), ip=f"{runtime}/{rank}", transport="ipc", **ports)


CHANNELS = ("shell", "iopub", "stdin", "control", "hb")


class Source:
    """A source of either kind on a running loop, and the workers it has started."""

    def __init__(self, kind: str, runtime: Path) -> None:
        self._runtime = runtime
        self.source: ProcessSource
        if kind == "nursery":
            self.source = nursery = Nursery(start_nursery(runtime))
            nursery.attach()
        else:
            self.source = Spawner()

    async def worker(self, rank: int = 0) -> WorkerProcess:
        """A worker that is ready for cells."""
        write_connection_file(self._runtime, rank)
        said = self._runtime / f"{rank}.out"
        with said.open("wb") as out:
            process = await self.source.start(orders(self._runtime, rank), out.fileno(), 2)
        await until(lambda: mark(TOKEN, "ready") in said.read_bytes())
        return process


async def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def run(kind: str, runtime: Path, test: Callable[[Source], Awaitable[None]]) -> None:
    async def main() -> None:
        source = Source(kind, runtime)
        try:
            await test(source)
        finally:
            source.source.close()

    asyncio.run(main())


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


@both_sources
def test_close_ends_all_workers(kind: str, runtime: Path) -> None:
    """Closing the source leaves no worker."""
    pids = []

    async def test(source: Source) -> None:
        pids.extend([(await source.worker(0)).pid, (await source.worker(1)).pid])

    run(kind, runtime, test)
    asyncio.run(until(lambda: not any(map(psutil.pid_exists, pids))))


def test_nursery_that_is_killed(runtime: Path) -> None:
    """Its workers die with it, and are reported as killed; no new one can be started."""

    async def test(source: Source) -> None:
        process = await source.worker()
        psutil.Process(process.pid).parent().kill()  # type: ignore[union-attr]
        assert await asyncio.wait_for(process.exited, SOON) == -signal.SIGKILL
        await until(lambda: not psutil.pid_exists(process.pid))
        with pytest.raises(ChildProcessError, match="nursery"):
            await source.source.start(orders(runtime), 1, 2)

    run("nursery", runtime, test)


def test_nursery_that_cannot_import_torch(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever wants a worker of it gets an error, and its last lines say why."""
    (tmp_path / "torch.py").write_text("raise ImportError('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def test(source: Source) -> None:
        with pytest.raises(ChildProcessError, match="nursery has ended"):
            await source.source.start(orders(runtime), 1, 2)
        assert isinstance(source.source, Nursery)
        assert source.source.last_lines()[-1] == "ImportError: broken on purpose"

    run("nursery", runtime, test)


def nursery_of(process: WorkerProcess) -> psutil.Process:
    nursery = psutil.Process(process.pid).parent()
    assert nursery is not None
    return nursery


def test_nursery_is_fit_for_forks(runtime: Path) -> None:
    """The nursery has one thread: a fork of it inherits no lock that nobody will release.

    Also when it has imported all that it imports while it is idle.
    """

    async def test(source: Source) -> None:
        assert isinstance(source.source, Nursery)
        nursery = nursery_of(await source.worker(0))
        assert nursery.num_threads() == 1
        await asyncio.wait_for(source.source.has_all.wait(), SOON)
        assert nursery.num_threads() == 1
        assert nursery_of(await source.worker(1)) == nursery
        assert source.source.last_lines() == ()

    run("nursery", runtime, test)


def test_requests_come_before_what_is_imported_when_idle(runtime: Path) -> None:
    """Who asks gets a worker, however much there is left to import."""

    async def test(source: Source) -> None:
        assert isinstance(source.source, Nursery)
        for rank in range(3):
            await source.worker(rank)
        assert not source.source.has_all.is_set()

    run("nursery", runtime, test)


def test_what_cannot_be_imported_when_idle(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Workers can be had all the same, and the nursery's log says what is wrong with it."""
    (tmp_path / "mpmath.py").write_text("raise RuntimeError('broken on purpose')")
    (tmp_path / "sympy.py").write_text("raise ImportError('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def test(source: Source) -> None:
        assert isinstance(source.source, Nursery)
        await asyncio.wait_for(source.source.has_all.wait(), SOON)
        await source.worker()
        assert "RuntimeError: broken on purpose" in source.source.last_lines()

    run("nursery", runtime, test)


def test_spawner_without_an_interpreter(runtime: Path) -> None:
    """An interpreter that is not there is an error that names it."""

    async def test(source: Source) -> None:
        start = orders(runtime)
        start = replace(start, world=replace(start.world, python="/nowhere/python"))
        with pytest.raises(ChildProcessError, match="/nowhere/python: No such file"):
            await source.source.start(start, 1, 2)

    run("spawn", runtime, test)


def test_spawner_with_a_program_that_reads_nothing(runtime: Path) -> None:
    """A program that ends at once is told by its exit code."""

    async def test(source: Source) -> None:
        start = orders(runtime)
        start = replace(start, world=replace(start.world, python="/bin/false"))
        process = await source.source.start(start, 1, 2)
        assert await asyncio.wait_for(process.exited, SOON) == 1

    run("spawn", runtime, test)
