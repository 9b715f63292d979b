"""The agent, which starts and ends the workers of one machine, and passes messages on to them.

`nbdist.agent.__main__` runs an `Agent` in the agent's process.  An `Agent` connects the parts of
that process: the link to the notebook or head, the workers, the queue of their outputs (`Outbox`),
and the code that interrupts ranks.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.agent.debugger_relay import DebuggerRelays
from nbdist.agent.fork_server import ForkServerProcess
from nbdist.agent.group_formation import Formation, GroupFormation
from nbdist.agent.inspect import (
    UsageWatch,
    ask_idle_worker,
    locate_with_patience,
    secrets_of,
    stack_of,
    status_of,
)
from nbdist.agent.interrupts import Interrupter
from nbdist.agent.listener import Listener, StoreWindow, with_ranks
from nbdist.agent.notebook_link import NotebookLink, Serving
from nbdist.agent.outbox import Outbox
from nbdist.agent.processes import Children, Forker
from nbdist.agent.step_stops import StepStops
from nbdist.agent.supervisor import fact_of
from nbdist.agent.worker import Worker
from nbdist.agent.worker_group import HeldPort, WorkerGroup
from nbdist.agent.world_record import WorldRecord
from nbdist.output.events import Output
from nbdist.system.processes import Guard
from nbdist.wire import control, messages, node_messages
from nbdist.wire.log_files import GetLogs, read_logs
from nbdist.wire.messages import AgentRequest
from nbdist.wire.places import RankPosition
from nbdist.wire.queries import WorldInfo

if TYPE_CHECKING:
    from nbdist.cluster.client import HeadLink, Way

RELEASE_TIMEOUT = 1.0  # seconds for workers to answer that they have released returned values


class Agent:
    """Runs the workers of this machine as messages request, and sends their outputs back.

    Without `route` the messages come from the notebook, and by default the ranks form their groups
    through a file.  With `route`, which has the address of a head, the messages come from the head,
    and by default the ranks form their groups through the head's store.
    """

    def __init__(
        self,
        runtime: Path,
        notebook_pid: int,
        fork_server: ForkServerProcess | None,
        guard: Guard,
        route: Way | None = None,
    ) -> None:
        self._children = Children()
        self._forker = Forker(runtime, self._children, fork_server) if fork_server else None
        self._serving = Serving(self._answer, self._send)
        self._outbox = Outbox(self._send)
        port = HeldPort(route.local_address if route else "127.0.0.1")
        shut_down = self._serving.stop
        self._link: NotebookLink | HeadLink
        self._head: HeadLink | None = None
        self._store: StoreWindow | None = None
        self._notebook: NotebookLink | None = None
        if route:
            # Imported here, because a world on one machine does not need `nbdist.cluster`.
            from nbdist.cluster.client import HeadLink

            self._link = self._head = HeadLink(route, port.number, self._receive, shut_down, guard)
            self._store = StoreWindow(runtime, self._head.ask_store)
        else:
            self._link = self._notebook = NotebookLink(
                runtime, notebook_pid, guard, self._receive, shut_down
            )
        self._workers = WorkerGroup(
            runtime, self._children, self._forker, self._emit, self._send, self._store, port
        )
        self._forming = GroupFormation({0: self}, on_one_machine=True)
        self._usage = UsageWatch(self._send)
        self._stopping = Interrupter(
            self._workers.abort_except_other_tasks,
            lambda places: self._send(messages.Aborted(places)),
        )
        self._step_stops = StepStops(
            self._stopping, lambda: self._workers.all.values(), self._serving.spawn
        )
        self._debuggers = DebuggerRelays(self._workers.alive, self._send, self._serving.spawn)
        self._listener = Listener(runtime, self._add_ranks, self._notebook, self._read_ranks)

    def __repr__(self) -> str:
        return f"<Agent {os.getpid()} ranks {sorted(self._workers.all)} {self._outbox}>"

    async def serve(self) -> str:
        """Carry out messages until the notebook or head no longer needs this agent.

        Returns "", or why the agent has given up its connection to the head.
        """
        asyncio.get_running_loop().set_exception_handler(self._serving.on_loop_error)
        self._children.attach()
        if self._forker:
            self._forker.attach()
        await self._listener.open()
        if self._store:
            await self._store.open()
        await self._link.open()
        try:
            await self._serving.run_until_stopped()
        finally:
            # Kill the fork server, because it would not notice a closed socket during an import.
            # Workers do not need the fork server any more, since this process is their parent.
            if self._forker:
                self._forker.close()
            await self._workers.stop(grace=0.0)
            self._workers.close()
            if self._store:
                await self._store.close()
            self._usage.close()
            await self._link.close()
            await self._listener.close()
            self._children.close()
        return self._link.problem

    @property
    def _record(self) -> WorldRecord:
        """The record of the world, which is in this process only if the world has no head."""
        assert self._notebook is not None
        return self._notebook.record

    def _send(self, message: messages.Up) -> None:
        self._link.send(message)

    def _emit(self, rank: int, task_id: str, output: Output) -> None:
        """Queue an output of a rank for the notebook, and tell `Supervision` of the output at once.

        `Supervision` finds ranks that wait for ever.  It is in this process, or in the head if the
        world has one.  To tell a head, a small copy of the output is sent at once, if the output
        matters to `Supervision` (`fact_of`).
        """
        if self._notebook is not None:
            self._notebook.observe(rank, task_id, output)
        elif self._head and (fact := fact_of(output)):  # the head supervises the world's tasks
            self._head.send(node_messages.Observed(rank, task_id, fact))
        self._outbox.add(rank, task_id, output)

    def _receive(self, message: node_messages.NodeDown) -> None:
        spawn, reply = self._serving.spawn, self._serving.reply
        match message:
            case AgentRequest(number, node_messages.PartRequest() as request):
                spawn(reply(number, self.execute, request))
            case messages.RunTask() as run:
                self._run(run)
            case AgentRequest(number, messages.GetStatus()):
                workers = tuple(self._workers.all.values())
                spawn(reply(number, status_of, workers, self._usage))
            case AgentRequest(
                number, messages.GetStacks() | messages.GetSecrets() | GetLogs() as request
            ):
                spawn(reply(number, self._read_ranks, request))
            case AgentRequest(number, messages.Consult(ranks, question)):
                spawn(reply(number, ask_idle_worker, self._workers.alive(ranks), question))
            case AgentRequest(number, messages.SpareRanks(ranks)):
                self._send(messages.AgentReply(number, self._spare(ranks)))
            case AgentRequest() as ask:
                self._serving.enqueue(ask)
            case messages.RequestLocations(ranks, asked_at):
                spawn(self._report_places(ranks, asked_at))
            case messages.AbortRanks(ranks):
                spawn(self._workers.abort(ranks))
            case messages.Interrupt(ranks):
                self._step_stops.stop(self._workers.alive(ranks))
            case node_messages.InterruptAt(ranks, 0):
                self._step_stops.interrupt(self._workers.alive(ranks))
            case node_messages.InterruptAt(ranks, step, seconds):
                self._step_stops.stop_at(self._workers.alive(ranks), step, seconds)
            case messages.ReleaseRankValues(task_id, ranks):
                spawn(self._workers.ask(ranks, control.ReleaseTaskValues(task_id), RELEASE_TIMEOUT))
            case messages.SendInput(rank, typed):
                for worker in self._workers.alive([rank]):
                    worker.input.answer(typed)
            case messages.ToWidget(rank, comm):
                for worker in self._workers.alive([rank]):
                    worker.send_comm(comm)
            case (
                messages.OpenDebugger() | messages.ToDebugger() | messages.CloseDebuggers()
            ) as to_debugger:
                self._debuggers.receive(to_debugger)
            case messages.BatchAcknowledged():
                self._outbox.acknowledge()
            case messages.Shutdown():
                self._serving.stop()

    async def _answer(self, request: messages.RequestBody) -> messages.Reply:
        match request:
            case messages.StartWorld(spec):
                formed = await self._forming.start(spec)
                return (
                    self._record.record_start(formed) if isinstance(formed, Formation) else formed
                )
            case messages.StopWorld(grace):
                await self._forming.stop(grace)
            case messages.Heal():
                return self._record.record_change(await self._forming.heal())
            case messages.Scale(spec, keep):
                return self._record.record_change(await self._forming.scale(spec, keep))
            case messages.Kill(ranks, why):
                for worker in self._workers.alive(ranks):
                    worker.kill(why)
            case messages.GetCode() | messages.PutCode():
                return await asyncio.to_thread(self._workers.code.answer, request)
        return None

    def _run(self, run: messages.RunTask) -> None:
        self._outbox.mark_running(run.id, run.ranks)
        if not self._usage.is_on:
            self._serving.spawn(self._usage.watch(self._busy))
        for rank in run.ranks:
            self._workers.all[rank].run(run)

    def _spare(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Do not kill `ranks` until Stop is pressed again, even if they seem stuck.

        Returns the ranks that are spared: those that are alive and are not being killed already.
        """
        spared = [worker for worker in self._workers.alive(ranks) if not worker.death.is_killed]
        self._step_stops.spare(spared)
        return tuple(worker.rank for worker in spared)

    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers.alive() if worker.state == "busy"]

    async def _read_ranks(self, request: messages.OfEachRank) -> tuple[Any, ...]:
        if isinstance(request, GetLogs):
            folders = {rank: worker.log.folder for rank, worker in self._workers.all.items()}
            return await asyncio.to_thread(read_logs, folders, request)
        workers = (self._workers.all[rank] for rank in request.ranks if rank in self._workers.all)
        read = secrets_of if isinstance(request, messages.GetSecrets) else stack_of
        return tuple(await asyncio.gather(*map(read, workers)))

    async def execute(self, request: node_messages.PartRequest[Any]) -> Any:
        """Carry out a request that `GroupFormation` or the head has sent, and return the answer."""
        match request:
            case node_messages.GetClock():
                return time.time_ns()
            case node_messages.Reach(targets):
                from nbdist.cluster.client import first_unreached

                return await first_unreached(targets)
            case node_messages.LocateRanks(ranks):
                return await self._locate(ranks)
            case node_messages.HoldRanks(ranks):
                workers = (self._workers.all[rank] for rank in ranks if rank in self._workers.all)
                return await self._step_stops.hold(workers)
            case node_messages.CopySegments(refs) if self._head:
                return await self._head.memory.copy_segments(refs)
        reply = await self._workers.execute(request)
        if isinstance(request, node_messages.EndRanks) and request.drops:
            self._outbox.clear()
        return reply

    async def _report_places(self, ranks: Sequence[int], asked_at: float) -> None:
        self._send(messages.Located(await self._locate(ranks), asked_at))

    async def _locate(self, ranks: Sequence[int]) -> dict[int, RankPosition]:
        alive = self._workers.alive(ranks)
        places = await asyncio.gather(*map(locate_with_patience, alive))
        located = zip(alive, places, strict=True)
        return {each.rank: place for each, place in located if not each.death.is_killed}

    async def _add_ranks(self, info: WorldInfo) -> WorldInfo:
        workers = tuple(self._workers.all.values())
        rows = await status_of(workers, self._usage, self._usage.fresh_seconds)
        return with_ranks(info, self._workers.spec, rows)
