"""What a notebook does about snapshots by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.world.names import list_names
from nbdist.world.snapshots import Wanted

if TYPE_CHECKING:
    from nbdist.world.snapshot_store import Snapshot


@dataclass
class Routine:
    """What `--every` has set up, and the newest snapshot of this notebook's session."""

    every: int = 0
    wanted: Wanted = field(default_factory=lambda: Wanted(None, None))
    cells: int = 0
    newest: Snapshot | None = field(default=None, repr=False)

    def is_due(self) -> bool:
        """Count a cell that succeeded; whether a snapshot is to be taken after it."""
        self.cells += bool(self.every)
        return bool(self.every) and self.cells % self.every == 0

    @property
    def hint(self) -> str:
        """How to bring back what was lost; "" where there is nothing to bring."""
        newest = self.newest
        if newest is None or not newest.folder.exists():
            return ""
        what = list_names(newest.names)
        return f"`%dist_restore --name {newest.name}` restores {what} of {newest.clock}"
