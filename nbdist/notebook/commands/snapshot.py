"""Snapshots of the workers' variables: taken, brought back, listed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument

from nbdist.errors import NbdistError
from nbdist.notebook.command import Line, command
from nbdist.notebook.display import Shown, block
from nbdist.notebook.options import ranks_option
from nbdist.readers import whole_number
from nbdist.words import aligned, count, name_ranks, one_line
from nbdist.world.names import list_names
from nbdist.world.snapshot_store import Snapshot
from nbdist.world.snapshots import Wanted, wanted_to_restore, wanted_to_save

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.notebook.pool import Pool
    from nbdist.world.world import World

EVERY = whole_number("--every", "a number, such as `--every 1`, or 0", least=0)
MOST_SAID = 20
"""Variables that are said by name."""

FROM_RANK = whole_number("--from", "a number, such as `--from 1`, or 0", least=0)


@command(
    argument("variables", nargs="*", help="by default all that cells have bound on the workers"),
    argument("--name", metavar="NAME", help="what to call it, by default as the notebook; the 3"
             " newest of a name are kept"),
    argument("--every", metavar="N", type=EVERY, help="also after every N-th distributed cell that"
             " succeeds; 0 ends that"),
    argument("--remove", metavar="NAME", help="remove the snapshots of this name, or NAME@STAMP"),
)  # fmt: skip
def dist_snapshot(line: Line) -> str:
    """Save variables and RNG states of every rank: `%dist_snapshot model step --name epoch-3`.

    Each rank writes its own.  The snapshot exists once all have written theirs, or not at all;
    `%dist_restore` brings it back, also into new workers or a new notebook kernel.
    """
    options, routine, every = line.options, line.pool.routine, line.options.every
    if options.remove is not None:
        removed = line.pool.snapshot_store.remove(options.remove)
        return f"removed {', '.join(f'`{each.key}`' for each in removed)}"
    wanted = wanted_to_save(_names(options.variables), options.name)
    if every == 0 and wanted == Wanted(None, None):
        routine.every = 0
        return "automatic snapshots are off"
    taken = _take(line.pool, line.world, wanted)
    if every is not None:
        routine.every, routine.wanted, routine.cells = every, wanted, 0
    again = f"again after every {count(routine.every, 'cell')}" if every else ""
    left = "; ".join(f"{name} ({why})" for name, why in taken.left_out.items())
    left = left and f"left out: {left}"
    return " · ".join(filter(None, [_summary(taken), left, again, wanted.hint, str(taken.folder)]))


def take_due(pool: Pool) -> None:
    """Take the snapshot that is due after a cell that succeeded; it never fails the cell."""
    routine = pool.routine
    if not routine.is_due() or pool.world is None:
        return
    try:
        _take(pool, pool.world, routine.wanted)
    except NbdistError as error:
        named = f" `{routine.wanted.name}`" if routine.wanted.name else ""
        text = f"no snapshot{named} after this cell: {one_line(str(error))}"
        pool.display().say(text)


@command(
    argument("variables", nargs="*", help="by default all that it has"),
    argument("--name", metavar="NAME", help="which snapshot, by default this notebook's newest;"
             " NAME@STAMP for an older one"),
    argument("--list", action="store_true", dest="lists", help="show what snapshots there are"),
    argument("--from", "--from-rank", dest="from_rank", metavar="RANK", type=FROM_RANK,
             help="give every rank the variables of this one; the random states stay as they are"),
    ranks_option,
)  # fmt: skip
def dist_restore(line: Line) -> Shown | str:
    """Restore a snapshot: variables and RNG states of every rank, each from its own file.

    `%dist_restore model --name epoch-3` restores one variable of one snapshot.  With `-r` on
    some ranks only; a DDP or FSDP2 module has to come back on all of them.  On another number
    of ranks `--from 0` divides sharded values again.  Nothing is bound where a file is
    damaged.
    """
    options = line.options
    if options.lists:
        return snapshots_there(line.pool)
    world = line.world
    ranks = line.ranks if options.ranks is not None else None
    source = options.from_rank
    line.display.wait_for("restoring …")
    store = world.snapshot_store
    wanted = wanted_to_restore(store, _names(options.variables), options.name)
    done = world.restore(names=wanted.names, name=wanted.name, ranks=ranks, from_rank=source)
    taken = done.snapshot
    of_rank = f" of rank {source}" if source is not None else ""
    said = f"restored {list_names(done.names, MOST_SAID)}{of_rank} on {name_ranks(done.ranks)} "
    of_other = "" if taken.owner == store.owner else ", which this notebook did not save"
    said += f"from `{taken.key}` of {taken.clock}{of_other}"
    return " · ".join(filter(None, [said, wanted.hint]))


def snapshots_there(pool: Pool) -> Shown | str:
    """List all snapshots, the newest first."""
    store = pool.snapshot_store
    rows = [("snapshot", "taken", "ranks", "size", "variables"), *map(_row, store.all())]
    if len(rows) == 1:
        return f"no snapshots in {store.root}"
    return block("\n".join([*aligned(rows), f"in {store.root}"]))


def _take(pool: Pool, world: World, wanted: Wanted) -> Snapshot:
    pool.routine.newest = taken = world.snapshot(names=wanted.names, name=wanted.name)
    return taken


def _summary(taken: Snapshot) -> str:
    ranks = count(len(taken.parts), "rank")
    what = list_names(taken.names, MOST_SAID)
    return f"saved {what} of {ranks} · snapshot `{taken.name}` · {_size(taken.size)}"


def _row(taken: Snapshot) -> tuple[str, str, str, str, str]:
    if taken.distrust:
        return taken.key, "", "", "", f"not to be restored: {taken.distrust}"
    if taken.problem:
        return taken.key, "", "", "", f"damaged: {taken.problem}"
    what = list_names(taken.names)
    return taken.key, taken.clock, str(len(taken.parts)), _size(taken.size), what


def _names(given: Sequence[str]) -> tuple[str, ...]:
    """Split names with spaces or commas between."""
    return tuple(name for words in given for name in words.split(",") if name)


def _size(number: int) -> str:
    """Write `820 kB`, `1.2 GB`."""
    if number < 1000:
        return f"{number} B"
    for power, unit in ((6, "kB"), (9, "MB")):
        if number < 10**power:
            return f"{number / 10 ** (power - 3):.1f} {unit}"
    return f"{number / 10**9:,.1f} GB"
