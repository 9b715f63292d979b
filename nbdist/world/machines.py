"""On which machine each rank of a world is, and how that is said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nbdist.wire.start import WorldSpec
from nbdist.words import format_ranks, name_ranks


@dataclass(frozen=True, slots=True)
class Machines:
    """The machine of each rank, and its number there, from 0 on."""

    by_rank: Mapping[int, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, hosts: Mapping[int, str], spec: WorldSpec) -> Machines:
        """Take them from the seats of a world on several machines; `hosts` names these."""
        return cls({rank: (host, spec.seat(rank).local_rank) for rank, host in hosts.items()})

    @classmethod
    def one(cls, host: str, size: int) -> Machines:
        """Have all ranks on one machine, whatever nodes are simulated there."""
        return cls({rank: (host, rank) for rank in range(size)})

    @property
    def names(self) -> tuple[str, ...]:
        """All machines, in the order of their first ranks."""
        return tuple(dict.fromkeys(self.by_rank[rank][0] for rank in sorted(self.by_rank)))

    def name(self, rank: int) -> str:
        """Name the machine of a rank; "" for one that is not known."""
        return self.by_rank.get(rank, ("", 0))[0]

    def who(self, ranks: Iterable[int]) -> str:
        """Write `ranks 0-1 on hosta, 2 on hostb`; on one machine `ranks 0-2`."""
        asked = tuple(ranks)
        if len(self.names) < 2:
            return name_ranks(asked)
        on: dict[str, list[int]] = {}
        for rank in sorted(set(asked)):
            on.setdefault(self.name(rank), []).append(rank)
        parts = [f"{format_ranks(some)} on {host}" for host, some in on.items()]
        return f"{'ranks' if len(set(asked)) > 1 else 'rank'} {', '.join(parts)}"

    def __str__(self) -> str:
        """Write `hosta`, `hosta, hostb and hostc`; of many how many others there are."""
        first, *others = self.names or ("",)
        if len(others) > MOST_NAMED:
            return f"{first} and {len(others)} other machines"
        return ", ".join([first, *others[:-1]]) + (f" and {others[-1]}" if others else "")


MOST_NAMED = 3
"""Machines besides the first that a line has room for."""
