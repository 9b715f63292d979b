"""What a world asks of each node of a Ray cluster: CPUs, GPUs and memory for its workers; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbdist import topology
from nbdist.wire.wanted import Wanted
from nbdist.words import count

CPU, GPU, MEMORY = "CPU", "GPU", "memory"
"""Ray's names of them; memory is in bytes."""

MOST_TOLD = 6
"""Nodes whose resources are told where there is not enough."""

_BYTES = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
"""What a number in `--memory` counts."""

_DIGITS = re.compile(r"([0-9]+)")

Bundle = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of the cluster, with all that it has, used by others or not."""

    name: str
    resources: Bundle

    def fits(self, bundle: Bundle) -> bool:
        """Say whether it would have room for this, if nobody else used it."""
        return all(self.resources.get(name, 0) >= much for name, much in bundle.items())


class NoRoom(ValueError):
    """The cluster has not what is asked for; the message names what, and what there is."""


def bundles_of(wanted: Wanted, nodes: Sequence[RayNode]) -> list[Bundle]:
    """Say what to ask of each of as many nodes as are wanted and there are; raises NoRoom."""
    one = _for_worker(wanted, nodes)
    if isinstance(wanted.per_node, int):
        bundle = _times(one, wanted.per_node)
        fitting = sum(node.fits(bundle) for node in nodes)
        if fitting < wanted.min_nodes:
            asked = f"{count(wanted.min_nodes, 'node')} with {word_bundle(bundle)} each"
            raise NoRoom(f"{asked}: {_word_nodes(nodes)}")
        return [bundle] * min(fitting, wanted.max_nodes or fitting)
    rooms = sorted((_room(node, one, wanted) for node in nodes), reverse=True)
    shares = [room for room in rooms if room]
    if wanted.workers is not None:
        shares = _filled(shares, wanted.workers)
    if not shares:
        asked = count(wanted.workers or 1, "worker")
        raise NoRoom(f"{asked} with {word_bundle(one)} each: {_word_nodes(nodes)}")
    return [_times(one, share) for share in shares]


def word_bundle(bundle: Bundle) -> str:
    """Word what is asked of a node, or what it has: `2 CPU, 1 GPU, 3.0 GiB of memory`."""
    words = [f"{bundle[name]:g} {name}" for name in (CPU, GPU) if name in bundle]
    memory = bundle.get(MEMORY)
    words += [f"{memory / (1 << 30):.1f} GiB of memory"] if memory else []
    return ", ".join(words) or "no CPU"


def _for_worker(wanted: Wanted, nodes: Sequence[RayNode]) -> Bundle:
    has_gpus = any(node.resources.get(GPU) for node in nodes) and wanted.backend != "gloo"
    return {
        CPU: wanted.cpus or 1,
        **({GPU: 1} if has_gpus or wanted.per_node == "gpu" else {}),
        **({MEMORY: _bytes_of(wanted.memory)} if wanted.memory else {}),
    }


def _bytes_of(memory: str) -> int:
    return int(memory[:-1]) * _BYTES[memory[-1]]


def _room(node: RayNode, one: Bundle, wanted: Wanted) -> int:
    """Say how many workers a node is asked to have where that was left open."""
    room = int(min(node.resources.get(name, 0) // much for name, much in one.items()))
    if GPU in one or wanted.per_node == "cpu" or not room:
        return room
    return min(room, topology.AUTO_LIMIT)


def _filled(rooms: Sequence[int], workers: int) -> list[int]:
    """Give each its share, one after the other; nothing where there is not enough for all."""
    shares = []
    for room in rooms:
        if workers > 0:
            shares.append(min(room, workers))
            workers -= room
    return shares if workers <= 0 else []


def _times(one: Bundle, number: int) -> Bundle:
    return {name: much * number for name, much in one.items()}


def _word_nodes(nodes: Sequence[RayNode]) -> str:
    told = "; ".join(f"{node.name} has {word_bundle(node.resources)}" for node in nodes[:MOST_TOLD])
    more = f"; and {len(nodes) - MOST_TOLD} more" if len(nodes) > MOST_TOLD else ""
    return f"the cluster has {count(len(nodes), 'node')}: {told}{more}"


def distinct(names: Sequence[str], addresses: Sequence[str]) -> list[str]:
    """Name nodes so that no two have one name: with the address, and then the number, besides."""
    with_address = [
        name if names.count(name) == 1 else f"{name}-{address}"
        for name, address in zip(names, addresses, strict=True)
    ]
    return [
        name if with_address.count(name) == 1 else f"{name}-{number}"
        for number, name in enumerate(with_address)
    ]


def in_order(names: Sequence[str]) -> list[int]:
    """List the places of names in the order that a person expects: node2 before node10."""
    parts = [
        [int(part) if part.isdigit() else part for part in _DIGITS.split(name)] for name in names
    ]
    return sorted(range(len(names)), key=parts.__getitem__)
