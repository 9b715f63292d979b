"""On which machines the ranks of a world sit, and what is checked of these before; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from nbdist import __version__, topology
from nbdist.config import WorldConfig
from nbdist.errors import BadTopology
from nbdist.seats import Position, reseat, shrink
from nbdist.wire.node_messages import NodeHello, Target
from nbdist.wire.spec import Versions, WorldSpec, difference
from nbdist.words import count

if TYPE_CHECKING:
    from nbdist.cluster.node import Node


class NoSeats(ValueError):
    """There are not enough of them; the message says how many there are where."""


def room_of(wanted: WorldConfig, nodes: Sequence[Node]) -> dict[int, int]:
    """Say for how many workers each node has room."""
    slots = dict(enumerate(host.slots for host in wanted.named_hosts))
    return {node.number: slots.get(node.number) or _room(wanted, node) for node in nodes}


def _gpus(wanted: WorldConfig, node: Node) -> tuple[str, ...]:
    """List its GPUs that are to be used; raises NoSeats where one of them is not there."""
    try:
        gpus = node.facts.gpus
        return topology.parse_gpus(wanted.gpus, gpus) if wanted.gpus else gpus
    except BadTopology as error:
        raise NoSeats(f"{node.facts.name}: {error}") from None


def _has_cuda(node: Node) -> bool:
    """Say whether torch there may use GPUs: of a build for CPUs alone its version tells."""
    return not node.facts.torch.endswith("+cpu")


def _room(wanted: WorldConfig, node: Node) -> int:
    return topology.resolve(wanted.per_node, len(_gpus(wanted, node)), node.facts.cores)


def seated(spec: WorldSpec, wanted: WorldConfig, nodes: Sequence[Node]) -> WorldSpec:
    """Seat the ranks of a new world on the nodes that have come; raises NoSeats."""
    room = room_of(wanted, nodes)
    # A host may have room for more than it is to have: ranks of lost ones find it there.
    most = wanted.per_node if isinstance(wanted.per_node, int) else max(room.values())
    free = [
        Position(node, at)
        for node, number in sorted(room.items())[: wanted.max_nodes]
        for at in range(min(number, most))
    ]
    size = len(free) if wanted.workers is None else wanted.workers
    if size > len(free):
        there = ", ".join(f"{node.facts.name} has {room[node.number]}" for node in nodes)
        raise NoSeats(f"{count(size, 'worker')} asked for, but room for {len(free)}: {there}")
    gpus = all(_gpus(wanted, node) and _has_cuda(node) for node in nodes)
    backend = spec.backend
    if wanted.backend is None:
        backend = topology.default_backend(int(gpus))
    seats = tuple(free[:size])
    if topology.uses_nccl(backend or ""):
        _check_nccl(wanted, nodes, Counter(seat.node for seat in seats), shared=spec.share_gpus)
    spec = replace(spec, world_size=size, seats=seats, backend=backend)
    return led_by_first(spec, nodes)


def _check_nccl(
    wanted: WorldConfig, nodes: Sequence[Node], ranks: Mapping[int, int], *, shared: bool
) -> None:
    """Raise NoSeats where a node has no GPU for each of its ranks, or a torch without nccl."""
    for node in nodes:
        number, gpus, name = ranks.get(node.number, 0), len(_gpus(wanted, node)), node.facts.name
        if number and not _has_cuda(node):
            raise NoSeats(f"torch {node.facts.torch} on {name} has no nccl: `--backend gloo`")
        if number > gpus and not (gpus and shared):
            there = f"{name} has {count(gpus, 'GPU')} for {count(number, 'rank')}"
            raise NoSeats(f"{there}, and nccl needs one for each: `--backend gloo`")


def led_by_first(spec: WorldSpec, nodes: Sequence[Node]) -> WorldSpec:
    """Have MASTER_ADDR be the machine of rank 0."""
    first = next(node for node in nodes if node.number == spec.seats[0].node)
    return replace(spec, master_addr=first.facts.address, master_port=first.facts.port)


def without(
    spec: WorldSpec, wanted: WorldConfig, nodes: Sequence[Node]
) -> tuple[WorldSpec, tuple[int, ...]]:
    """Seat the ranks of lost nodes on those that are there, or leave them out: also who stays.

    There they all sit where there is room for all, else none of them does; () where no node
    is left.
    """
    lost = {seat.node for seat in spec.seats} - {node.number for node in nodes}
    everyone = tuple(range(spec.world_size))
    if not lost:
        return spec, everyone
    seats = reseat(spec.seats, lost, room_of(wanted, nodes))
    keep = everyone
    if seats is None:
        keep, seats = shrink(spec.seats, lost)
    if not keep:
        return spec, ()
    return led_by_first(replace(spec, world_size=len(keep), seats=seats), nodes), keep


def full_size(wanted: WorldConfig, nodes: Sequence[Node]) -> int:
    """Count the ranks that a world is to have, as far as these nodes have room for them."""
    room = room_of(wanted, nodes)
    most = wanted.per_node if isinstance(wanted.per_node, int) else max(room.values())
    there = sum(min(number, most) for _, number in sorted(room.items())[: wanted.max_nodes])
    return there if wanted.workers is None else min(there, wanted.workers)


def resized(spec: WorldSpec, size: int, keep: Sequence[int], room: Mapping[int, int]) -> WorldSpec:
    """Seat the ranks that stay, in this order, and more where there is room; raises NoSeats."""
    seats = tuple(spec.seats[rank] for rank in keep)
    free = (
        position
        for node, number in sorted(room.items())
        for position in (Position(node, at) for at in range(number))
        if position not in seats
    )
    new = tuple(islice(free, size - len(seats)))
    if len(seats) + len(new) < size:
        raise NoSeats(f"{count(len(seats) + len(new), 'worker')} have room on these machines")
    return replace(spec, world_size=size, seats=(*seats, *new))


REACHED = 16
"""Of so many other machines each tries the way: with more of them, others try the rest."""


def mismatch(name: str, hello: NodeHello, here: Versions) -> str:
    """Say in which version a machine differs from the notebook's that has to be the same."""
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
    """Choose for each machine, by its number, which others it is to try to reach."""
    found = {}
    for at, node in enumerate(nodes):
        others = [*nodes[at + 1 :], *nodes[:at]][:REACHED]
        found[node.number] = tuple(
            Target(other.name, other.facts.address, other.facts.port) for other in others
        )
    return found


def unreachable(name: str, problem: str) -> str:
    """Word that one machine cannot reach another, and what can be done about it."""
    return (
        f"{name} cannot reach {problem}; gloo and nccl connect all machines, at ports that the"
        " kernel chooses. A firewall has to let these through, or `--backend none`"
    )
