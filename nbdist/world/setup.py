"""Cells marked `--setup`: run again in every new worker, with the names that came along."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbdist.errors import NbdistError, one_line
from nbdist.wire.memory import Segment
from nbdist.wire.messages import Cell
from nbdist.world.states import State

if TYPE_CHECKING:
    from nbdist.world.world import World


@dataclass(frozen=True)
class SetupCell:
    """A cell to run again; the segment holds its names, and is kept open for that."""

    cell: Cell
    segment: Segment | None


class Setup:
    """The set-up cells of a world, in the order in which they first ran."""

    def __init__(self) -> None:
        self.problem = ""
        self._cells: dict[str, SetupCell] = {}
        self._is_replaying = False

    def __repr__(self) -> str:
        return f"<Setup of {len(self._cells)} cells>"

    def keep(self, key: str, cell: Cell, segment: Segment | None) -> None:
        """Run this cell too from now on; in the place of the one with the same key."""
        old = self._cells.get(key)
        self._cells[key] = SetupCell(cell, segment)
        if old is not None and old.segment is not None:
            old.segment.close()

    def forget(self) -> None:
        """Run none any more."""
        for kept in self._cells.values():
            if kept.segment is not None:
                kept.segment.close()
        self._cells.clear()

    def scale(self, before: int, after: int) -> None:
        """Cells that ran on all ranks of a world run on all of them when there are more."""
        everybody = tuple(range(before))
        for key, kept in self._cells.items():
            if kept.cell.ranks == everybody:
                cell = replace(kept.cell, ranks=tuple(range(after)))
                self._cells[key] = replace(kept, cell=cell)

    def replay(self, world: World, ranks: Collection[int]) -> NbdistError | None:
        """Run all of them on those of the ranks that ran them; the first error ends it.

        Stop ends it too, with the ranks interrupted.  A set-up cell that ends its worker is
        not run again in the one after it.
        """
        if self._is_replaying or world.state is not State.READY:
            return None
        self._is_replaying, running, self.problem = True, world.running, ""
        try:
            for kept in self._cells.values():
                on = tuple(rank for rank in kept.cell.ranks if rank in ranks)
                if on and (error := _run(world, replace(kept.cell, id=uuid.uuid4().hex, ranks=on))):
                    self.problem = f" A `--setup` cell failed there: {one_line(str(error))}"
                    return error
        finally:
            self._is_replaying, world.running = False, running
        return None


def _run(world: World, cell: Cell) -> NbdistError | None:
    running = world.send(cell)
    running.wait()
    return running.error()
