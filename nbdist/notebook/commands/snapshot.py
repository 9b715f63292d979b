"""Snapshots of the workers' variables: taken, brought back, listed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument

from nbdist.errors import NbdistError, UsageError
from nbdist.notebook.command import Line, command
from nbdist.notebook.options import ranks_option
from nbdist.notebook.tables import Shown, block
from nbdist.readers import whole_number
from nbdist.words import aligned, count, name_ranks, one_line
from nbdist.world.names import list_names
from nbdist.world.snapshot_store import Snapshot, SnapshotStore, root_folder
from nbdist.world.spec import default_log_dir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.notebook.pool import Pool
    from nbdist.world.world import World

EVERY = whole_number("--every", "a number, such as `--every 1`, or 0", least=0)
FROM_RANK = whole_number("--from-rank", "a number, such as `--from-rank 1`, or 0", least=0)


@command(
    argument("name", nargs="?", help="of the snapshot; the 3 newest of a name are kept"),
    argument("variables", nargs="*", help="by default all that cells have bound on the workers"),
    argument("--every", metavar="N", type=EVERY, help="also after every N-th distributed cell that"
             " succeeds; 0 ends that"),
)  # fmt: skip
def dist_snapshot(line: Line) -> str:
    """Write variables of every rank to the disk, with the random states.

    Each rank writes its own: `%dist_snapshot epoch-3 model optimizer step`.  It is there
    when all have, or not at all; `%dist_restore epoch-3` brings it back, also into new
    workers or a new notebook kernel.
    """
    name, routine, every = line.options.name, line.pool.routine, line.options.every
    if every == 0 and name is None:
        routine.every = 0
        return "no more snapshots by themselves"
    if name is None:
        raise UsageError("`%dist_snapshot` needs a name: `%dist_snapshot epoch-3 model step`.")
    names = _names(line.options.variables)
    taken = _take(line.pool, line.world, name, names)
    if every is not None:
        routine.every, routine.name, routine.names, routine.cells = every, name, names, 0
    again = f"again after every {count(routine.every, 'cell')}" if every else ""
    left = "; ".join(f"{name} ({why})" for name, why in taken.left_out.items())
    parts = [_summary(taken), left and f"left out: {left}", again, str(taken.folder)]
    return " · ".join(filter(None, parts))


def take_due(pool: Pool) -> None:
    """Take the snapshot that is due after a cell that succeeded; it never fails the cell."""
    routine = pool.routine
    if not routine.is_due() or pool.world is None:
        return
    try:
        _take(pool, pool.world, routine.name, routine.names)
    except NbdistError as error:
        text = f"no snapshot `{routine.name}` after this cell: {one_line(str(error))}"
        pool.display().say(text)


@command(
    argument("name", nargs="?", help="by default the newest of all; NAME@STAMP for an older one"),
    argument("variables", nargs="*", help="by default all that it has"),
    argument("--list", action="store_true", dest="lists", help="show what snapshots there are"),
    argument("--from-rank", metavar="RANK", type=FROM_RANK, help="give every rank the variables of"
             " this one; the random states stay as they are"),
    ranks_option,
)  # fmt: skip
def dist_restore(line: Line) -> Shown | str:
    """Bind what a snapshot has on every rank, each from its own file, with the random states.

    With `-r` on some ranks only; a DDP or FSDP2 module has to come back on all of them.  On
    another number of ranks `--from-rank 0` shards anew what is sharded.  Nothing is bound
    where a file is damaged.
    """
    options = line.options
    if options.lists:
        return snapshots_there(line.pool)
    world = line.world
    ranks = line.ranks if options.ranks is not None else None
    source = options.from_rank
    line.display.wait_for("restoring …")
    done = world.restore(options.name, _names(options.variables), ranks=ranks, from_rank=source)
    taken = done.snapshot
    of_rank = f" of rank {source}" if source is not None else ""
    return (
        f"{name_ranks(done.ranks)}: {list_names(done.names)}{of_rank} "
        f"restored from `{taken.key}` of {taken.clock}"
    )


def snapshots_there(pool: Pool) -> Shown | str:
    """List all snapshots, the newest first."""
    store = (
        pool.world.snapshot_store if pool.world else SnapshotStore(root_folder(default_log_dir()))
    )
    rows = [("snapshot", "taken", "ranks", "size", "variables"), *map(_row, store.all())]
    if len(rows) == 1:
        return f"no snapshots in {store.root}"
    return block("\n".join([*aligned(rows), f"in {store.root}"]))


def _take(pool: Pool, world: World, name: str, names: Sequence[str] | None) -> Snapshot:
    pool.routine.newest = taken = world.snapshot(name, names)
    return taken


def _summary(taken: Snapshot) -> str:
    ranks = count(len(taken.parts), "rank")
    return f"snapshot `{taken.name}` · {ranks} · {list_names(taken.names)} · {_size(taken.size)}"


def _row(taken: Snapshot) -> tuple[str, str, str, str, str]:
    if taken.distrust:
        return taken.key, "", "", "", f"not to be restored: {taken.distrust}"
    if taken.problem:
        return taken.key, "", "", "", f"damaged: {taken.problem}"
    what = list_names(taken.names)
    return taken.key, taken.clock, str(len(taken.parts)), _size(taken.size), what


def _names(given: Sequence[str]) -> tuple[str, ...] | None:
    """Split names with spaces or commas between; None for none."""
    return tuple(name for words in given for name in words.split(",") if name) or None


def _size(number: int) -> str:
    """Write `820 kB`, `1.2 GB`."""
    if number < 1000:
        return f"{number} B"
    for power, unit in ((6, "kB"), (9, "MB")):
        if number < 10**power:
            return f"{number / 10 ** (power - 3):.1f} {unit}"
    return f"{number / 10**9:,.1f} GB"
