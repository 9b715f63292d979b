"""The head's object for each machine of a world, and functions that place ranks on machines.

`Node` sends requests to the agent of a machine. `mismatch` compares a machine's versions with the
notebook's, and `KeptCode` sends the notebook's folder to machines that lack it. Runs in the head.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from nbdist import __version__, topology
from nbdist.config import WorldConfig
from nbdist.errors import BadTopology
from nbdist.topology import Slots, free_slots, move_lost_ranks
from nbdist.wire.messages import (
    AgentRequest,
    CodeHeld,
    GetCode,
    PutCode,
    Reply,
    RequestBody,
    StartFailure,
)
from nbdist.wire.node_messages import (
    EndRanks,
    Form,
    GetClock,
    NodeDown,
    NodeHello,
    PartRequest,
    Prepare,
    ProbeTarget,
    Renumber,
    StartPart,
)
from nbdist.wire.spec import Versions, WorldSpec, difference
from nbdist.words import count

CLOCK_TRIES = 3  # how often a node's clock is read; the quickest answer is used

T = TypeVar("T")


class NodeLost(Exception):
    """Raised if a node is lost or did not answer in time; the message says which."""


class Node:
    """The head's object for a node: sends messages and requests to its agent, and keeps its state.

    `name` is the machine's name in messages to the user. `offset_ns` is how many nanoseconds the
    machine's clock is ahead of the head's. `lost` says why the node counts as lost, or is "" if it
    does not. `ranks` are the ranks on the node.
    """

    def __init__(
        self, number: int, name: str, hello: NodeHello, send: Callable[[NodeDown], None]
    ) -> None:
        self.number = number
        self.name = name
        self.pid = hello.pid
        self.facts = hello.facts
        self.offset_ns = 0
        self.lost = ""
        self.ranks: tuple[int, ...] = ()
        self._send = send
        self._request_numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}

    def __repr__(self) -> str:
        state = f"lost: {self.lost}" if self.lost else f"ranks {[*self.ranks]}"
        return f"<Node {self.number} {self.name} {state}>"

    def send(self, message: NodeDown) -> None:
        """Send a message to the agent; drop the message if the node is lost."""
        if not self.lost:
            self._send(message)

    async def ask(self, request: RequestBody | PartRequest[Any], timeout: float) -> Any:
        """Send a request to the agent, and return the reply.

        Raises NodeLost if the node is lost, or does not reply within `timeout` seconds.
        """
        if self.lost:
            raise NodeLost(self.lost)
        number = next(self._request_numbers)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(AgentRequest(number, request))
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise NodeLost(f"{self.name} did not answer within {timeout:.0f} s") from None
        finally:
            del self._pending[number]

    def resolve_request(self, number: int, reply: Reply) -> None:
        """Store the agent's reply to request `number`, which the waiting call of `ask` returns.

        Does nothing if the call no longer waits.
        """
        answer = self._pending.get(number)
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def mark_lost(self, why: str) -> None:
        """Record that the node is lost, and why; all pending calls of `ask` raise NodeLost.

        If the node is lost already, the first reason stays.
        """
        self.lost = self.lost or why
        for answer in [*self._pending.values()]:
            if not answer.done():
                answer.set_exception(NodeLost(self.lost))

    async def measure_clock(self) -> None:
        """Ask the agent for its time a few times, and set `offset_ns` by the quickest answer.

        Raises NodeLost.
        """
        shortest_ns, request = float("inf"), GetClock()
        for _ in range(CLOCK_TRIES):
            sent_ns, began_ns = time.time_ns(), time.monotonic_ns()
            node_ns = await self.ask(request, request.timeout)
            round_trip_ns = time.monotonic_ns() - began_ns
            if round_trip_ns < shortest_ns:
                shortest_ns, self.offset_ns = round_trip_ns, node_ns - sent_ns - round_trip_ns // 2

    async def execute(self, request: PartRequest[T]) -> T:
        """Send the agent a request, and return the reply.

        If the node is lost or does not reply in time, return the result of `request.lost_answer`.
        A request that starts, ends or renumbers ranks also updates `ranks`.
        """
        match request:
            case StartPart() | Form():
                self.ranks = request.ranks
            case EndRanks(ranks):
                self.ranks = tuple(rank for rank in self.ranks if rank not in ranks)
            case Renumber(became):
                self.ranks = tuple(became.get(rank, rank) for rank in self.ranks)
        sent: Any = request
        if isinstance(request, StartPart | Prepare | Form):
            sent = replace(request, spec=replace(request.spec, node=self.number))
        try:
            reply = await self.ask(sent, request.timeout)
        except NodeLost as error:
            reply = request.lost_answer(str(error))
        if isinstance(reply, StartFailure):
            reply = replace(reply, host=self.name)
        return reply  # type: ignore[no-any-return]


# --- placing ranks, and checking machines ---------------------------------------------------------


class NoSlots(ValueError):
    """Raised if machines lack slots, GPUs or nccl for ranks; the message says what is missing."""


def room_of(config: WorldConfig, nodes: Sequence[Node]) -> dict[int, int]:
    """Return for how many workers each node has room, by the number of the node.

    Raises NoSlots if a node lacks GPUs that the options request.
    """
    slots = dict(enumerate(host.slots for host in config.named_hosts))
    return {node.number: slots.get(node.number) or _room(config, node) for node in nodes}


def _room(config: WorldConfig, node: Node) -> int:
    gpus = _gpus(config, node)
    try:
        return topology.resolve(config.per_node, len(gpus), node.facts.cores)
    except BadTopology as error:
        raise NoSlots(f"{node.facts.name}: {error}") from None


def lack_of_room(config: WorldConfig, node: Node) -> str:
    """Return "" if a node that joins a running world can have ranks, or why it cannot."""
    try:
        room_of(config, [node])
    except NoSlots as error:
        return str(error)
    return ""


def _gpus(config: WorldConfig, node: Node) -> tuple[str, ...]:
    """Return the node's GPUs that workers may use; raises NoSlots if it lacks a GPU of `--gpus`."""
    try:
        gpus = node.facts.gpus
        return topology.parse_gpus(config.gpus, gpus) if config.gpus else gpus
    except BadTopology as error:
        raise NoSlots(f"{node.facts.name}: {error}") from None


def _has_cuda(node: Node) -> bool:
    """Return False if the version of the node's torch says that torch is built for CPUs only."""
    return not node.facts.torch.endswith("+cpu")


def _usable_slots(config: WorldConfig, nodes: Sequence[Node]) -> Slots:
    """Return all slots on these nodes that the options allow workers to use; raises NoSlots."""
    room = room_of(config, nodes)
    # Use at most `per_node` slots of each node. If a node has more slots, the others stay free, for
    # example for ranks of lost nodes.
    limit = config.per_node if isinstance(config.per_node, int) else max(room.values())
    workers = {node: min(room[node], limit) for node in sorted(room)[: config.max_nodes]}
    return tuple(free_slots(workers))


def place_new_world(spec: WorldSpec, config: WorldConfig, nodes: Sequence[Node]) -> WorldSpec:
    """Return `spec` with the fields set that depend on the nodes of the new world.

    These are the number of ranks, the slot of each rank, the backend, and the address and port of
    rank 0's machine. Raises NoSlots if the nodes lack room for the number of workers in `config`,
    or if they lack GPUs or nccl.
    """
    room, free = room_of(config, nodes), _usable_slots(config, nodes)
    size = len(free) if config.workers is None else config.workers
    if size > len(free):
        rooms = ", ".join(f"{node.facts.name} has {room[node.number]}" for node in nodes)
        raise NoSlots(f"{count(size, 'worker')} asked for, but room for {len(free)}: {rooms}")
    gpus = all(_gpus(config, node) and _has_cuda(node) for node in nodes)
    backend = spec.backend
    if config.backend is None:
        backend = topology.default_backend(int(gpus))
    slots = free[:size]
    if topology.uses_nccl(backend or ""):
        _check_nccl(config, nodes, Counter(slot.node for slot in slots))
    spec = replace(spec, world_size=size, slots=slots, backend=backend)
    return with_master_address(spec, nodes)


def _check_nccl(config: WorldConfig, nodes: Sequence[Node], ranks: Mapping[int, int]) -> None:
    """Raise NoSlots if a node lacks GPUs or nccl for its ranks.

    `ranks` has, by the number of a node, how many ranks the node has.
    """
    for node in nodes:
        number, gpus, name = ranks.get(node.number, 0), len(_gpus(config, node)), node.facts.name
        if number and not _has_cuda(node):
            raise NoSlots(f"torch {node.facts.torch} on {name} has no nccl: `--backend gloo`")
        if number > gpus and not (gpus and config.share_gpus):
            shortage = f"{name} has {count(gpus, 'GPU')} for {count(number, 'rank')}"
            raise NoSlots(f"{shortage}, and nccl needs one for each: `--backend gloo`")


def with_master_address(spec: WorldSpec, nodes: Sequence[Node]) -> WorldSpec:
    """Return `spec` with the MASTER_ADDR and MASTER_PORT of rank 0's machine."""
    first = next(node for node in nodes if node.number == spec.slots[0].node)
    return replace(spec, master_addr=first.facts.address, master_port=first.facts.port)


def without_lost_nodes(
    spec: WorldSpec, config: WorldConfig, nodes: Sequence[Node]
) -> tuple[WorldSpec, tuple[int, ...]]:
    """Return `spec` with the ranks of lost nodes moved to `nodes`, and the ranks that remain.

    `nodes` are the nodes that are not lost. If they lack room for all moved ranks, the ranks of
    lost nodes are removed from `spec`. If no rank would remain, return `spec` unchanged and ().
    """
    lost = {slot.node for slot in spec.slots} - {node.number for node in nodes}
    keep = tuple(range(spec.world_size))
    if not lost:
        return spec, keep
    slots = move_lost_ranks(spec.slots, lost, room_of(config, nodes))
    if slots is None:
        keep = tuple(rank for rank in keep if spec.slots[rank].node not in lost)
        slots = tuple(spec.slots[rank] for rank in keep)
    if not keep:
        return spec, ()
    return with_master_address(replace(spec, world_size=len(keep), slots=slots), nodes), keep


def attainable_size(config: WorldConfig, nodes: Sequence[Node]) -> int:
    """Return how many ranks the world can have on these nodes: at most as many as requested."""
    slots = len(_usable_slots(config, nodes))
    return slots if config.workers is None else min(slots, config.workers)


def resized(spec: WorldSpec, size: int, keep: Sequence[int], room: Mapping[int, int]) -> WorldSpec:
    """Return `spec` with `size` ranks: the present ranks `keep` in this order, then new ranks.

    `room` says for how many workers each node has room, by the number of the node. Raises NoSlots
    if the room is too little.
    """
    slots = tuple(spec.slots[rank] for rank in keep)
    new = tuple(islice(free_slots(room, slots), size - len(slots)))
    if len(slots) + len(new) < size:
        raise NoSlots(f"{count(len(slots) + len(new), 'worker')} have room on these machines")
    return replace(spec, world_size=size, slots=(*slots, *new))


REACHED = 16  # the most other machines to which each machine tries to connect


def mismatch(name: str, hello: NodeHello, here: Versions) -> str:
    """Return a message if a machine's versions do not fit the notebook's, or "" if they fit.

    They fit if the version of nbdist and the minor versions of Python, torch and cloudpickle are
    equal. A machine without torch does not fit. The message says what the user can do. `here` has
    the notebook's versions.
    """
    facts = hello.facts
    interpreter = f"{facts.python} on {name}"
    if hello.version != __version__:
        install = f"`pip install nbdist=={__version__}` for {interpreter}"
        return f"{name} has nbdist {hello.version}, the notebook {__version__}: {install}"
    diff = difference(facts.versions, here)
    if diff and diff.what == "Python":
        text = f"{interpreter} is Python {diff.there}, the notebook's is {diff.here}: {diff.why}"
        return f"{text}. `--python` names another one"
    if not facts.torch:
        return f"{interpreter} has no torch: `--python` names the interpreter that has it"
    if diff:
        requirement = f"{diff.what}=={diff.here.partition('+')[0]}"
        install = f"`pip install {requirement}` for {interpreter}, or another `--python`"
        return f"{name} has {diff.what} {diff.there}, the notebook {diff.here}: {install}"
    return ""


# --- from machine to machine ------------------------------------------------------------------


def targets(nodes: Sequence[Node]) -> Mapping[int, tuple[ProbeTarget, ...]]:
    """Choose other machines for each node, to test whether the node can connect to them.

    Returns up to `REACHED` machines for each node, by the number of the node.
    """
    everyone = [ProbeTarget(node.name, node.facts.address, node.facts.port) for node in nodes]
    return {
        node.number: (*everyone[at + 1 :], *everyone[:at])[:REACHED]
        for at, node in enumerate(nodes)
    }


# --- the notebook's folder --------------------------------------------------------------------

CODE_TIMEOUT = 60.0  # seconds for a node to receive some megabytes, perhaps over a slow line


class KeptCode:
    """Keeps the archive of the notebook's folder in the head, and sends it to nodes that lack it.

    Because the archive is kept, nodes that join later can get it, too.
    """

    def __init__(self) -> None:
        self._query: GetCode | None = None
        self._parts: tuple[PutCode, ...] = ()

    async def store(self, request: GetCode | PutCode, nodes: Iterable[Node]) -> CodeHeld:
        """Keep what the notebook sends; once the archive is complete, send it to the nodes.

        A `GetCode` announces an archive by its digest; a kept archive that is incomplete or has
        another digest is dropped. Each `PutCode` has a part of the archive. Returns the result of
        `distribute`.
        """
        match request:
            case GetCode(digest):
                self._query = request
                if not (self._is_whole and self._parts[0].digest == digest):
                    self._parts = ()
            case PutCode():
                self._parts = (*self._parts, request)
        return await self.distribute(nodes)

    @property
    def _is_whole(self) -> bool:
        return bool(self._parts) and self._parts[-1].is_last

    async def distribute(self, nodes: Iterable[Node]) -> CodeHeld:
        """Send the archive to the nodes that lack it; do nothing if the archive is not complete.

        If the archive is not complete, return `CodeHeld("")`. If a node reports a problem, return
        its answer. Otherwise the result has `is_here` set, which means that all nodes have the
        folder. It also has `is_shared` set if all nodes see the notebook's own folder, on a shared
        file system.
        """
        if self._query is None or not self._is_whole:
            return CodeHeld("")
        transfers = (self._send_to(node, self._query, self._parts) for node in nodes)
        replies = await asyncio.gather(*transfers)
        problem = next((each for each in replies if each.problem), None)
        is_shared = bool(replies) and all(each.is_shared for each in replies)
        return problem or CodeHeld("", is_here=True, is_shared=is_shared)

    async def _send_to(self, node: Node, get: GetCode, puts: Iterable[PutCode]) -> CodeHeld:
        try:
            reply: CodeHeld = await node.ask(get, CODE_TIMEOUT)
            for put in () if reply.is_here else puts:
                reply = await node.ask(put, CODE_TIMEOUT)
        except NodeLost as lost:
            return CodeHeld(node.name, problem=str(lost))
        return replace(reply, host=node.name)
