"""On which machine each rank of a world is, and which rank it has become.  Pure.

For the second, processes are compared, not what was asked for, which a death or Stop can have
overtaken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nbdist.wire.node_messages import Processes
from nbdist.wire.spec import WorldSpec
from nbdist.words import count, format_ranks, name_ranks


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


@dataclass(frozen=True)
class Renumbering:
    """How many ranks there were, how many there are, and what became of those that stayed."""

    before: int
    after: int
    became: Mapping[int, int]

    @property
    def moved(self) -> Mapping[int, int]:
        """Those that have another number now."""
        return {old: new for old, new in self.became.items() if old != new}

    @property
    def was(self) -> Mapping[int, int]:
        """By the number that each has now, the one before."""
        return {new: old for old, new in self.became.items()}

    @property
    def new(self) -> tuple[int, ...]:
        """The ranks that were not there before."""
        return tuple(rank for rank in range(self.after) if rank not in self.was)

    def then(self, later: Renumbering) -> Renumbering:
        """Make one of two that came one after the other."""
        became = {old: later.became[now] for old, now in self.became.items() if now in later.became}
        return Renumbering(self.before, later.after, became)

    def of(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Say which ranks these are now; those that are gone are left out."""
        return tuple(sorted(self.became[rank] for rank in ranks if rank in self.became))


def compare(before: Processes, after: Processes) -> Renumbering:
    """Find what became of each rank.

    One that is another process in the place of the one before has been replaced: it is the
    same rank, unless that is what another has become.
    """
    now = {process: rank for rank, process in after.items()}
    became = {rank: now[process] for rank, process in before.items() if process in now}
    taken = {*became.values()}
    replaced = before.keys() - became.keys() - taken & after.keys()
    return Renumbering(len(before), len(after), {**became, **{rank: rank for rank in replaced}})


def size_text(size: int, moved: Mapping[int, int]) -> str:
    """Write `now 3 workers · rank 3 is now rank 2`."""
    return " · ".join(filter(None, [f"now {count(size, 'worker')}", moved_text(moved)]))


def moved_text(moved: Mapping[int, int]) -> str:
    """Write `rank 3 is now rank 1`, `ranks 4-7 are now ranks 0-3`; "" for none."""
    old, new = sorted(moved), sorted(moved.values())
    is_in_order = [moved[rank] for rank in old] == new
    if len(moved) < 2 or not is_in_order:
        return ", ".join(f"rank {rank} is now rank {moved[rank]}" for rank in old)
    return f"{name_ranks(old)} are now {name_ranks(new)}"
