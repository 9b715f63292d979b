"""More workers or fewer, or some of them."""

from __future__ import annotations

from IPython.core.magic_arguments import argument

from nbdist.errors import UsageError
from nbdist.notebook.command import Line, command
from nbdist.topology import parse_size
from nbdist.words import count
from nbdist.world.recovery import scaled_text


@command(
    argument("size", nargs="?", metavar="N", help="number of workers: 4; or more or fewer: +2, -1"),
    argument("-n", dest="number", metavar="N", help="the same: -n 4"),
    argument("-r", "--ranks", help="or the ranks to keep: 0,2-3"),
)
def dist_scale(line: Line) -> str:
    """Change the number of workers; the remaining ones keep their variables.

    They keep their ranks too, except after a rank removed with `-r`.
    DDP models continue with the new number of ranks; recreate FSDP2 models, meshes and
    subgroups.  New ranks run the `--setup` cells.
    """
    world, size, ranks = line.world, line.options.size, line.options.ranks
    if size is not None and line.options.number is not None:
        raise UsageError("`%dist_scale`: give the number of workers once.")
    size = line.options.number if size is None else size
    before = world.size
    if size is not None and ranks is not None:
        raise UsageError("`%dist_scale`: give a number of workers or `-r`, not both.")
    keep = None if ranks is None else line.ranks
    if size is not None or keep:
        after = len(keep) if keep else parse_size(size, before)
        line.display.wait_for(f"scaling from {before} to {count(after, 'worker')} …")
    try:
        world.scale(size, ranks=keep)
    finally:
        world.session.take_replaced()
    if world.size == before:
        return f"already {count(before, 'worker')}"
    if world.session.warning:
        line.display.note(world.session.warning)
    line.pool.shown_size = world.size
    return scaled_text(world.session)
