"""What each worker is and does, and whose the names are."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument

from nbdist.notebook.command import Line, command
from nbdist.notebook.commands.stack import stacks_of
from nbdist.notebook.moving_picture import MovingPicture
from nbdist.notebook.options import ranks_option
from nbdist.notebook.tables import Shown, below, block, table
from nbdist.readers import number_of_seconds
from nbdist.topology import parse_ranks
from nbdist.wire.messages import GetRefused, GetStatus
from nbdist.world.status_table import rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.notebook.pool import Pool

SHORTEST = 0.5
"""Seconds between two looks: to ask often is not to cost the ranks their time."""

STATE_COLOURS = {"idle": "#2aa44f", "busy": "#1f77e0", "dead": "#d03030", "starting": "#b8860b"}


@command(
    argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also show who owns each variable and refused connections",
    ),
    argument(
        *("-f", "--follow"),
        metavar="SECONDS",
        type=number_of_seconds("--follow"),
        help="refresh every SECONDS, until Ctrl-C or Stop",
    ),
    argument("--stack", action="store_true", help="show the Python stack of each rank instead"),
    ranks_option,
    looks=True,
)
def dist_status(line: Line) -> None:
    """Show each rank's state, process, device, memory, line of the cell, last collective.

    Answers within 0.2 s, also while a cell runs.  `--stack` shows where ranks are and how they
    came there, while they compute, wait in a collective or hold the GIL in C code.
    """
    pools = [pool for pool in line.pools if pool.has_workers] or [line.pool]
    every = line.options.follow
    if every is None:
        for pool in pools:
            _shown_of(line, pool).on(pool.display())
        return
    picture = MovingPicture(line.display)
    with suppress(KeyboardInterrupt):
        while True:
            picture.show(below(_shown_of(line, pool) for pool in pools))
            time.sleep(max(every, SHORTEST))


def _shown_of(line: Line, pool: Pool) -> Shown:
    return stacks_of(line, pool) if line.options.stack else _status_of(line, pool)


def _status_of(line: Line, pool: Pool) -> Shown:
    """Draw the table of one pool."""
    workers = line.look(pool, GetStatus())
    if line.options.ranks is not None:
        ranks = parse_ranks(line.options.ranks, len(workers))
        workers = tuple(each for each in workers if each.rank in ranks)
    shown = table(pool.headline, rows(workers), STATE_COLOURS)
    if not line.options.verbose:
        return shown
    owners = pool.world.session.names.owners() if pool.world is not None else {}
    said = owners_text(owners)
    if pool.world is not None and pool.world.session.is_elsewhere:
        refused = line.look(pool, GetRefused()) or "none"
        said += f"\nrefused connections without this world's keys: {refused}"
    return below([shown, block(said)])


def owners_text(owners: Mapping[str, tuple[str, frozenset[int]]]) -> str:
    """List names, a line for each owner."""
    lines = []
    for owner, words in (("workers", "made on the workers"), ("notebook", "sent by the notebook")):
        names = sorted(name for name, (whose, _) in owners.items() if whose == owner)
        lines.append(f"{words}: {', '.join(names) or 'none'}")
    return "\n".join(lines)
