"""The machines of a world, from when a launcher starts their agents until they leave or are lost.

Runs in the head, which makes a `NodePool` for each world with other machines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbdist.agent.forming import Forming
from nbdist.cluster.launcher import AgentProcess, Launched, LaunchError, find_launcher, why_refused
from nbdist.cluster.node import Node, NodeLost, mismatch, room_of, targets
from nbdist.cluster.server import NodeServer, addresses, listened_at
from nbdist.config import WorldConfig
from nbdist.wire.messages import Shutdown, Silent, StartFailure
from nbdist.wire.node_messages import NodeHello, NodeUp, Reach
from nbdist.wire.spec import LINK_TIMEOUT, versions_here
from nbdist.words import count, word_exit

log = logging.getLogger("nbdist.cluster")

LAST_CALL = 1.0  # seconds after the last node has come until a start with fewer than possible
AGAIN_INTERVAL = 5.0  # seconds between two attempts to start missing agents

LAST_WORD_TIMEOUT, LAST_WORD_STEP = 3.0, 0.1
LEAVE_TIMEOUT = 5.0  # seconds for an agent to end all that it has started, once told to leave


class CannotStart(Exception):
    """An agent could not be started, or did not come."""

    def __init__(
        self, host: str, why: str, command: str = "", last_lines: tuple[str, ...] = ()
    ) -> None:
        super().__init__(why)
        self.failure = StartFailure(None, host, command, why, last_lines)


class NodePool:
    """All nodes of a world by number, with those that were lost.

    `receive` is called with each message of a node, `lose` with a node that was lost, `admit` with
    one that has come after the start, `tell` with messages for the notebook.
    """

    def __init__(
        self,
        folder: Path,
        wanted: WorldConfig,
        receive: Callable[[Node, NodeUp], None],
        lose: Callable[[Node], None],
        admit: Callable[[Node], None],
        tell: Callable[[Silent], None],
    ) -> None:
        self.wanted, self._who = wanted, _who(wanted)
        self.nodes: dict[int, Node] = {}
        self.forming = Forming(self.nodes)
        self.server = NodeServer(self._take, self._disconnected, self._miss)
        self._folder = folder
        self._receive = receive
        self._lose = lose
        self._admit_late = admit
        self._tell = tell
        self._launched = Launched((), 0)
        self._processes: list[AgentProcess] = []
        self._late: set[asyncio.Task[None]] = set()
        self._by_identity: dict[bytes, Node] = {}
        self._failures: list[CannotStart] = []
        self._came = asyncio.Event()
        self._has_begun = self._is_leaving = False

    def __repr__(self) -> str:
        return f"<NodePool {[*self.nodes.values()]} {self.server}>"

    @property
    def there(self) -> list[Node]:
        """The nodes that are not lost, in order."""
        return [node for _, node in sorted(self.nodes.items()) if not node.lost]

    def will_do(self, wanted: WorldConfig) -> bool:
        """Return True if a world of this configuration can use the present nodes.

        They must be enough, and as many as are possible if no further node can come.
        """
        if _who(wanted) != self._who:
            return False
        self.wanted = wanted
        return len(self.there) >= wanted.min_nodes and not (self._is_final and self._is_short)

    def word_rejoin_hint(self) -> str:
        """Return how the user can let missing nodes come; "" if none are missing.

        Also "" if they come by themselves.
        """
        if not self._is_short:
            return ""
        if self._is_final:
            return (
                f"With `--launcher {self.wanted.launched_by}` machines come at the start alone: "
                "`%dist_restart` asks for all again, with new workers."
            )
        invitation = self._launched.invitation
        return f"`{invitation}` on a machine has it come." if invitation else ""

    @property
    def _is_final(self) -> bool:
        """Whether no further node can come, and no lost one again."""
        return self._launched.again is None and not self._launched.invitation

    @property
    def _is_short(self) -> bool:
        """Whether there are fewer nodes than are possible, or than there were."""
        # Never give up an allocation for another one because it has fewer nodes than possible.
        most = None if self.wanted.salloc else self.wanted.max_nodes
        return len(self.there) < (most or len(self.nodes))

    async def fill(self, report: Callable[[str], None]) -> None:
        """Start agents and wait until they have come; raises CannotStart.

        `report` is called with a line on the progress.
        """
        wanted = self.wanted
        try:
            seconds = wanted.link_timeout or LINK_TIMEOUT
            self.server.open(*listened_at(wanted.address), link_timeout=seconds)
            ticket = self.server.ticket(addresses(wanted.address), fork=wanted.fork)
            launcher = find_launcher(wanted.launched_by)
            self._launched = await asyncio.to_thread(launcher.launch, wanted, ticket, self._folder)
        except (OSError, LaunchError) as error:
            raise CannotStart(wanted.launched_by, str(error)) from None
        for process in self._launched.processes:
            self._watch(process)
        await self._until_all_came(report)
        await asyncio.gather(*map(_read_clock, self.there))
        if wanted.backend != "none":
            await self._check_ways()
        self._has_begun = True
        if self._launched.again is not None:
            self._do_late(self._try_again())

    def _watch(self, process: AgentProcess) -> None:
        self._processes.append(process)
        asyncio.get_running_loop().add_reader(process.fileno(), self._ended, process)

    def _do_late(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def close(self) -> None:
        """Make all agents leave, and end the processes that were started for them."""
        self._is_leaving = True
        for node in self.there:
            node.send(Shutdown())
        loop, late = asyncio.get_running_loop(), [*self._late]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        processes = self._processes
        for process in processes:
            loop.remove_reader(process.fileno())
        ends = (asyncio.to_thread(process.end, LEAVE_TIMEOUT) for process in processes)
        await asyncio.gather(*ends)
        for process in processes:
            process.close()
        with suppress(OSError):
            await asyncio.to_thread(self._launched.close)
        for node in self.there:
            node.lose("the world has ended")
        await self.server.close()

    # --- nodes that come -----------------------------------------------------------------------

    async def _until_all_came(self, report: Callable[[str], None]) -> None:
        launched, wanted = self._launched, self.wanted
        # Without a number of nodes, all nodes that exist were asked for.
        least = wanted.min_nodes if wanted.max_nodes and wanted.min_nodes < launched.nodes else 0
        awaited = Awaited(launched.nodes, wanted.workers, launched.invitation, least)
        end = asyncio.get_running_loop().time() + launched.arrive_timeout
        while not awaited.are_enough(room := self._room()):
            report(launched.news() or awaited.text(room))
            self._came.clear()
            if len(self._failures) > (launched.nodes - least if least else 0):
                raise self._failures[0]
            if (left := end - asyncio.get_running_loop().time()) <= 0:
                there = {node.number for node in self.there}
                hosts = [host for at, host in enumerate(launched.hosts) if at not in there]
                missing = ", ".join(hosts) or count(launched.nodes - len(there), "node")
                why = f"no agent came from there within {launched.arrive_timeout:.0f} s"
                raise CannotStart(missing, why)
            try:
                await asyncio.wait_for(self._came.wait(), min(left, LAST_CALL))
            except TimeoutError:
                if awaited.will_do(room):
                    break
        report(awaited.text(room))

    def _room(self) -> dict[str, int]:
        """Return, by node name, the number of workers for which each present node has room."""
        room, found = room_of(self.wanted, self.there), dict[str, int]()
        names = [node.name for node in self.there]
        for node in self.there:
            is_alone = names.count(node.name) == 1
            found[node.name if is_alone else f"{node.name} #{node.number}"] = room[node.number]
        return found

    async def _check_ways(self) -> None:
        """Check that machines can reach one another; raises CannotStart."""
        there = self.there
        tried = targets(there)
        asked = (node.do(Reach(tried[node.number])) for node in there)
        problems = await asyncio.gather(*asked)
        for node, problem in zip(there, problems, strict=True):
            if problem:
                why = (
                    f"{node.name} cannot reach {problem}; gloo and nccl connect all machines, at "
                    "ports that the kernel chooses. A firewall has to let these through; "
                    "`--address` chooses another network of the notebook's machine; "
                    "`--backend none` needs no connections"
                )
                raise CannotStart(node.name, why)

    async def _try_again(self) -> None:
        """Try for ever to start agents on hosts whose agent was lost, or could not be started."""
        launched = self._launched
        assert launched.again is not None
        while True:
            await asyncio.sleep(AGAIN_INTERVAL)
            busy = {process.host for process in self._processes}
            there = {node.number for node in self.there}
            for number, host in enumerate(launched.hosts):
                if host not in busy and number not in there:
                    with suppress(OSError):
                        self._watch(launched.again(number))

    async def _take_late(self, node: Node) -> None:
        await _read_clock(node)
        if not node.lost:
            self._admit_late(node)

    def _take(self, identity: bytes, message: NodeUp) -> None:
        if isinstance(message, NodeHello):
            self._admit(identity, message)
        elif identity in self._by_identity:
            self._receive(self._by_identity[identity], message)

    def _admit(self, identity: bytes, hello: NodeHello) -> None:
        number = self._number_for(hello)
        hosts = self._launched.hosts
        name = hosts[number] if number < len(hosts) else hello.facts.name
        node = Node(number, name, hello, lambda message: self.server.send(identity, message))
        if why := mismatch(name, hello, versions_here()):
            self._fail(CannotStart(name, why))
            node.send(Shutdown())
            return
        self._by_identity[identity] = node
        self.nodes[number] = node
        self._came.set()
        if self._has_begun:
            self._do_late(self._take_late(node))

    def _number_for(self, hello: NodeHello) -> int:
        """Return the number for a node: the one that it had before it was lost, or a new one."""
        number, name = hello.facts.number, hello.facts.name
        lost = {each.facts.name: each.number for each in self.nodes.values() if each.lost}
        if number < 0:
            number = lost.get(name, -1)
        if number < 0 or (number in self.nodes and not self.nodes[number].lost):
            number = next(each for each in range(len(self.nodes) + 1) if each not in self.nodes)
        return number

    # --- nodes that are lost -------------------------------------------------------------------

    async def last_word(self) -> str:
        """Return why the command that runs all nodes has ended, if it ends soon; else ""."""
        loop = asyncio.get_running_loop()
        of_all = [process for process in self._processes if not process.host]
        end = loop.time() + LAST_WORD_TIMEOUT
        while of_all and loop.time() < end:
            if said := _complaint(of_all):
                return said
            await asyncio.sleep(LAST_WORD_STEP)
        return ""

    def _miss(self, identities: Collection[bytes]) -> None:
        found = (self._by_identity.get(identity) for identity in identities)
        names = tuple(sorted(node.name for node in found if node is not None and not node.lost))
        self._tell(Silent(names, self.server.link_timeout))

    def _disconnected(self, identity: bytes) -> None:
        node = self._by_identity.pop(identity, None)
        if node is not None:
            mine = [each for each in self._processes if each.host in ("", node.name)]
            why = _complaint(mine) or f"the connection to {node.name} was lost"
            self._note_loss(node, why)

    def _ended(self, process: AgentProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.fileno())
        code = process.exit_code() or 0
        lines = tuple(process.last_lines())
        why = why_refused(process.host, lines, process.command) or f"it {word_exit(code)}"
        mine = [node for node in self.there if process.host in ("", node.name)]
        said = process.complaint()
        ended = "ssh to" if process.command.startswith("ssh ") else "the agent on"
        for node in mine:
            self._note_loss(node, said or f"{ended} {node.name} has ended")
        if self._launched.again is not None:
            self._processes.remove(process)
            process.close()
        if self._has_begun:
            return
        if not mine and said:
            self._fail(CannotStart(process.host, said))
        elif not mine:
            self._fail(CannotStart(process.host, why, process.command, lines))

    def _note_loss(self, node: Node, why: str) -> None:
        if not node.lost and not self._is_leaving:
            log.warning("%s", why)
            node.lose(why)
            self._lose(node)
            for process in self._processes:
                if process.host == node.name and process.exit_code() is None:
                    self._do_late(asyncio.to_thread(process.end, 0.0))

    def _fail(self, failure: CannotStart) -> None:
        self._failures.append(failure)
        self._came.set()


def _who(wanted: WorldConfig) -> tuple[object, ...]:
    """Return the options that decide which machines a world has, but not those for its ranks."""
    started_by = wanted.launched_by, wanted.named_hosts, wanted.salloc, wanted.wrap
    size, python = (wanted.min_nodes, wanted.max_nodes), (wanted.python, wanted.fork)
    return *started_by, *size, *python, wanted.address, wanted.link_timeout


async def _read_clock(node: Node) -> None:
    with suppress(NodeLost):
        await node.set_clock()


def _complaint(processes: Sequence[AgentProcess]) -> str:
    return next(filter(None, (process.complaint() for process in processes)), "")


@dataclass(frozen=True, slots=True)
class Awaited:
    """The nodes that a start waits for; with an `invitation`, also room for `workers`.

    `invitation` is the command by which a user lets a machine join, "" if a launcher starts them.
    `least` nodes are enough if the others do not come at the same time.
    """

    nodes: int
    workers: int | None = None
    invitation: str = ""
    least: int = 0

    def will_do(self, room: Mapping[str, int]) -> bool:
        """Return True if the world can start without the nodes that are missing."""
        return 0 < self.least <= len(room) and not self.invitation

    def are_enough(self, room: Mapping[str, int]) -> bool:
        """Return True if no further node is needed; `room` has the workers of each by name."""
        if len(room) < self.nodes:
            return False
        return not self.invitation or self.workers is None or sum(room.values()) >= self.workers

    def text(self, room: Mapping[str, int]) -> str:
        """Return `1 of 2 nodes: a (4)`, and what the user has to do for the others."""
        hosts = ", ".join(f"{name} ({number})" for name, number in room.items())
        text = f"{len(room)} of {count(self.nodes, 'node')}"
        if self.invitation and self.workers is not None:
            text = f"{sum(room.values())} of {count(self.workers, 'worker')}"
        text += f": {hosts}" if hosts else ""
        if self.invitation and not self.are_enough(room):
            return f"run `{self.invitation}` on each machine · {text}"
        return text
