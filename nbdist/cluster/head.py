"""The head of a world on several machines, which the notebook uses like the agent of one machine.

The head runs in its own process on the notebook's machine (`nbdist.cluster.__main__`). It passes
the notebook's requests to the agents, and the agents' messages to the notebook. In the head,
`GroupFormation` starts, heals and scales the world; on one machine, the agent does this.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbdist.agent.group_formation import Formation, group_by_node, nodes_of
from nbdist.agent.listener import Listener, with_ranks
from nbdist.agent.notebook_link import NotebookLink, Serving
from nbdist.agent.step_stops import NODE_TIMEOUT, STEP_TIMEOUT, find_stop_step
from nbdist.cluster.node import (
    KeptCode,
    Node,
    NodeLost,
    NoSlots,
    attainable_size,
    place_new_world,
    resized,
    room_of,
    with_master_address,
    without_lost_nodes,
)
from nbdist.cluster.nodes import CannotStart, NodePool
from nbdist.cluster.transfer import BulkTransfers
from nbdist.config import WorldConfig
from nbdist.output.events import Clear, Died, Display, DisplayUpdate, Done, Failure, Text
from nbdist.system.processes import Guard
from nbdist.wire import messages
from nbdist.wire.control import StepCount
from nbdist.wire.log_files import GetLogs
from nbdist.wire.node_messages import HoldRanks, InterruptAt, LocateRanks, NodeUp, Observed
from nbdist.wire.queries import WorldInfo
from nbdist.wire.spec import TorchStore, WorldSpec
from nbdist.wire.store import HostedStore, Operation
from nbdist.wire.transfer import Fetch, SegmentPiece
from nbdist.wire.world_facts import Renumbering

log = logging.getLogger("nbdist.cluster")

ToRanks = messages.AbortRanks | InterruptAt | messages.ReleaseRankValues | messages.CloseDebuggers


class Head:
    """Passes messages between the notebook and the agents, and starts, heals and scales the world.

    Requests that change the world are carried out one after the other.
    """

    def __init__(self, runtime: Path, notebook_pid: int, guard: Guard) -> None:
        self._runtime = runtime
        self._store = HostedStore()
        self._pool: NodePool | None = None
        self._code = KeptCode()
        self._node_of: dict[int, int] = {}
        self._started_workers: dict[int, int] = {}
        self._progress = ""
        self._task_of: dict[int, str] = {}
        # By rank, the last task that was sent to the rank, even if the rank has finished it.
        self._last_task: dict[int, str] = {}
        # By rank, the task that ran at the last Stop, "" if none ran.
        self._stopped_tasks: dict[int, str] = {}
        # By rank, the task that will be interrupted once the head has chosen the step.
        self._pending_stops: dict[int, str] = {}
        # Ranks in `_pending_stops` that must not be killed unless Stop is pressed again.
        self._spared: set[int] = set()
        self._batch_senders: deque[Node | None] = deque()
        self._serving = Serving(self._execute, self._send)
        self._transfers = BulkTransfers(
            lambda number: self._nodes[number],
            self._send_run,
            lambda outputs: self._show(outputs, None),
            self._serving.spawn,
        )
        self._notebook = NotebookLink(
            *(runtime, notebook_pid, guard, self._receive, self._serving.stop),
            has_machines=lambda: self._present_nodes,
        )
        self._listener = Listener(
            *(runtime, self._describe, self._notebook),
            lambda request: rows_of(self._present_nodes, request),
        )

    def __repr__(self) -> str:
        return f"<Head {os.getpid()} of {len(self._node_of)} ranks, {self._pool}>"

    async def serve(self) -> None:
        """Serve the notebook and the agents until the head is shut down.

        At the end, shut down all agents, and close all connections.
        """
        asyncio.get_running_loop().set_exception_handler(self._serving.on_loop_error)
        await self._listener.open()
        await self._notebook.open()
        try:
            await self._serving.run_until_stopped()
        finally:
            await self._close_pool()
            await self._notebook.close()
            await self._listener.close()

    def _send(self, message: messages.Up) -> None:
        self._notebook.send(message)

    @property
    def _nodes(self) -> Mapping[int, Node]:
        return self._pool.nodes if self._pool else {}

    @property
    def _present_nodes(self) -> Sequence[Node]:
        return self._pool.present_nodes if self._pool else ()

    @property
    def _hosts(self) -> dict[int, str]:
        return {rank: self._nodes[number].name for rank, number in self._node_of.items()}

    def _parts(self, ranks: Iterable[int]) -> dict[Node, tuple[int, ...]]:
        """Return, by node, which of `ranks` are on the node; ranks without a node are left out."""
        parts = group_by_node(ranks, self._node_of)
        return {self._nodes[number]: part for number, part in parts.items()}

    # --- from the notebook ----------------------------------------------------------------

    def _receive(self, message: messages.Down) -> None:
        spawn, reply = self._serving.spawn, self._serving.reply
        match message:
            case messages.RunTask(ranks=ranks) as run:
                numbers = [node.number for node in self._parts(ranks) if not node.lost]
                self._transfers.run(run, numbers)
            case messages.AgentRequest(
                number,
                messages.GetStatus()
                | messages.GetStacks()
                | messages.GetSecrets()
                | GetLogs() as request,
            ):
                spawn(reply(number, rows_of, self._present_nodes, request))
            case messages.AgentRequest(number, messages.GetRefused()):
                refused = self._pool.server.refused if self._pool else 0
                self._send(messages.AgentReply(number, refused))
            case messages.AgentRequest(number, messages.Consult() as consult):
                spawn(reply(number, first_answer, self._parts(consult.ranks), consult))
            case messages.AgentRequest(number, messages.SpareRanks(ranks)):
                spawn(reply(number, self._spare, ranks))
            case messages.AgentRequest() as ask:
                self._serving.enqueue(ask)
            case messages.RequestLocations(ranks, asked):
                spawn(self._locate(ranks, asked))
            case messages.Interrupt(ranks):
                self._interrupt(self._transfers.interrupt(ranks))
            case messages.ReleaseRankValues(task_id, ranks):
                self._transfers.release_values(ranks, task_id)
                self._forward(message, ranks)
            case messages.AbortRanks(ranks) | messages.CloseDebuggers(ranks):
                self._forward(message, ranks)
            case (
                messages.SendInput(rank)
                | messages.ToWidget(rank)
                | messages.OpenDebugger(rank)
                | messages.ToDebugger(rank)
            ):
                for node in self._parts([rank]):
                    node.send(message)
            case messages.BatchAcknowledged():
                if sender := self._batch_senders.popleft():
                    sender.send(message)
            case messages.Shutdown():
                self._serving.stop()

    async def _execute(self, request: messages.RequestBody) -> messages.Reply:
        match request:
            case messages.StartWorld(spec):
                self._forget_tasks()
                return await self._start(spec)
            case messages.StopWorld(grace):
                if self._pool is not None:
                    # Drop tasks and outputs that wait for values to arrive. Do so again after the
                    # stop, as the ranks may have sent further outputs meanwhile.
                    self._transfers.forget_tasks()
                    await self._pool.forming.stop(grace)
                    self._transfers.forget_tasks()
            case messages.Heal() | messages.Scale() | messages.Grow():
                reply = await self._change(request)
                self._forget_tasks()
                return reply
            case messages.Kill(ranks):
                parts = self._parts(ranks).items()
                kills = (ask(node, request._replace(ranks=part)) for node, part in parts)
                await asyncio.gather(*kills)
            case messages.GetCode() | messages.PutCode():
                return await self._code.store(request, self._present_nodes)
        return None

    # --- to the nodes ---------------------------------------------------------------------

    def _forget_tasks(self) -> None:
        self._task_of.clear()
        self._last_task.clear()

    def _forward(self, message: ToRanks, ranks: Iterable[int]) -> None:
        for node, part in self._parts(ranks).items():
            node.send(message._replace(ranks=part))

    def _send_run(self, run: messages.RunTask) -> None:
        for node, part in self._parts(run.ranks).items():
            self._task_of.update(dict.fromkeys(part, run.id))
            self._last_task.update(dict.fromkeys(part, run.id))
            node.send(run._replace(ranks=part))
            if node.lost:
                self._report_dead(node, part)

    def _interrupt(self, ranks: Collection[int]) -> None:
        """Make the agents interrupt `ranks`, because Stop was pressed.

        The ranks are interrupted at the beginning of a common optimizer step. If there is no such
        step, or if Stop was pressed before in the same task, they are interrupted at once.
        """
        tasks = {rank: self._task_of.get(rank, "") for rank in ranks}
        self._spared.difference_update(ranks)
        if any(task and self._stopped_tasks.get(rank) == task for rank, task in tasks.items()):
            for rank in ranks:
                self._pending_stops.pop(rank, None)
            self._forward(InterruptAt(()), ranks)
        else:
            self._pending_stops |= tasks
            self._serving.spawn(self._interrupt_at_common_step(tasks))
        self._stopped_tasks.update(tasks)

    async def _spare(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Tell the agents not to kill `ranks` for ignoring Stop, until Stop is pressed again.

        Returns the spared ranks, without those that are dead or that an agent is killing already.
        """
        # The head has not yet told the agents to interrupt the ranks in `_pending_stops`. So record
        # which of them to spare, and send `SpareRanks` once `InterruptAt` has been sent.
        waiting = self._pending_stops.keys() & ranks
        self._spared |= waiting
        parts = self._parts(rank for rank in ranks if rank not in waiting).items()
        requests = (ask(node, messages.SpareRanks(part)) for node, part in parts)
        spared = [rank for answer in await asyncio.gather(*requests) for rank in answer or ()]
        return (*sorted({*waiting, *spared}),)

    async def _interrupt_at_common_step(self, tasks: Mapping[int, str]) -> None:
        deadline = time.monotonic() + STEP_TIMEOUT
        # Also ask ranks that have finished the task: the others must make as many optimizer steps
        # as these ranks, so that all replicas of the model stay equal.
        ranks = [rank for rank, task in self._last_task.items() if task in tasks.values()]
        parts = self._parts(ranks).items()
        holding = asyncio.gather(*(node.execute(HoldRanks(part)) for node, part in parts))
        counts: dict[int, StepCount | None] = dict.fromkeys(tasks)
        with suppress(TimeoutError):
            answers = await asyncio.wait_for(holding, NODE_TIMEOUT)
            counts = {rank: count for rank_counts in answers for rank, count in rank_counts.items()}
        # Leave out ranks that a second Stop has interrupted meanwhile.
        pending = [rank for rank, task in tasks.items() if self._pending_stops.get(rank) == task]
        running = [rank for rank in pending if self._task_of.get(rank, "") == tasks[rank]]
        seconds = deadline - time.monotonic()
        self._forward(InterruptAt((), find_stop_step(counts.values()), seconds), running)
        if spared := self._spared.intersection(running):
            for node, part in self._parts(spared).items():
                self._serving.spawn(ask(node, messages.SpareRanks(part)))
        self._spared.difference_update(pending)
        for rank in pending:
            del self._pending_stops[rank]

    async def _locate(self, ranks: Iterable[int], asked_at: float) -> None:
        parts = self._parts(ranks).items()
        replies = await asyncio.gather(*(node.execute(LocateRanks(part)) for node, part in parts))
        places = {rank: place for each in replies for rank, place in each.items()}
        self._send(messages.Located(places, asked_at))

    async def _describe(self, info: WorldInfo) -> WorldInfo:
        spec = self._pool.forming.spec if self._pool else None
        rows = () if spec is None else await rows_of(self._present_nodes, messages.GetStatus())
        return with_ranks(info, spec, rows)

    # --- from the nodes -------------------------------------------------------------------

    def _on_message(self, node: Node, message: NodeUp) -> None:
        match message:
            case _ if self._pool is None:
                pass  # the agents are being shut down
            case messages.Outputs() if node.lost:
                self._show(displayed_only(message), node)
            case _ if node.lost:
                log.info("%s said more after it was lost: %s", node.name, type(message).__name__)
            case messages.AgentReply(number, reply):
                node.resolve_request(number, reply)
            case messages.Outputs() as outputs:
                outputs = on_head_clock(outputs, node.offset_ns)
                self._show(self._transfers.hold_back(node.number, outputs), node)
            case Observed(rank, task, output):
                self._notebook.observe(rank, task, output)
            case Fetch() as fetch:
                self._transfers.fetch(node.number, fetch)
            case SegmentPiece() as piece:
                self._transfers.store_piece(node.number, piece)
            case messages.Aborted() | messages.UsageReport() | messages.FromDebugger():
                self._send(message)
            case messages.AgentRequest(number, operation):
                self._serving.spawn(self._ask_store(node, number, operation))
            case messages.Starting(up):
                self._started_workers[node.number] = up
                self._send(messages.Starting(sum(self._started_workers.values()), self._progress))

    async def _ask_store(self, node: Node, number: int, operation: Operation) -> None:
        node.send(messages.AgentReply(number, await self._store.ask(operation)))

    def _show(self, outputs: messages.Outputs, node: Node | None) -> None:
        """Send a batch of outputs to the notebook, and record the node from which it has come.

        The notebook acknowledges batches in the order in which they were sent, and the head passes
        each acknowledgement on to the recorded node. `node` is None if the head has made the batch.
        """
        for rank, task, output in outputs.items:
            if node is None:  # for outputs of a node, its agent sends `Observed`
                self._notebook.observe(rank, task, output)
            if isinstance(output, Done | Died) and self._task_of.get(rank) == task:
                del self._task_of[rank]
        self._batch_senders.append(node)
        self._notebook.send(outputs)

    def _on_lost(self, node: Node) -> None:
        self._report_dead(node, node.ranks)
        self._transfers.handle_node_lost(node.number)

    def _report_dead(self, node: Node, ranks: Iterable[int]) -> None:
        now = time.time_ns()
        died = Died(None, now, why=f"{node.lost}: its machine counts as lost")
        items = tuple((rank, self._task_of.get(rank, ""), died) for rank in ranks)
        if items:
            self._show(messages.Outputs(items), None)

    def _on_joined(self, node: Node) -> None:
        """Tell the notebook that a machine has joined, if the world can have more ranks now."""
        spec = self._pool.forming.spec if self._pool else None
        if (
            spec
            and self._pool
            and attainable_size(self._pool.config, self._present_nodes) > spec.world_size
        ):
            self._send(messages.NodeJoined(node.name))

    # --- the world: its start and end -------------------------------------------------------

    async def _start(self, spec: WorldSpec) -> messages.Reply:
        """Start the workers of the world, and first the agents if no present agents can be used.

        Returns `WorldFacts` or a `StartFailure`.
        """
        config = spec.config
        try:
            pool = await self._open_pool(config)
            await self._send_code()
            spec = place_new_world(spec, config, pool.present_nodes)
        except (CannotStart, NoSlots) as error:
            await self._close_pool()
            if isinstance(error, NoSlots):
                error = CannotStart(config.launcher_name, str(error))
            return error.failure
        if config.rdzv_backend and config.rdzv_endpoint:
            # The name must be unique, because several worlds may use the same rendezvous backend.
            rdzv_name = f"nbdist-{config.name}-{secrets.token_hex(8)}"
            where = config.rdzv_backend, config.rdzv_endpoint
            spec = replace(spec, torch_store=TorchStore(*where, rdzv_name))
        self._node_of = nodes_of(spec)
        self._started_workers.clear()
        self._store.begin_world()
        formed = await pool.forming.start(spec)
        if isinstance(formed, messages.StartFailure):
            return formed
        missing = formed.missing
        if hint := pool.word_rejoin_hint():
            missing += (f"{len(pool.present_nodes)} of {config.max_nodes} nodes have come. {hint}",)
        return self._notebook.record.record_start(replace(formed, missing=missing), self._hosts)

    async def _open_pool(self, config: WorldConfig) -> NodePool:
        """Return a pool whose agents can serve a world with this configuration.

        If the present pool cannot serve it, that pool is closed, and a new pool starts agents.
        Raises CannotStart or NoSlots.
        """
        if self._pool is None or not self._pool.can_serve(config):
            await self._close_pool()
            self._pool = NodePool(
                *(self._runtime, config),
                self._on_message,
                self._on_lost,
                self._on_joined,
                self._send,
            )
            await self._pool.fill(self._report_progress)
        return self._pool

    def _report_progress(self, text: str) -> None:
        if text != self._progress:
            self._progress = text
            self._send(messages.Starting(0, text))

    async def _send_code(self) -> None:
        """Send the files of the notebook's folder to the nodes that lack them.

        Does nothing without the option `--sync-code`. Raises CannotStart if a node does not get
        them.
        """
        reply = await self._code.distribute(self._present_nodes)
        if reply.problem:
            why = f"{reply.host} could not be sent the notebook's folder: {reply.problem}"
            raise CannotStart(reply.host, why)

    async def _close_pool(self) -> None:
        """Shut down all agents, and forget the machines.

        Not called when a world ends, because the next world may use the same agents. Called if the
        next world needs other agents, if agents cannot start, and when the head exits.
        """
        pool, self._pool = self._pool, None
        self._node_of.clear()
        self._transfers.close()
        if pool is not None:
            await pool.close()

    # --- the world: heal and change its size -----------------------------------------------

    async def _change(
        self, request: messages.Heal | messages.Scale | messages.Grow
    ) -> messages.Reply:
        """Heal the world or change its size; return a `Healed`, which is the answer in both cases.

        Returns None if no world was started.
        """
        if (pool := self._pool) is None or (spec := pool.forming.spec) is None:
            return None
        if isinstance(request, messages.Heal):
            formed = await self._heal(pool, spec)
        else:
            formed = await self._resize(request, pool, spec)
        self._node_of = nodes_of(formed.spec)
        # Report the hosts even if the change has failed, because ranks may have moved.
        hint = pool.word_rejoin_hint()
        return self._notebook.record.record_change(formed, self._hosts, hint)

    async def _heal(self, pool: NodePool, spec: WorldSpec) -> Formation:
        """Heal the world on the nodes that are not lost.

        If this fails, and nodes were lost or have joined meanwhile, heal again. The ranks of lost
        nodes are started on other nodes. If there is no room for them, the world becomes smaller.
        """
        forming, change = pool.forming, Renumbering.none(spec.world_size)
        # Heal again only if it failed, and nodes were lost or have joined meanwhile. The number of
        # nodes limits the number of rounds.
        for _ in range(1 + len(pool.nodes)):
            nodes = pool.present_nodes
            spec = forming.spec or spec
            size = spec.world_size
            spec, keep = without_lost_nodes(spec, pool.config, nodes)
            # If a node does not get the files, go on: only cells that need the files will fail.
            with suppress(CannotStart):
                await self._send_code()
            if not keep:
                formed = forming.unchanged(problem="all machines are lost")
                break
            whole = len(keep) == size
            formed = await (forming.heal(spec) if whole else forming.scale(spec, keep))
            change = change.then(formed.change)
            if not formed.problem or pool.present_nodes == nodes:
                break
        problem = formed.problem
        if problem and (reason := await pool.exit_reason()) and reason not in problem:
            problem = f"{problem}: {reason}"
        return replace(formed, change=change, problem=problem)

    async def _resize(
        self, request: messages.Scale | messages.Grow, pool: NodePool, before: WorldSpec
    ) -> Formation:
        """Change the number of ranks of the world, whose spec is `before`.

        A `Scale` says how many ranks the world gets. A `Grow` adds ranks on machines that have
        joined, up to the number of ranks that the user has requested.
        """
        size, keep = before.world_size, tuple(range(before.world_size))
        try:
            if isinstance(request, messages.Scale):
                size, keep = request.spec.world_size, request.keep
            else:
                size = max(attainable_size(pool.config, pool.present_nodes), size)
            await self._send_code()
            spec = resized(before, size, keep, room_of(pool.config, pool.present_nodes))
        except (NoSlots, CannotStart) as error:
            return pool.forming.unchanged(not_scaled=str(error))
        if isinstance(request, messages.Scale):
            # Record the size that the user has requested, so that the world does not grow beyond it
            # when machines join later.
            pool.config = pool.config.with_size(size)
            spec = with_master_address(spec, pool.present_nodes)
        return await pool.forming.scale(spec, keep)


NODE_STATUS_TIMEOUT = 5.0  # seconds for a node to answer; its agent has shorter timeouts

RanksByNode = Mapping[Node, tuple[int, ...]]
"""The ranks that a request is about, grouped by the nodes on which they run."""


async def ask(node: Node, request: messages.RequestBody) -> Any:
    """Send a request to a node's agent and return the answer.

    Returns None if the node is lost, or does not answer within `NODE_STATUS_TIMEOUT` seconds.
    """
    try:
        return await node.ask(request, NODE_STATUS_TIMEOUT)
    except NodeLost:
        return None


async def rows_of(
    nodes: Iterable[Node], request: messages.GetStatus | messages.OfEachRank
) -> tuple[Any, ...]:
    """Ask all nodes about their ranks; return the answers, one for each rank, sorted by rank.

    The answers for ranks of a node that does not reply are missing.
    """
    replies = await asyncio.gather(*(ask(node, request) for node in nodes))
    rows = (row for rows in replies for row in rows or ())
    return tuple(sorted(rows, key=lambda row: int(row.rank)))


async def first_answer(parts: RanksByNode, consult: messages.Consult) -> Any:
    """Ask all nodes about code that the user types; return the first answer that is not empty.

    The question is for completions, or for the description of a name. `parts` has the ranks by
    node. If all answers are empty, return the last of them.
    """
    requests = [ask(node, consult._replace(ranks=ranks)) for node, ranks in parts.items()]
    answer = None
    for each in asyncio.as_completed(requests):
        if answer := await each:
            break
    return answer


def on_head_clock(outputs: messages.Outputs, offset_ns: int) -> messages.Outputs:
    """Return a node's outputs with the times of errors and deaths converted to the head's clock.

    `offset_ns` is how many nanoseconds the node's clock is ahead. After this, the times of errors
    on several nodes can be compared.
    """
    return messages.Outputs(
        tuple(
            (rank, task, output._replace(time_ns=output.time_ns - offset_ns))
            if isinstance(output, Failure | Died)
            else (rank, task, output)
            for rank, task, output in outputs.items
        )
    )


def displayed_only(outputs: messages.Outputs) -> messages.Outputs:
    """Return only those of the outputs that ranks have printed or displayed.

    This is for late outputs of a lost machine. Its ranks were reported as dead already, so errors
    and ends of their tasks must not be reported any more.
    """
    shown = Text | Display | DisplayUpdate | Clear
    return messages.Outputs(tuple(each for each in outputs.items if isinstance(each[2], shown)))
