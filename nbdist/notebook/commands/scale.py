"""More workers or fewer."""

from __future__ import annotations

from IPython.core.magic_arguments import argument

from nbdist.notebook.command import Line, command
from nbdist.topology import parse_size
from nbdist.words import count
from nbdist.world.recovery import scaled_text


@command(argument("size", help="how many workers: 4; or how many more or fewer: +2, -1"))
def dist_scale(line: Line) -> str:
    """Have more workers, or fewer, while the others keep their variables and ranks.

    DDP models go on with as many ranks as there are then; FSDP2 models, meshes and
    subgroups have to be made anew.  New ranks run the `--setup` cells.
    """
    world, size = line.world, line.options.size
    before = world.size
    line.display.wait_for(f"world {before} -> {parse_size(size, before)} …")
    try:
        world.scale(size)
    finally:
        world.session.take_replaced()
    if world.size == before:
        return f"there are {count(before, 'worker')} already"
    if world.session.warning:
        line.display.note(world.session.warning)
    return scaled_text(world.session, before)
