"""Sources of worker processes, as an agent has them, for tests."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from jupyter_client.connect import write_connection_file

from nbdist.agent.fork_server import start_fork_server
from nbdist.agent.processes import Children, Forker, ProcessSource, Spawner, WorkerProcess
from nbdist.system.processes import adopt_orphans
from nbdist.wire.spec import WorkerStart, WorldSpec
from nbdist.wire.work import mark
from tests.waiting import until

Program = Callable[[str], Path]

TOKEN = "0123456789abcdef"
CHANNELS = ("shell", "iopub", "stdin", "control", "hb")


def worker_start(runtime: Path, rank: int = 0) -> WorkerStart:
    """Return the start information of a worker that waits for no other rank."""
    spec = WorldSpec(1, None, dict(os.environ), os.getcwd(), tuple(sys.path), 1, sys.executable)
    return WorkerStart(
        rank=rank,
        world=spec,
        connection_file=str(runtime / f"{rank}.json"),
        token=TOKEN,
        store_path=str(runtime / "store"),
        cancel_path=str(runtime / "world"),
        generation=1,
        environ={"RANK": str(rank)},
    )


class Source:
    """A spawner or a fork server, and the workers that it has started, on a test's event loop."""

    def __init__(self, kind: str, runtime: Path, runner: asyncio.Runner) -> None:
        self.runtime, self.runner = runtime, runner
        self.forker: Forker | None = None
        self._faults: list[dict[str, object]] = []  # errors in callbacks, which would end an agent
        adopt_orphans()  # as an agent does
        runner.run(self._open(kind))

    async def _open(self, kind: str) -> None:
        handler = lambda _, fault: self._faults.append(fault)  # noqa: E731
        asyncio.get_running_loop().set_exception_handler(handler)
        self.children = Children()
        self.children.attach()
        self.source: ProcessSource = Spawner(self.children)
        if kind == "fork":
            server = start_fork_server(self.runtime)
            self.source = self.forker = Forker(self.runtime, self.children, server)
            self.forker.attach()

    async def close(self) -> None:
        """End all processes."""
        if self.forker is not None:
            self.forker.close()
        self.children.close()

    def end(self) -> None:
        self.runner.run(self.close())
        adopt_orphans(adopts=False)
        assert self._faults == []

    @property
    def server_pid(self) -> int:
        """The process id of the fork server."""
        return self.forker._server.popen.pid

    async def worker(self, rank: int = 0) -> WorkerProcess:
        """Start a worker, and wait until it is ready for cells."""
        ports = {f"{channel}_port": n for n, channel in enumerate(CHANNELS, start=1)}
        file, place = str(self.runtime / f"{rank}.json"), f"{self.runtime}/{rank}"
        write_connection_file(file, ip=place, transport="ipc", **ports)
        said = self.runtime / f"{rank}.out"
        with said.open("wb") as out:
            process = await self.source.start(worker_start(self.runtime, rank), out.fileno(), 2)
        await until(lambda: mark(TOKEN, "ready") in said.read_bytes())
        return process
