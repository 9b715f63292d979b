"""One machine of a world as the head sees it, and the placing of ranks on machines.

`Node` is the link to its agent; the functions decide which ranks are placed where.
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
from nbdist.topology import Slots, free_slots, place_again
from nbdist.wire.messages import (
    Ask,
    CodeHeld,
    GetCode,
    PutCode,
    Reply,
    Request,
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
    Renumber,
    StartPart,
    Target,
)
from nbdist.wire.spec import Versions, WorldSpec, difference
from nbdist.words import count

CLOCK_TRIES = 3  # times that a clock is read; the quickest answer is the most exact

T = TypeVar("T")


class NodeLost(Exception):
    """The node was lost; the message says how that was noticed."""


class Node:
    """A node of a world: sends messages to its agent, asks it, and keeps what is known of it.

    `number` is its place among the nodes, `name` what the user calls it, `offset_ns` how far its
    clock is ahead of this machine's. `lost` says how it was lost, or is "".
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
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}

    def __repr__(self) -> str:
        state = f"lost: {self.lost}" if self.lost else f"ranks {[*self.ranks]}"
        return f"<Node {self.number} {self.name} {state}>"

    def send(self, message: NodeDown) -> None:
        """Send a message to the agent; drop it if the node is lost."""
        if not self.lost:
            self._send(message)

    async def ask(self, request: Request | PartRequest[Any], timeout: float) -> Any:
        """Send a request, of a notebook or a head, and return the reply; raises NodeLost."""
        if self.lost:
            raise NodeLost(self.lost)
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Ask(number, request))
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise NodeLost(f"{self.name} did not answer within {timeout:.0f} s") from None
        finally:
            del self._answers[number]

    def answered(self, number: int, reply: Reply) -> None:
        """Pass a reply on to the request that waits for it."""
        answer = self._answers.get(number)
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def lose(self, why: str) -> None:
        """Record why the node was lost; its waiting requests raise NodeLost."""
        self.lost = self.lost or why
        for answer in [*self._answers.values()]:
            if not answer.done():
                answer.set_exception(NodeLost(self.lost))

    async def set_clock(self) -> None:
        """Measure how far the node's clock is ahead; raises NodeLost."""
        best, request = float("inf"), GetClock()
        for _ in range(CLOCK_TRIES):
            before, began = time.time_ns(), time.monotonic_ns()
            there = await self.ask(request, request.timeout)
            took = time.monotonic_ns() - began
            if took < best:
                best, self.offset_ns = took, there - before - took // 2

    async def do(self, request: PartRequest[T]) -> T:
        """Let the node do its part of a change of the world; return its reply.

        `nbdist.agent.forming` calls it. If the node is lost, the reply is what the request has for
        that.
        """
        match request:
            case StartPart() | Form():
                self.ranks = request.ranks
            case EndRanks(ranks):
                self.ranks = tuple(rank for rank in self.ranks if rank not in ranks)
            case Renumber(became):
                self.ranks = tuple(became.get(rank, rank) for rank in self.ranks)
        asked: Any = request
        if isinstance(request, StartPart | Prepare | Form):
            asked = replace(request, spec=replace(request.spec, node=self.number))
        try:
            reply = await self.ask(asked, request.timeout)
        except NodeLost as error:
            reply = request.lost(str(error))
        if isinstance(reply, StartFailure):
            reply = replace(reply, host=self.name)
        return reply  # type: ignore[no-any-return]


# --- placing ranks, and checks of machines before -------------------------------------------------


class NoSlots(ValueError):
    """Machines have too few slots for the ranks; the message says how many each has."""


def room_of(wanted: WorldConfig, nodes: Sequence[Node]) -> dict[int, int]:
    """Return, by node, the number of workers for which it has room."""
    slots = dict(enumerate(host.slots for host in wanted.named_hosts))
    return {
        node.number: slots.get(node.number)
        or topology.resolve(wanted.per_node, len(_gpus(wanted, node)), node.facts.cores)
        for node in nodes
    }


def _gpus(wanted: WorldConfig, node: Node) -> tuple[str, ...]:
    """Return the node's GPUs that may be used; raises NoSlots if a named one is missing."""
    try:
        gpus = node.facts.gpus
        return topology.parse_gpus(wanted.gpus, gpus) if wanted.gpus else gpus
    except BadTopology as error:
        raise NoSlots(f"{node.facts.name}: {error}") from None


def _has_cuda(node: Node) -> bool:
    """Return False if torch's version tells that it is a build for CPUs alone."""
    return not node.facts.torch.endswith("+cpu")


def _usable_slots(wanted: WorldConfig, nodes: Sequence[Node]) -> Slots:
    """Return all slots that the world may use on these nodes."""
    room = room_of(wanted, nodes)
    # A host may have more room than its share: ranks of lost nodes are placed there.
    most = wanted.per_node if isinstance(wanted.per_node, int) else max(room.values())
    there = {node: min(room[node], most) for node in sorted(room)[: wanted.max_nodes]}
    return tuple(free_slots(there))


def placed(spec: WorldSpec, wanted: WorldConfig, nodes: Sequence[Node]) -> WorldSpec:
    """Place the ranks of a new world on these nodes; raises NoSlots."""
    room, free = room_of(wanted, nodes), _usable_slots(wanted, nodes)
    size = len(free) if wanted.workers is None else wanted.workers
    if size > len(free):
        there = ", ".join(f"{node.facts.name} has {room[node.number]}" for node in nodes)
        raise NoSlots(f"{count(size, 'worker')} asked for, but room for {len(free)}: {there}")
    gpus = all(_gpus(wanted, node) and _has_cuda(node) for node in nodes)
    backend = spec.backend
    if wanted.backend is None:
        backend = topology.default_backend(int(gpus))
    slots = free[:size]
    if topology.uses_nccl(backend or ""):
        _check_nccl(wanted, nodes, Counter(slot.node for slot in slots))
    spec = replace(spec, world_size=size, slots=slots, backend=backend)
    return led_by_first(spec, nodes)


def _check_nccl(wanted: WorldConfig, nodes: Sequence[Node], ranks: Mapping[int, int]) -> None:
    """Raise NoSlots if a node lacks GPUs for its ranks, or its torch lacks nccl."""
    for node in nodes:
        number, gpus, name = ranks.get(node.number, 0), len(_gpus(wanted, node)), node.facts.name
        if number and not _has_cuda(node):
            raise NoSlots(f"torch {node.facts.torch} on {name} has no nccl: `--backend gloo`")
        if number > gpus and not (gpus and wanted.share_gpus):
            there = f"{name} has {count(gpus, 'GPU')} for {count(number, 'rank')}"
            raise NoSlots(f"{there}, and nccl needs one for each: `--backend gloo`")


def led_by_first(spec: WorldSpec, nodes: Sequence[Node]) -> WorldSpec:
    """Set MASTER_ADDR and its port to those of rank 0's machine."""
    first = next(node for node in nodes if node.number == spec.slots[0].node)
    return replace(spec, master_addr=first.facts.address, master_port=first.facts.port)


def without(
    spec: WorldSpec, wanted: WorldConfig, nodes: Sequence[Node]
) -> tuple[WorldSpec, tuple[int, ...]]:
    """Place ranks of lost nodes on the others, or leave them out; return the ranks that stay.

    If there is not room for all of them, none is placed. No rank stays if no node is left.
    """
    lost = {slot.node for slot in spec.slots} - {node.number for node in nodes}
    keep = tuple(range(spec.world_size))
    if not lost:
        return spec, keep
    slots = place_again(spec.slots, lost, room_of(wanted, nodes))
    if slots is None:
        keep = tuple(rank for rank in keep if spec.slots[rank].node not in lost)
        slots = tuple(spec.slots[rank] for rank in keep)
    if not keep:
        return spec, ()
    return led_by_first(replace(spec, world_size=len(keep), slots=slots), nodes), keep


def full_size(wanted: WorldConfig, nodes: Sequence[Node]) -> int:
    """Return the number of ranks that the world wants, as far as these nodes have room."""
    there = len(_usable_slots(wanted, nodes))
    return there if wanted.workers is None else min(there, wanted.workers)


def resized(spec: WorldSpec, size: int, keep: Sequence[int], room: Mapping[int, int]) -> WorldSpec:
    """Place the ranks of `keep`, in this order, then new ones if there is room; raises NoSlots."""
    slots = tuple(spec.slots[rank] for rank in keep)
    new = tuple(islice(free_slots(room, slots), size - len(slots)))
    if len(slots) + len(new) < size:
        raise NoSlots(f"{count(len(slots) + len(new), 'worker')} have room on these machines")
    return replace(spec, world_size=size, slots=(*slots, *new))


REACHED = 16  # machines that each one tries to reach at most; others try the rest


def mismatch(name: str, hello: NodeHello, here: Versions) -> str:
    """Return how a machine's versions differ from the notebook's, with a remedy; else ""."""
    facts = hello.facts
    own = f"{facts.python} on {name}"
    if hello.version != __version__:
        install = f"`pip install nbdist=={__version__}` for {own}"
        return f"{name} has nbdist {hello.version}, the notebook {__version__}: {install}"
    found = difference(facts.versions, here)
    if found and found.what == "Python":
        said = f"{own} is Python {found.there}, the notebook's is {found.here}: {found.why}"
        return f"{said}. `--python` names another one"
    if not facts.torch:
        return f"{own} has no torch: `--python` names the interpreter that has it"
    if found:
        wanted = f"{found.what}=={found.here.partition('+')[0]}"
        install = f"`pip install {wanted}` for {own}, or another `--python`"
        return f"{name} has {found.what} {found.there}, the notebook {found.here}: {install}"
    return ""


# --- from machine to machine ------------------------------------------------------------------


def targets(nodes: Sequence[Node]) -> Mapping[int, tuple[Target, ...]]:
    """Choose, by node, which other machines each one tries to reach."""
    everyone = [Target(node.name, node.facts.address, node.facts.port) for node in nodes]
    return {
        node.number: (*everyone[at + 1 :], *everyone[:at])[:REACHED]
        for at, node in enumerate(nodes)
    }


# --- the notebook's folder --------------------------------------------------------------------

CODE_TIMEOUT = 60.0  # seconds for a node to receive some megabytes, perhaps over a slow line


class KeptCode:
    """The archive of the notebook's folder, kept for nodes that lack it or come later."""

    def __init__(self) -> None:
        self._get: GetCode | None = None
        self._puts: tuple[PutCode, ...] = ()

    async def take(self, request: GetCode | PutCode, nodes: Iterable[Node]) -> CodeHeld:
        """Keep a part of the archive; once all of it is here, bring it to the nodes."""
        match request:
            case GetCode(digest):
                self._get = request
                if not (self._is_whole and self._puts[0].digest == digest):
                    self._puts = ()
            case PutCode():
                self._puts = (*self._puts, request)
        return await self.bring(nodes)

    @property
    def _is_whole(self) -> bool:
        return bool(self._puts) and self._puts[-1].is_last

    async def bring(self, nodes: Iterable[Node]) -> CodeHeld:
        """Send the archive to nodes that lack it; return the first problem, or the result."""
        if self._get is None or not self._is_whole:
            return CodeHeld("")
        bringing = (self._bring_to(node, self._get, self._puts) for node in nodes)
        held = await asyncio.gather(*bringing)
        problem = next((each for each in held if each.problem), None)
        is_shared = bool(held) and all(each.is_shared for each in held)
        return problem or CodeHeld("", is_here=True, is_shared=is_shared)

    async def _bring_to(self, node: Node, get: GetCode, puts: Iterable[PutCode]) -> CodeHeld:
        try:
            held: CodeHeld = await node.ask(get, CODE_TIMEOUT)
            for put in () if held.is_here else puts:
                held = await node.ask(put, CODE_TIMEOUT)
        except NodeLost as lost:
            return CodeHeld(node.name, problem=str(lost))
        return replace(held, host=node.name)
