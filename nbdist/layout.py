"""Which ranks are on which node: the text of `-j`, and each rank's seat.

Pure.  On one machine the nodes of `-j 2x4` are simulated: one agent, and each rank is told
of its node what torchrun would tell it there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.errors import BadTopology

_LAYOUT = re.compile(r"(?:(?:([0-9]{1,6}):)?([0-9]{1,6})x)?([0-9]{1,6})")
_FORMS = "Use `-j 4`, `-j 2x4` (2 nodes with 4 workers each) or `-j 1:2x4` (1 to 2 such nodes)."


@dataclass(frozen=True)
class Layout:
    """`nodes` nodes with `per_node` workers each; `min_nodes` are enough to begin with."""

    nodes: int
    per_node: int
    min_nodes: int

    def __str__(self) -> str:
        least = "" if self.min_nodes == self.nodes else f"{self.min_nodes}:"
        return f"{least}{self.shape}"

    @property
    def shape(self) -> str:
        """All nodes and the workers on each: `2x4`."""
        return f"{self.nodes}x{self.per_node}"

    @property
    def world_size(self) -> int:
        """How many workers, with all nodes there."""
        return self.nodes * self.per_node


def parse_layout(text: str) -> Layout:
    """The value of `-j`: `4` workers on one node, `2x4` on two, `1:2x4` on one or two."""
    found = _LAYOUT.fullmatch(text.replace(" ", ""))
    if not found:
        raise BadTopology("-j", text, "that is not nodes and workers", _FORMS)
    least, nodes, per_node = (None if part is None else int(part) for part in found.groups())
    layout = Layout(
        nodes=1 if nodes is None else nodes,
        per_node=per_node or 0,
        min_nodes=(1 if nodes is None else nodes) if least is None else least,
    )
    if layout.world_size < 1 or layout.min_nodes < 1:
        raise BadTopology("-j", text, "it takes at least one node and one worker", _FORMS)
    if layout.min_nodes > layout.nodes:
        raise BadTopology("-j", text, f"{layout.min_nodes} is more than {layout.nodes}", _FORMS)
    return layout


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank is: torchrun's LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE."""

    local_rank: int
    local_world_size: int
    node: int
    nodes: int


def seat_of(rank: int, world_size: int, per_node: int) -> Seat:
    """The seat of a rank on nodes that are filled one after the other.

    `per_node` is 0 for one node that has them all; the last node has what is left.
    """
    per_node = per_node or world_size
    node = rank // per_node
    return Seat(
        local_rank=rank % per_node,
        local_world_size=min(per_node, world_size - node * per_node),
        node=node,
        nodes=-(-world_size // per_node),
    )


def gpus_of(seat: Seat, gpus: Sequence[str], per_node: int) -> tuple[str, ...]:
    """What CUDA shows a rank of the machine's GPUs; LOCAL_RANK, modulo their number, is its own.

    One node has all.  Simulated ones have a slice each, as CUDA_VISIBLE_DEVICES, so that
    LOCAL_RANK is a valid index on each; where there are too few GPUs, slices overlap.
    """
    if seat.nodes == 1 or not gpus:
        return tuple(gpus)
    first = seat.node * per_node
    seats = range(first, first + min(seat.local_world_size, len(gpus)))
    return tuple(gpus[number % len(gpus)] for number in seats)
