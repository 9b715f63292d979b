"""Names of groups that are the same on all ranks, whatever each of them has made before.

The members of a new group meet in the store under its name.  torch counts the groups that
a rank has made; but one rank raises before a `new_group` that others go through, and from
then on no two ranks mean the same group by a name, or find what another group of that
name has left in the store.  So the count starts anew with each cell, whose id all ranks
have: a name is never used twice, and a rank that has missed something is in step again
with the next cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nbdist.worker.compat import torch as seam

CELL_LENGTH = 12
"""Characters of a cell's id: enough for all cells that a world ever runs."""


class GroupNames:
    """Gives torch's `new_group` its names."""

    def __init__(self) -> None:
        self._cell = ""
        self._made: Counter[str] = Counter()
        seam.name_groups(self._name)

    def __repr__(self) -> str:
        return f"<GroupNames of cell {self._cell}: {sum(self._made.values())} made>"

    def begin_cell(self, cell_id: str) -> None:
        """All that is made from now on is named after this cell."""
        self._cell = cell_id[:CELL_LENGTH]
        self._made.clear()

    def _name(self, torchs: str, ranks: Sequence[int], use_hashed_name: bool) -> str:  # noqa: FBT001
        if not self._cell:
            return torchs
        # A hashed name is one that its members alone agree on: others make no such group.
        of = f"{self._cell}.{'_'.join(map(str, ranks))}" if use_hashed_name else self._cell
        self._made[of] += 1
        return f"{of}.{self._made[of]}"
