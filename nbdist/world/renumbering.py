"""Which rank is which, once a world has lost some of them, or has got others.

Pure: processes are compared, not what was asked for, which a death or Stop can have overtaken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.wire.membership import Processes
from nbdist.words import count, name_ranks


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
