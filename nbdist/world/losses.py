"""Which ranks of a world have died, and what those in their place lack; pure.

What was imported is not listed: it is imported again, and would hide what is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nbdist.errors import name_ranks
from nbdist.output.events import Died, Done, Output

MOST_NAMES = 6
"""Names that a message lists before it only counts the others."""


class Losses:
    """Takes in what ranks report, and says what is gone."""

    def __init__(self) -> None:
        self.dead: dict[int, Died] = {}
        self._replaced: dict[int, Died | None] = {}
        self._bound: dict[int, set[str]] = {}
        self._lacks: dict[int, set[str]] = {}
        self._imports: dict[int, dict[str, str]] = {}
        self._lost_imports: dict[int, dict[str, str]] = {}
        self._size_before: int | None = None

    def __repr__(self) -> str:
        return f"<Losses dead {sorted(self.dead)} lacking {self._lacks}>"

    def take(self, rank: int, output: Output) -> None:
        """Take in an output: a death, or the names that a cell has bound."""
        match output:
            case Died():
                self.dead[rank] = output
            case Done() as done:
                self._bound.setdefault(rank, set()).update(done.made)
                self._imports.setdefault(rank, {}).update(done.imported)
                self._lacks.get(rank, set()).difference_update(done.bound)

    def bound(self, rank: int) -> frozenset[str]:
        """The names that cells have bound on this rank, and have not been lost since."""
        return frozenset(self._bound.get(rank, ()))

    def replace(self, bound_at_death: Iterable[str] = ()) -> tuple[int, ...]:
        """The dead have been replaced; which they were.

        `bound_at_death` are names that the cell in which they died bound on the others.
        """
        ranks = tuple(self.dead)
        for rank in ranks:
            had = self._bound.pop(rank, set()) | self._lacks.get(rank, set())
            self._lacks[rank] = had | set(bound_at_death)
            self._lost_imports.setdefault(rank, {}).update(self._imports.pop(rank, {}))
        self._replaced.update(self.dead)
        self.dead = {}
        return ranks

    def replace_all(self, size: int, dead: Mapping[int, Died]) -> None:
        """All ranks have been started anew: these had died, the others were ended."""
        self._replaced.update({rank: dead.get(rank) for rank in range(size)})

    def scale(self, before: int, after: int) -> None:
        """There are more ranks, which lack what any other has; or the last ones have ended."""
        if self._size_before is None:
            self._size_before = before
        everything = set[str]().union(*self._bound.values(), *self._lacks.values())
        self._lacks.update({rank: set(everything) for rank in range(before, after)})
        imports = dict(item for each in self._imports.values() for item in each.items())
        self._lost_imports.update({rank: dict(imports) for rank in range(before, after)})
        self.end_from(after)
        self._replaced.update(dict.fromkeys(range(min(before, after), max(before, after))))

    def end_from(self, size: int) -> None:
        """There is no rank from this one on."""
        for known in (self.dead, self._bound, self._lacks, self._imports, self._lost_imports):
            for rank in [rank for rank in known if rank >= size]:
                known.pop(rank)

    def take_lost_imports(self, ranks: Iterable[int]) -> dict[int, dict[str, str]]:
        """What cells had imported on these ranks before they were replaced, and from where.

        Once: they are imported again with the next cell.
        """
        found = {rank: self._lost_imports.pop(rank, {}) for rank in ranks}
        return {rank: imports for rank, imports in found.items() if imports}

    def take_size_before(self) -> int | None:
        """How many ranks there were before `scale`; None when that has been told."""
        before, self._size_before = self._size_before, None
        return before

    def take_replaced(self) -> dict[int, Died | None]:
        """The ranks replaced since this was last asked, and how they ended (None: by nbdist)."""
        replaced, self._replaced = self._replaced, {}
        return replaced

    def lacking(self, ranks: Iterable[int]) -> str:
        """What these ranks lack since they were replaced: `model, x and 3 more`; "" for nothing."""
        missing: set[str] = set().union(*(self._lacks.get(rank, set()) for rank in ranks))
        return list_names(missing)


def list_names(names: Iterable[str]) -> str:
    """`a, b and c`, or `a, b, c, d, e, f and 3 more`."""
    ordered = sorted(names)
    shown, more = ordered[:MOST_NAMES], len(ordered) - MOST_NAMES
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def replaced_text(ranks: Iterable[int], lacking: str) -> str:
    """`Rank 2 was replaced and has lost its variables (model, x)`."""
    who = name_ranks(ranks)
    lost = "were replaced and have lost their variables"
    if not who.startswith("ranks"):
        lost = "was replaced and has lost its variables"
    return f"{who} {lost}" + (f" ({lacking})" if lacking else "")
