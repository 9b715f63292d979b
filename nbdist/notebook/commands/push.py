"""Values from the notebook to the workers, whoever owns their names."""

from __future__ import annotations

from functools import partial

from IPython.core.magic_arguments import argument

from nbdist.errors import UsageError
from nbdist.notebook.cells import attempt_steps, through
from nbdist.notebook.command import Line, command
from nbdist.notebook.options import ranks_option
from nbdist.notebook.shipping.plan import push


@command(argument("names", nargs="+", help="names of the notebook"), ranks_option)
def dist_push(line: Line) -> None:
    """Bind names of the notebook on the workers, also those that the workers have bound."""
    names, pool, world = line.options.names, line.pool, line.world
    missing = [name for name in names if name not in pool.shell.user_ns]
    if missing:
        raise UsageError(f"`%dist_push`: the notebook has no {', '.join(missing)}.")
    pack = partial(push, names, ranks=line.ranks)
    through(attempt_steps(pool, world, world.task(ranks=line.ranks), pack, line.display))
