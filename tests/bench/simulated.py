"""Many simulated machines in a few processes: agents whose workers run cells without kernels.

Links, keys, messages, outbox and head are nbdist's own; only the workers are simulated, without
kernels and without torch.  After `install`, `--launcher simulated` starts the agents by
`python -m tests.bench.simulated FIRST COUNT`.
"""

from __future__ import annotations

import asyncio
import builtins
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbdist.agent.outbox import Outbox
from nbdist.cluster.client import HeadLink, Way, find_route, read_ticket
from nbdist.cluster.launcher import AgentCommand, Launched
from nbdist.cluster.ticket import Ticket
from nbdist.config import WorldConfig
from nbdist.output.events import Done, Failure, Output, Text
from nbdist.wire.messages import (
    AgentReply,
    AgentRequest,
    BatchAcknowledged,
    GetStatus,
    RunTask,
    Shutdown,
)
from nbdist.wire.node_messages import (
    Form,
    Formed,
    GetClock,
    GetHeld,
    LiveRanks,
    LocateRanks,
    NodeDown,
    PartRequest,
    StartPart,
)
from nbdist.wire.places import RankPosition
from nbdist.wire.status import WorkerStatus
from nbdist.wire.work import CellCode, Task, task_from

PROCESSES = 4
FIRST_PID = 1 << 22
"""Beyond all process ids of a usual machine."""

ROOT = Path(__file__).parents[2]


def install(folder: Path) -> None:
    """Write a package's metadata into a folder of the path, so that nbdist finds the launcher."""
    metadata = folder / "simulated-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated\nVersion: 1\n")
    place = "tests.bench.simulated:SimulatedLauncher"
    (metadata / "entry_points.txt").write_text(f"[nbdist.launchers]\nsimulated = {place}\n")


class SimulatedLauncher:
    """The launcher `simulated`, for as many machines as the layout says."""

    def launch(self, wanted: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Start all agents, several in each process."""
        nodes = wanted.max_nodes or 1
        starts = sorted({nodes * each // PROCESSES for each in range(PROCESSES + 1)})
        processes = [
            AgentCommand(f"simulated{first}", _command(first, end), ticket, folder)
            for first, end in itertools.pairwise(starts)
        ]
        return Launched(processes, nodes, [f"node{number}" for number in range(nodes)])


def _command(first: int, end: int) -> list[str]:
    return [sys.executable, "-m", "tests.bench.simulated", str(first), str(end - first)]


def _outputs_of(task: Task, rank: int) -> Iterable[Output]:
    began = time.perf_counter()
    said: list[str] = []

    def tell(*values: object) -> None:
        said.append(" ".join(map(str, values)) + "\n")

    names: dict[str, Any] = {"rank": rank, "print": tell, "__builtins__": builtins}
    before = {*names}
    failure = None
    try:
        if isinstance(task.work, CellCode):
            exec(task.work.text, names)
    except Exception as error:  # noqa: BLE001 (the cell's)
        name, lines = type(error).__name__, (f"{type(error).__name__}: {error}",)
        failure = Failure(name, str(error), lines, time.time_ns())
    if said:
        yield Text("stdout", "".join(said))
    if failure is not None:
        yield failure
    seconds = time.perf_counter() - began
    yield Done("error" if failure else "ok", seconds, frozenset(names.keys() - before))


class SimulatedAgent:
    """The agent of a simulated machine, with its own link to the head.

    Its ranks run a task's source one after the other, as soon as the task comes.
    """

    def __init__(self, way: Way, leave: Callable[[], None]) -> None:
        self._leave = leave
        self.end = HeadLink(way, 1, self._receive, leave)
        self._ranks: tuple[int, ...] = ()
        self._outbox = Outbox(self.end.send)

    @property
    def _pids(self) -> Mapping[int, int]:
        return {rank: FIRST_PID + rank for rank in self._ranks}

    def _receive(self, message: NodeDown) -> None:
        match message:
            case RunTask(task_id, ranks, packed):
                self._outbox.mark_running(task_id, ranks)
                task = task_from(packed)
                for rank in ranks:
                    for output in _outputs_of(task, rank):
                        self._outbox.add(rank, task_id, output)
            case BatchAcknowledged():
                self._outbox.acknowledge()
            case AgentRequest(number, PartRequest() as request):
                self.end.send(AgentReply(number, self._reply(request)))
            case AgentRequest(number, request):
                rows = None
                if isinstance(request, GetStatus):
                    row = ("simulated", "idle", 0.0, 0, "cpu")
                    rows = tuple(WorkerStatus(rank, pid, *row) for rank, pid in self._pids.items())
                self.end.send(AgentReply(number, rows))
            case Shutdown():
                self._leave()

    def _reply(self, request: object) -> Any:
        match request:
            case GetClock():
                return time.time_ns()
            case StartPart(_, ranks):
                self._ranks = ranks
                return Formed(self._pids, dict.fromkeys(ranks, ""), ranks)
            case LocateRanks(ranks):
                return {rank: RankPosition() for rank in ranks}
            case GetHeld():
                return LiveRanks(dict.fromkeys(self._ranks))
            case Form(_, ranks):
                self._ranks = ranks
                return Formed(self._pids, dict.fromkeys(ranks, ""), ranks)
        return None


async def _serve(way: Way, numbers: Sequence[int]) -> None:
    gone = asyncio.Event()
    agents = [SimulatedAgent(replace(way, number=number), gone.set) for number in numbers]
    for agent in agents:
        await agent.end.open()
    await gone.wait()
    for agent in agents:
        await agent.end.close()


if __name__ == "__main__":
    FIRST, COUNT = map(int, sys.argv[1:])
    asyncio.run(_serve(find_route(read_ticket()), range(FIRST, FIRST + COUNT)))
