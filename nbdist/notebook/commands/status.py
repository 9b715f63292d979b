"""What each worker is and does, and whose the names are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument

from nbdist.notebook.command import Line, command
from nbdist.notebook.tables import Shown, below, block, table
from nbdist.world.status_table import rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.notebook.pool import Pool

STATE_COLOURS = {"idle": "#2aa44f", "busy": "#1f77e0", "dead": "#d03030", "starting": "#b8860b"}


@command(argument("-v", "--verbose", action="store_true", help="also who owns which name"))
def dist_status(line: Line) -> None:
    """Show each rank's state, process, device, memory, line of the cell, last collective.

    Answers within 0.2 s whatever they do.
    """
    pools = [pool for pool in line.pools if pool.has_workers] or [line.pool]
    for pool in pools:
        status_of(pool, with_owners=line.options.verbose).on(pool.display())


def status_of(pool: Pool, *, with_owners: bool) -> Shown:
    """Draw the table of one pool."""
    workers = pool.world.status() if pool.world is not None else ()
    shown = table(pool.headline, rows(workers), STATE_COLOURS)
    if not with_owners:
        return shown
    owners = pool.world.session.names.owners() if pool.world is not None else {}
    return below([shown, block(owners_text(owners))])


def owners_text(owners: Mapping[str, tuple[str, frozenset[int]]]) -> str:
    """List names, a line for each owner."""
    lines = []
    for owner, words in (("workers", "the workers' own"), ("notebook", "the notebook's, shipped")):
        names = sorted(name for name, (whose, _) in owners.items() if whose == owner)
        lines.append(f"{words}: {', '.join(names) or 'none'}")
    return "\n".join(lines)
