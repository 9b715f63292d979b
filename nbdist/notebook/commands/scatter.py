"""A value of the notebook's, of which each rank gets a part."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument

from nbdist.errors import UsageError
from nbdist.notebook.cells import bind
from nbdist.notebook.command import Line, command
from nbdist.notebook.options import names_in, ranks_option
from nbdist.notebook.transfer import moved
from nbdist.words import count, did_you_mean
from nbdist.world.scattering import Scatter

if TYPE_CHECKING:
    from nbdist.world.world import World


@command(
    argument("names", nargs="+", help="variables of the notebook"),
    argument(
        "--dim", metavar="D", type=int, help="the dimension of a tensor or array to split (0)"
    ),
    ranks_option,
    argument(
        "--as", dest="target", metavar="NAME", help="the parts' name on the ranks: x,y for two"
    ),
)
def dist_scatter(line: Line) -> str:
    """Split variables into parts, one per rank: `%dist_scatter data labels`.

    A tensor, an array, a list or tuple, a DataFrame or Series, a Dataset; where the parts
    cannot be equal the first ones have one element more, as with torch.tensor_split.  The
    ranks get it as a variable of that name; the notebook's stays whole.
    """
    names, shell, world = names_in(line.options.names), line.pool.shell, line.world
    targets = targets_of(names, line.options.target)
    if missing := [name for name in names if name not in shell.user_ns]:
        near = did_you_mean(missing[0], shell.user_ns)
        raise UsageError(f"`%dist_scatter`: the notebook has no `{'`, `'.join(missing)}`.{near}")
    values = [shell.user_ns[name] for name in names]
    said = (_scattered(line, world, *each) for each in zip(targets, values, strict=True))
    return f"scattered {'; '.join(said)}"


def targets_of(names: Sequence[str], given: str | None) -> list[str]:
    """Say what the parts of each are called; UsageError where there are fewer or more names."""
    targets = [*names] if given is None else given.replace(" ", "").split(",")
    if len(targets) != len(names):
        raise UsageError(
            f"`%dist_scatter {' '.join(names)}`: {count(len(names), 'variable')} but "
            f"{count(len(targets), 'name')} after `--as`: give one for each."
        )
    return targets


def _scattered(line: Line, world: World, target: str, value: object) -> str:
    with closing(Scatter(world.session, target, value, line.ranks, line.options.dim)) as scatter:
        moved(scatter.packing(), scatter.bytes, line.display, f"scattering {target}")
        bind(line.pool, world, *scatter.tasks())
        return str(scatter)
