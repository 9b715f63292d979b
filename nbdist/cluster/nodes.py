"""The machines of a world: starts agents on them, and notices when agents join, exit or are lost.

Runs in the head. When a world has ended, the head keeps its `NodePool` for the next world, which
may use the same machines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbdist.agent.group_formation import GroupFormation
from nbdist.cluster.launcher import (
    Launched,
    LauncherProcess,
    LaunchError,
    find_launcher,
    why_refused,
)
from nbdist.cluster.node import Node, NodeLost, lack_of_room, mismatch, room_of, targets
from nbdist.cluster.server import NodeServer, addresses, listen_addresses
from nbdist.config import WorldConfig
from nbdist.wire.messages import Shutdown, StartFailure, UnresponsiveHosts
from nbdist.wire.node_messages import NodeHello, NodeUp, ProbeTarget, Reach
from nbdist.wire.spec import LINK_TIMEOUT, versions_here
from nbdist.words import count, word_exit

log = logging.getLogger("nbdist.cluster")

LAST_CALL = 1.0
"""If enough nodes have joined, and no other node joins for this many seconds, the world starts."""

AGAIN_INTERVAL = 5.0  # seconds between two attempts to start missing agents
MAX_REFUSED_PAUSE = 60.0  # seconds at most until the agent of a refused node is started again

# Seconds to wait for the reason why a launcher's command has ended, and between two checks.
LAST_WORD_TIMEOUT, LAST_WORD_STEP = 3.0, 0.1
NODE_LEAVE_TIMEOUT = 5.0  # seconds after `Shutdown` for an agent to end its processes, and exit


class CannotStart(Exception):
    """Raised if a world cannot start, for example because an agent did not connect.

    `failure` is the message that the notebook gets.
    """

    def __init__(
        self, host: str, why: str, command: str = "", last_lines: tuple[str, ...] = ()
    ) -> None:
        super().__init__(why)
        self.failure = StartFailure(None, host, command, why, last_lines)


class NodePool:
    """All machines of a world, and the processes that have started agents there.

    `nodes` has the machines by number, also lost ones. The pool calls `on_message` with each
    message of a node after the first (`NodeHello`), `on_lost` when a node is lost, and `on_joined`
    when a node joins after the start. While nodes are silent, the pool calls `notify` repeatedly
    with their names. When no node is silent any more, it calls `notify` once with no names.
    """

    def __init__(
        self,
        folder: Path,
        config: WorldConfig,
        on_message: Callable[[Node, NodeUp], None],
        on_lost: Callable[[Node], None],
        on_joined: Callable[[Node], None],
        notify: Callable[[UnresponsiveHosts], None],
    ) -> None:
        self.config, self._machine_options = config, _machine_options(config)
        self.nodes: dict[int, Node] = {}
        self.forming = GroupFormation(self.nodes)
        self.server = NodeServer(self._handle_message, self._handle_disconnect, self._report_silent)
        self._folder = folder
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_joined = on_joined
        self._notify = notify
        self._launched = Launched((), 0)
        self._processes: list[LauncherProcess] = []
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._by_identity: dict[bytes, Node] = {}
        self._failures: list[CannotStart] = []
        # By the number of a refused node: when its agent may be started again, and the length of
        # the last pause in seconds.
        self._refused: dict[int, tuple[float, float]] = {}
        self._changed = asyncio.Event()
        self._has_started = self._is_closing = False

    def __repr__(self) -> str:
        return f"<NodePool {[*self.nodes.values()]} {self.server}>"

    @property
    def present_nodes(self) -> list[Node]:
        """The nodes that are not lost, sorted by number."""
        return [node for _, node in sorted(self.nodes.items()) if not node.lost]

    def can_serve(self, config: WorldConfig) -> bool:
        """Return True if the present nodes can be used for a new world with the given `config`.

        Returns False if `config` requests other machines or agents (`_machine_options`), if fewer
        than `config.min_nodes` nodes are present, or if nodes are missing and no node can join any
        more. Except in the first case, `config` replaces the pool's own `config`.
        """
        if _machine_options(config) != self._machine_options:
            return False
        self.config = config
        return len(self.present_nodes) >= config.min_nodes and not (
            self._is_final and self._is_short
        )

    def word_rejoin_hint(self) -> str:
        """Return a sentence that tells the user how missing nodes can join.

        Returns "" if no node is missing, or if the head itself starts agents on missing nodes.
        """
        if not self._is_short:
            return ""
        if self._is_final:
            return (
                f"With `--launcher {self.config.launcher_name}` machines come at the start alone: "
                "`%dist_restart` asks for all again, with new workers."
            )
        invitation = self._launched.invitation
        return f"`{invitation}` on a machine has it come." if invitation else ""

    @property
    def _is_final(self) -> bool:
        """Whether neither a new node nor a lost node can join any more."""
        return self._launched.again is None and not self._launched.invitation

    @property
    def _is_short(self) -> bool:
        """Whether nodes are missing, so that the world could have more nodes than are present.

        If the options limit the number of nodes (`config.max_nodes`), this is True if fewer nodes
        are present. Without a limit, it is True if any node is lost.
        """
        # With `--salloc` the maximum does not count: if Slurm has granted fewer nodes, this is no
        # reason to ask for another allocation.
        possible = None if self.config.salloc else self.config.max_nodes
        return len(self.present_nodes) < (possible or len(self.nodes))

    async def fill(self, report: Callable[[str], None]) -> None:
        """Start agents, and wait until enough of them have connected.

        Then check that each machine can connect to some others, unless the backend is "none".
        `report` is called repeatedly with a line on the progress. Raises CannotStart or NoSlots.
        """
        config = self.config
        try:
            seconds = config.link_timeout or LINK_TIMEOUT
            self.server.open(*listen_addresses(config.address), link_timeout=seconds)
            ticket = self.server.ticket(addresses(config.address), fork=config.fork)
            launcher = find_launcher(config.launcher_name)
            self._launched = await asyncio.to_thread(launcher.launch, config, ticket, self._folder)
        except (OSError, LaunchError) as error:
            raise CannotStart(config.launcher_name, str(error)) from None
        for process in self._launched.processes:
            self._watch_process(process)
        await self._wait_for_nodes(report)
        nodes = self.present_nodes
        await asyncio.gather(*map(_read_clock, nodes))
        if config.backend != "none":
            await self._check_connections(nodes)
        if lost := next((node for node in nodes if node.lost), None):
            raise CannotStart(lost.name, lost.lost)
        self._has_started = True
        if self._launched.again is not None:
            self._run_in_background(self._restart_missing_agents())

    def _watch_process(self, process: LauncherProcess) -> None:
        self._processes.append(process)
        asyncio.get_running_loop().add_reader(process.fileno(), self._handle_process_exit, process)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)

    async def close(self) -> None:
        """Shut down all agents, and end the launcher's processes."""
        self._is_closing = True
        for node in self.present_nodes:
            node.send(Shutdown())
        loop, background = asyncio.get_running_loop(), [*self._background_tasks]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        processes = self._processes
        for process in processes:
            loop.remove_reader(process.fileno())
        exits = (asyncio.to_thread(process.end, NODE_LEAVE_TIMEOUT) for process in processes)
        await asyncio.gather(*exits)
        for process in processes:
            process.close()
        with suppress(OSError):
            await asyncio.to_thread(self._launched.close)
        for node in self.present_nodes:
            node.mark_lost("the world has ended")
        await self.server.close()

    # --- nodes that join -----------------------------------------------------------------------

    async def _wait_for_nodes(self, report: Callable[[str], None]) -> None:
        launched, config = self._launched, self.config
        # How many nodes are enough if the user has allowed the world to start with fewer nodes than
        # the launcher starts; 0 means that all of them must join.
        minimum = config.min_nodes if config.max_nodes and config.min_nodes < launched.nodes else 0
        awaited = Awaited(launched.nodes, config.workers, launched.invitation, minimum)
        deadline = asyncio.get_running_loop().time() + launched.arrive_timeout
        while not awaited.is_complete(room := self._workers_by_name()):
            report(launched.news() or awaited.text(room))
            self._changed.clear()
            if len(self._failures) > (launched.nodes - minimum if minimum else 0):
                raise self._failures[0]
            if (seconds_left := deadline - asyncio.get_running_loop().time()) <= 0:
                present = {node.number for node in self.present_nodes}
                hosts = [host for at, host in enumerate(launched.hosts) if at not in present]
                missing = ", ".join(hosts) or count(launched.nodes - len(present), "node")
                why = f"no agent came from there within {launched.arrive_timeout:.0f} s"
                raise CannotStart(missing, why)
            try:
                await asyncio.wait_for(self._changed.wait(), min(seconds_left, LAST_CALL))
            except TimeoutError:
                if awaited.can_start_without_rest(room):
                    break
        report(awaited.text(room))

    def _workers_by_name(self) -> dict[str, int]:
        """Return for how many workers each present node has room, by a unique name of the node.

        Nodes with equal names get their number as a suffix.
        """
        room, rooms = room_of(self.config, self.present_nodes), dict[str, int]()
        names = [node.name for node in self.present_nodes]
        for node in self.present_nodes:
            is_alone = names.count(node.name) == 1
            rooms[node.name if is_alone else f"{node.name} #{node.number}"] = room[node.number]
        return rooms

    async def _check_connections(self, nodes: Sequence[Node]) -> None:
        """Make each machine try to connect to some others (`targets`).

        Raises CannotStart if a machine cannot reach another, or does not answer.
        """
        targets_by_node = targets(nodes)
        checks = (_find_unreached(node, targets_by_node[node.number]) for node in nodes)
        problems = await asyncio.gather(*checks)
        for node, problem in zip(nodes, problems, strict=True):
            if problem:
                why = (
                    f"{node.name} cannot reach {problem}; gloo and nccl connect all machines, at "
                    "ports that the kernel chooses. A firewall has to let these through; "
                    "`--address` chooses another network of the notebook's machine; "
                    "`--backend none` needs no connections"
                )
                raise CannotStart(node.name, why)

    async def _restart_missing_agents(self) -> None:
        """Look every few seconds for hosts without an agent, and start their agents again.

        Runs until the pool is closed. The agent of a node that was refused, for example because of
        its versions, is started after longer and longer pauses (`_pause_restarts`).
        """
        launched, loop = self._launched, asyncio.get_running_loop()
        assert launched.again is not None
        while True:
            await asyncio.sleep(AGAIN_INTERVAL)
            running_hosts = {process.host for process in self._processes}
            present = {node.number for node in self.present_nodes}
            for number, host in enumerate(launched.hosts):
                start_at, _ = self._refused.get(number, (0.0, 0.0))
                is_missing = host not in running_hosts and number not in present
                if is_missing and loop.time() >= start_at:
                    with suppress(OSError):
                        self._watch_process(launched.again(number))

    async def _admit_late_node(self, node: Node) -> None:
        await _read_clock(node)
        if not node.lost:
            self._on_joined(node)

    def _handle_message(self, identity: bytes, message: NodeUp) -> None:
        if isinstance(message, NodeHello):
            self._add_node(identity, message)
        elif identity in self._by_identity:
            self._on_message(self._by_identity[identity], message)

    def _add_node(self, identity: bytes, hello: NodeHello) -> None:
        number = self._number_for(hello)
        hosts = self._launched.hosts
        name = hosts[number] if number < len(hosts) else hello.facts.name
        node = Node(number, name, hello, lambda message: self.server.send(identity, message))
        why = mismatch(name, hello, versions_here())
        if not why and self._has_started:
            why = lack_of_room(self.config, node)
        if why:
            log.warning("%s was refused: %s", name, why)
            self._record_failure(CannotStart(name, why))
            self._pause_restarts(number)
            node.send(Shutdown())
            return
        self._refused.pop(number, None)
        self._by_identity[identity] = node
        self.nodes[number] = node
        self._changed.set()
        if self._has_started:
            self._run_in_background(self._admit_late_node(node))

    def _pause_restarts(self, number: int) -> None:
        """Set the earliest time at which the agent of a refused node is started again.

        Each pause is twice as long as the last one, but at most `MAX_REFUSED_PAUSE` seconds.
        """
        _, last_pause = self._refused.get(number, (0.0, AGAIN_INTERVAL))
        pause = min(2 * last_pause, MAX_REFUSED_PAUSE)
        self._refused[number] = asyncio.get_running_loop().time() + pause, pause

    def _number_for(self, hello: NodeHello) -> int:
        """Return the number for a node that joins.

        By default this is the number that the launcher has given, or the number that the node had
        before it was lost. If it has neither, or if another node has the number now, return a
        number that no node has had.
        """
        number, name = hello.facts.number, hello.facts.name
        lost = {each.facts.name: each.number for each in self.nodes.values() if each.lost}
        if number < 0:
            number = lost.get(name, -1)
        if number < 0 or (number in self.nodes and not self.nodes[number].lost):
            number = next(each for each in range(len(self.nodes) + 1) if each not in self.nodes)
        return number

    # --- nodes that are lost -------------------------------------------------------------------

    async def exit_reason(self) -> str:
        """Return why the command that has started all agents, such as `srun`, has ended.

        Waits up to `LAST_WORD_TIMEOUT` seconds for the command to write the reason. Returns "" if
        it does not write one, or if each agent was started by a command of its own.
        """
        loop = asyncio.get_running_loop()
        shared = [process for process in self._processes if not process.host]
        deadline = loop.time() + LAST_WORD_TIMEOUT
        while shared and loop.time() < deadline:
            if reason := _first_complaint(shared):
                return reason
            await asyncio.sleep(LAST_WORD_STEP)
        return ""

    def _report_silent(self, identities: Collection[bytes]) -> None:
        nodes = (self._by_identity.get(identity) for identity in identities)
        names = tuple(sorted(node.name for node in nodes if node is not None and not node.lost))
        self._notify(UnresponsiveHosts(names, self.server.link_timeout))

    def _handle_disconnect(self, identity: bytes) -> None:
        node = self._by_identity.pop(identity, None)
        if node is not None:
            processes = [each for each in self._processes if each.host in ("", node.name)]
            why = _first_complaint(processes) or f"the connection to {node.name} was lost"
            self._mark_lost(node, why)

    def _handle_process_exit(self, process: LauncherProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.fileno())
        code = process.exit_code() or 0
        lines = tuple(process.last_lines())
        why = why_refused(process.host, lines, process.command) or f"it {word_exit(code)}"
        nodes = [node for node in self.present_nodes if process.host in ("", node.name)]
        complaint = process.complaint()
        subject = "ssh to" if process.command.startswith("ssh ") else "the agent on"
        for node in nodes:
            self._mark_lost(node, complaint or f"{subject} {node.name} has ended")
        if self._launched.again is not None:
            self._processes.remove(process)
            process.close()
        if self._has_started:
            return
        if not nodes and complaint:
            self._record_failure(CannotStart(process.host, complaint))
        elif not nodes:
            self._record_failure(CannotStart(process.host, why, process.command, lines))

    def _mark_lost(self, node: Node, why: str) -> None:
        if not node.lost and not self._is_closing:
            log.warning("%s", why)
            node.mark_lost(why)
            self._on_lost(node)
            for process in self._processes:
                if process.host == node.name and process.exit_code() is None:
                    self._run_in_background(asyncio.to_thread(process.end, 0.0))

    def _record_failure(self, failure: CannotStart) -> None:
        self._failures.append(failure)
        self._changed.set()


def _machine_options(config: WorldConfig) -> tuple[object, ...]:
    """Return the options that say which machines are used and how their agents are started.

    If two configurations have equal values of these options, their worlds can use the same agents.
    """
    started_by = config.launcher_name, config.named_hosts, config.salloc, config.wrap
    size, python = (config.min_nodes, config.max_nodes), (config.python, config.fork)
    return *started_by, *size, *python, config.address, config.link_timeout


async def _read_clock(node: Node) -> None:
    with suppress(NodeLost):
        await node.measure_clock()


async def _find_unreached(node: Node, targets: Sequence[ProbeTarget]) -> str:
    """Ask a node whether it can reach all targets; return "", or the target out of reach, and why.

    Raises CannotStart if the node is lost or does not answer.
    """
    request = Reach(tuple(targets))
    try:
        return str(await node.ask(request, request.timeout))
    except NodeLost as lost:
        raise CannotStart(node.name, str(lost)) from None


def _first_complaint(processes: Sequence[LauncherProcess]) -> str:
    return next(filter(None, (process.complaint() for process in processes)), "")


@dataclass(frozen=True, slots=True)
class Awaited:
    """How many nodes must join before a world starts.

    The start waits for `nodes` nodes. If `least` is not 0, then `least` nodes are enough once no
    further node has joined for `LAST_CALL` seconds. If machines join by a command that the user
    runs, `invitation` is this command. The start then waits for all nodes, and until they have room
    for the number of `workers`, if it is given.
    """

    nodes: int
    workers: int | None = None
    invitation: str = ""
    least: int = 0

    def can_start_without_rest(self, room: Mapping[str, int]) -> bool:
        """Return True if the nodes that have joined are enough, although others are missing.

        `room` says, by the name of each node that has joined, how many workers fit on the node.
        """
        return 0 < self.least <= len(room) and not self.invitation

    def is_complete(self, room: Mapping[str, int]) -> bool:
        """Return True if the start need not wait for further nodes.

        `room` says, by the name of each node that has joined, how many workers fit on the node.
        """
        if len(room) < self.nodes:
            return False
        return not self.invitation or self.workers is None or sum(room.values()) >= self.workers

    def text(self, room: Mapping[str, int]) -> str:
        """Return a line on the progress, such as `1 of 2 nodes: a (4)`.

        In this line, `a` is a node that has joined, with room for 4 workers. As long as the user
        has to run the command `invitation` on more machines, the line begins with this command.
        """
        hosts = ", ".join(f"{name} ({number})" for name, number in room.items())
        text = f"{len(room)} of {count(self.nodes, 'node')}"
        if self.invitation and self.workers is not None:
            text = f"{sum(room.values())} of {count(self.workers, 'worker')}"
        text += f": {hosts}" if hosts else ""
        if self.invitation and not self.is_complete(room):
            return f"run `{self.invitation}` on each machine · {text}"
        return text
