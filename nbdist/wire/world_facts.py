"""What the agent or head knows about its world, and how the numbers of the world's ranks change.

The process that serves the notebook (the agent of a world on one machine, the head of a world on
several) owns these facts (`nbdist.agent.world_record`).  The notebook keeps a copy of them
(`nbdist.world.rank_table`), and learns a change of ranks' numbers with the new facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nbdist.output.events import Died
from nbdist.wire.spec import WorldSpec
from nbdist.words import name_ranks


@dataclass(frozen=True, slots=True)
class WorldFacts:
    """A world as the agent or head knows it after a start, or after its group was formed again.

    The mappings are by rank.  `pids` is empty while the world has no workers.  `logs` has the paths
    of log folders, "" for a rank without a folder.  `hosts` has the names of the ranks' machines;
    it is empty if no head manages the workers.

    `missing` has sentences for the user: one for each name that nbdist needs and that the workers'
    torch or IPython lacks, and one about machines that have not come.  `rejoin_hint` tells the user
    how lost machines can join again.  `joined` names the machines that have joined since the last
    `Grow`, and on which ranks could be started.

    If `is_whole` is False, the group must be formed again, as after collectives were aborted.
    `problem` says why the last attempt to form the group has failed, or is "".  `dead` has the
    deaths of ranks that no new worker has replaced in a whole group.
    """

    spec: WorldSpec
    pids: Mapping[int, int] = field(default_factory=dict)
    logs: Mapping[int, str] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    rejoin_hint: str = ""
    joined: tuple[str, ...] = ()
    is_whole: bool = True
    problem: str = ""
    dead: Mapping[int, Died] = field(default_factory=dict)


def died_again_text(ranks: Iterable[int]) -> str:
    """Return a text such as `rank 1 died again`: why a group that was formed again is broken."""
    return f"{name_ranks(ranks)} died again"


@dataclass(frozen=True, slots=True)
class Renumbering:
    """A change of the ranks' numbers.

    `before` and `after` are the old and the new world size.  `became` has the new number of each
    old rank that still exists; a rank that was restarted in place counts as the same rank.
    """

    before: int
    after: int
    became: Mapping[int, int]

    @classmethod
    def none(cls, size: int) -> Renumbering:
        """Return the change that leaves each rank of a world of `size` ranks its number."""
        return cls(size, size, {rank: rank for rank in range(size)})

    @property
    def moved(self) -> Mapping[int, int]:
        """The new numbers of the ranks whose number has changed, by their old number."""
        return {old: new for old, new in self.became.items() if old != new}

    @property
    def was(self) -> Mapping[int, int]:
        """The old number of each old rank that still exists, by its new number."""
        return {new: old for old, new in self.became.items()}

    @property
    def new(self) -> tuple[int, ...]:
        """The ranks that were added, by their new numbers."""
        return tuple(rank for rank in range(self.after) if rank not in self.was)

    def then(self, later: Renumbering) -> Renumbering:
        """Return one change that has the same effect as this change and then `later`."""
        became = {old: later.became[now] for old, now in self.became.items() if now in later.became}
        return Renumbering(self.before, later.after, became)

    def of(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the new numbers of old ranks, sorted, without the ranks that are gone."""
        return tuple(sorted(self.became[rank] for rank in ranks if rank in self.became))
