"""What who forms the world's group, and the part of each machine, say to one another.

`nbdist.agent.forming` asks, `nbdist.agent.worker_group` answers: in one process where all workers
are on one machine, else over a link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.seats import Seats
from nbdist.wire.control import HeldGroups
from nbdist.wire.spec import WorldSpec

Groups = Mapping[str, tuple[int, ...]]
"""The ranks of each group besides the world's own, by its name."""

Processes = Mapping[int, tuple[int, int]]
"""By rank: the number of its node, and of its process there."""


@dataclass(frozen=True, slots=True)
class Held:
    """Which ranks of a part live, and the groups that each holds; None where it did not say."""

    ranks: Mapping[int, HeldGroups | None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How the next generation of the group is formed: the same for all parts.

    `missing` are the ranks that are started anew, of all parts.  `groups` are made whole
    together with the world's own; None where that one is of another size, since `sized_in`,
    and none made from it can stay.  `attempt` counts the starts of the world.
    """

    spec: WorldSpec
    attempt: int
    generation: int
    sized_in: int
    missing: tuple[int, ...]
    groups: Groups | None


@dataclass(frozen=True, slots=True)
class Formed:
    """What a part has after a plan: process, log folder and life of each of its ranks.

    `problem` says what kept them from forming the group, "" for nothing.
    """

    pids: Mapping[int, int]
    logs: Mapping[int, str]
    alive: tuple[int, ...]
    problem: str = ""


def processes(pids: Mapping[int, int], seats: Seats) -> Processes:
    """Say which process each rank is: on several machines two can have one number."""
    return {rank: (seats[rank].node if seats else 0, pid) for rank, pid in pids.items()}
