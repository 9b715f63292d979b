"""A value of the notebook's, of which each rank gets a part."""

from __future__ import annotations

from contextlib import closing

from IPython.core.magic_arguments import argument

from nbdist.errors import UsageError
from nbdist.notebook.cells import bind
from nbdist.notebook.command import Line, command
from nbdist.notebook.options import ranks_option
from nbdist.notebook.transfer import moved
from nbdist.words import did_you_mean
from nbdist.world.scattering import Scatter


@command(
    argument("name", help="a variable of the notebook"),
    argument(
        "--dim", metavar="D", type=int, help="the dimension of a tensor or array to split (0)"
    ),
    ranks_option,
    argument("--as", dest="target", metavar="NAME", help="the parts' name on the ranks"),
)
def dist_scatter(line: Line) -> str:
    """Split a variable into parts, one per rank: `%dist_scatter data`.

    A tensor, an array, a list or tuple, a DataFrame or Series, a Dataset; where the parts
    cannot be equal the first ones have one element more, as with torch.tensor_split.  The
    ranks get it as a variable of that name; the notebook's stays whole.
    """
    name, world = line.options.name, line.world
    if name not in line.pool.shell.user_ns:
        near = did_you_mean(name, line.pool.shell.user_ns)
        raise UsageError(f"`%dist_scatter {name}`: the notebook has no `{name}`.{near}")
    value, target = line.pool.shell.user_ns[name], line.options.target or name
    made = Scatter(world.session, target, value, line.ranks, line.options.dim)
    with closing(made) as scatter:
        moved(scatter.packing(), scatter.bytes, line.display, f"scattering {name}")
        bind(line.pool, world, *scatter.tasks())
        return str(scatter)
