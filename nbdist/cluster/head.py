"""The head: to the notebook it is one agent, behind which there are those of several machines."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nbdist.agent.listener import Listener, with_ranks
from nbdist.agent.notebook_link import Serving, Tether
from nbdist.cluster.assembly import Assembly, in_time_of_head, last_words
from nbdist.cluster.node import Node, NodeLost
from nbdist.cluster.transfer import BulkTransfers
from nbdist.output.events import Died, Done
from nbdist.system.processes import Guard
from nbdist.wire import messages
from nbdist.wire.node_messages import LocateRanks, NodeAnswer, NodeUp, StoreAnswer, StoreAsk
from nbdist.wire.store import HostedStore, Operation
from nbdist.wire.transfer import Dropped, Piece, Taken
from nbdist.wire.views import GetLogs, Usage, WorldInfo

log = logging.getLogger("nbdist.cluster")

ToRanks = messages.Abort | messages.Interrupt | messages.LetGo | messages.Spare


class Head:
    """Passes on what the notebook says to the agents that it concerns, and back what they say.

    What all machines have to agree on, `Forming` asks of their agents as it does of one.
    """

    def __init__(self, runtime: Path, notebook_pid: int, guard: Guard) -> None:
        self._store = HostedStore()
        self._transfers = BulkTransfers(
            lambda number: self._assembly.node(number),
            self._send_run,
            lambda outputs: self._show(outputs, None),
        )
        self._assembly = Assembly(
            runtime, self._store, self._transfers, self._take, self._lose, self._send
        )
        self._task_of: dict[int, str] = {}
        self._batches: deque[Node | None] = deque()
        self._usage: dict[int, Usage] = {}
        self._serving = Serving(self._answer, self._send)
        leave = self._serving.leave
        self._notebook = Tether(
            *(runtime, notebook_pid, guard, self._receive, leave),
            has_machines=lambda: self._assembly.there,
        )
        self._listener = Listener(runtime, self._look, self._notebook)

    def __repr__(self) -> str:
        return f"<Head {os.getpid()} {self._assembly}>"

    async def serve(self) -> None:
        """Work until the notebook leaves or ends, then leave nothing behind."""
        asyncio.get_running_loop().set_exception_handler(self._serving.fail)
        await self._listener.open()
        await self._notebook.open()
        try:
            await self._serving.until_left()
        finally:
            await self._assembly.dismiss()
            await self._notebook.close()
            await self._listener.close()

    def _send(self, message: messages.Up) -> None:
        self._notebook.send(message)

    # --- from the notebook ----------------------------------------------------------------

    def _receive(self, message: messages.Down) -> None:
        do, reply = self._serving.do, self._serving.reply
        match message:
            case messages.Run() as run:
                self._run(run)
            case messages.Ask(
                number, messages.GetStatus() | messages.GetStacks() | GetLogs() as request
            ):
                do(reply(number, rows_of, self._assembly.there, request))
            case messages.Ask(number, messages.GetRefused()):
                self._send(messages.Answer(number, self._assembly.refused))
            case messages.Ask(number, messages.Consult() as consult):
                parts = self._assembly.nodes(consult.ranks)
                do(reply(number, first_answer, parts, consult))
            case messages.Ask() as ask:
                self._serving.call(ask)
            case messages.Locate(ranks):
                do(self._locate(ranks))
            case messages.Interrupt(ranks):
                self._pass_on(message, self._transfers.stop(ranks))
            case messages.LetGo(task_id, ranks):
                self._transfers.up.let_go(ranks, task_id)
                self._pass_on(message, ranks)
            case messages.Abort(ranks) | messages.Spare(ranks):
                self._pass_on(message, ranks)
            case messages.Enter(rank):
                for node in self._assembly.nodes([rank]):
                    node.send(message)
            case messages.Received():
                if sender := self._batches.popleft():
                    sender.send(message)
            case messages.Leave():
                self._serving.leave()

    async def _answer(self, request: messages.Request) -> messages.Reply:
        match request:
            case messages.StartWorld():
                self._task_of.clear()
                return await self._assembly.start(request)
            case messages.StopWorld(grace):
                await self._assembly.stop(grace)
            case messages.Heal() | messages.Scale() | messages.Grow():
                reply = await self._assembly.change(request)
                self._task_of.clear()
                return reply
            case messages.Kill(ranks):
                parts = self._assembly.nodes(ranks).items()
                kills = (ask(node, request._replace(ranks=part)) for node, part in parts)
                await asyncio.gather(*kills)
            case messages.GetCode() | messages.PutCode():
                return await self._assembly.take_code(request)
        return None

    # --- to the nodes ---------------------------------------------------------------------

    def _pass_on(self, message: ToRanks, ranks: Iterable[int]) -> None:
        for node, part in self._assembly.nodes(ranks).items():
            node.send(message._replace(ranks=part))

    def _run(self, run: messages.Run) -> None:
        self._usage.clear()
        self._transfers.run(
            run, [node.number for node in self._assembly.nodes(run.ranks) if not node.lost]
        )

    def _send_run(self, run: messages.Run) -> None:
        for node, part in self._assembly.nodes(run.ranks).items():
            self._task_of.update(dict.fromkeys(part, run.id))
            node.send(run._replace(ranks=part))
            if node.lost:
                self._report_dead(node, part)

    async def _locate(self, ranks: Iterable[int]) -> None:
        parts = self._assembly.nodes(ranks).items()
        found = await asyncio.gather(*(node.do(LocateRanks(part)) for node, part in parts))
        places = {rank: place for each in found for rank, place in each.items()}
        self._send(messages.Located(places))

    async def _look(self, info: WorldInfo) -> WorldInfo:
        spec = self._assembly.spec
        rows = () if spec is None else await rows_of(self._assembly.there, messages.GetStatus())
        return with_ranks(info, spec, rows)

    # --- from the nodes -------------------------------------------------------------------

    def _take(self, node: Node, message: NodeUp) -> None:
        match message:
            case messages.Outputs() if node.lost:
                self._show(last_words(message), node)
            case _ if node.lost:
                log.info("%s said more after it was lost: %s", node.name, type(message).__name__)
            case messages.Answer(number, reply) | NodeAnswer(number, reply):
                node.answered(number, reply)
            case messages.Outputs() as outputs:
                outputs = self._transfers.up.moved(node.number, outputs)
                self._show(in_time_of_head(outputs, node.offset_ns), node)
            case Piece() | Taken() | Dropped():
                self._transfers.take(node.number, message)
            case messages.Aborted() as aborted:
                self._notebook.send(aborted)
            case messages.Used(usage):
                self._usage.update(usage)
                self._notebook.send(messages.Used(dict(self._usage)))
            case StoreAsk(number, operation):
                self._serving.do(self._ask_store(node, number, operation))
            case messages.Starting(up):
                self._assembly.came_up(node, up)

    async def _ask_store(self, node: Node, number: int, operation: Operation) -> None:
        node.send(StoreAnswer(number, await self._store.ask(operation)))

    def _show(self, outputs: messages.Outputs, node: Node | None) -> None:
        """Pass on a batch, and note whose it is: the notebook acknowledges them in this order."""
        for rank, task, output in outputs.items:
            if isinstance(output, Done | Died) and self._task_of.get(rank) == task:
                del self._task_of[rank]
        self._batches.append(node)
        self._notebook.send(outputs)

    def _lose(self, node: Node) -> None:
        self._report_dead(node, node.ranks)
        self._transfers.lose(node.number)

    def _report_dead(self, node: Node, ranks: Iterable[int]) -> None:
        now = time.time_ns()
        died = Died(None, now, why=f"{node.lost}: its machine counts as lost")
        items = tuple((rank, self._task_of.get(rank, ""), died) for rank in ranks)
        if items:
            self._show(messages.Outputs(items), None)


LOOK_TIMEOUT = 10.0  # seconds for nodes to say how their ranks are; longer than an agent takes

Parts = Mapping[Node, tuple[int, ...]]
"""Nodes, and ranks of each."""


async def ask(node: Node, request: messages.Request) -> Any:
    """Return what a node answers, None where it is lost."""
    try:
        return await node.ask(request, LOOK_TIMEOUT)
    except NodeLost:
        return None


async def rows_of(
    nodes: Iterable[Node], request: messages.GetStatus | messages.GetStacks | GetLogs
) -> tuple[Any, ...]:
    """Return the rows of all ranks, in their order; those of lost nodes are missing."""
    found = await asyncio.gather(*(ask(node, request) for node in nodes))
    rows = (row for rows in found for row in rows or ())
    return tuple(sorted(rows, key=lambda row: int(row.rank)))


async def first_answer(parts: Parts, consult: messages.Consult) -> Any:
    """Ask all nodes that have one of the ranks; return what one of them knows, None for nothing."""
    asked = [ask(node, consult._replace(ranks=ranks)) for node, ranks in parts.items()]
    answer = None
    for each in asyncio.as_completed(asked):
        answer = answer or await each
    return answer
