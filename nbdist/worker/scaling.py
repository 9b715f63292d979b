"""A worker's side of `%dist_scale`: its group, its environment, and what its cells find.

On the control thread, while no cell runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from nbdist.wire.messages import RankStart

if TYPE_CHECKING:
    from nbdist.worker.group import Group
    from nbdist.worker.namespace import Namespace


class Scaling:
    """Knows what the worker was told of the world, and changes what follows from that."""

    def __init__(self, orders: RankStart, namespace: Namespace, group: Group | None) -> None:
        self._orders = orders
        self._namespace = namespace
        self._group = group
        self._loop = asyncio.get_event_loop()  # the main thread's, which makes this

    def __repr__(self) -> str:
        return f"<Scaling of rank {self._orders.rank} in a world of {self.world_size}>"

    @property
    def world_size(self) -> int:
        """How many ranks share the group; 0 where it could not be formed."""
        if self._group is not None and not self._group.is_whole:
            return 0
        return self._orders.world.world_size

    def scale(self, request: Mapping[str, Any]) -> None:
        """Join the group of another size, then change what says how many there are.

        Raises RuntimeError or ConnectionResetError when the ranks do not meet.
        """
        before, after = self._orders, _orders_after(self._orders, request)
        if self._group is not None:
            self._group.form_anew(after, request["newcomers"])
        self._orders = after
        change_environment(before.environ, after.environ)
        self._namespace.change("world_size", before.world.world_size, after.world.world_size)
        # Threads are a matter of the thread that starts an operation.  What the loop is
        # given now it does before it takes the next cell.
        self._loop.call_soon_threadsafe(change_threads, before.world.threads, after.world.threads)


def _orders_after(orders: RankStart, request: Mapping[str, Any]) -> RankStart:
    size, generation = request["world_size"], request["generation"]
    return replace(
        orders,
        local_world_size=size,
        world=replace(orders.world, world_size=size, threads=request["threads"]),
        environ=request["environ"],
        generation=generation,
        born=generation,
    )


def change_environment(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Change the variables that differ; those that the user has set meanwhile stay."""
    for name, value in after.items():
        if before.get(name) != value and os.environ.get(name) == before.get(name):
            os.environ[name] = value


def change_threads(before: int, after: int) -> None:
    """The same for torch's threads."""
    if torch.get_num_threads() == before:
        torch.set_num_threads(after)
