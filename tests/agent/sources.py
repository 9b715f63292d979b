"""Sources of worker processes, as an agent has them, for tests."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from jupyter_client.connect import write_connection_file

from nbdist.agent.fork_server import start_fork_server
from nbdist.agent.processes import Children, Forker, ProcessSource, Spawner, WorkerProcess
from nbdist.system.processes import adopt_orphans
from nbdist.wire.spec import WorkerStart, WorldSpec
from nbdist.wire.work import mark
from tests.waiting import until

TOKEN = "0123456789abcdef"
CHANNELS = ("shell", "iopub", "stdin", "control", "hb")


def worker_start(runtime: Path, rank: int = 0) -> WorkerStart:
    """What a worker that needs no others is told."""
    spec = WorldSpec(1, None, dict(os.environ), os.getcwd(), tuple(sys.path), 1, sys.executable)
    return WorkerStart(
        rank=rank,
        world=spec,
        connection_file=str(runtime / f"{rank}.json"),
        token=TOKEN,
        store_path=str(runtime / "store"),
        over_path=str(runtime / "world"),
        generation=1,
        environ={"RANK": str(rank)},
    )


class Source:
    """A source of either kind on a running loop, and the workers it has started."""

    def __init__(self, kind: str, runtime: Path) -> None:
        self._runtime = runtime
        self.children = Children()
        self.children.attach()
        self.source: ProcessSource
        self.forker: Forker | None = None
        if kind == "fork":
            self.source = self.forker = Forker(runtime, self.children, start_fork_server(runtime))
            self.forker.attach()
        else:
            self.source = Spawner(self.children)

    def close(self) -> None:
        """End all processes."""
        if self.forker is not None:
            self.forker.close()
        self.children.close()

    async def worker(self, rank: int = 0) -> WorkerProcess:
        """A worker that is ready for cells."""
        ports = {f"{channel}_port": n for n, channel in enumerate(CHANNELS, start=1)}
        file, place = str(self._runtime / f"{rank}.json"), f"{self._runtime}/{rank}"
        write_connection_file(file, ip=place, transport="ipc", **ports)
        said = self._runtime / f"{rank}.out"
        with said.open("wb") as out:
            process = await self.source.start(worker_start(self._runtime, rank), out.fileno(), 2)
        await until(lambda: mark(TOKEN, "ready") in said.read_bytes())
        return process


class Bench:
    """What workers come from, on a loop that runs while a test does."""

    def __init__(self, kind: str, runtime: Path, runner: asyncio.Runner) -> None:
        self.runtime, self.runner = runtime, runner
        self._kind = kind
        self._faults: list[dict[str, object]] = []  # in callbacks, by which an agent would end
        adopt_orphans()  # as an agent does
        self.source = runner.run(self._make())

    async def _make(self) -> Source:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, fault: self._faults.append(fault))
        return Source(self._kind, self.runtime)

    def close(self) -> None:
        async def end() -> None:
            self.source.close()

        self.runner.run(end())
        adopt_orphans(adopts=False)
        assert self._faults == []
