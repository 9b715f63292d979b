"""The world of a head: which agents it has, the group that its ranks form, and who sits where.

With it the notebook's folder, from where each node gets what it lacks, also when it comes later
and the notebook has gone; and what several nodes say, as one agent would say it.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nbdist.agent.forming import Forming, nodes_of, shares
from nbdist.cluster.node import (
    Node,
    NodeLost,
    NoSeats,
    full_size,
    led_by_first,
    resized,
    room_of,
    seated,
    without,
)
from nbdist.cluster.nodes import CannotStart, NodePool
from nbdist.cluster.transfer import BulkTransfers
from nbdist.config import WorldConfig
from nbdist.output.events import Clear, Died, Display, Failure, Text, Update
from nbdist.wire import messages
from nbdist.wire.messages import CodeFile, part_of
from nbdist.wire.node_messages import NodeUp
from nbdist.wire.spec import TorchStore, WorldSpec
from nbdist.wire.store import HostedStore


class Assembly:
    """Starts the world, heals it, and makes it another size: one call at a time.

    `take` gets what agents say, `lose` those that are lost; `tell` is for the notebook.  Ranks
    meet in `store`; what is under way in `transfers` ends when all agents leave.
    """

    def __init__(
        self,
        runtime: Path,
        store: HostedStore,
        transfers: BulkTransfers,
        take: Callable[[Node, NodeUp], None],
        lose: Callable[[Node], None],
        tell: Callable[[messages.Up], None],
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._transfers = transfers
        self._take, self._lose, self._tell = take, lose, tell
        self._pool: NodePool | None = None
        self._who: tuple[object, ...] = ()
        self._wanted: WorldConfig | None = None
        self._forming: Forming | None = None
        self._code = KeptCode()
        self._node_of: dict[int, int] = {}
        self._up: dict[int, int] = {}
        self._coming = ""

    def __repr__(self) -> str:
        return f"<Assembly of {len(self._node_of)} ranks, {self._pool}>"

    @property
    def spec(self) -> WorldSpec | None:
        """What the workers have in common, None before the first start."""
        return self._forming.spec if self._forming else None

    @property
    def there(self) -> Sequence[Node]:
        """The nodes that are not lost, in order."""
        return self._pool.there if self._pool else ()

    @property
    def refused(self) -> int:
        """How many connections had no right key."""
        return self._pool.server.refused if self._pool else 0

    def node(self, number: int) -> Node:
        """Return the node of this number, lost or not."""
        assert self._pool is not None
        return self._pool.nodes[number]

    def nodes(self, ranks: Iterable[int]) -> dict[Node, tuple[int, ...]]:
        """Return the nodes on which these ranks are, with those of each."""
        nodes = self._pool.nodes if self._pool else {}
        return {nodes[number]: part for number, part in shares(ranks, self._node_of).items()}

    @property
    def _hosts(self) -> dict[int, str]:
        nodes = self._pool.nodes if self._pool else {}
        return {rank: nodes[number].name for rank, number in self._node_of.items()}

    # --- start and end --------------------------------------------------------------------

    async def start(self, request: messages.StartWorld) -> messages.Reply:
        """Gather agents, and start the workers there; return that world, or the failure."""
        assert request.wanted is not None
        try:
            pool = await self._gather(request.wanted)
            await self._bring_code()
            spec = seated(request.spec, request.wanted, pool.there)
        except (CannotStart, NoSeats) as error:
            await self.dismiss()
            if isinstance(error, NoSeats):
                error = CannotStart(request.wanted.launched_by, str(error))
            return error.failure
        if self._forming is None:
            self._forming = Forming(pool.nodes)
        if request.wanted.rdzv_backend and request.wanted.rdzv_endpoint:
            # A new place in the user's own rendezvous.
            place = f"nbdist-{request.wanted.name}-{secrets.token_hex(8)}"
            where = request.wanted.rdzv_backend, request.wanted.rdzv_endpoint
            spec = replace(spec, torch_store=TorchStore(*where, place))
        self._node_of = nodes_of(spec)
        self._up.clear()
        self._store.begin_world()
        started = await self._forming.start(spec)
        if isinstance(started, messages.StartFailure):
            return started
        lacks = started.lacks
        if back := pool.word_way_back(request.wanted):
            lacks += (f"{len(pool.there)} of {request.wanted.max_nodes} nodes have come. {back}",)
        return replace(started, spec=spec, hosts=self._hosts, lacks=lacks)

    async def stop(self, grace: float) -> None:
        """End all workers; agents stay for those that may be started next."""
        if self._forming is not None:
            await self._forming.stop(grace)

    async def dismiss(self) -> None:
        """Make all agents leave."""
        pool, self._pool, self._forming = self._pool, None, None
        self._node_of.clear()
        self._transfers.close()
        if pool is not None:
            await pool.close()

    async def _gather(self, wanted: WorldConfig) -> NodePool:
        """Start agents on the machines that are wanted, unless those that are there will do."""
        pool = self._pool
        if pool is None or not pool.will_do(wanted) or _who(wanted) != self._who:
            await self.dismiss()
            self._who = _who(wanted)
            pool = self._pool = NodePool(
                self._runtime, self._take, self._lose, self._admit, self._tell
            )
            await pool.fill(wanted, self._report_coming)
        self._wanted = wanted
        return pool

    def _report_coming(self, text: str) -> None:
        if text != self._coming:
            self._coming = text
            self._tell(messages.Starting(0, text))

    def came_up(self, node: Node, number: int) -> None:
        """Note how many workers of this node are up."""
        self._up[node.number] = number
        self._tell(messages.Starting(sum(self._up.values()), self._coming))

    # --- the notebook's code ----------------------------------------------------------------

    async def take_code(self, request: messages.GetCode | messages.PutCode) -> messages.Reply:
        """Take in what the notebook's files are now, and bring it to all nodes."""
        self._code.take(request)
        return await self._code.bring(self.there)

    async def _bring_code(self) -> None:
        """Bring the notebook's folder to nodes that have come since; raises CannotStart."""
        held = await self._code.bring(self.there)
        if held.problem:
            why = f"{held.host} could not be sent the notebook's folder: {held.problem}"
            raise CannotStart(held.host, why)

    # --- other workers than before ------------------------------------------------------------

    async def change(
        self, request: messages.Heal | messages.Scale | messages.Grow
    ) -> messages.Reply:
        """Make it whole, or as large as is asked, or as it can be now; None where there is none."""
        forming, pool, wanted = self._forming, self._pool, self._wanted
        if forming is None or forming.spec is None or pool is None or wanted is None:
            return None
        if isinstance(request, messages.Heal):
            healed = await self._heal(forming, pool, wanted)
        else:
            healed = await self._resize(request, forming, pool, wanted)
        self._node_of = nodes_of(forming.spec)
        # Also where it says why it is not what was asked.
        back = pool.word_way_back(wanted)
        return replace(healed, spec=forming.spec, hosts=self._hosts, way_back=back)

    async def _heal(self, forming: Forming, pool: NodePool, wanted: WorldConfig) -> messages.Healed:
        """Form a group of all ranks that can be, also where nodes are lost meanwhile."""
        assert forming.spec is not None
        for _ in range(len(pool.nodes)):  # more may come meanwhile
            there = pool.there
            spec, keep = without(forming.spec, wanted, there)
            with suppress(CannotStart):  # workers there say what they lack
                await self._bring_code()
            if not keep:
                said = await pool.last_word()
                why = f"all machines are lost: {said}" if said else "all machines are lost"
                healed = messages.Healed(*forming.whereabouts(), spec.seats, why)
                break
            if len(keep) == forming.spec.world_size:
                healed = await forming.heal(spec)
            else:
                healed = await forming.scale(spec, keep)
            if not healed.problem or pool.there == there:
                break
        return healed

    async def _resize(
        self,
        request: messages.Scale | messages.Grow,
        forming: Forming,
        pool: NodePool,
        wanted: WorldConfig,
    ) -> messages.Healed:
        """Change the number of ranks as asked, or to take in machines that have come since."""
        assert forming.spec is not None
        size, keep = forming.spec.world_size, tuple(range(forming.spec.world_size))
        try:
            if isinstance(request, messages.Scale):
                size, keep = request.spec.world_size, request.keep
            else:
                size = max(full_size(wanted, pool.there), size)
            await self._bring_code()
            spec = resized(forming.spec, size, keep, room_of(wanted, pool.there))
        except (NoSeats, CannotStart) as error:
            return messages.Healed(
                *forming.whereabouts(), forming.spec.seats, not_scaled=str(error)
            )
        if isinstance(request, messages.Scale):
            # Machines that come later do not make it another one.
            self._wanted = wanted.of_size(size)
            spec = led_by_first(spec, pool.there)
        return await forming.scale(spec, keep)

    def _admit(self, node: Node) -> None:
        """Tell the notebook of a machine that could have ranks."""
        forming, wanted = self._forming, self._wanted
        if forming is None or forming.spec is None or wanted is None:
            return
        if full_size(wanted, self.there) > forming.spec.world_size:
            self._tell(messages.Came(node.name))


def _who(wanted: WorldConfig) -> tuple[object, ...]:
    """Return what decides which machines there are and what runs there, but not how many ranks."""
    started_by = wanted.launched_by, wanted.named_hosts, wanted.salloc, wanted.wrap
    size, python = (wanted.min_nodes, wanted.max_nodes), (wanted.python, wanted.fork)
    return *started_by, *size, *python, wanted.address, wanted.link_timeout


CODE_TIMEOUT = 60.0  # seconds for a node to take some megabytes, perhaps over a slow line


class KeptCode:
    """What is in the notebook's files now, and which nodes have been brought to it."""

    def __init__(self) -> None:
        self._get: messages.GetCode | None = None
        self._contents: dict[CodeFile, bytes] = {}
        self._sharing: weakref.WeakKeyDictionary[Node, bool] = weakref.WeakKeyDictionary()

    def take(self, request: messages.GetCode | messages.PutCode) -> None:
        """Take in which files there are, or what was missing."""
        match request:
            case messages.GetCode(files=files):
                wanted = {*files.values()}
                # New ones: what brings the files as they were may still do so.
                self._get, self._sharing = request, weakref.WeakKeyDictionary()
                self._contents = {f: c for f, c in self._contents.items() if f in wanted}
            case messages.PutCode(contents):
                self._contents |= contents

    async def bring(self, nodes: Iterable[Node]) -> messages.CodeHeld:
        """Bring the files to nodes that lack them, once all are here; the first problem."""
        if (get := self._get) is None:
            return messages.CodeHeld("")
        if missing := {*get.files.values()} - self._contents.keys():
            return messages.CodeHeld("", tuple(missing))
        there, sharing = [*nodes], self._sharing
        new = (self._bring_to(node, get) for node in there if node not in sharing)
        for held in await asyncio.gather(*new):
            if held.problem:
                return held
        return messages.CodeHeld("", is_shared=bool(there) and all(map(sharing.get, there)))

    async def _bring_to(self, node: Node, get: messages.GetCode) -> messages.CodeHeld:
        contents, sharing = self._contents, self._sharing
        try:
            held: messages.CodeHeld = await node.ask(get, CODE_TIMEOUT)
            while part := part_of(held.lacks, contents.get):
                held = await node.ask(messages.PutCode(part), CODE_TIMEOUT)
        except NodeLost as lost:
            held = messages.CodeHeld(node.name, problem=str(lost))
        if not (held.problem or held.lacks):
            sharing[node] = held.is_shared
        return replace(held, host=node.name)


def in_time_of_head(outputs: messages.Outputs, offset_ns: int) -> messages.Outputs:
    """Give failures the time of this machine's clock, by which those of all nodes are ordered."""
    return messages.Outputs(
        tuple(
            (rank, task, output._replace(time_ns=output.time_ns - offset_ns))
            if isinstance(output, Failure | Died)
            else (rank, task, output)
            for rank, task, output in outputs.items
        )
    )


def last_words(outputs: messages.Outputs) -> messages.Outputs:
    """Return what ranks had shown before their machine was lost; they count as dead already."""
    shown = Text | Display | Update | Clear
    return messages.Outputs(tuple(each for each in outputs.items if isinstance(each[2], shown)))
