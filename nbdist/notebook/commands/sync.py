"""Variables from rank to rank."""

from __future__ import annotations

from IPython.core.magic_arguments import argument

from nbdist.errors import UsageError
from nbdist.notebook.command import Line, command
from nbdist.notebook.options import names_in, ranks_option
from nbdist.words import name_ranks


@command(
    argument("names", nargs="+", help="variables of the workers, copied together"),
    argument(
        "--from", "--from-rank", dest="source", metavar="RANK", default="0", help="copy from (0)"
    ),
    ranks_option,
)
def dist_sync(line: Line) -> str:
    """Copy variables from one rank to ranks that do not have them: `%dist_sync model opt --from 0`.

    With `-r`, copy to these ranks even if they have the variables.
    """
    names, world = names_in(line.options.names), line.world
    sources = line.ranks_of(line.options.source)
    if len(sources) != 1:
        raise UsageError(
            f"`%dist_sync --from {line.options.source}`: it takes one rank to copy from."
        )
    source = sources[0]
    to = None if line.options.ranks is None else line.ranks
    listed = ", ".join(names)
    line.display.wait_for(f"copying {listed} …")
    try:
        got = world.sync(names, source, to)
    finally:
        world.session.take_replaced()  # as its error says
    if got:
        return f"copied {listed} from rank {source} to {name_ranks(got)}"
    return f"all ranks have {listed} already; `-r all` copies to all of them"
