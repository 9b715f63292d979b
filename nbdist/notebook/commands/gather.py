"""Values from the workers to the notebook, and from there to them."""

from __future__ import annotations

from functools import partial

from IPython.core.magic_arguments import argument

from nbdist.errors import UsageError
from nbdist.notebook.cells import bring, run_attempts
from nbdist.notebook.command import Line, command
from nbdist.notebook.options import ranks_option
from nbdist.notebook.shipping.plan import push


@command(
    argument("name", help="a name on the workers, or an expression such as loss.item()"),
    ranks_option,
    argument("--as", dest="target", metavar="NAME", help="what to call the list here"),
)
def dist_gather(line: Line) -> None:
    """Bring a name home: a list with the value of each rank, tensors on the CPU.

    It is bound in the notebook, under its own name or the one after `--as`.  On the
    workers the name keeps its meaning.
    """
    name, pool = line.options.name, line.pool
    target = line.options.target or name
    if not target.isidentifier():
        raise UsageError(
            f"`%dist_gather {name}`: the list needs a name here, "
            f"such as `%dist_gather {name} --as values`."
        )
    task = line.world.task(ranks=line.ranks, fetch=(name,))
    pool.bind_gathered(name, target, bring(pool, line.world, task))


@command(argument("names", nargs="+", help="names of the notebook"), ranks_option)
def dist_push(line: Line) -> None:
    """Bind names of the notebook on the workers, also those that the workers have bound."""
    names, pool, world = line.options.names, line.pool, line.world
    missing = [name for name in names if name not in pool.shell.user_ns]
    if missing:
        raise UsageError(f"`%dist_push`: the notebook has no {', '.join(missing)}.")
    pack = partial(push, names, ranks=line.ranks)
    run_attempts(pool, world, world.task(ranks=line.ranks), pack, line.display)
