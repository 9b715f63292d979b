"""Variables from the notebook to the workers, also those that the workers own."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from IPython.core.magic_arguments import argument

from nbdist.errors import UsageError
from nbdist.notebook.cells import bind, settled
from nbdist.notebook.command import Line, command
from nbdist.notebook.options import names_in, ranks_option
from nbdist.notebook.shipping.plan import push
from nbdist.notebook.transfer import packed
from nbdist.wire.task import Call
from nbdist.words import did_you_mean


@command(argument("names", nargs="+", help="variables of the notebook"), ranks_option)
def dist_push(line: Line) -> None:
    """Send notebook variables to the workers, replacing theirs."""
    names, pool, world = names_in(line.options.names), line.pool, line.world
    missing = [name for name in names if name not in pool.shell.user_ns]
    if missing:
        near = did_you_mean(missing[0], line.pool.shell.user_ns)
        raise UsageError(f"`%dist_push`: the notebook has no {', '.join(missing)}.{near}")
    pack = partial(push, names, ranks=line.ranks)
    packing = packed(settled(pool, world, world.session.names, pack), line.display)
    assert packing is not None
    with packing.segment or nullcontext():
        take = world.task(Call("push.take", {"packed": packing.payload}), ranks=line.ranks)
        bind(pool, world, take, Call("push.bind"), line.display, packing.records)
